"""Gradients that more than one rank has a part of: copies of a stage, tied weights, replicas; and the norm over all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core.errors import SettingError
from ppedu.core.placement import Placement
from ppedu.run.comm import PipelineGroup
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


def shared(placement: Placement, modules: Mapping[int, nn.Module], ties: Sequence[Tie], rank: int) -> list[Shared]:
    """What `rank` shares: the stages of which another rank holds a copy, then the ties. All ranks have one order.

    Raises:
        SettingError: a tied weight does not exist.
    """
    found = []
    for stage in range(placement.stages):
        holders = [copy[stage] for copy in placement.holders]
        if rank in holders and len(set(holders)) > 1:
            first = holders[0] == rank
            weights = [weight for weight in modules[stage].parameters() if weight.requires_grad]
            found.append(Shared(weights, [], holders[first], first))
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


def _weight(modules: Mapping[int, nn.Module], stage: int, name: str) -> nn.Parameter:
    try:
        return modules[stage].get_parameter(name)
    except (KeyError, AttributeError):
        known = ", ".join(name for name, _ in modules[stage].named_parameters()) if stage in modules else "none"
        raise SettingError(f"there is no weight {name!r} in stage {stage} to tie; there is: {known}") from None


def require_equal(found: Sequence[Shared], group: PipelineGroup, patience: timedelta) -> None:
    """Return if weights that are shared are the same on both ranks, and tied ones the same.

    Raises:
        SettingError: they are not.
    """
    for weights, others, peer, _ in found:
        mine = _sums(weights)
        theirs = _sums(others) if others else _swapped(mine, peer, group, patience)
        if not torch.equal(mine, theirs):
            raise SettingError(
                f"rank {group.rank} and rank {peer} hold copies of one stage, or tied weights, that are not the same; "
                "build both from one seed, or load both from one file"
            )


def _sums(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.tensor([checksum(local(weight.detach())) for weight in weights])


def _swapped(mine: torch.Tensor, peer: int, group: PipelineGroup, patience: timedelta) -> torch.Tensor:
    """What `peer` gives for `mine`."""
    mine = mine.to(group.device)
    theirs = torch.empty_like(mine)
    swap = [(dist.isend, mine), (dist.irecv, theirs)]
    ops = [dist.P2POp(how, part, group.peer(peer), group.process_group) for how, part in swap]
    for work in dist.batch_isend_irecv(ops):
        wait(work, group.device, patience)
    return theirs


def add_up(found: Sequence[Shared], group: PipelineGroup, patience: timedelta) -> None:
    """Give every holder of a shared weight the sum of its gradients."""
    for weights, others, peer, first in found:
        mine = flat(weights)
        if others:
            total = mine + flat(others)
            put(others, total)
        else:
            theirs = _swapped(mine, peer, group, patience).to(mine.device)
            total = mine + theirs if first else theirs + mine
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


def mean(value: torch.Tensor, replicas: dist.ProcessGroup, patience: timedelta) -> torch.Tensor:
    """A number's mean over `replicas`."""
    value = value.to("cpu" if dist.get_backend(replicas) == "gloo" else "cuda", copy=True)
    wait(dist.all_reduce(value, group=replicas, async_op=True), value.device, patience)
    return value.cpu() / dist.get_world_size(replicas)


def squares(found: Sequence[Shared], modules: Iterable[nn.Module]) -> float:
    """The sum of squares of the gradients that this rank answers for: of several holders, the first does.

    Of gradients that are sharded it is the sum over all slices, on each rank that has one.
    """
    elsewhere = {
        id(weight) for each in found for weight in each.others or each.weights if each.others or not each.first
    }
    total = 0.0
    slices: dict[Any, torch.Tensor] = {}
    for weight in (weight for module in modules for weight in module.parameters() if id(weight) not in elsewhere):
        grad: Any = weight.grad
        if grad is not None:
            own = local(grad).double().square().sum()
            if hasattr(grad, "placements"):  # one sum for all that are sharded alike
                over = grad.device_mesh, grad.placements
                slices[over] = slices[over] + own if over in slices else own
            else:
                total += own.item()
    return total + sum(_whole(own, *over) for over, own in slices.items())


def _whole(own: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> float:
    """The sum of what each rank has of its own slices."""
    from torch.distributed.tensor import DTensor, Partial  # takes long to import; who has slices has it already

    parts = [Partial() if each.is_shard() else each for each in placements]
    return DTensor.from_local(own, mesh, parts).full_tensor().item()


def local(tensor: Any) -> torch.Tensor:
    """Of a tensor that is sharded, the slice that is here; any other as it is."""
    here: torch.Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
    return here


def flat(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradients in one row; zeros where there is none."""
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    return torch.cat([local(grad).reshape(-1) for grad in grads]) if grads else torch.empty(0)


def put(weights: Sequence[nn.Parameter], row: torch.Tensor) -> None:
    """Take `row` apart again into the weights' gradients."""
    for weight, part in zip(weights, row.split([local(weight).numel() for weight in weights]), strict=True):
        weight.grad = torch.empty_like(weight)
        local(weight.grad).copy_(part.view_as(local(weight)))
