"""Lesson 11: read a run: what each repair is worth, which cure helps most, and which worker is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from operator import eq
from random import Random
from statistics import median
from typing import Any

from ppedu.core import Op, Schedule, SettingError
from ppedu.core.numeric import plural
from ppedu.course.drawn import CLUSTER, DrawnJob
from ppedu.course.exercises.common import (
    Exercise,
    Mistakes,
    call,
    equal,
    explain_mistake,
    formulas,
    listed,
    missing_return,
    require_function,
    tried_on,
)
from ppedu.course.exercises.synthetic import (
    IN_SECONDS,
    drawn,
    in_seconds,
    is_number,
    lengths,
    longer_runs,
    named,
    planned,
    replayed,
    simulated,
    slowed,
    worked_longer,
)
from ppedu.sim import Costs, Timeline, simulate
from ppedu.trace.run import Run
from ppedu.zoo import schedule

# Exercise 1: how much longer a run takes because of each rank.


def _not_the_blame(function: Any) -> str | None:
    require_function(function, "measured", "costs")
    for measured, costs in longer_runs():
        ranks, right = measured.schedule.ranks, _blame(measured, costs)
        given = _with_costs(function, measured, costs)
        if not (isinstance(given, Sequence) and len(given) == ranks and all(map(is_number, given))):
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
        return fault + explain_mistake([given], [(measured, costs)], WRONG_BLAME, _all_equal)
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

    Args:
        ops: The kinds of the actions that do.
    """
    case, latency, lasted = measured.schedule, float(costs.delay(0, 1)), lengths(measured)
    plan, found = planned(case, costs), []
    for order in case.orders:
        repaired = lasted | {action: plan[action] for action in order if action.op in ops}
        found.append(replayed(case, lasted, latency) - replayed(case, repaired, latency))
    return found


def _blame_of_the_rest(measured: Timeline, costs: Costs) -> list[float]:
    """Return by rank how much longer the simulation takes if that rank's actions last as long as they did."""
    case, latency, lasted = measured.schedule, float(costs.delay(0, 1)), lengths(measured)
    plan, found = planned(case, costs), []
    for order in case.orders:
        slowed_down = plan | {action: lasted[action] for action in order}
        found.append(replayed(case, slowed_down, latency) - simulated(measured, costs))
    return found


def _from_the_run(measured: Timeline, costs: Costs) -> list[float]:
    """Return the blame, with the makespan of the run in place of that of its replay."""
    more = float(measured.makespan) - replayed(measured.schedule, lengths(measured), float(costs.delay(0, 1)))
    return [one + more for one in _blame(measured, costs)]


def _all_equal(ones: Sequence[float], others: Sequence[float]) -> bool:
    return all(map(equal, ones, others))


# Common wrong answers for the ranks' blame.
WRONG_BLAME = formulas(
    "measured, costs",
    {
        "worked_longer(measured, costs)": "That is how much longer each rank worked. But another rank may be slower "
        "still, so that nothing is gained",
        "of_the_rest(measured, costs)": "You slow down one rank of the simulation. Ask the other way round: all ranks "
        "as they were, and one at its costs",
        "from_the_run(measured, costs)": "You compare with the run, which also waited. Compare with a replay, in which "
        "nothing else is in the way",
        "blame(measured, costs, 'F')": "You changed only its forwards",
        "blame(measured, costs, 'B')": "You changed only its backwards",
        "[-one for one in blame(measured, costs)]": "The sign is wrong: time saved is positive",
        "[1000 * one for one in blame(measured, costs)]": IN_SECONDS,
    },
    worked_longer=worked_longer,
    of_the_rest=_blame_of_the_rest,
    from_the_run=_from_the_run,
    blame=_blame,
)


# Exercise 2: the cure that helps most.

Cures = dict[str, tuple[Schedule, Any]]  # by name, a schedule, and the layers of each stage, before and after


@cache
def _treated() -> list[tuple[Run, Cures]]:
    """Return runs, each with its cures; the lesson's own case first."""
    heavy, even = (
        drawn(replace(CLUSTER, steps=6)),
        drawn(DrawnJob(schedule("1f1b", 2, 4), replicas=1, steps=4)),
    )
    return [
        (heavy, cures(heavy)),
        (even, {"zb-h1": (schedule("zb-h1", 2, 4), None), "16 microbatches": (schedule("1f1b", 2, 16), None)}),
    ]


def cures(run: Run) -> Cures:
    """Return three cures for a run of 4 ranks whose last stage takes longest."""
    ranks, microbatches = run.schedule.ranks, run.schedule.microbatches
    return {
        "zb-h1": (schedule("zb-h1", ranks, microbatches), None),
        "fewer layers in the last stage": (run.schedule, ([8, 8, 8, 8], [10, 9, 9, 4])),
        "twice the microbatches": (schedule("1f1b", ranks, 2 * microbatches), None),
    }


def _cures_of(run: int) -> Cures:
    return _treated()[run][1]


@cache
def _predicted(run: int, name: str) -> float:
    """Return the seconds of a step of the run with this number, with a cure."""
    measured, given = _treated()[run]
    case, layers = given[name]
    return measured.predict(case, layers=layers).makespan


def _per_microbatch(run: int, name: str) -> float:
    return _predicted(run, name) / _cures_of(run)[name][0].microbatches


def _with_run(number: int) -> str:
    return "for a run of equal stages" if number else "for a run whose last stage is heavy"


def _chosen(function: Any, case: str, number: int) -> str:
    """Return the name of the cure that the learner's function chooses.

    Raises:
        SettingError: it returns something else.
    """
    run, given = _treated()[number]
    name = call(function, case, run, dict(given))
    if not (isinstance(name, str) and name in given):
        wanted = f"one of {listed(given)}{missing_return(name)}"
        raise SettingError(f"{case} your function returns {name!r} instead of {wanted}")
    return name


def _not_the_best_cure(case: str, name: str, number: int) -> str | None:
    best = min(_cures_of(number), key=lambda each: _per_microbatch(number, each))
    if name == best:
        return None
    seconds = [in_seconds(_per_microbatch(number, each)) for each in (name, best)]
    return (
        f"{case} your function chooses {name!r}, with which a microbatch takes {seconds[0]} of a step; with {best!r} "
        f"it takes {seconds[1]}"
    )


# Common wrong ways to choose, by the run's number.
WRONG_CHOICES: Mistakes = [
    (
        lambda number: min(_cures_of(number), key=lambda name: simulate(_cures_of(number)[name][0]).bubble),
        "That has the smallest bubble if all stages are equal. Ask `run.predict`, which knows the run's",
    ),
    (
        lambda number: min(_cures_of(number), key=lambda name: _predicted(number, name)),
        "That has the shortest step. But a step with more microbatches also trains on more: compare the time of one",
    ),
    (
        lambda number: max(_cures_of(number), key=lambda name: _per_microbatch(number, name)),
        "That is the slowest of them",
    ),
]


# Exercise 3: the slow workers.


@cache
def _fleet() -> list[tuple[Run, list[tuple[int, int]]]]:
    """Return runs of several replicas, each with its slow workers, as replica and rank."""
    small = DrawnJob(
        schedule("1f1b", 3, 4), replicas=3, steps=4, noise=0.02, planted="slow worker", by=0.3, always=True
    )
    return [
        (slowed(), [_victim(CLUSTER.seed, 4, 4)]),
        (drawn(replace(CLUSTER, steps=4, warm_up=0)), []),
        (drawn(small), [_victim(small.seed, 3, 3)]),
        (drawn(replace(small, planted="pauses", by=6.0)), []),
    ]


def _victim(seed: int, replicas: int, ranks: int) -> tuple[int, int]:
    """Return the replica and the rank that a drawn job slows down."""
    chance = Random(seed)
    return chance.randrange(replicas), chance.randrange(ranks)


def _not_the_slow_workers(function: Any) -> str | None:
    require_function(function, "run")
    for run, right in _fleet():
        ranks, replicas = range(run.schedule.ranks), run.replicas
        case = f"in a run of {plural(len(replicas), 'replica')} of {plural(len(ranks), 'rank')}"
        found = call(function, case, run)
        workers = [*product(replicas, ranks)]
        if not (
            isinstance(found, (list, tuple, set)) and all(type(each) is tuple and each in workers for each in found)
        ):
            return f"{case} your function returns {found!r} instead of a list such as [(1, 3)]{missing_return(found)}"
        for replica, rank in sorted({*found} ^ {*right}):
            other = next(each for each in replicas if each != replica)
            times = (
                f"it works {in_seconds(_works(run, replica, rank))} in a step, and rank {rank} of replica {other} "
                f"{in_seconds(_works(run, other, rank))}"
            )
            if (replica, rank) in right:
                return f"{case} you miss rank {rank} of replica {replica}: {times}"
            fault = f"{case} you name rank {rank} of replica {replica}: {times}"
            if all((each, rank) in found for each in replicas):
                return f"{fault}. If a rank is slow in all replicas, its stage is heavy"
            if all((replica, each) in found for each in ranks):
                return f"{fault}. You name its whole replica. Most of these ranks wait for the slow one; find that one"
            return fault
    return None


def _works(run: Run, replica: int, rank: int) -> float:
    """Return how long a worker works in a step, in the median over the steps."""
    return median(float(run.timeline(step, replica).busy[rank]) for step in run.steps)


EXERCISES = {
    "11.1": Exercise(
        _not_the_blame,
        "That is a what-if analysis: it says what a repair is worth before anything is repaired.",
        hints=(
            "How long would the run take with its own lengths, and nothing late? Which of these lengths would a repair "
            "change?",
            "For each rank, replay once more. That rank's actions last as long as in "
            "`pp.simulate(measured.schedule, costs)`, all others as long as they did.",
            "`was | {action: planned[action] for action, *_ in measured.spans(rank)}` are the lengths with one rank "
            "repaired, if `was` and `planned` are the lengths of the run and of the simulation.",
        ),
    ),
    "11.2": Exercise(
        tried_on([(0,), (1,)], ["run", "cures"], _with_run, _not_the_best_cure, WRONG_CHOICES, _chosen, eq),
        "You compare what a microbatch costs, with the run's own times: stages of unequal length, messages and all.",
        hints=(
            "`run.predict(schedule, layers=layers).makespan` is how long a step would take.",
            "A step with 16 microbatches trains on twice as much as one with 8.",
            "Choose the smallest `makespan / schedule.microbatches`.",
        ),
    ),
    "11.3": Exercise(
        _not_the_slow_workers,
        "A slow worker differs from the same rank of the other replicas; a heavy stage is heavy in all of them.",
        hints=(
            "`run.timeline(step, replica).busy[rank]` is how long a rank works in a step. A rank that waits isn't "
            "working.",
            "Take the median over the steps. Then compare each rank with the same rank of the other replicas.",
            "If `busy` has the times of a rank by replica, then a worker is slow if its own is more than 1.1 times "
            "`median(busy.values())`.",
        ),
    ),
}
