"""Schedules that fit with activations on the host (arXiv 2503.01328): which ones go there, and what copies take."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from ppedu.core import Op
from ppedu.core.actions import COPIES
from ppedu.core.lowering import offloaded
from ppedu.core.numeric import Number, ratio
from ppedu.planning.partition import Cuts, Cutting, Held
from ppedu.planning.pieces import TIMES
from ppedu.sim import Span, Timeline, simulate
from ppedu.sim.held import InFlight, Moment, held_at, peaks_of

AHEAD = 2  # computations of its rank between an L and the backward that needs it, as in `ppedu.offload`
ROUNDS = 12  # of choosing more: copies wait for each other, and end later than they would alone
Place = tuple[int, int]  # a stage and a microbatch, or a slice


@dataclass
class Offloading(Cutting):
    """The search for the partition of a schedule that moves activations to the host, as few as fit.

    How long they are there depends on the times of a step, so each partition is simulated. Keys and values of slices
    stay, for later slices need them.

    Attributes:
        copying: The time of a byte, to the host or back.
    """

    copying: Number = 0
    moved: dict[Cuts, tuple[Timeline, InFlight]] = field(default_factory=dict, init=False)
    timed: ClassVar[Sequence[str]] = (*TIMES, "offload")
    most_tried: ClassVar[int] = 0  # they would all be simulated, several times

    def __post_init__(self) -> None:
        self.times = {}  # of this limit, as the copies

    @cached_property
    def _times(self) -> list[dict[str, list[Any]]]:
        return [{**sums, "offload": [self.copying * size for size in sums["activation"]]} for sums in super()._times]

    def start(self) -> None:
        """Set `best` to one of a few partitions for the times alone: copies make room."""
        free = replace(self, limit=math.inf)
        Cutting.start(free)
        self.best = free.best

    def simulated(self, cuts: Cuts) -> Timeline:
        return self._moved(cuts)[0] if self._full(cuts) else super().simulated(cuts)

    def flight(self, cuts: Cuts) -> InFlight:
        return self._moved(cuts)[1] if self._full(cuts) else self.in_flight

    def memory(self, cuts: Cuts) -> list[Number]:
        return [sum(kinds.values()) for kinds in self.kinds(cuts)] if self._full(cuts) else super().memory(cuts)

    def _full(self, cuts: Cuts) -> bool:
        """Return whether a partition does not fit without copies."""
        return max(super().memory(cuts)) > self.limit

    def _moved(self, cuts: Cuts) -> tuple[Timeline, InFlight]:
        """Return a step with the copies that a partition needs to fit, or with all that help, and what it keeps."""
        if cuts not in self.moved:
            schedule, costs, held, tokens = self.schedule, self.costs(cuts), self._held(cuts), self.in_flight.tokens
            chosen: list[set[Place]] = [set() for _ in held]
            for _ in range(ROUNDS):
                orders = [tuple(offloaded(*each, AHEAD)) for each in zip(schedule.orders, chosen, strict=True)]
                timeline = simulate(replace(schedule, orders=tuple(orders)), costs)
                self.spent += 15 * (800 + 3 * schedule.stages * schedule.microbatches)
                ranks = zip(range(len(held)), held, timeline.rows, chosen, strict=True)
                more = [self._missing(*rank) for rank in ranks]
                if not any(more):
                    break
                chosen = [*map(set.union, chosen, more)]
            moments = ([moment for _, moment in _in_time(row)] for row in timeline.rows)
            self.moved[cuts] = timeline, peaks_of(schedule, False, tokens, moments)
        return self.moved[cuts]

    def _missing(self, rank: int, held: Held, row: Sequence[Span], chosen: Collection[Place]) -> set[Place]:
        """Return what else a rank has to move so that it fits: what it needs last of all that could be away then."""
        flight, sizes = self.in_flight, self._sizes(held)
        room = self.limit - sum(self._kinds(rank, held, flight)) + flight.peak(rank, sizes)[1]
        part = [ratio(each * len(flight.tokens), sum(flight.tokens)) for each in flight.tokens]
        whole = dict(zip(flight.stages[rank], sizes.whole, strict=True))
        uses = _uses(row)
        size = {(stage, number): whole[stage] * part[number % len(part)] for stage, number in uses}
        left = [each for each in uses if size[each] and each not in chosen]
        away = {each: (uses[each][0] + self.copying * size[each], uses[each][1]) for each in left}
        found: dict[Place, Any] = {}  # with the time at which it comes back
        moments = _in_time(row)
        starts = [time for time, (_, ends) in moments if not ends]
        kept = held_at(self.schedule, flight.stages[rank], False, flight.tokens, [moment for _, moment in moments])
        for time, now in zip(starts, kept, strict=True):
            over = flight.size(now, sizes) - room - sum(size[each] for each, back in found.items() if back > time)
            while over > 0:
                ready = [(back, place) for place, (gone, back) in away.items() if gone <= time < back]
                if not ready:
                    break
                back, place = max(ready)
                del away[place]
                found[place] = back
                over -= size[place]
        return {*found}


def _in_time(row: Sequence[Span]) -> list[tuple[Any, Moment]]:
    """Return the moments of a rank in their order, with their times. What ends makes room for what starts."""
    both = [(time, (span.action, ends)) for span in row for ends, time in ((False, span.start), (True, span.end))]
    return sorted(both, key=lambda each: (each[0], not each[1][1]))


def _uses(row: Sequence[Span]) -> dict[Place, tuple[Any, Any]]:
    """Return for each activation of a rank when it has been made, and when its L could start."""
    spans = [span for span in row if span.action.op not in COPIES]
    made: dict[Place, int] = {}
    used: dict[Place, int] = {}
    for index, span in enumerate(spans):
        for stage, op, microbatch, _ in span.action.singles:
            (made if op is Op.F else used).setdefault((stage, microbatch), index)
    return {
        place: (spans[first].end, spans[used[place] - AHEAD].start)
        for place, first in made.items()
        if first < used[place] - AHEAD
    }
