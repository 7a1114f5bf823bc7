"""When actions start and end: on the CPU by its clock, on a GPU by events, so that nothing waits to be measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ppedu.core.actions import Action
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import Costs
from ppedu.core.timeline import Span, Timeline


class Clock:
    """Notes what a rank does. Times are seconds of the machine's monotonic clock, the same for all its processes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._noted: list[tuple[Action, Any, Any]] = []

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        start = self._now()
        yield
        self._noted.append((action, start, self._now()))

    def spans(self) -> list[Span]:
        """What has been noted, first to last. On a GPU it waits until all of that has run."""
        if self._device.type != "cuda":
            return [Span(*each) for each in self._noted]
        last = self._now()
        torch.cuda.synchronize(self._device)
        now = time.monotonic()

        def seconds(event: Any) -> float:
            return now - event.elapsed_time(last) / 1000

        return [Span(action, seconds(start), seconds(end)) for action, start, end in self._noted]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def timeline(schedule: Schedule, rows: Sequence[Sequence[Span]], source: str = "measured") -> Timeline:
    """What all ranks have noted, as a Timeline in seconds that begins with the first action."""
    zero = min(row[0].start for row in rows if row)
    shifted = tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in row) for row in rows)
    return Timeline(schedule, shifted, Costs(unit="s"), source)
