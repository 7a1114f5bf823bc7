"""How long does a schedule take? Every action starts as soon as its rank is free and its needs are met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from numbers import Rational, Real
from typing import Any, cast

from ppedu.core.actions import RECEIVE, Action, Op
from ppedu.core.bulk import in_bulk
from ppedu.core.check import Result
from ppedu.core.errors import SettingError, require_schedule
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Number, Span, Timeline, plain, ratio

Cost = Number | Sequence[Number]


@dataclass(frozen=True)
class Costs:
    """What each action takes, in any unit of time, and what an activation weighs, in any unit of memory.

    A number is the time of one rank's *share* of the model (1/ranks of it). A stage costs `ranks/stages` of
    that, so that schedules with different numbers of stages are compared on the same model. A sequence gives
    the time of each stage itself instead.

    forward, backward: F and B. `backward` is twice `forward`, or the sum of `input` and `weight` where both are given.
    input, weight: the two halves of a split backward, I and W. Together they take `backward`, half each,
        unless they say otherwise.
    overlap: an overlapped pair; by default the sum of its parts. Given for each stage, the mean of the two.
    latency: from the end of an action to the start of one that needs it on another rank; occupies nobody.
    activation: what one microbatch's forward keeps for its backward.
    weight_memory: the part of it, 0 to 1, that a split backward keeps until W; I gives back the rest.
    unit: of the times, for people: "s" where they are seconds.

    Whole numbers and fractions give exact times, floats give floats.

    Raises:
        SettingError: a cost is negative or not a number, or the halves are more than the whole.
    """

    forward: Cost = 1
    backward: Cost | None = None
    input: Cost | None = None
    weight: Cost | None = None
    overlap: Cost | None = None
    latency: Number = 0
    weight_memory: Number = 1
    activation: Cost = 1
    unit: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "unit":
                continue
            one_number = name in ("latency", "weight_memory")
            for number in value if _is_sequence(value) and not one_number else [value]:
                optional = value is None and name in ("backward", "input", "weight", "overlap")
                if not optional and not _is_time(number):
                    raise SettingError(f"{name} must be a number of at least 0; got {number!r}")
        if self.weight_memory > 1:
            raise SettingError(f"weight_memory is a part of the activation, 0 to 1; got {self.weight_memory!r}")
        if not any(map(_is_sequence, vars(self).values())):
            self.durations(1, 1)

    @classmethod
    def fit(cls, timeline: Timeline) -> Costs:
        """The costs that a run shows: for each stage, the median time of its F, B, I and W, and of the pairs it is in.

        A stage that never does one of these, although others do, is taken to be like them. The latency is not looked
        for, and left at 0: lesson 8 finds it.
        """
        from statistics import median  # brings much along that nothing else needs

        names = {Op.F: "forward", Op.B: "backward", Op.I: "input", Op.W: "weight"}
        times: dict[str, list[list[Any]]] = {}
        for row in timeline.rows:
            for action, start, end in row:
                if action.computes:
                    name = names.get(action.op, "overlap")
                    stages = times.setdefault(name, [[] for _ in range(timeline.schedule.stages)])
                    for single in action.singles:
                        stages[single.stage].append(end - start)
        found: dict[str, Any] = {
            name: [median(each or chain(*stages)) for each in stages] for name, stages in times.items()
        }
        known = timeline.costs
        return cls(**found, activation=known.activation, weight_memory=known.weight_memory, unit=known.unit)

    def per_stage(self, cost: Cost, stages: int, ranks: int) -> list[Number]:
        """`cost` of each stage: a share's number scaled to a stage, or the sequence as it is.

        Raises:
            SettingError: the sequence is of another length.
        """
        if not isinstance(cost, Sequence):
            share = Fraction(ranks, stages)
            return [plain(Fraction(cost) * share) if isinstance(cost, Rational) else cost * float(share)] * stages
        if len(cost) != stages:
            raise SettingError(f"{len(cost)} costs for {stages} stages; give one for each stage, or a single number")
        return list(cost)

    def durations(self, stages: int, ranks: int) -> dict[Op, list[Number]]:
        """The time of F, B, I and W in each stage.

        Raises:
            SettingError: a sequence is of another length, or I or W takes longer than B.
        """

        def each(cost: Cost) -> list[Number]:
            return self.per_stage(cost, stages, ranks)

        if self.backward is None and self.input is not None and self.weight is not None:
            first, second = each(self.input), each(self.weight)
            full = [i + w for i, w in zip(first, second, strict=True)]
        else:
            full = [2 * f for f in each(self.forward)] if self.backward is None else each(self.backward)
            if self.input is not None:
                first = each(self.input)
                second = (
                    each(self.weight) if self.weight is not None else [b - i for b, i in zip(full, first, strict=True)]
                )
            else:
                second = each(self.weight) if self.weight is not None else [ratio(b, 2) for b in full]
                first = [b - w for b, w in zip(full, second, strict=True)]
        if min(first + second) < 0:
            raise SettingError(
                "the half of a split backward takes longer than the full backward; give input and weight"
            )
        return {Op.F: each(self.forward), Op.B: full, Op.I: first, Op.W: second}


@in_bulk
def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` when actions take `costs` and nothing ever waits without need.

    Messages and sharding actions take no time. A receive is posted, and the rank goes on; what needs the message
    waits for it.

    Raises:
        ScheduleError: the schedule is not legal.
        SettingError: `costs` do not fit the schedule's stages.
    """
    require_schedule("simulate", schedule)
    if costs is not None and not isinstance(costs, Costs):
        raise SettingError(f"simulate takes costs, such as Costs(forward=1, backward=2); got {costs!r}")
    schedule.validate()
    return timeline_of(schedule, costs or Costs())


def timeline_of(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of what the ranks can get through of a schedule that may be incomplete. `simulate` is the way in."""
    alone = costs.durations(schedule.stages, schedule.ranks)
    paired = alone
    if costs.overlap is not None:
        half = [ratio(time, 2) for time in costs.per_stage(costs.overlap, schedule.stages, schedule.ranks)]
        paired = dict.fromkeys(alone, half)

    # Whole numbers are exact and fast, fractions exact and slow: count in the largest tick that fits all.
    tables = [*alone.values(), *paired.values(), [costs.latency]]
    exact = all(isinstance(time, Rational) for table in tables for time in table)
    scale = math.lcm(*(Fraction(time).denominator for table in tables for time in table)) if exact else 1

    def ticks(time: Number) -> Number:
        return int(time * scale) if exact else time

    alone = {op: [ticks(time) for time in times] for op, times in alone.items()}
    paired = {op: [ticks(time) for time in times] for op, times in paired.items()}
    latency = ticks(costs.latency)

    def duration(action: Action) -> Number:
        if action.parts:
            return sum(paired[part.op][part.stage] for part in action.parts)
        return alone[action.op][action.stage] if action.op in alone else 0

    free: list[Any] = [0] * schedule.ranks
    done: dict[Result, tuple[Any, int]] = {}
    rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    shown: dict[Any, Number] = {}  # ticks back to times; the same few times come again and again
    for rank, index, needs, gives in schedule.replay.steps:
        action = schedule.orders[rank][index]
        start = free[rank]
        if action.op in RECEIVE:  # the rank goes on; whatever needs the message will wait for it
            rows[rank].append(Span(action, shown.get(start, start), shown.get(start, start)))
            done[gives[0]] = done[needs[0]][0] + latency, rank
            continue
        for need in needs:
            end, source = done[need]
            if source != rank:
                end += latency
            if end > start:
                start = end
        end = free[rank] = start + duration(action)
        for result in gives:
            done[result] = end, rank
        if scale > 1:
            for time in (start, end):
                if time not in shown:
                    shown[time] = plain(Fraction(time, scale))
            start, end = shown[start], shown[end]
        rows[rank].append(Span(action, start, end))
    return Timeline(schedule, tuple(map(tuple, rows)), costs)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0


def _is_time(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and 0 <= cast("Any", value) < math.inf
