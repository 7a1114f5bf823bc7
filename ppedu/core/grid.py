"""The earliest times of all actions, and the lockstep grid, in which every action takes one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from textwrap import fill
from typing import Any

from ppedu.core.actions import COPIES, RECEIVE, WAITS, Action
from ppedu.core.schedule import Schedule, require_compute, require_schedule

Grid = tuple[tuple[Action | None, ...], ...]


def align(schedule: Schedule) -> Grid:
    """Return the lockstep grid: `grid[rank][step]` is an action, or None where the rank is idle. Rows are equally long.

    Every action takes one step, an overlapped pair too, and starts as early as it can. Copies to the host and back run
    beside them and are not shown. If ranks get stuck, the grid ends there.

    Raises:
        SettingError: The schedule is lowered; `strip` it.
    """
    require_compute("align", schedule)
    numbered = schedule.numbered
    durations = [1] * (len(numbered.blocks) * numbered.microbatches)
    starts, ends = earliest_times(schedule, durations, delay=lambda *_: 0)
    width = max(chain(*ends), default=0)
    grid: list[list[Action | None]] = [[None] * width for _ in schedule.orders]
    for row, order, steps in zip(grid, schedule.orders, starts, strict=True):
        for action, step in zip(order, steps, strict=False):  # a rank that gets stuck has no further steps
            if action.op not in COPIES:
                row[step] = action
    return tuple(map(tuple, grid))


def earliest_times(
    schedule: Schedule, durations: Sequence[Any], delay: Callable[[int, int], Any]
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return when the actions of each rank start and end, if each starts as soon as its rank and its inputs allow.

    Messages do not wait for each other. Copies to the host and back do, of one rank: its copy engine runs them one by
    one, each after the computations before it in the order, and beside those behind it. If ranks get stuck, the times
    end there.

    Args:
        durations: The time of each action, by its entry in `Numbered.orders`.
        delay: The time of a message from one rank to another.
    """
    numbered = schedule.numbered
    late = numbered.lowered or numbered.restored  # whether a rank's own results may come later than it is free
    rules = []  # by block: its inputs, each with the time of its message; its results; what it is if its rank goes on
    for block in numbered.blocks:
        links = zip(block.requires, block.links, strict=True)
        inputs = [(distance, delay(*link) if link else 0) for distance, link in links if link or late]
        beside = RECEIVE if block.sample.op in RECEIVE else COPIES if block.sample.op in COPIES else None
        rules.append((inputs, block.produces, beside))
    exists: list[Any] = [0] * numbered.total  # by number: the time from which a result exists
    free: list[Any] = [0] * schedule.ranks
    copied: list[Any] = [0] * schedule.ranks  # the time from which a rank's copy engine is free
    starts: list[list[Any]] = [[] for _ in free]
    ends: list[list[Any]] = [[] for _ in free]
    for rank, entry in zip(schedule.replay.turns, schedule.replay.entries, strict=True):
        inputs, outputs, beside = rules[entry // numbered.microbatches]
        start = free[rank]
        for distance, lag in inputs:
            arrival = exists[entry + distance] + lag
            if arrival > start:
                start = arrival
        if beside is COPIES and copied[rank] > start:
            start = copied[rank]
        end = start + durations[entry]
        for distance in outputs:
            exists[entry + distance] = end
        if not beside:
            free[rank] = end
        elif beside is COPIES:
            copied[rank] = end
        else:  # the message is here at `end`, as noted in `exists`; the rank only posts it, and goes on
            start = end = free[rank]
        starts[rank].append(start)
        ends[rank].append(end)
    return starts, ends


def table(schedule: Schedule) -> str:
    """Return the lockstep grid of `align` as text: a line for each slot, a column for each rank, a dot for idle.

    If ranks get stuck, a last line marks the action at which each one does with ✗. The problems of an illegal schedule
    follow, in lines of at most 100 characters.

    Raises:
        SettingError: `schedule` is not a Schedule, or it is lowered.
    """
    grid = align(schedule)
    rows = [["slot", *(f"rank {rank}" for rank in range(schedule.ranks))]]
    for slot, actions in enumerate(zip(*grid, strict=True)):
        rows.append([str(slot), *(str(action or "·") for action in actions)])
    if blocked := schedule.replay.blocked:
        stuck = {rank: f"✗ {schedule.orders[rank][index]}" for rank, (index, _) in blocked.items()}
        rows.append([str(len(rows) - 1), *(stuck.get(rank, "·") for rank in range(schedule.ranks))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [fill(str(problem), 100, break_on_hyphens=False) for problem in schedule.problems]
    return "\n".join(lines)


def without_waits(schedule: Schedule) -> Schedule:
    """Return the schedule with its messages one by one, and none of its waits.

    `Pipeline` runs it so: it posts a message where the order does, and waits where the message is used.
    """
    orders = tuple(tuple(each for each in order if each.op not in WAITS) for order in schedule.one_by_one.orders)
    return schedule if orders == schedule.orders else replace(schedule, orders=orders)


def strip(schedule: Schedule) -> Schedule:
    """Return the schedule with computations and copies only: no messages and no sharding.

    `Pipeline` then places messages of its own, as `lower` does.

    Raises:
        SettingError: `schedule` is not a Schedule.
    """
    require_schedule("strip", schedule)
    orders = tuple(tuple(each for each in order if each.computes or each.op in COPIES) for order in schedule.orders)
    return replace(schedule, orders=orders)
