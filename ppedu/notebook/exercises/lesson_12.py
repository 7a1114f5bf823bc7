"""Lesson 12: a schedule of one's own, faster than every built-in one that fits in the memory."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

from ppedu.core.actions import I, Op
from ppedu.core.costs import Costs
from ppedu.core.errors import SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Timeline
from ppedu.notebook.exercises.common import Exercise, learners, listed, not_legal, require_function, with_sizes
from ppedu.zoo import schedule
from ppedu.zoo.registry import published

COSTS = Costs(forward=1, backward=2, latency=0.25)

# Ranks and microbatches, at least twice as many; the lesson's own case first.
SIZES = [(4, 8), (3, 7), (6, 12), (5, 16), (8, 20)]


def _not_better(generator: Any) -> str | None:
    require_function(generator, "rank", "ranks", "microbatches")
    for ranks, microbatches in SIZES:
        case, room = with_sizes(ranks, microbatches), ranks + ranks // 2
        yours = learners(generator, ranks, microbatches)
        if fault := not_legal(yours, case):
            return fault
        timeline = simulate(yours, COSTS)
        if max(timeline.peak_activations) > room:
            return f"{case} it is legal, but {_too_much(timeline, room)}"
        par = _fastest_known(ranks, microbatches, room)
        if timeline.makespan >= par.makespan:
            return f"{case} it is legal and fits, but {_slower(timeline, par)}. {_advice(timeline, room)}"
    return None


@cache
def _fastest_known(ranks: int, microbatches: int, room: int) -> Timeline:
    """Of those with one copy of the model that hold no more than `room` activations on any rank."""
    fitting = []
    for name in published():
        try:
            timeline = simulate(schedule(name, ranks, microbatches), COSTS)
        except SettingError:  # it does not exist in this size
            continue
        if timeline.schedule.placement.copies == 1 and max(timeline.peak_activations) <= room:
            fitting.append(timeline)
    return min(fitting, key=lambda timeline: timeline.makespan)


def _too_much(timeline: Timeline, room: int) -> str:
    """The first action that does not fit, and what could have made room for it."""
    time, held, rank = min(
        (time, held, rank)
        for rank in range(timeline.schedule.ranks)
        for time, held in timeline.memory(rank)
        if held > room
    )
    before = [span.action.op for span in timeline.spans(rank) if span.start < time]
    action = next(span.action for span in timeline.spans(rank) if span.start == time)
    fault = f"rank {rank} holds {pretty(held)} microbatches from {pretty(time)} on, when it starts {action}"
    waiting = before.count(Op.I) - before.count(Op.W)
    why = f"of {waiting} of them only W is left to run" if waiting else "none of them has had its backward"
    return f"{fault}, and there is room for {room}: {why}"


def _slower(timeline: Timeline, par: Timeline) -> str:
    """By how much, and where the time is lost."""
    more = timeline.makespan - par.makespan
    than = f"{pretty(more)} more than {par.schedule.name}" if more else f"no less than {par.schedule.name}"
    return f"takes {pretty(timeline.makespan)}, {than}. Time is lost here: {timeline.why_idle(*_loss(timeline))}"


def _loss(timeline: Timeline) -> tuple[int, Any]:
    """Where and when time is lost.

    At the last rank's first wait, as nothing makes up for it; else at the last wait of the rank that is done last.
    """
    rows = timeline.rows
    late = max(range(len(rows)), key=lambda rank: rows[rank][-1].end)
    for rank, which in ((len(rows) - 1, 0), (late, -1)):
        waits = [before.end for before, after in pairwise(rows[rank]) if after.start > before.end]
        if waits:
            return rank, waits[which]
    return late, 0


def _left_lying(timeline: Timeline) -> str | None:
    """The first W that could run where time is lost, and which its rank runs only later."""
    rank, time = _loss(timeline)
    spans = timeline.spans(rank)
    place = sum(span.end <= time for span in spans)
    done, awaited = {span.action for span in spans[:place]}, spans[place]
    for action, start, end in spans[place + 1 :]:
        fits = end - start <= awaited.start - time  # else it would hold up what is waited for
        if action.op == "W" and fits and I(action.stage, action.microbatch) in done:
            return f"While it waits, rank {rank} has {action} to run, but its order puts it after {awaited.action}"
    return None


def _advice(timeline: Timeline, room: int) -> str:
    orders = timeline.schedule.orders
    if any(action.op == "B" for order in orders[1:] for action in order):
        return "And a B in one piece lets the rank before it wait for the W in it, too"
    leads = [next(place for place, action in enumerate(order) if action.op != "F") for order in orders]
    if leads[-1] > 1:
        return f"All wait for the last rank's first I, and it runs {leads[-1]} forwards before that, where 1 would do"
    for rank, (lead, after) in enumerate(pairwise(leads)):
        if after >= lead:
            return (
                f"Before their first I the ranks run {listed(leads)} forwards: when rank {rank} has run its {lead}, "
                f"none is under way to rank {rank + 1} that it does not wait for"
            )
    if lying := _left_lying(timeline):
        return lying
    least = min(timeline.peak_activations)
    if least < room:
        rank = timeline.peak_activations.index(least)
        return (
            f"Rank {rank} never holds more than {plural(least, 'microbatch')}, and there is room for {room}: for more "
            "forwards at the start, or for Ws that are put off"
        )
    return (
        f"Before their first I the ranks run {listed(leads)} forwards: from one rank to the next a step of 2 keeps a "
        "microbatch under way between them. Where is that needed most?"
    )


EXERCISES = {
    "12.1": Exercise(
        _not_better,
        "No built-in schedule with one copy of the model is as fast in this memory: this is what you built.",
        lambda generator: simulate(learners(generator, 4, 8), COSTS),
    ),
}
