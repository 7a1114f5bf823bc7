"""The instance of a search: actions with whole-numbered times, who waits for whom, and how much fits in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from operator import mul, sub
from typing import Any

from ppedu.core import Action, Op, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, exact, plural, pretty
from ppedu.core.validate import require_count, require_instance, require_number
from ppedu.sim import Costs, require_costs, simulate
from ppedu.sim.per_link import Link
from ppedu.zoo import schedule as registered
from ppedu.zoo import schedules
from ppedu.zoo.registry import options_of

Key = tuple[int, Op]  # a stage and an op
FINEST = 5000  # ticks of the longest action; beyond, times are rounded down to a coarser tick
COARSE = 500  # ticks of the longest action, if times are rounded


@dataclass(frozen=True)
class Instance:
    """A model on ranks, in ticks. Create one with `Instance.of`.

    Attributes:
        split: Whether backwards are in halves, I and W.
        pairs: Whether a forward and a whole backward may be an overlapped pair.
        memory: What a rank may hold, in the unit of `Timeline.peak_activations`; None for any amount.
        tick: The time of a tick.
        error: The largest part by which a time is rounded down to ticks; 0 if none is.
        times: By op, the ticks of each stage.
        overlap: By stage, the ticks of a pair's part.
        delays: The ticks of messages, by link.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    split: bool
    pairs: bool
    memory: Number | None
    tick: Fraction
    error: float
    times: dict[Op, list[int]]
    overlap: list[int]
    delays: dict[Link, int]

    @classmethod
    def of(
        cls,
        placement: Placement,
        microbatches: int,
        costs: Costs | None,
        split: bool = True,
        pairs: bool = False,
        memory: Number | None = None,
    ) -> Instance:
        """Return the instance.

        Raises:
            SettingError: An argument is not possible, or a rank cannot hold a single microbatch.
        """
        costs = require_costs(costs)
        if costs.transport != "buffered" or costs.recompute:
            raise SettingError("a search has no occupied links and no recomputation; leave out transport and recompute")
        if costs.lengths:
            raise SettingError("a search is for whole sequences; leave out lengths")
        require_instance("split", split, bool, "True or False")
        require_instance("pairs", pairs, bool, "True or False")
        if pairs and split:
            raise SettingError("the parts of a pair are a forward and a whole backward; with pairs, take split=False")
        if costs.overlap is not None and not pairs:
            raise SettingError(
                "overlap is the time of a pair, and pairs are not searched for; give pairs=True and split=False, or "
                "leave out overlap"
            )
        stages, ranks = placement.stages, placement.ranks
        lengths = costs.durations(stages, ranks)
        times = {op: [exact(time) for time in lengths[op]] for op in (Op.F, Op.B, Op.I, Op.W)}
        if costs.overlap is None:
            of_pair = [forward + backward for forward, backward in zip(times[Op.F], times[Op.B], strict=True)]
        else:
            of_pair = [exact(time) for time in costs.per_stage(costs.overlap, stages, ranks)]
        overlap = [time / 2 for time in of_pair]
        links: set[Link] = set()
        for holders in placement.holders:
            for rank, following in pairwise(holders):
                if rank != following:
                    links |= {(rank, following), (following, rank)}
        delays = {link: exact(costs.delay(*link)) for link in links}
        every = [*chain(*times.values()), *delays.values()]
        if pairs:
            every += overlap
        tick, error = _tick(every)
        found = cls(
            placement,
            require_count("microbatches", microbatches),
            costs,
            split,
            pairs,
            memory,
            tick,
            error,
            times={op: [int(time // tick) for time in row] for op, row in times.items()},
            overlap=[int(time // tick) for time in overlap],
            delays={link: int(delay // tick) for link, delay in delays.items()},
        )
        if memory is not None:
            require_number("memory", memory, lambda each: 0 < each < math.inf, "a number above 0")
            if found.least_memory > exact(memory):
                raise SettingError(
                    f"a memory of {pretty(memory)} is too little: a rank holds up to {pretty(found.least_memory)} for "
                    "a single microbatch"
                )
        return found

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of a stage, in order. The second sends the gradient on, and the last ends a microbatch."""
        return (Op.F, Op.I, Op.W) if self.split else (Op.F, Op.B)

    @property
    def least_memory(self) -> Fraction:
        """The memory that a single microbatch needs on the fullest rank."""
        most = Fraction(0)
        for holders in self.placement.holders:
            on_rank = [Fraction(0)] * self.placement.ranks
            for stage, rank in enumerate(holders):
                on_rank[rank] += self.activations[stage]
            most = max(most, *on_rank)
        return most

    @cached_property
    def activations(self) -> list[Fraction]:
        """The memory that each stage takes for a microbatch."""
        placement = self.placement
        return [*map(exact, self.costs.per_stage(self.costs.activation, placement.stages, placement.ranks))]

    @cached_property
    def _freed_exactly(self) -> dict[Op, list[Fraction]]:
        """By op, the memory that each stage frees at its end."""
        if not self.split:
            return {Op.B: self.activations}
        stages = self.placement.stages
        parts = map(exact, self.costs.per_stage(self.costs.weight_memory, stages, stages))
        kept = [*map(mul, self.activations, parts)]
        return {Op.I: [*map(sub, self.activations, kept)], Op.W: kept}

    @cached_property
    def memory_unit(self) -> Fraction:
        """A unit of memory of which all sizes in `freed` are multiples: a solver knows only whole numbers."""
        denominators = [size.denominator for sizes in self._freed_exactly.values() for size in sizes]
        return Fraction(1, math.lcm(*denominators))

    @cached_property
    def freed(self) -> dict[Op, list[int]]:
        """By op, the units of memory that each stage frees at its end; without ops that free nothing.

        A forward takes at its start all that the backward frees. If an activation is 1, of which W needs a quarter, I
        frees three quarters: the unit is 1/4, and each stage frees 3 at the end of I and 1 at the end of W.
        """
        found = {}
        for op, sizes in self._freed_exactly.items():
            if any(sizes):
                found[op] = [int(size / self.memory_unit) for size in sizes]
        return found

    @cached_property
    def limit(self) -> int:
        """The memory that was given, in units of `memory_unit`, rounded down."""
        return int(exact(self.memory) / self.memory_unit)

    @cached_property
    def copies(self) -> list[range]:
        """The microbatches of each copy of the model."""
        if self.placement.copies == 1:
            return [range(self.microbatches)]
        return [range(self.placement.split), range(self.placement.split, self.microbatches)]

    def dependencies(self, copy: int) -> Iterator[tuple[Key, Key, int]]:
        """Yield pairs of a microbatch's actions, of which the second waits for the first, and the ticks of the message.

        An action is the second of its pairs before it is the first of any.
        """
        holders, backward = self.placement.holders[copy], self.ops[1]
        last = self.placement.stages - 1
        for stage in range(last):
            delay = self.delays.get((holders[stage], holders[stage + 1]), 0)
            yield (stage, Op.F), (stage + 1, Op.F), delay
        for stage in reversed(range(last + 1)):
            yield (stage, Op.F), (stage, backward), 0
            if stage < last:
                delay = self.delays.get((holders[stage + 1], holders[stage]), 0)
                yield (stage + 1, backward), (stage, backward), delay
            if self.split:
                yield (stage, Op.I), (stage, Op.W), 0

    @cached_property
    def in_ticks(self) -> Costs:
        """The costs in ticks."""
        return replace(
            self.costs,
            forward=self.times[Op.F],
            backward=self.times[Op.B],
            input=self.times[Op.I],
            weight=self.times[Op.W],
            overlap=[2 * each for each in self.overlap],
            latency=self.delays or 0,
            transfer=0,
            unit="",
        )

    def in_order(self) -> tuple[Instance, int]:
        """Return the instance in finer ticks, of which each action takes at least one; and how many are in a tick.

        Actions that take no time also hold memory, one after the other, which start times alone do not show. So a tick
        is cut into more parts than there are actions, and an action that takes no time takes one part. All of them
        together take less than a tick: with 100 parts, schedules within 7 ticks become those within 799 parts.
        """
        if min(*chain(*self.times.values()), *(self.overlap if self.pairs else [])) > 0:
            return self, 1
        parts = 3 * self.microbatches * self.placement.stages + 1
        times = {op: [max(1, time * parts) for time in row] for op, row in self.times.items()}
        overlap = [max(1, time * parts) for time in self.overlap]
        delays = {link: delay * parts for link, delay in self.delays.items()}
        return replace(self, tick=self.tick / parts, times=times, overlap=overlap, delays=delays), parts

    def ticks_of(self, schedule: Schedule) -> Any:
        """Return the makespan of a schedule in ticks; infinite if it does not fit in memory."""
        timeline = simulate(schedule, self.in_ticks)
        if self.memory is not None and max(map(exact, timeline.peak_activations)) > exact(self.memory):
            return math.inf
        return timeline.makespan

    def published(self) -> Iterator[Schedule]:
        """Yield the registered schedules with this placement, with their backwards split or whole as asked for.

        Those that recompute are left out.
        """
        for name in schedules():
            with suppress(Exception):  # it does not exist for this size, or a registered generator is unfinished
                options = {"chunks": self.placement.chunks} if "chunks" in options_of(name) else {}
                found = registered(name, self.placement.ranks, self.microbatches, **options)
                found.validate()
                if found.forward_only or not found.plain or found.placement.holders != self.placement.holders:
                    continue
                orders = tuple(tuple(self._adapted(order)) for order in found.orders)
                has_halves = any(action.op == "W" for order in orders for action in order)
                if self.split or not has_halves:
                    yield replace(found, placement=self.placement, orders=orders)

    def _adapted(self, order: Sequence[Action]) -> Iterator[Action]:
        """Yield actions without pairs if there may be none, and with whole backwards in halves if these are split."""
        for action in order:
            for each in [action] if self.pairs else action.singles:
                if self.split and each.op == "B":
                    yield Action(each.stage, Op.I, each.microbatch)
                    yield Action(each.stage, Op.W, each.microbatch)
                else:
                    yield each

    def one_by_one(self) -> Schedule:
        """Return the schedule that needs the least memory: a microbatch at a time."""
        stages = range(self.placement.stages)
        forwards = [(stage, Op.F) for stage in stages]
        backwards = [(stage, op) for stage in reversed(stages) for op in self.ops[1:]]
        actions = [Action(*key, microbatch) for microbatch in range(self.microbatches) for key in forwards + backwards]
        return scheduled("one by one", self.placement, self.microbatches, enumerate(actions))

    @cached_property
    def bound(self) -> int:
        """Ticks below which the makespan cannot be, by closed formulas.

        A microbatch passes all stages and comes back. The other bounds are those of `_bounds_of`, for each rank.
        """
        ends = [self._ends(copy) for copy in range(self.placement.copies)]  # of a microbatch alone
        bounds = []
        if not self.pairs:
            for copy, microbatches in enumerate(self.copies):
                if microbatches:
                    bounds.append(ends[copy][0, self.ops[-1]])
        for rank in range(self.placement.ranks):
            bounds += self._bounds_of(rank, ends)
        return max(bounds)

    def _bounds_of(self, rank: int, ends: Sequence[Mapping[Key, int]]) -> Iterator[int]:
        """Yield bounds on the makespan by the work and the memory of a rank.

        The rank works on all microbatches after its first input. And it holds an activation until its gradient has come
        back, so that the sum of these times, each multiplied with the size of the activation, is at most the memory
        times the step: if it holds 8 activations, each for 6 ticks at least, a memory of 2 needs 8 · 6 / 2 = 24 ticks.

        Args:
            ends: By copy of the model, when each action of a microbatch alone ends.
        """
        stages = [(copy, stage) for copy, stage in held(self.placement, rank) if self.copies[copy]]
        begins, work, memory_times_ticks = [], 0, 0
        for copy, stage in stages:
            count = len(self.copies[copy])
            begin = ends[copy][stage, Op.F] - self.times[Op.F][stage]
            begins.append(begin)
            work += count * sum(self.times[op][stage] for op in self.ops)
            for op, sizes in self.freed.items():
                lifetime = ends[copy][stage, op] - begin
                memory_times_ticks += count * sizes[stage] * lifetime
            if self.pairs:
                work -= count * self._most_saved(stage, [other for _, other in stages])
        first = min(begins, default=0)
        yield first + work
        if self.memory is not None and not self.pairs:
            yield first + math.ceil(memory_times_ticks * self.memory_unit / exact(self.memory))

    def _most_saved(self, stage: int, partners: Iterable[int]) -> int:
        """Return the most ticks that a pair saves: of a stage's forward with a backward of one of the partners."""
        saved = 0
        for partner in partners:
            apart = self.times[Op.F][stage] + self.times[Op.B][partner]
            together = self.overlap[stage] + self.overlap[partner]
            saved = max(saved, apart - together)
        return saved

    def _ends(self, copy: int) -> dict[Key, int]:
        """Return when each action of a microbatch ends if it is alone."""
        ends = {(0, Op.F): self.times[Op.F][0]}
        for before, after, delay in self.dependencies(copy):
            stage, op = after
            ends[after] = max(ends.get(after, 0), ends[before] + delay + self.times[op][stage])
        return ends

    def __str__(self) -> str:
        size = f"{plural(self.placement.ranks, 'rank')}, {plural(self.microbatches, 'microbatch')}"
        return f"{size}, placement {self.placement.name}"


def _tick(times: Sequence[Fraction]) -> tuple[Fraction, float]:
    """Return a tick, and the largest part by which times are rounded down to whole ticks.

    It is the largest of which all times are multiples, unless the longest would be more than `FINEST` of these. The
    tick of 1/2 and 3/4 is 1/4: they are 2 and 3 ticks.
    """
    common = math.lcm(*(time.denominator for time in times))
    multiples = [int(time * common) for time in times]
    tick = Fraction(math.gcd(*multiples) or 1, common)  # the divisor is 0 if all times are 0
    longest = max(times)
    if longest / tick <= FINEST:
        return tick, 0.0
    tick = longest / COARSE
    lost = [1 - (time // tick) * tick / time for time in times if time]
    return tick, float(max(lost))


def named(given: Placement | str, ranks: int, chunks: int | None, microbatches: int) -> Placement:
    """Return the placement that a search was given."""
    if isinstance(given, Placement):
        if given.ranks != require_count("ranks", ranks):
            raise SettingError(f"the placement is for {given.ranks} ranks; got ranks={ranks}")
        if chunks is not None:
            raise SettingError("the chunks are those of the placement; leave out chunks")
        if given.slices > 1:
            raise SettingError("a search is for whole sequences; give a placement with slices=1")
        return given
    require_instance("placement", given, str, 'a Placement, or "loop", "v" or "bidirectional"')
    if chunks is None:
        chunks = 2 if given == "v" else 1
    return Placement.make(given, ranks, chunks, microbatches)


def held(placement: Placement, rank: int) -> list[tuple[int, int]]:
    """Return the stages that a rank holds, each with its copy of the model before it."""
    found = []
    for copy, holders in enumerate(placement.holders):
        found += [(copy, stage) for stage, holder in enumerate(holders) if holder == rank]
    return found


def scheduled(name: str, placement: Placement, microbatches: int, begins: Iterable[tuple[int, Action]]) -> Schedule:
    """Return the schedule in which each rank runs its actions in the order of their begins."""
    orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for _, action in sorted(begins):
        first = action.singles[0]
        orders[placement.rank(first.stage, first.microbatch)].append(action)
    return Schedule(name, placement, microbatches, tuple(map(tuple, orders)))
