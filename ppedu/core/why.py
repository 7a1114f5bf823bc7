"""Why a timeline takes as long as it does: critical path, reasons for idle time, causes of the bubble."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ppedu.core.costs import Costs
from ppedu.core.dependencies import Result, produces, requires
from ppedu.core.numeric import pretty, ratio
from ppedu.core.reorder import reorder
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Gap, Span, Timeline

if TYPE_CHECKING:
    from ppedu.core.costs import Cost

Place = tuple[int, int]  # a rank, and the index of one of its compute spans


class Reasons:
    """The compute spans of a timeline, and the earlier spans that each one waited for."""

    def __init__(self, timeline: Timeline):
        self.timeline, self.placement = timeline, timeline.schedule.placement
        self.rows = [[span for span in row if span.action.computes] for row in timeline.rows]
        self.maker: dict[Result, Place] = {
            result: (rank, index)
            for rank, row in enumerate(self.rows)
            for index, span in enumerate(row)
            for result in produces(span.action)
        }

    def __getitem__(self, place: Place) -> Span:
        return self.rows[place[0]][place[1]]

    def waited_for(self, place: Place) -> Iterator[Place]:
        """Yield the span before `place` on its rank, and the spans that produced its inputs."""
        rank, index = place
        if index:
            yield rank, index - 1
        yield from (self.maker[need] for need in requires(self[place].action, self.placement) if need in self.maker)

    def last_cause(self, place: Place) -> Place | None:
        """Return the span whose result arrived last, of all that a span waited for; None if it waited for none."""

        def arrives(cause: Place) -> Any:
            return self[cause].end + (self.timeline.costs.latency if cause[0] != place[0] else 0)

        return max(self.waited_for(place), key=arrives, default=None)

    def critical_path(self) -> list[Place]:
        """Return the spans that determine the makespan, first to last."""
        last = [(rank, len(row) - 1) for rank, row in enumerate(self.rows) if row]
        place = max(last, key=lambda each: self[each].end, default=None)
        path: dict[Place, None] = {}
        while place and place not in path:  # in an illegal order, spans may wait for each other in a cycle
            path[place] = None
            place = self.last_cause(place)
        return [*reversed(path)]

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
        end = self.timeline.end
        for rank, row in enumerate(self.rows):
            before = self.timeline.start
            for index, (start, after) in enumerate([*((span.start, span.end) for span in row), (end, end)]):
                if start > before:
                    yield Gap(rank, before, start, self._why(rank, index))
                before = after

    def _why(self, rank: int, index: int) -> str:
        """Return why a rank is idle before its compute span number `index`, in a sentence."""
        row = self.rows[rank]
        before = row[index - 1].end if index else self.timeline.start
        if index == len(row):
            return f"rank {rank} has nothing left to do after {self._clock(before)}"
        action, start, _ = row[index]
        waits = f"rank {rank} waits {self._clock(before, start)}: {action}"
        cause = self.last_cause((rank, index))
        if cause is None or cause[0] == rank:
            return f"{waits} could have started before"
        maker = self[cause]
        ends = f", which ends at {self._clock(maker.end)}" if maker.end < start else ""
        return f"{waits} needs {maker.action} from rank {cause[0]}{ends}"

    def _clock(self, *times: Any) -> str:
        """Return times, counted from the timeline's start, as human-readable text: 3–5, or 3–5 ms."""
        factor, unit = self.timeline.readable
        return f"{'–'.join(pretty((each - self.timeline.start) * factor) for each in times)} {unit}".rstrip()


def causes(timeline: Timeline) -> dict[str, float]:
    """See `Timeline.causes`."""
    timeline.schedule.validate()
    schedule, makespan = timeline.schedule, timeline.makespan
    costs = timeline.costs if timeline.source == "simulated" else Costs.fit(timeline)
    at_once = replace(costs, latency=0)
    names = ("forward", "backward", "input", "weight", "overlap")
    means: dict[str, Any] = {name: _even(getattr(at_once, name)) for name in names}
    even = replace(at_once, **means)
    uneven_run = timeline if at_once == timeline.costs and costs is timeline.costs else simulate(schedule, at_once)
    even_run = uneven_run if even == at_once else simulate(schedule, even)
    reordered = reorder(even_run).makespan
    steps = {
        "warm-up and cooldown": reordered - ratio(sum(even_run.busy), schedule.ranks),
        "ordering": even_run.makespan - reordered,
        "imbalance": uneven_run.makespan - even_run.makespan,
    }
    shares = {cause: float(ratio(time, makespan)) if makespan else 0.0 for cause, time in steps.items()}
    return {**shares, "communication": timeline.bubble - sum(shares.values())}


def _even(cost: Cost | None) -> Cost | None:
    """Return a cost that is the same for all stages and has the same sum."""
    return (ratio(sum(cost), len(cost)),) * len(cost) if isinstance(cost, tuple) else cost
