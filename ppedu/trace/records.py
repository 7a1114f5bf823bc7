"""The records that readers of traces return, and a step of a pipeline, which is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ppedu.core import Action
from ppedu.sim import Span, Timeline

MOST = 1 << 31  # the numbers of steps, replicas, ranks, stages and microbatches are smaller
UNKNOWN = -2  # a stage or a microbatch that a trace does not say; -1 is that of a pair

Key = tuple[int, int]  # a step and a replica
Worker = tuple[int, int]  # a replica, 0 if the trace does not say, and a rank


class Record(NamedTuple):
    """One line of a trace: an action, or something else that the rank did in the step, such as its optimizer.

    Attributes:
        step, replica: None if the trace does not say.
        rank: Any number that tells the ranks of a replica apart; of all replicas, if the trace does not say which is
            whose.
        action: Its stage and its microbatch may be UNKNOWN.
        start, end: In seconds.
    """

    step: int | None
    replica: int | None
    rank: int
    action: Action | None
    name: str
    start: float
    end: float

    @property
    def worker(self) -> Worker:
        return self.replica or 0, self.rank

    @property
    def singles(self) -> tuple[Action, ...]:
        """The action, or the parts of a pair; nothing for time outside the pipeline."""
        return self.action.singles if self.action else ()

    @property
    def lacks_stage(self) -> bool:
        return self.action is not None and self.action.stage == UNKNOWN

    @property
    def lacks_microbatch(self) -> bool:
        return self.action is not None and self.action.microbatch == UNKNOWN

    def on_stage(self, stage: int | None) -> Record:
        """Return the record with this stage, if it lacks one."""
        if self.action is None or stage is None or not self.lacks_stage:
            return self
        return self._replace(action=self.action._replace(stage=stage))


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

    def shifted(self, shifts: Sequence[float]) -> Recorded:
        """Return the step with times that are later by a number of seconds for each rank."""
        if not any(shifts):
            return self
        rows = tuple(
            tuple(Span(action, start + shift, end + shift) for action, start, end in row)
            for row, shift in zip(self.timeline.rows, shifts, strict=True)
        )
        others = (Other(r, name, start + shifts[r], end + shifts[r]) for r, name, start, end in self.others)
        return Recorded(replace(self.timeline, rows=rows), tuple(others))
