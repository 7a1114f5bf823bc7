"""Weights that are sharded over replicas: each rank keeps a slice of them, and gathers the rest when it computes.

The slices are those of torch's `fully_shard` (the third stage of ZeRO, arXiv 1910.02054, §5.3). Left to itself that
gathers a module's weights for every forward and backward, and reduces their gradients after every backward: in a
pipeline, for every microbatch. Here the schedule says when. UNSHARD gathers the weights of a stage, RESHARD frees
them, and REDUCE_GRAD averages the gradients of all microbatches over the replicas, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core.actions import Action, Op
from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.schedule import Schedule

if TYPE_CHECKING:
    from torch.distributed.fsdp import UnshardHandle

WHOLE, SHARDED, IN_PARTS, WRAPPED = 0, 1, 2, 3  # how the weights of a stage are kept


def storage(modules: Mapping[int, nn.Module]) -> list[int]:
    """For each way to store weights, a stage of this rank that does so, or -1. Frozen stages do not count.

    modules: all stages of the rank, by number.
    """
    found = [-1, -1, -1, -1]
    for stage, module in modules.items():
        if _parts(module, WRAPPERS):
            found[WRAPPED] = stage
        elif parts := _parts(module):
            found[SHARDED if parts[0] is module else IN_PARTS] = stage
        elif any(weight.requires_grad for weight in module.parameters()):
            found[WHOLE] = stage
    return found


def is_sharded(rows: Sequence[Sequence[int]]) -> bool:
    """Return whether the stages of a pipeline are sharded. `rows[rank]` is what `storage` returns there.

    Raises:
        SettingError: one is sharded in parts only, or some are sharded and others are not, or one is in a wrapper that
            synchronizes its gradients after every backward, or after the first.
    """
    found = [(how, stage, rank) for rank, row in enumerate(rows) for how, stage in enumerate(row) if stage >= 0]
    where = {how: f"stage {stage} on rank {rank}" for how, stage, rank in found}
    for how, stage, _ in found:
        if how == WRAPPED:
            raise SettingError(
                f"stage {stage} is wrapped in DistributedDataParallel; give the plain module and "
                "Pipeline(replicas=group): such a wrapper synchronizes after the wrong backward"
            )
    if IN_PARTS in where:
        raise SettingError(
            f"{where[IN_PARTS]} has parts that are sharded, but is not sharded itself, so that its other weights "
            "would not be averaged over the replicas; call fully_shard on the whole stage too, after its parts"
        )
    if SHARDED in where and WHOLE in where:
        raise SettingError(
            f"{where[WHOLE]} is not sharded, but {where[SHARDED]} is, so that only the gradients of that one would be "
            "averaged over the replicas; call fully_shard on every stage, or on none"
        )
    return SHARDED in where


class Shards:
    """The sharded stages of one rank: gathers, frees and reduces them when told to, and at no other time.

    modules: all stages of the rank, by number. In those that are sharded, fully_shard no longer acts by itself.
    Gradients are whole, and this replica's own, until `reduce_grad`. Other replicas are waited for as long as the
    process group of their mesh allows.
    """

    def __init__(self, modules: Mapping[int, nn.Module], rank: int):
        self.rank = rank
        self.parts = {stage: parts for stage, module in modules.items() if (parts := _parts(module))}
        self._finish = {stage: _finisher(parts[0]) for stage, parts in self.parts.items()}
        self._coming: dict[int, list[UnshardHandle | None]] = {}
        self._gathered: set[int] = set()
        self._unreduced: set[int] = set()
        self._settled: set[int] = set()  # where gradients are added up in `.grad` all the time
        for stage, parts in self.parts.items():
            parts[0].set_reshard_after_forward(False)
            parts[0].set_reshard_after_backward(False)
            for part in parts:  # a part has nothing to gather ahead for another: all are gathered
                part.set_modules_to_backward_prefetch([part])
            self.reshard(stage)

    def problems(self, schedule: Schedule, replicas: dist.ProcessGroup | None) -> list[str]:
        """Return a sentence for each stage that the lowered `schedule` does not gather, or does not reduce.

        It must reduce over all `replicas`.
        """
        found = []
        order = schedule.orders[self.rank]
        there = {(action.stage, action.op) for action in order}
        used = {single.stage for action in order if action.computes for single in action.singles}
        for stage, parts in self.parts.items():
            missing = [f"{stage}{op}" for op in (Op.UNSHARD, Op.REDUCE_GRAD) if (stage, op) not in there]
            if missing and stage in used:
                found.append(
                    f"stage {stage} is sharded, but rank {self.rank} never runs {' or '.join(missing)}; lower the "
                    "schedule with fsdp=True, or give Pipeline one that is not lowered"
                )
            reached = _replicas(parts[0])
            missed = set(dist.get_process_group_ranks(replicas)) - reached if replicas and reached else ()
            if missed:
                found.append(
                    f"the replicas include the global ranks {sorted(missed)}, over which stage {stage} is not sharded, "
                    "so that its gradients would not be averaged over them; give fully_shard a mesh of all replicas"
                )
        return found

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of `stage`."""
        if stage in self.parts:
            self._coming[stage] = [part.unshard(async_op=True) for part in self.parts[stage]]

    def wait(self, action: Action) -> None:
        """Return when the weights that `action` works with are gathered.

        Raises:
            PipelineError: nobody has started to.
        """
        for stage in {single.stage for single in action.singles} & self.parts.keys():
            self._arrive(stage)
            if stage not in self._gathered:
                raise PipelineError(
                    f"the weights of stage {stage} are sharded; {stage}UNSHARD must come first, and a handler for it "
                    "must call step.default(action)"
                )
            if torch.is_grad_enabled():
                self._unreduced.add(stage)

    def reshard(self, stage: int) -> None:
        """Free the weights of `stage`, but for the slices that stay."""
        self._arrive(stage)  # or they would still come
        self._gathered.discard(stage)
        for part in self.parts.get(stage, ()):
            part.reshard()

    def end_backward(self, stage: int) -> None:
        """Tell the module of `stage` that a backward has ended, where it could not see that itself.

        Gradients of low precision are then added up in the one that they are reduced in, as after other backwards.
        """
        if stage in self.parts and stage not in self._settled:
            self._finish[stage]()
            weights = [weight for weight in self.parts[stage][0].parameters() if weight.requires_grad]
            if all(weight.grad is not None for weight in weights):
                self._settled.add(stage)

    def reduce_grad(self, action: Action) -> None:
        """Average a stage's gradients over the replicas, and add each replica's slice of the mean to its `.grad`.

        Raises:
            PipelineError: the weights are not gathered.
        """
        if action.stage in self.parts and torch.is_grad_enabled():  # an evaluation has none
            self.wait(action)
            root = self.parts[action.stage][0]
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            self._finish[action.stage]()
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(False)
            self._unreduced.discard(action.stage)

    def end(self) -> None:
        """Free what a step has left gathered: when the next one starts, the weights are others.

        Raises:
            PipelineError: a stage's gradients are not reduced.
        """
        for stage in self.parts:
            self.reshard(stage)
        for stage in self._unreduced:
            raise PipelineError(
                f"rank {self.rank}: the gradients of stage {stage} have not been averaged over the replicas; "
                f"a handler for {stage}REDUCE_GRAD must call step.default(action)"
            )

    def _arrive(self, stage: int) -> None:
        if stage in self._coming:
            for handle in self._coming.pop(stage):
                if handle is not None:
                    handle.wait()
            self._gathered.add(stage)


# What torch can put around a module, or make of it, each as its module in torch and its name there.
FULLY_SHARDED = [("torch.distributed.fsdp", "FSDPModule")]
WRAPPERS = [
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed._composable.replicate", "DDP"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
]


def _parts(module: nn.Module, kinds: Sequence[tuple[str, str]] = FULLY_SHARDED) -> list[Any]:
    """The modules in `module`, itself first, that are of one of `kinds`."""
    # They take long to import. Where nobody has imported them, nothing is of their kind.
    known = tuple(getattr(sys.modules[place], name) for place, name in kinds if place in sys.modules)
    return [part for part in module.modules() if isinstance(part, known)]


def _replicas(module: nn.Module) -> set[int]:
    """The global ranks that the weights of `module` are sharded over; none if it has no weights."""
    meshes = {weight.device_mesh for weight in module.parameters() if hasattr(weight, "device_mesh")}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


def _finisher(root: Any) -> Callable[[], None]:
    """What makes the module `root` do what it does when a backward through it ends.

    It sees that a backward starts, at its output, and then waits for autograd to be done; but not the backwards that
    start inside of it, for the weights alone. So this is a forward through the module and its backward, which pass
    by all of its layers: a method of its own that counts as a forward, and gives back what it gets.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    root.passing_by = MethodType(lambda self, x: x.clone(), root)
    register_fsdp_forward_method(root, "passing_by")
    root.set_requires_gradient_sync(False)
    root.set_is_last_backward(False)
    return lambda: root.passing_by(torch.zeros((), requires_grad=True)).backward()
