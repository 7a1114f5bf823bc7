"""Exercise 08.1: estimate the costs from a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import isclose
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from ppedu.core import Action, B, F, Op, Schedule
from ppedu.course.exercises.common import call, missing_return, require_function
from ppedu.course.exercises.synthetic import IN_SECONDS, in_seconds, named, synthetic_run
from ppedu.sim import Costs, Timeline
from ppedu.sim.per_link import PerLink
from ppedu.zoo import schedule

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
    times = costs.durations(case.stages, case.ranks)
    slow = {make(stage, chance.randrange(case.microbatches)) for make in (F, B) for stage in range(case.stages)}

    def lasts(action: Action) -> float:
        return float(times[action.op][action.stage]) * chance.uniform(0.9, 1.1) * (SLOW if action in slow else 1)

    def travels() -> float:
        return float(costs.delay(0, 1)) * chance.uniform(0.8, 1.2) * (LATE if chance.random() < 0.1 else 1)

    return synthetic_run(case, lasts, travels, pause=lambda: chance.uniform(0.0001, 0.0004))


def not_the_costs(fit: Any) -> str | None:
    """Explain what is wrong with a function that estimates costs; return None if it is right."""
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
    for other, why in WRONG_LATENCIES:
        if isclose(value, other(crossed), rel_tol=1e-6):
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


def latency_of(run: Timeline) -> float:
    """Return the median time of the messages that a rank waited for."""
    return median(_awaited(_messages(run)))


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
