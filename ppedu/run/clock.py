"""When actions start and end: on the CPU by its clock, on a GPU by events, so that nothing waits to be measured.

All processes of a machine have one monotonic clock. Where ranks are on several machines, each finds out by how much its
own differs from rank 0's, to within half of the fastest message's way there and back.
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

ROUNDS = 10  # of asking another machine for its time


class Clock:
    """Notes what a rank does. Times are seconds of the machine's monotonic clock, the same for all its processes.

    One that does not run notes nothing: on some machines it takes microseconds to ask for the time.
    """

    def __init__(self, device: torch.device, runs: bool = True):
        self._device, self._runs = device, runs
        self._noted: list[tuple[Action, Any, Any]] = []

    def note(self, action: Action, start: Any) -> None:
        """`action` took from `start`, which `now` has given, until now."""
        if self._runs:
            self._noted.append((action, start, self.now()))

    def spans(self) -> list[Span]:
        """What has been noted, first to last. On a GPU it waits until all of that has run."""
        if self._device.type != "cuda":
            return [Span(*each) for each in self._noted]
        last = self.now()
        torch.cuda.synchronize(self._device)
        now = time.monotonic()

        def seconds(event: Any) -> float:
            return now - event.elapsed_time(last) / 1000

        return [Span(action, seconds(start), seconds(end)) for action, start, end in self._noted]

    def now(self) -> Any:
        """The time; on a GPU, an event that will have it."""
        if not self._runs:
            return None
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def machine() -> int:
    """A number that tells machines, or their starts, apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # of Linux
    return zlib.crc32(boot.read_bytes() if boot.exists() else platform.node().encode())


def offset(group: PipelineGroup, machines: Sequence[int]) -> float:
    """What to add to this rank's clock to have rank 0's, in seconds; all ranks must call it.

    machines: each rank's `machine()`.
    """
    best, found = float("inf"), 0.0
    for rank in range(1, group.size):
        if machines[rank] == machines[0] or group.rank not in (0, rank):
            continue
        for _ in range(ROUNDS):
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


def timeline(schedule: Schedule, rows: Sequence[Sequence[Span]], source: str = "measured") -> Timeline:
    """What all ranks have noted, as a Timeline in seconds that begins with the first action."""
    zero = min(row[0].start for row in rows if row)
    shifted = tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in row) for row in rows)
    return Timeline(schedule, shifted, Costs(unit="s"), source)
