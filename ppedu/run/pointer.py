"""The same training step, nanotron's way: every rank runs the whole model, and pointers stand for what is elsewhere.

A `PipelineBlock` is a part of the model that knows its rank. There it computes. Elsewhere it passes on: a tensor that
it is given leaves for the block's rank, and out comes a `TensorPointer`, which says "over there". On its own rank, a
block that is given a pointer gets the tensor from there. So the model is written as for one rank,

    for block in blocks: x = block(x)

and all messages happen within. Those of the gradients happen within autograd: the backward of a send is a receive, the
backward of a receive a send.

Messages are due long before they are done. What is to be sent waits until this rank itself needs something from its
neighbour there, or until the loop says that it can go. From the rank after, a rank takes once it has given; from the
rank before it takes, and then gives. So of two neighbours one always gives while the other takes, and 1F1B, in which
both have something for each other, does not hang. At the end of a step nothing may be due.

The idea is that of nanotron (github.com/huggingface/nanotron, src/nanotron/parallel/pipeline_parallel: block.py,
functional.py and state.py for blocks, autograd and queues, engine.py for the loops). To be read beside `loops`, where
every message is in sight, and `engine`, which runs any schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ppedu.core.errors import CommunicationError, SettingError
from ppedu.core.validate import require_rank
from ppedu.run.comm import PipelineGroup, communicate
from ppedu.run.stage import Loss


@dataclass(frozen=True)
class TensorPointer:
    """A tensor that is on another rank."""

    rank: int


class Pending:
    """What one rank has still to do: messages and backwards, each with its microbatch, the oldest first.

    shape: of the activation that travels between ranks, for one microbatch. group: the ranks; by default the world.
    """

    def __init__(self, shape: Sequence[int], group: PipelineGroup | None = None):
        self.shape, self.group = shape, PipelineGroup.of(group)
        self.microbatch = 0  # whose forward is running
        operations = ("send_forward", "recv_backward", "send_backward")  # an activation is received when it is needed
        self.due: dict[str, deque[tuple[int, torch.Tensor | None]]] = {each: deque() for each in operations}
        self.ends: deque[tuple[int, torch.Tensor]] = deque()  # where the backwards start

    def do(self, operation: str) -> torch.Tensor | None:
        """Do the oldest message of one kind."""
        _, tensor = self.due[operation].popleft()
        return communicate(operation, tensor, self.shape, group=self.group)

    def do_all(self, operation: str) -> None:
        while self.due[operation]:
            self.do(operation)

    def backward(self) -> None:
        """Do the oldest backward, with the messages that autograd meets on the way."""
        self.ends.popleft()[1].backward()

    def require_none(self) -> None:
        """Return if nothing is left, which the next step would take for its own.

        Raises:
            CommunicationError: something is.
        """
        left = [f"{operation} of microbatch {m}" for operation, queue in self.due.items() for m, _ in queue]
        left += [f"the backward of microbatch {m}" for m, _ in self.ends]
        if left:
            raise CommunicationError(f"rank {self.group.rank} ends a step, but has left to do: {', '.join(left)}")


class _Send(torch.autograd.Function):
    """To the rank after: the activation and, in the backward, its gradient back."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, pending: Pending) -> torch.Tensor:
        ctx.pending = pending
        pending.due["send_forward"].append((pending.microbatch, y))
        pending.due["recv_backward"].append((pending.microbatch, None))
        return y.new_zeros(())  # of no meaning, but a backward can start from it

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, None]:
        ctx.pending.do_all("send_forward")
        return ctx.pending.do("recv_backward"), None


class _Receive(torch.autograd.Function):
    """From the rank before: an activation, which `receive` has got, and in the backward its gradient to there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: Pending) -> torch.Tensor:
        ctx.pending, ctx.microbatch = pending, pending.microbatch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        ctx.pending.due["send_backward"].append((ctx.microbatch, grads[0]))
        return None, None


def receive(pending: Pending) -> torch.Tensor:
    """The oldest activation from the rank before, which is given the gradients that are due to it after that."""
    x = communicate("recv_forward", shapes=pending.shape, group=pending.group)
    pending.do_all("send_backward")
    received: torch.Tensor = _Receive.apply(x, pending)
    return received


class PipelineBlock(nn.Module):
    """A part of the model that runs on `rank`: `module`, which no other rank needs.

    Takes and gives a tensor where it runs, and a pointer elsewhere.

    Raises:
        SettingError: there is no such rank, or this is it and there is no module; or a tensor that is to be sent wants
            no gradient, as where all weights before it are frozen.
    """

    def __init__(self, module: nn.Module | None, rank: int, pending: Pending):
        super().__init__()
        self.rank, self.pending = require_rank(rank, pending.group.size), pending
        self.module = module if rank == pending.group.rank else None
        if rank == pending.group.rank and module is None:
            raise SettingError(f"this is rank {rank}, where the block runs: give it its module here")

    def forward(self, x: torch.Tensor | TensorPointer) -> torch.Tensor | TensorPointer:
        if self.module is not None:
            y: torch.Tensor = self.module(receive(self.pending) if isinstance(x, TensorPointer) else x)
            return y
        if isinstance(x, torch.Tensor):
            if not x.requires_grad:
                raise SettingError(f"what goes to rank {self.rank} wants no gradient; here every rank trains weights")
            self.pending.ends.append((self.pending.microbatch, _Send.apply(x, self.pending)))
        return TensorPointer(self.rank)


def pointer_step(
    blocks: Sequence[PipelineBlock],
    loss_fn: Loss,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    pending: Pending,
    order: str = "1f1b",
) -> torch.Tensor:
    """Run forwards and backwards for all microbatches; the gradients are added to `.grad`, as in `loops`.

    blocks: of the whole model, in the order of their ranks. inputs, targets: the microbatches, of equal size; the first
    rank reads `inputs`, the last `targets`. order: "1f1b", or "afab": all forwards, then all backwards, as in GPipe.

    Returns the mean loss on the last rank, and 0 on the others.

    Raises:
        SettingError: there is no such order, or the blocks do not go through the ranks from first to last.
        CommunicationError: a message has another shape or dtype than expected, or something is left to do in the end.
    """
    group, microbatches = pending.group, len(inputs)
    warmups = {"afab": microbatches, "1f1b": min(group.size - group.rank - 1, microbatches)}
    if order not in warmups:
        raise SettingError(f"there is no order {order!r} here; there is: {', '.join(warmups)}")
    ranks = [block.rank for block in blocks]
    if ranks != sorted(ranks) or set(ranks) != set(range(group.size)):
        raise SettingError(
            f"the blocks are on the ranks {ranks}; they must go from 0 to {group.size - 1}, each in turn"
        )

    total = torch.zeros(())
    for m in range(microbatches):
        pending.microbatch = m
        x = inputs[m] if group.is_first else TensorPointer(0)
        for block in blocks:
            x = block(x)
        if isinstance(x, torch.Tensor):
            loss = loss_fn(x, targets[m]) / microbatches
            pending.ends.append((m, loss))
            total = total + loss.detach()
        if m < warmups[order]:
            pending.do_all("send_forward")
        else:
            pending.backward()  # which sends the activation before it waits for the gradient

    pending.do_all("send_backward")
    for _ in range(warmups[order]):
        pending.backward()
        pending.do_all("send_backward")
    pending.require_none()
    return total
