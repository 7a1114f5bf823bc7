"""Synthetic runs for lessons and exercises: they are the same every time, and the right answers are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from ppedu.core import Action, Result, Schedule, produces, requires
from ppedu.core.files import write_text
from ppedu.core.numeric import plural, pretty
from ppedu.course.drawn import CLUSTER, DrawnJob
from ppedu.course.exercises.common import with_sizes
from ppedu.course.project import heron
from ppedu.sim import Costs, Span, Timeline, simulate
from ppedu.trace import csv_table as table
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


def profiled() -> tuple[Timeline, Timeline]:
    """Return a recorded step of the running example, and the simulation with which it was planned.

    The record is synthetic. All times vary by 1 %, one message in ten is late, and two ranks are slow.
    """
    case, costs, chance = schedule("1f1b", 8, 32), heron.costs(8), Random(8)
    times = costs.durations(case.stages, case.ranks)

    def lasts(action: Action) -> float:
        slow = SLOW_RANKS.get(action.stage, 1)
        return float(times[action.op][action.stage]) * slow * chance.uniform(0.99, 1.01)

    def travels() -> float:
        return float(costs.delay(0, 1)) * (6 if chance.random() < 0.1 else 1)

    return replace(synthetic_run(case, lasts, travels), costs=costs), simulate(case, costs)


def cluster() -> str:
    """Write the table of operations of a drawn job to the file cluster.csv, and return its name.

    The times are those of a published trace; see `ppedu.course.drawn.CLUSTER`.
    """
    write_text("cluster.csv", table.write(CLUSTER.records()))
    return "cluster.csv"


def drawn(job: DrawnJob) -> Run:
    """Return the run of a drawn job, read from its table of operations."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "run.csv")
        write_text(path, table.write(job.records()))
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
