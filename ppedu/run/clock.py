"""Measures when actions start and end: on the CPU with its clock, on a GPU with events, which do not block it.

All processes of a machine share one monotonic clock. If the ranks run on several machines, each rank measures how far
its clock is from rank 0's, with an error of at most half the fastest round trip of a message.
"""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppedu.core.actions import Action
from ppedu.core.costs import Costs
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Span, Timeline
from ppedu.run.comm import PipelineGroup

ROUND_TRIPS = 10  # that measure the offset between two machines' clocks


class Clock:
    """Records when a rank's actions start and end, in seconds of the machine's monotonic clock.

    device: on which the actions run.
    runs: False turns the clock off, because reading the time takes microseconds on some machines.
    """

    def __init__(self, device: torch.device, runs: bool = True):
        self._device, self._runs = device, runs
        self._noted: list[tuple[Action, Any, Any]] = []

    def note(self, action: Action, start: Any) -> None:
        """Record that `action` ran from `start`, a result of `now`, until now."""
        if self._runs:
            self._noted.append((action, start, self.now()))

    def spans(self) -> list[Span]:
        """Return what has been recorded, in order. On a GPU, wait until all of it has run."""
        if self._device.type != "cuda":
            return [Span(*each) for each in self._noted]
        last = self.now()
        torch.cuda.synchronize(self._device)
        now = time.monotonic()

        def seconds(event: torch.cuda.Event) -> float:
            return now - float(event.elapsed_time(last)) / 1000

        return [Span(action, seconds(start), seconds(end)) for action, start, end in self._noted]

    def now(self) -> Any:
        """Return the current time; on a GPU, an event that will contain it; None if the clock is off."""
        if not self._runs:
            return None
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def machine() -> int:
    """Return a number that identifies this machine's monotonic clock: a boot, and a container with a clock of its own."""
    boot, clock = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")  # of Linux
    name = boot.read_text(encoding="utf-8") if boot.exists() else platform.node()
    return zlib.crc32(f"{name} {clock.readlink() if clock.is_symlink() else ''}".encode())


def offset(group: PipelineGroup, machines: Sequence[int]) -> float:
    """Return the seconds to add to this rank's clock to get rank 0's. All ranks must call it.

    machines: each rank's `machine()`.
    """
    best, found = float("inf"), 0.0
    for rank in range(1, group.size):
        if machines[rank] == machines[0] or group.rank not in (0, rank):
            continue
        for _ in range(ROUND_TRIPS):
            theirs = torch.zeros(1, dtype=torch.float64, device=group.device)
            if group.rank == 0:
                dist.recv(theirs, group.peer(rank), group.process_group)
                dist.send(theirs.fill_(time.monotonic()), group.peer(rank), group.process_group)
                continue
            asked = time.monotonic()
            dist.send(theirs, group.peer(0), group.process_group)
            dist.recv(theirs, group.peer(0), group.process_group)
            answered = time.monotonic()
            if answered - asked < best:
                best, found = answered - asked, theirs.item() - (asked + answered) / 2
    return found


def timeline(
    schedule: Schedule, rows: Sequence[Sequence[tuple[Action, float, float]]], zero: float | None = None
) -> Timeline:
    """Return the recorded spans of all ranks as a Timeline in seconds, which starts at 0 with the first action.

    zero: the time of the clock that the timeline calls 0, instead.
    """
    if zero is None:
        zero = min(start for row in rows for _, start, _ in row[:1])
    shifted = tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in row) for row in rows)
    return Timeline(schedule, shifted, Costs(unit="s"), "measured")
