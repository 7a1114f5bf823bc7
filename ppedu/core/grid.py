"""The lockstep grid, in which every action takes one step: as tuples and as text."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from textwrap import fill

from ppedu.core.actions import Action
from ppedu.core.schedule import Schedule, require_compute, require_schedule

Grid = tuple[tuple[Action | None, ...], ...]


def align(schedule: Schedule) -> Grid:
    """Return the lockstep grid: `grid[rank][step]` is an action, or None where the rank is idle. Rows are equally long.

    Every action takes one step, an overlapped pair too, and starts as early as it can. If ranks get stuck, the grid
    ends there.

    Raises:
        SettingError: The schedule is lowered; `strip` it.
    """
    require_compute("align", schedule)
    numbered, size = schedule.numbered, schedule.microbatches
    exists = [0] * numbered.total  # by number: the step from which a result exists
    grid: list[list[Action | None]] = [[] for _ in schedule.orders]
    for rank, index in schedule.replay.steps:
        entry, row = numbered.orders[rank][index], grid[rank]
        block = numbered.blocks[entry // size]
        step = max([len(row), *(exists[entry + distance] for distance in block.requires)])
        row += [None] * (step - len(row)) + [schedule.orders[rank][index]]
        for distance in block.produces:
            exists[entry + distance] = step + 1
    steps = max(map(len, grid))
    return tuple((*row, *[None] * (steps - len(row))) for row in grid)


def table(schedule: Schedule) -> str:
    """Return the lockstep grid of `align` as text: a line for each step, a column for each rank, a dot for idle.

    If ranks get stuck, a last line marks the action at which each one does with ✗. The problems of an illegal schedule
    follow, in lines of at most 100 characters.

    Raises:
        SettingError: `schedule` is not a Schedule, or it is lowered.
    """
    grid = align(schedule)
    rows = [["step", *(f"rank {rank}" for rank in range(schedule.ranks))]]
    rows += [
        [str(step), *(str(action or "·") for action in column)] for step, column in enumerate(zip(*grid, strict=True))
    ]
    if blocked := schedule.replay.blocked:
        stuck = {rank: f"✗ {schedule.orders[rank][index]}" for rank, (index, _) in blocked.items()}
        rows.append([str(len(rows) - 1), *(stuck.get(rank, "·") for rank in range(schedule.ranks))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(chain(lines, (fill(str(problem), 100, break_on_hyphens=False) for problem in schedule.problems)))


def strip(schedule: Schedule) -> Schedule:
    """Return the schedule with compute actions only: no messages and no sharding.

    `Pipeline` then places messages of its own, as `lower` does.

    Raises:
        SettingError: `schedule` is not a Schedule.
    """
    require_schedule("strip", schedule)
    orders = tuple(tuple(action for action in order if action.computes) for order in schedule.orders)
    return replace(schedule, orders=orders)
