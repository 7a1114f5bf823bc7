"""Timelines as pictures and files. May import core and matplotlib; matplotlib only when something is drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ppedu.core.errors import SettingError
from ppedu.core.schedule import require_writable, write_text
from ppedu.view.trace import trace

if TYPE_CHECKING:
    from ppedu.core.timeline import Timeline

PICTURES = (".svg", ".png", ".pdf")


def save(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write `timeline` to `path`; see `Timeline.save`."""
    if require_savable(path) == ".json":
        write_text(path, trace(timeline))
    else:
        from matplotlib import pyplot

        timeline.plot()
        try:
            pyplot.savefig(path, bbox_inches="tight", dpi=200)
        finally:
            pyplot.close()


def require_savable(path: str | os.PathLike[str]) -> str:
    """The ending of `path`, if a timeline can be saved there.

    Raises:
        SettingError: the ending is none that a timeline can be saved with.
        PipelineError: the file cannot be written.
    """
    require_writable(path)
    ending = Path(path).suffix.lower()
    if ending not in (".json", *PICTURES):
        raise SettingError(f"cannot save a timeline as {str(path)!r}; end it in .json, {', '.join(PICTURES)}")
    return ending
