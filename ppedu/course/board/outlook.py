"""The cost of a move, before it is made: the times of the action, and a bound that no completion can beat then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ppedu.core import Action, I, Op, Result, W, produces, requires
from ppedu.core.numeric import by_microbatch, pretty, ratio
from ppedu.course.board.board import Board


class Forecast(NamedTuple):
    """The consequences of an action that is placed next.

    `start` and `end` are its times. Whatever is placed behind it, the complete board has at least this makespan, this
    bubble and this peak of activations on a rank; `reasons` says why, in a sentence for each of these three.
    """

    start: Any
    end: Any
    makespan: Any
    bubble: float
    peak: Any
    reasons: tuple[str, str, str]


class Outlook:
    """Forecasts of the moves from one position of a board.

    The bound on the makespan is the larger of two: the longest way that a microbatch still has through the stages, and
    for each rank, the time at which its last actions can begin, the time that they take, and the shortest way that
    remains after one of them. It does not look at the limit on memory.
    """

    def __init__(self, board: Board):
        self.board, costs = board, board.costs
        size = board.placement.stages, board.ranks, board.microbatches
        self._alone = self._paired = costs.durations(*size)
        if board.pairs and costs.overlap is not None:
            half = [by_microbatch(lambda time: ratio(time, 2), each) for each in costs.per_stage(costs.overlap, *size)]
            self._paired = dict.fromkeys(self._alone, half)
        self._peak = max(board.timeline.peak_activations)
        self._left = [action for rank in range(board.ranks) for action in board.left(rank)]
        self._most_busy = sum(span.end - span.start for row in board.timeline.rows for span in row)
        self._most_busy += sum(max(self._works(action)) for action in self._left)

    def after(self, action: Action) -> Forecast:
        """Return what follows if `action`, which can be next, is placed."""
        board, rank = self.board, self.board.rank(action)
        times = self._paired if action.parts else self._alone
        start = board.could_start(action)
        end = start + sum(_time(times, single) for single in action.singles)
        done = max(board.timeline.makespan, end)
        bounds = [(done, "The placed actions end at {}.", done), *self._bounds(action, rank, end)]
        makespan, reason, *others = max(bounds, key=lambda bound: bound[0])
        total = board.ranks * makespan
        bubble = float(max(0, 1 - ratio(self._most_busy, total))) if total else 0.0
        idle = f"All ranks work for {pretty(self._most_busy)} of {board.ranks} × {pretty(makespan)} = {pretty(total)}."
        held = board.held_with(action)
        most = f"Rank {rank} would hold {pretty(held)}." if held > self._peak else "As much as a rank has held before."
        reasons = reason.format(*map(pretty, others)), idle, most
        return Forecast(start, end, makespan, bubble, max(self._peak, held), reasons)

    def _bounds(self, action: Action, rank: int, end: Any) -> Iterator[tuple[Any, ...]]:
        """Yield what the actions left after `action` add up to at least, a reason, and the numbers in it."""
        board = self.board
        free = [row[-1].end if row else 0 for row in board.timeline.rows]
        free[rank] = end
        ready = dict.fromkeys(produces(action), (end, rank))
        for result, (source, index) in board.results.items():
            ready[result] = board.timeline.rows[source][index].end, source
        left = self._left_after(action)
        heads: dict[Action, Any] = {}
        for each in left:
            here = board.rank(each)
            arrivals = [
                time + board.costs.delay(source, here) for time, source in (ready[need] for need in self._needs(each))
            ]
            heads[each] = max([free[here], *arrivals])
            ready |= dict.fromkeys(produces(each), (heads[each] + self._step(each), here))
        tails: dict[Result, Any] = {}
        after: dict[Action, Any] = {}
        for each in reversed(left):
            after[each] = max((tails.get(result, 0) for result in produces(each)), default=0)
            way = self._step(each) + after[each]
            for result in self._needs(each):
                delay = board.costs.delay(ready[result][1], board.rank(each))
                tails[result] = max(tails.get(result, 0), delay + way)
        for each in left:
            rest = self._step(each) + after[each]
            reason = f"{each} cannot start before {{}}. It and what its microbatch needs after it take {{}}."
            yield heads[each] + rest, reason, heads[each], rest
        for here in range(board.ranks):
            work, rest = 0, None
            own = [each for each in left if board.rank(each) == here]
            for each in sorted(own, key=heads.__getitem__, reverse=True):
                work += min(self._works(each))
                rest = after[each] if rest is None else min(rest, after[each])
                then = ", and then {} pass on others" if rest else ""
                reason = f"From {{}} on, rank {here} has work for {{}}{then}."
                yield heads[each] + work + rest, reason, heads[each], work, rest

    def _left_after(self, action: Action) -> list[Action]:
        """Return the actions that are left after `action`, each after those that it requires."""
        done = {*action.singles}
        more = []
        if self.board.split is None and action.op == Op.I:  # the other half is left, and no full backward
            done |= {each for each in self._left if each.op == Op.B and each[::2] == action[::2]}
            more = [W(action.stage, action.microbatch)]
        stages = self.board.placement.stages

        def place(each: Action) -> int:
            return {"F": each.stage, "W": 3 * stages}.get(each.op, 2 * stages - each.stage)

        return sorted([each for each in self._left if each not in done] + more, key=place)

    def _needs(self, action: Action) -> Sequence[Result]:
        return requires(action, self.board.placement)

    def _works(self, action: Action) -> tuple[Any, ...]:
        """Return the times that an action that is left can take on its rank: alone, in a pair, or in two halves."""
        times = [_time(self._alone, action), _time(self._paired, action)]
        if self.board.split is None and action.op == Op.B:
            halves = I(action.stage, action.microbatch), W(action.stage, action.microbatch)
            times.append(sum(_time(self._alone, half) for half in halves))
        return tuple(times)

    def _step(self, action: Action) -> Any:
        """Return the time after which the result of an action is ready at the earliest."""
        times = [_time(self._alone, action), _time(self._paired, action)]
        if self.board.split is None and action.op == Op.B:
            times.append(_time(self._alone, I(action.stage, action.microbatch)))
        return min(times)


def _time(times: dict[Op, list[Any]], single: Action) -> Any:
    entry = times[single.op][single.stage]
    return entry[single.microbatch] if isinstance(entry, tuple) else entry
