"""The best schedule for a size, by constraint solving, with a proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ppedu.core import Placement, Schedule, SettingError
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.validate import require_count, require_instance, require_number
from ppedu.search.instance import Instance
from ppedu.search.solve import answers, require_solver
from ppedu.sim import Costs, Timeline, simulate

FORMULATIONS = ("intervals", "counters")
MOST_ACTIONS = 2000
FIRST_SLICE = 1.0  # seconds for the first try at a horizon; each try that has no answer doubles it


@dataclass(frozen=True)
class Found:
    """The best schedule of a search.

    status: "optimal" if none is better, else "feasible".
    bound: No schedule has a makespan (or span) below this.
    proofs: What shows that: "bound", a closed formula, or the formulations in which the solver found a contradiction,
        "intervals" and "counters".
    seconds: The time that the search took.
    ticks: The bound in ticks.
    interrupted: The search was ended by Ctrl+C.
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
    def value(self) -> Any:
        """The makespan, or the span if that was asked for."""
        return self.instance.value(self.timeline)

    @property
    def gap(self) -> float:
        """By what fraction the value exceeds the bound; what rounding the times to ticks has cost is included."""
        return float(self.value / self.bound - 1) if self.bound else 0.0

    def __str__(self) -> str:
        unit = self.instance.costs.unit
        held = "" if self.instance.memory is None else f", memory {pretty(self.instance.memory)}"
        state = "optimal" if self.status == "optimal" else f"feasible, at most {self.gap:.1%} above the best"
        if self.status == "optimal" and self.instance.error:
            state += f", up to {self.gap:.1%} of rounding"
        proofs = f" ({' and '.join(self.proofs)})" if self.proofs else ""
        return (
            f"{self.instance}{held}: {self.instance.objective} {pretty(self.value, unit)}, {state}{proofs}; "
            f"{self.seconds:.1f} s"
        )

    __repr__ = __str__


def optimal(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    memory: Number | None = None,
    placement: Placement | str = "loop",
    chunks: int | None = None,
    split: bool | None = True,
    pairs: bool = False,
    objective: str = "makespan",
    time_limit: float = 10,
    workers: int = 2,
    progress: Callable[[Found], object] | None = None,
) -> Found:
    """Return the best schedule for a size that the time allows to find, and a bound for all schedules.

    Needs OR-tools: `pip install "ppedu[search]"`.

    memory: What each rank may hold, in the unit of `Timeline.peak_activations`: with two chunks on each rank, a stage's
        activation is half a unit. None for any amount.
    placement: "loop", "v" or "bidirectional", with `chunks` stages on each rank (by default 1, in a V 2), or a
        Placement.
    split: True for backwards in two halves, False for whole ones, None if each may be either.
    pairs: Allow overlapped pairs of a forward and a whole backward, which take `costs.overlap`; with split=None or
        False.
    objective: "makespan"; or "span", from a rank's first action to its last, of the rank where that is longest (the
        cost in arXiv 2401.10241), of the schedules in which microbatches pass each stage in order; a rank that begins
        with a later microbatch begins later, and may have a shorter span. No makespan gains from another order.
    time_limit: In seconds. Ctrl+C ends the search with what it has found.
    workers: Processor cores to use.
    progress: Is called with each better schedule.

    It starts from the registered schedules that fit. Then it asks a constraint solver for a better one, again and
    again, until the solver proves that there are no better ones. Where that is hard, it first does the same for fewer
    microbatches: any of them that follow each other take at least as long as that many alone. Two formulations race:
    start times of all actions, and, for short times, counters without microbatches. Times are counted in ticks; where
    these would be too many, times are rounded down. The bound stays a bound, and `Found.gap` says what that costs.

    Raises:
        SettingError: An argument is not possible, or the memory is too little for a single microbatch.
        PipelineError: OR-tools is missing.
    """
    instance = Instance.of(
        named(placement, ranks, chunks, microbatches), microbatches, costs, split, pairs, memory, objective
    )
    require_number("time_limit", time_limit, lambda each: each >= 0, "a number of seconds, at least 0")
    return search(instance, time_limit, require_count("workers", workers), progress)


def named(given: Placement | str, ranks: int, chunks: int | None, microbatches: int) -> Placement:
    """Return the placement that `optimal` was given."""
    if isinstance(given, Placement):
        if given.ranks != require_count("ranks", ranks):
            raise SettingError(f"the placement is for {given.ranks} ranks; got ranks={ranks}")
        if chunks is not None:
            raise SettingError("the chunks are those of the placement; leave out chunks")
        return given
    require_instance("placement", given, str, 'a Placement, or "loop", "v" or "bidirectional"')
    return Placement.make(given, ranks, (2 if given == "v" else 1) if chunks is None else chunks, microbatches)


def search(
    instance: Instance,
    seconds: float,
    workers: int = 2,
    progress: Callable[[Found], object] | None = None,
    starts: Sequence[Schedule] = (),
    least: int = 0,
    fewer: Mapping[int, int] = {},
) -> Found:
    """Search for the best schedule of an instance; see `optimal`.

    starts: Schedules of the instance that are known. least: A bound in ticks that is known. fewer: Bounds for fewer
        microbatches, by their number.
    """
    require_solver()
    actions = 3 * instance.microbatches * instance.placement.stages
    if actions > MOST_ACTIONS:
        raise SettingError(
            f"{instance} are {actions} actions, more than a solver can order (at most {MOST_ACTIONS}); take fewer "
            "microbatches, or pp.search.steady, which finds a pattern for any number"
        )
    begin = time.monotonic()
    best = _start(instance, starts)
    most, least, proofs = _ticks(instance, best), max(least, instance.bound), ("bound",)

    def found(schedule: Schedule) -> Found:
        value = instance.value(simulate(schedule, instance.costs))
        bound = plain(least * instance.tick)
        done = most <= least
        bound = value if done and not instance.error else bound
        return Found(
            instance, schedule, "optimal" if done else "feasible", bound, proofs, time.monotonic() - begin, least
        )

    slice_, low = FIRST_SLICE, least  # below low, nothing was found in the time it was given
    try:
        for seed in count():
            left = begin + seconds - time.monotonic()
            if least >= most or left <= 0:
                break
            horizon = min(most - 1, max(low, (least + most - 1) // 2))
            answer, how = race(instance, horizon, min(slice_, left), workers, FORMULATIONS, fewer, seed)
            if answer and (ticks := _ticks(instance, answer)) <= horizon:
                best, most = answer, ticks
                if progress:
                    progress(found(best))
            elif how and not answer:
                least, proofs = horizon + 1, (how,)
                low = max(low, least)
            elif not fewer and left > FIRST_SLICE and _counts(instance):
                fewer = _fewer(instance, left / 2, workers)
            else:  # a solver that is unlucky for long may find it at once in another order
                low, slice_ = horizon + 1, 2 * slice_
    except KeyboardInterrupt:
        return replace(found(best), interrupted=True)
    return found(best)


def _counts(instance: Instance) -> range:
    """Return the smaller numbers of microbatches whose bounds help a search."""
    helps = instance.memory is not None and instance.objective == "makespan" and instance.placement.copies == 1
    return range(2, instance.microbatches if helps else 2)


def _fewer(instance: Instance, seconds: float, workers: int) -> dict[int, int]:
    """Return bounds for fewer microbatches, from two on, each found with the help of those before."""
    found: dict[int, int] = {}
    end = time.monotonic() + seconds
    for number in _counts(instance):
        smaller = replace(instance, microbatches=number)
        share = (end - time.monotonic()) / (instance.microbatches - number)
        result = search(smaller, max(0, share), workers, fewer=found)
        if result.interrupted:
            raise KeyboardInterrupt
        found[number] = result.ticks
    return found


def _start(instance: Instance, starts: Sequence[Schedule]) -> Schedule:
    """Return the best known schedule that fits: a given or registered one, or the one that needs the least memory."""
    fitting = [each for each in [*starts, *instance.published()] if instance.ticks_of(each) is not None]
    return min([*fitting, instance.one_by_one()], key=lambda each: _ticks(instance, each))


def _ticks(instance: Instance, schedule: Schedule) -> int:
    ticks = instance.ticks_of(schedule)
    if ticks is None:
        raise AssertionError(f"{schedule.name} does not fit: {schedule}")
    return ticks


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

    Returns a schedule, or None; and the formulation that has answered, or None if none has in time.
    """
    from ppedu.search import counters
    from ppedu.search.intervals import Intervals

    instance, fine = instance.in_order()
    horizon, fewer = horizon * fine + fine - 1, {number: ticks * fine for number, ticks in fewer.items()}
    questions: dict[str, Any] = {"intervals": Intervals(instance, horizon, fewer)} if "intervals" in only else {}
    if "counters" in only and counters.applies(instance, horizon):
        questions["counters"] = counters.Counters(instance, horizon, fewer)
    models = {name: each.model for name, each in questions.items()}
    with closing(answers(models, seconds, workers, seed)) as ended:
        for name, solver, status in ended:
            if status in ("OPTIMAL", "FEASIBLE"):
                return questions[name].schedule(solver), name
            if status == "INFEASIBLE":
                return None, name
    return None, None
