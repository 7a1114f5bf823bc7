"""The errors a user of ppedu can meet. Each message says what is wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppedu.core.problems import Problem


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
