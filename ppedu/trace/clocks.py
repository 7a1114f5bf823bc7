"""Clocks of several machines, aligned by causality: no result can be used before it exists."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from ppedu.sim import Timeline
from ppedu.sim.fit import inputs

TINY = 1e-9  # seconds, of sums of floats
PARTS = 1024  # of the range in which the least time lies by which messages arrive early


class ClockShifts(NamedTuple):
    """How far the clocks of a pipeline's ranks were off.

    Attributes:
        shifts: By rank, the seconds that were added to its times; 0 on rank 0, and on all ranks if no message arrived
            before it was sent.
        error: The seconds by which the shift of a rank may be wrong at most; None if no messages tell.
        early: The seconds by which messages then still arrive before they were sent, because clocks drift or jitter.
    """

    shifts: tuple[float, ...]
    error: float | None
    early: float = 0.0


def align(timelines: Sequence[Timeline], most: float = 0.0) -> ClockShifts:
    """Return the shifts with which no action begins before a result that it needs exists, in all of the timelines.

    The clock of a rank may be too early by the shortest time of a message that it received, and too late by that of
    one that it sent. Where clocks agree within these bounds, they stay; otherwise they are set to the middle.

    For example, by the clocks the shortest message from rank 0 to rank 1 takes 9 ms, and that from 1 to 0 takes -5 ms:
    it arrives before it was sent. So rank 1 must be shifted by -9 to -5 ms. The middle is -7 ms, wrong by at most 2 ms.

    Args:
        timelines: Steps of one pipeline.
        most: The seconds by which messages may arrive before they were sent, if no constant shift prevents it.

    Raises:
        ValueError: No constant shift makes the times possible.
    """
    ranks = range(timelines[0].schedule.ranks)
    shortest = _shortest(timelines)

    def bounds(part: int) -> list[list[float]]:
        return _bounds(len(ranks), shortest, most * part / PARTS)

    def possible(part: int) -> bool:
        bound = bounds(part)
        return all(bound[r][r] >= -TINY for r in ranks)  # no rank must move relative to its own clock

    part = 0 if possible(0) else bisect_left(range(PARTS + 1), True, key=possible)
    if part > PARTS:
        raise ValueError("no constant shift of the clocks makes all messages arrive after they were sent")
    bound, early = bounds(part), most * part / PARTS
    # Rank 0 has shift 0.
    latest = [bound[r][0] for r in ranks]
    earliest = [-bound[0][r] for r in ranks]
    known = [r for r in ranks if latest[r] < inf and earliest[r] > -inf]
    error = max(latest[r] - earliest[r] for r in known) if len(known) > 1 else None
    clocks_agree = all(bound[r][q] >= -TINY for r in ranks for q in ranks)
    if clocks_agree:
        return ClockShifts((0.0,) * len(ranks), error, early)
    shifts = tuple((latest[r] + earliest[r]) / 2 if r in known else 0.0 for r in ranks)
    return ClockShifts(shifts, None if error is None else error / 2, early)


def _bounds(ranks: int, shortest: Mapping[tuple[int, int], float], early: float) -> list[list[float]]:
    """Return `bound[r][q]`, the most that the shift of r may exceed the shift of q.

    r may move later until its message for q would arrive `early` before the moment in which it is sent.
    """
    bound = [[0.0 if r == q else shortest.get((r, q), inf) + early for q in range(ranks)] for r in range(ranks)]
    for k, r, q in product(range(ranks), repeat=3):  # shortest paths (Floyd and Warshall)
        bound[r][q] = min(bound[r][q], bound[r][k] + bound[k][q])
    return bound


def _shortest(timelines: Iterable[Timeline]) -> Mapping[tuple[int, int], float]:
    """Return, by link, the shortest time from the end of an action to the start of one that needs its result."""
    shortest: defaultdict[tuple[int, int], float] = defaultdict(lambda: inf)
    for timeline in timelines:
        for rank, _, span, made in inputs(timeline):
            for sender, end in made:
                if sender != rank:
                    shortest[sender, rank] = min(shortest[sender, rank], span.start - end)
    return shortest
