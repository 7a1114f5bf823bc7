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
from ppedu.search.instance import Instance, Key, held, scheduled

MOST_TICKS = 400


class Counters:
    """The question whether an instance without pairs has a schedule within a number of ticks, the horizon.

    Each action takes at least a tick; see `Instance.in_order`.

    Args:
        fewer: Ticks below which the same instance with fewer microbatches cannot be, by their number.

    Attributes:
        begun: `begun[copy, stage, op][tick]` is the number of these actions that have begun by this tick, the tick
            included.
        begins: `begins[copy, stage, op][tick]` is whether one begins with it; 0 where it would end after the horizon.
            For forwards that begin at ticks 0 and 2 of 4, it is 1 0 1 0, and `begun` is 1 1 2 2.
    """

    def __init__(self, instance: Instance, horizon: int, fewer: Mapping[int, int] = {}):
        self.instance, self.horizon = instance, horizon
        self.model = CpModel()
        self.begins: dict[tuple[int, int, Op], list[Any]] = {}
        self.begun: dict[tuple[int, int, Op], list[Any]] = {}
        for copy, stage, op in product(range(len(instance.copies)), range(instance.placement.stages), instance.ops):
            self._count(copy, stage, op)
        for tick, copy in product(range(horizon), range(len(instance.copies))):
            for before, (stage, op), delay in instance.dependencies(copy):
                arrived = self._ended(copy, before, tick - delay)
                self.model.add(self.begun[copy, stage, op][tick] <= arrived)
        for tick, rank in product(range(horizon), range(instance.placement.ranks)):
            self._one_by_one(rank, tick)
            if instance.memory is not None:
                self._memory(rank, tick)
        if instance.placement.copies == 1:
            for count, ticks in fewer.items():
                # The last `count` microbatches take at least `ticks`, so the first of them begins that much earlier.
                latest = horizon - ticks
                begun = self.begun[0, 0, Op.F][latest] if latest >= 0 else 0
                self.model.add(begun >= instance.microbatches - count + 1)

    def _count(self, copy: int, stage: int, op: Op) -> None:
        begins: list[Any] = []
        begun: list[Any] = []
        before: Any = 0
        total = len(self.instance.copies[copy])
        for tick in range(self.horizon):
            in_time = tick + self.instance.times[op][stage] <= self.horizon
            begins.append(self.model.new_bool_var("") if in_time else 0)
            begun.append(self.model.new_int_var(0, total, ""))
            self.model.add(begun[-1] == before + begins[-1])
            before = begun[-1]
        self.model.add(before == total)
        self.begins[copy, stage, op], self.begun[copy, stage, op] = begins, begun

    def _ended(self, copy: int, key: Key, tick: int) -> Any:
        """Return the number of actions that have ended at a tick's beginning."""
        stage, op = key
        begun = tick - self.instance.times[op][stage]
        return self.begun[copy, stage, op][begun] if begun >= 0 else 0

    def _one_by_one(self, rank: int, tick: int) -> None:
        """Let a rank run one action at a time."""
        instance = self.instance
        running = []
        left: Any = 0  # the work that has not begun
        for (copy, stage), op in product(held(instance.placement, rank), instance.ops):
            length = instance.times[op][stage]
            # An action that takes 3 ticks still runs at tick 7 if it began at 5, 6 or 7.
            recent = self.begins[copy, stage, op][max(0, tick + 1 - length) : tick + 1]
            running += [begin for begin in recent if not isinstance(begin, int)]
            not_begun = len(instance.copies[copy]) - self.begun[copy, stage, op][tick]
            left += length * not_begun
        self.model.add_at_most_one(running)
        # This follows from the rest, but the solver would not add it up.
        self.model.add(left <= self.horizon - tick - 1)

    def _memory(self, rank: int, tick: int) -> None:
        """Let the activations that a rank holds fit: those that a forward has taken, and no backward has freed."""
        instance = self.instance
        taken = []
        for (copy, stage), op in product(held(instance.placement, rank), instance.freed):
            in_memory = self.begun[copy, stage, Op.F][tick] - self._ended(copy, (stage, op), tick)
            taken.append(instance.freed[op][stage] * in_memory)
        self.model.add(sum(taken) <= instance.limit)

    def schedule(self, solver: CpSolver) -> Schedule:
        """Return the schedule that a solver has found: the n-th forward of a stage is that of microbatch n."""
        found = []
        for (copy, stage, op), begins in self.begins.items():
            ticks = [tick for tick, begin in enumerate(begins) if solver.value(begin)]
            microbatches = self.instance.copies[copy]
            found += [(tick, Action(stage, op, m)) for tick, m in zip(ticks, microbatches, strict=True)]
        return scheduled("searched", self.instance.placement, self.instance.microbatches, found)
