"""The stages that a rank holds: which they are, and whether modules and a loss that are given can be theirs."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from torch import nn

from ppedu.core import Schedule, SettingError, require_schedule
from ppedu.core.validate import require_rank
from ppedu.engine.ranks.comm import PipelineGroup
from ppedu.engine.stages.stage import Loss, Stage


def local_stages(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the stages that `rank` holds, of both copies of the model if there are two.

    Raises:
        SettingError: there is no such rank.
    """
    require_schedule("local_stages", schedule)
    return schedule.placement.stages_of(require_rank(rank, schedule.ranks))


def as_stages(schedule: Schedule, modules: Mapping[int, nn.Module | Stage], group: PipelineGroup) -> dict[int, Stage]:
    """Return the modules as stages; raise SettingError unless they, and the number of ranks, are the schedule's."""
    if group.size != schedule.ranks:
        raise SettingError(f"{schedule!r} needs {schedule.ranks} ranks; the group has {group.size}")
    numbers = local_stages(schedule, group.rank)
    if not isinstance(modules, Mapping) or set(modules) != set(numbers):
        got = ", ".join(map(str, modules)) if isinstance(modules, Mapping) else repr(modules)
        raise SettingError(
            f"rank {group.rank} holds the stages {', '.join(map(str, numbers))}; got {got or 'none'}: "
            "give a module for each, such as {0: module}; see pp.run.local_stages"
        )
    found = {}
    for number in numbers:
        given = modules[number]
        found[number] = given if isinstance(given, Stage) else Stage(given, number)
        if found[number].index != number:  # also if one Stage is to be two
            raise SettingError(
                f"stage {number} got a Stage made for stage {found[number].index}; make one for each, such as "
                f"Stage(module, {number}), which may have the same module"
            )
    return found


def require_past(stages: Mapping[int, Stage]) -> None:
    """Raise SettingError unless the forward of each stage takes the keyword `past`, as schedules with slices need."""
    for number, stage in stages.items():
        taken = signature(stage.module.forward).parameters
        own = type(stage).forward is not Stage.forward  # which may not run its module
        if not own and "past" not in taken and not any(each.kind == Parameter.VAR_KEYWORD for each in taken.values()):
            raise SettingError(
                f"the forward of stage {number} takes no `past`, the keys and values of earlier slices; write "
                "forward(self, x, past) and attend to past.update(key, value, layer)"
            )


def own_loss(output: Any, target: Any) -> Any:
    """Return the output, which is the loss itself if the last stage computes it."""
    return output


def find_loss(loss_fn: Loss | None, stages: Mapping[int, Stage], last: int) -> Loss | None:
    """Return the loss of a pipeline: `loss_fn` or that of its `last` stage; None if this rank does not hold that.

    Raises:
        SettingError: another stage has a loss, or the loss has weights to train that no stage of this rank has.
    """
    for stage in stages.values():
        if stage.loss_fn and stage.index != last:
            raise SettingError(
                f"stage {stage.index} has a loss_fn, but the last stage is {last}; give the loss to "
                "Pipeline(…, loss_fn) instead"
            )
    if last not in stages:
        return None
    found = loss_fn or stages[last].loss_fn or own_loss
    own = set(nn.ModuleList(stage.module for stage in stages.values()).parameters())
    for name, weight in found.named_parameters() if isinstance(found, nn.Module) else ():
        if weight.requires_grad and weight not in own:
            raise SettingError(
                f"loss_fn has the weight {name!r}, which no stage of this rank has, so its gradient would not be "
                "synchronized or clipped; make loss_fn a part of the last stage's module, or freeze the weight with "
                "requires_grad_(False)"
            )
    return found
