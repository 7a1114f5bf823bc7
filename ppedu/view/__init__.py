"""Timelines as pictures, as files and as widgets. May import core and zoo; large imports only where they are needed.

palette (colours), label (text from users), plot (matplotlib), trace and html (files); data (what the browser is sent),
shown (what a cell shows), explore and puzzle, and the browser's side of all of it: widgets.js and widgets.css.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ppedu.core.errors import SettingError
from ppedu.core.files import require_writable, write_bytes
from ppedu.core.timeline import Timeline
from ppedu.view.trace import load_all, trace

if TYPE_CHECKING:
    from ppedu.view.shown import Shown

__all__ = ["load_all", "require_savable", "save"]

ENDINGS = (".json", ".html", ".svg", ".png", ".pdf")


def save(timelines: Timeline | Iterable[Timeline], path: str | os.PathLike[str]) -> None:
    """Write a timeline to `path`; see `Timeline.save`. A .json file holds several: a measured run and its simulation.

    Raises:
        SettingError: the file cannot hold this number of timelines, or its ending is not known.
        PipelineError: the file cannot be written.
    """
    given = list(timelines) if isinstance(timelines, Iterable) else [timelines]
    if not all(isinstance(each, Timeline) for each in given):
        raise SettingError(f"save takes timelines, such as simulate(schedule); got {timelines!r}")
    ending = require_savable(path)
    if not given or (len(given) > 1 and ending != ".json"):
        raise SettingError(f"{str(path)!r} cannot hold {len(given)} timelines; save one, or several in a .json file")
    from ppedu.view.shown import Shown

    save_shown(Shown(*((each, {}) for each in given)), path)


def save_shown(shown: Shown, path: str | os.PathLike[str]) -> None:
    """Write timelines to `path` as they are shown: under each other, a comparison with its table. See `Shown.save`.

    Raises:
        SettingError: the ending is not known.
        PipelineError: the file cannot be written.
    """
    ending = require_savable(path)
    if ending == ".json":
        content = trace(*(timeline for timeline, _ in shown.panels())).encode()
    elif ending == ".html":
        from ppedu.view.html import page

        content = page(shown).encode()
    else:
        from ppedu.view.plot import picture
        from ppedu.view.shown import plotted

        content = picture(plotted(shown.panels()), ending[1:])
    write_bytes(path, content)


def require_savable(path: str | os.PathLike[str]) -> str:
    """Return the ending of `path`.

    Raises:
        SettingError: a timeline cannot be saved with this ending.
        PipelineError: the file cannot be written.
    """
    require_writable(path)
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise SettingError(f"cannot save a timeline as {str(path)!r}; end it in {', '.join(ENDINGS)}")
    return ending
