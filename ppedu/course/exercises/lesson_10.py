"""Lesson 10: fill 1F1B's bubbles with weight backwards, and find the idle time that they cannot fill."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ppedu.core import Action, Op, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import CASES, Exercise, formulas, idle_time
from ppedu.course.exercises.schedules import longest_wait, schedule_exercise, warmup
from ppedu.sim import Costs, Timeline, simulate
from ppedu.sim.why import Reasons
from ppedu.zoo import schedule


def _never_split(_: Schedule, fault: str) -> str:
    """Name the halves of a backward that never runs: the checker calls it B."""
    return re.sub(r"(\d+)B(\d+) is never run", r"\1I\2 and \1W\2 are never run", fault)


def _fastest(ranks: int, microbatches: int) -> Timeline:
    return simulate(schedule("zb-h1", ranks, microbatches))


def _not_filled(case: str, timeline: Timeline, ranks: int, microbatches: int) -> str | None:
    room, best = min(ranks, microbatches), _fastest(ranks, microbatches).makespan
    if max(timeline.peak_activations) > room:
        return f"{case} your schedule is legal, but {_too_much(timeline, room)}"
    if timeline.makespan <= best:
        return None
    why = _wrong_order(timeline) or _nothing_delayed(timeline) or _needless(timeline, room) or longest_wait(timeline)
    return (
        f"{case} your schedule is legal, but takes {pretty(timeline.makespan)}, where {pretty(best)} is possible. {why}"
    )


def _too_much(timeline: Timeline, room: int) -> str:
    """Explain why a rank holds more than any rank of 1F1B."""
    peaks = timeline.peak_activations
    rank = peaks.index(max(peaks))
    fault = (
        f"rank {rank} holds {pretty(peaks[rank])} activations at its peak, and no rank of 1F1B holds more than {room}"
    )
    first = warmup(timeline.schedule.orders[rank])
    if first > room:
        return f"{fault}: it runs {first} forwards before its first backward"
    delays = [_delay(order) for order in (timeline.schedule.orders[0], timeline.schedule.orders[-1])]
    if delays[0] > delays[1]:
        return f"{fault}. Upside down: rank 0 is full, so it can't delay a W; which rank has the most memory left?"
    return f"{fault}. Activations are held until their W, and this rank's Ws run too late"


def _delay(order: Sequence[Action]) -> int:
    """Return by how many microbatches a rank delays its first W."""
    ops = [action.op for action in order]
    return ops[: ops.index(Op.W)].count(Op.I) - 1 if Op.W in ops else 0


def _wrong_order(timeline: Timeline) -> str | None:
    """Describe the first rank with a shorter warm-up than in 1F1B, else an undivided backward, else a longer warm-up.

    A shorter warm-up leaves the later ranks without work.
    """
    yours = timeline.schedule
    alone = "Only one rank works at a time, as in naive. " if timeline.makespan == sum(timeline.busy) else ""
    warmups = [(warmup(order), min(yours.ranks - rank, yours.microbatches)) for rank, order in enumerate(yours.orders)]
    for rank, (first, enough) in enumerate(warmups):
        if first < enough:
            runs = f"Rank {rank} runs {plural(first, 'forward')} before its first backward"
            return f"{alone}{runs}, where 1F1B runs {enough}"
    if whole := _whole(yours):
        return whole
    for rank, (first, enough) in enumerate(warmups):
        if first > enough:
            return f"Rank {rank} runs {first} forwards before its first backward, where {enough} would be enough"
    return None


def _whole(yours: Schedule) -> str | None:
    """Describe the first undivided backward that another rank waits for."""
    for rank, order in enumerate(yours.orders[1:]):
        for action in order:
            if action.op == "B":
                return f"Rank {rank + 1} runs {action} in one piece, so rank {rank} waits for all of it, not just for I"
    return None


def _delays_nothing(yours: Schedule) -> bool:
    """Say whether each W directly follows its I."""
    pairs = (pair for order in yours.orders for pair in pairwise(order) if pair[1].op == "W")
    return all((before.op, before.microbatch) == ("I", after.microbatch) for before, after in pairs)


def _nothing_delayed(timeline: Timeline) -> str | None:
    """Describe a schedule in which each W directly follows its I, and a gap that an earlier W could fill.

    The later the rank, the more memory it has for delaying Ws.
    """
    waits = [
        (rank, before.end, after.start)
        for rank, row in enumerate(timeline.rows)
        for before, after in pairwise(row)
        if before.action.op == "W" and before.end < after.start
    ]
    if not waits or not _delays_nothing(timeline.schedule):
        return None
    rank, start, end = max(waits)
    return (
        f"Each W runs right after its I, and the gaps stay empty. Rank {rank} waits {pretty(start)}–{pretty(end)}: "
        "which of its Ws could it have kept for then?"
    )


def _needless(timeline: Timeline, room: int) -> str | None:
    """Describe the first W that delays an action which is ready to run, and fits in memory."""
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
            fits = f", and it fits: the rank holds {plural(held, 'activation')} of {room}" if other.op == "F" else ""
            when = f"{pretty(start)}–{pretty(end)}"
            return f"At {when} rank {rank} runs {weight}, which is not urgent; {other} could run instead{fits}"
    return None


# (ranks, time of F, time of I, time of W); the lesson's own case first.
TIMES = [(4, 1, 1, 1), (8, 1, 1, 1), (1, 1, 1, 1), (4, 2, 3, 1), (4, 2, 1, 2), (4, 1, 1, 2), (4, 1, 2, 2), (6, 2, 3, 7)]

WRONG_WAIT = (
    "A wait of p times I for the first gradient is too long. The last rank's I starts as soon as its F has ended, at p "
    "times F; how many Is lie between then and rank 0's first?"
)
ADDED = "You add the waits; only the longest counts"

# Common wrong answers for the idle time with p ranks.
WRONG_IDLE_TIMES = formulas(
    "p, f, i, w",
    {
        "(p - 1) * (f + i - w)": "That is the published formula, which is right if W takes at most as long as F and as "
        "I. A longer W does not fill more: some of the waiting comes before there is any W to run",
        "(p - 1) * max(0, f + i - w)": "Not all of the waiting can be filled: before its first I, a rank has no W to "
        "run",
        "(p - 1) * max(f, f + i - w)": "The last rank's wait for its first microbatch is included. There is another "
        "wait without a W: when has rank 0 run its p forwards, and when is the first gradient back?",
        "(p - 1) * max(i, f + i - w)": "Rank 0's wait for its first gradient is included. There is another wait "
        "without a W: the last rank's for its first microbatch",
        "max(p * i, (p - 1) * (f + i - w))": WRONG_WAIT,
        "max(p * i, (p - 1) * (f + i - w), (p - 1) * f)": WRONG_WAIT,
        "(p - 1) * (f + i + w)": "That is the idle time of 1F1B",
        "(p - 1) * (f + i)": "That is the idle time if the backward is split, but no W is delayed. If you add the two "
        "waits: only the longest counts",
        "(p - 1) * (f + i + max(0, f + i - w))": ADDED,
        "(p - 1) * (f + i + f + i - w)": ADDED,
        "(p - 1) * f": "That is the last rank's wait for its first microbatch; there is more",
        "(p - 1) * max(f, i)": "No W can fill these two waits; but a short W leaves more",
    },
)


def _idle_time(ranks: int, forward: int, first: int, second: int) -> Any:
    costs = Costs(forward=forward, input=first, weight=second)
    return simulate(schedule("zb-h1", ranks, 2 * ranks), costs).idle[0]


# Sizes for ZB-H2; a batch of fewer than 2 * ranks - 1 microbatches is too small to keep every rank busy.
LONG_CASES = [(4, 8), (1, 1), (2, 1), (4, 2), (3, 5), (5, 4), (2, 5), (8, 20), (4, 16)]


def _most(ranks: int, _: int) -> int:
    """Return the activations that a rank may hold."""
    return 2 * ranks - 1


def _waits_in_between(case: str, timeline: Timeline, ranks: int, microbatches: int) -> str | None:
    most, held = _most(ranks, microbatches), max(timeline.peak_activations)
    if held > most:
        rank = timeline.peak_activations.index(held)
        return f"{case} rank {rank} holds {pretty(held)} activations at its peak; at most {most} are allowed"
    waits = any(after.start > before.end for row in timeline.rows for before, after in pairwise(row))
    if waits and microbatches >= most:
        why = _whole(timeline.schedule) or _short_of_work(timeline, most) or _early_weights(timeline, most)
        return f"{case} a rank waits between its own first and last action. {why}"
    return None


def _short_of_work(timeline: Timeline, most: int) -> str | None:
    """Describe rank 0's wait for its first gradient, if it could run more forwards until then."""
    row, first = timeline.rows[0], warmup(timeline.schedule.orders[0])
    if row[first].start > row[first - 1].end and first < most:
        wait = f"{pretty(row[first - 1].end)}–{pretty(row[first].start)}"
        return f"Rank 0 waits {wait} for its first gradient, after {plural(first, 'forward')}; it may hold {most}"
    return None


def _early_weights(timeline: Timeline, most: int) -> str:
    """Describe a schedule whose Ws run too early to fill all gaps, and a rank with memory to delay them."""
    late, peaks = longest_wait(timeline), timeline.peak_activations
    if _delays_nothing(timeline.schedule):
        return f"Each W runs right after its I, on some ranks too early: no W is left for the gaps. {late}"
    if min(peaks) == most:
        return late
    rank, held = peaks.index(min(peaks)), pretty(min(peaks))
    return f"{late}. Rank {rank} never holds more than {held} activations; it may hold {most}: delay its Ws further"


EXERCISES = {
    "10.1": schedule_exercise(
        CASES,
        _not_filled,
        "As fast as ZB-H1, with no more memory than 1F1B, and two thirds of its idle time gone. This is what you "
        "built.",
        best=_fastest,
        room=min,
        why_illegal=_never_split,
        hints=(
            "Where does the middle schedule wait, at its right end? A W can only fill a gap if it hasn't run yet. "
            "So some Ws must run later than they do now.",
            "How many activations does each rank hold in the middle schedule, and how many may it hold? The "
            "difference is how many Ws a rank can delay.",
            "The peaks are 4, 3, 2, 1, and 4 are allowed: rank r can run each W `rank` microbatches later. Don't "
            "forget the first microbatches, which have no earlier W to run, and the Ws that are left at the end.",
        ),
    ),
    "10.2": Exercise(
        idle_time({"forward": "F", "input": "I", "weight": "W"}, TIMES, _idle_time, WRONG_IDLE_TIMES),
        "Each W fills a gap, as long as there is a W to run. The wait for the first microbatch and the wait for the "
        "first gradient remain.",
        hints=(
            "The starting formula holds if W is short. For a long W, find two waits in the picture of ZB-H1: before "
            "rank 3's first action, and before rank 0's first I.",
            "The first microbatch reaches the last rank after p-1 forwards. Rank 0's first gradient is back after p "
            "forwards and then p-1 Is. So the waits are (p-1) times F, and (p-1) times I. With the starting "
            "formula that makes three, and the longest counts.",
        ),
    ),
    "10.3": schedule_exercise(
        LONG_CASES,
        _waits_in_between,
        "Between its own first and last action, no rank waits. What remains of the bubble lies before and after. "
        "This is what you built.",
        room=_most,
        why_illegal=_never_split,
        hints=(
            "Begin with rank 0. It waits for its first gradient; how many forwards fit into that time? The gradient is "
            "back after p forwards and p-1 Is, and each takes one unit.",
            "Rank 0 runs 2p-1 forwards first, and each rank after it two fewer than the one before. Then the last "
            "rank has memory left, more than in ZB-H1, to delay its Ws.",
            "Rank r runs 2(p-r)-1 forwards first (or all, if there are fewer), and then in turn I, W, F. It runs "
            "each W 2r microbatches after its I.",
        ),
    ),
    "10.4": parts.exercise(
        "10.4",
        "Every published schedule with one copy of the model has run on your lines. A schedule is data, and this is "
        "its interpreter.",
        hints=(
            'A forward takes its input from `arrived["F", stage, m]` and leaves its output at `arrived["F", stage + '
            "1, m]`. If that stage is on another rank, SEND_F empties the place here, and RECV_F fills it there.",
            'B: `dy = arrived.pop(("B", stage, m), None)`; its result is what `stage - 1` needs. `x` and `y` are in '
            "`kept[stage, m]`.",
            "I: `torch.autograd.grad(y, x, dy, retain_graph=True)`, which returns a tuple. Keep `y` and `dy` for W: "
            "`y.backward(dy, inputs=…)` with the weights of the stage.",
        ),
    ),
}
