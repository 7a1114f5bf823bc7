"""Lesson 12: the learner's own schedule, faster than every built-in one that fits in the memory."""

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
from ppedu.notebook.exercises.common import Exercise, learner_schedule, listed, not_legal, require_function, with_sizes
from ppedu.notebook.exercises.wrong_schedule import wrong_schedule
from ppedu.zoo import schedule
from ppedu.zoo.registry import published

COSTS = Costs(forward=1, backward=2, latency=0.25)

# (ranks, microbatches), with at least twice as many microbatches as ranks; the lesson's own case first.
SIZES = [(4, 8), (3, 7), (6, 12), (5, 16), (8, 20)]


def _room(ranks: int, microbatches: int) -> int:
    """Return the microbatches that a rank may hold."""
    return ranks + ranks // 2


def _not_better(generator: Any) -> str | None:
    require_function(generator, "rank", "ranks", "microbatches")
    for ranks, microbatches in SIZES:
        case, room = with_sizes(ranks, microbatches), _room(ranks, microbatches)
        yours = learner_schedule(generator, ranks, microbatches)
        if fault := not_legal(yours, case):
            return fault
        timeline = simulate(yours, COSTS)
        if max(timeline.peak_activations) > room:
            return f"{case} your schedule is legal, but {_too_much(timeline, room)}"
        par = _fastest_known(ranks, microbatches, room)
        if timeline.makespan >= par.makespan:
            return f"{case} your schedule is legal and fits, but {_slower(timeline, par)}. {_advice(timeline, room)}"
    return None


@cache
def _fastest_known(ranks: int, microbatches: int, room: int) -> Timeline:
    """Simulate every built-in single-copy schedule with at most `room` activations on any rank; return the fastest."""
    fitting = []
    for name in published():
        try:
            timeline = simulate(schedule(name, ranks, microbatches), COSTS)
        except SettingError:  # this schedule does not exist for this size
            continue
        if timeline.schedule.placement.copies == 1 and max(timeline.peak_activations) <= room:
            fitting.append(timeline)
    return min(fitting, key=lambda timeline: timeline.makespan)


def _too_much(timeline: Timeline, room: int) -> str:
    """Describe the first action that does not fit in memory, and why."""
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
    why = f"{waiting} of them only wait for their W" if waiting else "none of them has started its backward"
    return f"{fault}, and there is memory for only {room}: {why}"


def _slower(timeline: Timeline, par: Timeline) -> str:
    """Describe by how much a schedule is too slow, and where it loses time."""
    more = timeline.makespan - par.makespan
    than = f"{pretty(more)} more than {par.schedule.name}" if more else f"as much as {par.schedule.name}"
    return f"takes {pretty(timeline.makespan)}, {than}. Time is lost here: {timeline.why_idle(*_loss(timeline))}"


def _loss(timeline: Timeline) -> tuple[int, Any]:
    """Return the rank and time at which a schedule loses time.

    That is the last rank's first wait, because nothing makes up for it; else the last wait of the rank that ends last.
    """
    rows = timeline.rows
    late = max(range(len(rows)), key=lambda rank: rows[rank][-1].end)
    for rank, which in ((len(rows) - 1, 0), (late, -1)):
        waits = [before.end for before, after in pairwise(rows[rank]) if after.start > before.end]
        if waits:
            return rank, waits[which]
    return late, 0


def _left_lying(timeline: Timeline) -> str | None:
    """Describe the first W that could fill the wait where time is lost, but runs only later."""
    rank, time = _loss(timeline)
    spans = timeline.spans(rank)
    place = sum(span.end <= time for span in spans)
    done, awaited = {span.action for span in spans[:place]}, spans[place]
    for action, start, end in spans[place + 1 :]:
        fits = end - start <= awaited.start - time  # a longer one would delay the awaited action
        if action.op == "W" and fits and I(action.stage, action.microbatch) in done:
            return f"While it waits, rank {rank} could run {action}, but its order has {action} after {awaited.action}"
    return None


def _advice(timeline: Timeline, room: int) -> str:
    orders = timeline.schedule.orders
    if any(action.op == "B" for order in orders[1:] for action in order):
        return "And with an undivided B, the previous rank also has to wait for the W in it"
    leads = [next(place for place, action in enumerate(order) if action.op != "F") for order in orders]
    if leads[-1] > 1:
        return (
            f"All ranks wait for the last rank's first I, and it runs {leads[-1]} forwards before that, where 1 would "
            "be enough"
        )
    for rank, (lead, after) in enumerate(pairwise(leads)):
        if after == lead:
            return (
                f"Before their first I the ranks run {listed(leads)} forwards. Rank {rank + 1} runs as many as rank "
                f"{rank}, so it never has one queued; let it run at least one fewer"
            )
    if lying := _left_lying(timeline):
        return lying
    least = min(timeline.peak_activations)
    if least < room:
        rank = timeline.peak_activations.index(least)
        return (
            f"Rank {rank} never holds more than {plural(least, 'microbatch')}, but there is memory for {room}: use "
            "it for more forwards at the start, or to delay Ws"
        )
    return (
        f"Before their first I the ranks run {listed(leads)} forwards. If a rank runs 2 more than the next one, a "
        "microbatch is always in flight between them. Where is that needed most?"
    )


EXERCISES = {
    "12.1": Exercise(
        _not_better,
        "No built-in schedule with one copy of the model is as fast in this memory. This is what you built.",
        lambda generator: simulate(learner_schedule(generator, 4, 8), COSTS),
        draw_wrong=wrong_schedule(SIZES, COSTS, lambda *case: _fastest_known(*case, _room(*case)), _room),
    ),
}
