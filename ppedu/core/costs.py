"""Costs: the time that each action takes, and the memory of the activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from numbers import Rational
from typing import Any, NamedTuple

from ppedu.core.actions import Action, Op
from ppedu.core.errors import SettingError
from ppedu.core.numeric import Number, Ticks, plain, ratio
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_instance, require_number

Cost = Number | Sequence[Number]

LARGEST = 1e100  # the largest cost: sums of millions, and their ratios, still fit a float


@dataclass(frozen=True)
class Costs:
    """The time of each action, in any unit of time, and the size of an activation, in any unit of memory.

    A number is the cost of one rank's *share* of the model (1/ranks of it). A stage costs `ranks/stages` of it, so
    that schedules with different numbers of stages are compared on the same model. A sequence (a list, a tuple, an
    array or a tensor; stored as a tuple) gives the cost of each stage instead.

    forward, backward: The times of F and B. `backward` defaults to twice `forward`, or to `input + weight` if both
        are given.
    input, weight: The times of I and W, the halves of a split backward. `weight` defaults to `backward / 2`, `input`
        to `backward - weight`.
    overlap: The time of an overlapped pair, by default the sum of its parts; with a sequence, the mean of the entries
        of its two stages.
    latency: The time from the end of an action to the start of one on another rank that depends on it. It keeps
        neither rank busy.
    activation: The memory that a forward takes for one microbatch, until its backward.
    weight_memory: The part of `activation`, 0 to 1, that a split backward keeps until W. I frees the rest.
    unit: The unit of the times, for display, such as "s".

    Integers and Fractions give exact times, floats give floats.

    Raises:
        SettingError: A cost is negative, too large or not a number, or half a backward takes longer than all of it.
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
        if not isinstance(self.unit, str):
            raise SettingError(f'unit must be text, such as "s" or "ms"; got {self.unit!r}')
        for name, given in vars(self).items():
            if name == "unit" or (given is None and name in ("backward", "input", "weight", "overlap")):
                continue
            cost = _python(given)
            one_number = name in ("latency", "weight_memory") or not isinstance(cost, tuple)
            for number in [cost] if one_number or not cost else cost:
                _require_cost(name, number)
            object.__setattr__(self, name, cost)  # frozen
        if self.weight_memory > 1:
            raise SettingError(f"weight_memory is a part of the activation, 0 to 1; got {self.weight_memory!r}")
        if not any(isinstance(cost, tuple) for cost in vars(self).values()):
            self.durations(1, 1)

    @classmethod
    def fit(cls, timeline: Timeline) -> Costs:
        """Return the costs of a run: for each stage, the median times of its F, B, I, W and overlapped pairs.

        A stage that never runs one of these gets the median over the other stages. Latency is not estimated and stays
        0; lesson 8 shows how to measure it.

        Raises:
            SettingError: `timeline` is not a Timeline.
        """
        from statistics import median  # slow to import, and only used here

        such_as = "a Timeline, such as a measured run's pipe.timeline or simulate(schedule)"
        require_instance("the argument of Costs.fit", timeline, Timeline, such_as)
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
        """Return `cost` for each stage: the number of a share scaled to a stage, or the entries of a sequence.

        Raises:
            SettingError: The sequence does not have one entry for each stage.
        """
        if not isinstance(cost, Sequence):
            share = Fraction(ranks, stages)
            return [plain(Fraction(cost) * share) if isinstance(cost, Rational) else cost * float(share)] * stages
        if len(cost) != stages:
            raise SettingError(
                f"{len(cost)} costs for {stages} stages; give {stages}, one for each stage, "
                "or a single number, for a rank's share of the model"
            )
        return list(cost)

    def durations(self, stages: int, ranks: int) -> dict[Op, list[Number]]:
        """Return the times of F, B, I and W in each stage.

        Raises:
            SettingError: A sequence does not have one entry for each stage, or I or W takes longer than B.
        """

        def each(cost: Cost) -> list[Number]:
            return self.per_stage(cost, stages, ranks)

        forward = each(self.forward)
        first = None if self.input is None else each(self.input)
        second = None if self.weight is None else each(self.weight)
        if self.backward is not None:
            full = each(self.backward)
        elif first and second:
            full = [i + w for i, w in zip(first, second, strict=True)]
        else:
            full = [2 * f for f in forward]
        if not second:
            second = [b - i for b, i in zip(full, first, strict=True)] if first else [ratio(b, 2) for b in full]
        if not first:
            first = [b - w for b, w in zip(full, second, strict=True)]
        if min(first + second) < 0:
            raise SettingError(
                "half of a split backward takes longer than the full backward; give both input and weight"
            )
        return {Op.F: forward, Op.B: full, Op.I: first, Op.W: second}

    def memory_changes(self, stages: int, ranks: int) -> tuple[dict[Op, list[Any]], Ticks]:
        """Return the memory that F, B, I and W allocate (or free, if negative) in each stage, in ticks, and the ticks.

        Raises:
            SettingError: A sequence does not have one entry for each stage.
        """
        kept = self.weight_memory
        shares = {Op.F: 1, Op.B: -1, Op.I: kept - 1, Op.W: -kept}
        activations = self.per_stage(self.activation, stages, ranks)
        changes = {op: [activation * share for activation in activations] for op, share in shares.items()}
        ticks = Ticks(chain(*changes.values()))
        return {op: [ticks.count(change) for change in each] for op, each in changes.items()}, ticks


class Clock(NamedTuple):
    """The times of a schedule's actions in ticks, so that exact times are whole numbers.

    alone: `alone[op][stage]` is the time of an action on its own.
    paired: `paired[op][stage]` is its contribution to the time of an overlapped pair.
    """

    alone: dict[Op, list[Any]]
    paired: dict[Op, list[Any]]
    latency: Any
    ticks: Ticks

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> Clock:
        """Return the clock for a schedule's stages at these costs."""
        alone = costs.durations(schedule.stages, schedule.ranks)
        paired = alone
        if costs.overlap is not None:
            half = [ratio(time, 2) for time in costs.per_stage(costs.overlap, schedule.stages, schedule.ranks)]
            paired = dict.fromkeys(alone, half)
        ticks = Ticks(chain(*alone.values(), *paired.values(), [costs.latency]))

        def counted(times: dict[Op, list[Any]]) -> dict[Op, list[Any]]:
            return {op: [ticks.count(time) for time in each] for op, each in times.items()}

        return cls(counted(alone), counted(paired), ticks.count(costs.latency), ticks)

    def duration(self, action: Action) -> Any:
        """Return how many ticks an action takes: 0 for messages and sharding."""
        if action.parts:
            return sum(self.paired[part.op][part.stage] for part in action.parts)
        return self.alone[action.op][action.stage] if action.op in self.alone else 0


def require_costs(costs: Costs | None) -> Costs:
    """Return `costs`, or the default costs for None. Raise SettingError if it is anything else."""
    costs = Costs() if costs is None else costs
    require_instance("costs", costs, Costs, "Costs, such as Costs(forward=1, backward=2)")
    return costs


def _python(value: Any) -> Any:
    """Return a number as a Python number; an array, a tensor or a sequence as a tuple of Python numbers."""
    if hasattr(value, "tolist"):  # from NumPy or torch, which are not imported here
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(map(_python, value))
    return value


def _require_cost(name: str, number: Any) -> None:
    """Raise SettingError unless `number` is a number from 0 to LARGEST."""
    require_number(name, number, lambda number: 0 <= number < math.inf, "a number of at least 0")
    if number > LARGEST:
        raise SettingError(f"{name} must be at most {LARGEST:g}, or sums would overflow; give it in a larger unit")
