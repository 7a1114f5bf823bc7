"""Lesson 3: the formula of GPipe's bubble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppedu.core.numeric import pretty
from ppedu.core.simulate import simulate
from ppedu.notebook.exercises.common import CASES, Exercise, ask, equal, mistake, require_function, unlike, with_sizes
from ppedu.zoo import schedule

# What people write for GPipe's bubble, p ranks and m microbatches, and what it is instead.
OTHER_BUBBLES: list[tuple[Callable[[int, int], float], str]] = [
    (
        lambda p, m: (p - 1) / m,
        "That is the overhead: the makespan over the time that the busiest rank works, minus 1. Megatron calls it the "
        "bubble. The idle share of the makespan is less, because the makespan holds the idle time too",
    ),
    (lambda p, m: (p - 1) / p, "That is naive's bubble, where one rank works at a time however many microbatches"),
    (lambda p, m: m / (m + p - 1), "That is the share of the time in which a rank works; the bubble is the rest"),
    (lambda p, m: p - 1, "That is the idle time, in units of F+B; divide it by the makespan in the same units"),
    (
        lambda p, m: p / (m + p),
        "The last rank waits for the ranks before it, and there is one less of these than ranks",
    ),
    (lambda p, m: p / (m + p - 1), "The makespan is right, but only the ranks before the last keep it waiting"),
    (lambda p, m: (p - 1) / (m + p), "The idle time is right; the makespan is that and the working time, no more"),
    (
        lambda p, m: (p - 1) / (2 * (m - 1) + p),
        "This one is in circulation: it counts the forwards and the backwards of the work, but of the wait only one",
    ),
    (
        lambda p, m: (p - 1) / (2 * m + p - 1),
        "It counts the forwards and the backwards of the work, but of the wait only one of the two",
    ),
    (
        lambda p, m: 2 * (p - 1) / (m + 2 * (p - 1)),
        "The wait is counted twice: the last rank waits for p-1 forwards, and then for p-1 backwards; together that is "
        "p-1 times F+B",
    ),
    (
        lambda p, m: (p - 1) / (3 * m + 3 * (p - 1)),
        "That is the wait at the start alone, where a backward takes twice as long as a forward; at the end a rank "
        "waits for p-1 backwards",
    ),
    (lambda p, m: 3 * (p - 1) / (m + 3 * (p - 1)), "It counts the wait in forwards, and the work in units of F+B"),
    (lambda p, m: (p - 1) // (m + p - 1), "The formula is right, but // rounds down; divide with /"),
    (lambda p, m: (m - 1) / (m + p - 1), "Ranks and microbatches have changed places"),
    (lambda p, m: 100 * (p - 1) / (m + p - 1), "Give it as a share, between 0 and 1, not in percent"),
]


def _not_the_bubble(formula: Any) -> str | None:
    require_function(formula, "ranks", "microbatches")
    said, right = [], []
    for ranks, microbatches in CASES:
        said.append(ask(formula, with_sizes(ranks, microbatches), ranks, microbatches))
        right.append(simulate(schedule("gpipe", ranks, microbatches)))
    wrong = [not equal(yours, timeline.bubble) for yours, timeline in zip(said, right, strict=True)]
    if not any(wrong):
        return None
    place = wrong.index(True)
    timeline, value = right[place], said[place]
    fault = (
        f"{with_sizes(*CASES[place])} each rank is idle for {timeline.idle[0]} of {timeline.makespan}, a share of "
        f"{pretty(timeline.bubble)}; your formula says {unlike(value, timeline.bubble)}"
    )
    holds = f", although it is right {with_sizes(*CASES[wrong.index(False)])}" if False in wrong[:place] else ""
    return fault + (mistake(said, CASES, OTHER_BUBBLES) or holds)


EXERCISES = {
    "03.1": Exercise(
        _not_the_bubble,
        "A rank works m times F+B, and waits for p-1 times F+B; whatever F and B are, they cancel.",
    ),
}
