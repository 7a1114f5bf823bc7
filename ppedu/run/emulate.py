"""Emulated stages: real messages between real ranks, but where a rank would compute, it sleeps.

Sleeping ranks share a core in peace, so a laptop shows what eight devices would do: the order, the messages and the
waiting for them are real, only the times of the actions are given. A timeline that came about so is "emulated".

What is emulated is a device with a queue, such as a GPU, which goes on while Python prepares what comes next: an action
begins, for the device, when the one before has ended and what it needs is there, although Python may come to it a
little later. It ends so much earlier, so that a process which is woken late catches up. A message that a rank had to
wait for counts with the time that it really took, from Python's sending it to Python's having it. All this decides when
a sleep ends, and nothing else; what the timeline tells was measured.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ppedu.core.actions import COMPUTE, OVERLAP, Action
from ppedu.core.costs import Costs
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_count
from ppedu.run.comm import PipelineGroup
from ppedu.run.interpreter import Step
from ppedu.run.messages import Messages
from ppedu.run.pipeline import Pipeline
from ppedu.run.stage import Stage

SHORT = 0.0002  # seconds: a sleep ends about as much too late, and a message that is there is had in less


def emulate(
    schedule: Schedule,
    costs: Costs,
    group: PipelineGroup | None = None,
    *,
    size: int = 4096,
    timeout: float = 60.0,
) -> Timeline:
    """The timeline of a step in which every action takes what `costs` says, in seconds, and nothing is computed.

    All ranks must call it; each gets the timeline of all. For several steps make an `Emulation`.

    size: bytes of a message, at least 16 and a multiple of 8. timeout: seconds that a rank waits for another.

    Raises:
        ScheduleError: the schedule is not legal.
        SettingError: the costs, the size or the group do not fit.
        CommunicationError: another rank has failed, was given something else, or does not answer in time.
    """
    return Emulation(schedule, costs, group, size=size, timeout=timeout).step()


class Emulation:
    """A pipeline of emulated stages; see `emulate`. `simulated` is what it would be if messages took no time."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        group: PipelineGroup | None = None,
        *,
        size: int = 4096,
        timeout: float = 60.0,
    ):
        self.simulated = simulate(schedule, costs)
        self.lasts = {span.action: float(span.end - span.start) for row in self.simulated.rows for span in row}
        self.end = 0.0  # of the device's last action; 0 before the first
        group = PipelineGroup.of(group)
        words = max(2, -(-require_count("size", size) // 8))
        stages = {index: EmulatedStage(index, self, words) for index in schedule.placement.stages_of(group.rank)}
        self.pipeline = Pipeline(schedule, stages, _no_loss, group, timeout=timeout)
        self.messages = TimedMessages(schedule.placement, group, timeout, debug=False)
        self.pipeline.messages = self.messages

    def step(self) -> Timeline:
        """Run a step. Before the first, one in which nothing takes time: ranks connect and tell each other sizes."""
        if not self.pipeline.steps:
            self._step()
            self.messages.latency = float(self.simulated.costs.latency)
            self.messages.offset = self.pipeline.offset or 0.0
            for op in COMPUTE | OVERLAP:
                self.pipeline.on(op, self._run)
        self.end = 0.0
        self._step()
        return replace(self.pipeline.timeline, costs=replace(self.simulated.costs, unit="s"), source="emulated")

    def _step(self) -> None:
        nothing = [torch.zeros(1)] * self.simulated.schedule.microbatches
        self.pipeline.step(nothing, nothing)

    def _run(self, action: Action, step: Step) -> None:
        if action not in self.lasts:  # part of a pair, which has one time for both
            step.default(action)
            return
        step.wait(action)
        self.end = max(self.end or time.monotonic(), self.messages.came) + self.lasts[action]
        step.default(action)
        sleep_until(self.end)


class EmulatedStage(Stage):
    """A stage that makes tensors of the right size, in no time. In each stands when the device has made it."""

    def __init__(self, index: int, emulation: Emulation, words: int):
        super().__init__(nn.Identity(), index)
        self.emulation, self.words = emulation, words

    def forward(self, microbatch: int, x: Any = None, **keywords: Any) -> torch.Tensor:
        return self._made().requires_grad_()

    def backward(self, microbatch: int, dy: Any = None) -> torch.Tensor:
        return self._made()

    def backward_input(self, microbatch: int, dy: Any = None) -> torch.Tensor:
        return self._made()

    def backward_weight(self, microbatch: int) -> None:
        pass

    def _made(self) -> torch.Tensor:
        made = self.emulation.end + self.emulation.messages.offset
        return torch.full((self.words,), made, dtype=torch.float64)


class TimedMessages(Messages):
    """Messages that tell when the device made them, and when they were sent, by the clock of rank 0.

    latency: seconds that they take at least. offset: from this rank's clock to rank 0's. came: when the device here had
    the last one that it needed.
    """

    latency = offset = came = 0.0

    def send(self, action: Action, tensors: Sequence[torch.Tensor], kind: Hashable) -> None:
        tensors[0].detach()[1] = time.monotonic() + self.offset
        super().send(action, tensors, kind)

    def wait(self, action: Action, user: Action, device: torch.device) -> tuple[torch.Tensor, ...]:
        asked = time.monotonic()
        arrived = super().wait(action, user, device)
        now = time.monotonic()
        made, sent = (told - self.offset for told in arrived[0][:2].tolist())
        waited = now - asked > SHORT
        due = made + max(self.latency, now - sent if waited else 0)
        self.came = max(self.came, due)
        sleep_until(due)
        return arrived


def sleep_until(end: float) -> None:
    """Return at `end`, a time of `time.monotonic`. The last bit is waited for awake, as a sleep ends late."""
    left = end - time.monotonic()
    if left > SHORT:
        time.sleep(left - SHORT)
    while time.monotonic() < end:
        pass


def _no_loss(output: Any, target: Any) -> torch.Tensor:
    return torch.zeros(())
