"""A head that all ranks share (S and T): vocabulary parallelism, arXiv 2411.05288.

Each rank has some rows of the head's weight. S computes its part of the logits and of the softmax's sums, T the
gradients of its rows. What ranks tell each other is gathered, and each rank adds it up in the order of the ranks, so
that results do not depend on who is late. The last stage's rank sends its outputs to each rank alone: a broadcast would
pass through ranks that may not be there yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core import Op, PipelineError, Schedule, SettingError
from ppedu.engine.ranks.comm import PipelineGroup
from ppedu.engine.ranks.device import wait
from ppedu.engine.stages.stage import Stage

IGNORED = -100  # a target that does not count, as in torch's cross_entropy


class SharedHead(nn.Module):
    """This rank's rows of the weight of a head: a part of the module of its first stage, which does not call it.

    With a schedule such as 1f1b-vocab, the last stage returns its hidden states. Their logits are `x @ weight.T`, with
    the rows of all ranks, and the loss is the cross-entropy with the targets, which are whole numbers, of shape
    `x.shape[:-1]`; those of -100 do not count. Give all ranks the targets.

    Args:
        weight: the rows, shape (rows, width).
        first: the number of the first of them in the whole weight.
    """

    def __init__(self, weight: torch.Tensor, first: int):
        super().__init__()
        self.weight, self.first = nn.Parameter(weight.detach().clone()), first


class Logits(NamedTuple):
    """The tensors that S keeps for T: the input, the exponentials of the logits, and which rows are targets."""

    x: torch.Tensor
    exponentials: torch.Tensor
    target: torch.Tensor
    own: torch.Tensor


class Gathering:
    """Tensors that all ranks, or one of them, get from all ranks."""

    def __init__(self, group: PipelineGroup, channel: Any, value: torch.Tensor, home: int | None, timeout: timedelta):
        self.device, self.group, self.timeout = value.device, group, timeout
        value = value.to(group.device).contiguous()
        receives = home is None or home == group.rank
        self._values = [torch.empty_like(value) for _ in range(group.size)] if receives else []
        self._work = None
        if group.size == 1:
            self._values = [value]
        elif home is None:
            self._work = dist.all_gather(self._values, value, channel, async_op=True)
        else:
            self._work = dist.gather(value, self._values or None, group.peer(home), channel, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the values of all ranks, stacked."""
        if self._work is not None:
            wait(self._work, self.group.device, self.timeout)
            self._work = None
        return torch.stack(self._values).to(self.device)


class HeadInStep:
    """One rank's part of the shared head in a step. All ranks run S, and T, in the same order, as `check` requires."""

    def __init__(
        self, schedule: Schedule, part: SharedHead, last: Stage | None, group: PipelineGroup, limit: timedelta
    ):
        self.part, self.last, self.group, self.timeout = part, last, group, limit
        self.two, self.home = schedule.placement.barriers == 2, schedule.placement.rank(schedule.stages - 1)
        self._order = [
            each.microbatch
            for each in schedule.orders[self.home]
            for each in each.singles
            if each.op is Op.F and each.stage == schedule.stages - 1
        ]
        self._outputs = self._sums = None
        if group.size > 1:
            ranks = [group.peer(rank) for rank in range(group.size)]
            self._outputs, self._sums = (dist.new_group(ranks, use_local_synchronization=True) for _ in range(2))

    def begin(self, targets: Sequence[torch.Tensor], weights: Sequence[Fraction], scale: float) -> None:
        """Start a step. weights: by which each microbatch's loss counts; scale: by which gradients are multiplied."""
        self._targets, self._weights, self._scale = targets, weights, scale
        self._next = 0
        self._sent: dict[int, list[Any]] = {}
        self._arrived: dict[int, tuple[torch.Tensor, Any]] = {}  # and perhaps not yet here
        self._parts: dict[int, Logits] = {}
        self._told: dict[int, Gathering] = {}
        self._found: dict[int, Gathering] = {}  # of the gradients of the input

    def send(self, microbatch: int, y: Any) -> None:
        """Send the last stage's output to all other ranks."""
        shape = (*self._targets[microbatch].shape, self.part.weight.shape[1])
        if not isinstance(y, torch.Tensor) or y.shape != shape:
            got = f"of shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise PipelineError(f"the last stage must return hidden states of shape {shape}, by the targets; got {got}")
        value = y.detach().to(self.part.weight.dtype)
        here = value.to(self.group.device).contiguous()
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        self._sent[microbatch] = [dist.isend(here, self.group.peer(rank), self._outputs) for rank in others]
        self._arrived[microbatch] = value, None

    def receive(self, microbatch: int) -> torch.Tensor:
        """Return the last stage's output for a microbatch, and wait for it."""
        weight = self.part.weight
        while microbatch not in self._arrived:  # those before it come first
            m = self._order[self._next]
            self._next += 1
            empty = torch.empty(*self._targets[m].shape, weight.shape[1], dtype=weight.dtype, device=self.group.device)
            self._arrived[m] = empty, dist.irecv(empty, self.group.peer(self.home), self._outputs)
        value, work = self._arrived.pop(microbatch)
        if work is not None:
            wait(work, self.group.device, self.timeout)
        return value.to(weight.device).flatten(0, -2)

    @torch.no_grad()
    def logits(self, microbatch: int, x: torch.Tensor) -> None:
        """Run S, and start to gather the sums."""
        weight = self.part.weight
        logits = x @ weight.T
        largest = logits.amax(1)
        exponentials = (logits - largest[:, None]).exp()
        target = self._targets[microbatch].to(weight.device).flatten() - self.part.first
        own = (target >= 0) & (target < len(weight))
        target = target.where(own, 0)
        chosen = logits.gather(1, target[:, None])[:, 0].where(own, 0)
        self._told[microbatch] = self._gather(torch.stack([largest, exponentials.sum(1), chosen]))
        self._parts[microbatch] = Logits(x, exponentials, target, own)
        if not self.two:
            both = torch.cat([exponentials @ weight, weight[target] * own[:, None]], 1)
            self._found[microbatch] = self._gather(both, self.home)

    @torch.no_grad()
    def gradients(self, microbatch: int) -> None:
        """Run T, and start to gather the gradient of the input, unless S has."""
        shares, losses, counts = self.told(microbatch)
        for work in self._sent.pop(microbatch, ()):  # all ranks have run S
            wait(work, self.group.device, self.timeout)
        x, exponentials, target, own = self._parts.pop(microbatch)
        dlogits = exponentials * shares[self.group.rank][:, None]
        dlogits[torch.arange(len(x), device=x.device), target] -= own.to(x.dtype)
        dlogits *= counts[:, None]
        found, weight = dlogits.T @ x, self.part.weight
        weight.grad = found if weight.grad is None else weight.grad + found
        if self.two:
            self._found[microbatch] = self._gather(dlogits @ weight, self.home)
        if self.last:
            self.last.record(microbatch, losses)

    @torch.no_grad()
    def gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the last stage's output, on its rank."""
        shares, _, counts = self.told(microbatch)
        found = self._found.pop(microbatch).wait()
        if not self.two:
            softmax, chosen = found.chunk(2, 2)
            found = (softmax * shares[..., None] - chosen) * counts[:, None]
        return found.sum(0).view(*self._targets[microbatch].shape, -1)

    def told(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return by what to multiply each rank's exponentials in the softmax, the mean loss, and each target's weight.

        Waits for all ranks.
        """
        largest, sums, chosen = self._told[microbatch].wait().unbind(1)
        most = largest.amax(0)
        scales = (largest - most).exp()
        total = (scales * sums).sum(0)
        counted = (self._targets[microbatch].flatten() != IGNORED).to(total)
        share = counted / counted.sum().clamp(min=1)
        losses = (total.log() + most - chosen.sum(0)) * share
        weight = self._weights[microbatch]
        return scales / total, losses.sum(), share * weight.numerator / weight.denominator * self._scale

    def _gather(self, value: torch.Tensor, home: int | None = None) -> Gathering:
        return Gathering(self.group, self._sums, value, home, self.timeout)


def find_head(
    schedule: Schedule, stages: Mapping[int, Stage], group: PipelineGroup, limit: timedelta
) -> HeadInStep | None:
    """Return this rank's part of a shared head; None if the schedule has no S.

    Raises:
        SettingError: the rank's first stage has no SharedHead, or another one, or one without use.
    """
    found = {
        number: [each for each in stage.module.modules() if isinstance(each, SharedHead)]
        for number, stage in stages.items()
    }
    first = schedule.placement.shards[group.rank] if schedule.placement.barriers else None
    if {number: len(each) for number, each in found.items() if each} != ({} if first is None else {first: 1}):
        if first is None:
            raise SettingError(f"{schedule!r}: a SharedHead is for a schedule with S and T, such as 1f1b-vocab")
        raise SettingError(
            f"{schedule!r} needs one SharedHead on each rank; rank {group.rank} has it in the module of stage {first}. "
            "A model with a whole head runs with schedules such as 1f1b"
        )
    if first is None:
        return None
    return HeadInStep(schedule, found[first][0], stages.get(schedule.stages - 1), group, limit)
