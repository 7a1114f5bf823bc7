"""A model with a counter for each kind of action and tick: the second of two independent formulations.

It does not know microbatches apart: it counts how many forwards, backwards and weight backwards of each part have
begun by each tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from ortools.sat.python.cp_model import CpModel, CpSolver

from ppedu.core import Op, Schedule
from ppedu.search.instance import Instance, Key, held, scheduled

MOST_TICKS = 400


class Counters:
    """The question whether an instance without pairs has a schedule within a number of ticks, the horizon.

    Each action takes at least a tick; see `Instance.in_order`.

    Args:
        fewer: Ticks below which the same instance with fewer microbatches cannot be, by their number.

    Attributes:
        begun: `begun[copy, part, op][tick]` is the number of these actions that have begun by this tick, the tick
            included.
        begins: `begins[copy, part, op][tick]` is whether one begins with it; 0 where it would end after the horizon.
            For forwards that begin at ticks 0 and 2 of 4, it is 1 0 1 0, and `begun` is 1 1 2 2.
    """

    def __init__(self, instance: Instance, horizon: int, fewer: Mapping[int, int] = {}):
        self.instance, self.horizon = instance, horizon
        self.model = CpModel()
        self.begins: dict[tuple[int, int, Op], list[Any]] = {}
        self.begun: dict[tuple[int, int, Op], list[Any]] = {}
        copies, slices = range(len(instance.copies)), instance.placement.slices
        again = {
            (copy, stage): self.model.new_bool_var("") if instance.recompute else 0
            for copy, stage in product(copies, range(instance.placement.stages))
        }
        # By copy, part and op, how many there are: as many R as microbatches in stages that recompute, else none.
        self.total: dict[tuple[int, int, Op], Any] = {}
        for copy, part, op in product(copies, range(instance.parts), instance.times):
            count = len(instance.copies[copy])
            self.total[copy, part, op] = count * again[copy, part // slices] if op == Op.R else count
            self._count(copy, part, op)
        for tick, copy in product(range(horizon), copies):
            for before, (part, op), delay in instance.dependencies(copy):
                arrived = self._ended(copy, before, tick - delay)
                self.model.add(self.begun[copy, part, op][tick] <= arrived)
            for part in range(instance.parts) if instance.recompute else ():
                self.model.add(self.begun[copy, part, Op.R][tick] <= self._ended(copy, (part, Op.F), tick))
                not_needed = len(instance.copies[copy]) - self.total[copy, part, Op.R]
                ready = self._ended(copy, (part, Op.R), tick) + not_needed
                self.model.add(self.begun[copy, part, instance.ops[1]][tick] <= ready)
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

    def _count(self, copy: int, part: int, op: Op) -> None:
        begins: list[Any] = []
        begun: list[Any] = []
        before: Any = 0
        for tick in range(self.horizon):
            in_time = tick + self.instance.times[op][part] <= self.horizon
            begins.append(self.model.new_bool_var("") if in_time else 0)
            begun.append(self.model.new_int_var(0, len(self.instance.copies[copy]), ""))
            self.model.add(begun[-1] == before + begins[-1])
            before = begun[-1]
        self.model.add(before == self.total[copy, part, op])
        self.begins[copy, part, op], self.begun[copy, part, op] = begins, begun

    def _ended(self, copy: int, key: Key, tick: int) -> Any:
        """Return the number of actions that have ended at a tick's beginning."""
        part, op = key
        begun = tick - self.instance.times[op][part]
        return self.begun[copy, part, op][begun] if begun >= 0 else 0

    def _one_by_one(self, rank: int, tick: int) -> None:
        """Let a rank run one action at a time."""
        instance = self.instance
        running = []
        left: Any = 0  # the work that has not begun
        for (copy, part), op in product(held(instance.placement, rank), instance.times):
            length = instance.times[op][part]
            # An action that takes 3 ticks still runs at tick 7 if it began at 5, 6 or 7.
            recent = self.begins[copy, part, op][max(0, tick + 1 - length) : tick + 1]
            running += [begin for begin in recent if not isinstance(begin, int)]
            not_begun = self.total[copy, part, op] - self.begun[copy, part, op][tick]
            left += length * not_begun
        self.model.add_at_most_one(running)
        # This follows from the rest, but the solver would not add it up.
        self.model.add(left <= self.horizon - tick - 1)

    def _memory(self, rank: int, tick: int) -> None:
        """Let the activations that a rank holds fit: those that a forward has taken, and no backward has freed."""
        instance = self.instance
        taken = []
        for (copy, part), (taking, freeing) in product(held(instance.placement, rank), instance.kept):
            size = instance.kept[taking, freeing][part]
            in_memory = self._begun(copy, part, taking, tick) - self._ended(copy, (part, freeing), tick)
            taken.append(size * in_memory)
        self.model.add(sum(taken) <= instance.limit)

    def _begun(self, copy: int, part: int, op: Op, tick: int) -> Any:
        """Return the number of actions that have begun by a tick: of a stage without R, forwards instead."""
        begun = self.begun[copy, part, op][tick]
        if op != Op.R:
            return begun
        most = len(self.instance.copies[copy])
        either = self.model.new_int_var(0, most, "")  # the larger of both; of the forwards, 0 in a stage with R
        self.model.add(either >= begun)
        self.model.add(either >= self.begun[copy, part, Op.F][tick] - self.total[copy, part, Op.R])
        return either

    def schedule(self, solver: CpSolver) -> Schedule:
        """Return the schedule that a solver has found: the n-th forward of a part is that of microbatch n."""
        found = []
        for (copy, part, op), begins in self.begins.items():
            ticks = [tick for tick, begin in enumerate(begins) if solver.value(begin)]
            microbatches = self.instance.copies[copy]  # one for each tick; an R without ticks does not run
            found += [(tick, self.instance.action(part, op, m)) for tick, m in zip(ticks, microbatches, strict=False)]
        return scheduled("searched", self.instance.placement, self.instance.microbatches, found)
