"""The instance of a search: actions with whole-numbered times, who waits for whom, and how much fits in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
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
        if costs.links != "free" or costs.recompute:
            raise SettingError("a search knows no occupied links and no recomputation; leave out links and recompute")
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
        times = {op: [*map(exact, each)] for op, each in costs.durations(stages, ranks).items()}
        whole = [first + second for first, second in zip(times[Op.F], times[Op.B], strict=True)]
        if costs.overlap is not None:
            whole = [*map(exact, costs.per_stage(costs.overlap, stages, ranks))]
        overlap = [each / 2 for each in whole]
        hops = chain(*(pairwise(holders) for holders in placement.holders))
        links = {link for hop in hops for link in (hop, hop[::-1]) if hop[0] != hop[1]}
        delays = {link: exact(costs.delay(*link)) for link in links}
        tick, error = _tick([*chain(*times.values()), *delays.values(), *(overlap if pairs else [])])
        found = cls(
            placement,
            require_count("microbatches", microbatches),
            costs,
            split,
            pairs,
            memory,
            tick,
            error,
            {op: [int(each // tick) for each in row] for op, row in times.items()},
            [int(each // tick) for each in overlap],
            {link: int(delay // tick) for link, delay in delays.items()},
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
    def room(self) -> tuple[Fraction, dict[Op, list[int]]]:
        """A unit of memory, and for each op that frees memory at its end, how many units each stage frees.

        A forward takes at its start all that the backward frees.
        """
        kept = exact(self.costs.weight_memory) if self.split else Fraction(1)
        parts = {self.ops[1]: 1 - kept, self.ops[-1]: kept}
        freed = {op: [each * part for each in self.activations] for op, part in parts.items()}
        unit = Fraction(1, math.lcm(*(size.denominator for size in chain(*freed.values()))))
        return unit, {op: [int(size / unit) for size in sizes] for op, sizes in freed.items() if any(sizes)}

    @cached_property
    def limit(self) -> int:
        """The memory that was given, in units of `room`."""
        return int(exact(self.memory) / self.room[0])

    @cached_property
    def copies(self) -> list[range]:
        """The microbatches of each copy of the model."""
        middle = self.placement.split if self.placement.copies > 1 else self.microbatches
        return [range(middle), range(middle, self.microbatches)][: self.placement.copies]

    def dependencies(self, copy: int) -> Iterator[tuple[Key, Key, int]]:
        """Yield pairs of a microbatch's actions, of which the second waits for the first, and the ticks of the message.

        An action is the second of its pairs before it is the first of any.
        """
        holders, backward = self.placement.holders[copy], self.ops[1]
        last = self.placement.stages - 1
        for stage in range(last):
            yield (stage, Op.F), (stage + 1, Op.F), self.delays.get((holders[stage], holders[stage + 1]), 0)
        for stage in reversed(range(last + 1)):
            yield (stage, Op.F), (stage, backward), 0
            if stage < last:
                yield (stage + 1, backward), (stage, backward), self.delays.get((holders[stage + 1], holders[stage]), 0)
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

        Actions that take no time also hold memory, one after the other, which start times alone do not show. All of
        them together take less than a tick, so that schedules within n ticks are those within n + 1, exclusive.
        """
        if min(*chain(*self.times.values()), *(self.overlap if self.pairs else [])) > 0:
            return self, 1
        fine = 3 * self.microbatches * self.placement.stages + 1
        times = {op: [each * fine or 1 for each in row] for op, row in self.times.items()}
        overlap = [each * fine or 1 for each in self.overlap]
        delays = {link: delay * fine for link, delay in self.delays.items()}
        return replace(self, tick=self.tick / fine, times=times, overlap=overlap, delays=delays), fine

    def ticks_of(self, schedule: Schedule) -> Any:
        """Return the makespan of a schedule in ticks; infinite if it does not fit in memory."""
        timeline = simulate(schedule, self.in_ticks)
        if self.memory is not None and max(map(exact, timeline.peak_activations)) > exact(self.memory):
            return math.inf
        return timeline.makespan

    def published(self) -> Iterator[Schedule]:
        """Yield the registered schedules with this placement, with their backwards split or whole as asked for."""
        for name in schedules():
            with suppress(Exception):  # it does not exist for this size, or a registered generator is unfinished
                options = {"chunks": self.placement.chunks} if "chunks" in options_of(name) else {}
                found = registered(name, self.placement.ranks, self.microbatches, **options)
                found.validate()
                if found.placement.holders == self.placement.holders and not found.forward_only:
                    orders = tuple(tuple(self._adapted(order)) for order in found.orders)
                    if self.split or not any(action.op == "W" for order in orders for action in order):
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

        A rank works on all microbatches after its first input. A microbatch passes all stages and comes back. And a
        rank holds an activation until its gradient has come back, so that the sum of these times, each multiplied with
        the size of the activation, is at most the memory times the step.
        """
        ends = [self._ends(copy) for copy in range(self.placement.copies)]  # of a microbatch alone
        bounds = []
        if not self.pairs:
            bounds += [each[0, self.ops[-1]] for each, some in zip(ends, self.copies, strict=True) if some]
        for rank in range(self.placement.ranks):
            stages = [(copy, stage) for copy, stage in held(self.placement, rank) if self.copies[copy]]
            begins, work, energy = [], 0, 0
            for copy, stage in stages:
                count = len(self.copies[copy])
                begins.append(ends[copy][stage, Op.F] - self.times[Op.F][stage])
                work += count * sum(self.times[op][stage] for op in self.ops)
                for op, sizes in self.room[1].items():
                    energy += count * sizes[stage] * (ends[copy][stage, op] - begins[-1])
                if self.pairs:
                    apart = ((self.times[Op.F][stage] + self.times[Op.B][other], other) for _, other in stages)
                    work -= count * max(0, *(time - self.overlap[stage] - self.overlap[other] for time, other in apart))
            begin = min(begins, default=0)
            bounds.append(begin + work)
            if self.memory is not None and not self.pairs:
                bounds.append(begin + math.ceil(energy * self.room[0] / exact(self.memory)))
        return max(bounds)

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

    It is the largest of which all times are multiples, unless the longest would be more than `FINEST` of these.
    """
    common = math.lcm(*(each.denominator for each in times))
    tick = Fraction(math.gcd(*(int(each * common) for each in times)) or 1, common)
    longest = max(times)
    if longest / tick <= FINEST:
        return tick, 0.0
    tick = longest / COARSE
    return tick, float(max(1 - (each // tick) * tick / each for each in times if each))


def named(given: Placement | str, ranks: int, chunks: int | None, microbatches: int) -> Placement:
    """Return the placement that a search was given."""
    if isinstance(given, Placement):
        if given.ranks != require_count("ranks", ranks):
            raise SettingError(f"the placement is for {given.ranks} ranks; got ranks={ranks}")
        if chunks is not None:
            raise SettingError("the chunks are those of the placement; leave out chunks")
        return given
    require_instance("placement", given, str, 'a Placement, or "loop", "v" or "bidirectional"')
    return Placement.make(given, ranks, (2 if given == "v" else 1) if chunks is None else chunks, microbatches)


def held(placement: Placement, rank: int) -> list[tuple[int, int]]:
    """Return the stages that a rank holds, each with its copy of the model before it."""
    copies = enumerate(placement.holders)
    return [(copy, stage) for copy, holders in copies for stage, holder in enumerate(holders) if holder == rank]


def scheduled(name: str, placement: Placement, microbatches: int, begins: Iterable[tuple[int, Action]]) -> Schedule:
    """Return the schedule in which each rank runs its actions in the order of their begins."""
    orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for _, action in sorted(begins):
        first = action.singles[0]
        orders[placement.rank(first.stage, first.microbatch)].append(action)
    return Schedule(name, placement, microbatches, tuple(map(tuple, orders)))
