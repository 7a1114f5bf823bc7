"""The steady state: a pattern that repeats once per microbatch, with the least memory or the least idle time.

In the middle of a long step every rank repeats the same actions, for one microbatch later each time. So the times of a
single microbatch describe the step: those of the others follow at a distance of one period.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppedu.core import Action, Op, PipelineError, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.validate import require_count, require_number
from ppedu.search.instance import Instance
from ppedu.search.optimal import named
from ppedu.search.solve import answers, require_solver
from ppedu.sim import Costs

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

Key = tuple[int, Op]  # a stage and an op


@dataclass(frozen=True)
class Pattern:
    """A repeating pattern.

    starts: When microbatch 0 begins each action, in ticks; microbatch m begins it m periods later.
    period: The time between two microbatches, in the unit of the costs.
    memory: What the fullest rank holds, in the unit of `Timeline.peak_activations`.
    status: "optimal" if no pattern with this period needs less memory (or, if the memory was given, none within it has
        a shorter period), else "feasible".
    """

    instance: Instance
    starts: dict[Key, int]
    ticks: int
    memory: Number
    status: str
    seconds: float

    @property
    def period(self) -> Number:
        return plain(self.ticks * self.instance.tick)

    def schedule(self, microbatches: int, name: str = "steady") -> Schedule:
        """Return the schedule that repeats the pattern `microbatches` times."""
        placement, count = self.instance.placement, require_count("microbatches", microbatches)
        orders: list[list[tuple[int, int, int, Action]]] = [[] for _ in range(placement.ranks)]
        for index, ((stage, op), start) in enumerate(self.starts.items()):
            called = Op.B if op == "I" and not self.instance.split else op
            for microbatch in range(count):
                action = Action(stage, called, microbatch)
                begin = start + microbatch * self.ticks
                orders[placement.rank(stage)].append((begin, index, microbatch, action))
        return Schedule(name, placement, count, tuple(tuple(each[-1] for each in sorted(order)) for order in orders))

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
    time_limit: float = 10,
    workers: int = 2,
) -> Pattern:
    """Return the repeating pattern that needs the least memory without idle time.

    Needs OR-tools. Among the patterns that need the least memory, it takes one with a short warm-up and cooldown: the
    way of a microbatch through all stages and back, and the time until its weight backwards have ended.

    memory: Instead, the shortest period for which a rank holds no more than this, in the unit of
        `Timeline.peak_activations`.
    placement, chunks, split, time_limit, workers: As in `optimal`; the placement has one copy of the model. Once it has
        a pattern, Ctrl+C ends the search with that.

    Raises:
        SettingError: An argument is not possible, or the memory is too little for a single microbatch.
        PipelineError: OR-tools is missing, or nothing was found within the time.
    """
    begin = time.monotonic()
    place = named(placement, ranks, chunks, 1)
    if place.copies > 1:
        raise SettingError("a pattern is of one copy of the model; take the placement loop or v")
    if split is None:
        raise SettingError("split must be True or False for a pattern; got None")
    instance = Instance.of(place, 1, costs, split, False, memory, "makespan")
    for op in (Op.F, Op.I, Op.W) if split else (Op.F, Op.B):
        if not min(instance.times[op]):  # start times alone do not order such actions
            raise SettingError(f"a pattern is of actions that take time, and an {op} takes none; give it a small time")
    require_number("time_limit", time_limit, lambda each: each > 0, "a number of seconds above 0")
    require_count("workers", workers)
    require_solver()

    def left() -> float:
        return max(0.1, begin + time_limit - time.monotonic())

    ticks = max(sum(instance.work(stage) for stage, _ in instance.held(rank)) for rank in range(place.ranks))
    proven = True
    while True:
        model = PatternModel(instance, ticks)
        status, size = model.least_memory(left(), workers)
        if status == "OPTIMAL" or (status == "FEASIBLE" and memory is None):
            break
        proven = proven and status == "INFEASIBLE"
        if time.monotonic() - begin >= time_limit:
            raise PipelineError(f"nothing found in {time_limit:g} s; take a larger time_limit")
        ticks += 1
    starts = model.found
    with suppress(KeyboardInterrupt):
        starts, _ = model.shortest(size, left(), workers)
    optimal = proven and status == "OPTIMAL"
    _, sizes, more = instance.room
    unit = instance.activations[0] / (sizes[0] + more[0]) if sizes[0] + more[0] else 0
    held = plain(size * unit)
    return Pattern(instance, starts, ticks, held, "optimal" if optimal else "feasible", time.monotonic() - begin)


class PatternModel:
    """The constraints on a pattern with a period of `ticks`."""

    def __init__(self, instance: Instance, ticks: int):
        from ortools.sat.python.cp_model import CpModel

        self.instance, self.ticks = instance, ticks
        self.model = CpModel()
        stages = range(instance.placement.stages)
        ops = (Op.F, Op.I, Op.W) if instance.split else (Op.F, Op.I)
        self.length = {
            (stage, op): instance.times[Op.B if op == "I" and not instance.split else op][stage]
            for stage in stages
            for op in ops
        }
        delays = sum(instance.delay(stage, other, 0) for stage in stages for other in (stage + 1,) if other in stages)
        laps = (sum(self.length.values()) + 2 * delays) // ticks + 2 * len(stages) + 2
        self.slot = {key: self.model.new_int_var(0, ticks - 1, "") for key in self.length}
        self.lap = {key: self.model.new_int_var(0, laps, "") for key in self.length}
        self.start = {key: self.lap[key] * ticks + self.slot[key] for key in self.length}
        self._dependencies(stages)
        _, until_input, until_weight = instance.room
        self.most = self.model.new_int_var(0, (sum(until_input) + sum(until_weight)) * (laps + 1), "")
        for rank in range(instance.placement.ranks):
            self._rank([stage for stage, _ in instance.held(rank)])

    def _dependencies(self, stages: range) -> None:
        model, start, length = self.model, self.start, self.length
        for stage in stages:
            forward, backward = (stage, Op.F), (stage, Op.I)
            if stage:
                before = stage - 1, Op.F
                model.add(start[forward] >= start[before] + length[before] + self.instance.delay(stage - 1, stage, 0))
            if stage + 1 in stages:
                before = stage + 1, Op.I
                delay = self.instance.delay(stage + 1, stage, 0)
                model.add(start[backward] >= start[before] + length[before] + delay)
            model.add(start[backward] >= start[forward] + length[forward])
            if self.instance.split:
                model.add(start[stage, Op.W] >= start[backward] + length[backward])
        model.add(self.lap[0, Op.F] == 0)

    def _rank(self, stages: list[int]) -> None:
        """Let a rank run one action at a time, and count what it holds when a forward begins."""
        model, ticks = self.model, self.ticks
        mine = [key for key in self.length if key[0] in stages]
        # The end of an action may be in the next period.
        turns = ((self.slot[key] + shift, self.length[key]) for key in mine for shift in (0, ticks))
        model.add_no_overlap(model.new_fixed_size_interval_var(start, length, "") for start, length in turns)
        _, until_input, until_weight = self.instance.room
        last = Op.W if self.instance.split else Op.I
        for now in stages:
            held: list[Any] = []
            for stage in stages:
                for op, size in ((Op.I, until_input[stage]), (last, until_weight[stage])):
                    if size:
                        held.append(size * self._count((now, Op.F), (stage, Op.F), (stage, op)))
            model.add(sum(held) <= self.most)

    def _count(self, now: Key, taken: Key, freed: Key) -> Any:
        """Return for how many microbatches memory is taken and not yet freed at the start of `now`.

        At a time t, as many microbatches have passed an event as periods fit between its first time and t.
        """
        model, slot, ticks = self.model, self.slot, self.ticks
        end, over = model.new_int_var(0, ticks - 1, ""), model.new_bool_var("")
        model.add(slot[freed] + self.length[freed] == end + ticks * over)
        passed = []
        for event in (slot[taken], end):
            after = model.new_bool_var("")
            model.add(slot[now] >= event).only_enforce_if(after)
            model.add(slot[now] < event).only_enforce_if(after.negated())
            passed.append(after)
        return self.lap[freed] + over - self.lap[taken] + passed[0] - passed[1]

    def least_memory(self, seconds: float, workers: int) -> tuple[str, int]:
        """Return the solver's status, and the least memory that the fullest rank needs, in units of `Instance.room`."""
        if self.instance.memory is not None:
            largest = max(self.most.proto.domain)
            self.model.add(self.most <= min(self.instance.room[0], largest))
        self.model.minimize(self.most)
        solver, status = self._solve(seconds, workers)
        return status, int(solver.value(self.most)) if status in ("OPTIMAL", "FEASIBLE") else 0

    def shortest(self, memory: int, seconds: float, workers: int) -> tuple[dict[Key, int], bool]:
        """Return the starts of a pattern in this memory with a short way there and back; whether none is shorter."""
        self.model.add(self.most <= memory)
        first = self.start[0, Op.I] + self.length[0, Op.I]
        tails = [self.start[key] for key in self.length if key[1] == "W"]
        self.model.minimize((len(tails) + 1) * first + sum(tails))
        for key, value in self.found.items():
            self.model.add_hint(self.slot[key], value % self.ticks)
            self.model.add_hint(self.lap[key], value // self.ticks)
        _, status = self._solve(seconds, workers)
        return self.found, status == "OPTIMAL"

    def _solve(self, seconds: float, workers: int) -> tuple[CpSolver, str]:
        ((_, solver, status),) = answers({"pattern": self.model}, seconds, workers)
        if status in ("OPTIMAL", "FEASIBLE"):
            self.found = {key: int(solver.value(start)) for key, start in self.start.items()}
        return solver, status
