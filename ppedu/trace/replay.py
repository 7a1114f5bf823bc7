"""Replay: the times of a schedule's actions from how long each lasts and how long each is held up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

from ppedu.core import Action, Schedule, produces, requires
from ppedu.sim import Timeline

FEWEST = 3  # steps, to tell what is usual

Place = tuple[int, int]  # a rank, and the index of one of its actions
Grid = list[list[float]]  # by rank and index, one number for each action


class Turn(NamedTuple):
    """An action's place, and the places of those on other ranks whose results it needs."""

    rank: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    needs: tuple[Place, ...]


@lru_cache(maxsize=64)
def turns(schedule: Schedule) -> list[Turn]:
    """Return the actions of a compute-only schedule, in an order in which each comes after all that it needs."""
    makers = {
        result: (rank, index)
        for rank, order in enumerate(schedule.orders)
        for index, action in enumerate(order)
        for result in produces(action)
    }
    found = []
    for rank, index in schedule.replay.steps:
        needs = (makers[need] for need in requires(schedule.orders[rank][index], schedule.placement))
        found.append(Turn(rank, index, tuple(place for place in needs if place[0] != rank)))
    return found


class Measured(NamedTuple):
    """The parts of a timeline's times. A replay with all of them has the times of the timeline.

    lasts: of each action, its time. travels: the time that the message took for which it waited last, at most the usual
        one. pauses: the time from which its rank could have started it, to its start.
    """

    schedule: Schedule
    lasts: Grid
    pauses: Grid
    travels: Grid

    @classmethod
    def of(cls, timeline: Timeline, usual: Grid) -> Measured:
        """Take a timeline apart. usual: of each action, the usual time of its messages."""
        rows, zero = timeline.rows, timeline.start
        grids: list[Grid] = [[[0.0] * len(row) for row in rows] for _ in range(3)]
        lasts, pauses, travels = grids
        for rank, index, needs in turns(timeline.schedule):
            _, start, end = rows[rank][index]
            lasts[rank][index] = end - start
            free = rows[rank][index - 1].end if index else None
            made = max((rows[r][i].end for r, i in needs), default=None)
            if made is None:
                pauses[rank][index] = start - (zero if free is None else free)
                continue
            travels[rank][index] = min(usual[rank][index], start - made)
            arrives = made + travels[rank][index]
            pauses[rank][index] = start - (arrives if free is None else max(free, arrives))
        return cls(timeline.schedule, lasts, pauses, travels)

    def starts(self) -> Grid:
        """Return when each action starts."""
        ends: Grid = [[0.0] * len(row) for row in self.lasts]
        starts: Grid = [[0.0] * len(row) for row in self.lasts]
        for rank, index, needs in turns(self.schedule):
            ready = ends[rank][index - 1] if index else 0.0
            for r, i in needs:
                arrives = ends[r][i] + self.travels[rank][index]
                if arrives > ready:
                    ready = arrives
            starts[rank][index] = ready = ready + self.pauses[rank][index]
            ends[rank][index] = ready + self.lasts[rank][index]
        return starts

    def makespan(self) -> float:
        """Return the end of the last action minus the start of the first."""
        starts = self.starts()
        ends = (start[-1] + last[-1] for start, last in zip(starts, self.lasts, strict=True) if last)
        return max(ends) - min(start[0] for start in starts if start)

    def busy(self) -> float:
        """Return the time that all ranks together compute."""
        return sum(map(sum, self.lasts))

    def without(self, what: str) -> Measured:
        """Return the same without its "pauses" or its "travels"."""
        nothing = [[0.0] * len(row) for row in self.lasts]
        return self._replace(pauses=nothing) if what == "pauses" else self._replace(travels=nothing)


def travels(schedule: Schedule, latency: Callable[[int, int], float]) -> Grid:
    """Return the latency of the slowest message that each action needs."""
    found = [[0.0] * len(order) for order in schedule.orders]
    for rank, index, needs in turns(schedule):
        found[rank][index] = max((latency(sender, rank) for sender, _ in needs), default=0.0)
    return found


def usual_travels(timelines: Sequence[Timeline], latency: Callable[[int, int], float]) -> Grid:
    """Return the usual time of the messages that each action needs, in steps of one schedule.

    That is the latency of the link, or longer if the same action waits longer in most of the steps: as at the start of
    a step, if a message is sent together with a later one.
    """
    schedule = timelines[0].schedule
    usual = travels(schedule, latency)
    for rank, index, needs in turns(schedule):
        waited = []
        for rows in (timeline.rows for timeline in timelines):
            made = max((rows[r][i].end for r, i in needs), default=None)
            if made is not None and (not index or rows[rank][index - 1].end <= made):
                waited.append(rows[rank][index].start - made)
        if len(timelines) >= FEWEST and len(waited) > len(timelines) / 2:
            usual[rank][index] = max(usual[rank][index], median(waited))
    return usual


Kind = tuple[Any, ...]


def kind_of(action: Action) -> Kind:
    """Return what actions that differ only in their microbatch have in common: their ops, and then their stages."""
    return (tuple(single.op for single in action.singles), *(single.stage for single in action.singles))


def usual_times(orders: Sequence[Sequence[Action]], lasts: Grid) -> Mapping[Kind, float]:
    """Return the median time of each kind of action: one that is interrupted does not make its stage slow."""
    times: defaultdict[Kind, list[float]] = defaultdict(list)
    for order, row in zip(orders, lasts, strict=True):
        for action, time in zip(order, row, strict=True):
            times[kind_of(action)].append(time)
    return {kind: median(each) for kind, each in times.items()}
