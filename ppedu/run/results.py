"""The results of a step: its losses and measured times, which every rank learns from every other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ppedu.core.actions import Action, Op
from ppedu.core.errors import PipelineError
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Timeline
from ppedu.run import clock
from ppedu.run.interpreter import Step
from ppedu.run.program import Program

ALL_PADDING = (
    "if all its targets are padding, their mean is NaN, and Batching(count=lambda y: int((y >= 0).sum())) leaves them "
    "out, where padding is below 0"
)


class Results(NamedTuple):
    """The losses and times of a step, on all ranks.

    loss: of the batch, over all replicas. losses: of each microbatch; float64 if a stage's are, and fp32 if not.
    times: each action's start and end on rank 0's clock, a row per rank.
    """

    schedule: Schedule
    loss: torch.Tensor
    losses: torch.Tensor
    times: torch.Tensor

    @property
    def start(self) -> float:
        """The start of the first action, on rank 0's clock."""
        return float(self.times[:, 0].min())

    def timeline(self, zero: float | None = None) -> Timeline:
        """Return the measured timeline; see `clock.timeline`."""
        pairs = zip(self.schedule.orders, self.times.tolist(), strict=True)
        rows = [list(zip(order, row[::2], row[1::2], strict=False)) for order, row in pairs]
        return clock.timeline(self.schedule, rows, zero)

    def require_finite(self, counted: bool = True) -> None:
        """Raise PipelineError unless all losses are finite. counted: the user counts the targets; see `Batching`."""
        losses = self.losses.tolist()
        for m, loss in enumerate(losses):
            if not math.isfinite(loss):
                last = Action(self.schedule.stages - 1, Op.F, m)
                alone = len(losses) == 1 or any(map(math.isfinite, losses))
                raise PipelineError(
                    f"rank {self.schedule.placement.rank(last.stage, m)}: {last} gave a loss of {loss}; "
                    f"check microbatch {m} and the learning rate, and look for a division by zero"
                    + (f": {ALL_PADDING}" if math.isnan(loss) and alone and not counted else "")
                )
        if not math.isfinite(self.loss):
            raise PipelineError(f"another replica has a loss of {self.loss.item()}; its own error says in which action")


def length(program: Program) -> int:
    """Return the length of a rank's `row`."""
    return 2 + program.schedule.microbatches + 2 * program.longest


def row(step: Step) -> torch.Tensor:
    """Return a rank's part of the results as one row of numbers, as long on all ranks.

    It consists of the rank's part of the batch's loss and of each microbatch's, the start and end of each action, and
    whether a loss is float64.
    """
    double = False
    numbers = [0.0] * (1 + step.program.schedule.microbatches)
    for stage in step.stages.values():
        if stage.losses:
            numbers[0] += stage.loss.item()
        for m, loss in stage.losses.items():
            numbers[1 + m] += loss.item()
            double |= loss.dtype == torch.float64
    offset = step.pipeline.clocks.offset
    numbers += [time + offset for _, start, end in step.clock.spans() for time in (start, end)]
    numbers += [0.0] * (length(step.program) - len(numbers) - 1) + [float(double)]
    return torch.tensor(numbers, dtype=torch.float64)


def read(rows: torch.Tensor, schedule: Schedule) -> Results:
    """Return the results in the rows of all ranks; the loss is that of this pipeline alone."""
    sums = rows[:, : 1 + schedule.microbatches].sum(0)
    if not rows[:, -1].any():
        sums = sums.float()
    return Results(schedule, sums[0], sums[1:], rows[:, 1 + schedule.microbatches : -1])
