"""Synthetic runs that take longer than their simulation, and their replays: for the exercises that ask why."""

from __future__ import annotations

from functools import cache
from numbers import Real
from random import Random
from typing import Any

from ppedu.core import Action, Schedule
from ppedu.course.exercises.common import too_large
from ppedu.course.exercises.synthetic import synthetic_run
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule


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
    times = costs.durations(case.stages, case.ranks)

    def lasts(action: Action) -> float:
        return float(times[action.op][action.stage]) * chance.uniform(1, most)

    return synthetic_run(case, lasts, travels=lambda: float(costs.delay(0, 1)) + chance.uniform(0, late))


def replayed(measured: Timeline, latency: float) -> float:
    """Return the makespan if every action lasted as long as it did, and nothing else delayed it."""
    lasted = {span.action: span.end - span.start for row in measured.rows for span in row}
    return float(synthetic_run(measured.schedule, lasted.__getitem__, lambda: latency).makespan)


def simulated(measured: Timeline, costs: Costs) -> float:
    return float(simulate(measured.schedule, costs).makespan)


def worked_longer(measured: Timeline, costs: Costs) -> list[float]:
    """Return how much longer each rank worked than in the simulation."""
    return [one - other for one, other in zip(measured.busy, simulate(measured.schedule, costs).busy, strict=True)]


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not too_large(value)
