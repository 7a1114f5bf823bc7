"""Stragglers: ranks that are slower than the same rank of other replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median, median_low
from typing import NamedTuple

from ppedu.trace.records import Worker
from ppedu.trace.replay import Measured

SLOW = 1.1  # a straggler takes this many times as long as usual
OFTEN = 0.1  # … in at least this part of the steps

Step = Mapping[int, Measured]  # by replica


class Straggler(NamedTuple):
    """A rank that is slower than it should be.

    Attributes:
        factors: By step, how many times as long it takes.
    """

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
    in the other steps, so that a rank that is always slow goes unseen: its stage is said to be long instead. Medians of
    two are the lower one, because one of two alike workers may be slow.
    """
    busy: dict[tuple[int, int], list[float]] = {}  # by step and replica, the time that each rank computes
    for step, replicas in steps.items():
        for replica, measured in replicas.items():
            busy[step, replica] = measured.busy()
    several = len({replica for _, replica in busy}) > 1
    alike: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # by rank, and step if there are replicas
    for (step, _), times in busy.items():
        group = step if several else 0
        for rank, time in enumerate(times):
            alike[rank, group].append(time)
    usual = {key: median_low(times) or 1.0 for key, times in alike.items()}
    factors: defaultdict[Worker, dict[int, float]] = defaultdict(dict)
    for (step, replica), times in busy.items():
        group = step if several else 0
        ratios = [time / usual[rank, group] for rank, time in enumerate(times)]
        # Longer microbatches, for example, slow down most ranks of a pipeline: this is not held against one.
        pipeline = median_low(ratios) or 1.0
        for rank, ratio in enumerate(ratios):
            factors[replica, rank][step] = ratio / pipeline
    found = []
    for (replica, rank), mine in factors.items():
        slow = {step: factor for step, factor in mine.items() if factor > SLOW}
        if len(slow) >= max(2, OFTEN * len(mine)):
            found.append(Straggler(replica, rank, slow))
    return tuple(sorted(found, key=lambda straggler: -straggler.factor))
