"""The causes of a bubble as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(causes: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw a bar for each cause, the longest on top, with its share of all ranks' time.

    ax: Axes to draw into; by default those of a new figure.
    """
    from matplotlib import pyplot

    if ax is None:
        _, ax = pyplot.subplots(figsize=(7, 0.5 + 0.32 * len(causes)), layout="constrained")
    names = sorted(causes, key=causes.__getitem__)
    bars = ax.barh(names, [100 * causes[name] for name in names], color="#c2701c", height=0.7)
    ax.bar_label(bars, [f" {causes[name]:.1%}" for name in names])
    ax.margins(x=0.12)
    ax.set_xlabel("share of all ranks' time (%)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax
