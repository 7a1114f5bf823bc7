"""What a cell shows: timelines that can be touched where there is a kernel, their picture everywhere else.

Python sends numbers and sentences (`data`), and the browser draws them (`widgets.js`). The objects here are no widgets
themselves: each time one is displayed it makes a widget, which is closed when it has gone from the page, so that a cell
can be run again and again and leaves nothing behind.
"""

from __future__ import annotations

import base64
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ppedu.core.actions import SEND
from ppedu.core.costs import Costs
from ppedu.core.differences import differences as find_differences
from ppedu.core.errors import PipelineError, ScheduleError, SettingError
from ppedu.core.lower import lower
from ppedu.core.numeric import pretty
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate, simulate_partial
from ppedu.core.timeline import Timeline
from ppedu.view.data import LOOK, Data, panel, require_outline
from ppedu.zoo import schedule

HERE = Path(__file__).parent
MOST_DRAWN = 5000  # actions; a static picture of more takes seconds, and its boxes are narrower than a pixel

Panel = tuple[Timeline, dict[str, Any]]  # a timeline, and how it is drawn: title, outline, cap, marks


@cache
def _widget_class() -> type:
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise SettingError(f"this needs {error.name}; pip install 'ppedu[lab]'") from None

    class Widget(anywidget.AnyWidget):
        """The browser's side of something shown. What it shows is JSON: a dict would be walked through on its way."""

        _esm = HERE / "widgets.js"
        _css = HERE / "widgets.css"
        state = traitlets.Unicode().tag(sync=True)

    return Widget


class Shown:
    """Timelines under each other, on one time axis. `state()` is all that the browser needs.

    A subclass with controls returns its current timelines from `panels` and acts on clicks in `told`.
    """

    kind = "show"

    def __init__(self, *panels: Panel) -> None:
        self._panels = list(panels)
        self._widgets: list[Any] = []  # those on a page

    def panels(self) -> list[Panel]:
        return self._panels

    def state(self) -> Data:
        panels = self.panels()
        every = [each for timeline, how in panels for each in (timeline, how.get("outline")) if each]
        readable = max(every, key=lambda each: each.makespan).readable
        return {"kind": self.kind, "look": LOOK, "panels": [_sent(*each, readable) for each in panels]}

    def text(self) -> str:
        """For a terminal."""
        return "\n\n".join(timeline.text() for timeline, _ in self.panels())

    def told(self, message: dict[str, Any]) -> Data | None:
        """Act on a message from the browser, and return the answer if it needs one."""
        return None

    def refresh(self) -> None:
        """Send the current state to every page on which this is displayed."""
        if self._widgets:
            state = json.dumps(self.state())
            for widget in self._widgets:
                widget.state = state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is shown to a file; its ending decides what is written.

        .html: a page with the timelines, their numbers and orders, which needs neither a kernel nor a network. Controls
            that need a kernel are left out.
        .svg .png .pdf: the timelines under each other.
        .json: the timelines as a trace, as `Timeline.save` writes one.

        Raises:
            SettingError: the ending is none of these.
            PipelineError: the file cannot be written.
        """
        from ppedu.view import save_shown

        save_shown(self if self.kind in ("show", "compare") else Shown(*self.panels()), path)

    def _repr_mimebundle_(self, **_: Any) -> tuple[Data, Data]:
        picture = still(self.panels())
        if not in_notebook():
            return {"text/plain": self.text(), **picture}, {}
        widget = _widget_class()(state=json.dumps(self.state()))
        widget.on_msg(self._hear)
        self._widgets.append(widget)
        data, metadata = widget._repr_mimebundle_()
        return {**data, **picture, "text/plain": self.text()}, metadata

    def _hear(self, widget: Any, message: Any, _: Any) -> None:
        """Act on a message from the browser. One that the widget's own script would not send is ignored."""
        if not isinstance(message, dict):
            return
        if not message.get("gone"):
            with suppress(PipelineError):
                if answer := self.told(message):
                    widget.send(answer)
        elif widget in self._widgets:
            self._widgets.remove(widget)
            widget.layout.close()
            widget.close()

    def __repr__(self) -> str:
        return self.text()


def _sent(timeline: Timeline, how: dict[str, Any], readable: tuple[int, str]) -> Data:
    own = {name: value for name, value in how.items() if name != "outline"}
    outline = how.get("outline")
    outlined = panel(outline, readable=readable) if outline else None
    return {**panel(timeline, readable=readable, **own), "outline": outlined}


def still(panels: list[Panel]) -> Data:
    """Return the static picture of timelines, for pages without a kernel; empty where drawing would take seconds."""
    from ppedu.view.plot import png

    if sum(len(row) for timeline, _ in panels for row in timeline.rows) > MOST_DRAWN:
        return {}
    return {"image/png": base64.b64encode(png(plotted(panels))).decode()}


def plotted(panels: list[Panel]) -> list[Panel]:
    """Return the same timelines with the options of `plot`, so that all memory strips are drawn to one scale."""
    most = float(max(each for timeline, how in panels for each in (*timeline.peak_activations, how.get("cap") or 0)))
    drawn = {"memory": most or True}
    return [(timeline, {k: v for k, v in how.items() if k != "cap"} | drawn) for timeline, how in panels]


def in_notebook() -> bool:
    """Is there a kernel, and so somebody who may show a widget? With PPEDU_STILL=1 in the environment, nobody is."""
    if os.environ.get("PPEDU_STILL"):
        return False
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def view(timeline: Timeline, outline: Timeline | None = None) -> Shown:
    """See `Timeline.show`."""
    require_outline(outline, timeline.schedule.ranks)
    return Shown((timeline, {"outline": outline}))


class Comparison(Shown):
    """Timelines with a table of their numbers, and bubble against memory."""

    kind = "compare"

    def rows(self) -> list[tuple[str, Any, float, Any, int]]:
        """Of each timeline: its schedule's name, makespan, bubble, peak memory and the number of messages."""
        return [
            (each.schedule.name, each.makespan, each.bubble, max(each.peak_activations), _messages(each.schedule))
            for each, _ in self.panels()
        ]

    def state(self) -> Data:
        table, points = [["schedule", "makespan", "bubble", "peak memory", "messages"]], []
        for (timeline, _), (name, span, bubble, peak, sent) in zip(self.panels(), self.rows(), strict=True):
            table.append([name, pretty(span, timeline.costs.unit), f"{bubble:.1%}", pretty(peak), str(sent)])
            points.append([name, float(peak), bubble])
        return {**super().state(), "table": table, "points": points}


def _messages(made: Schedule) -> int:
    """How many messages the ranks send each other."""
    lowered = made if made.lowered else lower(made)
    return sum(action.op in SEND for order in lowered.orders for action in order)


def compare(
    *schedules: str | Schedule | Timeline, ranks: int = 4, microbatches: int = 8, costs: Costs | None = None
) -> Comparison:
    """Show schedules on one time axis, with their bubble, memory and messages.

        compare("gpipe", "1f1b", "zb-h1", ranks=4, microbatches=8, costs=Costs(latency=0.1))

    schedules: each is a registered name, a Schedule or a Timeline; `ranks` and `microbatches` apply to the names.
    costs: apply to everything that is not yet a timeline. Costs of each stage fit only schedules with as many stages;
        to compare others, simulate each with costs of its own.

    Raises:
        SettingError: there is nothing to compare, an argument is of another type, or sizes or costs do not fit.
        ScheduleError: a schedule is not legal.
    """
    if not schedules:
        raise SettingError('name what to compare, as in compare("gpipe", "1f1b")')
    _require_costs("compare", costs)
    return Comparison(*((_compared(each, ranks, microbatches, costs), {}) for each in schedules))


def _compared(given: Any, ranks: int, microbatches: int, costs: Costs | None) -> Timeline:
    if not isinstance(given, str | Schedule | Timeline):
        raise SettingError(f"compare takes the name of a schedule, a Schedule or a Timeline; got {given!r}")
    made = schedule(given, ranks, microbatches) if isinstance(given, str) else given
    if isinstance(made, Timeline):
        return made
    try:
        return simulate(made, costs)
    except SettingError as error:
        raise SettingError(
            f"{made.name}: {error}; or simulate each schedule with costs of its own and compare the timelines"
        ) from None


def _require_costs(what: str, costs: Any) -> None:
    """Raise SettingError unless `costs` is None or Costs."""
    if not (costs is None or isinstance(costs, Costs)):
        raise SettingError(f"{what} takes costs, such as Costs(forward=1, backward=2); got {costs!r}")


class Difference(Shown):
    """Two schedules with the actions marked that are not the same; `first` and `second` say which."""

    def __init__(self, one: Timeline, other: Timeline):
        self.first, self.second = find_differences(one.schedule, other.schedule)
        super().__init__((one, {"marks": self.first}), (other, {"marks": self.second}))


def differences(one: Schedule | Timeline, other: Schedule | Timeline, costs: Costs | None = None) -> Difference:
    """Show two schedules, and mark the actions that are not in both, or not in the same order.

    A schedule that is not legal is shown up to where its ranks are stuck.

    Raises:
        SettingError: one is neither a schedule nor a timeline, they differ in their number of ranks, or `costs` do not
            fit.
    """
    _require_costs("differences", costs)
    for each in (one, other):
        if not isinstance(each, Schedule | Timeline):
            raise SettingError(
                f"differences takes two schedules or timelines, such as schedule('1f1b', 4, 8); got {each!r}"
            )
    return Difference(
        *(simulate_partial(each, costs or Costs()) if isinstance(each, Schedule) else each for each in (one, other))
    )


def bundle(given: Schedule | Timeline) -> tuple[Data, Data]:
    """Return what Jupyter shows for a timeline, or for a schedule simulated with the default costs."""
    try:
        timeline = simulate(given) if isinstance(given, Schedule) else given
    except ScheduleError as error:
        return {"text/plain": str(error)}, {}
    try:
        return view(timeline)._repr_mimebundle_()
    except SettingError:  # no anywidget
        return {"text/plain": timeline.text(), **still([(timeline, {})])}, {}


__all__ = ["Comparison", "Difference", "Shown", "bundle", "compare", "differences", "view"]
