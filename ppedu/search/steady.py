"""The steady state: a pattern that repeats once per microbatch, with the least memory or the least idle time.

In the middle of a long step every rank repeats the same actions, for one microbatch later each time. So the times of a
single microbatch describe the step: those of the others follow at a distance of one period.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from ppedu.core import Op, PipelineError, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.validate import require_count, require_number
from ppedu.search.instance import Instance, Key, held, named, scheduled
from ppedu.search.solve import answers, require_solver
from ppedu.sim import Costs


@dataclass(frozen=True)
class Pattern:
    """A repeating pattern.

    Attributes:
        starts: When microbatch 0 begins each action, in ticks; microbatch m begins it m periods later.
        ticks: The period in ticks.
        memory: What the fullest rank holds, in the unit of `Timeline.peak_activations`.
        status: "optimal" if no pattern with this period needs less memory (or, if the memory was given, none within it
            has a shorter period), else "feasible".
        seconds: The time that the search took.
    """

    instance: Instance
    starts: dict[Key, int]
    ticks: int
    memory: Number
    status: str
    seconds: float

    @property
    def period(self) -> Number:
        """The time between two microbatches, in the unit of the costs."""
        return plain(self.ticks * self.instance.tick)

    def schedule(self, microbatches: int, name: str = "steady") -> Schedule:
        """Return the schedule that repeats the pattern `microbatches` times."""
        count = require_count("microbatches", microbatches)
        begins = [
            (start + microbatch * self.ticks, self.instance.action(part, op, microbatch))
            for (part, op), start in self.starts.items()
            for microbatch in range(count)
        ]
        return scheduled(name, self.instance.placement, count, begins)

    def __str__(self) -> str:
        placement, unit = self.instance.placement, self.instance.costs.unit
        return (
            f"{placement.ranks} ranks, placement {placement.name}: a microbatch every {pretty(self.period, unit)}, "
            f"memory {pretty(self.memory)}, {self.status}; {self.seconds:.1f} s"
        )

    __repr__ = __str__


def steady(
    ranks: int,
    costs: Costs | None = None,
    *,
    memory: Number | None = None,
    placement: Placement | str = "v",
    chunks: int | None = None,
    split: bool = True,
    slices: int | None = None,
    time_limit: float = 10,
    workers: int = 2,
) -> Pattern:
    """Return the repeating pattern that needs the least memory without idle time.

    Needs OR-tools. Among the patterns that need the least memory, it takes one with a short warm-up and cooldown: the
    way of a microbatch through all stages and back, and the time until its weight backwards have ended.

    Args:
        memory: Instead, the shortest period for which a rank holds no more than this, in the unit of
            `Timeline.peak_activations`.
        placement, chunks, split, slices, time_limit, workers: As in `optimal`; the placement has one copy of the
            model. Once it has a pattern, Ctrl+C ends the search with that.

    Raises:
        SettingError: An argument is not possible, or the memory is too little for a single microbatch.
        PipelineError: OR-tools is missing, or nothing was found within the time.
    """
    begin = time.monotonic()
    place = named(placement, ranks, chunks, 1, slices)
    if place.copies > 1:
        raise SettingError("a pattern is of one copy of the model; take the placement loop or v")
    instance = Instance.of(place, 1, costs, split, memory=memory)
    for op in instance.ops:
        if not min(instance.times[op]):  # start times alone do not order such actions
            raise SettingError(f"a pattern is of actions that take time, and an {op} takes none; give it a small time")
    require_number("time_limit", time_limit, lambda each: each > 0, "a number of seconds above 0")
    require_count("workers", workers)
    require_solver()

    def left() -> float:
        return max(0.1, begin + time_limit - time.monotonic())

    work = [sum(instance.times[op][part] for op in instance.ops) for part in range(instance.parts)]
    ticks = max(sum(work[part] for _, part in held(place, rank)) for rank in range(ranks))  # the busiest never idles
    proven = True  # all shorter periods are impossible
    while True:
        model = PatternModel(instance, ticks)
        status = model.solve(left(), workers)
        if status == "OPTIMAL" or (status == "FEASIBLE" and memory is None):
            break
        proven = proven and status == "INFEASIBLE"
        if time.monotonic() - begin >= time_limit:
            raise PipelineError(f"nothing found in {time_limit:g} s; take a larger time_limit")
        ticks += 1
    with suppress(KeyboardInterrupt):
        model.shorten(left(), workers)
    optimal = proven and status == "OPTIMAL"
    size = plain(model.memory * instance.memory_unit)
    return Pattern(instance, model.found, ticks, size, "optimal" if optimal else "feasible", time.monotonic() - begin)


class PatternModel:
    """The constraints on a pattern with a period of `ticks`.

    An action begins in a slot of the period, `lap` periods after the first one has begun: with a period of 6 ticks, an
    action with lap 2 and slot 3 starts at tick 2 · 6 + 3 = 15.

    Attributes:
        found: The starts of the last pattern that was found.
        memory: What its fullest rank holds, in units of `Instance.memory_unit`.
    """

    def __init__(self, instance: Instance, ticks: int):
        from ortools.sat.python.cp_model import CpModel

        self.instance, self.ticks = instance, ticks
        self.found: dict[Key, int] = {}
        self.memory = 0
        self.model = CpModel()
        parts = range(instance.parts)
        self.length: dict[Key, int] = {(part, op): instance.times[op][part] for part in parts for op in instance.ops}
        dependencies = [*instance.dependencies(0)]
        whole = sum(self.length.values()) + sum(delay for _, _, delay in dependencies)
        laps = whole // ticks + 2 * len(parts) + 2
        self.slot = {key: self.model.new_int_var(0, ticks - 1, "") for key in self.length}
        self.lap = {key: self.model.new_int_var(0, laps, "") for key in self.length}
        self.start = {key: self.lap[key] * ticks + self.slot[key] for key in self.length}
        for before, after, delay in dependencies:
            self.model.add(self.start[after] >= self.start[before] + self.length[before] + delay)
        self.model.add(self.lap[0, Op.F] == 0)
        all_parts = sum(sum(sizes) for sizes in instance.kept.values())
        self.most = self.model.new_int_var(0, all_parts * (laps + 1), "")
        if instance.memory is not None:
            self.model.add(self.most <= min(instance.limit, max(self.most.proto.domain)))
        for rank in range(instance.placement.ranks):
            self._rank([part for _, part in held(instance.placement, rank)])
        self.model.minimize(self.most)

    def _rank(self, parts: list[int]) -> None:
        """Let a rank run one action at a time, and count what it holds when a forward begins."""
        model, kept = self.model, self.instance.kept
        # The end of an action may be in the next period, so each action is there twice: in this period and the next.
        intervals = []
        for key in product(parts, self.instance.ops):
            for shift in (0, self.ticks):
                start = self.slot[key] + shift
                intervals.append(model.new_fixed_size_interval_var(start, self.length[key], ""))
        model.add_no_overlap(intervals)
        for now in parts:
            terms = [
                sizes[part] * self._count((now, Op.F), (part, Op.F), (part, freeing))
                for part, ((_, freeing), sizes) in product(parts, kept.items())
                if sizes[part]
            ]
            model.add(sum(terms) <= self.most)

    def _count(self, now: Key, taken: Key, freed: Key) -> Any:
        """Return for how many microbatches memory is taken and not yet freed at the start of `now`.

        At a time t, as many microbatches have passed an event as periods fit between its first time and t. With a
        period of 10, let microbatch 0 take memory at tick 3 (lap 0, slot 3) and free it at 27 (lap 2, slot 7). In slot
        5 of any period, the memory of 2 - 0 + 1 = 3 microbatches is taken: slot 3 has passed, and slot 7 has not.
        """
        model, slot, ticks = self.model, self.slot, self.ticks
        # `freed` ends in the slot `end`, of the next period if `over`.
        end, over = model.new_int_var(0, ticks - 1, ""), model.new_bool_var("")
        model.add(slot[freed] + self.length[freed] == end + ticks * over)
        passed = []
        for event in (slot[taken], end):
            after = model.new_bool_var("")
            model.add(slot[now] >= event).only_enforce_if(after)
            model.add(slot[now] < event).only_enforce_if(after.negated())
            passed.append(after)
        has_taken, has_freed = passed
        return self.lap[freed] + over - self.lap[taken] + has_taken - has_freed

    def solve(self, seconds: float, workers: int) -> str:
        """Find a pattern whose fullest rank holds the least, and return the solver's status."""
        ((_, solver, status),) = answers({"pattern": self.model}, seconds, workers)
        if status in ("OPTIMAL", "FEASIBLE"):
            self.found = {key: int(solver.value(start)) for key, start in self.start.items()}
            self.memory = int(solver.value(self.most))
        return status

    def shorten(self, seconds: float, workers: int) -> None:
        """Find a pattern that needs no more memory than the last one, with a short way there and back."""
        self.model.add(self.most <= self.memory)
        for key, value in self.found.items():
            self.model.add_hint(self.slot[key], value % self.ticks)
            self.model.add_hint(self.lap[key], value // self.ticks)
        back = 0, self.instance.ops[1]  # the last of the way of a microbatch through all stages and back
        way = self.start[back] + self.length[back]
        weights = [start for (_, op), start in self.start.items() if op == "W"]
        self.model.minimize((len(weights) + 1) * way + sum(weights))
        self.solve(seconds, workers)
