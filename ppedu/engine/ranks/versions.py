"""The differences between releases of PyTorch, from 2.6 on, and the private parts of torch that ppedu uses.

A release that changes one of these changes this module alone. All releases so far have the private parts, unless a
comment names an exception. `SINCE` lists the features that old releases lack, and `BEFORE` those that new
ones lack; calls that need one raise an error that names the release.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Nested tuples, lists and dicts, as torch itself goes through them.
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten

from ppedu.core import PipelineError, SettingError
from ppedu.core.validate import shown

RELEASE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))

GRAD_DTYPE = "a gradient in another dtype than its weight"
UNPACK_HOOK = "a split backward that recomputes a checkpointed block only once"
SHARDING = "a pipeline of stages that fully_shard has sharded"  # 2.8 adds gradients up with gloo instead of averaging
FUSED_GROUPS = "grouped-query attention on a CPU that does not save its matrix"
TORCHS_ORDERS = "a complete grammar of torch's actions, and its order of GPipe,"
TORCHS_STEP = "torch's own 1F1B on a CPU"
TORCHS_CHUNKS = "torch's pipeline runtime on a CPU, with several stages on a rank,"
DEFERRED = "defer_pp_recv, an option of torch's pipeline runtime,"
TORCHS_RECORDED = "recording a schedule of torch's"
SINCE = {
    SHARDING: (2, 9),
    FUSED_GROUPS: (2, 9),
    GRAD_DTYPE: (2, 10),
    UNPACK_HOOK: (2, 10),
    TORCHS_ORDERS: (2, 10),
    TORCHS_STEP: (2, 10),
    TORCHS_CHUNKS: (2, 12),
    DEFERRED: (2, 13),
    TORCHS_RECORDED: (2, 13),
}
TORCHS_MESSAGES = "a lowered schedule without actions that wait for sends, in torch's pipeline runtime,"
BEFORE = {TORCHS_MESSAGES: (2, 15)}


def lack(feature: str) -> str:
    """Return which release a feature of `SINCE` or `BEFORE` needs; "" if this one has it."""
    if feature in BEFORE:
        bound, how, has = BEFORE[feature], "a release before", BEFORE[feature] > RELEASE
    else:
        bound, how, has = SINCE[feature], "at least", SINCE[feature] <= RELEASE
    return "" if has else f"{feature} needs {how} PyTorch {'.'.join(map(str, bound))}; this is {torch.__version__}"


def require(feature: str) -> None:
    """Raise PipelineError if this release lacks a feature."""
    if missing := lack(feature):
        raise PipelineError(missing)


# Gradients


def grad_dtype(weight: nn.Parameter) -> torch.dtype:
    """Return the dtype in which the gradients of a weight add up.

    Raises:
        PipelineError: it is not that of the weight, and this release would ignore that.
    """
    dtype: torch.dtype = getattr(weight, "grad_dtype", None) or weight.dtype
    if dtype != weight.dtype:
        require(GRAD_DTYPE)
    return dtype


def set_grad_dtype(weight: nn.Parameter, dtype: torch.dtype) -> None:
    """Let the gradients of a weight add up in `dtype`; raise PipelineError if this release cannot."""
    if dtype != grad_dtype(weight):
        require(GRAD_DTYPE)
        weight.grad_dtype = dtype


# The graph of autograd


def holds_graph(node: Node) -> bool:
    """Whether an edge to the node keeps its graph alive: that of a custom autograd function does since 2.13."""
    return RELEASE >= (2, 13) or not isinstance(node, BackwardCFunction)


def gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """Return the edge at which a backward of `tensor` starts. It keeps the graph alive, and not the tensor."""
    if tensor.grad_fn and not holds_graph(tensor.grad_fn):
        with torch.enable_grad():
            tensor = tensor.view_as(tensor)
    return get_gradient_edge(tensor)


def sequence_number(node: Any) -> int:
    """Return a number that is higher the later the node was made: a backward visits higher ones first."""
    return node._sequence_nr()


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """Return the names of the saved tensors of a kind of node, unpacked by none of their hooks.

    Raises:
        PipelineError: this release of PyTorch has other names for them.
    """
    with torch.enable_grad():
        known = torch.ones(1, requires_grad=True).square().grad_fn
    if not hasattr(known, "_raw_saved_self"):
        raise PipelineError(f"PyTorch {torch.__version__} does not show what a node saves, in `_raw_saved_…`")
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def unpack_hook(saved: Any) -> Any:
    """Return the hook that unpacks a saved tensor; None without a hook, or if this release lacks UNPACK_HOOK."""
    return None if lack(UNPACK_HOOK) else saved.unpack_hook


def version(tensor: torch.Tensor) -> int:
    """Return the number that autograd counts up with every change of the tensor in place."""
    return tensor._version


@contextmanager
def keep_version_counters(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let autograd overlook changes of these tensors in place."""
    with ExitStack() as stack:
        for tensor in tensors:
            stack.enter_context(_unsafe_preserve_version_counter(tensor))
        yield


def allow_two_streams() -> None:
    """Let a weight's gradients come from two streams, which autograd orders; new releases of torch warn of it."""
    if RELEASE >= (2, 11):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)


# Modules


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether the buffer `name` is in the module's state. `state_dict` tells too, and may run code of users."""
    return name not in module._non_persistent_buffers_set


def keep_buffers(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the buffers of all parts of the module, and their values."""
    kept: list[tuple[Any, list[tuple[str, Any, Any]]]] = []  # by part: its dict of buffers, and what was in it
    for part in module.modules():
        before = [(name, each, None if each is None else each.clone()) for name, each in part._buffers.items()]
        kept.append((part._buffers, before))

    @torch.no_grad()
    def restore() -> None:
        for buffers, before in kept:
            buffers.clear()
            for name, buffer, values in before:
                buffers[name] = buffer
                if buffer is not None:
                    buffer.copy_(values)

    return restore


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module itself runs hooks."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


# Distributed


def store_of(group: Any) -> dist.Store:
    """Return the store through which the ranks of a process group have met."""
    if RELEASE >= (2, 9):
        store: dist.Store = group.get_group_store()
    else:
        _, store = dist.distributed_c10d._world.pg_map[group]
    return store


def offset_of(slice_here: Any) -> tuple[int, ...]:
    """Return where in the whole tensor this rank's slice, a DTensor, begins."""
    (part,) = slice_here.__create_chunk_list__()
    return tuple(part.offsets)


def checkpoint_function(name: str, group: dist.ProcessGroup | None) -> Callable[..., None]:
    """Return torch's function that saves or loads checkpoints, for all ranks of a group, or for this rank alone.

    Args:
        name: "save" or "load".
    """
    from torch.distributed import checkpoint

    if group:
        return partial(getattr(checkpoint, name), process_group=group)
    if RELEASE < (2, 7):  # only the function that this one replaces can do without a group; unwrapped, it does not warn
        return partial(getattr(checkpoint, f"{name}_state_dict").__wrapped__, no_dist=True)
    return partial(getattr(checkpoint, name), no_dist=True)


if RELEASE < (2, 8):
    # Destroying a process group holds Python's lock until gloo's threads have ended, and such a thread may need that
    # lock to let go of the last message: a hang. It lets go at once if this thread leaves it the lock for a moment.
    _destroy = dist.destroy_process_group

    def _destroy_later(group: dist.ProcessGroup | None = None) -> None:
        time.sleep(0.1)
        _destroy(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = _destroy_later


# Classes of torch around a module, or that it has become, each by its module in torch, which takes long to import, and
# its name. The second of the wrappers is that of `replicate`.
FULLY_SHARDED = [("torch.distributed.fsdp", "FSDPModule")]
WRAPPERS = [
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed._composable.replicate", "DDP"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
]

# Measuring


def profiling() -> bool:
    """Return whether a profiler of torch is running."""
    return torch.autograd._profiler_enabled()


def without_memory() -> AbstractContextManager[Any]:
    """Return a context in which tensors of any device have shapes and dtypes, but no numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


# torch's own pipelines


def torchs_runtime(
    modules: Mapping[int, nn.Module],
    stages: int,
    microbatches: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    loss_fn: Callable[..., torch.Tensor],
    orders: Path,
    lowered: bool,
    settings: Mapping[str, Any],
) -> Any:
    """Return torch's pipeline runtime for the modules of some of its stages, with the orders of a CSV file."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    made = [PipelineStage(module, stage, stages, device, group=group) for stage, module in modules.items()]
    runtime = _PipelineScheduleRuntime(made, microbatches, loss_fn, **settings)
    runtime._load_csv(str(orders), format="compute_comms" if lowered else "compute_only")
    return runtime


def torchs_parts(runtime: Any) -> dict[str, Any]:
    """Return what a schedule of torch.distributed.pipelining was made with.

    Returns:
        `stages`, those of this rank; `microbatches`; `loss_fn`; and `inputs`, `keywords` and `outputs`: how batches are
        cut and joined.

    Raises:
        SettingError: it is something else.
    """
    from torch.distributed.pipelining import schedules

    if not isinstance(runtime, schedules._PipelineSchedule):
        raise SettingError(
            f"runtime must be a schedule of torch.distributed.pipelining, such as Schedule1F1B(…); got {shown(runtime)}"
        )
    return {
        "stages": [*getattr(runtime, "_stages", ())] or [runtime._stage],  # type: ignore[attr-defined]
        "microbatches": runtime._n_microbatches,
        "loss_fn": runtime._loss_fn,
        "inputs": runtime._args_chunk_spec or (),
        "keywords": runtime._kwargs_chunk_spec or {},
        "outputs": runtime._output_merge_spec,
    }


def torchs_changes(runtime: Any) -> list[str]:
    """Return the names of the methods of a schedule of torch.distributed.pipelining that are not torch's own."""
    mro = type(runtime).__mro__
    base = next(each for each in mro if each.__module__.startswith("torch."))
    own = [*vars(runtime), *(name for each in mro[: mro.index(base)] for name in vars(each))]
    changed = [name for name in own if not name.startswith("__") and callable(getattr(base, name, None))]
    return changed + ["custom function"] * bool(getattr(runtime, "_comp_type_to_function_map", None))


def torchs_copy(runtime: Any, stages: Any, **settings: Any) -> Any:
    """Return a schedule of torch.distributed.pipelining that runs the orders of another one, for the stages of a rank.

    Args:
        stages: those of the rank, or the one that it has.
        settings: of the base class of all such schedules, such as `n_microbatches`.
    """
    from torch.distributed.pipelining import schedules

    bases = schedules._PipelineScheduleRuntime, schedules.PipelineScheduleMulti, schedules.PipelineScheduleSingle
    made = copy(runtime)
    next(base for base in bases if isinstance(runtime, base)).__init__(made, stages, **settings)
    if isinstance(stages, list):
        for name in ("pipeline_order", "pipeline_order_with_comms", "stage_index_to_group_rank"):
            if name in vars(runtime):
                setattr(made, name, vars(runtime)[name])
        for stage in stages:
            stage.stage_index_to_group_rank = made.stage_index_to_group_rank
    return made
