"""The times of messages that occupy their links; `ppedu.core.streams` has the rules.

A message occupies both of its streams for the transfer time; its latency later, it has arrived. The order of each
stream is known from the schedule, so the times do not depend on which message starts first.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

from ppedu.core import Schedule, ScheduleError
from ppedu.core.streams import Posted, Ran, Stream, Streams, require_links
from ppedu.sim.clock import TickClock


def occupied(schedule: Schedule, clock: TickClock, links: str) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return when the actions of each rank start and end, in ticks. For a SEND or a RECV that is the transfer.

    Raises:
        ScheduleError: The schedule is not legal, or its ranks would wait for each other.
        SettingError: The schedule is not lowered.
    """
    require_links(schedule, links)
    schedule.validate()
    run = Streams(schedule, links)
    if stuck := tuple(run.problems()):
        lines = "".join(f"\n  {problem}" for problem in stuck[:5])
        raise ScheduleError(f"{schedule!r} gets stuck with links={links!r}:{lines}", stuck)
    numbered, size = schedule.numbered, schedule.microbatches
    transfer, delay = cache(clock.occupies), cache(clock.delay)  # there are few links
    starts: list[list[Any]] = [[0] * len(order) for order in schedule.orders]
    ends: list[list[Any]] = [[0] * len(order) for order in schedule.orders]
    free: list[Any] = [0] * schedule.ranks  # the time from which a rank is free
    exists: list[Any] = [0] * numbered.total  # by number: the time from which a result exists
    posted: defaultdict[int, Any] = defaultdict(int)  # by message: when the later of its ranks has posted it
    idle: defaultdict[Stream, Any] = defaultdict(int)  # the time from which a stream carries no message
    for event in run.events:
        if isinstance(event, Ran):
            rank, index = event
            entry = numbered.orders[rank][index]
            block = numbered.blocks[entry // size]
            start = max([free[rank], *(exists[entry + distance] for distance in block.requires)])
            end = free[rank] = start + clock.duration(schedule.orders[rank][index])
            starts[rank][index], ends[rank][index] = start, end
            for distance in block.produces:
                exists[entry + distance] = end
        elif isinstance(event, Posted):
            posted[event.message] = max(posted[event.message], free[event.rank])
        else:
            message = event.message
            route, streams = run.routes[message], run.streams(message)
            start = max([posted[message], *(idle[stream] for stream in streams)])
            for rank, index in run.posted[message].items():
                starts[rank][index], ends[rank][index] = start, start + transfer(*route)
            for stream in streams:
                idle[stream] = start + transfer(*route)
            exists[run.other_end(message)] = start + delay(*route)
    return starts, ends
