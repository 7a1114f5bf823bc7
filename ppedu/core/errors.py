"""The errors a user of ppedu can meet. Each message says what is wrong, where, and what would be right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppedu.core.check import Problem


class PipelineError(Exception):
    """Every error that ppedu raises on purpose is one of these."""


class SettingError(PipelineError, ValueError):
    """A setting that cannot work: 0 ranks, an unknown schedule, more stages than layers, …"""


class ParseError(PipelineError, ValueError):
    """Text that is not an action or a schedule."""


class ScheduleError(PipelineError, ValueError):
    """A schedule that is not legal. `problems` holds everything that is wrong with it."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()):
        super().__init__(message)
        self.problems = tuple(problems)


class CommunicationError(PipelineError, RuntimeError):
    """A message between ranks that cannot be sent, or that is not what the receiver expects."""


class RankError(PipelineError, RuntimeError):
    """A rank that was started here failed, was killed or ran out of time."""


def require_schedule(what: str, value: Any) -> None:
    """Return if `value` is a schedule, which `what` takes.

    Raises:
        SettingError: it is none.
    """
    if not hasattr(value, "orders"):
        raise SettingError(f"{what} takes a schedule, such as schedule('1f1b', ranks=4, microbatches=8); got {value!r}")


def require_rank(rank: Any, ranks: int) -> int:
    """`rank`, if it is one of `ranks`.

    Raises:
        SettingError: it is not.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise SettingError(f"there is no rank {rank!r}; the ranks are 0 to {ranks - 1}")
    return rank


MOST_FORWARDS = 5_000_000  # of a schedule: some gigabytes


def require_size(ranks: Any, chunks: Any, microbatches: Any) -> None:
    """Return if a schedule can have so many.

    Raises:
        SettingError: one of them is no whole number above 0, or together they are more than fits into memory.
    """
    counts = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}
    forwards = math.prod(require_count(name, count) for name, count in counts.items())
    if forwards > MOST_FORWARDS:
        size = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise SettingError(f"{size} make {forwards} forwards; at most {MOST_FORWARDS} fit here: take fewer of them")


def require_count(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int, if it is a whole number of at least `least`.

    Raises:
        SettingError: it is anything else.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SettingError(f"{name} must be a whole number; got {value!r}")
    if value.__index__() < least:
        raise SettingError(f"{name} must be at least {least}; got {value}")
    return int(value)
