"""Run any schedule on real processes, in about fifty lines: the bridge from `loops` to the engine. Read it aloud.

In each of the loops, the order of a schedule is written into the code. `run_schedule` reads the order instead: it goes
through this rank's lowered actions and does what each one says. The schedule is data, the function its interpreter,
and the same lines run GPipe, 1F1B, an interleaved schedule, a zero-bubble one, or your own.

Stages hand results to each other through *slots*. A slot is named by its kind ("F" holds an activation, "B" a
gradient), the stage that will use it, and the microbatch. Between two stages of one rank, the first fills the slot and
the second empties it. Between ranks, SEND empties a slot on one rank and RECV fills the same one on the other.

`Pipeline` does the same, and all that real training needs besides. Fifty lines have limits:

- One copy of the model, and whole sequences, on the CPU. The pipeline is the whole world: process r is the schedule's
  rank r.
- Weights are whole, so sharding actions such as UNSHARD are skipped.
- A stage takes and returns one tensor. Between stages, all tensors have one shape and torch's default dtype.
- Microbatches are of equal size, so that each counts 1/m in the batch's loss. Every stage has weights to train.
- A pair of actions that a GPU would overlap runs one part after the other. R is skipped: F keeps its activations.
- If a rank fails, the others keep waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ppedu.core import TOWARDS, Op, Schedule, SettingError, lower
from ppedu.engine.stages.split_backward import backward_input


def run_schedule(
    schedule: Schedule,
    modules: Mapping[int, nn.Module],
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    shape: Sequence[int],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run one training step of `schedule`: add the gradients to `.grad`, return the loss. All ranks must call it.

    Args:
        schedule: Compute actions alone, or lowered by `pp.lower`.
        modules: The stages that this rank holds, by number.
        inputs, targets: The batch cut into microbatches of equal size, one tensor each; the first stage reads `inputs`,
            the last `targets`.
        shape: Of one microbatch's activation between two stages, such as (samples, width).
        loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar.

    Returns:
        The mean loss, a scalar, on the rank that holds the last stage, and 0 on the others.

    Raises:
        ScheduleError: The schedule is not legal.
        SettingError: The schedule has a stage on two ranks, slices of sequences, updates of the weights (U), or a
            shared head (S and T).
    """
    schedule.validate()
    placement, last, loss = schedule.placement, schedule.stages - 1, torch.zeros(())
    if not placement.alone or placement.slices > 1 or schedule.updated or placement.barriers:
        what = "slices" if placement.slices > 1 else "versions" if schedule.updated else "copies of the model or head"
        raise SettingError(f"{schedule.name} trains several {what}, and nothing here adds up their gradients")
    lowered = schedule if schedule.lowered else lower(schedule)

    slots: dict[tuple[str, int, int], torch.Tensor] = {}
    receives: dict[tuple[str, int, int], Any] = {}  # requests that are still filling their slots
    # Requests, each with its tensor, which must live until it has arrived.
    sends: list[tuple[Any, torch.Tensor]] = []
    # Input and output of F, kept for B or I.
    graphs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    weight_halves: dict[tuple[int, int], Callable[[], None]] = {}  # what I leaves for W to do

    def take(kind: str, stage: int, microbatch: int) -> torch.Tensor:
        """Empty a slot, after waiting for its receive if one is pending."""
        if (kind, stage, microbatch) in receives:
            receives.pop((kind, stage, microbatch)).wait()
        return slots.pop((kind, stage, microbatch))

    order = lowered.orders[dist.get_rank()]
    singles = [single for action in order for single in action.singles]  # of a pair, its two parts
    for stage, op, m, _ in singles:
        match op:
            case Op.F:
                x = inputs[m] if stage == 0 else take("F", stage, m).requires_grad_()
                y = modules[stage](x)
                if stage < last:
                    slots["F", stage + 1, m] = y.detach()
                else:
                    y = loss_fn(y, targets[m]) / len(inputs)
                    loss += y.detach()
                graphs[stage, m] = x, y
            case Op.B | Op.I:
                x, y = graphs.pop((stage, m))
                dy = take("B", stage, m) if stage < last else None
                # The gradient enters the graph at y: dy, or 1 (None) at the loss. Out come the gradient of x, which the
                # first stage does not need, and a function that computes those of the weights.
                dx, weight_half = backward_input([get_gradient_edge(y)], [dy], [x] if stage > 0 else [])
                if stage > 0:
                    slots["B", stage - 1, m] = dx[0]
                if op == Op.B:  # the full backward: do what W does, too
                    weight_half()
                else:
                    weight_halves[stage, m] = weight_half
            case Op.W:
                weight_halves.pop((stage, m))()
            case Op.SEND_F | Op.SEND_B:
                kind, peer = op[-1], stage + TOWARDS[op]  # the last letter is F or B
                result = take(kind, peer, m).contiguous()
                sends.append((dist.isend(result, placement.rank(peer, m)), result))
            case Op.RECV_F | Op.RECV_B:
                # Each pair of ranks sends and receives in the same order, so messages need no tags.
                kind, peer = op[-1], stage + TOWARDS[op]
                buffer = slots[kind, stage, m] = torch.empty(tuple(shape))
                receives[kind, stage, m] = dist.irecv(buffer, placement.rank(peer, m))
    for request, _ in sends:
        request.wait()
    return loss
