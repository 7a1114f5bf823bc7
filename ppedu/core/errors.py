"""Exceptions. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppedu.core.problems import Problem


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
