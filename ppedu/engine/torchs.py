"""A schedule in torch's own pipeline runtime, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import nn

from ppedu.core import CommunicationError, Schedule, ScheduleError, SettingError, export
from ppedu.core.grid import strip
from ppedu.core.schedule import require_schedule
from ppedu.engine.batch import Batching
from ppedu.engine.ranks.comm import PipelineGroup
from ppedu.engine.ranks.device import home
from ppedu.engine.ranks.versions import (
    DEFERRED,
    TORCHS_CHUNKS,
    TORCHS_MESSAGES,
    require,
    torchs_parts,
    torchs_runtime,
)
from ppedu.engine.recording.runtime import live
from ppedu.engine.stages.local import as_stages
from ppedu.engine.stages.stage import Loss
from ppedu.sim.verify import verify
from ppedu.zoo import schedule as named

# Torch's schedules with one stage on each rank. Their `pipeline_order` is for prints, and differs from what they do.
SINGLE = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}


def to_torch(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    loss_fn: Loss,
    group: PipelineGroup | None = None,
    **settings: Any,
) -> Any:
    """Return torch's pipeline runtime for this rank, with the schedule's order, ready for a step.

        runtime = pp.run.to_torch(schedule, stages, loss_fn)
        runtime.step(*[inputs] * (0 in stages), target=targets if schedule.stages - 1 in stages else None)

    The gradients are those of `Pipeline`, up to rounding. torch infers the shapes of messages in the first step; the
    batch must be a multiple of the microbatches; and it cannot run two copies of a model.

    Args:
        schedule: Compute actions only, or lowered by `pp.lower`.
        stages: The module of each stage that this rank holds, by number; see `local_stages`.
        loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar.
        group: The ranks of the pipeline; by default the whole world.
        settings: Of torch's runtime, such as scale_grads=False.

    Raises:
        ScheduleError: The schedule is not legal.
        SettingError: torch cannot run it, or the stages, the group or a setting do not fit it.
        CommunicationError: No process group has been initialized.
        PipelineError: This release of torch cannot run it.
    """
    require_schedule("to_torch", schedule)
    schedule.validate()
    text = export.to_torch(schedule)
    if schedule.forward_only:
        raise SettingError(f"{schedule!r} runs forwards alone, and torch's runtime is for training; take Pipeline")
    if not callable(loss_fn):
        raise SettingError(f"loss_fn must be a function of an output and a target; got {loss_fn!r}")
    group = PipelineGroup.of(group)
    if not dist.is_initialized():
        raise CommunicationError("torch's runtime needs a process group; call torch.distributed.init_process_group()")
    modules = {number: stage.module for number, stage in as_stages(schedule, stages, group).items()}
    device = home(modules.values(), group.device)
    if "defer_pp_recv" in settings:
        require(DEFERRED)
    if device.type == "cpu" and len(modules) > 1:
        require(TORCHS_CHUNKS)
    if schedule.lowered:
        require(TORCHS_MESSAGES)
    with TemporaryDirectory() as folder:
        orders = Path(folder) / "orders.csv"
        orders.write_text(text)
        sizes = schedule.stages, schedule.microbatches
        try:
            return torchs_runtime(
                modules, *sizes, device, group.process_group, loss_fn, orders, schedule.lowered, settings
            )
        except TypeError as error:  # an unknown setting
            raise SettingError(f"torch's runtime cannot be made like this: {error}") from error


def from_torch(runtime: Any) -> dict[str, Any]:
    """Return the arguments of a Pipeline that does what a schedule of torch does; see `Pipeline.from_torch`."""
    parts = torchs_parts(runtime)
    dims = {**dict(enumerate(parts["inputs"])), **parts["keywords"]}
    group = parts["stages"][0].group or dist.group.WORLD
    kind = next((each.__name__ for each in type(runtime).__mro__ if each.__name__ in SINGLE), type(runtime).__name__)
    if kind in SINGLE:
        found = named(SINGLE[kind], dist.get_world_size(group), parts["microbatches"])
    else:
        found = strip(Schedule.read(runtime, name=kind))
    return {
        "schedule": found,
        "stages": {stage.stage_index: stage.submod for stage in parts["stages"]},
        "loss_fn": parts["loss_fn"],
        "group": PipelineGroup(dist.get_rank(group), dist.get_world_size(group), group),
        "batching": Batching(
            input_dims={name: _dim(name, each) for name, each in dims.items()},
            output_dim=_dim("output", parts["outputs"]) if parts["outputs"] else 0,
            reduction="mean" if runtime.scale_grads else "sum",
        ),
    }


def verified(runtime: Any, **options: Any) -> Any:
    """Return a schedule of torch.distributed.pipelining unchanged, if nothing is wrong with what its step will do.

        schedule = pp.run.verified(Schedule1F1B(stage, 8, loss_fn), transport="any")

    Each rank records a step of all ranks, as `record` does, and sends nothing. While it does so, which takes from some
    milliseconds to some seconds, by the number of actions, no other thread of it may use torch.distributed.

    Args:
        runtime: A schedule that this rank has made, such as Schedule1F1B(…).
        options: Those of `pp.verify`: `transport`, `buffers`, `peak` and `baseline`.

    Raises:
        ScheduleError: There are reasons to reject it.
        SettingError: It is not such a schedule, it has a method of its own (`record` a class that has it), its step
            fails, or an argument is not possible.
        PipelineError: This release of torch is too old.
    """
    if found := verify(live(runtime), **options):
        reasons = "\n".join(each.text for each in found)
        raise ScheduleError(f"{type(runtime).__name__} is rejected before its first step:\n{reasons}")
    return runtime


def _dim(name: int | str, spec: Any) -> int | None:
    """Return the dimension along which torch cuts or joins something; None if each microbatch gets all of it."""
    if type(spec).__name__ == "_Replicate":
        return None
    if not hasattr(spec, "split_dim"):
        raise SettingError(f"Pipeline cannot cut or join {name!r} as torch does, by {spec!r}; give it a batching=")
    dim: int = spec.split_dim
    return dim
