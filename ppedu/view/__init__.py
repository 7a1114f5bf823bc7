"""Timelines as pictures, as files, and to be touched. May import core and zoo; what is large only when it is needed.

palette (colours), plot (matplotlib), trace and html (files); data (what the browser is sent), shown (what a cell
shows), explore and puzzle, and the browser's side of all of it: widgets.js and widgets.css.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ppedu.core.errors import SettingError
from ppedu.core.schedule import require_writable, write_text
from ppedu.core.timeline import Timeline
from ppedu.view.trace import load_all, trace

__all__ = ["load_all", "require_savable", "save"]

ENDINGS = (".json", ".html", ".svg", ".png", ".pdf")


def save(timelines: Timeline | Iterable[Timeline], path: str | os.PathLike[str]) -> None:
    """Write a timeline to `path`; see `Timeline.save`. A .json file holds several: a measured run and its simulation.

    Raises:
        SettingError: there is no timeline, or several for a file that holds one, or the ending is not known.
        PipelineError: the file cannot be written.
    """
    given = list(timelines) if isinstance(timelines, Iterable) else [timelines]
    if not all(isinstance(each, Timeline) for each in given):
        raise SettingError(f"save takes timelines, such as simulate(schedule); got {timelines!r}")
    ending = require_savable(path)
    if not given or (len(given) > 1 and ending != ".json"):
        raise SettingError(f"{str(path)!r} cannot hold {len(given)} timelines; save one, or several in a .json file")
    if ending == ".json":
        write_text(path, trace(*given))
    elif ending == ".html":
        from ppedu.view.html import page

        write_text(path, page(*given))
    elif ending == ".svg":
        from ppedu.view.plot import svg

        write_text(path, svg(*given))
    else:
        from matplotlib import pyplot

        given[0].plot()
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
    if ending not in ENDINGS:
        raise SettingError(f"cannot save a timeline as {str(path)!r}; end it in {', '.join(ENDINGS)}")
    return ending
