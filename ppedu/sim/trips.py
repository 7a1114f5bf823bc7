"""The messages of a simulation whose links are occupied: when each travels, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ppedu.core import COMMUNICATION, RECEIVE, SEND, TOWARDS, Action, Result
from ppedu.core.streams import Stream, stream_of
from ppedu.sim.timeline import Span, Timeline


class Trip(NamedTuple):
    """A message from one rank to another.

    start, end: Of its transfer.
    arrival: The time from which its result exists on the receiver's rank.
    ends: By rank, its SEND or RECV.
    posted: By rank, how many actions the rank has computed when it posts the message.
    before: By rank, the result that the message before it in the same stream carries, if there is one.
    """

    start: Any
    end: Any
    arrival: Any
    ends: dict[int, Action]
    posted: dict[int, int]
    before: dict[int, Result]


class Trips:
    """The messages of a timeline, by the result that each carries: ("F", 2, 0) for 2SEND_F0 and 3RECV_F0.

    computed: `computed[rank]` are the rank's compute spans.
    """

    def __init__(self, timeline: Timeline, computed: Sequence[Sequence[Span]]):
        self.start, self.computed = timeline.start, computed
        self.trips: dict[Result, Trip] = {}
        costs, placement = timeline.costs, timeline.schedule.placement
        for rank, row in enumerate(timeline.rows):
            posted, last = 0, dict[Stream, Result]()  # the last message in each of the rank's streams
            for action, start, end in row:
                posted += action.computes
                if action.op in COMMUNICATION:
                    route = placement.route(action)
                    result = _carried(action)
                    stream = stream_of(costs.links, rank, sum(route) - rank)
                    new = Trip(start, end, start + costs.delay(*route), {}, {}, {})
                    trip = self.trips.setdefault(result, new)
                    trip.ends[rank], trip.posted[rank] = action, posted
                    if stream in last:
                        trip.before[rank] = last[stream]
                    last[stream] = result

    def __getitem__(self, result: Result) -> Trip:
        return self.trips[result]

    def blocker(self, result: Result) -> tuple[int, Result] | None:
        """Return the message that delayed the start of the message with this result, and in which rank's stream.

        None if it started as soon as both ranks had posted it.
        """
        trip = self.trips[result]
        ends = [(self.trips[each].end, rank, each) for rank, each in trip.before.items()]
        end, rank, before = max(ends, key=lambda each: each[0], default=(None, 0, result))
        posted = max(self._posting(trip, rank)[0] for rank in trip.posted)
        return (rank, before) if end is not None and end > posted else None

    def origin(self, result: Result) -> tuple[int, int]:
        """Return the compute span after which the message with this result could start: its rank and index."""
        while blocker := self.blocker(result):
            _, result = blocker
        trip = self.trips[result]
        _, _, place = max(self._posting(trip, rank) for rank in trip.posted)
        return place

    def _posting(self, trip: Trip, rank: int) -> tuple[Any, bool, tuple[int, int]]:
        """Return when a rank posted a message, whether it sends it, and the place of the compute span before."""
        count = trip.posted[rank]
        time = self.computed[rank][count - 1].end if count else self.start
        return time, trip.ends[rank].op in SEND, (rank, count - 1)


def _carried(action: Action) -> Result:
    """Return the result that a SEND or RECV carries."""
    stage = action.stage + TOWARDS[action.op] if action.op in RECEIVE else action.stage
    return action.op[-1], stage, action.microbatch
