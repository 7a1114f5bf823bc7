"""The instance of a search: actions with whole-numbered times, who waits for whom, and how much fits in memory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

from ppedu.core import Action, Op, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, exact, plural, pretty
from ppedu.core.validate import require_count, require_instance, require_number
from ppedu.sim import Costs, Timeline, require_costs, simulate
from ppedu.zoo import schedule as registered
from ppedu.zoo import schedules
from ppedu.zoo.registry import require_registered

OBJECTIVES = ("makespan", "span")
FINEST = 5000  # ticks of the longest action; beyond, times are rounded down to a coarser tick
COARSE = 500  # ticks of the longest action, if times are rounded


@dataclass(frozen=True)
class Instance:
    """A model on ranks, in ticks. Create one with `Instance.of`.

    split: True for backwards in halves, I and W; False for whole ones; None if each may be either.
    pairs: Whether a forward and a whole backward may be an overlapped pair.
    memory: What a rank may hold, in the unit of `Timeline.peak_activations`; None for any amount.
    objective: "makespan", or "span": from a rank's first action to its last, of the rank for which that is longest.
    tick: The time of a tick. error: The largest part by which a time is rounded down to ticks; 0 if none is.
    times: By op, the ticks of each stage; `overlap` those of a pair's part.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    split: bool | None
    pairs: bool
    memory: Number | None
    objective: str
    tick: Fraction
    error: float
    times: dict[Op, list[int]]
    overlap: list[Fraction]

    @classmethod
    def of(
        cls,
        placement: Placement,
        microbatches: int,
        costs: Costs | None,
        split: bool | None,
        pairs: bool,
        memory: Number | None,
        objective: str,
    ) -> Instance:
        """Return the instance.

        Raises:
            SettingError: An argument is not possible, or a rank cannot hold a single microbatch.
        """
        costs = require_costs(costs)
        if costs.links != "free" or costs.recompute:
            raise SettingError("a search knows no occupied links and no recomputation; leave out links and recompute")
        if split is not None:
            require_instance("split", split, bool, "True, False or None")
        require_instance("pairs", pairs, bool, "True or False")
        if not isinstance(objective, str) or objective not in OBJECTIVES:
            raise SettingError(f'objective must be "makespan" or "span"; got {objective!r}')
        if pairs and split:
            raise SettingError("the parts of a pair are a forward and a whole backward; with pairs, take split=None")
        if costs.overlap is not None and not pairs:
            raise SettingError(
                "overlap is the time of a pair, and pairs are not searched for; give pairs=True and split=None, or "
                "leave out overlap"
            )
        stages, ranks = placement.stages, placement.ranks
        times = {op: [*map(exact, each)] for op, each in costs.durations(stages, ranks).items()}
        overlap = [first + second for first, second in zip(times[Op.F], times[Op.B], strict=True)]
        overlap = [each / 2 for each in overlap]
        if costs.overlap is not None:
            overlap = [exact(each) / 2 for each in costs.per_stage(costs.overlap, stages, ranks)]
        delays = [
            exact(costs.delay(*link))
            for holders in placement.holders
            for pair in pairwise(holders)
            for link in (pair, pair[::-1])
        ]
        everything = [*times[Op.F], *times[Op.B], *times[Op.I], *times[Op.W], *delays, *(overlap if pairs else [])]
        longest = max(everything)
        common = math.lcm(*(each.denominator for each in everything))
        tick = Fraction(math.gcd(*(int(each * common) for each in everything)) or 1, common)
        error = 0.0
        if longest / tick > FINEST:
            tick = longest / COARSE
            error = float(max((1 - (each // tick) * tick / each for each in everything if each), default=0))
        ticks = {op: [int(each // tick) for each in row] for op, row in times.items()}
        made = cls(
            placement,
            require_count("microbatches", microbatches),
            costs,
            split,
            pairs,
            memory,
            objective,
            tick,
            error,
            ticks,
            [Fraction(each // tick) if error else each / tick for each in overlap],
        )
        made._require_memory()
        return made

    def _require_memory(self) -> None:
        if self.memory is not None:
            require_number("memory", self.memory, lambda each: 0 < each < math.inf, "a number above 0")
            if self.least_memory > exact(self.memory):
                raise SettingError(
                    f"a memory of {pretty(self.memory)} is too little: a rank holds up to {pretty(self.least_memory)} "
                    "for a single microbatch"
                )

    @property
    def least_memory(self) -> Fraction:
        """The memory that a single microbatch needs on the fullest rank."""
        return max(
            sum((self.activations[stage] for stage, holder in enumerate(holders) if holder == rank), Fraction(0))
            for rank in range(self.placement.ranks)
            for holders in self.placement.holders
        )

    @cached_property
    def activations(self) -> list[Fraction]:
        """The memory that each stage takes for a microbatch."""
        placement = self.placement
        return [*map(exact, self.costs.per_stage(self.costs.activation, placement.stages, placement.ranks))]

    @cached_property
    def room(self) -> tuple[int, list[int], list[int]]:
        """The memory in whole units, and what each stage holds of it for a microbatch: until I, and until W.

        Whole backwards free all of it; it then counts to the second.
        """
        kept = exact(self.costs.weight_memory) if self.split is not False else Fraction(1)
        parts = [[each * part for each in self.activations] for part in (1 - kept, kept)]
        unit = Fraction(1, math.lcm(*(each.denominator for row in parts for each in row)))
        first, second = ([int(each / unit) for each in row] for row in parts)
        most = exact(self.memory) if self.memory is not None else sum(self.activations) * self.microbatches
        return int(most / unit), first, second

    @cached_property
    def copies(self) -> list[range]:
        """The microbatches of each copy of the model."""
        middle = self.placement.split if self.placement.copies > 1 else self.microbatches
        return [range(middle), range(middle, self.microbatches)][: self.placement.copies]

    def held(self, rank: int) -> Iterator[tuple[int, range]]:
        """Yield the stages that a rank holds, each with its microbatches."""
        for holders, microbatches in zip(self.placement.holders, self.copies, strict=True):
            yield from ((stage, microbatches) for stage, holder in enumerate(holders) if holder == rank)

    def delay(self, sender: int, receiver: int, microbatch: int) -> int:
        """Return the ticks of a message from a stage to another."""
        ranks = self.placement.rank(sender, microbatch), self.placement.rank(receiver, microbatch)
        return int(exact(self.costs.delay(*ranks)) // self.tick) if ranks[0] != ranks[1] else 0

    def work(self, stage: int) -> int:
        """Return the least ticks of a stage's actions for a microbatch."""
        return self.times[Op.F][stage] + self._backward(stage)

    def pair(self, forward: int, backward: int) -> int:
        """Return the ticks of an overlapped pair of the forward and the backward of two stages."""
        return int(self.overlap[forward] + self.overlap[backward])

    @cached_property
    def in_ticks(self) -> Costs:
        """The costs in ticks."""
        ranks = range(self.placement.ranks)
        links = {(a, b): int(exact(self.costs.delay(a, b)) // self.tick) for a in ranks for b in ranks if a != b}
        return replace(
            self.costs,
            forward=self.times[Op.F],
            backward=self.times[Op.B],
            input=self.times[Op.I],
            weight=self.times[Op.W],
            overlap=[2 * each for each in self.overlap],
            latency=links or 0,
            transfer=0,
            unit="",
        )

    def in_order(self) -> tuple[Instance, int]:
        """Return the instance in finer ticks, of which each action takes at least one; and how many are in a tick.

        Actions that take no time also hold memory, one after the other, which start times alone do not show. All of
        them together take less than a tick, so that schedules within n ticks are those within n + 1, exclusive.
        """
        least = [each for row in self.times.values() for each in row] + (self.overlap if self.pairs else [])
        if min(least) > 0:
            return self, 1
        fine = 3 * self.microbatches * self.placement.stages + 1
        times = {op: [each * fine or 1 for each in row] for op, row in self.times.items()}
        overlap = [each * fine or Fraction(1, 2) for each in self.overlap]
        return replace(self, tick=self.tick / fine, times=times, overlap=overlap), fine

    def value(self, timeline: Timeline) -> Any:
        """Return the objective."""
        return timeline.makespan if self.objective == "makespan" else timeline.span

    def ticks_of(self, schedule: Schedule) -> int | None:
        """Return the objective of a schedule in ticks; None if it does not fit in memory."""
        timeline = simulate(schedule, self.in_ticks)
        if self.memory is not None and max(map(exact, timeline.peak_activations)) > exact(self.memory):
            return None
        return math.ceil(self.value(timeline))

    def published(self) -> Iterator[Schedule]:
        """Yield the registered schedules with this placement, with their backwards split or whole as asked for."""
        for name in schedules():
            entry = require_registered(name)
            if entry.forward_only:
                continue
            takes_chunks = "chunks" in inspect.signature(entry.generator).parameters
            options = {"chunks": self.placement.chunks} if takes_chunks else {}
            with suppress(Exception):  # it does not exist for this size, or a registered generator is unfinished
                made = registered(name, self.placement.ranks, self.microbatches, **options)
                made.validate()
                if made.placement.holders == self.placement.holders and (adapted := self._adapted(made)):
                    yield adapted

    def _adapted(self, schedule: Schedule) -> Schedule | None:
        """Return a schedule with split or whole backwards as asked for, without pairs if there may be none."""
        orders: list[list[Action]] = []
        for order in schedule.orders:
            singles = [each for action in order for each in ([action] if self.pairs else action.singles)]
            if self.split is False and any(each.op == "W" for each in singles):
                return None
            if self.pairs and any(part.op == "I" for each in singles for part in each.parts):
                return None
            if self.split:
                singles = [half for each in singles for half in halves(each)]
            orders.append(singles)
        return replace(schedule, placement=self.placement, orders=tuple(map(tuple, orders)))

    def one_by_one(self) -> Schedule:
        """Return the schedule that needs the least memory: a microbatch at a time."""
        orders: list[list[Action]] = [[] for _ in range(self.placement.ranks)]
        stages = range(self.placement.stages)
        for microbatch in range(self.microbatches):
            actions = [Action(stage, Op.F, microbatch) for stage in stages]
            actions += [Action(stage, Op.B, microbatch) for stage in reversed(stages)]
            for action in actions:
                order = orders[self.placement.rank(action.stage, microbatch)]
                order += halves(action) if self.split else [action]
        return Schedule("one by one", self.placement, self.microbatches, tuple(map(tuple, orders)))

    @cached_property
    def bound(self) -> int:
        """Ticks below which the objective cannot be; see `_bounds`."""
        return max(self._bounds())

    def _bounds(self) -> Iterator[int]:
        """Yield closed bounds: the work of each rank after its first input; the way of a microbatch; the memory.

        The last counts that a rank holds an activation until its gradient has come back, so that the sum of these times
        is at most the memory times the step.
        """
        last = self.placement.stages - 1
        whole = self.objective == "makespan"
        for rank in range(self.placement.ranks):
            heads, work, saved, energy = [], 0, 0, Fraction(0)
            for stage, microbatches in self.held(rank):
                if not microbatches:
                    continue
                first = microbatches[0]
                heads.append(self._way(Op.F, range(stage), first))
                count = len(microbatches)
                work += count * self.work(stage)
                out = self._way(Op.F, range(stage, last), first) + self.times[Op.F][last]
                back = self._way(Op.I, range(last, stage, -1), first) + self._backward(stage)
                energy += count * self._lasts(stage, out, back) * self.activations[stage]
                if self.pairs:
                    others = [other for other, some in self.held(rank) if some]
                    each = self.times[Op.F][stage]
                    saved += count * max(0, *(each + self.times[Op.B][o] - self.pair(stage, o) for o in others))
            head = min(heads, default=0) if whole else 0
            yield head + work - saved
            if self.memory is not None and not self.pairs:
                yield head + math.ceil(energy / exact(self.memory))
        if whole and not self.pairs:
            for microbatches in self.copies:
                if microbatches:
                    there = self._way(Op.F, range(last), microbatches[0]) + self.times[Op.F][last]
                    yield there + self._way(Op.I, range(last, 0, -1), microbatches[0]) + self._backward(0)

    def _lasts(self, stage: int, out: int, back: int) -> Fraction:
        """Return for how many ticks a stage holds an activation, weighted by the part that it holds."""
        kept = exact(self.costs.weight_memory) if self.split is not False else Fraction(1)
        if self.split is None:
            return Fraction(out + back - self._backward(stage))
        weight = self.times[Op.W][stage] if self.split else 0
        return out + back - weight * (1 - kept)

    def _backward(self, stage: int) -> int:
        """Return the least ticks of a stage's backward, both halves together."""
        both, whole = self.times[Op.I][stage] + self.times[Op.W][stage], self.times[Op.B][stage]
        return whole if self.split is False else both if self.split else min(both, whole)

    def _way(self, op: Op, stages: range, microbatch: int) -> int:
        """Return the ticks of a microbatch through these stages and on to the next one, messages included."""
        if op == "F":
            times = self.times[Op.F]
        else:
            whole, first = self.times[Op.B], self.times[Op.I]
            times = whole if self.split is False else first if self.split else [*map(min, whole, first)]
        step = stages.step
        return sum(times[stage] + self.delay(stage, stage + step, microbatch) for stage in stages)

    def __str__(self) -> str:
        size = f"{plural(self.placement.ranks, 'rank')}, {plural(self.microbatches, 'microbatch')}"
        return f"{size}, placement {self.placement.name}"


def halves(action: Action) -> list[Action]:
    """Return a whole backward as its two halves, and any other action as it is."""
    if action.op != "B":
        return [action]
    return [Action(action.stage, Op.I, action.microbatch), Action(action.stage, Op.W, action.microbatch)]
