"""The errors a user of ppedu can meet. Each message says what is wrong, where, and what would be right."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from operator import index
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
    """Raise SettingError unless `value` is a Schedule."""
    from ppedu.core.schedule import Schedule  # which imports this module

    if not isinstance(value, Schedule):
        raise SettingError(f"{what} takes a schedule, such as schedule('1f1b', ranks=4, microbatches=8); got {value!r}")


def require_instance(name: str, value: Any, kind: type, such_as: str) -> None:
    """Raise SettingError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise SettingError(f"{name} must be {such_as}; got {value!r}")


def require_rank(rank: Any, ranks: int) -> int:
    """Return `rank` as an int. Raise SettingError unless it is one of `ranks`."""
    whole = _whole(rank)
    if whole is None or not 0 <= whole < ranks:
        raise SettingError(f"there is no rank {rank!r}; the ranks are 0 to {ranks - 1}")
    return whole


MOST_FORWARDS = 5_000_000  # of a schedule: some gigabytes


def require_size(ranks: Any, chunks: Any, microbatches: Any) -> tuple[int, int, int]:
    """Return the three as ints. Raise SettingError unless a schedule of this size is possible and fits in memory."""
    counts = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}
    counts = {name: require_count(name, count) for name, count in counts.items()}
    forwards = math.prod(counts.values())
    if forwards > MOST_FORWARDS:
        size = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise SettingError(f"{size} make {forwards} forwards; at most {MOST_FORWARDS} fit here: take fewer of them")
    return counts["ranks"], counts["chunks"], counts["microbatches"]


def require_count(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int. Raise SettingError unless it is a whole number of at least `least`."""
    whole = _whole(value)
    if whole is None:
        raise SettingError(f"{name} must be a whole number; got {value!r}")
    if whole < least:
        raise SettingError(f"{name} must be at least {least}; got {value}")
    return whole


def _whole(value: Any) -> int | None:
    """Return a whole number of any kind, also NumPy's or torch's, as an int; None if the value is not one."""
    try:
        return None if isinstance(value, bool) else index(value)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
        return None


# Characters that an SVG or a file cannot hold, or that a terminal obeys. Tabs and line breaks are harmless.
UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def require_name(what: str, name: Any) -> None:
    """Raise SettingError unless `name` is text without control characters and lone surrogates."""
    if not isinstance(name, str) or UNWRITABLE.search(name):
        raise SettingError(f"{what} must be text without control characters; got {name!r}")
