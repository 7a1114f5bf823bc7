"""Synthetic runs for lessons and exercises: they are the same every time, and the right answers are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from numbers import Real
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from ppedu.core import Action, Result, Schedule, produces, requires
from ppedu.core.files import write_text
from ppedu.core.numeric import plural, pretty
from ppedu.course.drawn import CLUSTER, DrawnJob, table_of
from ppedu.course.exercises.common import too_large, with_sizes
from ppedu.course.project import heron
from ppedu.sim import Costs, Span, Timeline, simulate
from ppedu.trace.run import Run
from ppedu.zoo import schedule

SLOW_RANKS = {2: 1.04, 5: 1.07}  # by rank, how many times as long its actions take
IN_SECONDS = "The timeline is in seconds; give seconds, too"


def synthetic_run(
    case: Schedule,
    lasts: Callable[[Action], float],
    travels: Callable[[], float],
    pause: Callable[[], float] = lambda: 0.0,
) -> Timeline:
    """Return a timeline such as might be measured.

    Args:
        lasts: Returns the duration of an action.
        travels: Returns the time that a message takes.
        pause: Returns the time that a rank pauses between two actions.
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


@cache
def longer_runs() -> list[tuple[Timeline, Costs]]:
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
    plan, latency = planned(case, costs), float(costs.delay(0, 1))
    return synthetic_run(
        case, lambda action: plan[action] * chance.uniform(1, most), lambda: latency + chance.uniform(0, late)
    )


def lengths(run: Timeline) -> dict[Action, float]:
    """Return how long each action of a run took."""
    return {action: end - start for row in run.rows for action, start, end in row}


def planned(case: Schedule, costs: Costs) -> dict[Action, float]:
    """Return how long each action takes at these costs."""
    times = costs.durations(case.stages, case.ranks)
    return {action: float(times[action.op][action.stage]) for order in case.orders for action in order}


def replayed(case: Schedule, lasted: Mapping[Action, float], latency: float) -> float:
    """Return the makespan if every action lasts this long, and nothing but messages delays it."""
    return float(synthetic_run(case, lasted.__getitem__, lambda: latency).makespan)


def simulated(measured: Timeline, costs: Costs) -> float:
    return float(simulate(measured.schedule, costs).makespan)


def worked_longer(measured: Timeline, costs: Costs) -> list[float]:
    """Return how much longer each rank worked than in the simulation."""
    return [one - other for one, other in zip(measured.busy, simulate(measured.schedule, costs).busy, strict=True)]


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not too_large(value)


def profiled() -> tuple[Timeline, Timeline]:
    """Return a recorded step of the running example, and the simulation with which it was planned.

    The record is synthetic. All times vary by 1 %, one message in ten is late, and two ranks are slow.
    """
    case, costs, chance = schedule("1f1b", 8, 32), heron.costs(8), Random(8)
    plan = planned(case, costs)

    def lasts(action: Action) -> float:
        return plan[action] * SLOW_RANKS.get(action.stage, 1) * chance.uniform(0.99, 1.01)

    def travels() -> float:
        return float(costs.delay(0, 1)) * (6 if chance.random() < 0.1 else 1)

    return replace(synthetic_run(case, lasts, travels), costs=costs), simulate(case, costs)


def cluster() -> str:
    """Write the table of operations of a drawn job to the file cluster.csv, and return its name.

    The times are those of a published trace; see `ppedu.course.drawn.CLUSTER`.
    """
    write_text("cluster.csv", table_of(CLUSTER.records()))
    return "cluster.csv"


def drawn(job: DrawnJob) -> Run:
    """Return the run of a drawn job, read from its table of operations."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "run.csv")
        write_text(path, table_of(job.records()))
        return Run.load(path)


def slowed() -> Run:
    """Return a drawn run of four pipelines like that of `cluster`, with one worker that takes twice as long."""
    return drawn(replace(CLUSTER, replicas=4, steps=6, warm_up=0, planted="slow worker", by=1.0, always=True))


def named(run: Timeline) -> str:
    """Describe a run by its schedule and size."""
    case = run.schedule
    chunks = [plural(case.chunks, "chunk")] if case.chunks > 1 else []
    return f"in a run of {case.name} {with_sizes(case.ranks, case.microbatches, *chunks)}"


def in_seconds(*times: float) -> str:
    """Format times for reading: "20 ms and 1.5 s"."""
    return " and ".join(pretty(round(time, 9), "s") for time in times)
