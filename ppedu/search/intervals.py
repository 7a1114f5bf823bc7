"""A model with a start time for each action: the first of two independent formulations.

Microbatches are alike, so each part takes them first in, first out; this loses nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise, product
from typing import Any

from ortools.sat.python.cp_model import CpModel, CpSolver

from ppedu.core import Action, Op, Schedule
from ppedu.search.instance import Instance, held, scheduled


class Intervals:
    """The question whether an instance has a schedule within a number of ticks, the horizon.

    Each action has a start and an end, at least a tick later; see `Instance.in_order`.

    Args:
        fewer: Ticks below which the same instance with fewer microbatches cannot be, by their number.
    """

    def __init__(self, instance: Instance, horizon: int, fewer: Mapping[int, int] = {}):
        self.instance, self.horizon = instance, horizon
        self.model = CpModel()
        parts, copies = range(instance.parts), range(len(instance.copies))
        self.starts: dict[Action, Any] = {}
        self.ends: dict[Action, Any] = {}
        for part, microbatch, op in product(parts, range(instance.microbatches), instance.times):
            action = instance.action(part, op, microbatch)
            self.starts[action] = self._time()
            self.ends[action] = self._time()
        # By copy and stage, whether it recomputes. If not, its R take no time and start with their F.
        again = product(copies, range(instance.placement.stages)) if instance.recompute else ()
        self.again = {each: self.model.new_bool_var("") for each in again}
        self.paired: dict[tuple[Action, Action], Any] = {}  # a forward and a backward; whether they are a pair
        for rank in range(instance.placement.ranks):
            self._one_by_one([*self._held(rank)])
            if instance.memory is not None:
                self._memory(rank)
        for copy, microbatches in enumerate(instance.copies):
            dependencies = [*instance.dependencies(copy)]
            for microbatch in microbatches:
                for before, after, delay in dependencies:
                    arrival = self.ends[instance.action(*before, microbatch)] + delay
                    self.model.add(self.starts[instance.action(*after, microbatch)] >= arrival)
                for part in parts if instance.recompute else ():
                    self._recompute(copy, part, microbatch)
            for part, op in product(parts, instance.times):
                for first, second in pairwise(microbatches):  # first in, first out
                    earlier, later = (instance.action(part, op, microbatch) for microbatch in (first, second))
                    self.model.add(self.starts[later] >= self.ends[earlier])
        if instance.placement.copies == 1:
            for count, ticks in fewer.items():
                self._fewer(count, ticks)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _recompute(self, copy: int, part: int, microbatch: int) -> None:
        """Let R be between its forward and its backward, or nowhere."""
        ops = Op.F, Op.R, self.instance.ops[1]
        forward, again, backward = (self.instance.action(part, op, microbatch) for op in ops)
        runs = self.again[copy, part // self.instance.placement.slices]
        self.model.add(self.starts[again] >= self.ends[forward]).only_enforce_if(runs)
        self.model.add(self.starts[backward] >= self.ends[again]).only_enforce_if(runs)
        for time in (self.starts[again], self.ends[again]):
            self.model.add(time == self.starts[forward]).only_enforce_if(runs.negated())

    def _held(self, rank: int) -> Iterator[tuple[Action, int, Any]]:
        """Yield the actions of a rank, with their lengths and whether they run; True if in any case."""
        instance = self.instance
        for copy, part in held(instance.placement, rank):
            for microbatch, op in product(instance.copies[copy], instance.times):
                runs = self.again[copy, part // instance.placement.slices] if op == Op.R else True
                yield instance.action(part, op, microbatch), instance.times[op][part], runs

    def _one_by_one(self, actions: list[tuple[Action, int, Any]]) -> None:
        """Let a rank run one action at a time, or a pair of a forward and a whole backward."""
        model = self.model
        busy = []  # the intervals of pairs, and of actions that run alone
        choices: defaultdict[Action, list[Any]] = defaultdict(list)  # by action, whether it runs in each of its pairs
        if self.instance.pairs:
            for (forward, *_), (backward, *_) in product(actions, actions):
                same = (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch)
                if forward.op == "F" and backward.op == "B" and not same:
                    both, interval = self._pair(forward, backward)
                    busy.append(interval)
                    choices[forward].append(both)
                    choices[backward].append(both)
        for action, length, runs in actions:
            start, end = self.starts[action], self.ends[action]
            alone = runs
            if choices[action]:
                alone = model.new_bool_var("")
                model.add_exactly_one(alone, *choices[action])
            model.add(end == start + length).only_enforce_if(alone)
            busy.append(model.new_optional_interval_var(start, length, end, alone, ""))
        model.add_no_overlap(busy)

    def _pair(self, forward: Action, backward: Action) -> tuple[Any, Any]:
        """Return whether two actions run as a pair, and the interval of the pair."""
        model = self.model
        both = model.new_bool_var("")
        start, end = self.starts[forward], self.ends[forward]
        length = self.instance.overlap[forward.stage] + self.instance.overlap[backward.stage]
        model.add(start == self.starts[backward]).only_enforce_if(both)
        model.add(end == self.ends[backward]).only_enforce_if(both)
        model.add(end == start + length).only_enforce_if(both)
        self.paired[forward, backward] = both
        return both, model.new_optional_interval_var(start, length, end, both, "")

    def _memory(self, rank: int) -> None:
        """Let the activations that a rank holds fit at all times."""
        instance, limit, kept = self.instance, self.instance.limit, self.instance.kept
        mine = held(instance.placement, rank)
        intervals, sizes = [], []
        for (copy, part), (taking, freeing) in product(mine, kept):
            size, microbatches = kept[taking, freeing][part], instance.copies[copy]
            if size:
                for microbatch in microbatches:
                    start = self.starts[instance.action(part, taking, microbatch)]
                    end = self.ends[instance.action(part, freeing, microbatch)]
                    length = self._time()
                    intervals.append(self.model.new_interval_var(start, length, end, ""))
                    sizes.append(size)
                # If 3 activations of this part fit, the forward of microbatch 5 waits until that of 2 is freed.
                self._wait(copy, (part, taking), (part, freeing), limit // size)
        if sum(sizes) > limit:
            self.model.add_cumulative(intervals, sizes, limit)
        # If the memory is full of activations of one part, then none of these microbatches could go through another
        # part any more, unless the oldest already has, and has freed its activation there.
        for (copy, first), (other, second) in combinations(mine, 2):
            if copy == other and len(kept) == 1 and not instance.recompute:
                (((_, op), sizes),) = kept.items()
                if sizes[first] == sizes[second] > 0:
                    self._wait(copy, (first, Op.F), (second, op), limit // sizes[first] - 1)

    def _wait(self, copy: int, waiting: tuple[int, Op], freeing: tuple[int, Op], count: int) -> None:
        """Let an action of each microbatch wait for an action of the microbatch `count` earlier.

        This follows from the memory, but with it the solver finds contradictions sooner.
        """
        microbatches = self.instance.copies[copy]
        for before, after in zip(microbatches, microbatches[count:], strict=False):
            start, end = self.instance.action(*waiting, after), self.instance.action(*freeing, before)
            self.model.add(self.starts[start] >= self.ends[end])

    def _fewer(self, count: int, ticks: int) -> None:
        """Let `count` successive microbatches take at least `ticks`, which they take alone.

        If they took less here, they would take less alone, too: leaving out the other microbatches breaks no rule.
        """
        instance, last = self.instance, self.instance.ops[-1]
        for first in range(instance.microbatches - count + 1):
            end: Any = self.horizon
            if first + count < instance.microbatches:
                end = self._time()
                parts = range(instance.parts)
                ends = [self.ends[instance.action(part, last, first + count - 1)] for part in parts]
                self.model.add_max_equality(end, ends)
            self.model.add(end >= self.starts[instance.action(0, Op.F, first)] + ticks)

    def schedule(self, solver: CpSolver) -> Schedule:
        """Return the schedule that a solver has found."""
        found = []
        left_out: set[Action] = set()
        for (forward, backward), both in self.paired.items():
            if solver.value(both):
                pair = Action(-1, Op.OVERLAP_F_B, -1, (forward, backward))
                found.append((solver.value(self.starts[forward]), pair))
                left_out |= {forward, backward}
        for rank in range(self.instance.placement.ranks):
            left_out |= {action for action, _, runs in self._held(rank) if not solver.value(runs)}
        for action, start in self.starts.items():
            if action not in left_out:
                found.append((solver.value(start), action))
        return scheduled("searched", self.instance.placement, self.instance.microbatches, found)
