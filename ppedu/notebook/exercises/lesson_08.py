"""Lesson 8: estimate the costs from a run, and explain why it takes longer than its simulation.

Answers are checked with synthetic runs: these are the same every time, and the right answer is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import isclose
from numbers import Real
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from ppedu.core.actions import Action, B, F, Op
from ppedu.core.costs import Costs
from ppedu.core.dependencies import Result, produces, requires
from ppedu.core.numeric import plural, pretty
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Span, Timeline
from ppedu.notebook.exercises.common import (
    Exercise,
    call,
    equal,
    missing_return,
    require_function,
    too_large,
    with_sizes,
)
from ppedu.zoo import schedule


def synthetic_run(
    case: Schedule,
    lasts: Callable[[Action], float],
    travels: Callable[[], float],
    pause: Callable[[], float] = lambda: 0.0,
) -> Timeline:
    """Return a timeline such as might be measured.

    lasts: `lasts(action)` returns the duration of an action.
    travels: returns the time that a message takes.
    pause: returns the time that a rank pauses between two actions.
    """
    free = [0.0] * case.ranks
    done: dict[Result, tuple[float, int]] = {}
    rows: list[list[Span]] = [[] for _ in range(case.ranks)]
    for rank, index in case.replay.steps:
        action = case.orders[rank][index]
        start = free[rank] + (pause() if rows[rank] else 0)
        for end, source in map(done.__getitem__, requires(action, case.placement, case.lowered)):
            start = max(start, end if source == rank else end + travels())
        free[rank] = start + lasts(action)
        done |= dict.fromkeys(produces(action), (free[rank], rank))
        rows[rank].append(Span(action, start, free[rank]))
    return Timeline(case, tuple(map(tuple, rows)), Costs(unit="s"), "measured")


def _named(run: Timeline) -> str:
    case = run.schedule
    chunks = [plural(case.chunks, "chunk")] if case.chunks > 1 else []
    return f"in a run of {case.name} {with_sizes(case.ranks, case.microbatches, *chunks)}"


def _seconds(*times: float) -> str:
    return " and ".join(pretty(round(time, 9), "s") for time in times)


# Exercise 1: the costs. One forward and one backward of each stage take SLOW times as long as the others, and one
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
    times = costs.durations(case.stages, case.ranks)
    slow = {make(stage, chance.randrange(case.microbatches)) for make in (F, B) for stage in range(case.stages)}

    def lasts(action: Action) -> float:
        return float(times[action.op][action.stage]) * chance.uniform(0.9, 1.1) * (SLOW if action in slow else 1)

    def travels() -> float:
        return float(costs.latency) * chance.uniform(0.8, 1.2) * (LATE if chance.random() < 0.1 else 1)

    return synthetic_run(case, lasts, travels, pause=lambda: chance.uniform(0.0001, 0.0004))


def _not_the_costs(fit: Any) -> str | None:
    require_function(fit, "timeline")
    for run, hidden in _runs():
        fitted = call(fit, _named(run), run)
        if not isinstance(fitted, Costs):
            return (
                f"your function returns {fitted!r} instead of costs, such as pp.Costs(latency=0.005)"
                f"{missing_return(fitted)}"
            )
        fault = _not_the_times(run, fitted, hidden) or _not_the_latency(
            run, float(fitted.latency), float(hidden.latency)
        )
        if fault:
            return f"{_named(run)} {fault}"
    return None


def _not_the_times(run: Timeline, fitted: Costs, hidden: Costs) -> str | None:
    stages, ranks = run.schedule.stages, run.schedule.ranks
    yours, right = (costs.durations(stages, ranks) for costs in (fitted, hidden))
    for op, name in ((Op.F, "forward"), (Op.B, "backward")):
        for stage in range(stages):
            value, time = float(yours[op][stage]), float(right[op][stage])
            if isclose(value, time, rel_tol=0.05):
                continue
            fault = f"a {name} of stage {stage} takes {_seconds(time)}; your costs say {_seconds(value)}"
            if getattr(fitted, name) is None:
                return f"{fault}. You leave out the {name}, and then it is assumed to be twice the forward"
            if not isinstance(getattr(fitted, name), Sequence):
                return (
                    f"{fault}. A single number is the time of a rank's whole share, the same on all ranks: give a list "
                    "with the time of each stage"
                )
            for other, why in WRONG_TIMES:
                if isclose(value, other(run, op, stage), rel_tol=1e-6):
                    return f"{fault}. {why}"
            return fault
    return None


def _times(run: Timeline, op: str, stage: int) -> list[float]:
    """Return the durations of a stage's forwards or backwards."""
    spans = (span for row in run.rows for span in row)
    return [end - start for action, start, end in spans if (action.op, action.stage) == (op, stage)]


def _from_end_to_end(run: Timeline, op: str, stage: int) -> list[float]:
    """Return the durations of a stage's forwards or backwards, each with the wait before it."""
    row = run.rows[run.schedule.placement.rank(stage, 0)]
    ends = [0.0, *(span.end for span in row)]
    return [
        span.end - before
        for span, before in zip(row, ends, strict=False)
        if (span.action.op, span.action.stage) == (op, stage)
    ]


WITH_WAIT = "You measure from the end of the previous action, which includes the wait; use the span's own start"
IN_SECONDS = "The timeline is in seconds; give seconds, too"

# Common wrong answers for the time of a stage's forwards or backwards.
WRONG_TIMES: list[tuple[Callable[[Timeline, str, int], float], str]] = [
    (
        lambda run, op, stage: mean(_times(run, op, stage)),
        f"That is the mean, and one of them took {SLOW} times as long as the others. The median ignores it",
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
    (lambda run, op, stage: min(_times(run, op, stage)), "That is the fastest of them; the others take longer"),
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
    ended = {span.action: span.end for row in run.rows for span in row}
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


def _not_the_latency(run: Timeline, value: float, time: float) -> str | None:
    if isclose(value, time, rel_tol=0.1):
        return None
    fault = f"a message takes {_seconds(time)}; your costs say {_seconds(value)}"
    if value == 0:
        return f"{fault}: they have no latency yet"
    crossed = _messages(run)
    for other, why in WRONG_LATENCIES:
        if isclose(value, other(crossed), rel_tol=1e-6):
            return f"{fault}. {why}"
    later = [message for message in crossed if not message.first]
    every = [measure(message.delay for message in some) for measure in (median, mean) for some in (crossed, later)]
    if any(isclose(value, other, rel_tol=1e-6) for other in every):
        worst = max(crossed, key=lambda message: (not message.awaited, message.delay))
        return (
            f"{fault}. You count messages for which no rank was waiting: the input of {worst.action} was sent "
            f"{_seconds(worst.delay)} before {worst.action} started, but its rank was busy then. Compare the end of "
            "the rank's previous action with the end of the action that sends the message, not with its start"
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
    (lambda crossed: min(_awaited(crossed)), "That is the fastest message; the others take longer"),
    (lambda crossed: max(_awaited(crossed)), "That is the slowest message, an exception"),
    (lambda crossed: 1000 * median(_awaited(crossed)), IN_SECONDS),
]


# Exercise 2: why a run takes longer than its simulation.


@cache
def _longer_runs() -> list[tuple[Timeline, Costs]]:
    """Return synthetic runs, each with the costs of its simulation; the lesson's own case first."""
    even, uneven = Costs(0.020, 0.040), Costs([0.012, 0.020, 0.016], [0.030, 0.030, 0.044], latency=0.004)
    cases = [  # schedule, costs, the most by which an action is slowed down, the most by which a message is late
        (schedule("1f1b", 4, 8), even, 2.5, 0.010),
        (schedule("interleaved", 3, 6, chunks=2), Costs(0.020, 0.040, latency=0.005), 2, 0.020),
        (schedule("1f1b", 4, 8), even, 1, 0.006),
        (schedule("gpipe", 3, 6), uneven, 2, 0),
    ]
    return [(_stretched(*case, Random(seed)), case[1]) for seed, case in enumerate(cases)]


def _stretched(case: Schedule, costs: Costs, most: float, late: float, chance: Random) -> Timeline:
    times = costs.durations(case.stages, case.ranks)

    def lasts(action: Action) -> float:
        return float(times[action.op][action.stage]) * chance.uniform(1, most)

    return synthetic_run(case, lasts, travels=lambda: float(costs.latency) + chance.uniform(0, late))


def _not_the_parts(function: Any) -> str | None:
    require_function(function, "measured", "costs")
    for measured, costs in _longer_runs():
        parts, right = call(function, _named(measured), measured, costs), _parts(measured, costs)
        if not (isinstance(parts, Sequence) and len(parts) == 2 and all(map(_number, parts))):
            return f"your function returns {parts!r} instead of two numbers, slower and waiting{missing_return(parts)}"
        if all(map(equal, parts, right)):
            continue
        fault = (
            f"{_named(measured)} slower actions make up {_seconds(right[0])} of the difference and waiting "
            f"{_seconds(right[1])}; your function returns {_seconds(*parts)}"
        )
        if all(map(equal, parts, reversed(right))):
            return f"{fault}. The two are swapped"
        if not equal(parts[0], right[0]):
            for other, why in WRONG_PARTS:
                if equal(parts[0], other(measured, costs)):
                    return f"{fault}. {why}"
        if not equal(sum(parts), sum(right)):
            return f"{fault}. Together they must add up to the whole difference, {_seconds(sum(right))}"
        return fault
    return None


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not too_large(value)


def _parts(measured: Timeline, costs: Costs) -> tuple[float, float]:
    """Split the difference between a run and its simulation: due to slower actions, and due to waiting."""
    replayed = _replayed(measured, float(costs.latency))
    return replayed - _simulated(measured, costs), measured.makespan - replayed


def _replayed(measured: Timeline, latency: float) -> float:
    """Return the makespan if every action lasted as long as it did, and nothing else delayed it."""
    lasted = {span.action: span.end - span.start for row in measured.rows for span in row}
    return float(synthetic_run(measured.schedule, lasted.__getitem__, lambda: latency).makespan)


def _simulated(measured: Timeline, costs: Costs) -> float:
    return float(simulate(measured.schedule, costs).makespan)


def _with_medians(measured: Timeline, latency: Any) -> float:
    medians = Costs.fit(measured)
    return _simulated(measured, Costs(medians.forward, medians.backward, latency=latency))


def _worked_longer(measured: Timeline, costs: Costs) -> list[float]:
    """Return how much longer each rank worked than in the simulation."""
    return [one - other for one, other in zip(measured.busy, simulate(measured.schedule, costs).busy, strict=True)]


MEDIANS = (
    "You simulate with the median of each stage. But its actions had different durations, and each delays other "
    "actions by its own: replay the run, action by action"
)
OTHERS = "But a rank also waits for the slower actions of the other ranks"

# Common wrong answers for the part that is due to slower actions.
WRONG_PARTS: list[tuple[Callable[[Timeline, Costs], float], str]] = [
    (
        lambda measured, costs: sum(_worked_longer(measured, costs)),
        "That is how much longer all ranks together worked. They work at the same time, and if no action waits for a "
        "slow one, it costs nothing",
    ),
    (
        lambda measured, costs: mean(_worked_longer(measured, costs)),
        f"That is how much longer a rank worked on average. {OTHERS}",
    ),
    (
        lambda measured, costs: max(_worked_longer(measured, costs)),
        f"That is how much longer one rank worked. {OTHERS}",
    ),
    (lambda measured, costs: _with_medians(measured, costs.latency) - _simulated(measured, costs), MEDIANS),
    (lambda measured, costs: _with_medians(measured, 0) - _simulated(measured, costs), MEDIANS),
    (
        lambda measured, costs: _replayed(measured, 0) - _simulated(measured, costs),
        "In your replay, messages take no time; let each take the latency of the costs",
    ),
    (
        lambda measured, costs: (
            sum(span.end - span.start for _, span in measured.critical_path()) - _simulated(measured, costs)
        ),
        "You add up the critical path. Without its waits, a different path would be critical",
    ),
    (
        lambda measured, costs: measured.makespan - _simulated(measured, costs),
        "That is the whole difference; part of it is waiting",
    ),
    (lambda measured, costs: 1000 * _parts(measured, costs)[0], IN_SECONDS),
]


EXERCISES = {
    "08.1": Exercise(
        _not_the_costs,
        "Slow actions, late messages and ranks that are busy when a message arrives do not mislead your function.",
    ),
    "08.2": Exercise(
        _not_the_parts,
        "With the measured durations replayed, the rest of the difference is waiting: for messages, or for a core.",
    ),
}
