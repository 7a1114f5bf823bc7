"""Simulation: every action starts as soon as its rank is free and its inputs have arrived."""

from __future__ import annotations

from typing import Any

from ppedu.core.actions import RECEIVE
from ppedu.core.costs import Clock, Costs, require_costs
from ppedu.core.garbage import without_gc
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.timeline import Row, Timeline


@without_gc()
def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return the timeline of a schedule at the given costs, by default `Costs()`.

    Messages and sharding actions take no time. A rank posts a receive and continues; the action that requires the
    message waits for it.

    Raises:
        ScheduleError: The schedule is not legal.
        SettingError: The costs do not match the number of stages.
    """
    require_schedule("simulate", schedule)
    schedule.validate()
    return simulate_partial(schedule, require_costs(costs))


def simulate_partial(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of the actions that the ranks can run. The schedule may be incomplete or deadlock."""
    numbered, size = schedule.numbered, schedule.microbatches
    clock = Clock.of(schedule, costs)
    durations = [clock.duration(block.sample) for block in numbered.blocks]
    receives = {index for index, block in enumerate(numbered.blocks) if block.sample.op in RECEIVE}
    produces = [block.produces for block in numbered.blocks]
    latencies = {True: clock.latency, False: 0}  # from another rank, or not
    inputs = [
        [(distance, latencies[remote]) for distance, remote in zip(block.requires, block.remote, strict=True)]
        for block in numbered.blocks
    ]
    exists: list[Any] = [0] * numbered.total  # by number: the time from which a result exists
    free: list[Any] = [0] * schedule.ranks
    starts: list[list[Any]] = [[] for _ in free]
    ends: list[list[Any]] = [[] for _ in free]
    remaining = [iter(entries) for entries in numbered.orders]
    for rank in schedule.replay.turns:
        entry = next(remaining[rank])
        block = entry // size
        start = free[rank]
        for distance, latency in inputs[block]:
            arrival = exists[entry + distance] + latency
            if arrival > start:
                start = arrival
        end = start + durations[block]
        for distance in produces[block]:
            exists[entry + distance] = end
        if block in receives:  # the rank continues; the action that requires the message waits
            start = end = free[rank]
        free[rank] = end
        starts[rank].append(start)
        ends[rank].append(end)
    rows = tuple(
        Row(order[: len(end)], start, end, clock.ticks)
        for order, start, end in zip(schedule.orders, starts, ends, strict=True)
    )
    return Timeline(schedule, rows, costs)
