"""Stragglers: ranks that are slower than the same rank of other replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from ppedu.trace.replay import Measured

SLOW = 1.1  # a straggler takes this many times as long as usual
OFTEN = 0.1  # … in at least this part of the steps

Step = Mapping[int, Measured]  # by replica
Worker = tuple[int, int]  # a replica and a rank


class Straggler(NamedTuple):
    """A rank that is slower than it should be. factors: by step, how many times as long it takes."""

    replica: int
    rank: int
    factors: dict[int, float]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.factors)

    @property
    def factor(self) -> float:
        """How many times as long it takes in the median of these steps."""
        return median(self.factors.values())


def find_stragglers(steps: Mapping[int, Step]) -> tuple[Straggler, ...]:
    """Return the stragglers of a run, slowest first.

    A rank is compared with the same rank of the other replicas. In a run of one pipeline, it is compared with itself
    in the other steps, so that a rank that is always slow goes unseen: its stage is said to be long instead.
    """
    found = []
    for (replica, rank), factors in _factors(steps).items():
        slow = {step: factor for step, factor in factors.items() if factor > SLOW}
        if len(slow) >= max(2, OFTEN * len(factors)):
            found.append(Straggler(replica, rank, slow))
    return tuple(sorted(found, key=lambda straggler: -straggler.factor))


def _factors(steps: Mapping[int, Step]) -> dict[Worker, dict[int, float]]:
    """Return, by worker and step, its busy time over the usual one of its rank.

    What slows down most ranks of a pipeline in the same step, such as longer microbatches, is not held against one.
    """
    busy = {
        (replica, rank, step): sum(row)
        for step, replicas in steps.items()
        for replica, measured in replicas.items()
        for rank, row in enumerate(measured.lasts)
    }
    alike: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # by rank, and step if there are replicas
    several = len({replica for replica, _, _ in busy}) > 1
    for (_, rank, step), time in busy.items():
        alike[rank, step if several else 0].append(time)
    usual = {key: _low_median(times) for key, times in alike.items()}
    found: defaultdict[Worker, dict[int, float]] = defaultdict(dict)
    for step, replicas in steps.items():
        for replica, measured in replicas.items():
            ratios = [
                busy[replica, rank, step] / (usual[rank, step if several else 0] or 1.0)
                for rank in range(measured.schedule.ranks)
            ]
            for rank, ratio in enumerate(ratios):
                found[replica, rank][step] = ratio / (_low_median(ratios) or 1.0)
    return dict(found)


def _low_median(numbers: Iterable[float]) -> float:
    """Return the median; of two, the lower, because one of two alike workers may be slow."""
    ordered = sorted(numbers)
    return ordered[(len(ordered) - 1) // 2]
