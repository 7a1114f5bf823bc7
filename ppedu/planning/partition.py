"""The partition of a model that makes a schedule's step shortest, within the memory of each rank."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain, combinations, pairwise, takewhile
from math import comb
from operator import mul
from random import Random
from typing import Any, ClassVar

from ppedu.core import Schedule
from ppedu.core.numeric import Number, ratio
from ppedu.planning.pieces import TIMES, Pieces
from ppedu.sim import Costs, Timeline, simulate
from ppedu.sim.held import InFlight, Sizes, counts_of, ends_of, in_flight
from ppedu.sim.partition import by_cost

Cuts = tuple[int, ...]  # stage s holds the pieces from cuts[s] to cuts[s + 1]; a stage may be empty
Held = tuple[Cuts, ...]  # by a rank's stages, the first piece of each, and the end of its pieces
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "messages")
SHAKEN = 2, 3  # random moves between two climbs, at least and at most
BALANCED = 300_000  # spent at most on balancing loads; see `Cutting.spent`


@dataclass
class Cutting:
    """The search for a partition of `pieces` into the stages of a schedule.

    Attributes:
        pieces: At the size of a microbatch or, if the schedule cuts sequences into slices, of their mean.
        slices: The pieces of each slice of a sequence, in their order; () if all are alike.
        limit: Bytes of a rank. delay: Of messages, as `Costs(latency=…)`.
        blocking: Whether a rank cannot compute while it sends and receives.
        barrier: Whether ranks wait for each other between steps. Without, a step takes as long as its longest rank.
        until: The clock (`time.monotonic`) at which the search ends, whatever is left to do.
        best: The best partition so far within the limit, or the one that exceeds it least.
        proven: Whether `best` is the best of all.
        spent: The work so far; one is about an action's in a simulation. It limits the search where the clock does not,
            so that the same question has the same answer on every machine.
    """

    schedule: Schedule
    pieces: Pieces
    limit: Number
    delay: Any = 0
    recompute: bool = False
    blocking: bool = False
    barrier: bool = True
    until: float = math.inf
    slices: tuple[Pieces, ...] = ()
    best: Cuts = ()
    proven: bool = False
    spent: int = 0
    times: dict[Cuts, Any] = field(default_factory=dict)
    sizes: dict[tuple[int, Held], Number] = field(default_factory=dict)
    excesses: dict[Cuts, Any] = field(default_factory=dict, init=False)  # of this limit: not copied
    timed: ClassVar[Sequence[str]] = TIMES  # of the costs, those that it gives
    most_tried: ClassVar[int] = 4000  # the most partitions of which all are tried

    @cached_property
    def sums(self) -> dict[str, list[Any]]:
        """For each number of a piece, its sums over the pieces before each cut."""
        return _sums(self.pieces, *TIMES, "weights", "experts", "activation", "freed", "logits", "freed_logits", "keys")

    @cached_property
    def _times(self) -> list[dict[str, list[Any]]]:
        """The sums of the times, for each slice that differs from the others."""
        return [_sums(each, *TIMES, "activation") for each in self.slices] or [self.sums]

    @cached_property
    def in_flight(self) -> InFlight:
        return in_flight(self.schedule, self.recompute, tuple(each.tokens or 0 for each in self.slices) or (1,))

    def of_stages(self, name: str, cuts: Cuts) -> list[Any]:
        """Return a number of the pieces, summed for each stage."""
        return self._of(pairwise(cuts), name)

    def costs(self, cuts: Cuts) -> Costs:
        """Return the costs of the stages."""
        slices, count = self.schedule.slices, self.schedule.stages
        # An R, or a backward that recomputes, contains a forward, and with it the time of the messages.
        again = self.recompute or self.schedule.recomputed
        around = () if not self.blocking else ("forward",) if again else ("forward", "backward", "input")

        def of_stages(name: str) -> list[Any]:
            """Return the times of whole sequences; or those of all slices, if they differ."""
            more = self._messages if name in around else [0] * count
            rows = [
                [before[cuts[stage + 1]] - before[cuts[stage]] + more[stage] for stage in range(count)]
                for before in (sums[name] for sums in self._times)
            ]
            if self.slices:
                return [each * (self.schedule.microbatches // slices) for each in zip(*rows, strict=True)]
            return [each * slices for each in rows[0]]

        kept = zip(self.of_stages("activation", cuts), self.of_stages("keys", cuts), strict=True)
        return Costs(
            **{name: of_stages(name) for name in self.timed},  # type: ignore[arg-type]
            activation=[slices * (whole + keys) for whole, keys in kept],
            latency=0 if self.blocking else self.delay,
            weight_memory=self._weight_memory(cuts),
            recompute=self.recompute,
            stage_input=[slices * self.pieces.message if again else 0] * count,
            unit=self.pieces.unit,
        )

    def _weight_memory(self, cuts: Cuts) -> list[Any]:
        """Return the part of each stage's activations that is kept until W."""
        sizes = zip(self.of_stages("activation", cuts), self.of_stages("freed", cuts), strict=True)
        return [ratio(whole - freed, whole) if whole else 1 for whole, freed in sizes]

    @cached_property
    def _messages(self) -> list[Any]:
        """By stage, how long its rank is occupied by the messages around a forward, or around a backward.

        While it sends one result on, it receives another, which takes no longer.
        """
        costs = Costs(latency=self.delay)
        found: list[Any] = [0] * self.schedule.stages
        for stage, here, there in self._links:
            for each in (stage, stage + 1):
                found[each] = max(found[each], costs.delay(here, there))
        return found

    @cached_property
    def _links(self) -> list[tuple[int, int, int]]:
        """The stages that send on to another rank, each with both ranks."""
        return [
            (stage, here, there)
            for holders in self.schedule.placement.holders
            for stage, (here, there) in enumerate(pairwise(holders))
            if here != there
        ]

    def simulated(self, cuts: Cuts) -> Timeline:
        """Return the step with a partition."""
        self.spent += 800 + 3 * self.schedule.stages * self.schedule.microbatches
        return simulate(self.schedule, self.costs(cuts))

    def time(self, cuts: Cuts) -> Any:
        """Return how long the step takes."""
        if cuts not in self.times:
            timeline = self.simulated(cuts)
            self.times[cuts] = timeline.makespan if self.barrier else timeline.span
        return self.times[cuts]

    def memory(self, cuts: Cuts) -> list[Number]:
        """Return the bytes of each rank at its peak."""
        sizes = self.sizes
        found = []
        for place in enumerate(self._held(cuts)):  # most partitions that are tried change a rank or two
            if place not in sizes:
                sizes[place] = sum(self._kinds(*place, self.in_flight))
            found.append(sizes[place])
        return found

    def kinds(self, cuts: Cuts) -> list[dict[str, Number]]:
        """Return the bytes of each rank at its peak, by what they are for."""
        flight = self.flight(cuts)
        return [dict(zip(KINDS, self._kinds(*place, flight), strict=True)) for place in enumerate(self._held(cuts))]

    def flight(self, cuts: Cuts) -> InFlight:
        """Return what the ranks keep at their peaks."""
        return self.in_flight

    def _held(self, cuts: Cuts) -> list[Held]:
        """Return the pieces that each rank holds."""
        return [tuple([cuts[stage : stage + 2] for stage in stages]) for stages in self.in_flight.stages]

    def _sizes(self, held: Held) -> Sizes:
        """Return the bytes of a rank's activations."""
        whole, freed, keys = (self._of(held, name) for name in ("activation", "freed", "keys"))
        return Sizes(whole, freed, self.pieces.message, keys)

    def _kinds(self, rank: int, held: Held, flight: InFlight) -> Sequence[Number]:
        pieces, of_held = self.pieces, partial(self._of, held)
        peak, size = flight.peak(rank, self._sizes(held))
        of_logits = flight.size(peak, Sizes(of_held("logits"), of_held("freed_logits"), 0, [0] * len(held)))
        parameters, experts = self._parameters(held)
        static = [
            (parameters - experts) * each + experts * of_experts
            for each, of_experts in zip(pieces.bytes_per_weight, pieces.bytes_per_expert, strict=True)
        ]
        return (*static, size - of_logits + pieces.restored, of_logits, self._buffers[rank])

    def _of(self, held: Iterable[Cuts], name: str) -> list[Any]:
        """Return a number of the pieces, summed for each range of them."""
        before = self.sums[name]
        return [before[end] - before[begin] for begin, end in held]

    def _parameters(self, held: Held) -> tuple[int, int]:
        """Return the number of parameters on a rank; tied ones count once if it has both ends of the model."""
        ends = [end for end in (0, len(self.pieces) - 1) if any(end in range(*each) for each in held)]
        tied = self.pieces.tied if len(ends) == 2 else 0
        return sum(self._of(held, "weights")) - tied, sum(self._of(held, "experts"))

    def parameters(self, cuts: Cuts) -> list[tuple[int, int]]:
        """Return for each rank the number of its parameters, and of those of experts."""
        return [*map(self._parameters, self._held(cuts))]

    def excess(self, cuts: Cuts) -> Number:
        """Return by how many bytes the ranks exceed the limit, together."""
        if cuts not in self.excesses:
            self.excesses[cuts] = sum([size - self.limit for size in self.memory(cuts) if size > self.limit])
        return self.excesses[cuts]

    @cached_property
    def _buffers(self) -> list[Number]:
        """The bytes of each rank's messages in flight: one activation and one gradient for each of its links."""
        links = Counter(chain.from_iterable(ends for _, *ends in self._links))
        return [2 * links[rank] * self.pieces.message for rank in range(self.schedule.ranks)]

    @cached_property
    def _work(self) -> list[list[tuple[int, list[Any]]]]:
        """For each rank: its stages, each with the time of all its actions, summed over the pieces before each cut."""
        return [[(stage, self._summed(each)) for stage, each in counts.items()] for counts in counts_of(self.schedule)]

    def _summed(self, counts: Counter[str]) -> list[Any]:
        """Return the sums, over the pieces before each cut, of a stage's actions that are counted."""
        if self.recompute:
            counts = counts + Counter(forward=counts["backward"] + counts["input"])
        columns = zip(*(self.sums[name] for name in counts), strict=True)
        return [sum(map(mul, column, counts.values())) for column in columns]

    def busy(self, cuts: Cuts) -> list[Any]:
        """Return how long each rank works."""
        return [sum([sums[cuts[stage + 1]] - sums[cuts[stage]] for stage, sums in work]) for work in self._work]

    def loads(self, cuts: Cuts) -> list[Any]:
        """Return for each rank a time that the step cannot be shorter than.

        It works for so long; before, the first microbatch has to come to it; after it, a gradient has to go on.
        """
        if not self.barrier:
            return self.busy(cuts)
        found, (before, after) = self.busy(cuts), self._ways
        for rank, (first, last) in enumerate(ends_of(self.schedule)):
            found[rank] += before[cuts[first]] + (0 if last is None else after[cuts[last]])
        return found

    @cached_property
    def _ways(self) -> tuple[list[Any], list[Any]]:
        """For each cut, how long a microbatch or its shortest slice takes to come there, and its gradient back."""
        shortest = self._times[0]
        return shortest["forward"], [*map(min, shortest["backward"], shortest["input"])]

    @cached_property
    def bound(self) -> Any:
        """A time that no partition falls below: that of equal ranks, or of the heaviest piece."""
        split = self.in_flight.freeing
        each = [
            piece.forward * (2 if self.recompute and not self.schedule.forward_only else 1)
            + (0 if self.schedule.forward_only else piece.input + piece.weight if split else piece.backward)
            for piece in self.pieces.pieces
        ]
        most = max(sum(each) / self.schedule.ranks, max(each) / self.schedule.placement.copies)
        return most * self.schedule.microbatches

    def worth(self, cuts: Cuts) -> tuple[Any, Any]:
        """Return what a partition is judged by, the less the better: the excess of memory, then the time of the step.

        If it does not fit, the time is the longest load, which does not need a simulation.
        """
        excess = self.excess(cuts)
        return excess, max(self.loads(cuts)) if excess else self.time(cuts)

    def _may_beat(self, cuts: Cuts, worth: tuple[Any, Any]) -> bool:
        """Return whether a partition may be better than one of this worth, without a simulation."""
        load = max(self.loads(cuts))
        return (worth[0] > 0 or load < worth[1]) and (self.excess(cuts), load) < worth

    def start(self) -> None:
        """Set `best` to the best of a few partitions that balance the ranks' work, or the stages'."""
        stages, count = self.schedule.stages, len(self.pieces)
        starts = [tuple(round(stage * count / stages) for stage in range(stages + 1))]
        if stages <= count:
            ranges = by_cost([piece.forward + piece.backward for piece in self.pieces.pieces], stages)
            starts.append((0, *(each.stop for each in ranges)))
        starts += [self._balanced(cuts) for cuts in dict.fromkeys(starts)]
        self.best = min(dict.fromkeys(starts), key=self.worth)

    def _balanced(self, cuts: Cuts) -> Cuts:
        """Return the partition at the end of a climb: within memory, then even loads of the ranks."""

        def unevenness(cuts: Cuts) -> tuple[Any, Any]:
            loads = self.loads(cuts)
            return max(loads), sum([load * load for load in loads])

        excess, uneven, most = self.excess(cuts), unevenness(cuts), self.spent + BALANCED
        improved = True
        while improved:
            improved = False
            for moved in self._moves(cuts, self._heaviest(cuts)):
                if self._ends(most):
                    return cuts
                if not excess and unevenness(moved) >= uneven:
                    continue  # sooner known than the memory
                if (more := self.excess(moved)) <= excess and (more, unevenness(moved)) < (excess, uneven):
                    cuts, excess, uneven, improved = moved, more, unevenness(moved), True
                    break
        return cuts

    def _ends(self, most: float) -> bool:
        """Count a move that is judged. Return whether the search has to end."""
        self.spent += 6 * (self.schedule.stages + self.schedule.ranks)
        return self.spent > most or time.monotonic() > self.until

    def _heaviest(self, cuts: Cuts) -> Sequence[int]:
        """Return the stages of the rank that exceeds the memory most or, if all fit, works longest."""
        sizes = self.memory(cuts)
        most = sizes if max(sizes) > self.limit else self.loads(cuts)
        return self.in_flight.stages[max(range(len(most)), key=most.__getitem__)]

    def _moves(self, cuts: Cuts, givers: Sequence[int] | None = None) -> Iterator[Cuts]:
        """Yield the partitions in which one stage has a piece less and another a piece more, nearest stages first."""
        stages = len(cuts) - 1
        for distance in range(1, stages):
            for giver in range(stages) if givers is None else givers:
                if cuts[giver] == cuts[giver + 1]:
                    continue
                for taker, step in ((giver + distance, -1), (giver - distance, 1)):
                    if 0 <= taker < stages:
                        low, high = min(giver, taker) + 1, max(giver, taker) + 1
                        yield cuts[:low] + tuple([cut + step for cut in cuts[low:high]]) + cuts[high:]

    def improve(self, more: float) -> None:
        """Improve `best` by moving pieces until `more` has been spent. If there are few partitions, try all."""
        stages, count = self.schedule.stages, len(self.pieces)
        if comb(count + stages - 1, stages - 1) <= self.most_tried:
            self._try_all()
            return
        most, dice = self.spent + more, Random(0)
        self._climb(self.best, most)
        while not self._ends(most) and self.worth(self.best)[1] > self.bound:
            cuts = self.best
            for _ in range(dice.randint(*SHAKEN)):  # no single move helps: go on from a place nearby
                cuts = dice.choice([*self._moves(cuts)])
            self._climb(cuts, most)

    def _climb(self, cuts: Cuts, most: float) -> None:
        """Go from a partition to better ones until no move helps; what is better than `best` becomes `best`."""
        now, improved = self.worth(cuts), True
        while improved:
            if now < self.worth(self.best):
                self.best = cuts
            improved = False
            # Taking pieces from the busiest rank helps most often; the other moves follow.
            for moved in chain(self._moves(cuts, self._heaviest(cuts)), self._moves(cuts)):
                if self._ends(most):
                    return
                if self._may_beat(moved, now) and (value := self.worth(moved)) < now:
                    cuts, now, improved = moved, value, True
                    break

    def adopt(self, partitions: Iterable[Cuts]) -> bool:
        """Set `best` to the best of the partitions of other searches if it is better; return whether it is."""
        before, now = self.best, self.worth(self.best)
        for cuts in partitions:
            if self._may_beat(cuts, now) and (value := self.worth(cuts)) < now:
                self.best, now = cuts, value
        return self.best != before

    def _try_all(self) -> None:
        """Try all partitions, the most promising first."""
        stages, count = self.schedule.stages, len(self.pieces)
        every = (
            (0, *(place - index for index, place in enumerate(chosen)), count)
            for chosen in combinations(range(count + stages - 1), stages - 1)
        )
        ordered = sorted((self.excess(cuts), max(self.loads(cuts)), cuts) for cuts in every)
        left = takewhile(lambda each: each[:2] < self.worth(self.best) and time.monotonic() <= self.until, ordered)
        self.adopt(cuts for *_, cuts in left)
        self.proven = time.monotonic() <= self.until


def _sums(pieces: Pieces, *names: str) -> dict[str, list[Any]]:
    """Return the sums of numbers of the pieces over those before each cut."""
    return {name: [*accumulate((getattr(piece, name) for piece in pieces.pieces), initial=0)] for name in names}
