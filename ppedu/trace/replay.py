"""Replay: the times of a schedule's actions from how long each lasts and how long each is held up.

A number for each action is in a flat list, rank after rank; `by_rank` divides it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice
from operator import add
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ppedu.core import Action, Schedule, produces, requires
from ppedu.sim import Timeline

FEWEST = 3  # steps, to tell what is usual

T = TypeVar("T")


class Turn(NamedTuple):
    """An action with its place in the flat list.

    Attributes:
        at: Its place.
        before: The place of the action before it on its rank; None for the first.
        needs: The actions on other ranks whose results it needs, each as its rank and its place.
    """

    at: int
    rank: int
    action: Action
    before: int | None
    needs: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def turns(schedule: Schedule) -> list[Turn]:
    """Return the actions of a compute-only schedule, in an order in which each comes after all that it needs."""
    first = [*accumulate(map(len, schedule.orders), initial=0)]  # by rank, the place of its first action
    makers = {}  # by result, the rank and the place of the action that produces it
    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            for result in produces(action):
                makers[result] = rank, first[rank] + index
    found = []
    for rank, index in schedule.replay.steps:
        action, at = schedule.orders[rank][index], first[rank] + index
        needs = (makers[need] for need in requires(action, schedule.placement))
        others = tuple(maker for maker in needs if maker[0] != rank)
        found.append(Turn(at, rank, action, at - 1 if index else None, others))
    return found


def by_rank(schedule: Schedule, values: Iterable[T]) -> list[list[T]]:
    """Return a flat list, which has a value for each action of a schedule, as a list for each rank."""
    left = iter(values)
    return [[*islice(left, len(order))] for order in schedule.orders]


class Measured(NamedTuple):
    """The parts of a timeline's times, each with a number for each action. A replay has the times of the timeline.

    For example, the forward 0F0 ends at 3, and 1F0 on the next rank runs from 5 to 8. If a message usually takes 1.5,
    the replay of 1F0 starts at 3 + 1.5 (travels) + 0.5 (pauses), and ends 3 (lasts) later.

    Attributes:
        lasts: The time that the action takes.
        pauses: The time from which its rank could have started it, to its start.
        travels: The time that the message took for which it waited last, at most the usual one.
    """

    schedule: Schedule
    lasts: Sequence[float]
    pauses: Sequence[float]
    travels: Sequence[float]

    @classmethod
    def of(cls, timeline: Timeline, usual: Sequence[float]) -> Measured:
        """Take a timeline apart.

        Args:
            usual: Of each action, the usual time of its messages.
        """
        spans = [*chain(*timeline.rows)]
        lasts = [span.end - span.start for span in spans]
        pauses, travels = [0.0] * len(spans), [0.0] * len(spans)
        for at, _, _, before, needs in turns(timeline.schedule):
            start = spans[at].start
            ready = [] if before is None else [spans[before].end]
            if needs:
                made = max(spans[need].end for _, need in needs)
                travels[at] = min(usual[at], start - made)
                ready.append(made + travels[at])
            pauses[at] = start - max(ready, default=timeline.start)
        return cls(timeline.schedule, lasts, pauses, travels)

    def starts(self) -> list[float]:
        """Return when each action starts."""
        _, lasts, pauses, travels = self
        starts, ends = [0.0] * len(lasts), [0.0] * len(lasts)
        for at, _, _, before, needs in turns(self.schedule):
            ready = 0.0 if before is None else ends[before]
            for _, need in needs:
                arrives = ends[need] + travels[at]
                if arrives > ready:
                    ready = arrives
            starts[at] = ready + pauses[at]
            ends[at] = starts[at] + lasts[at]
        return starts

    def makespan(self) -> float:
        """Return the end of the last action minus the start of the first."""
        starts = self.starts()
        return max(map(add, starts, self.lasts)) - min(starts)

    def busy(self) -> list[float]:
        """Return the time that each rank computes."""
        return [sum(row) for row in by_rank(self.schedule, self.lasts)]

    @property
    def timed(self) -> Iterable[tuple[Action, float]]:
        """Each action with its time."""
        return zip(chain(*self.schedule.orders), self.lasts, strict=True)

    def usual(self) -> Mapping[Kind, float]:
        """Return the median time of each kind of action: one that is interrupted does not make its stage slow."""
        times: defaultdict[Kind, list[float]] = defaultdict(list)
        for action, time in self.timed:
            times[kind_of(action)].append(time)
        return {kind: median(each) for kind, each in times.items()}


Kind = tuple[Any, ...]


def kind_of(action: Action) -> Kind:
    """Return what actions that differ only in their microbatch have in common: their ops, and then their stages."""
    return (tuple(single.op for single in action.singles), *(single.stage for single in action.singles))


def travels(schedule: Schedule, latency: Callable[[int, int], float]) -> list[float]:
    """Return the latency of the slowest message that each action needs."""
    found = [0.0] * sum(map(len, schedule.orders))
    for at, rank, _, _, needs in turns(schedule):
        found[at] = max((latency(sender, rank) for sender, _ in needs), default=0.0)
    return found


def usual_travels(timelines: Sequence[Timeline], latency: Callable[[int, int], float]) -> list[float]:
    """Return the usual time of the messages that each action needs, in steps of one schedule.

    That is the latency of the link, or longer if the same action waits longer in most of the steps: as at the start of
    a step, if a message is sent together with a later one.
    """
    schedule = timelines[0].schedule
    usual = travels(schedule, latency)
    if len(timelines) < FEWEST:
        return usual
    steps = [[*chain(*timeline.rows)] for timeline in timelines]
    for at, _, _, before, needs in turns(schedule):
        if needs:
            made = [max(spans[need].end for _, need in needs) for spans in steps]
            # In the steps in which the rank was free when the result was made, so that it waited for the message alone.
            waited = [
                spans[at].start - end
                for spans, end in zip(steps, made, strict=True)
                if before is None or spans[before].end <= end
            ]
            if len(waited) > len(steps) / 2:
                usual[at] = max(usual[at], median(waited))
    return usual
