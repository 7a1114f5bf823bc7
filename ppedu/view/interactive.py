"""Timelines in a notebook's cell: interactive where there is a kernel, a picture everywhere else.

Python sends numbers and sentences (`model`), and the browser draws them (`script`). The objects here are not widgets
themselves. Each creates a widget when it is displayed and closes it when it disappears from the page, so that running
a cell again leaves nothing behind.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from ppedu.core import PipelineError, Schedule, ScheduleError, SettingError
from ppedu.core.files import write_bytes
from ppedu.core.validate import require_instance
from ppedu.planning.fitted import fitted
from ppedu.planning.machine import Machine
from ppedu.planning.pieces import Pieces
from ppedu.sim import Costs, Timeline, require_costs, simulate, simulate_partial
from ppedu.view.knot import figure
from ppedu.view.model import Data, Panel, Stack, require_lanes
from ppedu.view.saving import require_savable
from ppedu.view.script import script, style
from ppedu.view.why import Told, messages
from ppedu.zoo import schedule

MOST_DRAWN = 5000  # actions; a picture of more takes seconds, and its boxes are narrower than a pixel


@cache
def _widget_class() -> type:
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise SettingError(f"widgets need {error.name}, which is not installed; pip install 'ppedu[lab]'") from None

    class Widget(anywidget.AnyWidget):
        """The browser's side of an Interactive.

        Its state is text (JSON), because traitlets would compare a dict entry by entry.
        """

        _esm = script()
        _css = style("widgets")
        state = traitlets.Unicode().tag(sync=True)
        lanes = traitlets.Bool().tag(sync=True)  # not in the state: a view that switches keeps its place

    return Widget


class Interactive:
    """Timelines under each other, on one time axis, which respond to the mouse and the keyboard.

    A subclass with controls overrides `panels` to return its current timelines and `handle` to respond to clicks.
    """

    kind = "show"  # the key in mount.js of the function that displays it

    def __init__(self, *panels: Panel) -> None:
        self._panels = list(panels)
        self._widgets: list[Any] = []  # those that are on a page
        self.lanes = False  # whether outlines have lanes of their own; the browser can switch that
        self.brief = False  # whether the state lacks all reasons; see `Panel.state`

    def panels(self) -> list[Panel]:
        """Return the panels to show, from top to bottom."""
        return self._panels

    @property
    def stack(self) -> Stack:
        """The panels with what they share: time axis, memory scale and legend."""
        return Stack(self.panels(), lanes=self.lanes, brief=self.brief)

    def state(self) -> Data:
        """Return the data that the browser draws."""
        return {"kind": self.kind, **self.stack.state()}

    def text(self) -> str:
        """Return the timelines as text, for a terminal."""
        timelines = self.stack.timelines if self.lanes else [panel.timeline for panel in self.panels()]
        return "\n\n".join(each.text() for each in timelines)

    def static(self) -> Data:
        """Return a MIME bundle for pages without a kernel: the text and a PNG picture.

        The picture is left out if drawing it would take seconds or matplotlib is missing.
        """
        data, stack = {"text/plain": self.text()}, self.stack
        if stack.actions <= MOST_DRAWN:
            with suppress(SettingError):
                from ppedu.view.plot import png

                data["image/png"] = base64.b64encode(png(stack)).decode()
        return data

    def handle(self, message: dict[str, Any]) -> Data | None:
        """Act on a message from the browser, and return the answer, or None if the message needs none."""
        return None

    def refresh(self) -> None:
        """Send the current state to every page that displays these timelines."""
        if self._widgets:
            state = json.dumps(self.state())
            for widget in self._widgets:
                widget.state = state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timelines to a file, in the format of its ending, as `Timeline.save` does for one of them.

        A page (.html) leaves out controls that need a kernel. A picture has the timelines under each other.

        Raises:
            SettingError: the ending is none of these, or a picture needs matplotlib, which is not installed.
            PipelineError: the file cannot be written.
        """
        ending = require_savable(path)
        if ending == ".json":
            from ppedu.view.perfetto import chrome_trace

            content = chrome_trace(*(panel.timeline for panel in self.panels())).encode()
        elif ending == ".html":
            from ppedu.view.html import page

            content = page(self if self.kind in ("show", "compare") else Interactive(*self.panels())).encode()
        elif ending == ".tex":
            from ppedu.view.tex import tikz

            content = tikz(self.stack).encode()
        else:
            from ppedu.view.plot import picture

            content = picture(self.stack, ending[1:])
        write_bytes(path, content)

    def _repr_mimebundle_(self, **_: Any) -> tuple[Data, Data]:
        if not in_notebook():
            return self.static(), {}
        widget = _widget_class()(state=json.dumps(self.state()), lanes=self.lanes)
        widget.on_msg(self._receive)
        widget.observe(self._switch, "lanes")
        self._widgets.append(widget)
        data, metadata = widget._repr_mimebundle_()
        return {**data, **self.static()}, metadata

    def _switch(self, change: Any) -> None:
        """Remember what a reader chose, for what is displayed or saved next."""
        self.lanes = change.new

    def _receive(self, widget: Any, message: Any, _: Any) -> None:
        """Handle a message from the browser. Messages that the widget's own script would not send are ignored."""
        match message:
            case {"gone": True} if widget in self._widgets:
                self._widgets.remove(widget)
                widget.layout.close()
                widget.close()
            case dict():
                answer = None
                try:
                    with suppress(PipelineError):
                        answer = self.handle(message)
                finally:  # the browser sends the next message after the answer
                    widget.send({"answer": answer})

    def __repr__(self) -> str:
        return self.text()


def in_notebook() -> bool:
    """Return whether a kernel is running that can show widgets. PPEDU_STILL=1 in the environment turns widgets off."""
    ipython = sys.modules.get("IPython")  # every kernel has imported it
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    return kernel is not None and not os.environ.get("PPEDU_STILL")


def display(timeline: Timeline, outline: Timeline | None = None, lanes: bool = False) -> Interactive:
    """Return an interactive timeline; see `Timeline.show`."""
    shown = Interactive(Panel(timeline, outline=outline))
    shown.lanes = require_lanes(lanes, outline)
    return shown


class Comparison(Interactive):
    """Timelines with a table of their numbers and a chart of bubble against memory."""

    kind = "compare"

    def rows(self) -> list[tuple[str, Any, float, Any, int]]:
        """Return a row per timeline: its name, makespan, bubble, peak activations and number of messages.

        The name is that of the schedule, after the source of a timeline that is not simulated: "measured 1f1b".
        """
        rows = []
        for panel in self.panels():
            timeline = panel.timeline
            name, peak = timeline.schedule.name, max(timeline.peak_activations)
            if timeline.source != "simulated":
                name = f"{timeline.source} {name}"
            rows.append((name, timeline.makespan, timeline.bubble, peak, int(messages(timeline.schedule).text)))
        return rows

    def state(self) -> Data:
        table: list[Told] = [["schedule", "makespan", "bubble", "peak activations", "messages"]]
        points = []
        for panel, (name, _, bubble, peak, _) in zip(self.panels(), self.rows(), strict=True):
            told: Told = [*panel.numbers.values()]
            if not self.brief:
                told = [why._replace(text=text) for why, text in zip(panel.reasons, map(str, told), strict=True)]
            table.append([name, *told, messages(panel.timeline.schedule)])
            points.append([name, float(peak), bubble])
        return {**super().state(), "table": table, "points": points}


def compare(
    *schedules: str | Schedule | Timeline,
    ranks: int = 4,
    microbatches: int = 8,
    costs: Costs | None = None,
    model: Pieces | None = None,
    machine: Machine | str | None = None,
) -> Comparison:
    """Show schedules on one time axis, with their bubble, memory and messages.

        compare("gpipe", "1f1b", "zb-h1", ranks=4, microbatches=8, costs=Costs(latency=0.1))

    Args:
        schedules: Registered names, Schedules or Timelines.
        ranks, microbatches: The size of the schedules that are given by name.
        costs: The costs of everything that is not a Timeline yet. Costs per stage fit only schedules with that number
            of stages; to compare other schedules, simulate each with its own costs.
        model: `Model.measured(…)`, in place of `costs`: each schedule gets its best partition of this model, whatever
            its number of stages. Times are in the model's unit, memory in GB.
        machine: The machine, or its name, for the time of a model's messages.

    Raises:
        SettingError: there is nothing to compare, an argument has the wrong type, or sizes or costs do not fit.
        ScheduleError: a schedule is not legal.
    """
    if not schedules:
        raise SettingError('compare got no schedules; name them, as in compare("gpipe", "1f1b")')
    if costs is not None and model is not None:
        raise SettingError("give compare costs or a model, not both")
    if machine is not None and model is None:
        raise SettingError("machine is for the messages of a model; give compare a model, too, or leave out machine")

    def timeline(compared: str | Schedule | Timeline) -> Timeline:
        wanted = "the name of a schedule, a Schedule or a Timeline"
        require_instance("each argument of compare", compared, (str, Schedule, Timeline), wanted)
        if isinstance(compared, Timeline):
            return compared
        made = schedule(compared, ranks, microbatches) if isinstance(compared, str) else compared
        try:
            return simulate(made, require_costs(costs) if model is None else fitted(made, model, machine))
        except SettingError as error:
            raise SettingError(
                f"{made.name}: {error}; or compare timelines, simulated with costs of their own"
            ) from None

    return Comparison(*(Panel(timeline(each)) for each in schedules))


class Difference(Interactive):
    """Two schedules with the actions marked that differ; without these, the orders of both are equal.

    `difflib` looks for few such actions, not for the fewest. `first` and `second` name those of each schedule, as a
    rank and a position in its order.

    Raises:
        SettingError: the schedules differ in their number of ranks.
    """

    def __init__(self, one: Timeline, other: Timeline):
        if one.schedule.ranks != other.schedule.ranks:
            raise SettingError(f"{one.schedule!r} and {other.schedule!r} must have the same number of ranks")
        self.first: list[tuple[int, int]] = []
        self.second: list[tuple[int, int]] = []
        for rank, orders in enumerate(zip(one.schedule.orders, other.schedule.orders, strict=True)):
            for kind, start, end, begin, stop in SequenceMatcher(None, *orders, autojunk=False).get_opcodes():
                if kind != "equal":
                    self.first += [(rank, place) for place in range(start, end)]
                    self.second += [(rank, place) for place in range(begin, stop)]
        super().__init__(Panel(one, marks=self.first), Panel(other, marks=self.second))


def differences(one: Schedule | Timeline, other: Schedule | Timeline, costs: Costs | None = None) -> Difference:
    """Show two schedules, with the actions marked that are not in both or not in the same order.

    A schedule that is not legal is shown up to the point where its ranks deadlock.

    Raises:
        SettingError: an argument is neither a schedule nor a timeline, the numbers of ranks differ, or `costs` do not
            fit.
    """
    costs = require_costs(costs)
    timelines = []
    for each in (one, other):
        wanted = "a Schedule or a Timeline, such as schedule('1f1b', 4, 8)"
        require_instance("each argument of differences", each, (Schedule, Timeline), wanted)
        timelines.append(simulate_partial(each, costs) if isinstance(each, Schedule) else each)
    return Difference(*timelines)


def mime_bundle(shown: Schedule | Timeline) -> tuple[Data, Data]:
    """Return what Jupyter displays for a timeline, or for a schedule simulated with the default costs."""
    try:
        widget = display(simulate(shown) if isinstance(shown, Schedule) else shown)
    except ScheduleError as error:
        return {"text/plain": str(error), "text/html": figure(shown) if isinstance(shown, Schedule) else ""}, {}
    try:
        return widget._repr_mimebundle_()
    except SettingError:  # anywidget is not installed
        return widget.static(), {}
