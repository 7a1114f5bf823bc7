"""Why a timeline takes as long as it does: critical path, reasons for idle time, causes of the bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from ppedu.core import COMMUNICATION, COMPUTE, COPIES, RECEIVE, SEND, TRAFFIC, WAITS, Action, Result, produces, requires
from ppedu.core.dependencies import awaited
from ppedu.core.garbage import without_gc
from ppedu.core.numeric import pretty, ratio
from ppedu.core.placement import other_end
from ppedu.core.streams import Stream, stream_of
from ppedu.sim.costs import TIMES, Costs
from ppedu.sim.reorder import reorder
from ppedu.sim.rows import Span
from ppedu.sim.simulation import simulate
from ppedu.sim.timeline import Gap, Timeline

Place = tuple[int, int]  # a rank, and the index of one of its compute spans; or ranks + rank, and that of a copy


class Posting(NamedTuple):
    """When a rank posted a message, whether it sends it, and the compute span before, whose index may be -1.

    If a wait came between, `after` is the result that the message it waited for carries.
    """

    time: Any
    sends: bool
    place: Place
    after: Result | None


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


class Reasons:
    """The compute spans and the copies of a timeline, and the earlier spans that each one waited for.

    A rank's copies to the host and back are a row of their own, because they run beside its computations.
    """

    @without_gc()
    def __init__(self, timeline: Timeline):
        self.timeline, self.placement = timeline, timeline.schedule.placement
        self.restored, self.ranks = timeline.schedule.restored, len(timeline.rows)
        self.behind: dict[Place, Place] = {}  # by copy, the compute span before it in the order
        self.rows = [[*row] for row in timeline.rows]
        ops = {action.op for row in self.rows for action, _, _ in row}
        if not ops <= COMPUTE:
            self.rows = [[span for span in row if span.action.computes] for row in self.rows]
        if ops & COPIES:
            self.rows += [[span for span in row if span.action.op in COPIES] for row in timeline.rows]
            self.behind = dict(self._copies())
        self.maker: dict[Result, Place] = {
            result: (rank, index)
            for rank, row in enumerate(self.rows)
            for index, (action, _, _) in enumerate(row)
            for result in produces(action)
        }
        occupied = timeline.source == "simulated" and timeline.costs.transport != "buffered"
        self.trips = trips_of(timeline) if occupied else {}
        rows = timeline.rows if ops & TRAFFIC else ()  # those with messages
        self.waits = dict(_waits(rows))
        self.sent = {  # by result, the time from which its message travels, which may be later than its end
            carried(action): end for row in rows for action, _, end in row if action.op in SEND
        }
        self.awaited = dict(self._barriers())  # by a rank's first span after a barrier: the last span before it

    def __getitem__(self, place: Place) -> Span:
        return self.rows[place[0]][place[1]]

    def waited_for(self, place: Place) -> Iterator[Place]:
        """Yield the span before `place` on its rank, and the spans that produced its inputs."""
        rank, index = place
        if index:
            yield rank, index - 1
        if place in self.behind:
            yield self.behind[place]
        yield from (self.maker[need] for need in self._needs(place) if need in self.maker)
        if place in self.awaited:
            yield self.awaited[place]

    def last_cause(self, place: Place) -> Place | None:
        """Return the span whose result arrived last, of all that a span waited for; None if it waited for none."""
        if sent := self._last_send(place):
            return origin(self.trips, sent)
        return max(self.waited_for(place), key=lambda cause: self._arrival(cause, place), default=None)

    def _arrival(self, cause: Place, place: Place) -> Any:
        """Return when the result of a span that `place` waited for arrived."""
        if not self._sends(cause, place):
            return self[cause].end
        if self.trips:
            return self._message(cause, place)[1].arrival
        sent = (self.sent.get(need, self[cause].end) for need in self._needs(place) if self.maker.get(need) == cause)
        return max(sent) + self.timeline.costs.delay(cause[0], place[0])

    def _needs(self, place: Place) -> tuple[Result, ...]:
        """Return the results that a span requires, and those that its rank waits for before it."""
        received = [message for message in map(awaited, self.waits.get(place, ())) if message.op in RECEIVE]
        return (*requires(self[place].action, self.placement, restored=self.restored), *map(carried, received))

    def _last_send(self, place: Place) -> Result | None:
        """Return the result in the message that a rank waits for at last before a span, if it sends this one."""
        waits = self.waits.get(place, ()) if self.trips else ()
        sent = [carried(message) for message in map(awaited, waits) if message.op in SEND]
        if not sent:
            return None
        last = max(sent, key=lambda result: self.trips[result].end)
        others = (self._arrival(cause, place) for cause in self.waited_for(place))
        return last if self.trips[last].end > max(others, default=self.timeline.start) else None

    def _sends(self, cause: Place, place: Place) -> bool:
        """Return whether a span waits for a message from its cause, and not for its own rank or a barrier."""
        return cause[0] % self.ranks != place[0] % self.ranks and cause != self.awaited.get(place)

    def _message(self, cause: Place, place: Place) -> tuple[Result, Trip]:
        """Return the result of `cause` that arrives last of those that `place`, on another rank, requires."""
        found = ((need, self.trips[need]) for need in self._needs(place) if self.maker.get(need) == cause)
        return max(found, key=lambda each: each[1].arrival)

    def critical_path(self) -> list[Place]:
        """Return the spans that determine the makespan, first to last."""
        last = [(rank, len(row) - 1) for rank, row in enumerate(self.rows) if row]
        place = max(last, key=lambda each: self[each].end, default=None)
        path: dict[Place, None] = {}
        while place and place not in path:  # in an illegal order, spans may wait for each other in a cycle
            path[place] = None
            place = self._decisive(place)
        return [*reversed(path)]

    def _decisive(self, place: Place) -> Place | None:
        """Return the span that determines when a span starts: its last cause, or what its message waits for."""
        cause = self.last_cause(place)
        if self.trips and cause is not None and self._sends(cause, place) and not self._last_send(place):
            return origin(self.trips, self._message(cause, place)[0])
        return cause

    def why_idle(self, rank: int, time: Any) -> str:
        """See `Timeline.why_idle`."""
        row, moment = self.rows[rank], self.timeline.start + time
        index = next((index for index, span in enumerate(row) if span.end > moment), len(row))
        if index < len(row) and row[index].start <= moment:
            action, start, end = row[index]
            return f"rank {rank} is not idle: it runs {action} at {self._clock(start, end)}"
        return self._why(rank, index)

    def gaps(self) -> Iterator[Gap]:
        """See `Timeline.gaps`."""
        for rank, row in enumerate(self.rows[: self.ranks]):
            free = self.timeline.start
            for index, (_, start, end) in enumerate(row):
                if start > free:
                    yield Gap(rank, free, start, self._why(rank, index))
                free = end
            if self.timeline.end > free:
                yield Gap(rank, free, self.timeline.end, self._why(rank, len(row)))

    def _why(self, rank: int, index: int) -> str:
        """Return why a rank is idle before its compute span number `index`, in a sentence."""
        row = self.rows[rank]
        before = row[index - 1].end if index else self.timeline.start
        if index == len(row):
            return f"rank {rank} has nothing left to do after {self._clock(before)}"
        action, start, _ = row[index]
        waits = f"rank {rank} waits {self._clock(before, start)}: {action}"
        cause = self.last_cause((rank, index))
        if sent := self._last_send((rank, index)):
            return f"{waits} comes after the wait for {self.trips[sent].ends[rank]}, which ends at {self._clock(start)}"
        if cause is None or cause[0] == rank:
            return f"{waits} could have started before"
        maker = self[cause]
        source = f"rank {cause[0]}" if cause[0] < self.ranks else "the copy engine"
        if self.awaited.get((rank, index)) == cause:
            return f"{waits} is of the next step, and rank {cause[0]} ends this one at {self._clock(maker.end)}"
        ends = f", which ends at {self._clock(maker.end)} on" if maker.end < start else " from"
        late = self._late(cause, (rank, index)) if self.trips and cause[0] < self.ranks else ""
        needs = "needs"
        if all(self.maker.get(need) != cause for need in requires(action, self.placement, restored=self.restored)):
            messages = map(awaited, self.waits[rank, index])
            message = next(each for each in messages if each.op in RECEIVE and self.maker.get(carried(each)) == cause)
            needs = f"comes after the wait for {message}, which needs"
        return f"{waits} {needs} {maker.action}{ends} {source}{late}"

    def _late(self, cause: Place, place: Place) -> str:
        """Return when the message from `cause` to `place` starts, and after which other one, if it has to wait."""
        result, trip = self._message(cause, place)
        if trip.start == self[cause].end:
            return ""
        after = ""
        if found := blocker(self.trips, result):
            rank, other = found
            after = f", after {self.trips[other].ends[rank]} of rank {rank}"
        return f"; its message starts at {self._clock(trip.start)}{after}"

    def _copies(self) -> Iterator[tuple[Place, Place]]:
        """Yield each copy with the compute span before it in the order, if there is one."""
        for rank, row in enumerate(self.timeline.rows):
            last = copies = 0
            for action, _, _ in row:
                last += action.computes
                if action.op in COPIES:
                    if last:
                        yield (rank + self.ranks, copies), (rank, last - 1)
                    copies += 1

    def _barriers(self) -> Iterator[tuple[Place, Place]]:
        """Yield the first span of each rank in a step that began when all ranks had ended the step before.

        Each comes with the last span of the step before.
        """
        first = [0] * len(self.rows)  # by rank, the index of its first span in a step
        for before, after in pairwise(self.timeline.steps):
            for rank, row in enumerate(before.rows):
                first[rank] += sum(span.action.computes for span in row)
            if before.end <= after.start:
                ended = [(rank, index - 1) for rank, index in enumerate(first)]
                last = max(ended, key=lambda place: self[place].end)
                for rank, index in enumerate(first):
                    yield (rank, index), last

    def _clock(self, *times: Any) -> str:
        """Return times, counted from the timeline's start, as human-readable text: 3–5, or 3–5 ms."""
        factor, unit = self.timeline.readable
        return f"{'–'.join(pretty((each - self.timeline.start) * factor) for each in times)} {unit}".rstrip()


def _waits(rows: Sequence[Sequence[Span]]) -> Iterator[tuple[Place, list[Action]]]:
    """Yield the waits between a rank's compute spans, each time with the span after them."""
    for rank, row in enumerate(rows):
        index, waits = 0, list[Action]()
        for action, _, _ in row:
            if action.op in WAITS:
                waits.append(action)
            elif action.computes:
                if waits:
                    yield (rank, index), waits
                index, waits = index + 1, []


def causes(timeline: Timeline) -> dict[str, float]:
    """See `Timeline.causes`."""
    if any(before.end <= after.start for before, after in pairwise(timeline.steps)):  # a barrier between two steps
        return _mean_causes(timeline)
    timeline.schedule.validate()
    schedule, makespan = timeline.schedule, timeline.makespan
    costs = timeline.costs if timeline.source == "simulated" else Costs.fit(timeline)
    costs = costs.tabulated(schedule.stages, schedule.microbatches)
    at_once = replace(costs, latency=0, transfer=0, transport="buffered")
    # Each stage takes its mean over microbatches, or over slices; one number would be of a whole sequence.
    steady = _averaged(at_once, lambda cost: tuple(_mean(time, schedule.slices) for time in cost))
    steady = replace(steady, attention=0, lengths=())
    even = _averaged(steady, lambda cost: (_mean(cost),) * len(cost))  # and the mean over stages
    unchanged = at_once == timeline.costs and timeline.source == "simulated"
    varied_run = timeline if unchanged else simulate(schedule, at_once)
    steady_run = varied_run if steady == at_once else simulate(schedule, steady)
    even_run = steady_run if even == steady else simulate(schedule, even)
    runs = reorder(even_run), even_run, steady_run, varied_run
    best, even_idle, steady_idle, varied_idle = (run.makespan - ratio(sum(run.busy), schedule.ranks) for run in runs)
    times = {"warm-up and cooldown": best, "ordering": even_idle - best, "imbalance": steady_idle - even_idle}
    if _vary_by_microbatch(at_once) or ((at_once.attention or at_once.lengths) and schedule.slices > 1):
        times["variation"] = varied_idle - steady_idle
    shares = {cause: float(ratio(time, makespan)) if makespan else 0.0 for cause, time in times.items()}
    return {**shares, "communication": timeline.bubble - sum(shares.values())}


def _mean_causes(timeline: Timeline) -> dict[str, float]:
    """Return the causes of the bubble in steps that do not overlap."""
    total = timeline.makespan or 1  # without it, there are no shares to weight
    found = [(causes(step), float(ratio(step.makespan, total))) for step in timeline.steps]
    first, _ = found[0]
    shares = {cause: sum(each[cause] * part for each, part in found) for cause in first if cause != "communication"}
    return {**shares, "communication": timeline.bubble - sum(shares.values())}


def _averaged(costs: Costs, average: Callable[[Any], Any]) -> Costs:
    """Return costs with `average` applied to each sequence of times."""
    return replace(costs, **{name: average(cost) for name, cost in _sequences(costs).items()})


def _sequences(costs: Costs) -> dict[str, Any]:
    """Return the times that are sequences."""
    return {name: cost for name in TIMES if isinstance(cost := getattr(costs, name), tuple)}


def _vary_by_microbatch(costs: Costs) -> bool:
    """Return whether a stage takes different times for different microbatches."""
    for cost in _sequences(costs).values():
        for stage in cost:
            if isinstance(stage, tuple) and len(set(stage)) > 1:
                return True
    return False


def _mean(time: Any, slices: int = 1) -> Any:
    """Return the mean of a tuple times the slices of a sequence, any other value unchanged."""
    return ratio(sum(time) * slices, len(time)) if isinstance(time, tuple) else time


# --- messages that occupy their links ---------------------------------------------------------------------------------


def trips_of(timeline: Timeline) -> Trips:
    """Return the messages of a timeline."""
    trips: dict[Result, Trip] = {}
    costs, placement = timeline.costs, timeline.schedule.placement
    for rank, row in enumerate(timeline.rows):
        last: dict[Stream, Result] = {}  # the last message in each of the rank's streams
        index, free, after = -1, timeline.start, None  # of the last compute span so far: its index, and its end
        for action, start, end in row:
            if action.computes:
                index, free, after = index + 1, end, None
            if action.op in WAITS and end > free:
                free, after = end, carried(awaited(action))
            if action.op in COMMUNICATION:
                sends, result = action.op in SEND, carried(action)
                source, target = placement.route(action)
                new = Trip(start, end, start + costs.delay(source, target), {}, {}, {})
                trip = trips.setdefault(result, new)
                trip.ends[rank], trip.posted[rank] = action, Posting(free, sends, (rank, index), after)
                stream = stream_of(costs.transport, rank, target if sends else source, sends)
                if stream in last:
                    trip.before[rank] = last[stream]
                last[stream] = result
    return trips


def carried(message: Action) -> Result:
    """Return the result that a SEND or RECV carries: ("F", 2, 0) for 2SEND_F0 and 3RECV_F0."""
    stage, op, microbatch, _ = message if message.op in SEND else other_end(message)
    return op[-1], stage, microbatch


def blocker(trips: Trips, result: Result) -> tuple[int, Result] | None:
    """Return the message that delayed the start of the message with this result, and in which rank's stream.

    None if it started as soon as both ranks had posted it.
    """
    trip = trips[result]
    posted = max(posting.time for posting in trip.posted.values())
    if trip.start == posted:
        return None
    for rank, before in trip.before.items():
        earlier: Result | None = before
        while earlier is not None:  # the messages of a batch travel side by side, and any may be the last
            if trips[earlier].end == trip.start:
                return rank, earlier
            earlier = trips[earlier].before.get(rank) if trips[earlier].end > posted else None
    return None


def origin(trips: Trips, result: Result) -> Place:
    """Return the compute span after which the message with this result could start."""
    seen: set[Result] = set()
    while result not in seen:  # messages that take no time may seem to wait for each other
        seen.add(result)
        posting = max(trips[result].posted.values(), key=lambda each: each[:3])
        if found := blocker(trips, result):
            _, result = found
        elif posting.after:
            result = posting.after
    return posting.place
