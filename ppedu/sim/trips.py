"""The messages of a simulation whose links are occupied: when each travels, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ppedu.core import COMMUNICATION, SEND, Action, Result
from ppedu.core.placement import other_end
from ppedu.core.streams import Stream, stream_of
from ppedu.sim.timeline import Timeline

Place = tuple[int, int]  # a rank, and the index of one of its compute spans


class Posting(NamedTuple):
    """When a rank posted a message, whether it sends it, and the compute span before, whose index may be -1."""

    time: Any
    sends: bool
    place: Place


class Trip(NamedTuple):
    """A message from one rank to another.

    Attributes:
        start, end: Of its transfer.
        arrival: The time from which its result exists on the receiver's rank.
        ends: By rank, its SEND or RECV.
        posted: By rank, its posting.
        before: By rank, the result that the message before it in the same stream carries, if there is one.
    """

    start: Any
    end: Any
    arrival: Any
    ends: dict[int, Action]
    posted: dict[int, Posting]
    before: dict[int, Result]


Trips = Mapping[Result, Trip]  # by the result that each carries: ("F", 2, 0) for 2SEND_F0 and 3RECV_F0


def trips_of(timeline: Timeline) -> Trips:
    """Return the messages of a timeline."""
    trips: dict[Result, Trip] = {}
    costs, placement = timeline.costs, timeline.schedule.placement
    for rank, row in enumerate(timeline.rows):
        last: dict[Stream, Result] = {}  # the last message in each of the rank's streams
        index, free = -1, timeline.start  # of the last compute span
        for action, start, end in row:
            if action.computes:
                index, free = index + 1, end
            if action.op in COMMUNICATION:
                sends = action.op in SEND
                message = action if sends else other_end(action)
                result = message.op[-1], message.stage, message.microbatch
                source, target = placement.route(message)
                new = Trip(start, end, start + costs.delay(source, target), {}, {}, {})
                trip = trips.setdefault(result, new)
                trip.ends[rank], trip.posted[rank] = action, Posting(free, sends, (rank, index))
                stream = stream_of(costs.links, rank, target if sends else source)
                if stream in last:
                    trip.before[rank] = last[stream]
                last[stream] = result
    return trips


def blocker(trips: Trips, result: Result) -> tuple[int, Result] | None:
    """Return the message that delayed the start of the message with this result, and in which rank's stream.

    None if it started as soon as both ranks had posted it.
    """
    trip = trips[result]
    posted = max(posting.time for posting in trip.posted.values())
    late = [(trips[each].end, rank, each) for rank, each in trip.before.items() if trips[each].end > posted]
    _, rank, before = max(late, key=lambda each: each[0], default=(None, 0, None))
    return (rank, before) if before else None


def origin(trips: Trips, result: Result) -> Place:
    """Return the compute span after which the message with this result could start."""
    while found := blocker(trips, result):
        _, result = found
    return max(trips[result].posted.values()).place
