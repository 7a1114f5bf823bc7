"""Schedules in the formats of other programs."""

from __future__ import annotations

import os
from dataclasses import replace

from ppedu.core.actions import Action, Op
from ppedu.core.errors import SettingError
from ppedu.core.schedule import Schedule, require_schedule

ONLY_HERE = (Op.BATCH_P2P, Op.WAIT_RECV_F, Op.WAIT_RECV_B)


def to_torch(schedule: Schedule, path: str | os.PathLike[str] | None = None) -> str:
    """Return the CSV text that `_load_csv` of torch.distributed.pipelining's schedules reads.

    Torch loads a lowered schedule with format="compute_comms", any other with "compute_only". From PyTorch 2.15 on, a
    lowered one needs a WAIT_SEND for each send, or export the schedule that is not lowered. Torch does not know
    OVERLAP_B_F, which becomes its two actions in order. A lowered schedule for training without REDUCE_GRAD gets
    one for each stage, sharded or not, because that is where torch divides gradients by the number of microbatches.

    Args:
        path: Also write the text to this file.

    Raises:
        SettingError: `schedule` is not a Schedule, has no actions, batches messages or waits for receives, or runs two
            copies of the model, which torch cannot.
        PipelineError: The file cannot be written.
    """
    require_schedule("to_torch", schedule)
    if schedule.placement.copies > 1:
        raise SettingError(
            f"{schedule!r} runs two copies of the model in opposite directions; a torch schedule has one rank for "
            "each stage, whatever the microbatch — take a schedule with one copy, such as dualpipev for dualpipe"
        )
    if not any(schedule.orders):
        raise SettingError(f"{schedule!r} has no actions; there is nothing to export")
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    for theirs, ours in zip(orders, schedule.orders, strict=True):
        for action in ours:
            if action.op == Op.OVERLAP_B_F:
                theirs.extend(action.parts)
            else:
                theirs.append(action)
    if unknown := next((each for order in orders for each in order if each.op in ONLY_HERE), None):
        raise SettingError(
            f"torch has no {unknown}; it posts each message alone, and waits for a receive where its result is used: "
            "export pp.strip(schedule), or pp.lower of that"
        )
    reduces = any(action.op == Op.REDUCE_GRAD for order in orders for action in order)
    if schedule.lowered and not reduces and not schedule.forward_only:
        for rank, order in enumerate(orders):
            order += [Action(stage, Op.REDUCE_GRAD) for stage in schedule.placement.stages_of(rank)]
    return replace(schedule, orders=tuple(map(tuple, orders))).to_csv(path)
