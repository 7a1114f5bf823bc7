"""`explore`: a widget with controls for a schedule's settings, and its timeline, which updates immediately."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import fields
from fractions import Fraction
from itertools import count
from math import ceil
from typing import Any

from ppedu.core import Op, PipelineError, Schedule, SettingError
from ppedu.core.numeric import pretty
from ppedu.core.validate import require_instance
from ppedu.planning.fitted import fitted
from ppedu.planning.pieces import Pieces
from ppedu.sim import Costs, Timeline, simulate
from ppedu.view.interactive import Interactive
from ppedu.view.model import Data, Panel, Stack
from ppedu.view.why import Told, causes, peaks, sources
from ppedu.zoo import schedule, schedules
from ppedu.zoo.options import number
from ppedu.zoo.registry import options_of, require_registered

# The sliders: label, least and greatest value, step, start value. Where the step is an int, so is the value.
SLIDERS: dict[str, tuple[str, Any, Any, Any, Any]] = {
    "ranks": ("ranks", 1, 16, 1, 4),
    "microbatches": ("microbatches", 1, 64, 1, 8),
    "chunks": ("chunks", 1, 4, 1, 2),
    "slices": ("slices", 1, 16, 1, 4),
    "forward": ("F takes", 0.5, 4, 0.5, 1),
    "backward": ("B takes", 0.5, 8, 0.5, 2),
    "weight": ("W's part of B", 0, 1, 0.1, Fraction(1, 2)),
    "latency": ("latency", 0, 2, 0.1, 0),
    "overlap": ("a pair saves", 0, 0.5, 0.01, 0),
    "update": ("U takes", 0, 2, 0.1, 0),
    "offload": ("a copy, in F", 0, 4, 0.1, 1),
    "head": ("S takes", 0, 4, 0.1, 1),
    "head_backward": ("T takes", 0, 4, 0.1, 1),
    "memory": ("memory limit", 0, 10**9, 1, 0),  # 0: no limit; the slider ends at what is needed, see `_hungriest`
}
COSTS = ("forward", "backward", "weight", "latency", "overlap", "update", "offload", "head", "head_backward")

Settings = dict[str, Any]


class Explore(Interactive):
    """A schedule's timeline, with controls for its size and costs. `settings` holds the value of each control."""

    kind = "explore"

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings
        self.shown = settings  # the last that were valid
        self.timeline = _simulated(settings)
        self._turns = count()
        self.wrong = ""  # why `settings` are invalid
        self.offers: list[tuple[str, Settings]] = []

    @property
    def schedule(self) -> Schedule:
        """The schedule that is shown."""
        return self.timeline.schedule

    def panels(self) -> list[Panel]:
        return [Panel(self.timeline, cap=self.shown["memory"] or None)]

    @property
    def stack(self) -> Stack:
        """The timeline, with a memory scale that is the same for most schedules of a size: all its microbatches.

        Where the peak is half of that or less, the scale is halved, again and again.
        """
        panels = self.panels()
        most, scale = Stack(panels).most, float(self.shown["microbatches"])
        while 0 < most <= scale / 2:
            scale /= 2
        return Stack(panels, least=scale)

    def set(self, /, **changes: Any) -> None:
        """Change settings. If they are invalid, keep the last valid view, explain why, and offer the nearest valid.

        Raises:
            SettingError: there is no such control, or the value is outside its range.
        """
        settings = {**self.settings, **{name: _value(name, value) for name, value in changes.items()}}
        try:
            self.timeline = _simulated(settings)
            self.shown, self.wrong, self.offers = settings, "", []
        except PipelineError as error:
            self.wrong, self.offers = str(error), list(_nearest(settings))
        self.settings = settings
        self.refresh()

    def handle(self, message: dict[str, Any]) -> Data | None:
        match message:
            case {"set": dict(changes)}:
                self.set(**changes)
            case {"ahead": dict(changes)}:  # the browser prefetches the state for the slider's next values
                other = copy(self)
                other._widgets = []
                other.set(**changes)
                return {**message, "state": None if other.wrong else json.dumps(other.state())}
        return None

    def state(self) -> Data:
        return {
            **super().state(),
            "controls": list(_controls(self.settings, self.timeline)),
            "wrong": bool(self.wrong),
            "sources": sources(str(self.settings["schedule"])),
            "over": [] if self.wrong else self._over_limit(),
            "note": f"{self.wrong}. Showing the last valid setting." if self.wrong else causes(self.timeline),
            "offers": [[label, {name: str(value) for name, value in change.items()}] for label, change in self.offers],
            "code": self.code(),
            "turn": next(self._turns),  # makes every state new, so that every request is answered
        }

    def _over_limit(self) -> Told:
        """Return a sentence about the rank with the highest peak if that exceeds the memory limit."""
        held, cap = self.timeline.peak_activations, self.shown["memory"]
        if not cap or max(held) <= cap:
            return []
        rank = held.index(max(held))
        [most] = peaks(self.timeline, [rank])
        most = most._replace(text=pretty(held[rank]))
        return [f"Rank {rank} holds ", most, f" activations, over the limit of {pretty(cap)}."]

    def code(self) -> str:
        """Return Python code that reproduces the timeline."""
        shown = self.shown
        sizes = "".join(f", {key}={value!r}" for key, value in _sizes(shown).items())
        made = f"s = pp.schedule({shown['schedule']!r}{sizes})"
        if isinstance(shown["costs"], Pieces):
            return f"{made}\npp.compare(s, model=model)"
        costs = changed(shown["costs"]) if shown["costs"] else _cost_settings(shown)
        return f"{made}\nt = pp.simulate(s, pp.Costs({in_code(costs)}))\nt.show()"


def explore(
    name: str = "1f1b",
    ranks: int = 4,
    microbatches: int = 8,
    *,
    costs: Costs | None = None,
    model: Pieces | None = None,
    **settings: Any,
) -> Explore:
    """Show a schedule with controls for everything that determines its timeline.

        explore("zb-h1", ranks=4, microbatches=8, latency=0.2)

    Args:
        name, ranks, microbatches: The start values of the controls of these names.
        costs: Costs in place of the controls for them, for example with one cost per stage. They stay the same while
            schedule and sizes change; if they do not fit the number of stages, the widget offers the nearest sizes.
        model: `Model.measured(…)`, in place of costs: each schedule gets its best partition of this model. Times are in
            the model's unit, memory in GB.
        settings: The start values of the other controls: chunks, slices, forward, backward, weight (W's part of the
            backward, 0 to 1), latency, overlap (the part of its time that an overlapped pair saves, 0 to 0.5) and
            memory (the most activations that a rank may hold; 0 for no limit).

    Raises:
        SettingError: there is no such schedule or control, or the settings exclude each other.
    """
    chosen: Settings = {"schedule": name, "ranks": ranks, "microbatches": microbatches, **settings}
    if costs is not None and model is not None:
        raise SettingError("give explore costs or a model, not both")
    if costs is not None or model is not None:
        what = "model" if costs is None else "costs"
        chosen["costs"] = model if costs is None else costs
        if twice := [key for key in COSTS if key in settings]:
            raise SettingError(f"{what} already determines {', '.join(twice)}; set it in {what} only")
    start = {key: value for key, (*_, value) in SLIDERS.items()}
    return Explore({**start, "costs": None, **{key: _value(key, value) for key, value in chosen.items()}})


def _value(name: str, value: Any) -> Any:
    """Check a new value of the setting `name` and return it, with text from the browser converted to a number.

    Raises:
        SettingError: there is no such setting, or it cannot have this value.
    """
    if name == "costs":
        wanted = "Costs, such as Costs(forward=[1, 2, 2, 1]), or model=Model.measured(…)"
        require_instance("costs", value, (Costs, Pieces), wanted)
        return value
    if name == "schedule":
        require_registered(value)
        return value
    if name not in SLIDERS:
        raise SettingError(f"unknown control {name!r}; available: schedule, {', '.join(SLIDERS)}")
    _, least, most, step, _ = SLIDERS[name]
    exact: Any = None
    with suppress(ArgumentTypeError):
        exact = number(str(value))
    whole = isinstance(step, int)
    if exact is None or not least <= exact <= most or (whole and not isinstance(exact, int)):
        wanted = f"a {'whole ' * whole}number from {pretty(least)} to {pretty(most)}"
        raise SettingError(f"{name} must be {wanted}; got {value!r}")
    return exact


def _sizes(settings: Settings) -> dict[str, int]:
    """Return keyword arguments of `schedule`: ranks, microbatches, and those of the other three that it takes."""
    taken = options_of(settings["schedule"])
    # A memory of 0 sets no limit.
    options = [name for name in ("chunks", "slices", "memory") if name in taken and settings[name]]
    return {name: settings[name] for name in ("ranks", "microbatches", *options)}


def _cost_settings(settings: Settings) -> dict[str, Any]:
    """Return keyword arguments of `Costs` for the sliders, without optional ones that have no effect."""
    forward, backward = settings["forward"], settings["backward"]
    costs = {"forward": forward, "backward": backward}
    if settings["weight"] != Fraction(1, 2):
        costs["weight"] = backward * settings["weight"]
    if settings["offload"] != 1:
        costs["offload"] = forward * settings["offload"]
    if settings["overlap"]:
        costs["overlap"] = (forward + backward) * (1 - settings["overlap"])
    costs |= {name: settings[name] for name in ("latency", "update") if settings[name]}
    costs |= {name: settings[name] for name in ("head", "head_backward") if settings[name] != 1}
    # Computed exactly and then rounded, so that `code` shows the same numbers. Fractions would make simulating slow.
    return {name: int(cost) if cost == int(cost) else float(cost) for name, cost in costs.items()}


def _simulated(settings: Settings) -> Timeline:
    """Return the timeline that these settings describe.

    Raises:
        PipelineError: the schedule does not exist in this size, or the costs do not fit its stages.
    """
    made, costs = schedule(settings["schedule"], **_sizes(settings)), settings["costs"]
    if isinstance(costs, Pieces):
        made.validate()  # the time of a partition is not defined for a schedule that deadlocks
        costs = fitted(made, costs)
    costs = (costs or Costs(**_cost_settings(settings))).tabulated(made.stages, made.microbatches)
    costs.durations(made.stages, made.ranks, made.microbatches)  # raises before the slower check of the schedule
    timeline = simulate(made, costs)
    timeline.peak_activations  # noqa: B018  # raises if the activations do not fit the stages
    return timeline


def _nearest(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the nearest sizes that would make invalid settings valid.

    For each of ranks, microbatches and chunks, try smaller and larger values. Each result is a label and a change of
    the settings, such as ("4 ranks", {"ranks": 4}).
    """
    for name in ("ranks", "microbatches", "chunks"):
        if name not in _sizes(settings):
            continue
        label, least, most, *_ = SLIDERS[name]
        smaller, larger = range(settings[name] - 1, least - 1, -1), range(settings[name] + 1, most + 1)
        for values in (smaller, larger):
            for value in values:
                with suppress(PipelineError):
                    _simulated({**settings, name: value})
                    yield f"{value} {label}", {name: value}
                    break


def _hungriest(timeline: Timeline) -> int:
    """Return how many activations a rank holds, rounded up, if it runs all its forwards before any backward."""
    schedule, costs = timeline.schedule, timeline.costs
    sizes = costs.per_stage(costs.activation, schedule.stages, schedule.ranks, schedule.microbatches)
    held = []
    for order in schedule.orders:
        forwards = [(sizes[stage], m) for action in order for stage, op, m, _ in action.singles if op == Op.F]
        held.append(sum(size[m] if isinstance(size, tuple) else size for size, m in forwards))
    return ceil(max(held))


def _controls(settings: Settings, timeline: Timeline) -> Iterator[Data]:
    """Yield the controls that affect the selected schedule, each as the dict that the browser builds it from.

    The controls for W, U, S, T and overlapped pairs appear if the schedule that is shown has such actions.
    """
    name, shown = settings["schedule"], timeline.schedule
    options = options_of(name)
    actions = [action for order in shown.orders for action in order] if shown.name == name else []
    ops = {single.op for action in actions for single in action.singles}
    yield {"name": "schedule", "label": "schedule", "choices": list(schedules()), "value": name}
    for key, (label, least, most, step, _) in SLIDERS.items():
        has_no_effect = (
            (settings["costs"] and key in COSTS)
            or (key in ("chunks", "slices") and key not in options)
            or (key == "weight" and Op.W not in ops)
            or (key == "update" and Op.U not in ops)
            or (key in ("head", "head_backward") and Op.S not in ops)
            or (key == "offload" and Op.O not in ops)
            or (key == "overlap" and not any(action.parts for action in actions))
        )
        if has_no_effect:
            continue
        if key == "memory":
            most = max(_hungriest(timeline), settings[key])
        numbers = {"value": settings[key], "min": least, "max": most, "step": step}
        yield {"name": key, "label": label, **{name: _written(value) for name, value in numbers.items()}}


def _written(value: Any) -> str:
    """Return a number as text that the browser's sliders and Python can read, such as "1" or "0.5"."""
    return f"{float(value):.10g}"


def changed(costs: Costs) -> dict[str, Any]:
    """Return the fields of costs that differ from the defaults."""
    return {each.name: value for each in fields(Costs) if (value := getattr(costs, each.name)) != each.default}


def in_code(costs: Mapping[str, Any]) -> str:
    """Return fields of Costs as the arguments of a call in Python: "forward=1, backward=[2, 2, 3, 2]"."""
    return ", ".join(f"{name}={_literal(value)}" for name, value in costs.items())


def _literal(value: Any) -> str:
    """Return the value of a field of Costs as Python code; a function as its name."""
    if callable(value):
        return getattr(value, "__name__", "<lambda>").replace("<lambda>", "...")
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{link}: {_literal(time)}' for link, time in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(float(value) if isinstance(value, Fraction) else value)
