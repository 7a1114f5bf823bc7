"""A model with a counter for each kind of action and tick: the second of two independent formulations.

It does not know microbatches apart: it counts how many forwards, backwards and weight backwards of each stage have
begun by each tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from ortools.sat.python.cp_model import CpModel, CpSolver

from ppedu.core import Action, Op, Schedule
from ppedu.core.numeric import exact
from ppedu.search.instance import Instance

MOST_TICKS = 400


def applies(instance: Instance, horizon: int) -> bool:
    """Return whether this formulation knows such instances, and is not too large."""
    plain = instance.split is not None and not instance.pairs and instance.objective == "makespan"
    ticks = [each for op in (Op.F, Op.B, Op.I, Op.W) for each in instance.times[op]]
    return plain and horizon <= MOST_TICKS and min(ticks) > 0 and exact(instance.costs.weight_memory) == 1


class Counters:
    """The question whether an instance has a schedule within a number of ticks, the horizon.

    fewer: Ticks below which the same instance with fewer microbatches cannot be, by their number.

    `begun[copy, stage, op][tick]` is the number of these actions that have begun by this tick, the tick included;
    `begins` whether one begins with it.
    """

    def __init__(self, instance: Instance, horizon: int, fewer: Mapping[int, int] = {}):
        self.instance, self.horizon = instance, horizon
        self.model = CpModel()
        self.ops = {Op.F: Op.F, Op.I: Op.I, Op.W: Op.W} if instance.split else {Op.F: Op.F, Op.I: Op.B}
        self.begins: dict[tuple[int, int, Op], list[Any]] = {}
        self.begun: dict[tuple[int, int, Op], list[Any]] = {}
        for copy, microbatches in enumerate(instance.copies):
            for stage, op in product(range(instance.placement.stages), self.ops):
                self._count(copy, stage, op, len(microbatches))
        for tick in range(horizon):
            self._dependencies(tick)
            for rank in range(instance.placement.ranks):
                self._rank(rank, tick)

        if instance.placement.copies == 1:
            for count, ticks in fewer.items():  # those that are last begin in time
                begun = self.begun[0, 0, Op.F][horizon - ticks] if ticks <= horizon else 0
                self.model.add(begun >= instance.microbatches - count + 1)

    def _length(self, stage: int, op: Op) -> int:
        return self.instance.times[self.ops[op]][stage]

    def _count(self, copy: int, stage: int, op: Op, total: int) -> None:
        begins: list[Any] = []
        begun: list[Any] = []
        before: Any = 0
        for tick in range(self.horizon):
            in_time = tick + self._length(stage, op) <= self.horizon
            begins.append(self.model.new_bool_var("") if in_time else 0)
            begun.append(self.model.new_int_var(0, total, ""))
            self.model.add(begun[-1] == before + begins[-1])
            before = begun[-1]
        self.model.add(before == total)
        self.begins[copy, stage, op], self.begun[copy, stage, op] = begins, begun

    def _ended(self, copy: int, stage: int, op: Op, tick: int) -> Any:
        """Return the number of actions that have ended at a tick's beginning."""
        begun = tick - self._length(stage, op)
        return self.begun[copy, stage, op][begun] if begun >= 0 else 0

    def _dependencies(self, tick: int) -> None:
        instance, last = self.instance, self.instance.placement.stages - 1
        for copy, microbatches in enumerate(instance.copies):
            for stage in range(last + 1 if microbatches else 0):
                first = microbatches[0]
                forwards, backwards = (self.begun[copy, stage, op][tick] for op in (Op.F, Op.I))
                if stage:
                    arrived = tick - instance.delay(stage - 1, stage, first)
                    self.model.add(forwards <= self._ended(copy, stage - 1, Op.F, arrived))
                if stage < last:
                    arrived = tick - instance.delay(stage + 1, stage, first)
                    self.model.add(backwards <= self._ended(copy, stage + 1, Op.I, arrived))
                self.model.add(backwards <= self._ended(copy, stage, Op.F, tick))
                if instance.split:
                    self.model.add(self.begun[copy, stage, Op.W][tick] <= self._ended(copy, stage, Op.I, tick))

    def _rank(self, rank: int, tick: int) -> None:
        """Let a rank run one action at a time, and hold what fits."""
        held = [
            (copy, stage)
            for copy, holders in enumerate(self.instance.placement.holders)
            for stage, holder in enumerate(holders)
            if holder == rank
        ]
        running = []
        for copy, stage in held:
            for op in self.ops:
                first = max(0, tick + 1 - self._length(stage, op))
                running += [
                    each for each in self.begins[copy, stage, op][first : tick + 1] if not isinstance(each, int)
                ]
        self.model.add_at_most_one(running)
        # This follows from the rest, but the solver would not add it up: the work that is left fits in the ticks left.
        left: Any = 0
        for copy, stage in held:
            for op in self.ops:
                total = len(self.instance.copies[copy])
                left += self._length(stage, op) * (total - self.begun[copy, stage, op][tick])
        self.model.add(left <= self.horizon - tick - 1)
        if self.instance.memory is not None:
            limit, _, sizes = self.instance.room
            last = Op.W if self.instance.split else Op.I
            terms = [
                sizes[stage] * (self.begun[copy, stage, Op.F][tick] - self._ended(copy, stage, last, tick))
                for copy, stage in held
            ]
            self.model.add(sum(terms) <= limit)

    def schedule(self, solver: CpSolver) -> Schedule:
        """Return the schedule that a solver has found: the n-th forward of a stage is that of microbatch n."""
        placement = self.instance.placement
        orders: list[list[tuple[int, Action]]] = [[] for _ in range(placement.ranks)]
        for (copy, stage, op), begins in self.begins.items():
            ticks = [tick for tick, begin in enumerate(begins) if solver.value(begin)]
            for tick, microbatch in zip(ticks, self.instance.copies[copy], strict=True):
                action = Action(stage, self.ops[op], microbatch)
                orders[placement.holders[copy][stage]].append((tick, action))
        rows = tuple(tuple(action for _, action in sorted(order)) for order in orders)
        return Schedule("searched", placement, self.instance.microbatches, rows)
