"""Gradient synchronization: every rank that holds a weight gets the same gradient, once a step.

Parameters of a pipeline that are one weight of the model, by `names`, add up their gradients. Replicas of the pipeline
average them. Stages that fully_shard has sharded are reduced in `sharded`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from ppedu.core import PipelineError
from ppedu.engine.names import Exchange, Names
from ppedu.engine.ranks.comm import PipelineGroup, start_swap
from ppedu.engine.ranks.device import wait
from ppedu.engine.ranks.messages import checksum
from ppedu.engine.ranks.versions import grad_dtype, is_persistent
from ppedu.engine.sharded import local_part


class HeldStage(NamedTuple):
    """A stage that several ranks hold: both ranks of a schedule with two copies of the model, or all replicas.

    Args:
        holders: the names of these ranks.
        gather: takes this rank's row of numbers, shape (length,), and returns the rows of all holders in their order,
            shape (holders, length); every holder must call it.
    """

    stage: int
    module: nn.Module
    holders: list[str]
    gather: Callable[[torch.Tensor], torch.Tensor]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers in the module's state, by name. Non-persistent buffers are caches, and may differ."""
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, part in self.module.named_modules()
            for name, buffer in part.named_buffers(recurse=False)
            if is_persistent(part, name)
        }

    def differences(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the names of the tensors that differ between holders, each with a sentence that names two holders."""
        if not tensors:
            return {}
        rows = self.gather(torch.tensor([checksum(local_part(each)) for each in tensors.values()]))
        found = {}
        for name, checksums in zip(tensors, rows.t().tolist(), strict=True):
            if other := _first_different(checksums):
                found[name] = (
                    f"stage {self.stage}: the {kind} {name!r} differs between {self.holders[0]} and "
                    f"{self.holders[other]}"
                )
        return found

    def average_buffers(self) -> None:
        """Give all holders the mean of each floating-point buffer; raise PipelineError if they differ in another."""
        buffers = self.buffers
        differences = self.differences("buffer", buffers)
        for name, sentence in differences.items():
            if not buffers[name].is_floating_point():
                raise PipelineError(
                    f"{sentence} after the step, and buffers of {buffers[name].dtype} are not averaged; give every "
                    "holder the same number of microbatches, or register the buffer with persistent=False"
                )
        if differences:
            floats = [buffers[name] for name in differences]
            row = torch.cat([buffer.detach().double().flatten() for buffer in floats])
            means = self.gather(row).mean(0)
            for buffer, mean in zip(floats, means.split([buffer.numel() for buffer in floats]), strict=True):
                buffer.detach().copy_(mean.view_as(buffer))


class GradientSync:
    """Synchronizes the gradients of one rank's stages with all other holders of their weights.

    Args:
        names: of the parameters of this rank's stages.
        replicas: the ranks that hold the same stages in other pipelines.
        timeout: how long to wait for another rank.
        device: that of this rank's stages.

    Raises:
        PipelineError: a weight asks for gradients in another dtype, which this release of PyTorch does not have.
    """

    def __init__(
        self,
        names: Names,
        group: PipelineGroup,
        replicas: dist.ProcessGroup | None,
        timeout: timedelta,
        device: torch.device,
    ):
        self.names, self.placement, self.stages = names, names.placement, names.stages
        self.group, self.timeout = group, timeout
        self.replica_count = 1 if replicas is None else dist.get_world_size(replicas)
        self.replicas = replicas if self.replica_count > 1 else None
        self.replica_device = torch.device("cpu")
        if self.replicas is not None:
            beside = PipelineGroup(dist.get_rank(replicas), self.replica_count, replicas)
            self.replica_device = beside.on(device).device
        self._means: list[Callable[[], None]] = []  # complete an average over the replicas that has been started
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients of earlier steps
        self._incomplete: set[int] = set()  # stages whose last backward is still ahead
        for weight in self.weights:
            grad_dtype(weight)  # fails where torch would ignore what is set
        self.find_shared()

    @property
    def modules(self) -> dict[int, nn.Module]:
        return {index: stage.module for index, stage in self.stages.items()}

    @property
    def weights(self) -> list[nn.Parameter]:
        """All parameters of this rank's stages; one that several stages share is there once."""
        return list(nn.ModuleList(self.modules.values()).parameters())

    def find_shared(self) -> None:
        """Find the parameters and stages with several holders; before each step, as the caller may replace weights."""
        self.shared, self.held = self.names.shared(), list(self._held_stages())

    def initial_differences(self, exchange: Exchange) -> list[str]:
        """Learn which weights are one, and return a sentence for each weight and buffer that its holders differ in."""
        found = []
        names = self.names.of_parameters()
        for each in self.held:
            weights, buffers = dict(each.module.named_parameters()), each.buffers
            looks = [(name, part.shape, part.dtype, part.requires_grad) for name, part in (weights | buffers).items()]
            sharing = [names[weight] for weight in weights.values()]
            row = each.gather(torch.tensor([zlib.crc32(repr((each.stage, looks, sharing)).encode())]))
            if other := _first_different(row.flatten().tolist()):
                found.append(
                    f"stage {each.stage} has different weights or buffers on {each.holders[other]} than on "
                    f"{each.holders[0]}: names, shapes, dtypes, requires_grad and which stages share a weight must be "
                    "the same"
                )
                continue  # every holder has found this, and compares no further
            # Each replica holds another slice of a sharded weight; all slices together are one weight.
            whole = {name: weight for name, weight in weights.items() if not hasattr(weight, "to_local")}
            found += {**each.differences("weight", whole), **each.differences("buffer", buffers)}.values()
        found += self.names.agree(exchange, self.replicas is not None)
        return [f"{sentence}; build both from one seed, or load both from one file" for sentence in found]

    def begin(self, stages: Iterable[int], loss_scale: float = 1) -> None:
        """Start a step with backwards of `stages`.

        Set aside the gradients of earlier steps: their holders already have the sum of these, and unscaled.
        """
        self._incomplete = set(stages)
        self._means, self._earlier, self.loss_scale = [], [], loss_scale
        if loss_scale != 1:
            weights = self.weights
        else:  # the gradients of weights that are not shared can be added to those of earlier steps
            weights = list(dict.fromkeys(weight for _, shared in self.shared for same in shared for weight in same))
        for weight in weights:
            if weight.grad is not None:
                self._earlier.append((weight, weight.grad))
                weight.grad = None

    def start_mean(self, stage: int) -> None:
        """Start to average the gradients that are complete after the last backward of `stage` over the replicas."""
        self._incomplete.discard(stage)
        if self.replicas is None:
            return
        later = {id(weight) for other in self._incomplete for weight in self.stages[other].module.parameters()}
        weights = [[weight] for weight in self.stages[stage].trained if id(weight) not in later]
        if not weights:
            return
        total = _flatten(weights).to(self.replica_device)
        work = dist.all_reduce(total, group=self.replicas, async_op=True)

        def finish() -> None:
            wait(work, total.device, self.timeout)
            _unflatten(weights, total / self.replica_count)

        self._means.append(finish)

    def finish(self) -> None:
        """Complete the averages, add up the gradients of copies and ties, unscale, and average the buffers."""
        for finish_mean in self._means:
            finish_mean()
        for ranks, weights in self.shared:
            mine = _flatten(weights)
            _unflatten(weights, self._gather(ranks, mine).sum(0).to(mine.device))
        if self.loss_scale != 1:
            for weight in self.weights:
                if weight.grad is not None:
                    weight.grad.div_(self.loss_scale)
        for each in self.held:
            each.average_buffers()
        for weight, grad in self._earlier:
            weight.grad = grad if weight.grad is None else grad.add_(weight.grad)

    def loss_weights(self, counts: Sequence[int], sizes: Sequence[int], reduction: str) -> dict[int, list[Fraction]]:
        """Return for each stage the weight of each microbatch's loss in the batch's loss.

        The weights of the last stage depend on the counts in all replicas. Losses and gradients are averaged over the
        replicas afterwards, which the weights make up for. Say two microbatches count 3 and 1 here, and 2 and 2 in the
        other replica, 8 together. Then the weights here are 2 · 3/8 and 2 · 1/8, and their half is left in the mean.

        Args:
            counts: how much each microbatch's targets count in a mean, if they are given here.
            sizes: each microbatch's samples, which replace the counts elsewhere; 0 where unknown.
            reduction: "mean" or "sum".
        """
        samples = sizes if all(sizes) else [1] * len(sizes)
        if reduction == "sum":
            return dict.fromkeys(
                [*self.stages, self.placement.stages - 1], [Fraction(self.replica_count)] * len(samples)
            )
        weights = {stage: [Fraction(part, sum(samples)) for part in samples] for stage in self.stages}
        last = self.placement.stages - 1
        if last in weights or self.placement.barriers:  # a shared head needs them on all ranks
            parts = counts or samples
            total = sum(parts) if self.replicas is None else int(self.gather_replicas(torch.tensor([sum(parts)])).sum())
            weights[last] = [Fraction(part * self.replica_count, total) for part in parts]
        return weights

    def norm(self) -> torch.Tensor:
        """Return this rank's part of the gradients' norm, a float64 scalar: a shared weight counts at one holder only.

        Sharded gradients count as a whole, on each rank that has a slice of them.
        """
        elsewhere: set[nn.Parameter] = set()  # parameters that do not count here
        for ranks, weights in self.shared:
            for first, *others in weights:
                elsewhere.update(others)
                if self.group.rank != ranks[0]:
                    elsewhere.add(first)
        by_sharding: dict[Any, list[torch.Tensor]] = {}  # torch takes the norm only of gradients that are sharded alike
        for weight in self.weights:
            grad: Any = weight.grad
            if grad is not None and weight not in elsewhere:
                sharding = (grad.device_mesh, grad.placements) if hasattr(grad, "to_local") else None
                numbers = grad.coalesce().values() if grad.is_sparse else grad
                by_sharding.setdefault(sharding, []).append(numbers)
        norms: list[Any] = [get_total_norm(grads) for grads in by_sharding.values()]
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in norms]
        return torch.tensor([each.item() for each in whole], dtype=torch.float64).norm()

    def _held_stages(self) -> Iterator[HeldStage]:
        """Yield the stages of this rank that other ranks hold, too: copies within the schedule, then replicas."""
        for stage, module in sorted(self.modules.items()):  # in the same order on both ranks
            holders = self.placement.holders_of(stage)
            if len(set(holders)) > 1:
                yield HeldStage(stage, module, [f"rank {rank}" for rank in holders], partial(self._gather, holders))
        if self.replicas is not None:
            names = [f"global rank {rank}" for rank in dist.get_process_group_ranks(self.replicas)]
            for stage, module in sorted(self.modules.items()):
                yield HeldStage(stage, module, names, self.gather_replicas)

    def _gather(self, ranks: Sequence[int], mine: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ranks of the pipeline in their order, shape (ranks, length); each must call this."""
        mine = mine.to(self.group.device)
        rows = {rank: mine if rank == self.group.rank else torch.empty_like(mine) for rank in ranks}
        for peer in sorted(rows.keys() - {self.group.rank}):
            for request in start_swap(mine, rows[peer], peer, self.group):
                wait(request, self.group.device, self.timeout)
        return torch.stack([rows[rank] for rank in ranks])

    def gather_replicas(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the rows of all replicas in their order, shape (replicas, length)."""
        if self.replicas is None:
            return mine[None]
        mine = mine.to(self.replica_device)
        rows = [torch.empty_like(mine) for _ in range(self.replica_count)]
        wait(dist.all_gather(rows, mine, group=self.replicas, async_op=True), mine.device, self.timeout)
        return torch.stack(rows)


def _first_different(values: Sequence[int]) -> int:
    """Return the position of the first value that differs from `values[0]`; 0 if all are equal."""
    return next((position for position, value in enumerate(values) if value != values[0]), 0)


def _flatten(weights: Sequence[Sequence[nn.Parameter]]) -> torch.Tensor:
    """Return the gradients of all weights in one row, each the sum over its parameters.

    At the end of the row is, for each weight, 1 if it has a gradient, else 0.
    """
    sums, marks = [], []
    for same in weights:
        grads = [local_part(each.grad) for each in same if each.grad is not None]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        if dense:
            sums.append(reduce(torch.add, dense))
        else:
            sums.append(torch.zeros_like(local_part(same[0]), dtype=grad_dtype(same[0])))
        marks.append(bool(grads))
    row = torch.cat([each.reshape(-1) for each in sums])
    # Copying numbers to a GPU would let the host wait for the GPU.
    flags = row.new_ones(len(marks)) if all(marks) else row.new_tensor(marks)
    return torch.cat([row, flags])


def _unflatten(weights: Sequence[Sequence[nn.Parameter]], row: torch.Tensor) -> None:
    """Store the parts of `row` as gradients of all parameters. A weight without a gradient on any rank keeps none.

    Gradients are written in place where they can be, as they may be views into a tensor of the caller.
    """
    *parts, marks = row.split([*(local_part(same[0]).numel() for same in weights), len(weights)])
    for same, part, has_grad in zip(weights, parts, marks.tolist(), strict=True):
        if not has_grad:
            continue
        for weight in same:
            grad, dtype = weight.grad, grad_dtype(weight)
            if grad is None or grad.layout != torch.strided or grad.dtype != dtype or hasattr(grad, "to_local"):
                weight.grad = torch.empty_like(weight, dtype=dtype)
            local_part(weight.grad).copy_(part.view_as(local_part(weight)))
