"""The results of a step: its losses and measured times, which every rank learns from every other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ppedu.core import Action, Op, PipelineError, Schedule
from ppedu.engine import clock
from ppedu.engine.interpreter import Step
from ppedu.engine.program import Program
from ppedu.sim import Timeline

ALL_PADDING = (
    "if all its targets are padding, their mean is NaN, and Batching(count=lambda y: int((y >= 0).sum())) leaves them "
    "out, where padding is below 0"
)


class Results(NamedTuple):
    """The losses and times of a step, on all ranks.

    Attributes:
        loss: of the batch, the mean over all replicas, a scalar; not finite if any microbatch's loss in any replica is
            not.
        losses: of each microbatch of this replica, shape (microbatches,). Both are float64 if a stage's losses are, and
            fp32 if not.
        times: each action's start and end on rank 0's clock, shape (ranks, 2 · actions of the busiest rank). The rows
            of other ranks end with zeros.
        norm: of all gradients, before clipping; 0 if it was not needed.
    """

    schedule: Schedule
    loss: torch.Tensor
    losses: torch.Tensor
    times: torch.Tensor
    norm: float

    @property
    def start(self) -> float:
        """The start of the first action, on rank 0's clock."""
        return float(self.times[:, 0].min())

    def timeline(self, zero: float | None = None) -> Timeline:
        """Return the measured timeline; see `clock.timeline`."""
        rows = []
        for order, times in zip(self.schedule.orders, self.times.tolist(), strict=True):
            starts, ends = times[::2], times[1::2]
            rows.append(list(zip(order, starts, ends, strict=False)))  # after a shorter order, times are zeros
        return clock.timeline(self.schedule, rows, zero)

    def require_finite(self, counted: bool = True) -> None:
        """Raise PipelineError unless all losses and the norm are finite.

        Args:
            counted: the user counts the targets; see `Batching`.
        """
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
        if not math.isfinite(self.norm):
            raise PipelineError(
                f"the norm of the gradients over all stages is {self.norm}, though all losses are finite; look for a "
                "derivative that is not, such as that of a square root at 0, or lower loss_scale"
            )


def length(program: Program) -> int:
    """Return the length of a rank's `row`."""
    return 3 + program.schedule.microbatches + 2 * program.longest


def row(step: Step, offset: float, norm: float = 0.0) -> torch.Tensor:
    """Return a rank's part of the results as one row of numbers, as long on all ranks.

    It consists of the rank's part of the batch's loss and of each microbatch's, the start and end of each action,
    whether a loss is float64, and the rank's part of the gradients' norm:

        loss, loss of microbatch 0, 1, …, start, end, start, end, …, 0, 0, …, is float64, norm

    Args:
        offset: the seconds to add to this rank's clock to get rank 0's.
    """
    double, microbatches = False, step.program.schedule.microbatches
    numbers = [0.0] * (1 + microbatches)
    for stage in step.stages.values():
        if stage.losses:
            numbers[0] += stage.loss.item()
        for m, loss in stage.losses.items():
            numbers[1 + m] += loss.item()
            double |= loss.dtype == torch.float64
    times = [time + offset for _, start, end in step.clock.spans() for time in (start, end)]
    unused = [0.0] * (2 * step.program.longest - len(times))
    return torch.tensor([*numbers, *times, *unused, double, norm], dtype=torch.float64)


def read(rows: torch.Tensor, schedule: Schedule, gather: Callable[[torch.Tensor], torch.Tensor]) -> Results:
    """Return the results in the rows of all ranks, with the same loss and norm in all replicas.

    Args:
        rows: those of `row`, shape (ranks, length).
        gather: as `GradientSync.gather_replicas`.
    """
    end = 1 + schedule.microbatches  # of the losses
    loss, *losses = rows[:, :end].sum(0).tolist()
    doubles, norms = rows[:, -2:].T.tolist()
    dtype = torch.float64 if any(doubles) else torch.float32
    if not all(map(math.isfinite, losses)):
        loss = math.nan  # other replicas see only the sum
    everywhere = gather(torch.tensor([loss, math.hypot(*norms)], dtype=torch.float64)).tolist()
    loss = sum(each for each, _ in everywhere) / len(everywhere)
    norm = everywhere[0][1]  # each replica computes it, and all use that of the first
    numbers = torch.tensor(loss, dtype=dtype), torch.tensor(losses, dtype=dtype)
    return Results(schedule, *numbers, rows[:, end:-2], norm)
