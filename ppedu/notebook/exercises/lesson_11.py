"""Lesson 11: how many copies of the model the ranks hold, and DualPipeV's row of the published table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppedu.core.costs import Costs
from ppedu.core.numeric import plural, pretty
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.notebook.exercises.common import Exercise, ask, equal, explain_mistake, not_the_idle_time, require_function
from ppedu.zoo import schedule


def _counted() -> list[Schedule]:
    """Return the schedules whose copies are counted; the lesson's own case first."""
    return [
        schedule("1f1b", 4, 8),
        schedule("dualpipe", 4, 8),
        schedule("dualpipev", 4, 8),
        schedule("zb-v", 4, 8),
        schedule("interleaved", 2, 4, chunks=3),
        schedule("chimera", 6, 6),
        schedule("dualpipev", 3, 6),
    ]


# Common wrong answers for the number of copies.
WRONG_COUNTS: list[tuple[Callable[[Schedule], Any], str]] = [
    (
        lambda schedule: len(schedule.placement.stages_of(0)),
        "You count the stages on one rank; how many stages is the model cut into?",
    ),
    (
        lambda schedule: schedule.chunks,
        "chunks is the number of stages of one copy on a rank: it says how finely a copy is cut, not how many copies "
        "there are",
    ),
    (
        lambda schedule: sum(len(schedule.placement.stages_of(rank)) for rank in range(schedule.ranks)),
        "You count all stages on all ranks; how many make one model?",
    ),
    (
        lambda schedule: len(schedule.placement.stages_of(0)) / schedule.stages,
        "That is the fraction of the model that one rank holds; add up all ranks",
    ),
]


def _not_the_copies(function: Any) -> str | None:
    require_function(function, "schedule")
    cases = _counted()
    answers = [ask(function, _named(each), each) for each in cases]
    for each, value in zip(cases, answers, strict=True):
        held = sum(len(each.placement.stages_of(rank)) for rank in range(each.ranks))
        if equal(value, held / each.stages):
            continue
        fault = (
            f"{_named(each)} the model is cut into {plural(each.stages, 'stage')}, and together the ranks hold "
            f"{held}: {pretty(held / each.stages)} of each; your function returns {pretty(value)}"
        )
        return fault + explain_mistake(answers, [(case,) for case in cases], WRONG_COUNTS)
    return None


def _named(schedule: Schedule) -> str:
    return f"for {schedule.name} on {plural(schedule.ranks, 'rank')}"


# (ranks, time of F, time of B, time of W of a share), for which the published formula is exact: F = I, and W is not
# longer. The lesson's own case first.
TIMES = [(4, 1, 2, 1), (8, 1, 2, 1), (3, 2, 4, 2), (5, 4, 6, 2), (1, 1, 2, 1), (6, 3, 4, 1)]

# Common wrong readings of the published (PP/2-1)(F&B+B-3W), with p ranks.
WRONG_ROWS: list[tuple[Callable[..., Any], str]] = [
    (
        lambda p, f, b, w: (p / 2 - 1) * (f + 2 * b - 3 * w),
        "That is the idle time of DualPipe on the same number of ranks. In the table PP counts the stages, and the "
        "times are those of a stage: how many stages does DualPipeV have here, and what fraction of a rank's share is "
        "each?",
    ),
    (
        lambda p, f, b, w: (p - 1) * (f + 2 * b - 3 * w),
        "PP is right. But the table's times are those of a stage, and here a stage is half of a rank's share",
    ),
    (
        lambda p, f, b, w: (p / 2 - 1) * (f + 2 * b - 3 * w) / 2,
        "You are right that a stage's times are halves. But PP counts the stages, and a rank has two",
    ),
    (
        lambda p, f, b, w: (p - 1) * (max(f, b) + b - 3 * w) / 2,
        "You let the shorter half of a pair take no time; without overlap F&B is F+B",
    ),
    (lambda p, f, b, w: (p - 1) * (f + b), "That is the idle time of 1F1B"),
    (lambda p, f, b, w: (p - 1) * (f + b - 2 * w), "That is the idle time of ZB-H1, which the table calls ZB1P"),
]


def _not_the_row(formula: Any) -> str | None:
    letters = {"forward": "F", "backward": "B", "weight": "W"}
    return not_the_idle_time(formula, letters, TIMES, _idle_time, WRONG_ROWS)


def _idle_time(ranks: int, forward: int, backward: int, weight: int) -> Any:
    costs = Costs(forward=forward, backward=backward, weight=weight)
    return simulate(schedule("dualpipev", ranks, 2 * ranks), costs).idle[0]


EXERCISES = {
    "11.1": Exercise(
        _not_the_copies,
        "DualPipe's ranks hold the model twice. DualPipeV's hold it once, although each has two stages as well.",
    ),
    "11.2": Exercise(
        _not_the_row,
        "That is the published row for p ranks: twice as many stages, each half as long.",
    ),
}
