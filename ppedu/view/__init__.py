"""Timelines come in; pictures, pages, trace files and widgets go out.

`model` computes the contents of a panel: boxes, gaps, curves, numbers. Every front end reads it: `plot` (matplotlib),
`tex` (LaTeX), `html` (pages), `perfetto` (traces), and `interactive` and `explore` with the scripts in `js` (widgets).
`look` holds colors and row geometry, and `label` replaces characters that cannot be drawn. The package loads matplotlib
and anywidget only where they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ppedu.core import SettingError
from ppedu.sim import Timeline
from ppedu.trace.saved import load, load_all
from ppedu.view.model import Panel
from ppedu.view.saving import require_savable

__all__ = ["load", "load_all", "save"]


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
    from ppedu.view.interactive import Interactive

    if not every or (len(every) > 1 and require_savable(path) != ".json"):
        raise SettingError(f"{str(path)!r} cannot hold {len(every)} timelines; save one, or several in a .json file")

    Interactive(*map(Panel, every)).save(path)
