"""Training steps written out by hand, to be read aloud: naive, GPipe and 1F1B.

Each runs the forwards and backwards of all microbatches of a batch and adds the gradients to `.grad`.
All take the same arguments:

    stage: This rank's `Stage`.
    inputs, targets: The batch cut into microbatches of equal size, one tensor each; the first stage reads `inputs`, the
        last `targets`.
    shape: Of one microbatch's activation between two stages, such as (samples, width).
    group: The ranks of the pipeline; by default all ranks of the program.

They return the mean loss, a scalar, on the last rank, and 0 on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ppedu.core import Placement, Schedule
from ppedu.engine import clock
from ppedu.engine.ranks.comm import PipelineGroup, bidirectional_communicate, communicate
from ppedu.engine.stages.stage import Stage
from ppedu.sim import Span, Timeline

Microbatches = Sequence[torch.Tensor]


def naive_step(
    stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int], group: PipelineGroup | None = None
) -> torch.Tensor:
    """Run one microbatch at a time, forward through all stages and back."""
    stage.begin(inputs, targets)
    for m in range(len(inputs)):
        x = communicate("recv_forward", shapes=shape, device=stage.device, group=group)
        y = stage.forward(m, x)
        communicate("send_forward", y, group=group)

        dy = communicate("recv_backward", shapes=shape, device=stage.device, group=group)
        dx = stage.backward(m, dy)
        communicate("send_backward", dx, group=group)
    return stage.loss


def gpipe_step(
    stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int], group: PipelineGroup | None = None
) -> torch.Tensor:
    """Run all forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    stage.begin(inputs, targets)
    for m in range(len(inputs)):
        x = communicate("recv_forward", shapes=shape, device=stage.device, group=group)
        y = stage.forward(m, x)
        communicate("send_forward", y, group=group)

    for m in range(len(inputs)):
        dy = communicate("recv_backward", shapes=shape, device=stage.device, group=group)
        dx = stage.backward(m, dy)
        communicate("send_backward", dx, group=group)
    return stage.loss


def one_f_one_b_step(
    stage: Stage,
    inputs: Microbatches,
    targets: Microbatches,
    shape: Sequence[int],
    group: PipelineGroup | None = None,
) -> torch.Tensor:
    """Run the warm-up, one forward and one backward in turn, and the cooldown (arXiv 2006.09503)."""
    group, device = group or PipelineGroup.world(), stage.device
    microbatches = len(inputs)
    warmup = min(group.size - group.rank - 1, microbatches)
    stage.begin(inputs, targets)

    for m in range(warmup):
        x = communicate("recv_forward", shapes=shape, device=device, group=group)
        y = stage.forward(m, x)
        communicate("send_forward", y, group=group)

    if warmup < microbatches:
        x = communicate("recv_forward", shapes=shape, device=device, group=group)
    for m in range(warmup, microbatches):
        y = stage.forward(m, x)
        # The next rank needs this activation, and has a gradient for this rank: swap them.
        dy = bidirectional_communicate("send_fwd_recv_bwd", y, shape, device=device, group=group)
        dx = stage.backward(m - warmup, dy)
        if m < microbatches - 1:
            x = bidirectional_communicate("send_bwd_recv_fwd", dx, shape, device=device, group=group)
        else:
            communicate("send_backward", dx, group=group)

    for m in range(microbatches - warmup, microbatches):
        dy = communicate("recv_backward", shapes=shape, device=device, group=group)
        dx = stage.backward(m, dy)
        communicate("send_backward", dx, group=group)
    return stage.loss


LOOPS: dict[str, Callable[..., torch.Tensor]] = {"naive": naive_step, "gpipe": gpipe_step, "1f1b": one_f_one_b_step}


def measured(name: str, stage: Stage, group: PipelineGroup) -> Timeline | None:
    """Return the measured Timeline of the last step on rank 0 of the group, None on the other ranks.

    All ranks must call it. Times are seconds since the first action.

    Args:
        name: Of the timeline's schedule.
    """
    spans = stage.clock.spans()
    rows, machines = [spans] * group.size, [0] * group.size  # for each rank, filled by all_gather_object
    if group.size > 1:
        dist.all_gather_object(machines, clock.machine(), group.process_group)
        ahead = clock.offset(group, machines).seconds
        shifted = [Span(action, start + ahead, end + ahead) for action, start, end in spans]
        dist.all_gather_object(rows, shifted, group.process_group)
    if group.rank > 0:
        return None
    orders = tuple(tuple(span.action for span in row) for row in rows)
    return clock.timeline(Schedule(name, Placement.make("loop", group.size), len(stage.inputs), orders), rows)
