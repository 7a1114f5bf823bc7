"""Lesson 8: estimate the costs from a run, explain why it takes longer than its simulation, and count its messages.

Answers are checked with synthetic runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from statistics import mean, median
from typing import Any

from ppedu.core.numeric import plural
from ppedu.course.exercises.common import (
    Exercise,
    Mistakes,
    ask,
    call,
    equal,
    explain_mistake,
    missing_return,
    require_function,
    unlike,
    with_sizes,
)
from ppedu.course.exercises.fitted_costs import latency_of, not_the_costs
from ppedu.course.exercises.replays import is_number, longer_runs, replayed, simulated, worked_longer
from ppedu.course.exercises.synthetic import IN_SECONDS, in_seconds, named
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule

# Exercise 2: why a run takes longer than its simulation.


def _not_the_parts(function: Any) -> str | None:
    require_function(function, "measured", "costs")
    for measured, costs in longer_runs():
        parts, right = call(function, named(measured), measured, costs), _parts(measured, costs)
        if not (isinstance(parts, Sequence) and len(parts) == 2 and all(map(is_number, parts))):
            return f"your function returns {parts!r} instead of two numbers, slower and waiting{missing_return(parts)}"
        if all(map(equal, parts, right)):
            continue
        fault = (
            f"{named(measured)} slower actions make up {in_seconds(right[0])} of the difference and waiting "
            f"{in_seconds(right[1])}; your function returns {in_seconds(*parts)}"
        )
        if all(map(equal, parts, reversed(right))):
            return f"{fault}. The two are swapped"
        if not equal(parts[0], right[0]):
            for other, why in WRONG_PARTS:
                if equal(parts[0], other(measured, costs)):
                    return f"{fault}. {why}"
        idle = sum(measured.idle)
        if any(map(partial(equal, parts[1]), (idle, idle - sum(simulate(measured.schedule, costs).idle)))):
            return f"{fault}. The idle times of all ranks add up, as work does; the ranks wait at the same time"
        if not equal(sum(parts), sum(right)):
            return f"{fault}. Together they must add up to the whole difference, {in_seconds(sum(right))}"
        return fault
    return None


def _parts(measured: Timeline, costs: Costs) -> tuple[float, float]:
    """Split the difference between a run and its simulation: due to slower actions, and due to waiting."""
    makespan = replayed(measured, float(costs.delay(0, 1)))
    return makespan - simulated(measured, costs), measured.makespan - makespan


def _with_one_time_per_stage(measured: Timeline, average: Callable[[list[float]], float], latency: Any) -> float:
    lasted: dict[tuple[str, int], list[float]] = {}
    for row in measured.rows:
        for action, start, end in row:
            lasted.setdefault((action.op, action.stage), []).append(end - start)
    forward, backward = ([average(lasted[op, stage]) for stage in range(measured.schedule.stages)] for op in "FB")
    return simulated(measured, Costs(forward, backward, latency=latency))


ONE_TIME = (
    "You replay with one time per stage; each action has its own length, and a slow one delays what comes after it: "
    "replay the run, action by action"
)
OTHERS = "But a rank also waits for the slower actions of the other ranks"

# Common wrong answers for the part that is due to slower actions.
WRONG_PARTS: list[tuple[Callable[[Timeline, Costs], float], str]] = [
    (
        lambda measured, costs: sum(worked_longer(measured, costs)),
        "That is how much longer all ranks together worked. They work at the same time, and if no action waits for a "
        "slow one, it costs nothing",
    ),
    (
        lambda measured, costs: mean(worked_longer(measured, costs)),
        f"That is how much longer a rank worked on average. {OTHERS}",
    ),
    (
        lambda measured, costs: max(worked_longer(measured, costs)),
        f"That is how much longer one rank worked. {OTHERS}",
    ),
    *(
        (
            lambda measured, costs, average=average, latency=latency: (
                _with_one_time_per_stage(measured, average, latency(measured, costs)) - simulated(measured, costs)
            ),
            ONE_TIME,
        )
        for average in (median, mean)
        for latency in (lambda _, costs: costs.latency, lambda measured, _: latency_of(measured), lambda *_: 0)
    ),
    (
        lambda measured, costs: replayed(measured, 0) - simulated(measured, costs),
        "In your replay, messages take no time; let each take the latency of the costs",
    ),
    (
        lambda measured, costs: (
            sum(span.end - span.start for _, span in measured.critical_path()) - simulated(measured, costs)
        ),
        "You add up the critical path. Without its waits, a different path would be critical",
    ),
    (
        lambda measured, costs: measured.makespan - simulated(measured, costs),
        "That is the whole difference; part of it is waiting",
    ),
    (lambda measured, costs: 1000 * _parts(measured, costs)[0], IN_SECONDS),
]


# Exercise 3: the messages on the critical path of 1F1B.

SIZES = [(4, 8), (4, 1), (1, 5), (2, 7), (3, 9), (8, 32), (5, 13), (6, 4)]  # ranks, microbatches


def _not_the_messages(formula: Any) -> str | None:
    require_function(formula, "ranks", "microbatches")
    cases = [with_sizes(*sizes) for sizes in SIZES]
    answers = [ask(formula, case, *sizes) for case, sizes in zip(cases, SIZES, strict=True)]
    for case, value, sizes in zip(cases, answers, SIZES, strict=True):
        right = _messages(*sizes)
        if not equal(value, right):
            fault = (
                f"{case} the critical path has {plural(right, 'message')}; your formula gives {unlike(value, right)}"
            )
            return fault + explain_mistake(answers, SIZES, WRONG_MESSAGES)
    return None


@cache
def _messages(ranks: int, microbatches: int) -> int:
    """Return by how many latencies 1F1B takes longer than without them, if actions take much longer than messages."""
    case, latency = schedule("1f1b", ranks, microbatches), Fraction(1, 1000)
    makespans = [simulate(case, Costs(1, 2, latency=each)).makespan for each in (latency, 0)]
    return int((makespans[0] - makespans[1]) / latency)


# Common wrong answers for the messages.
WRONG_MESSAGES: Mistakes = [
    (
        lambda ranks, microbatches: 2 * (ranks - 1),
        "Those are GPipe's: once down to the last rank, and once back up. 1F1B goes down and up again and again",
    ),
    (
        lambda ranks, microbatches: 2 * microbatches,
        "That happens to be right for 4 ranks and 8 microbatches. Look at other sizes, too",
    ),
    (
        lambda ranks, microbatches: 2 * (ranks - 1) * microbatches,
        "So it would be if all microbatches followed one another, as in naive",
    ),
    (
        lambda ranks, microbatches: 2 * (ranks - 1) * -(-microbatches // ranks),
        "So it would be if the path went all the way down and up for every group of microbatches. It may also turn "
        "around earlier, like that of microbatch 7 in the lesson",
    ),
    (
        lambda ranks, microbatches: 2 * (ranks + microbatches - 2),
        "Almost: now and then, one more microbatch adds nothing. After how many does it happen again?",
    ),
]


EXERCISES = {
    "08.1": Exercise(
        not_the_costs,
        "Slow actions, late messages and ranks that are busy when a message arrives do not mislead your function.",
        hints=(
            "Which average of eight times doesn't change if one of them is eight times as long?",
            "For the latency, go through each rank's spans with the end of its previous action at hand. Which "
            "action of another rank does this one need, and when did that one end?",
            "Count a message only if the needed action ended *after* the rank's own previous action: "
            "`delays.append(start - ended[needed])`. Then take the median of the delays.",
        ),
    ),
    "08.2": Exercise(
        _not_the_parts,
        "With the measured durations replayed, the rest of the difference is waiting: for messages, or for a core.",
        hints=(
            "You need one more makespan: that of a run with the measured durations, and nothing else in the way.",
            "A rank that waits for a slow action of another rank loses time to a slow action, too. Which run has all "
            "slow actions, with everything that they delay, and not a single late message?",
            "`replayed(measured.schedule, lengths(measured), costs.latency)` is that run. Compare its makespan with "
            "the other two.",
        ),
    ),
    "08.3": Exercise(
        _not_the_messages,
        "GPipe waits for 2(p-1) messages, however many microbatches there are. In 1F1B, each microbatch from the third "
        "on adds two, except every p-th of them.",
        hints=(
            "Simulate 1F1B with 4 ranks and 1 to 12 microbatches, with a latency of 1 and of 0, where a forward takes "
            "1000. Print the differences.",
            "Each microbatch adds two messages, except that now and then one adds none. Compare 3, 4 and 5 ranks: how "
            "far apart are these?",
            "It is `2 * (ranks - 1)` for the first two microbatches. Of the other `microbatches - 2`, each adds 2, but "
            "for `(microbatches - 2) // ranks` of them.",
        ),
    ),
}
