"""Lesson 8: estimate the costs from a run, and explain why it takes longer than its simulation.

Answers are checked with synthetic runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from numbers import Real
from random import Random
from statistics import mean, median
from typing import Any

from ppedu.core.actions import Action, Op
from ppedu.core.costs import Costs
from ppedu.core.errors import SettingError
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Timeline
from ppedu.notebook.exercises.common import Exercise, call, equal, missing_return, require_function, too_large
from ppedu.notebook.exercises.fitted_costs import latency_of, not_the_costs
from ppedu.notebook.exercises.synthetic import IN_SECONDS, in_seconds, named, synthetic_run
from ppedu.zoo import schedule

# Exercise 2: why a run takes longer than its simulation.


@cache
def _longer_runs() -> list[tuple[Timeline, Costs]]:
    """Return synthetic runs, each with the costs of its simulation; the lesson's own case first."""
    even, uneven = Costs(0.020), Costs([0.012, 0.020, 0.016], [0.030, 0.030, 0.044], latency=0.004)
    cases = [  # schedule, costs, the most by which an action is slowed down, the most by which a message is late
        (schedule("1f1b", 4, 8), even, 2.5, 0.010),
        (schedule("1f1b", 3, 6), Costs(0.020, 0.040, latency=0.005), 2, 0.020),
        (schedule("interleaved", 3, 6, chunks=2), Costs(0.020, 0.040, latency=0.005), 2, 0.020),
        (schedule("1f1b", 4, 8), even, 1, 0.006),
        (schedule("gpipe", 3, 6), uneven, 2, 0),
    ]
    return [(_stretched(*case, Random(seed)), case[1]) for seed, case in enumerate(cases)]


def _stretched(case: Schedule, costs: Costs, most: float, late: float, chance: Random) -> Timeline:
    times = costs.durations(case.stages, case.ranks)

    def lasts(action: Action) -> float:
        return float(times[action.op][action.stage]) * chance.uniform(1, most)

    return synthetic_run(case, lasts, travels=lambda: float(costs.delay(0, 1)) + chance.uniform(0, late))


def _not_the_parts(function: Any) -> str | None:
    require_function(function, "measured", "costs")
    for measured, costs in _longer_runs():
        parts, right = call(function, named(measured), measured, costs), _parts(measured, costs)
        if not (isinstance(parts, Sequence) and len(parts) == 2 and all(map(_number, parts))):
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


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not too_large(value)


def _parts(measured: Timeline, costs: Costs) -> tuple[float, float]:
    """Split the difference between a run and its simulation: due to slower actions, and due to waiting."""
    replayed = _replayed(measured, float(costs.delay(0, 1)))
    return replayed - _simulated(measured, costs), measured.makespan - replayed


def _replayed(measured: Timeline, latency: float) -> float:
    """Return the makespan if every action lasted as long as it did, and nothing else delayed it."""
    lasted = {span.action: span.end - span.start for row in measured.rows for span in row}
    return float(synthetic_run(measured.schedule, lasted.__getitem__, lambda: latency).makespan)


def _simulated(measured: Timeline, costs: Costs) -> float:
    return float(simulate(measured.schedule, costs).makespan)


def _with_one_time_per_stage(measured: Timeline, average: Callable[[list[float]], float], latency: Any) -> float:
    lasted: dict[tuple[str, int], list[float]] = {}
    for row in measured.rows:
        for action, start, end in row:
            lasted.setdefault((action.op, action.stage), []).append(end - start)
    forward, backward = ([average(lasted[op, stage]) for stage in range(measured.schedule.stages)] for op in "FB")
    return _simulated(measured, Costs(forward, backward, latency=latency))


def _worked_longer(measured: Timeline, costs: Costs) -> list[float]:
    """Return how much longer each rank worked than in the simulation."""
    return [one - other for one, other in zip(measured.busy, simulate(measured.schedule, costs).busy, strict=True)]


ONE_TIME = (
    "You replay with one time per stage; each action has its own length, and a slow one delays what comes after it: "
    "replay the run, action by action"
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
    *(
        (
            lambda measured, costs, average=average, latency=latency: (
                _with_one_time_per_stage(measured, average, latency(measured, costs)) - _simulated(measured, costs)
            ),
            ONE_TIME,
        )
        for average in (median, mean)
        for latency in (lambda _, costs: costs.latency, lambda measured, _: latency_of(measured), lambda *_: 0)
    ),
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


# Exercise 3: how much longer a run takes because of each rank.


def _not_the_blame(function: Any) -> str | None:
    require_function(function, "measured", "costs")
    for measured, costs in _longer_runs():
        ranks, right = measured.schedule.ranks, _blame(measured, costs)
        given = _with_costs(function, measured, costs)
        if not (isinstance(given, Sequence) and len(given) == ranks and all(map(_number, given))):
            return (
                f"{named(measured)} your function returns {given!r} instead of {ranks} numbers, one for each rank"
                f"{missing_return(given)}"
            )
        rank = next((rank for rank in range(ranks) if not equal(given[rank], right[rank])), None)
        if rank is None:
            continue
        fault = (
            f"{named(measured)} the replay would be {in_seconds(right[rank])} shorter if rank {rank} alone had run at "
            f"its costs; your function returns {in_seconds(given[rank])}"
        )
        for other, why in WRONG_BLAME:
            if all(map(equal, given, other(measured, costs))):
                return f"{fault}. {why}"
        return fault
    return None


def _with_costs(function: Any, measured: Timeline, costs: Costs) -> Any:
    """Call the learner's function; explain an error that it does not raise if the costs name each stage's times."""
    try:
        return call(function, named(measured), measured, costs)
    except SettingError as error:
        times = costs.durations(measured.schedule.stages, measured.schedule.ranks)
        try:
            call(function, named(measured), measured, Costs(times[Op.F], times[Op.B], latency=costs.latency))
        except SettingError:
            raise error from None
        raise SettingError(
            f"{error}. In costs, one number stands for all stages, and None as backward for twice the forward. Take "
            "the durations from pp.simulate(measured.schedule, costs)"
        ) from None


def _blame(measured: Timeline, costs: Costs, ops: str = "FB") -> list[float]:
    """Return by rank how much shorter the replay is if that rank's actions last as long as in the simulation.

    ops: the kinds of the actions that do.
    """
    times = costs.durations(measured.schedule.stages, measured.schedule.ranks)
    own = {span.action: span.end - span.start for row in measured.rows for span in row}
    longest = _replayed(measured, float(costs.delay(0, 1)))
    found = []
    for row in measured.rows:
        planned = {
            span.action: float(times[span.action.op][span.action.stage]) for span in row if span.action.op in ops
        }
        lasted = own | planned
        run = synthetic_run(measured.schedule, lasted.__getitem__, lambda: float(costs.delay(0, 1)))
        found.append(longest - float(run.makespan))
    return found


def _blame_of_the_rest(measured: Timeline, costs: Costs) -> list[float]:
    """Return by rank how much longer the simulation takes if that rank's actions last as long as they did."""
    times = costs.durations(measured.schedule.stages, measured.schedule.ranks)
    planned = {action: float(times[action.op][action.stage]) for row in measured.rows for action, *_ in row}
    found = []
    for row in measured.rows:
        lasted = planned | {span.action: span.end - span.start for span in row}
        run = synthetic_run(measured.schedule, lasted.__getitem__, lambda: float(costs.delay(0, 1)))
        found.append(float(run.makespan) - _simulated(measured, costs))
    return found


def _from_the_run(measured: Timeline, costs: Costs) -> list[float]:
    """Return the blame, with the makespan of the run in place of that of its replay."""
    more = float(measured.makespan) - _replayed(measured, float(costs.delay(0, 1)))
    return [one + more for one in _blame(measured, costs)]


# Common wrong answers for the ranks' blame.
WRONG_BLAME: list[tuple[Callable[[Timeline, Costs], Sequence[float]], str]] = [
    (
        _worked_longer,
        "That is how much longer each rank worked. But another rank may be slower still, so that nothing is gained",
    ),
    (
        _blame_of_the_rest,
        "You slow down one rank of the simulation. Ask the other way round: all ranks as they were, and one at its "
        "costs",
    ),
    (
        _from_the_run,
        "You compare with the run, which also waited. Compare with a replay, in which nothing else is in the way",
    ),
    (lambda measured, costs: _blame(measured, costs, "F"), "You changed only its forwards"),
    (lambda measured, costs: _blame(measured, costs, "B"), "You changed only its backwards"),
    (lambda measured, costs: [-one for one in _blame(measured, costs)], "The sign is wrong: time saved is positive"),
    (lambda measured, costs: [1000 * one for one in _blame(measured, costs)], IN_SECONDS),
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
            "Keep two things as you go through the spans in the order of their starts: when each rank is free, and "
            "when each action has ended in the replay.",
            "An action begins at the later of two times: its rank is free, or its input has arrived, `costs.latency` "
            "after the end of the action that it needs. It lasts `end - start`.",
        ),
    ),
    "08.3": Exercise(
        _not_the_blame,
        "That is a what-if analysis: it says what a repair is worth before anything is repaired.",
        hints=(
            "You have a replay from exercise 08.2. Which durations would you change in it?",
            "For each rank, replay once more. That rank's actions last as long as in "
            "`pp.simulate(measured.schedule, costs)`, all others as long as they did.",
        ),
    ),
}
