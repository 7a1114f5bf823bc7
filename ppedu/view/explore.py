"""`explore`: a schedule's settings as controls, and at once what comes of them."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from fractions import Fraction
from itertools import count
from typing import Any

from ppedu.core.actions import Op
from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.schedule import Schedule
from ppedu.core.settings import number
from ppedu.core.simulate import Costs, simulate
from ppedu.core.timeline import Timeline, show
from ppedu.view.data import Data
from ppedu.view.shown import Panel, Shown
from ppedu.zoo import options_of, schedule, schedules

# name, label, least, most, step
SIZES = (("ranks", "ranks", 1, 16, 1), ("microbatches", "microbatches", 1, 64, 1), ("chunks", "chunks", 1, 4, 1))
COSTS = (
    ("forward", "F takes", "0.5", "4", "0.5"),
    ("backward", "B takes", "0.5", "8", "0.5"),
    ("weight", "W's part of B", "0", "1", "0.1"),
    ("latency", "latency", "0", "2", "0.1"),
    ("overlap", "a pair saves", "0", "0.5", "0.05"),
)
MEMORY = ("memory", "memory cap", 0, 32, 1)  # 0: none
START = {"chunks": 2, "forward": 1, "backward": 2, "weight": Fraction(1, 2), "latency": 0, "overlap": 0, "memory": 0}

Settings = dict[str, Any]


class Explore(Shown):
    """Controls for a schedule's size and costs, and its timeline. `settings` is what they stand at."""

    kind = "explore"

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings
        self.shown = settings  # the last that were possible
        self.timeline = _timeline(settings)
        self._turns = count()
        self.wrong = ""
        self.offers: list[tuple[str, Settings]] = []

    @property
    def schedule(self) -> Schedule:
        """What is shown."""
        return self.timeline.schedule

    def panels(self) -> list[Panel]:
        return [(self.timeline, {"cap": self.shown["memory"] or None})]

    def set(self, **changes: Any) -> None:
        """Move controls. What is impossible stays as it was, is explained, and what is nearest to it offered.

        Raises:
            SettingError: there is no such control, or it has no such value.
        """
        settings = {**self.settings, **{name: _value(name, value) for name, value in changes.items()}}
        try:
            self.timeline, self.shown, self.wrong, self.offers = _timeline(settings), settings, "", []
        except PipelineError as error:
            self.wrong, self.offers = str(error), list(_nearest(settings))
        self.settings = settings
        self.refresh()

    def told(self, message: dict[str, Any]) -> Data | None:
        if "set" in message:
            self.set(**message["set"])
            return None
        other = copy(self)  # as it would be with other settings, so that it is there when they come
        other._widgets = []
        other.set(**message["ahead"])
        return {**message, "state": None if other.wrong else json.dumps(other.state())}

    def state(self) -> Data:
        return {
            **super().state(),
            "controls": list(_controls(self.settings, self.schedule)),
            "wrong": bool(self.wrong),
            "note": f"{self.wrong}. Shown is what was possible last." if self.wrong else self._note(),
            "offers": [[label, {name: str(value) for name, value in change.items()}] for label, change in self.offers],
            "code": self.code(),
            "turn": next(self._turns),  # every question gets an answer, also where nothing has changed
        }

    def _note(self) -> str:
        causes = {cause: share for cause, share in self.timeline.causes().items() if abs(share) >= 0.0005}
        parts = ", ".join(f"{cause} {share:.1%}" for cause, share in causes.items())
        said = f"The bubble, {self.timeline.bubble:.1%}, comes of: {parts}." if parts else "There is no bubble."
        peak, cap = max(self.timeline.peak_activations), self.shown["memory"]
        if cap and peak > cap:
            rank = self.timeline.peak_activations.index(peak)
            said += f" Rank {rank} holds {show(peak)} activations, and {show(cap)} are allowed."
        return said

    def code(self) -> str:
        """The Python for what is shown."""
        sizes = "".join(f", {key}={value!r}" for key, value in _sizes(self.shown).items())
        costs = ", ".join(f"{key}={_written(value)}" for key, value in _cost_settings(self.shown).items())
        return f"s = pp.schedule({self.shown['schedule']!r}{sizes})\nt = pp.simulate(s, pp.Costs({costs}))\nt.show()"


def explore(name: str = "1f1b", ranks: int = 4, microbatches: int = 8, **settings: Any) -> Explore:
    """Show a schedule with controls for everything that decides what it takes.

        explore("zb-h1", ranks=4, microbatches=8, latency=0.2)

    settings: where the other controls start: chunks, forward, backward, weight (W's part of the backward, 0 to 1),
        latency, overlap (what an overlapped pair saves, 0 to 0.5) and memory (the most activations that a rank may
        hold; 0 for no limit).

    Raises:
        SettingError: there is no such schedule or control, or the settings cannot work together.
    """
    given = {"schedule": name, "ranks": ranks, "microbatches": microbatches, **settings}
    return Explore({**START, **{key: _value(key, value) for key, value in given.items()}})


def _value(name: str, value: Any) -> Any:
    """A control's value, from what its user or the browser says."""
    if name == "schedule":
        if value not in schedules():
            raise SettingError(f"there is no schedule called {value!r}; there is: {', '.join(schedules())}")
        return value
    limits = {key: (least, most) for key, _, least, most, _ in (*SIZES, *COSTS, MEMORY)}
    if name not in limits:
        raise SettingError(f"there is no control called {name!r}; there is: schedule, {', '.join(limits)}")
    least, most = (Fraction(limit) for limit in limits[name])
    exact: Any = None
    with suppress(ArgumentTypeError):
        exact = number(str(value))
    whole = name in [key for key, *_ in (*SIZES, MEMORY)]
    if exact is None or not least <= exact <= most or (whole and not isinstance(exact, int)):
        raise SettingError(f"{name} is a {'whole ' * whole}number from {show(least)} to {show(most)}; got {value!r}")
    return exact


def _sizes(settings: Settings) -> dict[str, int]:
    """What the schedule is made with."""
    options = options_of(settings["schedule"])
    sizes = {name: settings[name] for name in ("ranks", "microbatches")}
    if "chunks" in options:
        sizes["chunks"] = settings["chunks"]
    if "memory" in options and settings["memory"]:
        sizes["memory"] = settings["memory"]
    return sizes


def _cost_settings(settings: Settings) -> dict[str, Any]:
    forward, backward = settings["forward"], settings["backward"]
    costs = {"forward": forward, "backward": backward}
    if settings["weight"] != Fraction(1, 2):
        costs["weight"] = backward * settings["weight"]
    if settings["overlap"]:
        costs["overlap"] = (forward + backward) * (1 - settings["overlap"])
    if settings["latency"]:
        costs["latency"] = settings["latency"]
    # Exactly, and then as the code for it says it: fractions would be exact to the end, and slow.
    return {name: int(cost) if cost == int(cost) else float(cost) for name, cost in costs.items()}


def _timeline(settings: Settings) -> Timeline:
    made = schedule(settings["schedule"], **_sizes(settings))
    return simulate(made, Costs(**_cost_settings(settings)))


def _nearest(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The next smaller and larger value of each size with which the settings are possible."""
    takes = _sizes(settings)
    for name, label, least, most, _ in SIZES:
        if name not in takes:
            continue
        for way in (range(settings[name] - 1, least - 1, -1), range(settings[name] + 1, most + 1)):
            for value in way:
                try:
                    schedule(settings["schedule"], **{**takes, name: value})
                except PipelineError:
                    continue
                yield f"{value} {label}", {name: value}
                break


def _controls(settings: Settings, shown: Schedule) -> Iterator[Data]:
    """Those that mean something to the schedule; what is shown tells of which actions it is made."""
    name = settings["schedule"]
    options = options_of(name)
    actions = [action for order in shown.orders for action in order] if shown.name == name else []
    ops = {single.op for action in actions for single in action.singles}
    yield {"name": "schedule", "label": "schedule", "choices": list(schedules()), "value": name}
    for key, label, least, most, step in (*SIZES, *COSTS, MEMORY):
        if (
            (key == "chunks" and "chunks" not in options)
            or (key == "weight" and Op.W not in ops)
            or (key == "overlap" and not any(action.parts for action in actions))
        ):
            continue
        limits = {"min": str(least), "max": str(most), "step": str(step)}
        yield {"name": key, "label": label, "value": _written(settings[key]), **limits}


def _written(value: Any) -> str:
    """1, 0.5: as a slider and Python read it."""
    return f"{float(value):.10g}"
