"""Clocks of several machines, aligned by causality: no result can be used before it exists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ppedu.core import produces, requires
from ppedu.sim import Timeline

HALVINGS = 10  # of the range in which the least time lies by which messages arrive early


class ClockShifts(NamedTuple):
    """How far the clocks of a pipeline's ranks were off.

    shifts: by rank, the seconds that were added to its times; 0 on rank 0, and on all ranks if no message arrived
        before it was sent.
    error: the seconds by which the shift of a rank may be wrong at most; None if no messages tell.
    early: the seconds by which messages then still arrive before they were sent, because clocks drift or jitter.
    """

    shifts: tuple[float, ...]
    error: float | None
    early: float = 0.0


def align(timelines: Sequence[Timeline], most: float = 0.0) -> ClockShifts:
    """Return the shifts with which no action begins before a result that it needs exists, in all of the timelines.

    The clock of a rank may be too early by the shortest time of a message that it received, and too late by that of
    one that it sent. Where clocks agree within these bounds, they stay; otherwise they are set to the middle.

    most: the seconds by which messages may arrive before they were sent, if no constant shift prevents it.

    Raises:
        ValueError: no constant shift makes the times possible.
    """
    ranks = timelines[0].schedule.ranks
    # By link, the shortest time of a message.
    shortest: defaultdict[tuple[int, int], float] = defaultdict(lambda: float("inf"))
    for sender, receiver, travelled in travels(timelines):
        shortest[sender, receiver] = min(shortest[sender, receiver], travelled)
    early = 0.0
    bound = _bounds(ranks, shortest, early)
    if _contradict(bound):
        low, early = early, most
        bound = _bounds(ranks, shortest, early)
        if _contradict(bound):
            raise ValueError("no constant shift of the clocks makes all messages arrive after they were sent")
        for _ in range(HALVINGS):
            middle = (low + early) / 2
            closer = _bounds(ranks, shortest, middle)
            if _contradict(closer):
                low = middle
            else:
                early, bound = middle, closer
    unbounded = float("inf")
    latest = [bound[r][0] for r in range(ranks)]
    earliest = [-bound[0][r] for r in range(ranks)]
    known = [r for r in range(ranks) if latest[r] < unbounded and earliest[r] > -unbounded]
    error = max((latest[r] - earliest[r] for r in known), default=None) if len(known) > 1 else None
    if all(bound[r][q] >= -1e-9 for r in range(ranks) for q in range(ranks)):
        return ClockShifts((0.0,) * ranks, error, early)
    shifts = [(latest[r] + earliest[r]) / 2 if r in known else 0.0 for r in range(ranks)]
    return ClockShifts(tuple(shifts), None if error is None else error / 2, early)


def _bounds(ranks: int, shortest: Mapping[tuple[int, int], float], early: float) -> list[list[float]]:
    """Return `bound[r][q]`, the most that the shift of r may exceed the shift of q.

    r may move later until its message for q would arrive `early` before the moment in which it is sent.
    """
    bound = [
        [0.0 if r == q else shortest.get((r, q), float("inf")) + early for q in range(ranks)] for r in range(ranks)
    ]
    for k, r, q in product(range(ranks), repeat=3):  # shortest paths (Floyd and Warshall)
        bound[r][q] = min(bound[r][q], bound[r][k] + bound[k][q])
    return bound


def _contradict(bound: Sequence[Sequence[float]]) -> bool:
    return any(bound[r][r] < -1e-9 for r in range(len(bound)))


def travels(timelines: Iterable[Timeline]) -> Iterator[tuple[int, int, float]]:
    """Yield, for each result that another rank needs, both ranks and the time from its end to the start of its use."""
    for timeline in timelines:
        placement = timeline.schedule.placement
        made: dict[object, tuple[int, float]] = {}
        for rank, row in enumerate(timeline.rows):
            for action, _, end in row:
                made.update((result, (rank, end)) for result in produces(action))
        shortest: defaultdict[tuple[int, int], float] = defaultdict(lambda: float("inf"))
        for rank, row in enumerate(timeline.rows):
            for action, start, _ in row:
                for need in requires(action, placement):
                    if need in made and made[need][0] != rank:
                        link = made[need][0], rank
                        shortest[link] = min(shortest[link], start - made[need][1])
        yield from ((sender, receiver, least) for (sender, receiver), least in shortest.items())
