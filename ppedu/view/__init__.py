"""Timelines as pictures, pages, trace files and widgets.

`model` computes what a panel contains: boxes, gaps, curves, numbers. Every front end reads it: `plot` (matplotlib),
`html` (pages), `perfetto` (traces), and `interactive`, `explore` and `puzzle` with the scripts in `js` (widgets).
`look` holds colors and row geometry, and `label` replaces characters that cannot be drawn. The package imports core,
zoo, board and trace, and imports matplotlib and anywidget only where they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ppedu.core.errors import SettingError
from ppedu.core.files import require_writable
from ppedu.core.timeline import Timeline
from ppedu.trace.saved import load, load_all
from ppedu.view.model import Panel

__all__ = ["load", "load_all", "require_savable", "save"]

ENDINGS = (".json", ".html", ".svg", ".png", ".pdf")


def save(timelines: Timeline | Iterable[Timeline], path: str | os.PathLike[str]) -> None:
    """Write one or several timelines to the file `path`, in the format of its ending; see `Timeline.save`.

    Only a .json file can hold several timelines, such as a measured run and its simulation.

    Raises:
        SettingError: the file cannot hold this number of timelines, or its ending is unknown.
        PipelineError: the file cannot be written.
    """
    every = list(timelines) if isinstance(timelines, Iterable) else [timelines]
    if not all(isinstance(each, Timeline) for each in every):
        raise SettingError(f"save takes timelines, such as simulate(schedule); got {timelines!r}")
    if not every or (len(every) > 1 and require_savable(path) != ".json"):
        raise SettingError(f"{str(path)!r} cannot hold {len(every)} timelines; save one, or several in a .json file")
    from ppedu.view.interactive import Interactive

    Interactive(*map(Panel, every)).save(path)


def require_savable(path: str | os.PathLike[str]) -> str:
    """Check that a timeline can be saved at `path`, and return the ending of `path`, such as ".svg".

    Raises:
        SettingError: a timeline cannot be saved with this ending.
        PipelineError: the file cannot be written.
    """
    require_writable(path)
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise SettingError(f"cannot save a timeline as {str(path)!r}; end it in {', '.join(ENDINGS)}")
    return ending
