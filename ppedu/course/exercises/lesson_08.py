"""Lesson 8: estimate the costs from a run, explain why it takes longer than its simulation, and count its messages.

Answers are checked with synthetic runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from math import isclose
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from ppedu.core import Action, B, F, Op, Schedule
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
from ppedu.course.exercises.synthetic import (
    IN_SECONDS,
    in_seconds,
    is_number,
    lengths,
    longer_runs,
    named,
    planned,
    replayed,
    simulated,
    synthetic_run,
    worked_longer,
)
from ppedu.sim import Costs, Timeline, simulate
from ppedu.sim.per_link import PerLink
from ppedu.zoo import schedule

# Exercise 1: the costs.

# One forward and one backward of each stage take SLOW times as long as the others, and one
# message in ten takes LATE times as long.
SLOW, LATE = 8, 6


@cache
def _runs() -> list[tuple[Timeline, Costs]]:
    """Return synthetic runs, each with the costs to be found; the lesson's own case first."""
    chunks = Costs([0.015, 0.012, 0.018, 0.010], [0.030, 0.020, 0.028, 0.024], latency=0.003)
    cases = [  # with seeds for which the medians are within 3 % of the true costs
        (schedule("1f1b", 4, 8), Costs(0.020, 0.040, latency=0.005), 63),
        (schedule("1f1b", 3, 6), Costs([0.010, 0.030, 0.020], [0.025, 0.050, 0.035], latency=0.008), 141),
        (schedule("interleaved", 2, 6, chunks=2), chunks, 1262),
    ]
    return [(_noisy(case, costs, Random(seed)), costs) for case, costs, seed in cases]


def _noisy(case: Schedule, costs: Costs, chance: Random) -> Timeline:
    """Return a run in which all times vary a little, and some actions and messages take much longer."""
    plan, latency = planned(case, costs), float(costs.delay(0, 1))
    slow = {make(stage, chance.randrange(case.microbatches)) for make in (F, B) for stage in range(case.stages)}

    def lasts(action: Action) -> float:
        return plan[action] * chance.uniform(0.9, 1.1) * (SLOW if action in slow else 1)

    def travels() -> float:
        return latency * chance.uniform(0.8, 1.2) * (LATE if chance.random() < 0.1 else 1)

    return synthetic_run(case, lasts, travels, pause=lambda: chance.uniform(0.0001, 0.0004))


def _not_the_costs(fit: Any) -> str | None:
    require_function(fit, "timeline")
    for run, hidden in _runs():
        fitted = call(fit, named(run), run)
        if not isinstance(fitted, Costs):
            return (
                f"your function returns {fitted!r} instead of costs, such as pp.Costs(latency=0.005)"
                f"{missing_return(fitted)}"
            )
        if fitted.unit not in ("", "s"):
            return (
                f"your costs have the unit {fitted.unit!r}, but the timeline is in seconds: give seconds, with unit='s'"
            )
        fault = _not_the_times(run, fitted, hidden) or _not_the_latency(run, fitted, float(hidden.delay(0, 1)))
        if fault:
            return f"{named(run)} {fault}"
    return None


def _not_the_times(run: Timeline, fitted: Costs, hidden: Costs) -> str | None:
    stages, ranks = run.schedule.stages, run.schedule.ranks
    yours, right = (costs.durations(stages, ranks) for costs in (fitted, hidden))
    for op, name in ((Op.F, "forward"), (Op.B, "backward")):
        for stage in range(stages):
            value, time = float(yours[op][stage]), float(right[op][stage])
            if isclose(value, time, rel_tol=0.05):
                continue
            fault = f"a {name} of stage {stage} takes {in_seconds(time)}; your costs say {in_seconds(value)}"
            if getattr(fitted, name) is None:
                return f"{fault}. You leave out the {name}, and then it is assumed to be twice the forward"
            if not isinstance(getattr(fitted, name), Sequence):
                return (
                    f"{fault}. A single number is the time of a rank's whole share, the same on all ranks: give a list "
                    "with the time of each stage"
                )
            for wrong, why in WRONG_TIMES:
                if isclose(value, wrong(run, op, stage), rel_tol=1e-6):
                    return f"{fault}. {why}"
            return fault
    return None


def _times(run: Timeline, op: str, stage: int) -> list[float]:
    """Return the durations of a stage's forwards or backwards."""
    return [time for action, time in lengths(run).items() if (action.op, action.stage) == (op, stage)]


def _from_end_to_end(run: Timeline, op: str, stage: int) -> list[float]:
    """Return the durations of a stage's forwards or backwards, each with the wait before it."""
    row = run.rows[run.schedule.placement.rank(stage, 0)]
    ends = [0.0, *(span.end for span in row)]
    return [
        span.end - before
        for span, before in zip(row, ends, strict=False)
        if (span.action.op, span.action.stage) == (op, stage)
    ]


JITTER = "Jitter moves the minimum with every run; take the median"
WITH_WAIT = "You measure from the end of the previous action, which includes the wait; use the span's own start"

# Common wrong answers for the time of a stage's forwards or backwards.
WRONG_TIMES: list[tuple[Callable[[Timeline, str, int], float], str]] = [
    (
        lambda run, op, stage: mean(_times(run, op, stage)),
        f"That is the mean, and one of them took about {SLOW} times as long as the others. The median ignores it",
    ),
    (lambda run, op, stage: median(_from_end_to_end(run, op, stage)), WITH_WAIT),
    (lambda run, op, stage: mean(_from_end_to_end(run, op, stage)), WITH_WAIT),
    (
        lambda run, op, stage: median(time for each in range(run.schedule.stages) for time in _times(run, op, each)),
        "That is the median over all stages; each stage has its own",
    ),
    (
        lambda run, op, stage: median(_times(run, "B" if op == "F" else "F", stage)),
        "Forward and backward are swapped",
    ),
    (lambda run, op, stage: max(_times(run, op, stage)), "That is the slowest of them, an exception"),
    (lambda run, op, stage: min(_times(run, op, stage)), f"That is the fastest of them. {JITTER}"),
    (lambda run, op, stage: sum(_times(run, op, stage)), "That is the sum of all of them; how long does one take?"),
    (lambda run, op, stage: 1000 * median(_times(run, op, stage)), IN_SECONDS),
]


class Message(NamedTuple):
    """A message from another rank, and the action that needs it."""

    action: Action
    delay: float  # from the end of the action that sends the message to the start of the one that needs it
    gap: float  # how long the rank was idle before `action`
    awaited: bool  # was the rank already idle when the message was sent?
    first: bool  # is `action` the rank's first?


def _messages(run: Timeline) -> list[Message]:
    """Return all messages of a run. In these schedules, neighboring stages are on different ranks."""
    ended = {action: end for row in run.rows for action, _, end in row}
    crossed = []
    for row in run.rows:
        free = 0.0
        for action, start, end in row:
            stage, op, microbatch, _ = action
            made = ended.get(F(stage - 1, microbatch) if op == "F" else B(stage + 1, microbatch))
            if made is not None:
                crossed.append(Message(action, start - made, start - free, made > free, not free))
            free = end
    return crossed


def _not_the_latency(run: Timeline, fitted: Costs, time: float) -> str | None:
    if isinstance(fitted.latency, PerLink):
        return (
            "your costs have a latency for each link, like those of pp.Costs.fit. Here all links are alike, and few "
            "messages travel on each: give one number, from the messages of all links"
        )
    value = float(fitted.delay(0, 1))
    if isclose(value, time, rel_tol=0.1):
        return None
    fault = f"a message takes {in_seconds(time)}; your costs say {in_seconds(value)}"
    if value == 0:
        return f"{fault}: they have no latency yet"
    crossed = _messages(run)
    for wrong, why in WRONG_LATENCIES:
        if isclose(value, wrong(crossed), rel_tol=1e-6):
            return f"{fault}. {why}"
    later = [message for message in crossed if not message.first]
    every = [measure(message.delay for message in some) for measure in (median, mean) for some in (crossed, later)]
    if any(isclose(value, other, rel_tol=1e-6) for other in every):
        worst = max(crossed, key=lambda message: (not message.awaited, message.delay))
        return (
            f"{fault}. You count messages for which no rank was waiting: the input of {worst.action} was sent "
            f"{in_seconds(worst.delay)} before {worst.action} started, but its rank was busy then. Count a message "
            "only if the rank's previous action had ended before the action that sends it"
        )
    return fault


def _awaited(crossed: Sequence[Message]) -> list[float]:
    return [message.delay for message in crossed if message.awaited]


IDLE = "That is how long a rank is idle; for part of that time, the message it waits for has not been sent yet"

# Common wrong answers for the latency.
WRONG_LATENCIES: list[tuple[Callable[[Sequence[Message]], float], str]] = [
    (
        lambda crossed: mean(_awaited(crossed)),
        f"That is the mean, and some messages took {LATE} times as long as the others. The median ignores them",
    ),
    (lambda crossed: median(message.gap for message in crossed if message.awaited), IDLE),
    (lambda crossed: median(message.gap for message in crossed), IDLE),
    (lambda crossed: mean(message.gap for message in crossed), IDLE),
    (
        lambda crossed: min(_awaited(crossed)),
        f"That is the fastest message. {JITTER} where the rank was idle",
    ),
    (lambda crossed: max(_awaited(crossed)), "That is the slowest message, an exception"),
    (lambda crossed: 1000 * median(_awaited(crossed)), IN_SECONDS),
]


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
            for wrong, why in WRONG_PARTS:
                if equal(parts[0], wrong(measured, costs)):
                    return f"{fault}. {why}"
        idle = sum(measured.idle)
        if any(equal(parts[1], each) for each in (idle, idle - sum(simulate(measured.schedule, costs).idle))):
            return f"{fault}. The idle times of all ranks add up, as work does; the ranks wait at the same time"
        if not equal(sum(parts), sum(right)):
            return f"{fault}. Together they must add up to the whole difference, {in_seconds(sum(right))}"
        return fault
    return None


def _parts(measured: Timeline, costs: Costs) -> tuple[float, float]:
    """Split the difference between a run and its simulation: due to slower actions, and due to waiting."""
    makespan = _replayed(measured, float(costs.delay(0, 1)))
    return makespan - simulated(measured, costs), measured.makespan - makespan


def _replayed(measured: Timeline, latency: float) -> float:
    return replayed(measured.schedule, lengths(measured), latency)


def _with_one_time_per_stage(measured: Timeline, average: Callable[[list[float]], float], latency: Any) -> float:
    stages = range(measured.schedule.stages)
    forward, backward = ([average(_times(measured, op, stage)) for stage in stages] for op in "FB")
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
        for latency in (
            lambda _, costs: costs.latency,
            lambda measured, _: median(_awaited(_messages(measured))),
            lambda *_: 0,
        )
    ),
    (
        lambda measured, costs: _replayed(measured, 0) - simulated(measured, costs),
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
        right = _awaited_messages(*sizes)
        if not equal(value, right):
            fault = (
                f"{case} the critical path has {plural(right, 'message')}; your formula gives {unlike(value, right)}"
            )
            return fault + explain_mistake(answers, SIZES, WRONG_MESSAGES)
    return None


@cache
def _awaited_messages(ranks: int, microbatches: int) -> int:
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
        _not_the_costs,
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
