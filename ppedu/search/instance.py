"""The instance of a search: actions with whole-numbered times, who waits for whom, and how much fits in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise, product, starmap
from operator import add, mul, sub
from typing import Any

from ppedu.core import Action, Op, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, exact, plural, pretty
from ppedu.core.validate import require_count, require_instance, require_number
from ppedu.sim import Costs, require_costs, simulate
from ppedu.sim.clock import of_slices
from ppedu.sim.costs import Table
from ppedu.sim.lengths import shares_of
from ppedu.sim.per_link import Link

Key = tuple[int, Op]  # a part and an op
FINEST = 5000  # ticks of the longest action; beyond, times are rounded down to a coarser tick
COARSE = 500  # ticks of the longest action, if times are rounded


@dataclass(frozen=True)
class Instance:
    """A model on ranks, in ticks. Create one with `Instance.of`.

    A *part* is a slice in a stage, which all microbatches have alike: with 4 slices, slice 1 in stage 2 is part
    2 · 4 + 1 = 9. Sequences that are whole have a part for each stage.

    Attributes:
        microbatches: Whole ones, whatever their slices.
        split: Whether backwards are in halves, I and W.
        pairs: Whether a forward and a whole backward may be an overlapped pair.
        recompute: Whether a stage may recompute its activations, as an R for each microbatch.
        memory: What a rank may hold, in the unit of `Timeline.peak_activations`; None for any amount.
        tick: The time of a tick.
        error: The largest part by which a time is rounded down to ticks; 0 if none is.
        times: By op, the ticks of each part.
        overlap: By part, the ticks of its share of a pair; empty without pairs.
        delays: The ticks of messages, by link.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    split: bool
    pairs: bool
    recompute: bool
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
        recompute: bool = False,
    ) -> Instance:
        """Return the instance.

        Raises:
            SettingError: An argument is not possible, or a rank cannot hold a single microbatch.
        """
        costs = require_costs(costs)
        if costs.transport != "buffered" or costs.recompute:
            raise SettingError(
                "a search has no occupied links, and recomputation only as an action: leave out transport, and give "
                "recompute=True to the search"
            )
        for name, value in (("split", split), ("pairs", pairs), ("recompute", recompute)):
            require_instance(name, value, bool, "True or False")
        if pairs and split:
            raise SettingError("the parts of a pair are a forward and a whole backward; with pairs, take split=False")
        if pairs and (recompute or placement.slices > 1):
            raise SettingError("pairs are searched for in whole sequences without recomputation; leave out pairs")
        if costs.overlap is not None and not pairs:
            raise SettingError(
                "overlap is the time of a pair, and pairs are not searched for; give pairs=True and split=False, or "
                "leave out overlap"
            )
        stages, ranks, slices = placement.stages, placement.ranks, placement.slices
        lengths = of_slices(costs.durations(stages, ranks, slices=slices), slices, slices, costs)
        ops = (*halves(split), *([Op.R] if recompute else []))
        times = {op: [exact(time) for row in lengths[op] for time in row] for op in ops}
        overlap = []
        if pairs:
            of_pair = [*map(add, times[Op.F], times[Op.B])]
            if costs.overlap is not None:
                of_pair = [exact(time) for time in costs.per_stage(costs.overlap, stages, ranks)]
            overlap = [time / 2 for time in of_pair]
        links: set[Link] = set()
        for holders in placement.holders:
            for rank, following in pairwise(holders):
                if rank != following:
                    links |= {(rank, following), (following, rank)}
        delays = {link: exact(costs.delay(*link)) for link in links}
        tick, error = _tick([*chain(*times.values()), *overlap, *delays.values()])
        found = cls(
            placement,
            require_count("microbatches", microbatches),
            costs,
            split,
            pairs,
            recompute,
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
        """The ops of a part but R, in order. The second sends the gradient on, and the last ends a microbatch."""
        return halves(self.split)

    @property
    def parts(self) -> int:
        return self.placement.stages * self.placement.slices

    @property
    def actions(self) -> int:
        """How many actions there are at most."""
        return len(self.times) * self.microbatches * self.parts

    def action(self, part: int, op: Op, microbatch: int) -> Action:
        """Return the action of a whole microbatch's part."""
        return action_of(self.placement, part, op, microbatch)

    @property
    def least_memory(self) -> Fraction:
        """The memory that a single microbatch needs on the fullest rank.

        That is the activations of all its parts. If they may be recomputed, it is their inputs, and the rest of one
        part at a time, the last one first.
        """
        most = Fraction(0)
        for copy, rank in product(range(self.placement.copies), range(self.placement.ranks)):
            inputs = Fraction(0)
            for part in (part for at, part in held(self.placement, rank) if at == copy):
                inputs += self.inputs[part]
                most = max(most, inputs + self.activations[part] - self.inputs[part])
        return most

    @cached_property
    def activations(self) -> list[Fraction]:
        """The memory that each part takes for a microbatch."""
        return self._by_part(self.costs.activation, self.placement.ranks)

    @cached_property
    def inputs(self) -> list[Fraction]:
        """The memory that the F of each part takes, if an R takes the rest."""
        if not self.recompute:
            return self.activations
        return self._by_part(self.costs.stage_input, self.placement.stages)

    def _by_part(self, size: Table, ranks: int) -> list[Fraction]:
        """Return a size of each part, from that of each stage's whole sequences."""
        sizes = map(exact, self.costs.per_stage(size, self.placement.stages, ranks))
        shares = [exact(share.tokens) for share in shares_of(self.costs.lengths, self.placement.slices)]
        return [*starmap(mul, product(sizes, shares))]

    @cached_property
    def _kept_exactly(self) -> dict[tuple[Op, Op], list[Fraction]]:
        """By the ops that take and that free it, the memory of each part."""
        placement = self.placement
        freed = {Op.B: [Fraction(1)] * self.parts}
        if self.split:
            of_stages = self.costs.per_stage(self.costs.weight_memory, placement.stages, placement.stages)
            until_w = [exact(share) for share in of_stages for _ in range(placement.slices)]
            freed = {Op.I: [1 - share for share in until_w], Op.W: until_w}
        taken = {Op.F: self.inputs, Op.R: [*map(sub, self.activations, self.inputs)]}
        ops = product(taken, freed)
        return {(take, free): [*map(mul, taken[take], freed[free])] for take, free in ops}

    @cached_property
    def memory_unit(self) -> Fraction:
        """A unit of memory of which all sizes in `kept` are multiples: a solver knows only whole numbers."""
        denominators = [size.denominator for sizes in self._kept_exactly.values() for size in sizes]
        return Fraction(1, math.lcm(*denominators))

    @cached_property
    def kept(self) -> dict[tuple[Op, Op], list[int]]:
        """By the ops that take and that free it, the units of memory of each part; without those of no memory.

        It is taken at the start of the first and freed at the end of the second. What an R takes is taken by the F
        where a stage does not recompute. If an activation is 1, of which W needs a quarter, the unit is 1/4, and each
        part keeps 3 from F to I and 1 from F to W.
        """
        found = {}
        for ops, sizes in self._kept_exactly.items():
            if any(sizes):
                found[ops] = [int(size / self.memory_unit) for size in sizes]
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
        first_half = self.placement.split // self.placement.slices
        return [range(first_half), range(first_half, self.microbatches)]

    def dependencies(self, copy: int) -> Iterator[tuple[Key, Key, int]]:
        """Yield pairs of a microbatch's actions, of which the second waits for the first, and the ticks of the message.

        An action is the second of its pairs before it is the first of any. What waits for an R is left out: whether
        there is one is for the search to find.
        """
        holders, backward, slices = self.placement.holders[copy], self.ops[1], self.placement.slices
        for part in range(self.parts):
            stage, position = divmod(part, slices)
            if position:  # a slice attends to those before it
                yield (part - 1, Op.F), (part, Op.F), 0
            if stage:
                delay = self.delays.get((holders[stage - 1], holders[stage]), 0)
                yield (part - slices, Op.F), (part, Op.F), delay
        for part in reversed(range(self.parts)):
            stage, position = divmod(part, slices)
            yield (part, Op.F), (part, backward), 0
            if position < slices - 1:  # a later slice adds to the gradients of earlier ones
                yield (part + 1, backward), (part, backward), 0
            if stage < self.placement.stages - 1:
                delay = self.delays.get((holders[stage + 1], holders[stage]), 0)
                yield (part + slices, backward), (part, backward), delay
            if self.split:
                yield (part, Op.I), (part, Op.W), 0

    @cached_property
    def in_ticks(self) -> Costs:
        """The costs in ticks."""
        slices = self.placement.slices
        times = {}
        for op, each in self.times.items():
            of_stages = [tuple(each[first : first + slices]) for first in range(0, self.parts, slices)]
            times[op] = [of_slices * self.microbatches for of_slices in of_stages]
        return replace(
            self.costs,
            forward=times[Op.F],
            backward=times.get(Op.B),
            input=times.get(Op.I),
            weight=times.get(Op.W),
            overlap=[2 * each for each in self.overlap] or None,
            latency=self.delays or 0,
            transfer=0,
            unit="",
        )

    def in_order(self) -> tuple[Instance, int]:
        """Return the instance in finer ticks, of which each action takes at least one; and how many are in a tick.

        Actions that take no time also hold memory, one after the other, which start times alone do not show. So a tick
        is cut into more pieces than there are actions, and an action that takes no time takes one piece. All of them
        together take less than a tick: with 100 pieces, schedules within 7 ticks become those within 799 pieces.
        """
        if min(*chain(*self.times.values()), *self.overlap) > 0:
            return self, 1
        pieces = self.actions + 1
        times = {op: [max(1, time * pieces) for time in row] for op, row in self.times.items()}
        overlap = [max(1, time * pieces) for time in self.overlap]
        delays = {link: delay * pieces for link, delay in self.delays.items()}
        return replace(self, tick=self.tick / pieces, times=times, overlap=overlap, delays=delays), pieces

    def ticks_of(self, schedule: Schedule) -> Any:
        """Return the makespan of a schedule in ticks; infinite if it does not fit in memory."""
        timeline = simulate(schedule, self.in_ticks)
        if self.memory is not None and max(map(exact, timeline.peak_activations)) > exact(self.memory):
            return math.inf
        return timeline.makespan

    def __str__(self) -> str:
        slices = f" of {plural(self.placement.slices, 'slice')}" if self.placement.slices > 1 else ""
        size = f"{plural(self.placement.ranks, 'rank')}, {plural(self.microbatches, 'microbatch')}{slices}"
        return f"{size}, placement {self.placement.name}{', with R' if self.recompute else ''}"


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


def halves(split: bool) -> tuple[Op, ...]:
    """Return F and the backward, in two halves or whole."""
    return (Op.F, Op.I, Op.W) if split else (Op.F, Op.B)


def named(
    given: Placement | str, ranks: int, chunks: int | None, microbatches: int, slices: int | None = None
) -> Placement:
    """Return the placement that a search was given."""
    if isinstance(given, Placement):
        if given.ranks != require_count("ranks", ranks):
            raise SettingError(f"the placement is for {given.ranks} ranks; got ranks={ranks}")
        for name, value in (("chunks", chunks), ("slices", slices)):
            if value is not None:
                raise SettingError(f"the {name} are those of the placement; leave out {name}")
        return _alone(given)
    require_instance("placement", given, str, 'a Placement, or "loop", "v" or "bidirectional"')
    if chunks is None:
        chunks = 2 if given == "v" else 1
    return _alone(Placement.make(given, ranks, chunks, microbatches, 1 if slices is None else slices))


def _alone(placement: Placement) -> Placement:
    """Return the placement if the forward and the backward of each stage are on one rank."""
    if placement.backwards:
        raise SettingError("a search has the forward and the backward of a stage on one rank; take a loop, say")
    return placement


def action_of(placement: Placement, part: int, op: Op, microbatch: int) -> Action:
    """Return the action of a part of a whole microbatch. In an action, the number of a microbatch counts slices."""
    stage, position = divmod(part, placement.slices)
    return Action(stage, op, microbatch * placement.slices + position)


def held(placement: Placement, rank: int) -> list[tuple[int, int]]:
    """Return the parts that a rank holds, each with its copy of the model before it."""
    found = []
    for copy, holders in enumerate(placement.holders):
        parts = enumerate(holder for holder in holders for _ in range(placement.slices))
        found += [(copy, part) for part, holder in parts if holder == rank]
    return found


def scheduled(name: str, placement: Placement, microbatches: int, begins: Iterable[tuple[int, Action]]) -> Schedule:
    """Return the schedule in which each rank runs its actions in the order of their begins."""
    orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for _, action in sorted(begins):
        first = action.singles[0]
        orders[placement.rank(first.stage, first.microbatch)].append(action)
    return Schedule(name, placement, microbatches * placement.slices, tuple(map(tuple, orders)))
