"""A model with a start time for each action: the first of two independent formulations.

Microbatches are alike, so each stage takes them first in, first out; this loses nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain, combinations, pairwise
from typing import Any

from ortools.sat.python.cp_model import CpModel, CpSolver

from ppedu.core import Action, Op, Schedule
from ppedu.search.instance import Instance


class Intervals:
    """The question whether an instance has a schedule within a number of ticks, the horizon.

    fewer: Ticks below which the same instance with fewer microbatches cannot be, by their number.

    Each action has a start and an end, at least a tick later; see `Instance.in_order`. Where backwards may be whole or
    split, `whole` holds which they are.
    """

    def __init__(self, instance: Instance, horizon: int, fewer: Mapping[int, int] = {}):
        self.instance, self.horizon = instance, horizon
        # A rank's last actions depend on all ranks' first, so that no rank begins after another has ended.
        self.latest = horizon if instance.objective == "makespan" else 2 * horizon
        self.model = CpModel()
        self.starts: dict[Action, Any] = {}
        self.ends: dict[Action, Any] = {}
        self.whole: dict[Action, Any] = {}  # by I
        self.paired: dict[tuple[Action, Action], Any] = {}  # by F and I; whether they are a pair
        self.busy: defaultdict[int, list[Any]] = defaultdict(list)  # by rank, its intervals
        for stage, microbatch in self._places():
            self._forward(stage, microbatch)
            self._backward(stage, microbatch)
        if instance.pairs:
            self._pairs()
        self._busy()
        for stage, microbatch in self._places():
            self._dependencies(stage, microbatch)
        self._in_order()
        for rank in range(instance.placement.ranks):
            self.model.add_no_overlap(self.busy[rank])
            self._memory(rank)
            if instance.objective == "span":
                self._span(rank)
        if instance.objective == "makespan" and instance.placement.copies == 1:
            for count, ticks in fewer.items():
                self._fewer(count, ticks)

    def _places(self) -> Any:
        stages = range(self.instance.placement.stages)
        return ((stage, microbatch) for stage in stages for microbatch in range(self.instance.microbatches))

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.latest, "")

    def _forward(self, stage: int, microbatch: int) -> None:
        action = Action(stage, Op.F, microbatch)
        self.starts[action], self.ends[action] = self._time(), self._time()

    def _backward(self, stage: int, microbatch: int) -> None:
        first = Action(stage, Op.I, microbatch)
        self.starts[first], self.ends[first] = self._time(), self._time()
        split = self.instance.split
        self.whole[first] = int(not split) if split is not None else self.model.new_bool_var("")
        if split is not False:
            second = Action(stage, Op.W, microbatch)
            self.starts[second], self.ends[second] = self._time(), self._time()

    def _pairs(self) -> None:
        """Let each forward be in a pair with each whole backward of its rank, and in at most one."""
        instance, model = self.instance, self.model
        for rank in range(instance.placement.ranks):
            held = [(stage, microbatch) for stage, some in instance.held(rank) for microbatch in some]
            forwards = [Action(stage, Op.F, microbatch) for stage, microbatch in held]
            backwards = [Action(stage, Op.I, microbatch) for stage, microbatch in held]
            for first in forwards:
                for second in backwards:
                    if (first.stage, first.microbatch) != (second.stage, second.microbatch):
                        both = model.new_bool_var("")
                        self.paired[first, second] = both
                        model.add(self.starts[first] == self.starts[second]).only_enforce_if(both)
                        model.add(self.ends[first] == self.ends[second]).only_enforce_if(both)
                        length = instance.pair(first.stage, second.stage)
                        model.add(self.ends[first] == self.starts[first] + length).only_enforce_if(both)
                        model.add_implication(both, self.whole[second]) if instance.split is None else None
                        end = self.ends[first]
                        interval = model.new_optional_interval_var(self.starts[first], length, end, both, "")
                        self.busy[rank].append(interval)
            for which, actions in ((0, forwards), (1, backwards)):
                for action in actions:
                    model.add_at_most_one(both for pair, both in self.paired.items() if pair[which] == action)

    def _busy(self) -> None:
        """Give each action that is not in a pair its length, and its rank an interval."""
        instance, model = self.instance, self.model
        pairs: defaultdict[Action, list[Any]] = defaultdict(list)
        for (first, second), both in self.paired.items():
            pairs[first].append(both)
            pairs[second].append(both)

        def add(action: Action, length: int, present: list[Any]) -> None:
            """Add an interval of this length, which exists if all literals are true."""
            start, end = self.starts[action], self.ends[action]
            rank = instance.placement.rank(action.stage, action.microbatch)
            if not present:
                model.add(end == start + length)
                self.busy[rank].append(model.new_interval_var(start, length, end, ""))
                return
            there = present[0]
            if len(present) > 1:
                there = model.new_bool_var("")
                model.add_bool_and(present).only_enforce_if(there)
                model.add_bool_or([there, *(each.negated() for each in present)])
            model.add(end == start + length).only_enforce_if(there)
            self.busy[rank].append(model.new_optional_interval_var(start, length, end, there, ""))

        for action in self.starts:
            alone = [each.negated() for each in pairs[action]]
            times, stage = instance.times, action.stage
            if action.op == "F":
                add(action, times[Op.F][stage], alone)
                continue
            first = Action(stage, Op.I, action.microbatch)
            whole = self.whole[first]
            if instance.split is not None:
                add(action, times[Op.B if whole else action.op][stage], alone if action.op == "I" else [])
            elif action.op == "I":
                add(action, times[Op.B][stage], [whole, *alone])
                add(action, times[Op.I][stage], [whole.negated()])
            else:
                add(action, times[Op.W][stage], [whole.negated()])
                model.add(self.ends[action] == self.ends[first]).only_enforce_if(whole)

    def _dependencies(self, stage: int, microbatch: int) -> None:
        instance, model, last = self.instance, self.model, self.instance.placement.stages - 1
        forward, first = Action(stage, Op.F, microbatch), Action(stage, Op.I, microbatch)
        if stage:
            before = Action(stage - 1, Op.F, microbatch)
            delay = instance.delay(stage - 1, stage, microbatch)
            model.add(self.starts[forward] >= self.ends[before] + delay)
        if stage < last:
            before = Action(stage + 1, Op.I, microbatch)
            delay = instance.delay(stage + 1, stage, microbatch)
            model.add(self.starts[first] >= self.ends[before] + delay)
        model.add(self.starts[first] >= self.ends[forward])
        if instance.split is not False:
            second = Action(stage, Op.W, microbatch)
            split = model.add(self.starts[second] >= self.ends[first])
            if instance.split is None:
                split.only_enforce_if(self.whole[first].negated())

    def _in_order(self) -> None:
        for stage in range(self.instance.placement.stages):
            for microbatches in self.instance.copies:
                for before, after in pairwise(microbatches):
                    for op in (Op.F, Op.I, Op.W):
                        first, second = Action(stage, op, before), Action(stage, op, after)
                        if first in self.starts and (op != "W" or self.instance.split):
                            self.model.add(self.starts[second] >= self.ends[first])

    def _memory(self, rank: int) -> None:
        """Let the activations that a rank holds fit at all times."""
        instance, model = self.instance, self.model
        if instance.memory is None:
            return
        limit, until_input, until_weight = instance.room
        last = Op.I if instance.split is False else Op.W
        room, sizes = [], []
        for stage, microbatches in instance.held(rank):
            for microbatch in microbatches:
                for op, held in ((Op.I, until_input[stage]), (last, until_weight[stage])):
                    if held:
                        start = self.starts[Action(stage, Op.F, microbatch)]
                        end = self.ends[Action(stage, op, microbatch)]
                        room.append(model.new_interval_var(start, self._time(), end, ""))
                        sizes.append(held)
            # The same for each stage alone, which finds contradictions sooner: a forward begins when the rank has freed
            # what does not fit beside it.
            if until_weight[stage] and instance.split is not None:
                for before, after in zip(microbatches, microbatches[limit // until_weight[stage] :], strict=False):
                    freed = self.ends[Action(stage, last, before)]
                    model.add(self.starts[Action(stage, Op.F, after)] >= freed)
        if instance.split is not None:
            self._nested(rank)
        if sum(sizes) > limit:
            model.add_cumulative(room, sizes, limit)

    def _nested(self, rank: int) -> None:
        """Add what the memory implies for two stages of a rank.

        If it is full of activations of the first stage, then none of these microbatches could go through the second one
        any more, unless the oldest already has, and has freed its activation there.
        """
        instance = self.instance
        limit, until_input, until_weight = instance.room
        last = Op.I if instance.split is False else Op.W
        for holders, microbatches in zip(instance.placement.holders, instance.copies, strict=True):
            stages = [stage for stage, holder in enumerate(holders) if holder == rank]
            for first, second in combinations(stages, 2):
                size = until_weight[first]
                if any(until_input) or not size or size != until_weight[second]:
                    continue
                for before, after in zip(microbatches, microbatches[limit // size - 1 :], strict=False):
                    freed = self.ends[Action(second, last, before)]
                    self.model.add(self.starts[Action(first, Op.F, after)] >= freed)

    def _fewer(self, count: int, ticks: int) -> None:
        """Let `count` successive microbatches take as long as they must alone: without the others, they fit as well."""
        instance, model = self.instance, self.model
        last = Op.I if instance.split is False else Op.W
        for first in range(instance.microbatches - count + 1):
            begin = self.starts[Action(0, Op.F, first)]
            if first + count == instance.microbatches:
                model.add(begin + ticks <= self.horizon)
                continue
            end = self._time()
            stages = range(instance.placement.stages)
            model.add_max_equality(end, [self.ends[Action(stage, last, first + count - 1)] for stage in stages])
            model.add(end >= begin + ticks)

    def _span(self, rank: int) -> None:
        """Let a rank's actions be within the horizon of its first one, which starts as soon as it can.

        A later start would shorten the rank's span on paper, but ranks do not wait for longer than they must.
        """
        placement, begin = self.instance.placement, self._time()
        if placement.copies == 1:  # all of its actions depend on the first forward of its first stage
            first = placement.holders[0].index(rank)
            self.model.add(begin == self.starts[Action(first, Op.F, 0)])
            if not first:
                self.model.add(begin == 0)
            else:
                arrives = self.ends[Action(first - 1, Op.F, 0)] + self.instance.delay(first - 1, first, 0)
                self.model.add(begin == arrives)
        for action, start in self.starts.items():
            if placement.rank(action.stage, action.microbatch) == rank:
                self.model.add(begin <= start)
                self.model.add(self.ends[action] <= begin + self.horizon)

    def schedule(self, solver: CpSolver) -> Schedule:
        """Return the schedule that a solver has found."""
        placement, value = self.instance.placement, solver.value
        orders: list[list[tuple[Any, ...]]] = [[] for _ in range(placement.ranks)]
        partner = {first: second for (first, second), both in self.paired.items() if value(both)}
        paired = set(chain(partner, partner.values()))
        for action, start in self.starts.items():
            stage, op, microbatch, _ = action
            whole = op != "F" and bool(value(self.whole[Action(stage, Op.I, microbatch)]))
            if whole and op == "W":
                continue
            found = Action(stage, Op.B, microbatch) if whole else action
            if action in partner:
                backward = partner[action]
                parts = action, Action(backward.stage, Op.B, backward.microbatch)
                found = Action(-1, Op.OVERLAP_F_B, -1, parts)
            elif action in paired:
                continue
            orders[placement.rank(stage, microbatch)].append((value(start), found))
        rows = tuple(tuple(action for _, action in sorted(order)) for order in orders)
        return Schedule("searched", placement, self.instance.microbatches, rows)
