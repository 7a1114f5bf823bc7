"""Lesson 3: the formula of GPipe's bubble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppedu.core.numeric import pretty
from ppedu.core.simulate import simulate
from ppedu.notebook.exercises.common import (
    CASES,
    Exercise,
    ask,
    equal,
    explain_mistake,
    require_function,
    unlike,
    with_sizes,
)
from ppedu.zoo import schedule

# Common wrong answers for GPipe's bubble with p ranks and m microbatches.
WRONG_BUBBLES: list[tuple[Callable[[int, int], float], str]] = [
    (
        lambda p, m: (p - 1) / m,
        "That is the overhead: the makespan divided by the time that the busiest rank works, minus 1. Megatron calls "
        "it the bubble. The idle fraction of the makespan is smaller, because the makespan includes the idle time",
    ),
    (
        lambda p, m: (p - 1) / p,
        "That is naive's bubble, where one rank works at a time, whatever the number of microbatches",
    ),
    (lambda p, m: m / (m + p - 1), "That is the fraction of the time in which a rank works; the bubble is the rest"),
    (lambda p, m: p - 1, "That is the idle time, in units of F+B; divide it by the makespan in the same units"),
    (
        lambda p, m: p / (m + p),
        "The last rank waits only for the ranks before it, which are one fewer than all ranks",
    ),
    (
        lambda p, m: p / (m + p - 1),
        "The makespan is right, but the last rank waits only for the p-1 ranks before it",
    ),
    (
        lambda p, m: (p - 1) / (m + p),
        "The idle time is right; the makespan is just the sum of the idle time and the working time",
    ),
    (
        lambda p, m: (p - 1) / (2 * (m - 1) + p),
        "This formula has been published, but it is wrong: for the work it counts forwards and backwards, for the wait "
        "only one of them",
    ),
    (
        lambda p, m: (p - 1) / (2 * m + p - 1),
        "For the work it counts forwards and backwards, for the wait only one of them",
    ),
    (
        lambda p, m: 2 * (p - 1) / (m + 2 * (p - 1)),
        "The wait is counted twice: the last rank waits for p-1 forwards, and later for p-1 backwards; together that "
        "is p-1 times F+B",
    ),
    (
        lambda p, m: (p - 1) / (3 * m + 3 * (p - 1)),
        "That is only the wait at the start, if a backward takes twice as long as a forward; at the end the rank waits "
        "for p-1 backwards",
    ),
    (lambda p, m: 3 * (p - 1) / (m + 3 * (p - 1)), "It counts the wait in forwards, but the work in units of F+B"),
    (lambda p, m: (p - 1) // (m + p - 1), "The formula is right, but // rounds down; divide with /"),
    (lambda p, m: (m - 1) / (m + p - 1), "Ranks and microbatches are swapped"),
    (lambda p, m: 100 * (p - 1) / (m + p - 1), "Return a fraction between 0 and 1, not a percentage"),
]


def _not_the_bubble(formula: Any) -> str | None:
    require_function(formula, "ranks", "microbatches")
    answers, right = [], []
    for ranks, microbatches in CASES:
        answers.append(ask(formula, with_sizes(ranks, microbatches), ranks, microbatches))
        right.append(simulate(schedule("gpipe", ranks, microbatches)))
    wrong = [not equal(yours, timeline.bubble) for yours, timeline in zip(answers, right, strict=True)]
    if not any(wrong):
        return None
    place = wrong.index(True)
    timeline, value = right[place], answers[place]
    fault = (
        f"{with_sizes(*CASES[place])} each rank is idle for {timeline.idle[0]} of {timeline.makespan}, a fraction of "
        f"{pretty(timeline.bubble)}; your formula gives {unlike(value, timeline.bubble)}"
    )
    holds = f", although it is right {with_sizes(*CASES[wrong.index(False)])}" if False in wrong[:place] else ""
    return fault + (explain_mistake(answers, CASES, WRONG_BUBBLES) or holds)


EXERCISES = {
    "03.1": Exercise(
        _not_the_bubble,
        "A rank works for m times F+B and waits for p-1 times F+B; whatever F and B are, they cancel.",
    ),
}
