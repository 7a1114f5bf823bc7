"""What several ranks hold of one model and keep equal: copies of a stage, replicas, tied weights. The norm over all."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
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

Tie = tuple[tuple[int, str], tuple[int, str]]  # two weights that are one, each by its stage and its name there


class Shared(NamedTuple):
    """Weights here, and those they share their gradients with: `others` on this rank, or as many on rank `peer`.

    first: this rank's part comes first in the sum, which so is the same on both, to the last bit.
    """

    weights: list[nn.Parameter]
    others: list[nn.Parameter]
    peer: int
    first: bool


def copied(placement: Placement, modules: Mapping[int, nn.Module], rank: int) -> list[Shared]:
    """The weights of the stages of `rank` that another rank holds a copy of."""
    return [
        Shared(
            [weight for weight in modules[stage].parameters() if weight.requires_grad],
            [],
            holders[holders[0] == rank],
            holders[0] == rank,
        )
        for stage, holders in _two_copies(placement, rank)
    ]


def tied(placement: Placement, modules: Mapping[int, nn.Module], ties: Sequence[Tie], rank: int) -> list[Shared]:
    """The tied weights of `rank`, in the order of `ties` on all ranks.

    Raises:
        SettingError: a tied weight does not exist.
    """
    found = []
    for tie in ties:
        for copy in placement.holders:
            holders = [copy[stage] if 0 <= stage < placement.stages else -1 for stage, _ in tie]
            here = [_weight(modules, *tie[end]) for end in (0, 1) if holders[end] in (rank, -1)]
            first = holders[0] == rank
            if len(here) == 2 and here[0] is not here[1]:
                found.append(Shared(here[:1], here[1:], rank, first))
            elif len(here) == 1:
                found.append(Shared(here, [], holders[first], first))
    return found


def _two_copies(placement: Placement, rank: int) -> Iterator[tuple[int, list[int]]]:
    """The stages of `rank` that another rank holds, too, each with both ranks."""
    for stage in range(placement.stages):
        holders = [copy[stage] for copy in placement.holders]
        if rank in holders and len(set(holders)) > 1:
            yield stage, holders


def _weight(modules: Mapping[int, nn.Module], stage: int, name: str) -> nn.Parameter:
    try:
        return modules[stage].get_parameter(name)
    except (KeyError, AttributeError):
        known = ", ".join(name for name, _ in modules[stage].named_parameters()) if stage in modules else "none"
        raise SettingError(f"there is no weight {name!r} in stage {stage} to tie; there is: {known}") from None


class Twins(NamedTuple):
    """A stage whose module several ranks hold: both ranks of a schedule with two copies of the model, or all replicas.

    holders: the names of these ranks. gather: a row of numbers -> the rows of all holders in their order, shape
    (holders, length); every holder must call it.
    """

    stage: int
    module: nn.Module
    holders: list[str]
    gather: Callable[[torch.Tensor], torch.Tensor]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are part of the module's state, by name. The others are caches, which may differ."""
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, part in self.module.named_modules()
            for name, buffer in part.named_buffers(recurse=False)
            if name not in part._non_persistent_buffers_set
        }

    def unlike(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The names of the tensors that differ between holders, each with a sentence that names two of these."""
        if not tensors:
            return {}
        rows = self.gather(torch.tensor([checksum(tensor.detach()) for tensor in tensors.values()])).t().tolist()
        return {
            name: f"stage {self.stage}: the {kind} {name!r} differs between {self.holders[0]} and {self.holders[other]}"
            for name, column in zip(tensors, rows, strict=True)
            if (other := _odd_one(column))
        }


def twins(
    placement: Placement,
    modules: Mapping[int, nn.Module],
    group: PipelineGroup,
    replicas: dist.ProcessGroup | None,
    patience: timedelta,
) -> list[Twins]:
    """The stages of this rank that other ranks hold, too: first as copies within the schedule, then as replicas."""
    found = []
    for stage, holders in _two_copies(placement, group.rank):
        first = holders[0] == group.rank
        gather = partial(_both, peer=holders[first], first=first, group=group, patience=patience)
        found.append(Twins(stage, modules[stage], [f"rank {rank}" for rank in holders], gather))
    if replicas is not None and dist.get_world_size(replicas) > 1:
        ranks = [f"global rank {rank}" for rank in dist.get_process_group_ranks(replicas)]
        gather = partial(_all, replicas=replicas, patience=patience)
        found += [Twins(stage, modules[stage], ranks, gather) for stage in sorted(modules)]
    return found


def differences(found: Sequence[Twins], ties: Sequence[Shared], group: PipelineGroup, patience: timedelta) -> list[str]:
    """A sentence for every weight and buffer that is not the same on all ranks that hold it, and for every such tie."""
    wrong = []
    for each in found:
        weights, buffers = dict(each.module.named_parameters()), each.buffers
        looks = [(name, part.shape, part.dtype, part.requires_grad) for name, part in (weights | buffers).items()]
        row = each.gather(torch.tensor([zlib.crc32(repr((each.stage, looks)).encode())]))
        if other := _odd_one(row.flatten().tolist()):
            wrong.append(
                f"stage {each.stage} on {each.holders[other]} has not the weights and buffers that it has on "
                f"{each.holders[0]}: names, shapes, dtypes and requires_grad must be the same"
            )
            continue  # its holders agree on that, and compare no further
        # Each replica holds another slice of a sharded weight; all slices together are one weight.
        whole = {name: weight for name, weight in weights.items() if not hasattr(weight, "to_local")}
        wrong += {**each.unlike("weight", whole), **each.unlike("buffer", buffers)}.values()
    for weights_here, others, peer, first in ties:
        mine = _sums(weights_here)
        theirs = _sums(others) if others else _both(mine, peer, first, group, patience)[int(first)]
        if not torch.equal(mine, theirs):
            wrong.append(f"the tied weights on rank {group.rank} and rank {peer} are not the same")
    return wrong


def average_buffers(found: Sequence[Twins]) -> None:
    """Give all holders of a module the mean of each floating-point buffer.

    Raises:
        PipelineError: another buffer, such as a counter, is not the same on all of them.
    """
    for each in found:
        buffers = each.buffers
        unlike = each.unlike("buffer", buffers)
        for name, where in unlike.items():
            if not buffers[name].is_floating_point():
                raise PipelineError(
                    f"{where} after the step, and {buffers[name].dtype} has no mean; give all holders of the stage as "
                    "many microbatches, or register the buffer with persistent=False"
                )
        if unlike:
            floats = [buffers[name] for name in unlike]
            row = torch.cat([buffer.detach().double().flatten() for buffer in floats])
            means = each.gather(row).mean(0)
            for buffer, mean in zip(floats, means.split([buffer.numel() for buffer in floats]), strict=True):
                buffer.detach().copy_(mean.view_as(buffer))


def _odd_one(values: Sequence[int]) -> int:
    """The place of the first value that is not the first one; 0 if all are the same."""
    return next((place for place, value in enumerate(values) if value != values[0]), 0)


def _sums(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.tensor([checksum(local(weight)) for weight in weights])


def _both(mine: torch.Tensor, peer: int, first: bool, group: PipelineGroup, patience: timedelta) -> torch.Tensor:
    """This rank's row and that of `peer`, in the same order on both."""
    mine = mine.to(group.device)
    theirs = torch.empty_like(mine)
    for work in start_swap(mine, theirs, peer, group):
        wait(work, group.device, patience)
    return torch.stack([mine, theirs] if first else [theirs, mine])


def _all(mine: torch.Tensor, replicas: dist.ProcessGroup, patience: timedelta) -> torch.Tensor:
    """The rows of all replicas."""
    mine = mine.to(_home(replicas))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(replicas))]
    wait(dist.all_gather(rows, mine, group=replicas, async_op=True), mine.device, patience)
    return torch.stack(rows)


def add_up(found: Sequence[Shared], group: PipelineGroup, patience: timedelta) -> None:
    """Give every holder of a shared weight the sum of its gradients."""
    for weights, others, peer, first in found:
        mine = flat(weights)
        if others:
            total = mine + flat(others)
            put(others, total)
        else:
            one, other = _both(mine, peer, first, group, patience)
            total = (one + other).to(mine.device)
        put(weights, total)


def start_mean(weights: Sequence[nn.Parameter], replicas: dist.ProcessGroup, patience: timedelta) -> Callable[[], None]:
    """Start to average the weights' gradients over `replicas`; to be called later, it puts the mean into place."""
    total = flat(weights)
    if dist.get_backend(replicas) == "gloo":
        total = total.cpu()
    work = dist.all_reduce(total, group=replicas, async_op=True)

    def finish() -> None:
        wait(work, total.device, patience)
        put(weights, total / dist.get_world_size(replicas))

    return finish


def total(value: torch.Tensor, replicas: dist.ProcessGroup, patience: timedelta) -> torch.Tensor:
    """A number's sum over `replicas`."""
    value = value.to(_home(replicas), copy=True)
    wait(dist.all_reduce(value, group=replicas, async_op=True), value.device, patience)
    return value.cpu()


def _home(replicas: dist.ProcessGroup) -> str:
    """Where a process group's messages travel from and to."""
    return "cpu" if dist.get_backend(replicas) == "gloo" else "cuda"


def norm(found: Sequence[Shared], module: nn.Module) -> torch.Tensor:
    """The norm of the gradients that this rank answers for: of several holders, the first does.

    Of gradients that are sharded it is the norm of all slices together, on each rank that has one.
    """
    elsewhere = {
        id(weight) for each in found for weight in each.others or each.weights if each.others or not each.first
    }
    alike: dict[Any, list[torch.Tensor]] = {}  # by how they are sharded: torch takes the norm of like ones only
    for weight in module.parameters():
        grad: Any = weight.grad
        if grad is not None and id(weight) not in elsewhere:
            over = (grad.device_mesh, grad.placements) if hasattr(grad, "to_local") else None
            alike.setdefault(over, []).append(grad.coalesce().values() if grad.is_sparse else grad)
    norms: list[Any] = [get_total_norm(grads) for grads in alike.values()]
    plain = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in norms]
    return torch.tensor([each.item() for each in plain], dtype=torch.float64).norm()


def local(tensor: Any) -> torch.Tensor:
    """Of a tensor that is sharded, the slice that is here; any other as it is."""
    here: torch.Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return here


def flat(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradients in one row, zeros where there is none, and then for each weight 1 if it has one, otherwise 0."""
    if not weights:
        return torch.empty(0)
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    row = torch.cat([(local(grad).to_dense() if grad.is_sparse else local(grad)).reshape(-1) for grad in grads])
    return torch.cat([row, row.new_tensor([weight.grad is not None for weight in weights])])


def put(weights: Sequence[nn.Parameter], row: torch.Tensor) -> None:
    """Take `row` apart again into the weights' gradients. A weight that has none on any rank keeps none."""
    sizes = [local(weight).numel() for weight in weights]
    parts = row.split([*sizes, len(weights)]) if weights else []
    for weight, part, known in zip(weights, parts, parts[-1].tolist() if weights else [], strict=False):
        if known:
            weight.grad = torch.empty_like(weight)
            local(weight.grad).copy_(part.view_as(local(weight)))
