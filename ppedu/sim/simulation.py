"""Simulation: every action starts as soon as its rank is free and its inputs have arrived."""

from __future__ import annotations

from functools import cache
from typing import Any

from ppedu.core import Schedule, ScheduleError, SettingError, require_schedule
from ppedu.core.garbage import without_gc
from ppedu.core.grid import earliest_times
from ppedu.core.streams import Streams, require_streamed
from ppedu.core.validate import require_count, require_instance, require_size
from ppedu.sim.clock import TickClock
from ppedu.sim.costs import Costs, require_costs
from ppedu.sim.rows import Row
from ppedu.sim.steps import divide, join, later, repeat, repeat_costs
from ppedu.sim.timeline import Timeline


@without_gc()
def simulate(schedule: Schedule, costs: Costs | None = None, *, steps: int = 1, barrier: bool = True) -> Timeline:
    """Return the timeline of a schedule at the given costs, by default `Costs()`.

    Messages and sharding actions take no time of their rank. A rank posts a receive and continues; the action that
    requires the message waits for it. With `Costs(transport=…)`, messages wait for each other; the spans of a SEND and
    its RECV are the time for which the message occupies its link.

    Args:
        steps: Training steps to run in a row. `Timeline.steps` holds their timelines, on one clock. The optimizer takes
            no time.
        barrier: Every rank waits at the end of a step until all have ended it. Without, a rank begins the next step
            when it has ended its own part (arXiv 2401.10241, section 4).

    Raises:
        ScheduleError: The schedule is not legal, or its ranks would wait forever because links are occupied.
        SettingError: The costs do not match the number of stages or microbatches, or lack a link. Links are occupied,
            and the schedule is not lowered. A stage is on two ranks, which add up their gradients at the end of a step,
            and `barrier` is False.
    """
    require_schedule("simulate", schedule)
    schedule.validate()
    costs = require_costs(costs)
    require_size(schedule.ranks, schedule.chunks, schedule.microbatches * require_count("steps", steps))
    require_instance("barrier", barrier, bool, "True or False")
    if not barrier and not schedule.placement.alone:
        raise SettingError(
            f"{schedule.name} has stages on two ranks, which wait for each other's gradients at the end of a step; "
            "simulate it with barrier=True"
        )
    if steps == 1:
        return simulate_partial(schedule, costs)
    costs = costs.tabulated(schedule.stages, schedule.microbatches)
    if barrier:
        one = simulate_partial(schedule, costs)
        return join([later(one, step * one.makespan) for step in range(steps)])
    whole = simulate_partial(repeat(schedule, steps), repeat_costs(costs, schedule, steps))
    return join([*divide(whole, schedule.one_by_one, costs)])


def simulate_partial(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of the actions that the ranks can run. The schedule may be incomplete or deadlock."""
    costs = costs.tabulated(schedule.stages, schedule.microbatches)
    clock = TickClock.of(schedule, costs)
    if costs.transport == "buffered":
        starts, ends = earliest_times(schedule.one_by_one, clock.durations(schedule.numbered), clock.delay)
    else:
        starts, ends = _occupied(schedule, clock, costs.transport)
    schedule = schedule.one_by_one  # each message of a batch has times of its own
    rows = tuple(
        Row(order[: len(end)], start, end, clock.ticks)
        for order, start, end in zip(schedule.orders, starts, ends, strict=True)
    )
    return Timeline(schedule, rows, costs)


def _occupied(schedule: Schedule, clock: TickClock, transport: str) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return when the actions of each rank start and end, in ticks, if messages occupy their links.

    Raises:
        ScheduleError: The schedule is not legal, or its ranks would wait for each other.
        SettingError: The schedule is not lowered.
    """
    require_streamed(schedule, transport)
    schedule.validate()
    transfer, delay = cache(clock.occupies), cache(clock.delay)  # there are few links
    run = Streams(schedule, transport, clock.durations(schedule.numbered), transfer, delay)
    if run.stuck:
        lines = "".join(f"\n  {problem}" for problem in run.stuck[:5])
        raise ScheduleError(f"{schedule!r} gets stuck with transport={transport!r}:{lines}", run.stuck)
    return run.starts, run.ends
