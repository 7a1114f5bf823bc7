"""Exceptions, and problems of schedules. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ppedu.core.actions import Action


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
        index: The position in the rank's order, None if the action is missing.
        kind: "range" (no such stage, microbatch or peer, or a backward, R, U, S or T in a forward-only schedule),
            "rank" (not this rank's stage), "missing", "duplicate" (also a full backward beside one of its halves),
            "order" (before a dependency on the same rank, or an R or a U that is too late), "deadlock" (ranks that wait
            for each other in a cycle), "message" (received in another order than sent, summed in another order than on
            rank 0, or needless), "sharding" (weights not gathered, or twice), "buffer" (filled while another microbatch
            uses it), "unknown" (a deadlock or not, as the transport decides).
        message: The problem in a sentence.
        cycle: Of a deadlock, the rank and the position of each action that waits.
    """

    rank: int
    index: int | None  # type: ignore[assignment]  # hides tuple.index, which is not used here
    action: Action
    kind: str
    message: str
    cycle: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return self.message


class PipelineError(Exception):
    """The base class of all errors that ppedu raises on purpose."""


class SettingError(PipelineError, ValueError):
    """An invalid argument: 0 ranks, an unknown schedule, more stages than layers, …"""


class ParseError(PipelineError, ValueError):
    """Text that is not an action or a schedule."""


class ScheduleError(PipelineError, ValueError):
    """A schedule that is not legal. `problems` lists everything that is wrong with it."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()):
        super().__init__(message)
        self.problems = tuple(problems)


class CommunicationError(PipelineError, RuntimeError):
    """A message between ranks that cannot be sent, or that the receiver does not expect."""


class RankError(PipelineError, RuntimeError):
    """A rank that this process started failed, was killed or timed out."""
