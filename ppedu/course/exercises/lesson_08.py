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
    call,
    equal,
    explain_mistake,
    formulas,
    missing_return,
    require_function,
    tried_on,
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
            where = "but the timeline is in seconds: give seconds, with unit='s'"
            return f"your costs have the unit {fitted.unit!r}, {where}"
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
            return fault + explain_mistake([value], [(run, op, stage)], WRONG_TIMES, _near)
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
WRONG_TIMES = formulas(
    "run, op, stage",
    {
        "mean(times(run, op, stage))": f"That is the mean, and one of them took about {SLOW} times as long as the "
        "others. The median ignores it",
        "median(waits(run, op, stage))": WITH_WAIT,
        "mean(waits(run, op, stage))": WITH_WAIT,
        "median([time for each in range(run.schedule.stages) for time in times(run, op, each)])": "That is the median "
        "over all stages; each stage has its own",
        "median(times(run, 'B' if op == 'F' else 'F', stage))": "Forward and backward are swapped",
        "max(times(run, op, stage))": "That is the slowest of them, an exception",
        "min(times(run, op, stage))": f"That is the fastest of them. {JITTER}",
        "sum(times(run, op, stage))": "That is the sum of all of them; how long does one take?",
        "1000 * median(times(run, op, stage))": IN_SECONDS,
    },
    times=_times,
    waits=_from_end_to_end,
    mean=mean,
    median=median,
)


def _near(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=1e-6)


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
    if why := explain_mistake([value], [(crossed,)], WRONG_LATENCIES, _near):
        return fault + why
    later = [message for message in crossed if not message.first]
    every = [measure(message.delay for message in some) for measure in (median, mean) for some in (crossed, later)]
    if any(_near(value, other) for other in every):
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
WRONG_LATENCIES = formulas(
    "crossed",
    {
        "mean(awaited(crossed))": f"That is the mean, and some messages took {LATE} times as long as the others. The "
        "median ignores them",
        "median([message.gap for message in crossed if message.awaited])": IDLE,
        "median([message.gap for message in crossed])": IDLE,
        "mean([message.gap for message in crossed])": IDLE,
        "min(awaited(crossed))": f"That is the fastest message. {JITTER} where the rank was idle",
        "max(awaited(crossed))": "That is the slowest message, an exception",
        "1000 * median(awaited(crossed))": IN_SECONDS,
    },
    awaited=_awaited,
    mean=mean,
    median=median,
)


# Exercise 2: why a run takes longer than its simulation.


def _not_the_parts(function: Any) -> str | None:
    require_function(function, "measured", "costs")
    for measured, costs in longer_runs():
        parts, right = call(function, named(measured), measured, costs), explained(measured, costs)
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
        why = "" if equal(parts[0], right[0]) else explain_mistake(parts[:1], [(measured, costs)], WRONG_PARTS)
        if why:
            return fault + why
        idle = sum(measured.idle)
        if any(equal(parts[1], each) for each in (idle, idle - sum(simulate(measured.schedule, costs).idle))):
            return f"{fault}. The idle times of all ranks add up, as work does; the ranks wait at the same time"
        if not equal(sum(parts), sum(right)):
            return f"{fault}. Together they must add up to the whole difference, {in_seconds(sum(right))}"
        return fault
    return None


def explained(measured: Timeline, costs: Costs) -> tuple[float, float]:
    """Split the difference between a run and its simulation: due to slower actions, and due to waiting."""
    makespan = replayed(measured.schedule, lengths(measured), float(costs.delay(0, 1)))
    return makespan - simulated(measured, costs), measured.makespan - makespan


def _of_one_time(measured: Timeline, costs: Costs, average: Callable[[list[float]], float], latency: Any) -> float:
    """Return how much longer the simulation takes at the average times of each stage's actions."""
    stages = range(measured.schedule.stages)
    forward, backward = ([average(_times(measured, op, stage)) for stage in stages] for op in "FB")
    return simulated(measured, Costs(forward, backward, latency=latency)) - simulated(measured, costs)


def _of_the_path(measured: Timeline, costs: Costs) -> float:
    """Return how much longer the actions on the critical path take than the simulation."""
    return sum(span.end - span.start for _, span in measured.critical_path()) - simulated(measured, costs)


ONE_TIME = (
    "You replay with one time per stage; each action has its own length, and a slow one delays what comes after it: "
    "replay the run, action by action"
)
OTHERS = "But a rank also waits for the slower actions of the other ranks"

# Common wrong answers for the part that is due to slower actions.
WRONG_PARTS = formulas(
    "measured, costs",
    {
        "sum(longer(measured, costs))": "That is how much longer all ranks together worked. They work at the same "
        "time, and if no action waits for a slow one, it costs nothing",
        "mean(longer(measured, costs))": f"That is how much longer a rank worked on average. {OTHERS}",
        "max(longer(measured, costs))": f"That is how much longer one rank worked. {OTHERS}",
        **{
            f"one_time(measured, costs, {average}, {latency})": ONE_TIME
            for average in ("median", "mean")
            for latency in ("costs.latency", "median(awaited(messages(measured)))", "0")
        },
        "replay(measured, 0) - simulated(measured, costs)": "In your replay, messages take no time; let each take the "
        "latency of the costs",
        "of_the_path(measured, costs)": "You add up the critical path. Without its waits, a different path would be "
        "critical",
        "measured.makespan - simulated(measured, costs)": "That is the whole difference; part of it is waiting",
        "1000 * parts(measured, costs)[0]": IN_SECONDS,
    },
    longer=worked_longer,
    one_time=_of_one_time,
    awaited=_awaited,
    messages=_messages,
    replay=lambda run, latency: replayed(run.schedule, lengths(run), latency),
    of_the_path=_of_the_path,
    parts=explained,
    simulated=simulated,
    mean=mean,
    median=median,
)


# Exercise 3: the messages on the critical path of 1F1B.

SIZES = [(4, 8), (4, 1), (1, 5), (2, 7), (3, 9), (8, 32), (5, 13), (6, 4)]  # ranks, microbatches


@cache
def _awaited_messages(ranks: int, microbatches: int) -> int:
    """Return by how many latencies 1F1B takes longer than without them, if actions take much longer than messages."""
    case, latency = schedule("1f1b", ranks, microbatches), Fraction(1, 1000)
    makespans = [simulate(case, Costs(1, 2, latency=each)).makespan for each in (latency, 0)]
    return int((makespans[0] - makespans[1]) / latency)


def _not_the_messages(case: str, value: Any, *sizes: int) -> str | None:
    right = _awaited_messages(*sizes)
    if equal(value, right):
        return None
    return f"{case} the critical path has {plural(right, 'message')}; your formula gives {unlike(value, right)}"


# Common wrong answers for the messages.
WRONG_MESSAGES = formulas(
    "p, m",
    {
        "2 * (p - 1)": "Those are GPipe's: once down to the last rank, and once back up. 1F1B goes down and up again "
        "and again",
        "2 * m": "That happens to be right for 4 ranks and 8 microbatches. Look at other sizes, too",
        "2 * (p - 1) * m": "So it would be if all microbatches followed one another, as in naive",
        "2 * (p - 1) * ceil(m / p)": "So it would be if the path went all the way down and up for every group of "
        "microbatches. It may also turn around earlier, like that of microbatch 7 in the lesson",
        "2 * (p + m - 2)": "Almost: now and then, one more microbatch adds nothing. After how many does it happen "
        "again?",
    },
)


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
        tried_on(SIZES, ["ranks", "microbatches"], with_sizes, _not_the_messages, WRONG_MESSAGES),
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
