"""A schedule in torch's own pipeline runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import nn

from ppedu.core import CommunicationError, Schedule, SettingError, export
from ppedu.core.schedule import require_schedule
from ppedu.engine.ranks.comm import PipelineGroup
from ppedu.engine.ranks.versions import DEFERRED, TORCHS_CHUNKS, TORCHS_MESSAGES, require, torchs_runtime
from ppedu.engine.stages.stage import Loss, as_stages, home, local_stages


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
    if group.size != schedule.ranks:
        raise SettingError(f"{schedule!r} needs {schedule.ranks} ranks; the group has {group.size}")
    held = as_stages(stages, local_stages(schedule, group.rank), group.rank)
    modules = {number: stage.module for number, stage in held.items()}
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
