"""Measures when actions start and end: on the CPU with its clock, on a GPU with marks in its queue.

All processes of a machine share one monotonic clock. If the ranks run on several machines, each rank measures how far
its clock is from rank 0's, with an error of at most half the fastest round trip of a message. Clocks drift apart, by
some microseconds a second, so a pipeline repeats this from time to time.
"""

from __future__ import annotations

import platform
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ppedu.core import Action, Schedule
from ppedu.core.validate import require_count
from ppedu.engine.control import Control
from ppedu.engine.ranks import device
from ppedu.engine.ranks.comm import PipelineGroup
from ppedu.sim import Costs, Span, Timeline

ROUND_TRIPS = 10  # that measure the offset between two machines' clocks, or the latency of a link


class Recorder:
    """Records when a rank's actions start and end, in seconds of the machine's monotonic clock.

    Args:
        where: the device on which the actions run.
        runs: False turns the clock off, because reading the time takes microseconds on some machines.
    """

    def __init__(self, where: torch.device, runs: bool = True):
        self._device, self._runs = where, runs
        self._noted: list[tuple[Action, Any, Any]] = []

    def note(self, action: Action, start: Any) -> None:
        """Record that `action` ran from `start`, a result of `now`, until now."""
        if self._runs:
            self._noted.append((action, start, self.now()))

    def spans(self) -> list[Span]:
        """Return what has been recorded, in order. On a GPU, wait until all of it has run."""
        seconds: Callable[[Any], float] = float
        if self._noted and device.is_queue(self._device):
            seconds = device.host_clock(self._device)
        return [Span(action, seconds(start), seconds(end)) for action, start, end in self._noted]

    def now(self) -> Any:
        """Return the current time; on a GPU, a mark that will contain it; None if the clock is off."""
        if not self._runs:
            return None
        return device.mark(self._device) if device.is_queue(self._device) else time.monotonic()


def machine() -> int:
    """Return a number that identifies this process's monotonic clock: of a machine, or of a container with its own."""
    boot, clock = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")  # of Linux
    name = boot.read_text(encoding="utf-8") if boot.exists() else platform.node()
    return zlib.crc32(f"{name} {clock.readlink() if clock.is_symlink() else ''}".encode())


class Offset(NamedTuple):
    """The seconds to add to a rank's clock to get rank 0's, and the largest error that they may have."""

    seconds: float
    error: float


class RankClocks:
    """The clocks of a pipeline's ranks. They are one if all ranks run on the same machine.

    Attributes:
        machines: each rank's `machine()`, once the ranks have exchanged them.
        offset: in seconds, to add to this rank's clock to get rank 0's.
        error: in seconds; by how much the offset of any rank may be wrong. Measured timelines are as exact as that.
    """

    def __init__(self) -> None:
        self.machines: list[int] = []
        self.offset, self.error = 0.0, 0.0

    def compare(self, control: Control, purpose: str) -> None:
        """Measure `offset` and `error`. All ranks must call this.

        Args:
            purpose: of the call, for errors.
        """
        if len(set(self.machines)) > 1:
            with control.required_for(purpose):
                self.offset, error = offset(control.group, self.machines, control.timeout)
            self.error = control.exchange(torch.tensor([error], dtype=torch.float64), purpose).max().item()


def offset(group: PipelineGroup, machines: Sequence[int], timeout: timedelta | None = None) -> Offset:
    """Return this rank's offset. All ranks must call it.

    A message goes to rank 0 and back. If it leaves at 10.0 s and returns at 10.2 s, and rank 0's clock showed 50.1 s in
    between, that was most likely at 10.1 s here: the offset is 40.0 s, with an error of at most 0.1 s.

    Args:
        machines: each rank's `machine()`.
        timeout: of each message.
    """
    found = Offset(0.0, 0.0)
    for rank in range(1, group.size):
        if machines[rank] != machines[0] and group.rank in (0, rank):
            trips = _round_trips(group, rank, 0, timeout=timeout)
            if trips:
                start, answer, end = min(trips, key=lambda trip: trip[2] - trip[0])  # the fastest
                found = Offset(answer - (start + end) / 2, (end - start) / 2)
    return found


def latency(nbytes: int = 8, group: PipelineGroup | None = None) -> dict[tuple[int, int], float]:
    """Return how many seconds a message takes from one rank to another, for `Costs(latency=…)`.

    The keys are pairs of ranks. All ranks must call it, and all get the same. One pair at a time exchanges messages; a
    message takes half of the median round trip.

    Args:
        nbytes: of a message, such as that of an activation.
        group: by default all ranks of the program.

    Raises:
        SettingError: `nbytes` is not a whole number above 0.
    """
    group = PipelineGroup.of(group)
    require_count("nbytes", nbytes)
    pairs = list(combinations(range(group.size), 2))
    medians = torch.zeros(len(pairs), dtype=torch.float64, device=group.device)
    words = -(-nbytes // 8)  # rounded up
    for index, (one, other) in enumerate(pairs):
        dist.barrier(group.process_group)
        if group.rank in (one, other):
            trips = _round_trips(group, one, other, words)
            if trips:  # this rank is the one that asked
                medians[index] = statistics.median(end - start for start, _, end in trips) / 2
    if pairs:
        dist.all_reduce(medians, group=group.process_group)  # one rank of each pair has a number above 0
    seconds = dict(zip(pairs, medians.tolist(), strict=True))
    return seconds | {(other, one): each for (one, other), each in seconds.items()}


def _round_trips(
    group: PipelineGroup, asking: int, answering: int, words: int = 1, timeout: timedelta | None = None
) -> list[tuple[float, float, float]]:
    """Send messages of 8 · `words` bytes to and fro. Return each one's start, the time when it turned, and its end.

    The start and the end are by the clock of the rank that asks; the other one returns [].
    """
    message = torch.zeros(words, dtype=torch.float64, device=group.device)
    peer = group.peer(asking if group.rank == answering else answering)

    def transfer(start: Callable[..., dist.Work | None]) -> None:
        if work := start(message, peer, group.process_group):
            device.wait(work, group.device, timeout)

    trips = []
    for _ in range(1 + ROUND_TRIPS):
        if group.rank == answering:
            transfer(dist.irecv)
            message[0] = time.monotonic()  # when the message is here, not when the receive is queued
            transfer(dist.isend)
        else:
            start = time.monotonic()
            transfer(dist.isend)
            transfer(dist.irecv)
            trips.append((start, message[0].item(), time.monotonic()))
    return trips[1:]  # the first one may have connected the ranks


def timeline(
    schedule: Schedule, rows: Sequence[Sequence[tuple[Action, float, float]]], zero: float | None = None
) -> Timeline:
    """Return the recorded spans of all ranks as a Timeline in seconds, which starts at 0 with the first action.

    Args:
        zero: the time of the clock that the timeline calls 0, instead.
    """
    if zero is None:
        firsts = [row[0] for row in rows if row]
        zero = min(start for _, start, _ in firsts)
    shifted = tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in row) for row in rows)
    return Timeline(schedule, shifted, Costs(unit="s"), "measured")
