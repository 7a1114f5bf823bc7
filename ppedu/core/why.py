"""Why a timeline is as long as it is: its critical path, the reason of a gap, and what the bubble is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from numbers import Real
from typing import TYPE_CHECKING, Any

from ppedu.core.actions import Op
from ppedu.core.check import Result, gives, needs
from ppedu.core.errors import SettingError
from ppedu.core.simulate import Costs, simulate
from ppedu.core.timeline import Span, Timeline, ratio, show

if TYPE_CHECKING:
    from ppedu.core.simulate import Cost

Place = tuple[int, int]  # a rank, and which of its compute spans


class Reasons:
    """The compute spans of a timeline, and which of them each one has waited for."""

    def __init__(self, timeline: Timeline):
        self.placement = timeline.schedule.placement
        self.rows = [[span for span in row if span.action.computes] for row in timeline.rows]
        self.maker: dict[Result, Place] = {
            result: (rank, index)
            for rank, row in enumerate(self.rows)
            for index, span in enumerate(row)
            for result in gives(span.action)
        }

    def __getitem__(self, place: Place) -> Span:
        return self.rows[place[0]][place[1]]

    def waited_for(self, place: Place) -> Iterator[Place]:
        """The span before it on its rank, and those that made what it needs."""
        rank, index = place
        if index:
            yield rank, index - 1
        yield from (self.maker[need] for need in needs(self[place].action, self.placement) if need in self.maker)

    def last_cause(self, place: Place, latency: Any) -> Place | None:
        """Of what a span has waited for, the one that let it wait longest; None if it has waited for nothing."""

        def arrives(cause: Place) -> Any:
            return self[cause].end + (latency if cause[0] != place[0] else 0)

        return max(self.waited_for(place), key=arrives, default=None)


def critical_path(timeline: Timeline) -> list[tuple[int, Span]]:
    """See `Timeline.critical_path`."""
    reasons = Reasons(timeline)
    last = [(rank, len(row) - 1) for rank, row in enumerate(reasons.rows) if row]
    place = max(last, key=lambda each: reasons[each].end, default=None)
    path: dict[Place, Span] = {}
    while place and place not in path:  # the spans of an illegal order may wait for each other in a ring
        path[place] = reasons[place]
        place = reasons.last_cause(place, timeline.costs.latency)
    return [(rank, span) for (rank, _), span in reversed(path.items())]


def why_idle(timeline: Timeline, rank: int, time: Any) -> str:
    """See `Timeline.why_idle`."""
    if isinstance(time, bool) or not isinstance(time, Real) or not float(time) >= 0:
        raise SettingError(f"time must be a number of at least 0; got {time!r}")
    reasons = Reasons(timeline)
    row, zero = reasons.rows[rank], timeline.start
    factor, unit = (1000, "ms") if timeline.costs.unit == "s" and timeline.makespan < 1 else (1, timeline.costs.unit)

    def clock(*times: Any) -> str:
        return f"{'–'.join(show((each - zero) * factor) for each in times)} {unit}".rstrip()

    index = next((index for index, span in enumerate(row) if span.end > zero + time), None)
    if index is None:
        return f"rank {rank} has nothing left to do after {clock(row[-1].end if row else zero)}"
    action, start, end = row[index]
    if start <= zero + time:
        return f"rank {rank} is not idle: it runs {action} at {clock(start, end)}"
    waits = f"rank {rank} waits {clock(row[index - 1].end if index else zero, start)}: {action}"
    cause = reasons.last_cause((rank, index), timeline.costs.latency)
    if cause is None or cause[0] == rank:
        return f"{waits} could have started before"
    maker = reasons[cause]
    ends = f", which ends at {clock(maker.end)}" if maker.end < start else ""
    return f"{waits} needs {maker.action} from rank {cause[0]}{ends}"


def causes(timeline: Timeline) -> dict[str, float]:
    """See `Timeline.causes`."""
    schedule, makespan = timeline.schedule, timeline.makespan
    costs = timeline.costs if timeline.source == "simulated" else Costs.fit(timeline)
    at_once = replace(costs, latency=0)
    names = ("forward", "backward", "input", "weight", "overlap")
    means: dict[str, Any] = {name: _even(getattr(at_once, name)) for name in names}
    even = replace(at_once, **means)
    uneven_time, even_run = simulate(schedule, at_once).makespan, simulate(schedule, even)
    shortest = min(_shortest(even_run), even_run.makespan)
    steps = {
        "warm-up and drain": shortest - ratio(sum(even_run.busy), schedule.ranks),
        "ordering": even_run.makespan - shortest,
        "imbalance": uneven_time - even_run.makespan,
    }
    shares = {cause: float(ratio(time, makespan)) if makespan else 0.0 for cause, time in steps.items()}
    return {**shares, "communication": timeline.bubble - sum(shares.values())}


def _even(cost: Cost | None) -> Cost | None:
    """The same cost for every stage, as much in all."""
    return [ratio(sum(cost), len(cost))] * len(cost) if isinstance(cost, Sequence) else cost


def _shortest(timeline: Timeline) -> Any:
    """No order of a rank's actions is faster: its first microbatch must reach it, its last gradient must go back.

    A weight backward can be the last of all, so with one nothing has to follow; and where any backward is split, a
    gradient may go back by halves.
    """
    schedule = timeline.schedule
    times = timeline.costs.durations(schedule.stages, schedule.ranks)
    halves = any(part.op == Op.W for order in schedule.orders for action in order for part in action.singles)
    lead, drain = ([0, *accumulate(times[op])] for op in (Op.F, Op.I if halves else Op.B))
    bounds = []
    for rank, busy in enumerate(timeline.busy):
        first = min(schedule.placement.stages_of(rank))
        weights = any(single.op == Op.W for action in schedule.orders[rank] for single in action.singles)
        bounds.append(lead[first] + busy + (0 if weights else drain[first]))
    return max(bounds)
