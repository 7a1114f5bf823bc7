"""Lesson 3: the formula of GPipe's bubble, and its makespan with uneven stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppedu.core import PipelineError, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import (
    CASES,
    Exercise,
    ask,
    equal,
    formulas,
    listed,
    tried_on,
    unlike,
    with_sizes,
)
from ppedu.sim import Costs, simulate
from ppedu.zoo import schedule

# Common wrong answers for GPipe's bubble with p ranks and m microbatches.
WRONG_BUBBLES = formulas(
    "p, m",
    {
        "(p - 1) / m": "That is the overhead: the makespan divided by the time that the busiest rank works, minus 1. "
        "Megatron calls it the bubble. The idle fraction of the makespan is smaller, because the makespan includes the "
        "idle time",
        "(p - 1) / p": "That is naive's bubble, where one rank works at a time, whatever the number of microbatches",
        "m / (m + p - 1)": "That is the fraction of the time in which a rank works; the bubble is the rest",
        "p - 1": "That is the idle time, in units of F+B; divide it by the makespan in the same units",
        "p / (m + p)": "The last rank waits only for the ranks before it, which are one fewer than all ranks",
        "p / (m + p - 1)": "The makespan is right, but the last rank waits only for the p-1 ranks before it",
        "(p - 1) / (m + p)": "The idle time is right; the makespan is just the sum of the idle time and the working "
        "time",
        "(p - 1) / (2 * (m - 1) + p)": "This formula has been published, but it is wrong: for the work it counts "
        "forwards and backwards, for the wait only one of them",
        "(p - 1) / (2 * m + p - 1)": "For the work it counts forwards and backwards, for the wait only one of them",
        "2 * (p - 1) / (m + 2 * (p - 1))": "The wait is counted twice: the last rank waits for p-1 forwards, and later "
        "for p-1 backwards; together that is p-1 times F+B",
        "(p - 1) / (3 * m + 3 * (p - 1))": "That is only the wait at the start, if a backward takes twice as long as a "
        "forward; at the end the rank waits for p-1 backwards",
        "3 * (p - 1) / (m + 3 * (p - 1))": "It counts the wait in forwards, but the work in units of F+B",
        "(p - 1) // (m + p - 1)": "The formula is right, but // rounds down; divide with /",
        "(m - 1) / (m + p - 1)": "Ranks and microbatches are swapped",
        "100 * (p - 1) / (m + p - 1)": "Return a fraction between 0 and 1, not a percentage",
    },
)


def _not_a_formula(function: Any, case: str, *sizes: Any) -> str | None:
    """Explain that an answer with the right numbers simulates instead of computing; return None for a formula.

    Args:
        sizes: arguments that are too large to be simulated.
    """
    try:
        ask(function, case, *sizes)
    except SettingError as error:
        if isinstance(error.__context__, PipelineError):
            return (
                f"the numbers are right, but they come from the simulator, which gives up {case}. This exercise asks "
                "for a formula"
            )
        stop = "" if str(error).endswith("?") else "."
        return f"the numbers are right, but {error}{stop} A formula works for any size"
    return None


def _not_the_bubble(case: str, value: Any, *sizes: int) -> str | None:
    timeline = simulate(schedule("gpipe", *sizes))
    if equal(value, timeline.bubble):
        return None
    holds = "" if sizes == CASES[0] else f", although it is right {with_sizes(*CASES[0])}"
    return (
        f"{case} each rank is idle for {timeline.idle[0]} of {timeline.makespan}, a fraction of "
        f"{pretty(timeline.bubble)}; your formula gives {unlike(value, timeline.bubble)}{holds}"
    )


# (forward times of the stages, microbatches): the lesson's own case first.
UNEVEN = [
    *[([2, 1, 1, 1], 8), ([1, 1, 1, 1], 8), ([1, 2, 1, 3], 1), ([5, 1, 1], 2), ([1, 4, 4, 2, 1], 7)],
    *[([1, 3, 2], 5), ([3], 4)],
]

# Common wrong answers for GPipe's makespan with uneven stages, whose backwards take twice as long as their forwards.
WRONG_MAKESPANS = formulas(
    "f, m",
    {
        "3 * (m + len(f) - 1) * max(f)": "That treats all stages as if they were as slow as the slowest. A microbatch "
        "passes the fast ones in their own time",
        "3 * (m + len(f) - 1) * sum(f) / len(f)": "That is right if every stage takes the mean time. But the fast "
        "stages cannot make up for the slow one: they wait for it",
        "3 * m * sum(f)": "That is one microbatch at a time, as with naive",
        "3 * m * max(f)": "That is the time for which the slowest rank works; it also waits",
        "sum(f) + (m - 1) * max(f)": "That is the time of the forwards alone; the backwards follow, and take twice as "
        "long",
        "3 * (sum(f) + m * max(f))": "The slowest stage is counted once too often: one of its microbatches is in the "
        "sum already",
        "3 * sum(f)": "That is the time of a single microbatch; how much does each further one add?",
        "3 * (sum(f) + (m - 1) * min(f))": "Each further microbatch adds more: it cannot overtake at the slowest stage",
        "3 * (sum(f) + (m - 1) * f[0])": "That is right if stage 0 is the slowest; it need not be",
        "3 * (sum(f) + (m - 1) * f[-1])": "That is right if the last stage is the slowest; it need not be",
    },
)


def _with_forwards(forwards: Sequence[int], microbatches: int) -> str:
    return f"with forwards of {listed(forwards)} and {plural(microbatches, 'microbatch')}"


def _ask(function: Any, case: str, forwards: Sequence[int], microbatches: int) -> Any:
    return ask(function, case, list(forwards), microbatches)  # a copy, because the function may change it


def _not_the_makespan(case: str, value: Any, forwards: Sequence[int], microbatches: int) -> str | None:
    right = simulate(schedule("gpipe", len(forwards), microbatches), Costs(forward=forwards)).makespan
    return None if equal(value, right) else f"{case} the makespan is {right}; your formula gives {unlike(value, right)}"


def _not_a_formula_of_the_bubble(formula: Any) -> str | None:
    huge = 10**5, 10**6
    fault = tried_on(CASES, ["ranks", "microbatches"], with_sizes, _not_the_bubble, WRONG_BUBBLES)(formula)
    return fault or _not_a_formula(formula, with_sizes(*huge), *huge)


def _not_a_formula_of_the_makespan(formula: Any) -> str | None:
    parameters, many = ["forwards", "microbatches"], 10**6
    fault = tried_on(UNEVEN, parameters, _with_forwards, _not_the_makespan, WRONG_MAKESPANS, _ask)(formula)
    return fault or _not_a_formula(formula, f"with 10 stages and {plural(many, 'microbatch')}", [1] * 10, many)


EXERCISES = {
    "03.1": Exercise(
        _not_a_formula_of_the_bubble,
        "A rank works for m times F+B and waits for p-1 times F+B; whatever F and B are, they cancel.",
        hints=(
            "Take F+B as the unit of time. In the pictures with the brackets, how many units does rank 3 work, and how "
            "many does it wait? How many with one microbatch more, and with one rank more?",
            "Each rank works for one unit per microbatch. The last rank waits for a forward of each rank before it, "
            "and later for a backward of each.",
            "The bubble is waiting / (working + waiting), with p-1 units of waiting.",
        ),
    ),
    "03.2": Exercise(
        _not_a_formula_of_the_makespan,
        "Every stage counts once, and the slowest counts for each further microbatch. So in a long step only the "
        "slowest stage matters: balance comes first.",
        hints=(
            "With one microbatch, it passes every stage once forward and once backward. What does a second one add?",
            "In front of the slowest stage, the microbatches queue up; behind it, they arrive at its pace. So each "
            "further microbatch adds the slowest stage's time, forward and backward.",
        ),
    ),
    "03.3": parts.exercise(
        "03.3",
        "On every rank, all gradients are those of one process, bit for bit.",
        hints=(
            "Which four functions have you got? A forward needs `receive`, `forward` and `send`, in this order. A "
            "backward needs `receive`, `backward` and `send`.",
            "Forward: rank 0 takes `inputs[m]` instead of receiving. The last rank puts `y = loss_fn(y, targets[m])` "
            "before it keeps `x` and `y`.",
            "Backward: `dy = receive(shape, rank + 1)`, then `send(backward(x, y, dy), rank - 1)`. At the ends, "
            "`receive` returns None and `send` does nothing.",
        ),
    ),
}
