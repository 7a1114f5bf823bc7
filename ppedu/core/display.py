"""Drawing and showing, handed over to `ppedu.view`, which is loaded when it is first used.

This is the only module below `view` that imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ppedu.core.schedule import Schedule
    from ppedu.core.timeline import Timeline


def plot(timeline: Timeline, ax: Axes | None, **options: Any) -> Axes:
    """Draw a timeline with matplotlib. See `Timeline.plot`."""
    from ppedu.view.plot import plot

    return plot(timeline, ax, **options)


def plot_causes(causes: Mapping[str, float], ax: Axes | None) -> Axes:
    """Draw the causes of a bubble with matplotlib. See `Autopsy.plot`."""
    from ppedu.view.causes import plot

    return plot(causes, ax)


def plot_frontier(frontier: Any, ax: Axes | None) -> Axes:
    """Draw a frontier with matplotlib. See `Frontier.plot`."""
    from ppedu.view.frontier import plot

    return plot(frontier, ax)


def frontier_bundle(frontier: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the MIME bundle with which a notebook displays a frontier."""
    from ppedu.view.frontier import Chart

    return Chart(frontier)._repr_mimebundle_()


def show(timeline: Timeline, outline: Timeline | None, lanes: bool) -> Any:
    """Return the interactive widget of a timeline. See `Timeline.show`."""
    from ppedu.view.interactive import display

    return display(timeline, outline, lanes)


def bundle(subject: Schedule | Timeline) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the MIME bundle with which a notebook displays a schedule or a timeline."""
    from ppedu.view.interactive import mime_bundle

    return mime_bundle(subject)


def save(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline to a file. See `Timeline.save`."""
    from ppedu.view import save

    save(timeline, path)


def save_report(report: str, timeline: Timeline, outline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a page with a report, given as HTML, and the widget of a timeline. See `Autopsy.save`."""
    from ppedu.core.files import write_text
    from ppedu.view.html import page
    from ppedu.view.interactive import display

    write_text(path, page(display(timeline, outline), report))


def link(timeline: Timeline, base: str | None) -> str:
    """Return the address of the playground with a timeline. See `Timeline.link`."""
    from ppedu.view.link import link

    return link(timeline, base)


def require_savable(path: str | os.PathLike[str]) -> None:
    """Raise SettingError unless a timeline can be written to `path`."""
    from ppedu.view import require_savable

    require_savable(path)


def load(path: str | os.PathLike[str]) -> Timeline:
    """Read a timeline from a trace. See `Timeline.load`."""
    from ppedu.view import load

    return load(path)
