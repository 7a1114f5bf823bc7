"""For continuous integration: is a schedule legal for the transport that it runs on, and no worse than before?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from ppedu.core import Problem, Schedule, SettingError, check, hooks, lower, strip, suggest_placement
from ppedu.core.checking import TRANSPORTS
from ppedu.core.numeric import Number, pretty
from ppedu.core.schedule import require_schedule
from ppedu.core.validate import require_number, require_one_of
from ppedu.sim.simulation import simulate
from ppedu.sim.timeline import Timeline


class Rejection(NamedTuple):
    """A reason to reject a schedule. It concerns the order of a rank, or None.

    Attributes:
        kind: That of a `Problem`; empty if the schedule is legal, or only its placement is wrong.
    """

    rank: int | None
    text: str
    kind: str = ""


class Rejections(list[Rejection]):
    """The reasons to reject a schedule. A notebook draws where it waits or goes wrong."""

    def __init__(self, found: Iterable[Rejection], schedule: Schedule, transport: str, buffers: int | None):
        super().__init__(found)
        self.schedule, self.transport, self.buffers = schedule, transport, buffers

    def _repr_html_(self) -> str:
        drawn: str = hooks.call("draw problems", self.schedule, self.transport, self.buffers)
        return drawn or "".join(f"<p>{escape(each.text)}</p>" for each in self) or "<p>legal</p>"


def verify(
    schedule: Schedule,
    *,
    transport: str = "buffered",
    buffers: int | None = None,
    peak: Number | Sequence[Number] | None = None,
    baseline: Schedule | None = None,
) -> Rejections:
    """Return the reasons to reject a schedule; an empty list says that it may run.

    Args:
        transport: What blocks what, as in `check`. A schedule without messages gets those of `lower`.
        buffers: The number of buffers of each stage, as in `check`. In a schedule without messages, a microbatch fills
            its buffer at its forward.
        peak: The most activations that a rank may hold, as in `Timeline.peak_activations`: a number, or a list with one
            for each rank.
        baseline: An earlier version for as many ranks, stages and microbatches. No rank may hold more activations than
            in it, and a step may not take longer, if a backward takes two forwards.

    Raises:
        SettingError: An argument is not possible, or the baseline is for other sizes, or it is not legal.
    """
    require_schedule("verify", schedule)
    limits = None if peak is None else _limits(schedule, peak)
    _, problems = problems_of(schedule, transport, buffers)
    if suggestion := suggest_placement(schedule):
        found = [Rejection(None, suggestion)]
    elif problems:
        found = [Rejection(problem.rank, str(problem), problem.kind) for problem in problems]
    else:
        timeline = simulate(strip(schedule))
        found = [] if limits is None else list(_too_large(timeline, limits))
        found += [] if baseline is None else _worse(schedule, timeline, baseline)
    return Rejections(found, schedule, transport, buffers)


def problems_of(schedule: Schedule, transport: str, buffers: int | None = None) -> tuple[Schedule, Sequence[Problem]]:
    """Return the problems of a schedule on a transport, and the schedule that has them: it may need messages.

    Raises:
        SettingError: The transport is unknown, or `buffers` is not a whole number from 1 on.
    """
    require_one_of("transport", transport, TRANSPORTS)
    if transport == "buffered" or schedule.problems:
        return schedule, check(schedule, buffers=buffers)
    if schedule.lowered:
        return schedule, check(schedule, transport=transport, buffers=buffers)
    lowered = lower(strip(schedule))
    blocked = check(lowered, transport=transport)
    return (lowered, blocked) if blocked else (schedule, check(schedule, buffers=buffers))


def _limits(schedule: Schedule, peak: Any) -> list[Number]:
    limits = [*peak] if isinstance(peak, (list, tuple)) else [peak] * schedule.ranks
    if len(limits) != schedule.ranks:
        raise SettingError(f"peak has {len(limits)} numbers for {schedule.ranks} ranks; give one, or one for each rank")
    for limit in limits:
        require_number("peak", limit, lambda number: number >= 0, "activations of at least 0")
    return limits


def _too_large(timeline: Timeline, limits: Sequence[Number]) -> Iterator[Rejection]:
    for rank, (held, limit) in enumerate(zip(timeline.peak_activations, limits, strict=True)):
        if held > limit:
            text = f"rank {rank} holds {pretty(held)} activations at its peak; the limit is {pretty(limit)}"
            yield Rejection(rank, text)


def _worse(schedule: Schedule, timeline: Timeline, baseline: Schedule) -> Iterator[Rejection]:
    """Yield what is worse than in the baseline."""
    require_schedule("verify", baseline)
    for name in ("ranks", "stages", "microbatches"):
        ours, theirs = getattr(schedule, name), getattr(baseline, name)
        if ours != theirs:
            raise SettingError(f"the schedule has {ours} {name} and the baseline {theirs}; compare equal sizes")
    if problems := check(baseline):
        raise SettingError(f"the baseline is not legal: {problems[0]}")
    before = simulate(strip(baseline))
    for rank, (earlier, now) in enumerate(zip(before.peak_activations, timeline.peak_activations, strict=True)):
        if now > earlier:
            rise = f"from {pretty(earlier)} to {pretty(now)} activations"
            yield Rejection(rank, f"the peak of rank {rank} rose {rise}")
    if timeline.makespan > before.makespan:
        rise = f"{pretty(before.makespan)} to {pretty(timeline.makespan)} forwards"
        yield Rejection(None, f"a step takes longer: {rise}, if a backward takes two")
