"""The training step in the style of nanotron: every rank runs the whole model, with pointers to remote tensors.

A `PipelineBlock` is a part of the model that knows its rank. On that rank, it computes; if its input is a
`TensorPointer`, it first receives the tensor to which that points. On any other rank, a block that gets a tensor sends
it to the block's rank and returns a pointer. So the model is written as if for one rank,

    for block in blocks: x = block(x)

and the blocks exchange all messages. Autograd exchanges those of the gradients: the backward of a send is a receive,
and the backward of a receive is a send.

A message is queued first and exchanged later: when this rank needs something from the same neighbor, or when the loop
flushes the queue. With the rank after it, a rank first sends and then receives; with the rank before it, it first
receives and then sends. So of two neighbors, one always sends while the other receives, and 1F1B, in which both have
something to send, does not hang. At the end of a step, all queues must be empty.

The design is that of nanotron (github.com/huggingface/nanotron, src/nanotron/parallel/pipeline_parallel: block.py,
functional.py and state.py for blocks, autograd and queues, engine.py for the loops). Compare it with `loops`, which
show every message, and with `tiny` and `pipeline`, which run any schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ppedu.core import CommunicationError, SettingError
from ppedu.core.validate import require_rank
from ppedu.engine.ranks.comm import PipelineGroup, communicate
from ppedu.engine.stages.stage import Loss


@dataclass(frozen=True)
class TensorPointer:
    """Stands for a tensor on another rank."""

    rank: int


class Pending:
    """The queues of one rank: messages and backwards that are still to run, each with its microbatch, oldest first.

    Args:
        shape: Of one microbatch's activation between two ranks, such as (samples, width).
        group: The ranks of the pipeline; by default all ranks of the program.
    """

    def __init__(self, shape: Sequence[int], group: PipelineGroup | None = None):
        self.shape, self.group = shape, PipelineGroup.of(group)
        self.microbatch = 0  # the one whose forward is running
        operations = ("send_forward", "recv_backward", "send_backward")  # "recv_forward" runs at once, without a queue
        self.due: dict[str, deque[tuple[int, torch.Tensor | None]]] = {each: deque() for each in operations}
        self.ends: deque[tuple[int, torch.Tensor]] = deque()  # the tensors at which the backwards start

    def do(self, operation: str) -> torch.Tensor | None:
        """Exchange the oldest queued message of this kind, and return the tensor received, if any."""
        _, tensor = self.due[operation].popleft()
        return communicate(operation, tensor, self.shape, group=self.group)

    def do_all(self, operation: str) -> None:
        """Run every queued exchange of this kind; `operation` is a key of `due`, such as "send_forward"."""
        while self.due[operation]:
            self.do(operation)

    def backward(self) -> None:
        """Run the oldest queued backward, in which autograd exchanges the messages of gradients."""
        _, end = self.ends.popleft()
        end.backward()

    def require_empty(self) -> None:
        """Raise CommunicationError unless all queues are empty; the next step would run what is left in them."""
        left = [f"{operation} of microbatch {m}" for operation, queue in self.due.items() for m, _ in queue]
        left += [f"the backward of microbatch {m}" for m, _ in self.ends]
        if left:
            raise CommunicationError(
                f"rank {self.group.rank} ends a step with work left to do: {', '.join(left)}; run it within the step"
            )


class _Send(torch.autograd.Function):
    """Sends an activation to the rank after; its backward receives the gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, pending: Pending) -> torch.Tensor:
        ctx.pending = pending
        pending.due["send_forward"].append((pending.microbatch, y))
        pending.due["recv_backward"].append((pending.microbatch, None))
        return y.new_zeros(())  # its value has no meaning, but a backward can start from it

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, None]:
        ctx.pending.do_all("send_forward")
        return ctx.pending.do("recv_backward"), None


class _Receive(torch.autograd.Function):
    """Passes on an activation received from the rank before; its backward queues the send of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: Pending) -> torch.Tensor:
        ctx.pending, ctx.microbatch = pending, pending.microbatch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        ctx.pending.due["send_backward"].append((ctx.microbatch, grads[0]))
        return None, None


def receive(pending: Pending) -> torch.Tensor:
    """Receive the next activation from the rank before, then send it the queued gradients."""
    x = communicate("recv_forward", shapes=pending.shape, group=pending.group)
    pending.do_all("send_backward")
    return _Receive.apply(x, pending)  # type: ignore[no-untyped-call]


class PipelineBlock(nn.Module):
    """A part of the model that runs on `rank`.

    Called with a tensor or a pointer, a block returns a tensor on its rank and a pointer elsewhere.

    Args:
        module: Required on `rank`, and ignored on the other ranks.

    Raises:
        SettingError: The rank is not in the group, or this is the rank and `module` is None; when called, a tensor to
            send does not require grad, for example because all weights before it are frozen.
    """

    def __init__(self, module: nn.Module | None, rank: int, pending: Pending):
        super().__init__()
        self.rank, self.pending = require_rank(rank, pending.group.size), pending
        self.module = module if rank == pending.group.rank else None
        if rank == pending.group.rank and module is None:
            raise SettingError(f"the block runs on rank {rank}, which is this one: pass its module here")

    def forward(self, x: torch.Tensor | TensorPointer) -> torch.Tensor | TensorPointer:
        if self.module is not None:  # this is the block's rank
            if isinstance(x, TensorPointer):
                x = receive(self.pending)
            return self.module(x)
        if isinstance(x, torch.Tensor):
            if not x.requires_grad:
                raise SettingError(
                    f"the tensor for rank {self.rank} does not require grad; every rank must have weights to train"
                )
            sent: torch.Tensor = _Send.apply(x, self.pending)  # type: ignore[no-untyped-call]
            self.pending.ends.append((self.pending.microbatch, sent))
        return TensorPointer(self.rank)


def pointer_step(
    blocks: Sequence[PipelineBlock],
    loss_fn: Loss,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    pending: Pending,
    order: str = "1f1b",
) -> torch.Tensor:
    """Run the forwards and backwards of all microbatches, and add the gradients to `.grad`.

    Args:
        blocks: Of the whole model, in the order of their ranks.
        inputs, targets: The batch cut into microbatches of equal size, one tensor each; the first rank reads `inputs`,
            the last `targets`.
        order: "1f1b", or "afab" for all forwards and then all backwards, as in GPipe.

    Returns:
        The mean loss, a scalar, on the last rank, and 0 on the other ranks.

    Raises:
        SettingError: The order is unknown, or the blocks do not go through all ranks from first to last.
        CommunicationError: A message has another shape or dtype than expected, or a queue is not empty at the end.
    """
    group, microbatches = pending.group, len(inputs)
    warmups = {"afab": microbatches, "1f1b": min(group.size - group.rank - 1, microbatches)}
    if order not in warmups:
        raise SettingError(f"unknown order {order!r}; available: {', '.join(warmups)}")
    ranks = [block.rank for block in blocks]
    if ranks != sorted(ranks) or set(ranks) != set(range(group.size)):
        raise SettingError(f"the ranks of the blocks must go from 0 to {group.size - 1} without a gap; got {ranks}")

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
            pending.backward()  # sends the activation before it waits for the gradient

    pending.do_all("send_backward")
    for _ in range(warmups[order]):
        pending.backward()
        pending.do_all("send_backward")
    pending.require_empty()
    return total
