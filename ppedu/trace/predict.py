"""How long a step would take with another schedule, from the steps of a measured run."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ppedu.core import OVERLAP, Op, PipelineError, Schedule, SettingError, require_schedule
from ppedu.core.numeric import plural, pretty
from ppedu.core.tables import LINE
from ppedu.sim import Costs, Timeline, require_costs, simulate
from ppedu.sim.costs import TIMES
from ppedu.trace.replay import Measured, travels, turns
from ppedu.zoo.registry import published
from ppedu.zoo.registry import schedule as named_schedule

if TYPE_CHECKING:
    from ppedu.trace.run import Run

Layers = tuple[Sequence[int], Sequence[int]]

DRAWS = 400
LOW, HIGH = 0.05, 0.95
UNEVEN = 1.2  # an end of the model that takes this many times as long as the other stages holds more than layers
SPLIT = {Op.I: Op.B, Op.W: Op.B, Op.B: Op.I}  # the op whose variation stands in for that of one the run does not have


@dataclass(frozen=True)
class Prediction:
    """How long the pipeline's part of a step would take.

    Attributes:
        makespan, low, high: The median in seconds, and the 90 % interval of single steps.
        now: The median of the run as it is.
        assumptions: What the run does not show and the prediction takes for granted, in sentences.
    """

    schedule: Schedule
    makespan: float
    low: float
    high: float
    now: float
    assumptions: tuple[str, ...] = ()

    def __str__(self) -> str:
        saved = self.now - self.makespan
        found = (
            f"{self.schedule.name}, {self.schedule.size}: the pipeline takes {pretty(self.makespan, 's')} of a step "
            f"(most steps: {pretty(self.low, 's')}–{pretty(self.high, 's')}), {pretty(abs(saved), 's')} "
            f"{'less' if saved >= 0 else 'more'} than now ({pretty(self.now, 's')})"
        )
        lines = [found, *(f"assumed: {assumption}" for assumption in self.assumptions)]
        return "\n".join(fill(line, LINE, subsequent_indent="   ") for line in lines)


def predict(
    run: Run,
    schedule: Schedule | str,
    costs: Costs | None = None,
    layers: Layers | None = None,
) -> Prediction:
    """See `Run.predict`."""
    old = run.schedule
    if isinstance(schedule, str):
        schedule = named_schedule(schedule, old.ranks, old.microbatches)
    require_schedule("Run.predict", schedule)
    schedule.validate()
    if schedule.lowered:
        raise SettingError("Run.predict takes a schedule without messages; leave out lower()")
    if schedule.ranks != old.ranks:
        raise SettingError(
            f"the run has {plural(old.ranks, 'rank')} and {schedule.name} {schedule.ranks}; a run does not tell how "
            "its ranks would work in another number"
        )
    overhead = run.calibration.overhead
    known = _without_overhead(run.costs() if costs is None else require_costs(costs), overhead)
    assumed = [*_assumptions(old, schedule, known, layers)]
    if costs is not None:
        assumed.append("the costs that were given")
    draws = sorted(_draws(run, _of_new_stages(known, old, schedule, layers), schedule))
    low, high = (_quantile(draws, part, len(run.steady)) for part in (LOW, HIGH))
    now = median(each.timeline.makespan for each in run.steady.values())
    return Prediction(schedule, median(draws), low, high, now, tuple(assumed))


def _by_stage(costs: Costs) -> dict[str, tuple[float, ...]]:
    """Return the costs that are given for each stage, by name; raise SettingError if some vary by microbatch."""
    found = {}
    for name in TIMES:
        times = getattr(costs, name)
        if callable(times) or (isinstance(times, tuple) and any(isinstance(time, tuple) for time in times)):
            raise SettingError(
                f"Run.predict takes how microbatches vary from the run; give {name} as one time for each stage"
            )
        if isinstance(times, tuple):
            found[name] = times
    return found


def _without_overhead(costs: Costs, overhead: float) -> Costs:
    """Return the costs without the overhead of an action, which another schedule has per action, not per stage."""
    bare: dict[str, Any] = {
        name: tuple(max(0.0, time - overhead) for time in times) for name, times in _by_stage(costs).items()
    }
    return replace(costs, **bare)


def in_same_memory(run: Run) -> Iterator[tuple[str, float]]:
    """Yield the names of other published schedules for the run's stages, with their simulated makespans in seconds.

    They need no more memory for activations, or for weights, than the run's.
    """
    old, known = run.schedule, run.costs()
    most = max(simulate(old, known).peak_activations)
    for name in published():
        try:
            new = named_schedule(name, old.ranks, old.microbatches)
        except PipelineError:  # not for these sizes
            continue
        if new.placement == old.placement and new.orders != old.orders:
            timeline = simulate(new, known)
            if max(timeline.peak_activations) <= most:
                yield name, timeline.makespan


def _assumptions(old: Schedule, new: Schedule, known: Costs, layers: Layers | None) -> Iterator[str]:
    """Yield what the run does not show, in sentences."""
    old_ops, new_ops = _ops(old), _ops(new)
    if Op.W in new_ops and Op.W not in old_ops and known.weight is None and known.input is None:
        yield "I and W each take half of B"
    if any(action.op in OVERLAP for order in new.orders for action in order) and known.overlap is None:
        yield "an overlapped pair takes as long as its two parts"
    times = _by_stage(known)
    if layers is not None:
        yield "a layer takes as long in any stage; what the first and the last stage take more, they keep"
    elif any(len(each) != new.stages for each in times.values()):
        yield "a stage takes as long as its share of the run's stages"
        forward = times.get("forward", ())
        if len(forward) > 2:
            last = len(forward) - 1
            for stage, others, what in ((0, forward[1:], "embedding"), (last, forward[:-1], "head")):
                if forward[stage] > UNEVEN * median(others) > 0:
                    yield (
                        f"stage {stage} can be cut like the others, though it takes "
                        f"{forward[stage] / median(others):.1f}× as long; if that is its {what}, give layers=…"
                    )
    if old.microbatches != new.microbatches:
        yield f"the {new.microbatches} microbatches are as large as the run's {old.microbatches}"


def _ops(schedule: Schedule) -> set[Op]:
    """Return the ops of a schedule's actions, and of the parts of its pairs."""
    return {single.op for order in schedule.orders for action in order for single in action.singles}


Divide = Callable[[tuple[float, ...]], tuple[float, ...]]  # from the times of the run's stages to those of the new ones


def _of_new_stages(known: Costs, old: Schedule, new: Schedule, layers: Layers | None) -> Costs:
    """Return the costs of the new stages: by their layers, or else each an equal part of the model."""
    divide = _by_share(old, new) if layers is None else _by_layers(known, old, new, layers)
    found: dict[str, Any] = {name: divide(times) for name, times in _by_stage(known).items()}
    if layers is None and new.stages == old.stages:
        return known
    return replace(known, **{"overlap": None, "overlap_input": None, **found})


def _by_share(old: Schedule, new: Schedule) -> Divide:
    """Divide times by how much of the run's stages a new stage covers.

    If the run has 4 stages, and 3 are wanted, the edges are 0, 4/3, 8/3 and 4: the first new stage gets the time of
    stage 0 and a third of that of stage 1.
    """
    edges = [stage * old.stages / new.stages for stage in range(new.stages + 1)]

    def divide(times: tuple[float, ...]) -> tuple[float, ...]:
        if len(times) == new.stages:
            return times
        if len(times) != old.stages:
            raise SettingError(
                f"these are the costs of {plural(len(times), 'stage')}; the run has {old.stages}, and {new.name} "
                f"{new.stages}"
            )
        found = []
        for low, high in pairwise(edges):
            covered = [max(0.0, min(high, stage + 1) - max(low, stage)) for stage in range(old.stages)]
            found.append(sum(time * part for time, part in zip(times, covered, strict=True)))
        return tuple(found)

    return divide


def _by_layers(known: Costs, old: Schedule, new: Schedule, layers: Layers) -> Divide:
    """Divide times by the numbers of layers.

    A layer takes the median time of the layers in the middle stages. What the first and the last stage take beyond
    theirs, for the embedding and the head, they keep: if stages of 2 layers take 5, 4, 4 and 7, a layer takes 2, the
    embedding 1 and the head 3. With 2, 3, 2 and 1 layers, the stages take 5, 6, 4 and 5.
    """
    try:
        before, after = ([int(count) for count in part] for part in layers)
    except (TypeError, ValueError):
        raise SettingError(
            f"layers is the number of layers in each stage of the run, and in each new stage, such as "
            f"([8, 8, 8, 8], [9, 9, 8, 6]); got {layers!r}"
        ) from None
    for counts, schedule, which in ((before, old, "the run"), (after, new, new.name)):
        if counts and min(counts) < 0:
            raise SettingError(f"a stage cannot have fewer than 0 layers; got {counts}")
        if len(counts) != schedule.stages:
            raise SettingError(
                f"{counts} are the layers of {plural(len(counts), 'stage')}; {which} has {schedule.stages}"
            )
    durations = known.durations(old.stages, old.ranks)[Op.F]
    if sum(before) != sum(after):
        raise SettingError(f"the run has {plural(sum(before), 'layer')}, and {after} are {sum(after)}")
    for stage, count in enumerate(before[1:-1], 1):
        if not count and durations[stage] > max(durations) / 20:
            raise SettingError(
                f"stage {stage} is said to have no layers, and takes {pretty(durations[stage], 's')} in the run; give "
                "the layers that it has"
            )

    def divide(times: tuple[float, ...]) -> tuple[float, ...]:
        per_layer = [time / count if count else None for time, count in zip(times, before, strict=True)]
        middle = [time for time in per_layer[1:-1] if time is not None]
        layer = median(middle) if middle else min(time for time in per_layer if time is not None)
        found = [layer * count for count in after]
        found[0] += max(0.0, times[0] - layer * before[0])
        found[-1] += max(0.0, times[-1] - layer * before[-1])
        return tuple(found)

    return divide


Place = tuple[int, int]  # a stage and a microbatch


def _draws(run: Run, costs: Costs, schedule: Schedule) -> Iterator[float]:
    """Yield the makespan of the schedule with the variation of one step of the run after the other.

    Each stage and microbatch varies as one of that step did, with respect to the run's medians: in its times, in how
    late it started, and in how early its message came.
    """
    old, overhead = run.schedule, run.calibration.overhead
    chance = random.Random(0)
    usual = _without_overhead(run.costs(), overhead)
    steps = [_Variation(each.timeline, usual, overhead) for each in run.steady.values()]
    durations = costs.durations(schedule.stages, schedule.ranks)
    with_b, with_i = (
        None if cost is None else costs.per_stage(cost, schedule.stages, schedule.ranks)
        for cost in (costs.overlap, costs.overlap if costs.overlap_input is None else costs.overlap_input)
    )
    travelled = travels(schedule, costs.delay)
    alike = schedule.microbatches == old.microbatches
    for draw in range(max(DRAWS, len(steps))):
        step = steps[draw % len(steps)]
        drawn = [m if alike else chance.randrange(old.microbatches) for m in range(schedule.microbatches)]
        lasts, pauses, travel = ([0.0] * len(travelled) for _ in range(3))
        for at, _, action, before, needs in turns(schedule):
            # Where the run has about the same part of the model, and the microbatch that was drawn.
            places = [(each.stage * old.stages // schedule.stages, drawn[each.microbatch]) for each in action.singles]
            of_pairs = with_i if any(part.op is Op.I for part in action.parts) else with_b
            for (stage, op, *_), place in zip(action.singles, places, strict=True):
                time = of_pairs[stage] / 2 if of_pairs and action.parts else durations[op][stage]
                lasts[at] += time * step.factor(op, place)
            late, early = step.start(action.singles[0].op, places[0], bool(needs), chance)
            pauses[at] = 0.0 if before is None and not needs else late  # its first message may be late
            travel[at] = max(0.0, travelled[at] - early)
        yield Measured(schedule, lasts, pauses, travel).makespan()


class _Variation:
    """How the actions of a measured step differ from the run's usual ones.

    Attributes:
        factors: How many times as long as usual an action took.
        starts: By how much an action started late, and its message came early. Actions that need a message from another
            rank are apart from the others.
        overhead: The usual start of an action that needs no message.
    """

    def __init__(self, timeline: Timeline, usual: Costs, overhead: float):
        self.factors: dict[tuple[Op, Place], float] = {}
        self.starts: defaultdict[tuple[Op, bool], dict[Place, tuple[float, float]]] = defaultdict(dict)
        self.overhead = overhead
        schedule = timeline.schedule
        durations = usual.durations(schedule.stages, schedule.ranks)
        travelled = travels(schedule, usual.delay)
        measured = Measured.of(timeline, travelled)
        for at, _, action, before, needs in turns(schedule):
            whole = sum(durations[single.op][single.stage] for single in action.singles)
            for stage, op, microbatch, _ in action.singles:
                self.factors[op, (stage, microbatch)] = measured.lasts[at] / whole if whole > 0 else 1.0
                if before is not None or needs:
                    started = measured.pauses[at], travelled[at] - measured.travels[at]
                    self.starts[op, bool(needs)][stage, microbatch] = started

    def factor(self, op: Op, place: Place) -> float:
        """Return how many times as long as usual an action took, or a similar one, if the run does not have it."""
        if (op, place) in self.factors:
            return self.factors[op, place]
        similar = SPLIT.get(op, Op.F)
        return self.factors.get((similar, place), 1.0)

    def start(self, op: Op, place: Place, needs_message: bool, chance: random.Random) -> tuple[float, float]:
        """Return how an action started, or a similar one, if the run does not have it."""
        similar = self.starts.get((op, needs_message)) or self.starts.get((SPLIT.get(op, Op.F), needs_message))
        if op is Op.W or not similar:
            return self.overhead, 0.0
        return similar[place] if place in similar else chance.choice([*similar.values()])


def _quantile(ordered: Sequence[float], part: float, steps: int) -> float:
    """Return the value that a part of future steps falls below, estimated from draws with the variation of `steps`.

    Of n steps, a future one falls below the k-th with the probability k / (n + 1) (Weibull's plotting position, type 6
    in Hyndman and Fan, "Sample Quantiles in Statistical Packages", 1996): with few steps, the extremes are further out.
    There may be more draws than steps, so the place among the steps is scaled to the draws.
    """
    place = (part * (steps + 1) - 1) / max(1, steps - 1)  # 0: the first; 1: the last
    index = min(1.0, max(0.0, place)) * (len(ordered) - 1)
    low = int(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (index - low) * (ordered[high] - ordered[low])
