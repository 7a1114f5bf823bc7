"""Lesson 14: the learner's own schedule, faster than every built-in one that fits, and the fastest in less memory."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

from ppedu.core import I, Op, PipelineError, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import learner_schedule, listed
from ppedu.course.exercises.schedules import schedule_exercise
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule
from ppedu.zoo.registry import published

COSTS = Costs(forward=1, backward=2, latency=0.25)

# (ranks, microbatches), with at least twice as many microbatches as ranks; the lesson's own case first.
SIZES = [(4, 8), (3, 7), (6, 12), (5, 16), (8, 20)]

# For the leaderboard, other sizes: the least makespan of any schedule with a stage on each rank in the same memory, as
# proven by `pp.search.optimal`. Tests prove it again.
LEAST_TIMES = {(4, 9): 30.75, (4, 11): 36.75, (5, 12): 41, (6, 14): 48.25}


# The last two of four ranks, a letter for a quarter of the time of a forward.
FIRST_WAIT = "`rank 2  F0──F1──······I0──`\n`rank 3       F0──I0──`"


def _room(ranks: int, microbatches: int) -> int:
    """Return the microbatches that a rank may hold."""
    return ranks + ranks // 2


def _not_better(case: str, timeline: Timeline, ranks: int, microbatches: int) -> str | None:
    room = _room(ranks, microbatches)
    if max(timeline.peak_activations) > room:
        return f"{case} your schedule is legal, but {_too_much(timeline, room)}"
    par = _fastest_known(ranks, microbatches)
    if timeline.makespan < par.makespan:
        return None
    more = timeline.makespan - par.makespan
    than = f"{pretty(more)} more than {par.schedule.name}" if more else f"as much as {par.schedule.name}"
    return (
        f"{case} your schedule is legal and fits, but takes {pretty(timeline.makespan)}, {than}. "
        f"{_lost(timeline)}. {_advice(timeline, room)}"
    )


@cache
def _fastest_known(ranks: int, microbatches: int) -> Timeline:
    """Simulate every plain built-in schedule with one copy of the model that fits; return the fastest."""
    fitting, room = [], _room(ranks, microbatches)
    for name in published():
        try:
            timeline = simulate(schedule(name, ranks, microbatches), COSTS)
        except SettingError:  # this schedule does not exist for this size
            continue
        one = timeline.schedule.plain and timeline.schedule.placement.copies == 1
        if one and max(timeline.peak_activations) <= room:
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
    wait = "waits for its W" if waiting == 1 else "wait for their W"
    why = f"{waiting} of them only {wait}" if waiting else "none of them has started its backward"
    return f"{fault}, and there is memory for only {room}: {why}"


def _lost(timeline: Timeline) -> str:
    return f"Time is lost here: {timeline.why_idle(*_loss(timeline))}"


def _over_the_least(generator: Any) -> dict[str, float | None]:
    """Return for each size the makespan over the least one, or None if the schedule fails, is illegal or too large."""
    found: dict[str, float | None] = {}
    for size, least in LEAST_TIMES.items():
        name = "{} × {}".format(*size)
        try:
            timeline = simulate(learner_schedule(generator, *size), COSTS)
        except PipelineError:
            found[name] = None
        else:
            fits = max(timeline.peak_activations) <= _room(*size)
            found[name] = float(timeline.makespan / least) if fits else None
    return found


TIGHT = (4, 8)  # ranks and microbatches
TIGHT_ROOM = 3  # microbatches that a rank may hold
LEAST = 31  # makespan if F, I and W take 1 and messages no time; the lesson proves it by trying everything


def _not_the_least(case: str, timeline: Timeline, *_: int) -> str | None:
    if max(timeline.peak_activations) > TIGHT_ROOM:
        return f"{case} your schedule is legal, but {_too_much(timeline, TIGHT_ROOM)}"
    if timeline.makespan <= LEAST:
        return None
    more = pretty(timeline.makespan - LEAST)
    return (
        f"{case} your schedule is legal and fits, but takes {pretty(timeline.makespan)}, {more} more than the "
        f"least. {_lost(timeline)}. The lesson's search has seen a faster one: what must it remember to tell you?"
    )


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
    before = f"Before their first I the ranks run {listed(leads)} forwards"
    if leads[-1] > 1:
        return (
            f"All ranks wait for the last rank's first I, and it runs {leads[-1]} forwards before that, where 1 would "
            "be enough"
        )
    for rank, (lead, after) in enumerate(pairwise(leads)):
        if after == lead:
            few = f"Rank {rank + 1} runs the same number as rank {rank}, so it never has one queued"
            return f"{before}. {few}; let it run at least one fewer"
    if lying := _left_lying(timeline):
        return lying
    least = min(timeline.peak_activations)
    if least < room:
        rank = timeline.peak_activations.index(least)
        return (
            f"Rank {rank} never holds more than {plural(least, 'microbatch')}, but there is memory for {room}: use "
            "it for more forwards at the start, or to delay Ws"
        )
    fewer = [lead - after for lead, after in pairwise(leads)]
    if fewer[-1] < 2 <= max(fewer):
        last = len(leads) - 1
        return (
            f"{before}. You have the large steps at the top, but "
            f"rank {last} runs only 1 fewer than rank {last - 1}. Start the steps of 2 from the last rank up"
        )
    if leads[0] < room or fewer != sorted(fewer):
        return (
            f"{before}. If a rank runs 2 more than the next one, a "
            "microbatch is always in flight between them. Where is that needed most?"
        )
    return (
        f"{before}, so the forwards are fine. Look at the Ws: which "
        "of them run where no rank would have waited, and are missing where time is lost?"
    )


EXERCISES = {
    "14.1": schedule_exercise(
        SIZES,
        _not_better,
        "No built-in schedule with one copy of the model is as fast in this memory. This is what you built.",
        costs=COSTS,
        best=_fastest_known,
        room=_room,
        score=_over_the_least,
        hints=(
            "Begin with ZB-H1: split each B into I and W, and delay the Ws by as many microbatches as memory allows.",
            "While a message travels, a rank needs another microbatch to work on. Give the first ranks more forwards "
            "before their first I. The last rank needs no more than one.",
            "Draw what happens around the first message to the last rank and back. A forward is four letters long, a "
            f"message one:\n{FIRST_WAIT}\nWith two forwards, rank 2 waits where the dots are. How many more would fill "
            "them? And does rank 1 wait for rank 2 in the same way?",
            "If a rank runs two forwards more than the next one, a message is always on its way between them. There is "
            "memory for ranks // 2 forwards more than in 1F1B; rank r can use at most ranks - r - 1 of them. What is "
            "left of the memory delays Ws.",
        ),
    ),
    "14.2": schedule_exercise(
        [TIGHT],
        _not_the_least,
        "That's the least time there is in this memory: 2 less than 1F1B takes, with one microbatch less. This is what "
        "you built.",
        room=lambda *_: TIGHT_ROOM,
        hints=(
            "Keep a dictionary instead of a set: for each state, the state from which it was first reached. From the "
            "state with everything done, walk back to the start.",
            "Between two states in a row, a rank has done one action or none: the count that grew says which. "
            "If (3, 1, 0) becomes (3, 2, 0), it was I of microbatch 1.",
        ),
    ),
    "14.3": parts.exercise(
        "14.3",
        "Your schedule, on your interpreter, with your messages: the gradients are those of one process, bit for bit.",
        hints=(
            "Any legal schedule is right here. Take your `mine` of exercise 14.1, or 1F1B from lesson 5 with `pp.F` "
            "and `pp.B`.",
        ),
    ),
}
