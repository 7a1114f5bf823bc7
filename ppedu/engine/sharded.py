"""Parameter sharding over replicas: each rank stores a slice of every weight, and gathers the rest to compute.

The slices are those of torch's `fully_shard` (the third stage of ZeRO, arXiv 1910.02054, §5.3). By itself, that gathers
a module's weights for every forward and backward, and reduces their gradients after every backward: in a pipeline, for
every microbatch. Here the schedule says when. UNSHARD gathers the weights of a stage, RESHARD frees them, and
REDUCE_GRAD averages the gradients of all microbatches over the replicas, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core import Action, Op, PipelineError, Schedule, SettingError
from ppedu.engine.ranks.versions import FULLY_SHARDED, SHARDING, WRAPPERS, require

if TYPE_CHECKING:
    from torch.distributed.fsdp import UnshardHandle

WHOLE, SHARDED, IN_PARTS, WRAPPED = 0, 1, 2, 3  # how a rank stores the weights of a stage


def storage(modules: Mapping[int, nn.Module]) -> list[int]:
    """Return one stage for each way of storing weights (WHOLE, SHARDED, IN_PARTS, WRAPPED), -1 for a way not in use.

    If stage 0 is whole and stages 2 and 4 are sharded, that is [0, 4, -1, -1].

    Args:
        modules: all stages of the rank, by number. Those without trainable weights do not count.
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
    """Return whether the stages of a pipeline are sharded.

    Args:
        rows: what `storage` returns on each rank.

    Raises:
        SettingError: a stage is in a wrapper that synchronizes after the wrong backward; only parts of a stage are
            sharded; or some stages are sharded and others are not.
    """
    where: dict[int, str] = {}  # a stage for each way of storing weights that is in use
    for rank, row in enumerate(rows):
        for how, stage in enumerate(row):
            if stage >= 0:
                where[how] = f"stage {stage} on rank {rank}"
    if WRAPPED in where:
        raise SettingError(
            f"{where[WRAPPED]} is in a wrapper, such as DistributedDataParallel, that synchronizes gradients after the "
            "wrong backward; give the plain module and Pipeline(replicas=group)"
        )
    if IN_PARTS in where:
        raise SettingError(
            f"{where[IN_PARTS]} has parts that are sharded, but is not sharded itself, so that the gradients of its "
            "other weights would not be averaged; call fully_shard on the whole stage too, after its parts"
        )
    if SHARDED in where and WHOLE in where:
        raise SettingError(
            f"{where[WHOLE]} is not sharded, but {where[SHARDED]} is, so that only the gradients of the latter would "
            "be averaged; call fully_shard on every stage, or on none"
        )
    return SHARDED in where


class Shards:
    """Gathers, frees and reduces the sharded stages of one rank, when the schedule requires it and at no other time.

    Until `reduce_grad`, gradients are not sharded, and are this replica's own. The timeout for other replicas is that
    of their mesh's process group.

    Args:
        modules: all stages of the rank, by number. In sharded ones, fully_shard no longer acts by itself.

    Raises:
        PipelineError: a stage is sharded, and this release of PyTorch is too old for that.
    """

    def __init__(self, modules: Mapping[int, nn.Module], rank: int):
        self.rank = rank
        self.parts = {stage: parts for stage, module in modules.items() if (parts := _parts(module))}
        if self.parts:
            require(SHARDING)
        self._finish = {stage: _finisher(parts[0]) for stage, parts in self.parts.items()}
        self._gathered: dict[int, list[UnshardHandle | None]] = {}  # by stage, its gathers still in flight
        self._unreduced: set[int] = set()
        self._settled: set[int] = set()  # stages whose gradients are added up in `.grad` already
        for stage, parts in self.parts.items():
            parts[0].set_reshard_after_forward(False)
            parts[0].set_reshard_after_backward(False)
            for part in parts:  # all parts are gathered, so none needs to prefetch another
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
        needed = [Op.UNSHARD] if schedule.forward_only else [Op.UNSHARD, Op.REDUCE_GRAD]
        for stage, parts in self.parts.items():
            missing = [f"{stage}{op}" for op in needed if (stage, op) not in there]
            if missing and stage in used:
                found.append(
                    f"stage {stage} is sharded, but rank {self.rank} never runs {' or '.join(missing)}; lower the "
                    "schedule with fsdp=True, or give Pipeline one that is not lowered"
                )
            meshes = [weight.device_mesh for weight in parts[0].parameters() if hasattr(weight, "device_mesh")]
            reached = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
            if not replicas or not reached:
                continue
            if missed := set(dist.get_process_group_ranks(replicas)) - reached:
                found.append(
                    f"the replicas include the global ranks {sorted(missed)}, over which stage {stage} is not sharded, "
                    "so that its gradients would not be averaged over them; give fully_shard a mesh of all replicas"
                )
        return found

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of `stage`."""
        if stage in self.parts:
            self._gathered[stage] = [part.unshard(async_op=True) for part in self.parts[stage]]

    def wait(self, action: Action) -> None:
        """Wait until the weights of an action's stages are gathered."""
        for stage in {single.stage for single in action.singles} & self.parts.keys():
            self._complete(stage)
            if stage not in self._gathered:
                raise PipelineError(
                    f"the weights of stage {stage} are sharded; {stage}UNSHARD must come first, and a handler for it "
                    "must call step.default(action)"
                )
            if torch.is_grad_enabled():
                self._unreduced.add(stage)

    def reshard(self, stage: int) -> None:
        """Free the gathered weights of `stage`; this rank's slices stay."""
        self._complete(stage)  # a gather in flight would undo this
        self._gathered.pop(stage, None)
        for part in self.parts.get(stage, ()):
            part.reshard()

    def end_backward(self, stage: int) -> None:
        """Tell the module of `stage` that a W has ended, which fully_shard does not notice by itself.

        It then adds low-precision gradients up in the precision of their reduction, as after other backwards.
        """
        if stage in self.parts and stage not in self._settled:
            self._finish[stage]()
            weights = [weight for weight in self.parts[stage][0].parameters() if weight.requires_grad]
            if all(weight.grad is not None for weight in weights):
                self._settled.add(stage)

    def reduce_grad(self, action: Action) -> None:
        """Average a stage's gradients over the replicas, and add each replica's slice of the mean to its `.grad`."""
        if action.stage in self.parts and torch.is_grad_enabled():  # an evaluation reduces no gradients
            self.wait(action)
            root = self.parts[action.stage][0]
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            self._finish[action.stage]()
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(False)
            self._unreduced.discard(action.stage)

    def end(self) -> None:
        """Free all gathered weights at the end of a step, since the optimizer is about to change them.

        Raises:
            PipelineError: a stage's gradients have not been reduced.
        """
        for stage in self.parts:
            self.reshard(stage)
        for stage in self._unreduced:
            raise PipelineError(
                f"rank {self.rank}: the gradients of stage {stage} have not been averaged over the replicas; "
                f"a handler for {stage}REDUCE_GRAD must call step.default(action)"
            )

    def _complete(self, stage: int) -> None:
        """Wait for the gather of `stage`, if one is in flight."""
        in_flight = self._gathered.get(stage, [])
        while in_flight:
            if handle := in_flight.pop(0):
                handle.wait()


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's slice of a sharded tensor, or any other tensor itself, detached in both cases."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _parts(module: nn.Module, kinds: Sequence[tuple[str, str]] = FULLY_SHARDED) -> list[Any]:
    """Return the modules in `module`, itself first, that are instances of one of these classes.

    Args:
        kinds: each class as the name of its module and its own name, such as ("torch.nn.parallel", "DataParallel").
    """
    # These classes take long to import. As long as they are not imported, they have no instances.
    known = tuple(getattr(sys.modules[place], name) for place, name in kinds if place in sys.modules)
    return [part for part in module.modules() if isinstance(part, known)]


def _finisher(root: Any) -> Callable[[], None]:
    """Return a function that makes the sharded module `root` do its work at the end of a backward.

    fully_shard does that work when a backward that went through the module's output is done. It misses backwards that
    start inside the module, for the weights only. The function therefore runs a forward and a backward that skip all
    layers: through a method that fully_shard treats as a forward, and that returns its argument.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    root.skip_layers = MethodType(lambda self, x: x.clone(), root)
    register_fsdp_forward_method(root, "skip_layers")
    root.set_requires_gradient_sync(False)
    root.set_is_last_backward(False)
    device = next(root.parameters()).device  # from elsewhere, copying would let the host wait for the GPU
    return lambda: root.skip_layers(torch.zeros((), device=device, requires_grad=True)).backward()
