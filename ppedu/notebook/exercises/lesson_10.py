"""Lesson 10: weight backwards in 1F1B's bubbles, and what idle time they cannot fill."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ppedu.core.actions import Action
from ppedu.core.costs import Costs
from ppedu.core.numeric import plural, pretty
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Timeline
from ppedu.core.why import Reasons
from ppedu.notebook.exercises.common import (
    CASES,
    Exercise,
    learners,
    not_legal,
    not_the_idle_time,
    require_function,
    with_sizes,
)
from ppedu.zoo import schedule


def _not_filled(generator: Any) -> str | None:
    require_function(generator, "rank", "ranks", "microbatches")
    for ranks, microbatches in CASES:
        case = with_sizes(ranks, microbatches)
        yours = learners(generator, ranks, microbatches)
        if fault := not_legal(yours, case):  # to the checker a backward that is missing is one piece, here it is two
            return re.sub(r"(\d+)B(\d+) is never run", r"\1I\2 and \1W\2 are never run", fault)
        timeline, room = simulate(yours), min(ranks, microbatches)
        best = simulate(schedule("zb-h1", ranks, microbatches)).makespan
        if max(timeline.peak_activations) > room:
            return f"{case} it is legal, but {_too_much(timeline, room)}"
        if timeline.makespan > best:
            order = _early_start(timeline) or _whole(yours) or _late_start(yours)
            why = order or _needless(timeline, room) or _longest_wait(timeline)
            return f"{case} it is legal, but takes {pretty(timeline.makespan)} where {pretty(best)} is enough. {why}"
    return None


def _too_much(timeline: Timeline, room: int) -> str:
    """Why a rank holds more than any rank of 1F1B."""
    peaks = timeline.peak_activations
    rank = peaks.index(max(peaks))
    fault = f"rank {rank} holds {pretty(peaks[rank])} activations at its peak, and no rank of 1F1B more than {room}"
    first = _warmup(timeline.schedule.orders[rank])
    if first > room:
        return f"{fault}: it runs {first} forwards before its first backward"
    return f"{fault}. They are held until their W, and its Ws come too late"


def _early_start(timeline: Timeline) -> str | None:
    """The first rank that starts its backwards sooner than in 1F1B, and so leaves the others without work."""
    schedule = timeline.schedule
    alone = "One rank works at a time, as in naive. " if timeline.makespan == sum(timeline.busy) else ""
    for rank, order in enumerate(schedule.orders):
        first, enough = _warmup(order), min(schedule.ranks - rank, schedule.microbatches)
        if first < enough:
            runs = f"Rank {rank} runs {plural(first, 'forward')} before its first backward"
            return f"{alone}{runs}, where 1F1B runs {enough}"
    return None


def _whole(yours: Schedule) -> str | None:
    """The first backward in one piece that another rank waits for."""
    for rank, order in enumerate(yours.orders[1:]):
        for action in order:
            if action.op == "B":
                return (
                    f"Rank {rank + 1} runs {action} in one piece, and rank {rank} waits for all of it, not for I alone"
                )
    return None


def _late_start(yours: Schedule) -> str | None:
    """The first rank that starts its backwards later than in 1F1B."""
    for rank, order in enumerate(yours.orders):
        first, enough = _warmup(order), min(yours.ranks - rank, yours.microbatches)
        if first > enough:
            return f"Rank {rank} runs {first} forwards before its first backward, where {enough} would do"
    return None


def _warmup(order: Sequence[Action]) -> int:
    """How many forwards come before the first backward."""
    return next(place for place, action in enumerate(order) if action.op != "F")


def _needless(timeline: Timeline, room: int) -> str | None:
    """The first W that holds up something else, which could run and for which there is room."""
    reasons = Reasons(timeline)
    places = ((rank, index) for rank, row in enumerate(reasons.rows) for index in range(len(row)))
    for place in sorted(places, key=lambda place: reasons[place].start):
        (weight, start, end), (rank, index) = reasons[place], place
        row = reasons.rows[rank]
        after = next((later for later in range(index, len(row)) if row[later].action.op != "W"), None)
        if weight.op != "W" or after is None:
            continue
        other = row[after].action
        causes = (reasons[cause].end for cause in reasons.waited_for((rank, after)) if cause[0] != rank)
        held = sum({"F": 1, "B": -1, "W": -1}.get(span.action.op, 0) for span in row[:index])
        if max(causes, default=0) <= start and (other.op != "F" or held < room):
            fits = f", and there is room: it holds {plural(held, 'activation')} of {room}" if other.op == "F" else ""
            when = f"{pretty(start)}–{pretty(end)}"
            return f"At {when} rank {rank} runs {weight}, for which nobody waits; {other} could run instead{fits}"
    return None


def _longest_wait(timeline: Timeline) -> str:
    """Where a rank that has started waits longest."""
    waits = [
        (after.start - before.end, rank, before.end)
        for rank, row in enumerate(timeline.rows)
        for before, after in pairwise(row)
    ]
    _, rank, time = max(waits, key=lambda wait: wait[0])
    return f"Look at its longest wait: {timeline.why_idle(rank, time)}"


# Ranks and the times of F, I and W; the lesson's own case first.
TIMES = [(4, 1, 1, 1), (8, 1, 1, 1), (1, 1, 1, 1), (4, 2, 3, 1), (4, 2, 1, 2), (4, 1, 1, 2), (4, 1, 2, 2), (6, 2, 3, 7)]

# What people write for the idle time with p ranks, and what it is instead.
OTHER_IDLE_TIMES: list[tuple[Callable[..., Any], str]] = [
    (
        lambda p, f, i, w: (p - 1) * (f + i - w),
        "That is the published formula, and right as long as W is no longer than F and I. A longer W does not fill "
        "more: some of the wait comes before there is any W to do",
    ),
    (
        lambda p, f, i, w: (p - 1) * max(0, f + i - w),
        "Not all of the wait can be filled: before its first I a rank has no W to do",
    ),
    (
        lambda p, f, i, w: (p - 1) * max(f, f + i - w),
        "The last rank's wait for its first microbatch is in it. There is another wait without a W: when has rank 0 "
        "run its p forwards, and when is the first gradient back?",
    ),
    (
        lambda p, f, i, w: (p - 1) * max(i, f + i - w),
        "Rank 0's wait for its first gradient is in it. There is another wait without a W: the last rank's for its "
        "first microbatch",
    ),
    (lambda p, f, i, w: (p - 1) * (f + i + w), "That is 1F1B's"),
    (lambda p, f, i, w: (p - 1) * (f + i), "That is what is left when the backward is split and no W is put off"),
    (lambda p, f, i, w: (p - 1) * f, "That is what the last rank waits for its first microbatch; there is more"),
    (lambda p, f, i, w: (p - 1) * max(f, i), "Those two waits no W can fill; but a short W leaves more"),
]


def _not_the_idle_time(formula: Any) -> str | None:
    letters = {"forward": "F", "input": "I", "weight": "W"}
    return not_the_idle_time(formula, letters, TIMES, _idle_time, OTHER_IDLE_TIMES)


def _idle_time(ranks: int, forward: int, first: int, second: int) -> Any:
    costs = Costs(forward=forward, input=first, weight=second)
    return simulate(schedule("zb-h1", ranks, 2 * ranks), costs).idle[0]


EXERCISES = {
    "10.1": Exercise(
        _not_filled,
        "As fast as ZB-H1, in no more memory than 1F1B, and two thirds of its idle time are gone: this is what you "
        "built.",
        lambda generator: simulate(learners(generator, 4, 8)),
    ),
    "10.2": Exercise(
        _not_the_idle_time,
        "Each W fills a gap, as long as there is a W to do: the wait for the first microbatch and the wait for the "
        "first gradient remain.",
    ),
}
