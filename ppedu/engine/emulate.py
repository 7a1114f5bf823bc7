"""Emulated stages: real messages between real ranks, which sleep where they would compute.

Sleeping ranks can share a processor core, so a laptop shows the run of eight devices: the order, the messages and the
time spent waiting for them are real, and only the durations of the actions are given. Such a timeline has the source
"emulated".

The emulated device has a queue, like a GPU, and works while Python prepares the next action. On the device, an action
starts as soon as the previous one has ended and its inputs have arrived, even if Python gets to it a little later.
Python then sleeps less, so that a process that was woken late catches up. A message for which a rank had to wait counts
with its real travel time, from Python's send to Python's receive. All of this only determines when a sleep ends; the
times in the timeline are measured.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core import COMPUTE, OVERLAP, Action, Schedule, SettingError, require_schedule
from ppedu.core.validate import require_count, require_instance
from ppedu.engine.interpreter import Step
from ppedu.engine.pipeline import Pipeline
from ppedu.engine.post_validation import PostValidation, Validation
from ppedu.engine.ranks.comm import PipelineGroup, backend_for
from ppedu.engine.ranks.messages import Messages
from ppedu.engine.results import Results
from ppedu.engine.stages.stage import Stage
from ppedu.sim import Costs, Timeline, simulate
from ppedu.sim.steps import join

SHORT = 0.0002  # seconds: how much too late a sleep may end, and the longest receive of an arrived message


def emulate(
    schedule: Schedule,
    costs: Costs,
    group: PipelineGroup | None = None,
    *,
    steps: int = 1,
    barrier: bool = True,
    size: int = 4096,
    timeout: float = 60.0,
) -> Timeline:
    """Run steps in which actions sleep as long as they take in `costs`, and return the timeline of all ranks.

    All ranks must call it.

    Args:
        costs: in seconds, without `links`.
        group: the ranks of the pipeline; by default all ranks of the program.
        steps, barrier: as in `simulate`. Without a barrier, steps are validated by the rules of `PostValidation`.
        size: of a message in bytes; rounded up to a multiple of 8, and at least 16.
        timeout: the seconds that a rank waits for another one.

    Raises:
        ScheduleError: the schedule is not legal.
        SettingError: the costs or the size are invalid, or the group has another number of ranks than the schedule.
        CommunicationError: another rank has failed, was given other arguments, or does not answer within the timeout.
    """
    return Emulation(schedule, costs, group, size=size, timeout=timeout, barrier=barrier).run(steps)


class Emulation:
    """A pipeline of emulated stages; see `emulate`. `simulated` is the timeline that `costs` predict."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        group: PipelineGroup | None = None,
        *,
        size: int = 4096,
        timeout: float = 60.0,
        barrier: bool = True,
    ):
        require_schedule("emulate", schedule)
        require_instance("costs", costs, Costs, "Costs in seconds, such as Costs(forward=0.01, backward=0.02)")
        if costs.transport != "buffered":
            raise SettingError(f"emulated messages do not wait for each other; leave out transport={costs.transport!r}")
        if schedule.placement.barriers:
            raise SettingError(f"emulated stages have no head, which all ranks share in {schedule!r}")
        self.simulated = simulate(schedule, costs)
        self.durations = {span.action: float(span.end - span.start) for row in self.simulated.rows for span in row}
        self.end = 0.0  # when the device's last action ends; 0 before the first
        self.connected = False
        group = _without_gpus(PipelineGroup.of(group))
        words = max(2, -(-require_count("size", size) // 8))  # of 8 bytes, rounded up; two of them are times
        stages = {index: EmulatedStage(index, self, words) for index in schedule.placement.stages_of(group.rank)}
        nothing = torch.optim.SGD([{"params": []}])  # no weights
        optimizer: Any = None if barrier else PostValidation(nothing)
        if schedule.updated:
            optimizer = dict.fromkeys(stages, nothing)
        self.pipeline = Pipeline(
            schedule, stages, lambda *_: torch.zeros(()), group, timeout=timeout, optimizer=optimizer
        )
        if self.pipeline.validation:
            self.pipeline.validation.settle = self._settle  # type: ignore[method-assign]
        self.messages = TimedMessages(schedule.placement, group, timeout, debug=False)
        self.pipeline.messages = self.messages

    def step(self) -> Timeline:
        """Run a step and return its timeline. The first call also runs one without sleeps, to connect the ranks."""
        return self.run(1)

    def run(self, steps: int) -> Timeline:
        """Run several steps and return their timeline; see `step`.

        Raises:
            SettingError: the number of steps is not a whole number above 0.
        """
        require_count("steps", steps)
        if not self.connected:
            self._step()
            self.pipeline.flush()
            self.connected = True
            self.messages.costs = self.simulated.costs
            self.messages.offset = self.pipeline.clocks.offset
            for op in COMPUTE | OVERLAP:
                self.pipeline.on(op, self._run)
        self.end, self.messages.due = 0.0, 0.0
        found: list[Results | None] = []
        for _ in range(steps):
            self._step()
            found.append(self.pipeline.results)
            if self.pipeline.validation is None:
                self.end = 0.0
        if self.pipeline.validation:  # the results of a step arrive during the next one, and those of the last one now
            self.pipeline.flush()
            found = [*found[1:], self.pipeline.results]
        measured = [each for each in found if each]
        costs, zero = replace(self.simulated.costs, unit="s"), measured[0].start
        parts = [replace(each.timeline(zero), costs=costs, source="emulated") for each in measured]
        return join(parts) if steps > 1 else parts[0]

    def _settle(self) -> tuple[Results, bool]:
        """Wait for the validation of the last step; the device waits, too."""
        asked = time.monotonic()
        assert self.pipeline.validation
        validated = Validation.settle(self.pipeline.validation)
        now = time.monotonic()
        if now - asked > SHORT:
            self.messages.due = max(self.messages.due, now)
        return validated

    def _step(self) -> None:
        schedule = self.simulated.schedule
        batch = [torch.zeros(1, schedule.slices)] * (schedule.microbatches // schedule.slices)
        run = self.pipeline.eval if schedule.forward_only else self.pipeline.step
        run(batch, batch)

    def _run(self, action: Action, step: Step) -> None:
        if action not in self.durations:  # part of a pair, whose duration covers both parts
            step.default(action)
            return
        step.wait(action)
        self.end = max(self.end or time.monotonic(), self.messages.due) + self.durations[action]
        step.default(action)
        sleep_until(self.end)


def _without_gpus(group: PipelineGroup) -> PipelineGroup:
    """Return the group, connected by gloo, because emulated stages send from the CPU. All ranks must call this."""
    if group.size == 1 or backend_for("cpu", group.process_group):
        return group.on(torch.device("cpu"))
    ranks = [group.peer(rank) for rank in range(group.size)]
    gloo = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return PipelineGroup(group.rank, group.size, gloo)


class EmulatedStage(Stage):
    """A stage that returns tensors of the right size at once. Each contains the time at which the device made it."""

    def __init__(self, index: int, emulation: Emulation, words: int):
        super().__init__(nn.Identity(), index)
        self.emulation, self.words = emulation, words

    def forward(self, microbatch: int, x: Any = None, **keywords: Any) -> torch.Tensor:
        return self._result().requires_grad_()

    def backward(self, microbatch: int, dy: Any = None) -> torch.Tensor:
        return self._result()

    backward_input = backward

    def backward_weight(self, microbatch: int) -> None:
        pass

    forward_again = backward_weight

    def hand_on(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        return (self._result(),)

    def take_on(self, microbatch: int, message: Sequence[torch.Tensor], **keywords: Any) -> None:
        pass

    def _result(self) -> torch.Tensor:
        made = self.emulation.end + self.emulation.messages.offset
        return torch.full((self.words,), made, dtype=torch.float64)


class TimedMessages(Messages):
    """Messages that contain the times at which the device made them and at which they were sent, by rank 0's clock.

    Attributes:
        costs: their transfer and latency are the seconds that a message takes at least.
        offset: the seconds to add to this rank's clock to get rank 0's.
        due: when the last message that this rank's device needed has arrived there.
    """

    costs = Costs(latency=0)
    offset = due = 0.0

    def send(self, action: Action, tensors: Sequence[torch.Tensor], kind: Hashable) -> None:
        tensors[0].detach()[1] = time.monotonic() + self.offset
        super().send(action, tensors, kind)

    def wait(self, action: Action, user: Action, home: torch.device) -> tuple[torch.Tensor, ...]:
        asked = time.monotonic()
        arrived = super().wait(action, user, home)
        now = time.monotonic()
        made, sent = (seconds - self.offset for seconds in arrived[0][:2].tolist())
        travel = float(self.costs.delay(*self.placement.route(action)))
        if now - asked > SHORT:  # the rank had to wait, so the message has just arrived
            travel = max(travel, now - sent)
        arrival = made + travel
        self.due = max(self.due, arrival)
        sleep_until(arrival)
        return arrived


def sleep_until(end: float) -> None:
    """Sleep until the time `end` of `time.monotonic`, and poll for the last moment, because sleeps end late."""
    left = end - time.monotonic()
    if left > SHORT:
        time.sleep(left - SHORT)
    while time.monotonic() < end:
        pass
