"""The records that readers of traces return, and a step of a pipeline, which is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ppedu.core import Action
from ppedu.sim import Timeline

MOST = 1 << 31  # the numbers of steps, replicas, ranks, stages and microbatches are smaller


class Record(NamedTuple):
    """One line of a trace: an action, or something else that the rank did in the step, such as its optimizer.

    step: None if the trace does not say. replica: likewise. worker: tells the ranks of all replicas apart; see
        `worker_of`. action: its microbatch may be UNKNOWN. start, end: in seconds.
    """

    step: int | None
    replica: int | None
    worker: int
    action: Action | None
    name: str
    start: float
    end: float


class Other(NamedTuple):
    """Something a rank did outside the pipeline: gradient reduction, the optimizer, garbage collection, …"""

    rank: int
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Recorded:
    """A step of one pipeline: its compute actions, and what its ranks did besides."""

    timeline: Timeline
    others: tuple[Other, ...] = ()

    @property
    def start(self) -> float:
        return min([float(self.timeline.start), *(other.start for other in self.others)])

    @property
    def end(self) -> float:
        return max([float(self.timeline.end), *(other.end for other in self.others)])


Key = tuple[int, int]  # a step and a replica


def worker_of(rank: int, replica: int | None = None) -> int:
    """Return a number for a rank: its own, or, in a trace that tells replicas apart, one that contains both numbers."""
    return (replica or 0) << 32 | rank


def rank_of(worker: int) -> int:
    """Return a worker's rank in its replica."""
    return worker & 0xFFFFFFFF


def in_words(worker: int) -> str:
    """Return a worker as text: "rank 1 of replica 2"."""
    replica = worker >> 32
    return f"rank {rank_of(worker)} of replica {replica}" if replica else f"rank {rank_of(worker)}"
