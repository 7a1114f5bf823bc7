"""The puzzle's board: a schedule made by hand, an action at a time. What cannot be next is refused, with the reason.

It knows nothing of how it is shown. What is made on it is an ordinary Schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from fractions import Fraction
from itertools import chain, product
from numbers import Real
from operator import le
from typing import Any

from ppedu.core.actions import COMPUTE, Action, B, F, I, Op, W, overlap
from ppedu.core.costs import Costs
from ppedu.core.dependencies import Result, produces, requires
from ppedu.core.errors import ParseError, ScheduleError, SettingError
from ppedu.core.numeric import Number, plural, pretty
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.simulate import simulate, simulate_partial
from ppedu.core.timeline import Gap, Span, Timeline
from ppedu.core.validate import require_count, require_rank

# `finish` plays by each of these and keeps the best. What can start first goes first; of what could start at the same
# time, the op that stands first here, P for a pair. The last one splits every backward that may be split.
POLICIES = ("PBIFW", "PFBIW", "PIWFB", "PIFWB")


class Board:
    """A schedule under construction: actions are placed at the end of a rank's order, and can be undone.

    memory: the most that the activations of a rank may weigh, in the unit of `Timeline.peak_activations`: by default
        one microbatch's activations of one rank's share. None: there is no limit.
    split: every backward is in two halves, I and W (True), or in one piece, B (False), or either, as one likes (None).
    pairs: may a forward and a full backward be placed to run at the same time, as (0F1;3B0)OVERLAP_F_B?
    start: actions that are there from the beginning and cannot be undone, in an order in which they can be placed.
    par: the complete schedule to be compared with; the board's `par` is its timeline.

    Every action comes after what it needs has been placed, so the order of placing is one in which the ranks can get
    through their actions: no board ever deadlocks. With a limit of memory it can come to a position from which it
    cannot be completed (`stuck`, `finish`).

    Raises:
        SettingError: a setting cannot work: there is not memory for one microbatch, or par does not fit the board.
        ScheduleError: `start` cannot be placed, or leaves no way to complete the board.
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
        if not isinstance(placement, Placement):
            raise SettingError(f"a board has a placement, such as Placement.make('loop', 4); got {placement!r}")
        if costs is not None and not isinstance(costs, Costs):
            raise SettingError(f"a board has costs, such as Costs(forward=1, backward=2); got {costs!r}")
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, Real) or not memory < math.inf):
            raise SettingError(f"memory must be a number of activations, or None for no limit; got {memory!r}")
        if split not in (False, True, None):
            raise SettingError(f"split must be True, False, or None for either; got {split!r}")
        self.placement, self.microbatches = placement, require_count("microbatches", microbatches)
        self.costs, self.memory, self.split, self.pairs, self.name = costs or Costs(), memory, split, pairs, name
        self._ops = {False: "FB", True: "FIW", None: "FBIW"}[split]
        self._alphabet = [tuple(self._alone(rank)) for rank in range(placement.ranks)]
        self._weighs = list(map(_exact, self.costs.per_stage(self.costs.activation, placement.stages, placement.ranks)))
        kept = _exact(self.costs.weight_memory)
        self._takes = {Op.F: Fraction(1), Op.B: Fraction(-1), Op.I: kept - 1, Op.W: -kept}
        self._start: tuple[Action, ...] = ()
        self._steps: list[tuple[Action, ...]] = []  # what undo takes back: an action, or all that `finish` placed
        self._undone: list[tuple[Action, ...]] = []
        self._timeline: Timeline | None = None
        self._put_back()
        if not self._can_end(()):
            raise SettingError(f"memory for {_activations(memory or 0)} is not enough for one microbatch")
        for action in start:
            self.place(action)
        self._start, self._steps = self.moves, []
        self._require_a_way_on()
        self.par = None if par is None else self._accept(par)

    def _accept(self, par: Schedule) -> Timeline:
        """The timeline of par, which must be one that could have been made on this board."""
        require_schedule("par", par)
        if (par.placement, par.microbatches) != (self.placement, self.microbatches):
            raise SettingError(f"par has another placement or other microbatches than the board: {par!r}")
        timeline = simulate(par, self.costs)
        trial = Board(self.placement, self.microbatches, self.costs, self.memory, self.split, self.pairs)
        for rank, index in par.replay.steps:
            if refusal := trial.why_not(par.orders[rank][index]):
                raise SettingError(f"par cannot be placed on this board: {refusal}")
            trial._put(par.orders[rank][index])
        return timeline

    def _alone(self, rank: int) -> Iterator[Action]:
        """Everything that `rank` could be asked to do by itself."""
        stages = self.placement.stages_of(rank)
        for op, microbatch, stage in product(self._ops, range(self.microbatches), stages):
            if self.placement.rank(stage, microbatch) == rank:
                yield Action(stage, Op(op), microbatch)

    # --- what is there --------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def moves(self) -> tuple[Action, ...]:
        """Everything on the board, in the order in which it was placed."""
        return (*self._start, *chain.from_iterable(self._steps))

    @property
    def schedule(self) -> Schedule:
        """What is placed, as an ordinary schedule: once complete it can be checked, simulated, run and exported."""
        return Schedule(self.name, self.placement, self.microbatches, tuple(map(tuple, self._orders)))

    @property
    def timeline(self) -> Timeline:
        """When the ranks do what is placed, each action as soon as it can run."""
        if self._timeline is None:
            self._timeline = simulate_partial(self.schedule, self.costs)
        return self._timeline

    def left(self, rank: int) -> tuple[Action, ...]:
        """The actions that `rank` still has to do. A backward that may be split is a B as long as nothing is placed.

        Raises:
            SettingError: there is no such rank.
        """
        either = self.split is None
        return tuple(
            action
            for action in self._alphabet[require_rank(rank, self.ranks)]
            if not any(self._in_the_way(action))
            and not (either and action.op in "IW" and not self._is_half_done(action))
        )

    @property
    def complete(self) -> bool:
        """Is everything placed?"""
        return not any(map(self.left, range(self.ranks)))

    # --- what can be placed ---------------------------------------------------------------------------------------

    def choices(self, rank: int) -> tuple[Action, ...]:
        """All that `rank` can place next: forwards, then backwards, then pairs; of each, low microbatches first.

        Raises:
            SettingError: there is no such rank.
        """
        left = (action for action in self._alphabet[require_rank(rank, self.ranks)] if action not in self._placed)
        singles = [action for action in left if not any(self._refusals(action))]
        forwards = [action for action in singles if action.op == Op.F]
        backwards = [action for action in singles if action.op == Op.B]
        return (*singles, *(overlap(*both) for both in product(forwards, backwards) if self.pairs))

    def why_not(self, action: Action | str) -> str | None:
        """Why `action` cannot be placed next, in a sentence; None if it can be."""
        try:
            return next(self._refusals(_read(action)), None)
        except ParseError as error:
            return str(error)

    def place(self, action: Action | str) -> Span:
        """Put `action` at the end of its rank's order, and return the time at which it runs.

        Raises:
            ScheduleError: it cannot be next; the message is that of `why_not`.
        """
        action = self._accepted(action)
        self._do((action,))
        return self.timeline.spans(self._rank(action))[-1]

    def could_start(self, action: Action | str) -> Any:
        """When `action` would start if it were placed next.

        Raises:
            ScheduleError: it cannot be next; the message is that of `why_not`.
        """
        action = self._accepted(action)
        rows, rank = self.timeline.rows, self._rank(action)
        times = [rows[rank][-1].end] if rows[rank] else [0]
        for need in requires(action, self.placement):
            source, index = self._made[need]
            times.append(rows[source][index].end + (self.costs.latency if source != rank else 0))
        return max(times)

    def _accepted(self, action: Action | str) -> Action:
        if refusal := self.why_not(action):
            raise ScheduleError(refusal)
        return _read(action)

    def _refusals(self, action: Action) -> Iterator[str]:
        """Why `action` cannot be next. The first sentence counts: a later one is only looked for if none holds yet."""
        for single in action.singles:
            yield from self._not_of_this_board(single)
            yield from self._in_the_way(single)
        if action.parts:
            yield from self._no_pair(action)
        for single in action.singles:
            yield from self._too_early(single, action.singles)
        yield from self._too_much(action)

    def _not_of_this_board(self, single: Action) -> Iterator[str]:
        stage, op, microbatch, _ = single
        if op not in COMPUTE:
            yield f"{single} is not placed by hand: lowering adds the messages, and gathers the weights"
        elif stage >= self.placement.stages:
            yield f"{single}: there is no stage {stage}; the stages are 0 to {self.placement.stages - 1}"
        elif microbatch >= self.microbatches:
            yield f"{single}: there is no microbatch {microbatch}; they are 0 to {self.microbatches - 1}"
        elif op == Op.B and self.split:
            halves = f"{I(stage, microbatch)} and {W(stage, microbatch)}"
            yield f"{single}: a backward is in two halves here, {halves}"
        elif op not in self._ops:
            yield f"{single}: a backward is in one piece here, {B(stage, microbatch)}"

    def _in_the_way(self, single: Action) -> Iterator[str]:
        """What on the board has done it already."""
        stage, op, microbatch, _ = single
        full = B(stage, microbatch)
        if single in self._placed:
            yield f"{single} has already been placed ({self._where(single)})"
        elif op == Op.B and self._is_half_done(single):
            half = I(stage, microbatch)
            yield f"{single} is a full backward, and half of it, {half}, has already been placed ({self._where(half)})"
        elif op in (Op.I, Op.W) and full in self._placed:
            yield f"{single} is half of {full}, which has already been placed ({self._where(full)})"

    def _no_pair(self, action: Action) -> Iterator[str]:
        first, second = action.parts
        one, other = self._rank(first), self._rank(second)
        if not self.pairs:
            yield f"{action}: there are no pairs on this board; place {first} and {second} one after the other"
        elif (first.op, second.op, action.op) != (Op.F, Op.B, Op.OVERLAP_F_B):
            yield f"{action}: a pair is a forward and then a full backward, such as (0F1;3B0)OVERLAP_F_B"
        elif one != other:
            yield f"{action}: stage {first.stage} is held by rank {one}, and stage {second.stage} by rank {other}"

    def _too_early(self, single: Action, together: Collection[Action]) -> Iterator[str]:
        for need in requires(single, self.placement):
            if need not in self._made:
                kind, stage, microbatch = need
                halved = kind == "B" and (self.split or single.op == Op.W)
                maker = Action(stage, Op.I if halved else Op(kind), microbatch)
                yet = "runs at the same time" if maker in together else "has not been placed yet"
                yield f"{single} needs {maker}, which {yet} (rank {self._rank(maker)})"

    def _too_much(self, action: Action) -> Iterator[str]:
        more = sum(self._weighs[single.stage] for single in action.singles if single.op == Op.F)
        if self.memory is not None and more:
            rank = self._rank(action)
            would_hold = self._held[rank] + more
            if would_hold > _exact(self.memory):
                most = pretty(self.memory)
                yield f"with {action}, rank {rank} would hold {_activations(would_hold)}; the limit is {most}"

    def _rank(self, action: Action) -> int:
        single = action.singles[0]
        return self.placement.rank(single.stage, single.microbatch)

    def _is_half_done(self, backward: Action) -> bool:
        return I(backward.stage, backward.microbatch) in self._placed

    def _where(self, single: Action) -> str:
        rank, index = self._placed[single]
        return f"rank {rank}, position {index}"

    # --- back and forth -------------------------------------------------------------------------------------------

    def undo(self) -> tuple[Action, ...]:
        """Take the last action back, or all that `finish` placed, and return it; nothing, at the start."""
        return self._move(self._steps, self._undone)

    def redo(self) -> tuple[Action, ...]:
        """Place again what was undone last, and return it; nothing, if something else was placed since."""
        return self._move(self._undone, self._steps)

    def reset(self) -> None:
        """Undo everything. `redo` still brings it back."""
        while self.undo():
            pass

    def _move(self, source: list[tuple[Action, ...]], target: list[tuple[Action, ...]]) -> tuple[Action, ...]:
        if not source:
            return ()
        target.append(source.pop())
        self._put_back()
        return target[-1]

    def _do(self, actions: tuple[Action, ...]) -> None:
        self._undone.clear()
        self._steps.append(actions)
        for action in actions:
            self._put(action)

    def _put_back(self) -> None:
        """Set the board up from its moves."""
        self._orders: list[list[Action]] = [[] for _ in range(self.ranks)]
        self._held = [Fraction(0)] * self.ranks  # what the activations weigh
        self._placed: dict[Action, tuple[int, int]] = {}  # the rank and position at which an action stands
        self._made: dict[Result, tuple[int, int]] = {}  # and the action that makes a result
        self._timeline = None
        for action in self.moves:
            self._put(action)

    def _put(self, action: Action) -> None:
        rank = self._rank(action)
        here = rank, len(self._orders[rank])
        self._placed |= dict.fromkeys(action.singles, here)
        self._made |= dict.fromkeys(produces(action), here)
        self._held[rank] += sum(self._takes[single.op] * self._weighs[single.stage] for single in action.singles)
        self._orders[rank].append(action)
        self._timeline = None

    # --- dead ends ------------------------------------------------------------------------------------------------

    @property
    def stuck(self) -> str | None:
        """If no rank can place anything although something is left: why, and what to do; None otherwise."""
        if self.complete or any(map(self.choices, range(self.ranks))):
            return None
        left = (single for rank in range(self.ranks) for single in self.left(rank))
        full = next(why for single in left if not any(self._too_early(single, ())) for why in self._too_much(single))
        return f"no rank can place anything: {full}; {self._way_back()}"

    def _way_back(self) -> str:
        """What to do in a dead end."""
        moves = self.moves
        back = next(number for number in range(1, len(moves) + 1) if self._can_end(moves[:-number]))
        return f"undo {plural(back, 'action')}, and let other forwards go first"

    def _can_end(self, moves: Iterable[Action]) -> bool:
        """Does the memory suffice to complete the board after `moves`?

        A microbatch gives nothing back before its last forward, and everything after it, for which it needs no more
        memory. So of those under way some one is the first to have all its forwards, while the others only take
        memory; it might as well go first and alone. When it is through there is more room than before, so it does not
        matter which one goes first: if those that fit go through one by one and some are left, there is no way.
        """
        if self.memory is None:
            return True
        placed = {single for action in moves for single in action.singles}
        stages = range(self.placement.stages)
        room = [_exact(self.memory)] * self.ranks
        under_way = []
        for microbatch in range(self.microbatches):
            taken, wanted = [Fraction(0)] * self.ranks, [Fraction(0)] * self.ranks
            for stage in stages:
                rank = self.placement.rank(stage, microbatch)
                (taken if F(stage, microbatch) in placed else wanted)[rank] += self._weighs[stage]
            if any(F(stage, microbatch) not in placed for stage in stages):
                room = [free - each for free, each in zip(room, taken, strict=True)]
                under_way.append((taken, wanted))
        while under_way:
            fits = [all(map(le, wanted, room)) for _, wanted in under_way]
            if not any(fits):
                return False
            taken, _ = under_way.pop(fits.index(True))
            room = [free + each for free, each in zip(room, taken, strict=True)]
        return True

    def _require_a_way_on(self) -> None:
        if not self._can_end(self.moves):
            limit = _activations(self.memory or 0)
            raise ScheduleError(f"from here no order stays within {limit} to the end; {self._way_back()}")

    # --- help -----------------------------------------------------------------------------------------------------

    def hint(self) -> Action | None:
        """What could be placed next: the first of what `finish` would place. None when nothing is left.

        Raises:
            ScheduleError: the board cannot be completed from here within the memory.
        """
        return next(iter(self._rest()), None)

    def finish(self) -> tuple[Action, ...]:
        """Complete the board, and return what was placed. It is one step to `undo`.

        As long as everything stands as in par, par is followed; else the shortest of a few simple ways to go on, of
        equally short ones the one with the lowest peak of activations. It need not be the shortest of all.

        Raises:
            ScheduleError: the board cannot be completed from here within the memory.
        """
        rest = self._rest()
        if rest:
            self._do(rest)
        return rest

    def _rest(self) -> tuple[Action, ...]:
        self._require_a_way_on()
        if self.par and self._follows(self.par.schedule):
            steps = self.par.schedule.replay.steps
            return tuple(
                self.par.schedule.orders[rank][index] for rank, index in steps if index >= len(self._orders[rank])
            )
        policies = dict.fromkeys("".join(op for op in policy if op in "P" + self._ops) for policy in POLICIES)
        ends = [self._played(policy) for policy in (*policies, *([None] if self.par else []))]
        best = min(ends, key=lambda end: (end.timeline.makespan, max(end.timeline.peak_activations)))
        return best.moves[len(self.moves) :]

    def _follows(self, par: Schedule) -> bool:
        return all(list(wanted[: len(order)]) == order for wanted, order in zip(par.orders, self._orders, strict=True))

    def _played(self, policy: str | None) -> Board:
        """A copy of the board, completed by a policy, or as nearly as in par. It never goes into a dead end."""
        board = Board(self.placement, self.microbatches, self.costs, self.memory, self.split, self.pairs, self.moves)
        rows = self.par.rows if self.par else ()
        in_par = {done: span.start for row in rows for span in row for done in (span.action, *span.action.singles)}

        def urgency(action: Action) -> tuple[Any, ...]:
            if policy is None:
                return in_par.get(action, math.inf), not action.parts
            first = action.singles[0]
            op = policy.index("P" if action.parts else action.op)
            return board.could_start(action), op, first.microbatch, first.stage

        while choices := [action for rank in range(self.ranks) for action in board.choices(rank)]:
            safe = (action for action in sorted(choices, key=urgency) if board._can_end((*board.moves, action)))
            board._do((next(safe),))
        return board

    # --- the verdict ----------------------------------------------------------------------------------------------

    def verdict(self) -> str:
        """How good the completed board is, in a sentence or two; before that, how much is left."""
        if not self.complete:
            return f"{plural(sum(len(self.left(rank)) for rank in range(self.ranks)), 'action')} left to place"
        timeline = self.timeline
        time, unit = timeline.makespan, self.costs.unit
        words = f"{pretty(time, unit)}{'' if unit else ' slots'}"
        if self.par and time == self.par.makespan:
            words += ": that is par"
        elif self.par and time < self.par.makespan:
            words += f": better than par, which is {pretty(self.par.makespan, unit)}"
        elif self.par:
            words += f"; par is {pretty(self.par.makespan, unit)}: {self._lost_time(self.par)}"
        limit = "" if self.memory is None else f"; the limit is {pretty(self.memory)}"
        return f"{words}. No rank holds more than {_activations(max(timeline.peak_activations))}{limit}."

    def _lost_time(self, par: Timeline) -> str:
        """The wait that costs most: where a rank does nothing and in par it works."""

        def lost(gap: Gap) -> Any:
            return sum(max(0, min(gap.end, end) - max(gap.start, start)) for _, start, end in par.spans(gap.rank))

        rows = self.timeline.rows
        waits = [gap for gap in self.timeline.gaps() if gap.start < rows[gap.rank][-1].start]
        worst = max(waits, key=lost, default=None)
        return worst.why if worst and lost(worst) else "the actions themselves take longer"


def _read(action: Action | str) -> Action:
    return Action.parse(str(action) if isinstance(action, Action) else action)


def _activations(number: Any) -> str:
    return f"{pretty(number)} activation{'' if number == 1 else 's'}"


def _exact(number: Any) -> Fraction:
    """A float as the decimal that was meant: three times 0.1 is not more than 0.3."""
    return Fraction(str(number))
