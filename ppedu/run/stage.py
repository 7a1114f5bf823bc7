"""A piece of the model on its rank: runs forwards and backwards, keeps what is in flight, notes the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core.actions import Action, B, F
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import Costs
from ppedu.core.timeline import Span, Timeline
from ppedu.run.comm import PipelineGroup

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Stage:
    """One stage of a pipeline.

    module: takes one tensor and returns one. index: which stage this is, from 0.
    loss_fn: `loss_fn(output, target)` → the microbatch's mean loss, a scalar. Given on the last stage only.
    """

    def __init__(self, module: nn.Module, index: int, loss_fn: Loss | None = None):
        self.module = module
        self.index = index
        self.loss_fn = loss_fn
        self.begin((), ())

    def begin(self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Start a step on these microbatches, which are of equal size and as many as there are targets."""
        self.inputs, self.targets = inputs, targets
        self.loss = torch.zeros(())  # mean over the microbatches; stays 0 where there is no loss_fn
        self.spans: list[Span] = []
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # in flight: input and output

    def forward(self, microbatch: int, x: torch.Tensor | None = None) -> torch.Tensor:
        """The output for `x`, what the stage before sent; on the first stage, which is sent None, for the input.

        On the last stage the output is the loss divided by the number of microbatches, so that the gradients
        of all of them add up to the gradient of their mean.
        """
        x = self.inputs[microbatch] if x is None else x
        with self._timed(F(self.index, microbatch), x.device):
            y: torch.Tensor = self.module(x)
            if self.loss_fn:
                y = self.loss_fn(y, self.targets[microbatch]) / len(self.inputs)
                self.loss = self.loss + y.detach()
        self.held[microbatch] = x, y
        return y

    def backward(self, microbatch: int, dy: torch.Tensor | None = None) -> torch.Tensor | None:
        """The gradient of the input, given `dy`, the gradient of the output (None on the last stage: the loss).

        The gradients of the weights are added to their `.grad`. The first stage's input needs no gradient:
        there the answer is None.
        """
        x, y = self.held.pop(microbatch)
        with self._timed(B(self.index, microbatch), x.device):
            torch.autograd.backward(y, dy)
        return x.grad

    @contextmanager
    def _timed(self, action: Action, device: torch.device) -> Iterator[None]:
        start = _now(device)
        yield
        self.spans.append(Span(action, start, _now(device)))


def measured(name: str, stage: Stage, group: PipelineGroup) -> Timeline | None:
    """The last step of all ranks as a Timeline, on rank 0 of the group; None on the others.

    Times are in seconds, counted from the first action. All ranks must call it. They must run on one machine:
    its monotonic clock is the same for every process.
    """
    rows: list[list[Span]] | None = [[] for _ in range(group.size)] if group.rank == 0 else None
    if group.size == 1:
        rows = [stage.spans]
    else:
        dist.gather_object(stage.spans, rows, group.peer(0), group.process_group)
    if rows is None:
        return None
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = Schedule(name, Placement.make("loop", group.size), len(stage.inputs), orders)
    zero = min(row[0].start for row in rows)
    shifted = tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in row) for row in rows)
    return Timeline(schedule, shifted, Costs(unit="s"), "measured")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a kernel that was only launched has not yet run
    return time.monotonic()
