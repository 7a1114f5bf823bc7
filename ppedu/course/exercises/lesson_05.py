"""Lesson 5: the 1F1B schedule, the memory it needs, and a longer warm-up for slow messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppedu.core import Action, B, F, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import (
    CASES,
    Exercise,
    formulas,
    learner_schedule,
    listed,
    tried_on,
    unlike,
    with_sizes,
)
from ppedu.course.exercises.schedules import longest_wait, schedule_exercise, warmup
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule

UNIT = Costs(forward=1, backward=1)
SLOW_MESSAGES = Costs(forward=1, backward=1, latency=0.5)


def _not_the_oldest(yours: Schedule) -> str:
    """Explain, as a new sentence, where a rank runs the backward of a microbatch before that of an older one."""
    for rank, order in enumerate(yours.orders):
        waiting: list[int] = []  # microbatches whose forward has run
        for action in order:
            if action.op == "F":
                waiting.append(action.microbatch)
            elif action.op in ("B", "I"):
                oldest = min(waiting)
                if action.microbatch != oldest:
                    return (
                        f". Rank {rank} runs {action} before {B(action.stage, oldest)}; run the oldest backward first"
                    )
                waiting.remove(oldest)
    return ""


def _no_cooldown(yours: Schedule, fault: str) -> str:
    """Add to an explanation that only backwards are missing."""
    if yours.problems and all(each.kind == "missing" and each.action.op == "B" for each in yours.problems):
        return f"{fault}. The cooldown runs the remaining backwards"
    return fault


def _fastest(ranks: int, microbatches: int) -> Timeline:
    return simulate(schedule("1f1b", ranks, microbatches), UNIT)


def _not_1f1b(case: str, timeline: Timeline, *sizes: int) -> str | None:
    best = _fastest(*sizes)
    if timeline.makespan > best.makespan:
        slow = f"takes {timeline.makespan} slots instead of {best.makespan}"
        return f"{case} your schedule is legal, but {slow}{_unlike_1f1b(timeline, best, ':', slow=True)}"
    if timeline.peak_activations != best.peak_activations:
        return f"{case} your schedule is legal, and not slower{_unlike_1f1b(timeline, best, ', but', slow=False)}"
    return None


def _unlike_1f1b(yours: Timeline, best: Timeline, link: str, slow: bool) -> str:
    """Explain, as the end of a sentence, where a legal schedule differs from 1F1B; `link` comes before a reason."""
    ranks, microbatches = yours.schedule.ranks, yours.schedule.microbatches
    warmups = [warmup(order) for order in yours.schedule.orders]
    if all(first == microbatches for first in warmups):
        return (
            ", but it is GPipe: every rank runs all its forwards before its first backward, and so holds all "
            f"{microbatches} activations at once. When could the last rank run its first backward?"
        )
    peaks, enough = yours.peak_activations, best.peak_activations
    for rank, first in enumerate(warmups):
        if first > min(ranks - rank, microbatches):
            return (
                f"{link} rank {rank} runs {plural(first, 'forward')} before its first backward, and holds "
                f"{peaks[rank]} activations instead of {enough[rank]}. Its warm-up is too long"
                + (": it waits for microbatches that it needs only later" if slow else "")
            )
        if first < min(ranks - rank, microbatches):
            return (
                f"{link} rank {rank} runs only {plural(first, 'forward')} before its first backward, and then waits "
                "for that backward's gradient. It could run more forwards in the meantime"
            )
    held = f", with peaks {listed(peaks)} instead of {listed(enough)}" if peaks != enough else ""
    return f"{held}: the warm-up is right, so look at the order that follows it{_not_the_oldest(yours.schedule)}"


# Common wrong formulas for the peak of rank r among p ranks, with m microbatches.
WRONG_PEAKS = formulas(
    "r, p, m",
    {
        "m": "That is GPipe's peak: all microbatches. In 1F1B a rank soon gets gradients back",
        "p - r": "With few microbatches, a rank holds fewer: it cannot hold more than there are",
        "min(p - r - 1, m)": "That is the number of ranks after this one. The steady state begins with one more "
        "forward",
        "p - r - 1": "That is the number of ranks after this one. The steady state begins with one more forward, and a "
        "rank cannot hold more than there are microbatches",
        "min(p, m)": "That is the peak of rank 0. A later rank is closer to the last one, so its first gradient "
        "returns sooner",
        "p": "That is the peak of rank 0, if there are enough microbatches. A later rank is closer to the last one, so "
        "its first gradient returns sooner",
        "min(r + 1, m)": "That is the peak in a pipeline that runs the other way: rank 0 is the farthest from the last "
        "rank, where the gradients begin, and holds the most",
        "min(p - r + 1, m)": "That counts one too many: the last rank frees its only activation before its next "
        "forward",
        "max(p - r, m)": "There are two limits. Which one is reached first, the larger or the smaller?",
    },
)


def _not_the_peak(case: str, answer: Any, rank: int, *sizes: int) -> str | None:
    peak = simulate(schedule("1f1b", *sizes)).peak_activations[rank]
    if answer == peak:
        return None
    return f"{case}, rank {rank} holds {peak} at its peak; your formula gives {unlike(answer, peak)}"


def _too_slow_or_too_large(case: str, timeline: Timeline, *sizes: int) -> str | None:
    gpipe, lean = (simulate(schedule(name, *sizes), SLOW_MESSAGES) for name in ("gpipe", "1f1b"))
    for rank, (held, least) in enumerate(zip(timeline.peak_activations, lean.peak_activations, strict=True)):
        if held > 2 * least:
            return (
                f"{case}, rank {rank} holds {pretty(held)} activations at its peak; 1F1B holds {pretty(least)} "
                f"there, so at most {pretty(2 * least)} are allowed"
            )
    if timeline.makespan <= gpipe.makespan:
        return None
    fault = f"{case} your schedule takes {pretty(timeline.makespan)} slots, and GPipe {pretty(gpipe.makespan)}. "
    if timeline.makespan == lean.makespan and timeline.peak_activations == lean.peak_activations:
        return fault + (
            "That is 1F1B: its microbatches in flight just fill the round trip to the last rank and back, and "
            "messages make that trip longer. Which ranks have the memory to start more?"
        )
    rank = timeline.idle.index(max(timeline.idle))
    return f"{fault}Rank {rank} is idle for {pretty(timeline.idle[rank])} of them. {longest_wait(timeline)}"


def _eager(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield 1F1B with as long a warm-up as twice its memory allows."""
    warmup = min(2 * (ranks - rank) - 1, microbatches)
    yield from (F(rank, m) for m in range(warmup))
    for m in range(warmup, microbatches):
        yield F(rank, m)
        yield B(rank, m - warmup)
    yield from (B(rank, m) for m in range(microbatches - warmup, microbatches))


EXERCISES = {
    "05.1": schedule_exercise(
        CASES,
        _not_1f1b,
        "That is 1F1B, for any number of ranks and microbatches. This is what you built.",
        costs=UNIT,
        best=_fastest,
        why_illegal=_no_cooldown,
        nothing=". Start with the warm-up: which forwards come first?",
        hints=(
            "The last rank has the gradient of a microbatch as soon as it has run its forward. So it needs no warm-up: "
            "F0 B0 F1 B1 and so on. What must the rank before it do while it waits for its first gradient?",
            "Each rank closer to the start runs one forward more before its first backward. From there on: a forward "
            "of the next microbatch, a backward of the oldest one, in turn.",
            "With a warm-up of `ranks - rank - 1` forwards, the steady state begins with a forward. And no rank can "
            "warm up with more microbatches than there are: min(…, microbatches).",
        ),
    ),
    "05.2": Exercise(
        tried_on(
            [(rank, *sizes) for sizes in CASES for rank in range(sizes[0])],
            ["rank", "ranks", "microbatches"],
            lambda rank, *sizes: with_sizes(*sizes),
            _not_the_peak,
            WRONG_PEAKS,
        ),
        "The peak is the distance to the last rank, plus one. The number of microbatches only matters if it is smaller "
        "than that.",
        hints=(
            "Count the forwards that a rank runs before its first backward in the picture, for each rank.",
            "From rank to rank, the peak falls by one, to 1 on the last rank. And what is it if there are only two "
            "microbatches?",
        ),
    ),
    "05.3": schedule_exercise(
        CASES,
        _too_slow_or_too_large,
        "With about twice the microbatches in flight, messages no longer delay the pipeline, and memory still does not "
        "grow with the batch.",
        costs=SLOW_MESSAGES,
        best=lambda *case: simulate(learner_schedule(_eager, *case), SLOW_MESSAGES),
        nothing=". Start from your 1F1B, and change its warm-up",
        hints=(
            "Keep the three phases of your 1F1B, and change only the length of the warm-up.",
            "The last rank sends no forward on, so it still needs no warm-up. Each rank before it has two more "
            "messages in its round trip, one down and one up: let it start two more microbatches than the rank "
            "after it.",
        ),
    ),
    "05.4": parts.exercise(
        "05.4",
        "The same gradients as GPipe's, bit for bit, in the order of 1F1B.",
        hints=(
            "The body of GPipe's first loop is your F, that of its second loop is your B. Only the order is new: when"
            " does this rank run its first B?",
            "A rank runs `min(last - rank, len(inputs))` forwards as its warm-up. From then on, each forward is "
            "followed by the backward of the oldest microbatch in `kept`: `kept.pop(0)`.",
            "`for m in range(len(inputs) + warmup)`: an F if `m < len(inputs)`, then a B if `m >= warmup`.",
        ),
    ),
}
