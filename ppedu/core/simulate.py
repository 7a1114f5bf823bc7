"""How long does a schedule take? Every action starts as soon as its rank is free and its inputs have arrived."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ppedu.core.actions import RECEIVE
from ppedu.core.costs import Clock, Costs
from ppedu.core.dependencies import Result
from ppedu.core.errors import SettingError
from ppedu.core.garbage import without_gc
from ppedu.core.numeric import Number, plain
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.timeline import Span, Timeline


@without_gc
def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return the timeline of `schedule` when actions take `costs` and start as early as they can.

    Messages and sharding actions take no time. A receive is posted and the rank goes on; the action that needs the
    message waits for it.

    Raises:
        ScheduleError: the schedule is not legal.
        SettingError: `costs` do not fit the schedule's stages.
    """
    require_schedule("simulate", schedule)
    if costs is not None and not isinstance(costs, Costs):
        raise SettingError(f"simulate takes costs, such as Costs(forward=1, backward=2); got {costs!r}")
    schedule.validate()
    return simulate_partial(schedule, costs or Costs())


def simulate_partial(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of as much of a schedule as its ranks can run; it may be incomplete. See `simulate`."""
    clock = Clock.of(schedule, costs)
    scale = clock.scale
    free: list[Any] = [0] * schedule.ranks
    done: dict[Result, tuple[Any, int]] = {}
    rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    shown: dict[Any, Number] = {}  # ticks back to times; the same few times come again and again
    for rank, index, needs, gives in schedule.replay.steps:
        action = schedule.orders[rank][index]
        start = free[rank]
        if action.op in RECEIVE:  # the rank goes on; whatever needs the message will wait for it
            rows[rank].append(Span(action, shown.get(start, start), shown.get(start, start)))
            done[gives[0]] = done[needs[0]][0] + clock.latency, rank
            continue
        for need in needs:
            end, source = done[need]
            if source != rank:
                end += clock.latency
            if end > start:
                start = end
        end = free[rank] = start + clock.duration(action)
        for result in gives:
            done[result] = end, rank
        if scale > 1:
            for time in (start, end):
                if time not in shown:
                    shown[time] = plain(Fraction(time, scale))
            start, end = shown[start], shown[end]
        rows[rank].append(Span(action, start, end))
    return Timeline(schedule, tuple(map(tuple, rows)), costs)
