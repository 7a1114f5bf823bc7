"""The best schedule for a size, by constraint solving, with a proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ppedu.core import Placement, Schedule, SettingError
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.validate import require_count, require_number
from ppedu.search.bounds import least_ticks
from ppedu.search.instance import Instance, named
from ppedu.search.known import one_by_one, published
from ppedu.search.solve import answers, require_solver
from ppedu.sim import Costs, Timeline, simulate

FORMULATIONS = ("intervals", "counters")
MOST_ACTIONS = 2000
FIRST_TIMEOUT = 1.0  # seconds for the first try at a horizon; each try that has no answer doubles it


@dataclass(frozen=True)
class Found:
    """The best schedule of a search.

    Attributes:
        status: "optimal" if none is better, else "feasible".
        bound: No schedule has a makespan below this.
        proofs: What shows that: "bound", a closed formula, or the formulations in which the solver found a
            contradiction, "intervals" and "counters".
        seconds: The time that the search took.
        ticks: The bound in ticks.
        interrupted: Whether the search was ended by Ctrl+C.
    """

    instance: Instance
    schedule: Schedule
    status: str
    bound: Number
    proofs: tuple[str, ...]
    seconds: float
    ticks: int = 0
    interrupted: bool = False

    @property
    def timeline(self) -> Timeline:
        """The simulation of the schedule."""
        return simulate(self.schedule, self.instance.costs)

    @property
    def makespan(self) -> Any:
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """By what fraction the makespan exceeds the bound; what rounding the times to ticks has cost is included."""
        return float(self.makespan / self.bound - 1) if self.bound else 0.0

    @property
    def state(self) -> str:
        """How near the schedule is to the best, with the proofs, in words."""
        known = "optimal" if self.status == "optimal" else f"feasible, at most {self.gap:.1%} above the best"
        if self.status == "optimal" and self.instance.error:
            known += f", up to {self.gap:.1%} of rounding"
        return f"{known} ({' and '.join(self.proofs)})"

    def __str__(self) -> str:
        instance = self.instance
        memory = "" if instance.memory is None else f", memory {pretty(instance.memory)}"
        makespan = pretty(self.makespan, instance.costs.unit)
        return f"{instance}{memory}: makespan {makespan}, {self.state}; {self.seconds:.1f} s"

    __repr__ = __str__


def optimal(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    memory: Number | None = None,
    placement: Placement | str = "loop",
    chunks: int | None = None,
    split: bool = True,
    pairs: bool = False,
    slices: int | None = None,
    recompute: bool = False,
    time_limit: float = 10,
    workers: int = 2,
    progress: Callable[[Found], object] | None = None,
) -> Found:
    """Return the best schedule for a size that the time allows to find, and a bound for all schedules.

    Needs OR-tools: `pip install "ppedu[search]"`.

    It starts from the registered schedules that fit. Then it asks a constraint solver for a better one, again and
    again, until the solver proves that there are no better ones. Where that is hard, it first does the same for fewer
    microbatches: any of them that follow each other take at least as long as that many alone. Two formulations race:
    start times of all actions, and, for short times, counters without microbatches. Times are counted in ticks; where
    these would be too many, times are rounded down. The bound stays a bound, and `Found.gap` says what that costs.

    Args:
        memory: What each rank may hold, in the unit of `Timeline.peak_activations`: with two chunks on each rank, a
            stage's activation is half a unit. None for any amount.
        placement: "loop", "v" or "bidirectional", with `chunks` stages on each rank (by default 1, in a V 2), or a
            Placement.
        split: True for backwards in two halves, False for whole ones.
        pairs: Allow overlapped pairs of a forward and a whole backward, which take `costs.overlap`; with split=False.
        slices: Of each microbatch's sequence, by default one. `costs.attention` and `costs.lengths` count.
        recompute: Allow R: a stage may keep the inputs of its microbatches (`costs.stage_input`) and run all their
            forwards again.
        time_limit: In seconds. Ctrl+C ends the search with what it has found.
        workers: Processor cores to use.
        progress: Is called with each better schedule.

    Raises:
        SettingError: An argument is not possible, or the memory is too little for a single microbatch.
        PipelineError: OR-tools is missing.
    """
    require_limits(time_limit, workers)
    place = named(placement, ranks, chunks, microbatches, slices)
    instance = Instance.of(place, microbatches, costs, split, pairs, memory, recompute)
    return search(instance, time_limit, workers, progress)


def require_limits(time_limit: Any, workers: Any) -> None:
    """Raise SettingError unless these are a number of seconds and a number of cores."""
    require_number("time_limit", time_limit, lambda each: each >= 0, "a number of seconds, at least 0")
    require_count("workers", workers)


def search(
    instance: Instance,
    seconds: float,
    workers: int = 2,
    progress: Callable[[Found], object] | None = None,
    starts: Iterable[Schedule] = (),
    least: int = 0,
    fewer: Mapping[int, int] = {},
) -> Found:
    """Search for the best schedule of an instance; see `optimal`.

    Args:
        starts: Schedules of the instance that are known.
        least: A bound in ticks that is known.
        fewer: Bounds for fewer microbatches, by their number.
    """
    require_solver()
    if instance.actions > MOST_ACTIONS:
        raise SettingError(
            f"{instance} are {instance.actions} actions, more than a solver can order (at most {MOST_ACTIONS}); "
            "take fewer microbatches, or pp.search.steady, which finds a pattern for any number"
        )
    begin = time.monotonic()
    best = min([*starts, *published(instance), one_by_one(instance)], key=instance.ticks_of)
    most, least, proofs = instance.ticks_of(best), max(least, least_ticks(instance)), ("bound",)

    def found() -> Found:
        is_optimal = most <= least
        bound = plain(least * instance.tick)
        if is_optimal and not instance.error:
            bound = simulate(best, instance.costs).makespan
        status = "optimal" if is_optimal else "feasible"
        return Found(instance, best, status, bound, proofs, time.monotonic() - begin, least)

    # The makespan is at least `least` and at most `most`. Ask for one in the middle, and move one of them to the
    # answer: between 10 and 20, ask for 14. If no schedule takes 14 or less, `least` is 15.
    # Where a timeout passes without an answer, ask only for longer makespans from then on, with a longer timeout.
    timeout, shortest_to_ask = FIRST_TIMEOUT, 0
    # Before that, try once whether bounds for fewer microbatches help.
    try_fewer = (
        not fewer and instance.memory is not None and instance.placement.copies == 1 and instance.microbatches > 2
    )
    try:
        for seed in count():  # a solver that is unlucky for long may find it at once in another order
            left = begin + seconds - time.monotonic()
            if least >= most or left <= 0:
                break
            middle = (least + most - 1) // 2
            horizon = min(most - 1, max(shortest_to_ask, middle))
            answer, how = race(instance, horizon, min(timeout, left), workers, FORMULATIONS, fewer, seed)
            if answer:
                best, most = answer, instance.ticks_of(answer)
                if progress:
                    progress(found())
            elif how:
                least, proofs = horizon + 1, (how,)
            elif try_fewer and left > FIRST_TIMEOUT:
                try_fewer = False
                fewer = _fewer(instance, left / 2, workers)
            else:
                shortest_to_ask = horizon + 1
                timeout *= 2
    except KeyboardInterrupt:
        return replace(found(), interrupted=True)
    return found()


def _fewer(instance: Instance, seconds: float, workers: int) -> dict[int, int]:
    """Return bounds for fewer microbatches, from two on, each found with the help of those before."""
    found: dict[int, int] = {}
    end = time.monotonic() + seconds
    for number in range(2, instance.microbatches):
        searches_left = instance.microbatches - number
        share = (end - time.monotonic()) / searches_left
        result = search(replace(instance, microbatches=number), max(0, share), workers, fewer=found)
        if result.interrupted:
            raise KeyboardInterrupt
        found[number] = result.ticks
    return found


def race(
    instance: Instance,
    horizon: int,
    seconds: float,
    workers: int = 2,
    only: Sequence[str] = FORMULATIONS,
    fewer: Mapping[int, int] = {},
    seed: int = 0,
) -> tuple[Schedule | None, str | None]:
    """Ask whether there is a schedule within a horizon: the formulations race for an answer.

    Returns:
        A schedule, or None; and the formulation that has answered, or None if none has in time.
    """
    from ppedu.search.counters import MOST_TICKS, Counters
    from ppedu.search.intervals import Intervals

    instance, parts = instance.in_order()
    horizon = horizon * parts + parts - 1
    fewer = {number: ticks * parts for number, ticks in fewer.items()}
    questions: dict[str, Any] = {}
    if "intervals" in only:
        questions["intervals"] = Intervals(instance, horizon, fewer)
    if "counters" in only and not instance.pairs and horizon <= MOST_TICKS:
        questions["counters"] = Counters(instance, horizon, fewer)
    models = {name: each.model for name, each in questions.items()}
    with closing(answers(models, seconds, workers, seed)) as ended:
        for name, solver, status in ended:
            if status in ("OPTIMAL", "FEASIBLE"):
                return questions[name].schedule(solver), name
            if status == "INFEASIBLE":
                return None, name
    return None, None
