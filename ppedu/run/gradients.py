"""Gradient synchronization: every rank that holds a weight gets the same gradient, once a step.

A weight has several holders if the schedule has two copies of the model (dualpipe), if pipelines run side by side as
replicas, or if it is tied to a weight of another stage, as a language model's embedding is to its head. Copies and ties
add up their gradients; replicas average them. Stages that fully_shard has sharded are reduced in `sharded`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.placement import Placement
from ppedu.run.comm import PipelineGroup, start_swap
from ppedu.run.messages import checksum, wait
from ppedu.run.stage import Stage

Tie = tuple[tuple[int, str], tuple[int, str]]  # two weights that are one, each by its stage and its name there


class SharedWeights(NamedTuple):
    """Weights of this rank whose gradients are added to those of `partners`, on this rank, or of rank `peer`.

    is_first: this rank's gradients are the first term of the sum. Both ranks add in the same order, so that their sums
    are equal to the last bit.
    """

    weights: list[nn.Parameter]
    partners: list[nn.Parameter]
    peer: int
    is_first: bool


class HeldStage(NamedTuple):
    """A stage that several ranks hold: both ranks of a schedule with two copies of the model, or all replicas.

    holders: the names of these ranks. gather: takes this rank's row of numbers and returns the rows of all holders in
    their order, shape (holders, length); every holder must call it.
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
            if name not in part._non_persistent_buffers_set
        }

    def differences(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the names of the tensors that differ between holders, each with a sentence that names two holders."""
        if not tensors:
            return {}
        rows = self.gather(_checksums(tensors.values())).t().tolist()
        return {
            name: f"stage {self.stage}: the {kind} {name!r} differs between {self.holders[0]} and {self.holders[other]}"
            for name, column in zip(tensors, rows, strict=True)
            if (other := _first_different(column))
        }


class GradientSync:
    """Synchronizes the gradients of one rank's stages with all other holders of their weights.

    stages: all stages of the rank, by number. ties: pairs of weights, each named by its stage and its name there.
    replicas: the ranks that hold the same stages in other pipelines. timeout: how long to wait for another rank.

    Raises:
        SettingError: `ties` are not pairs of weights of the model.
    """

    def __init__(
        self,
        placement: Placement,
        stages: Mapping[int, Stage],
        ties: Sequence[Tie],
        group: PipelineGroup,
        replicas: dist.ProcessGroup | None,
        timeout: timedelta,
    ):
        if not isinstance(ties, (tuple, list)) or not all(map(_is_tie, ties)):
            raise SettingError(
                "tied must be pairs of weights, such as [((0, 'embedding.weight'), (3, 'head.weight'))], each named by "
                f"its stage and its name there; got {ties!r}"
            )
        self.placement, self.stages, self.ties = placement, stages, list(ties)
        self.group, self.replicas, self.timeout = group, replicas, timeout
        self.replica_count = 1 if replicas is None else dist.get_world_size(replicas)
        self.replica_device = "cuda" if replicas is not None and dist.get_backend(replicas) == "nccl" else "cpu"
        self._means: list[Callable[[], None]] = []  # complete an average over the replicas that has been started
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients of earlier steps
        self.find_shared()

    @property
    def modules(self) -> dict[int, nn.Module]:
        return {index: stage.module for index, stage in self.stages.items()}

    def find_shared(self) -> None:
        """Find the weights and stages with several holders; before each step, as the caller may replace weights."""
        self.tied = list(self._tied_weights())
        copied = [
            SharedWeights(weights, [], holders[is_first], is_first)
            for stage, holders, is_first in self._copies()
            if (weights := _trainable(self.stages[stage].module))
        ]
        self.shared = copied + self.tied
        self.held = list(self._held_stages())

    def initial_differences(self) -> list[str]:
        """Return a sentence for each weight, buffer and tie that is not equal on all of its holders."""
        found = []
        for each in self.held:
            weights, buffers = dict(each.module.named_parameters()), each.buffers
            looks = [(name, part.shape, part.dtype, part.requires_grad) for name, part in (weights | buffers).items()]
            row = each.gather(torch.tensor([zlib.crc32(repr((each.stage, looks)).encode())]))
            if other := _first_different(row.flatten().tolist()):
                found.append(
                    f"stage {each.stage} has different weights or buffers on {each.holders[other]} than on "
                    f"{each.holders[0]}: names, shapes, dtypes and requires_grad must be the same"
                )
                continue  # every holder has found this, and compares no further
            # Each replica holds another slice of a sharded weight; all slices together are one weight.
            whole = {name: weight for name, weight in weights.items() if not hasattr(weight, "to_local")}
            found += {**each.differences("weight", whole), **each.differences("buffer", buffers)}.values()
        for weights_here, partners, peer, is_first in self.tied:
            mine = _checksums(weights_here)
            theirs = _checksums(partners) if partners else self._exchange_with(peer, is_first, mine)[int(is_first)]
            if not torch.equal(mine, theirs):
                found.append(f"the tied weights on rank {self.group.rank} and rank {peer} are not the same")
        return [f"{sentence}; build both from one seed, or load both from one file" for sentence in found]

    def begin(self, loss_scale: float = 1) -> None:
        """Set aside the gradients of earlier steps: their holders already have the sum of these, and unscaled."""
        self._means, self._earlier, self.loss_scale = [], [], loss_scale
        shared = {weight: None for one in self.shared for weight in one.weights + one.partners}
        for weight in shared if loss_scale == 1 else nn.ModuleList(self.modules.values()).parameters():
            if weight.grad is not None:
                self._earlier.append((weight, weight.grad))
                weight.grad = None

    def start_mean(self, stage: int) -> None:
        """Start to average the gradients of `stage`, which are complete, over the replicas."""
        weights = [] if self.replicas is None else _trainable(self.stages[stage].module)
        if not weights:
            return
        total = _flatten(weights).to(self.replica_device)
        work = dist.all_reduce(total, group=self.replicas, async_op=True)

        def finish() -> None:
            wait(work, total.device, self.timeout)
            _unflatten(weights, total / self.replica_count)

        self._means.append(finish)

    def finish(self) -> None:
        """Complete the averages, add up the gradients of copies and ties, unscale, and average the buffers.

        Raises:
            PipelineError: an integer buffer, such as a counter, differs between holders.
        """
        for finish_mean in self._means:
            finish_mean()
        for weights, partners, peer, is_first in self.shared:
            mine = _flatten(weights)
            if partners:
                total = mine + _flatten(partners)
                _unflatten(partners, total)
            else:
                total = self._exchange_with(peer, is_first, mine).sum(0).to(mine.device)
            _unflatten(weights, total)
        if self.loss_scale != 1:
            for weight in nn.ModuleList(self.modules.values()).parameters():
                if weight.grad is not None:
                    weight.grad.div_(self.loss_scale)
        for each in self.held:
            _average_buffers(each)
        for weight, grad in self._earlier:
            weight.grad = grad if weight.grad is None else grad.add_(weight.grad)

    def sum_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a number over all replicas; the number itself without replicas."""
        if self.replicas is None:
            return value
        value = value.to(self.replica_device, copy=True)
        wait(dist.all_reduce(value, group=self.replicas, async_op=True), value.device, self.timeout)
        return value.cpu()

    def loss_weights(self, counts: Sequence[int], sizes: Sequence[int], reduction: str) -> dict[int, list[Fraction]]:
        """Return for each stage the weight of each microbatch's loss in the batch's loss.

        counts: how much each microbatch's targets count in a mean, if they are given here. sizes: each microbatch's
        samples, which replace them elsewhere; 0 where unknown. reduction: "mean" or "sum". The weights of the last
        stage depend on the counts in all replicas.

        Losses and gradients are averaged over the replicas afterwards, which the weights make up for.
        """
        weights: dict[int, list[Fraction]] = {}
        for stage in self.stages:
            is_last = stage == self.placement.stages - 1
            parts = counts if is_last and counts else sizes if all(sizes) else [1] * len(sizes)
            total = sum(parts)
            if reduction == "sum":
                weights[stage] = [Fraction(self.replica_count)] * len(parts)
            elif is_last:
                total = int(self.sum_over_replicas(torch.tensor(total)))
                weights[stage] = [Fraction(part * self.replica_count, total) for part in parts]
            else:
                weights[stage] = [Fraction(part, total) for part in parts]
        return weights

    def norm(self) -> torch.Tensor:
        """Return this rank's part of the gradients' norm, a float64 scalar: a shared weight counts at one holder only.

        Sharded gradients count as a whole, on each rank that has a slice of them.
        """
        elsewhere = {
            id(weight)
            for weights, partners, _, is_first in self.shared
            if partners or not is_first
            for weight in partners or weights
        }
        same_sharding: dict[Any, list[torch.Tensor]] = {}  # torch takes the norm of gradients that are sharded alike
        for weight in nn.ModuleList(self.modules.values()).parameters():  # a weight of two stages counts once
            grad: Any = weight.grad
            if grad is not None and id(weight) not in elsewhere:
                sharding = (grad.device_mesh, grad.placements) if hasattr(grad, "to_local") else None
                same_sharding.setdefault(sharding, []).append(grad.coalesce().values() if grad.is_sparse else grad)
        norms: list[Any] = [get_total_norm(grads) for grads in same_sharding.values()]
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in norms]
        total: torch.Tensor = torch.tensor([each.item() for each in whole], dtype=torch.float64).norm()
        return total

    def _copies(self) -> Iterator[tuple[int, list[int], bool]]:
        """Yield the stages of this rank of which another rank has a copy.

        Each comes with the ranks that hold it, and with whether this rank is the first of them.
        """
        for stage in sorted(self.stages):  # in the same order on both ranks
            holders = [copy[stage] for copy in self.placement.holders]
            if len(set(holders)) > 1:
                yield stage, holders, holders[0] == self.group.rank

    def _tied_weights(self) -> Iterator[SharedWeights]:
        """Yield the tied weights of this rank, in the order of `ties`, which is the same on all ranks."""
        rank, placement = self.group.rank, self.placement
        for tie in self.ties:
            for copy in placement.holders:
                holders = [copy[stage] if 0 <= stage < placement.stages else -1 for stage, _ in tie]
                here = [self._weight(*end) for end, holder in zip(tie, holders, strict=True) if holder in (rank, -1)]
                is_first = holders[0] == rank
                if len(here) == 2 and here[0] is not here[1]:
                    yield SharedWeights(here[:1], here[1:], rank, is_first)
                elif len(here) == 1:
                    yield SharedWeights(here, [], holders[is_first], is_first)

    def _weight(self, stage: int, name: str) -> nn.Parameter:
        modules = self.modules
        try:
            return modules[stage].get_parameter(name)
        except (KeyError, AttributeError):
            known = ", ".join(name for name, _ in modules[stage].named_parameters()) if stage in modules else "none"
            raise SettingError(
                f"cannot tie {name!r} of stage {stage}, which has no such weight; its weights are: {known}"
            ) from None

    def _held_stages(self) -> Iterator[HeldStage]:
        """Yield the stages of this rank that other ranks hold, too: copies within the schedule, then replicas."""
        for stage, holders, is_first in self._copies():
            gather = partial(self._exchange_with, holders[is_first], is_first)
            yield HeldStage(stage, self.stages[stage].module, [f"rank {rank}" for rank in holders], gather)
        if self.replicas is not None and self.replica_count > 1:
            names = [f"global rank {rank}" for rank in dist.get_process_group_ranks(self.replicas)]
            for stage, module in sorted(self.modules.items()):
                yield HeldStage(stage, module, names, self._gather_replicas)

    def _exchange_with(self, peer: int, is_first: bool, mine: torch.Tensor) -> torch.Tensor:
        """Return this rank's row and that of `peer`, shape (2, length), in the same order on both."""
        mine = mine.to(self.group.device)
        theirs = torch.empty_like(mine)
        for request in start_swap(mine, theirs, peer, self.group):
            wait(request, self.group.device, self.timeout)
        return torch.stack([mine, theirs] if is_first else [theirs, mine])

    def _gather_replicas(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the rows of all replicas, shape (replicas, length)."""
        mine = mine.to(self.replica_device)
        rows = [torch.empty_like(mine) for _ in range(self.replica_count)]
        wait(dist.all_gather(rows, mine, group=self.replicas, async_op=True), mine.device, self.timeout)
        return torch.stack(rows)


def _is_tie(tie: Any) -> bool:
    """Return whether `tie` has the form of a `Tie`."""
    match tie:
        case [[int(), str()], [int(), str()]]:
            return True
    return False


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _average_buffers(held: HeldStage) -> None:
    """Give all holders of a stage the mean of each floating-point buffer.

    Raises:
        PipelineError: a buffer of another dtype differs between the holders.
    """
    buffers = held.buffers
    differences = held.differences("buffer", buffers)
    for name, sentence in differences.items():
        if not buffers[name].is_floating_point():
            raise PipelineError(
                f"{sentence} after the step, and buffers of {buffers[name].dtype} are not averaged; give every holder "
                "the same number of microbatches, or register the buffer with persistent=False"
            )
    if differences:
        floats = [buffers[name] for name in differences]
        row = torch.cat([buffer.detach().double().flatten() for buffer in floats])
        means = held.gather(row).mean(0)
        for buffer, mean in zip(floats, means.split([buffer.numel() for buffer in floats]), strict=True):
            buffer.detach().copy_(mean.view_as(buffer))


def _first_different(values: Sequence[int]) -> int:
    """Return the position of the first value that differs from `values[0]`; 0 if all are equal."""
    return next((position for position, value in enumerate(values) if value != values[0]), 0)


def _checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([checksum(_local(tensor)) for tensor in tensors])


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's slice of a sharded tensor, or any other tensor itself, detached in both cases."""
    slice_here: torch.Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return slice_here


def _flatten(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return all gradients in one row, with zeros for a missing one; then, for each weight, 1 if it has a gradient."""
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    row = torch.cat([(_local(grad).to_dense() if grad.is_sparse else _local(grad)).reshape(-1) for grad in grads])
    return torch.cat([row, row.new_tensor([weight.grad is not None for weight in weights])])


def _unflatten(weights: Sequence[nn.Parameter], row: torch.Tensor) -> None:
    """Store the parts of `row` as the weights' gradients. A weight without a gradient on any rank keeps none."""
    *parts, marks = row.split([*(_local(weight).numel() for weight in weights), len(weights)])
    for weight, part, has_grad in zip(weights, parts, marks.tolist(), strict=True):
        if has_grad:
            weight.grad = torch.empty_like(weight, dtype=weight.grad_dtype)
            _local(weight.grad).copy_(part.view_as(_local(weight)))
