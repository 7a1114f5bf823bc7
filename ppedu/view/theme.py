"""Colors of matplotlib pictures in notebooks, whose pages are light or dark: no background, and gray text.

`%load_ext ppedu` sets them for the learner's own pictures, too. What a learner has set stays as it is.
"""

from __future__ import annotations

from typing import Any

from matplotlib import rcParams, rcParamsDefault

GREY = "#7a7a7a"  # about 4.3 to 1 on white and on JupyterLab's dark theme
NOTEBOOK: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def use_notebook_colors() -> None:
    """Set the colors for pictures in a notebook, except those that differ from matplotlib's defaults."""
    rcParams.update(still_colors())


def without_white_behind(message: dict[str, Any]) -> dict[str, Any]:
    """Return a kernel's message without the request for a white background, which matplotlib_inline adds for gray text.

    A request for colors that the learner has set stays.
    """
    if rcParams["xtick.color"] == GREY:
        message["content"].get("metadata", {}).pop("needs_background", None)
    return message


def saved_colors() -> dict[str, Any]:
    """Return rcParams for a saved file: matplotlib's defaults in place of the colors for notebooks."""
    return {key: rcParamsDefault[key] for key, color in NOTEBOOK.items() if rcParams[key] == color}


def still_colors() -> dict[str, Any]:
    """Return rcParams for a picture in a notebook, with the learner's own colors where they are set."""
    return {key: color for key, color in NOTEBOOK.items() if rcParams[key] == rcParamsDefault[key]}
