"""The puzzle's board: a schedule made by hand, one action at a time. An action that cannot be next is refused.

A *move* places one action at the end of a rank's order. The board does not know how it is displayed. The placed actions
are an ordinary Schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import product
from operator import mul, neg, sub
from typing import Any

from ppedu.core import (
    Action,
    B,
    I,
    Op,
    ParseError,
    Placement,
    Result,
    Schedule,
    ScheduleError,
    SettingError,
    overlap,
    produces,
    requires,
)
from ppedu.core.numeric import Number, exact, plural, pretty
from ppedu.course.board.completion import activations, remaining, undo_advice
from ppedu.sim import Costs, Gap, Span, Timeline, require_costs, simulate, simulate_partial


class Board:
    """A schedule under construction: each move places an action at the end of its rank's order, and can be undone.

    An action can only be placed once its dependencies have been placed. So the order of the moves is a global order in
    which every rank can make progress, and no board deadlocks. With a limit on memory a board can reach a position from
    which it cannot be completed (`stuck`, `finish`).

    Args:
        placement, microbatches: Those of the schedule. The board is complete once every microbatch has passed every
            stage.
        costs: The times of the actions, and the activations that they hold, as in `simulate`.
        memory: The most activations that a rank may hold, enough for one microbatch; None for no limit. The unit is
            that of `costs.activation`: by default 1 is one microbatch's activations in one rank's share of the model.
        split: True for backwards in two halves, I and W; False for full backwards, B; None for either.
        pairs: Whether a forward and a full backward may be placed as an overlapped pair, (0F1;3B0)OVERLAP_F_B.
        start: Actions that are placed from the beginning and cannot be undone, in an order in which they can be placed.
        par: A complete schedule of this board to compare with; the attribute `par` is its timeline.
        name: The name of the schedule.

    Raises:
        SettingError: The costs recompute activations or occupy links.
        ScheduleError: `start` cannot be placed.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs | None = None,
        memory: Number | None = None,
        split: bool | None = False,
        pairs: bool = False,
        start: Iterable[Action | str] = (),
        par: Schedule | None = None,
        name: str = "mine",
    ):
        self.placement, self.microbatches, self.name, self.costs = placement, microbatches, name, require_costs(costs)
        self.memory, self.split, self.pairs = memory, split, pairs
        if placement.slices > 1 or self.costs.lengths:
            raise SettingError("a board has whole sequences; give a placement with slices=1, and leave out lengths")
        if placement.backwards:
            raise SettingError("a board has the forward and the backward of a stage on one rank; take a loop, say")
        if self.costs.recompute:
            raise SettingError("a board does not recompute activations; leave out recompute")
        if self.costs.transport != "buffered":
            raise SettingError("a board has no messages that occupy their links; leave out transport")
        self.ops = {False: "FB", True: "FIW", None: "FBIW"}[split]
        self.limit = math.inf if memory is None else exact(memory)
        weights = self.costs.per_stage(self.costs.activation, placement.stages, placement.ranks)
        self.weights = list(map(exact, weights))  # a microbatch's activations in each stage
        parts = map(exact, self.costs.per_stage(self.costs.weight_memory, placement.stages, placement.stages))
        kept = [*map(mul, self.weights, parts)]  # of these, until W
        # By op and stage, the memory that an action allocates; negative if it frees it.
        self._allocates = {Op.F: self.weights, Op.B: [*map(neg, self.weights)]}
        self._allocates |= {Op.I: [*map(sub, kept, self.weights)], Op.W: [*map(neg, kept)]}
        self._holders: dict[Action, int] = {}  # the rank of each action of the board, without pairs
        for op, microbatch, stage in product(self.ops, range(microbatches), range(placement.stages)):
            self._holders[Action(stage, Op(op), microbatch)] = placement.rank(stage, microbatch)
        self._moves: tuple[Action, ...] = ()
        self._past: list[tuple[Action, ...]] = []  # the moves before each step: an action, or all that `finish` placed
        self._undone: list[tuple[Action, ...]] = []  # the moves before each undo
        self._replay()
        for action in start:
            self.extend([self._require_placeable(action)])
        self.start: tuple[Action, ...] = self._moves
        self._past.clear()
        self.par = simulate(par, self.costs) if par else None

    def with_start(self, start: Iterable[Action]) -> Board:
        """Return a board with the same rules but without par, on which the actions in `start` are placed."""
        return Board(self.placement, self.microbatches, self.costs, self.memory, self.split, self.pairs, start)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def moves(self) -> tuple[Action, ...]:
        """All placed actions, in an order in which they can be placed: `start`, and then those of the moves."""
        return self._moves

    @property
    def schedule(self) -> Schedule:
        """The placed actions as a schedule. Once complete, it can be checked, simulated, run and exported."""
        return Schedule(self.name, self.placement, self.microbatches, tuple(map(tuple, self._orders)))

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of the placed actions, by simulation."""
        return simulate_partial(self.schedule, self.costs)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return all actions that `rank` could run, placed or not, without pairs.

        Where a backward may be full or split, B, I and W of each microbatch are listed.
        """
        return tuple(action for action, holder in self._holders.items() if holder == rank)

    def is_left(self, action: Action) -> bool:
        """Return whether `action` can still be placed later: no placed action does all or half of its work.

        Once 1B0 is placed, neither 1B0 nor its halves 1I0 and 1W0 are left. `action` is not a pair.
        """
        return not any(self._duplicates(action))

    def left(self, rank: int) -> tuple[Action, ...]:
        """Return the actions that still have to be placed on `rank`, without pairs.

        A backward that may be split counts as one B until its I is placed, and then as its W.
        """
        left = [action for action in self.actions(rank) if self.is_left(action)]
        if self.split is not None:
            return tuple(left)
        return tuple(action for action in left if action.op in "FB" or self._is_half_done(action))

    @property
    def complete(self) -> bool:
        """Whether all actions have been placed."""
        return not any(map(self.left, range(self.ranks)))

    def choices(self, rank: int) -> tuple[Action, ...]:
        """Return all actions that can be placed next on `rank`: forwards, backwards, then pairs, each by microbatch."""
        singles = [action for action in self.actions(rank) if not any(self._refusals(action))]
        if not self.pairs:
            return tuple(singles)
        forwards = [action for action in singles if action.op == Op.F]
        backwards = [action for action in singles if action.op == Op.B]
        pairs = [overlap(forward, backward) for forward, backward in product(forwards, backwards)]
        return (*singles, *pairs)

    def why_not(self, action: Action | str) -> str | None:
        """Return the reason why `action` cannot be placed next, or None if it can."""
        try:
            return next(self._refusals(Action.of(action)), None)
        except ParseError as error:
            return str(error)

    def place(self, action: Action | str) -> Span:
        """Append `action` to its rank's order, and return its span in the timeline.

        Raises:
            ScheduleError: the action cannot be next; the message is that of `why_not`.
        """
        action = self._require_placeable(action)
        self.extend([action])
        return self.timeline.spans(self.rank(action))[-1]

    def could_start(self, action: Action | str) -> Any:
        """Return the time at which `action` would start if it were placed next.

        Raises:
            ScheduleError: The action cannot be next; the message is that of `why_not`.
        """
        action = self._require_placeable(action)
        rows, rank = self.timeline.rows, self.rank(action)
        times = [rows[rank][-1].end] if rows[rank] else [0]
        for result in requires(action, self.placement):
            source, index = self.results[result]
            times.append(rows[source][index].end + self.costs.delay(source, rank))
        return max(times)

    def _require_placeable(self, action: Action | str) -> Action:
        """Return `action`, parsed if it is text. Raise ScheduleError, with the reason, if it cannot be placed next."""
        if refusal := self.why_not(action):
            raise ScheduleError(refusal)
        return Action.of(action)

    def _refusals(self, action: Action) -> Iterator[str]:
        """Yield the reasons why `action` cannot be next. Only the first counts: each check assumes the earlier ones."""
        if not self.exists(action):
            yield f"{action} is not an action of this board"
            return
        for single in action.singles:
            yield from self._duplicates(single)
        for single in action.singles:
            yield from self._missing_dependencies(single, action.singles)
        yield from self._excess_memory(action)

    def exists(self, action: Action) -> bool:
        """Return whether the board has this action at all; the buttons of the puzzle offer no other."""
        if action.parts:
            ops = [single.op for single in action.singles]
            is_pair = ops == [Op.F, Op.B] and action.op == Op.OVERLAP_F_B
            if not (self.pairs and is_pair):
                return False
        holders = {self._holders.get(single) for single in action.singles}
        return len(holders) == 1 and None not in holders

    def _duplicates(self, single: Action) -> Iterator[str]:
        """Yield a sentence about the placed action that already does all or half of `single`, if there is one."""
        stage, op, microbatch, _ = single
        full, half = B(stage, microbatch), I(stage, microbatch)
        if single in self._placed:
            yield f"{single} has already been placed ({self._position(single)})"
        elif op == Op.B and self._is_half_done(single):
            yield f"half of {single}, {half}, has already been placed ({self._position(half)})"
        elif op in (Op.I, Op.W) and full in self._placed:
            yield f"{single} is half of {full}, which has already been placed ({self._position(full)})"

    def _missing_dependencies(self, single: Action, together: Collection[Action]) -> Iterator[str]:
        """Yield a sentence for each dependency of `single` that is not placed. `together` are the parts of its pair."""
        for result in requires(single, self.placement):
            if result not in self.results:
                kind, stage, microbatch = result
                halved = kind == "B" and (self.split or single.op == Op.W)
                source = Action(stage, Op.I if halved else Op(kind), microbatch)
                problem = "runs at the same time" if source in together else "has not been placed yet"
                yield f"{single} needs {source}, which {problem} (rank {self.rank(source)})"

    def _excess_memory(self, action: Action) -> Iterator[str]:
        """Yield a sentence about the limit on memory if `action` holds more activations and exceeds it."""
        held, rank = self.held_with(action), self.rank(action)
        if held > self.limit:
            yield f"with {action}, rank {rank} would hold {activations(held)}; the limit is {pretty(self.memory)}"

    def held_with(self, action: Action) -> Fraction:
        """Return the activations that the rank of `action` would hold while running it next; 0 if it needs no more."""
        more = sum(self.weights[each.stage] for each in action.singles if each.op == Op.F)
        return self._held[self.rank(action)] + more if more else Fraction(0)

    def rank(self, action: Action) -> int:
        """Return the rank that runs an action of this board."""
        return self._holders[action.singles[0]]

    def _is_half_done(self, backward: Action) -> bool:
        """Return whether the I of a B, an I or a W has been placed."""
        return I(backward.stage, backward.microbatch) in self._placed

    def _position(self, single: Action) -> str:
        rank, index = self._placed[single]
        return f"rank {rank}, position {index}"

    def undo(self) -> tuple[Action, ...]:
        """Take back the last step, and return its actions; () if nothing was placed.

        A step is a move, or all moves of `finish` or `rearrange`.
        """
        return self._step(self._past, self._undone)

    def redo(self) -> tuple[Action, ...]:
        """Repeat the step that was undone last, and return its actions; () if another one followed the undo."""
        return self._step(self._undone, self._past)

    def reset(self) -> None:
        """Undo all moves. `redo` can bring them back."""
        while self.undo():
            pass

    def _step(self, source: list[tuple[Action, ...]], target: list[tuple[Action, ...]]) -> tuple[Action, ...]:
        """Go to the last position in `source`, and return the actions that come or go; () if it is empty."""
        if not source:
            return ()
        target.append(self._moves)
        fewer, more = sorted((self._moves, source.pop()), key=len)
        self._moves = more if self._moves is fewer else fewer
        self._replay()
        kept = set(fewer)
        return tuple(action for action in more if action not in kept)

    def extend(self, actions: Sequence[Action]) -> None:
        """Append actions to their ranks' orders, as one step of `undo`. Each must be placeable when its turn comes."""
        self._keep((*self._moves, *actions))
        for action in actions:
            self._append(action)

    def rearrange(self, moves: Sequence[Action]) -> None:
        """Replace all moves by these, as one step of `undo`. Each must be placeable when its turn comes."""
        self._keep(tuple(moves))
        self._replay()

    def _keep(self, moves: tuple[Action, ...]) -> None:
        """Let a step lead to these moves."""
        self._undone.clear()
        self._past.append(self._moves)
        self._moves = moves
        vars(self).pop("timeline", None)  # that of the moves before

    def _replay(self) -> None:
        """Rebuild the orders, and all that follows from them, from `moves`."""
        self._orders: list[list[Action]] = [[] for _ in range(self.ranks)]
        self._held = [Fraction(0)] * self.ranks  # activations on each rank
        self._placed: dict[Action, tuple[int, int]] = {}  # the rank and the position of each action
        self.results: dict[Result, tuple[int, int]] = {}  # and of the action that produces each result
        vars(self).pop("timeline", None)
        for action in self._moves:
            self._append(action)

    def _append(self, action: Action) -> None:
        rank = self.rank(action)
        here = rank, len(self._orders[rank])
        self._placed |= dict.fromkeys(action.singles, here)
        self.results |= dict.fromkeys(produces(action), here)
        self._held[rank] += sum(self._allocates[each.op][each.stage] for each in action.singles)
        self._orders[rank].append(action)

    @property
    def stuck(self) -> str | None:
        """The reason why no rank can place any of the actions that are left, with advice; None if one can."""
        if self.complete or any(map(self.choices, range(self.ranks))):
            return None
        left = (single for rank in range(self.ranks) for single in self.left(rank))
        ready = (single for single in left if not any(self._missing_dependencies(single, ())))
        full = next(reason for single in ready for reason in self._excess_memory(single))
        return f"no rank can place an action: {full}; {undo_advice(self)}"

    def hint(self) -> Action | None:
        """Return the first action that `finish` would place, or None if the board is complete.

        Raises:
            ScheduleError: the board cannot be completed from here within the memory.
        """
        return next(iter(remaining(self)), None)

    def finish(self) -> tuple[Action, ...]:
        """Complete the board, and return the placed actions, which are one step of `undo`.

        If every rank's order so far is the beginning of its order in par, the rest of par is placed. Otherwise, of the
        actions that can be placed, the one that par runs first comes next. The result need not be optimal.

        Raises:
            ScheduleError: The board cannot be completed from here within the memory.
        """
        rest = remaining(self)
        if rest:
            self.extend(rest)
        return rest

    def verdict(self) -> str:
        """Return the makespan and the peak of a complete board in words, or how many actions are left to place.

        If the board has a par, the makespan is compared with it, and the wait that costs the most is explained. Times
        without a unit are in slots: by default a forward of one rank's share of the model takes one slot.
        """
        if not self.complete:
            return f"{plural(sum(len(self.left(rank)) for rank in range(self.ranks)), 'action')} left to place"
        time, unit = self.timeline.makespan, self.costs.unit
        words = f"{pretty(time, unit)}{'' if unit else ' slots'}"
        if self.par and time == self.par.makespan:
            words += ": that is par"
        elif self.par and time < self.par.makespan:
            words += f": better than par, which is {pretty(self.par.makespan, unit)}"
        elif self.par:
            words += f"; par is {pretty(self.par.makespan, unit)}: {self._longest_wait(self.par)}"
        limit = "" if self.memory is None else f"; the limit is {pretty(self.memory)}"
        return f"{words}. No rank holds more than {activations(max(self.timeline.peak_activations))}{limit}."

    def _longest_wait(self, par: Timeline) -> str:
        """Return why a rank waits in the gap that overlaps most with its work in `par`, the timeline of par."""

        def lost(gap: Gap) -> Any:
            """Return for how long the rank computes in par at the times of the gap."""
            computes = 0
            for _, start, end in par.spans(gap.rank):
                computes += max(0, min(gap.end, end) - max(gap.start, start))
            return computes

        rows = self.timeline.rows
        waits = [gap for gap in self.timeline.gaps() if gap.start < rows[gap.rank][-1].start]
        worst = max(waits, key=lost, default=None)
        return worst.why if worst and lost(worst) else "the actions themselves take longer"
