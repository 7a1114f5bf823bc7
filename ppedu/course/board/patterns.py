"""Many actions with one move: a microbatch's whole way, and a block of actions that is repeated for later microbatches.

A block that has all of a microbatch is a building block (arXiv 2405.15362): its copies run interleaved, each one period
after the one before. The copies of any other block run one after the other, behind what is placed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

from ppedu.core import Action, Op, Result, ScheduleError, overlap, produces, requires
from ppedu.course.board.board import Board
from ppedu.sim import Span

Copies = dict[int, list[tuple[Action, Action]]]  # by number, each action after the one that it copies
MOST_PERIODS = 24  # that are tried


class Repeat(NamedTuple):
    """The block that `repeat` copied, the number of copies that it placed, and the time between two copies."""

    block: tuple[Action, ...]
    copies: int
    period: Any  # None if the copies run one after the other


def walk(board: Board, action: Action | str) -> tuple[Action, ...]:
    """Place `action` and what can follow it of its microbatch, each as early as possible. It is one step of `undo`.

    Raises:
        ScheduleError: `action` cannot be next; the message is that of `why_not`.
    """
    copy = board.with_start(board.moves)
    copy.place(action)
    microbatch = copy.moves[-1].singles[-1].microbatch

    def urgency(each: Action) -> tuple[Any, ...]:
        return copy.could_start(each), "BIFW".index(each.op), each.stage

    def choices() -> list[Action]:
        found = (each for rank in range(copy.ranks) for each in copy.choices(rank))
        return [each for each in found if not each.parts and each.microbatch == microbatch]

    while free := choices():
        copy.place(min(free, key=urgency))
    placed = copy.moves[len(board.moves) :]
    board.extend(placed)
    return placed


def block_of(board: Board, singles: Iterable[str]) -> tuple[Action, ...]:
    """Return the placed actions with these names; without names, all of the microbatch that was placed last."""
    names = set(singles)
    if not board.moves:
        raise ScheduleError("nothing is placed yet that could be repeated; place an action first")
    if names:
        return tuple(each for each in board.moves if any(str(single) in names for single in each.singles))
    last = board.moves[-1].singles[-1].microbatch
    return tuple(each for each in board.moves if any(single.microbatch == last for single in each.singles))


def repeat(board: Board, block: Sequence[Action]) -> Repeat:
    """Place copies of a block for the next microbatches, as many as fit. `undo` removes all of them at once.

    Raises:
        ScheduleError: The block is empty, or not even one copy fits; the message has the reason.
    """
    copies = dict(_copies(board, block))
    if not copies:
        raise ScheduleError("no microbatch is left for which these actions could be placed again")
    end, reason = board.timeline.makespan, ""
    best: list[int] = []  # the numbers of the copies that fit
    moves: tuple[Action, ...] = ()
    taken = end
    for period in [*_periods(board, block), end]:
        for fitting in range(len(copies), len(best), -1):
            some = list(copies)[:fitting]
            tried, reason = _merged(board, {number: copies[number] for number in some}, period)
            if tried:
                best, moves, taken = some, tried, period
                break
        if len(best) == len(copies):
            break
    if not best:
        raise ScheduleError(f"these actions do not fit again: {reason}")
    board.rearrange(moves)
    return Repeat(tuple(block), len(best), taken if taken < end else None)


def _copies(board: Board, block: Sequence[Action]) -> Iterator[tuple[int, list[tuple[Action, Action]]]]:
    """Yield the number of each copy that could be placed, and its actions, each after the one that it copies."""
    width = _width(block)
    for number in count(1):
        pairs = [(each, _shifted(each, number * width)) for each in block]
        if not block or not all(board.exists(new) and board.rank(new) == board.rank(old) for old, new in pairs):
            return
        if all(board.is_left(single) for _, new in pairs for single in new.singles):
            yield number, pairs


def _width(block: Sequence[Action]) -> int:
    """Return by how many microbatches a copy of the block is later, so that it shares no action with the block."""
    own = {single for each in block for single in each.singles}
    return next(by for by in count(1) if not own & {_shifted(single, by) for single in own})


def _shifted(action: Action, by: int) -> Action:
    """Return the same action of a later microbatch."""
    if action.parts:
        first, second = (_shifted(part, by) for part in action.parts)
        return overlap(first, second)
    return Action(action.stage, action.op, action.microbatch + by)


def _periods(board: Board, block: Sequence[Action]) -> Iterator[Any]:
    """Yield the times between copies that are worth a try: none if the block does not have all of a microbatch.

    The first one is the time that the busiest rank needs for the block.
    """
    own = {single for each in block for single in each.singles}
    whole = {single.microbatch for single in own}
    for rank in range(board.ranks):
        for action in board.actions(rank):
            if action.microbatch in whole and action not in own and (board.split is not None or action.op == Op.F):
                whole.discard(action.microbatch)
    if not whole:
        return
    inside = set(block)
    spans = [[span for span in row if span.action in inside] for row in board.timeline.rows]
    lengths = [span.end - span.start for row in spans for span in row]
    least = max(sum(span.end - span.start for span in row) for row in spans)
    step = min((each for each in lengths if each), default=0)
    if step:
        tries = (least + step * number for number in range(MOST_PERIODS))
        yield from takewhile(lambda period: period < board.timeline.makespan, tries)


def _merged(board: Board, copies: Copies, period: Any) -> tuple[tuple[Action, ...], str]:
    """Return moves that run what is placed, and copies of a block; or () and the reason why that is impossible.

    What is placed keeps its order, and so does each copy. No action starts before its time, which for a copy is that of
    the block and a period for each copy. Of actions that could start at the same time, those of later copies come
    first, since more depends on them, and W last.
    """
    rows, given = board.timeline.rows, set(board.start)
    spans = {span.action: span for row in rows for span in row}
    free = [max((span.end for span in row if span.action in given), default=0) for row in rows]
    ready: dict[Result, tuple[Any, int]] = {}  # when and on which rank
    for action in board.start:
        ready |= dict.fromkeys(produces(action), (spans[action].end, board.rank(action)))
    queues: list[tuple[int, deque[tuple[Span, Action]]]] = []
    for row in rows:
        queues.append((0, deque((span, span.action) for span in row if span.action not in given)))
    for number, pairs in copies.items():
        for rank in range(board.ranks):
            own = [(spans[old], new) for old, new in pairs if board.rank(new) == rank]
            queues.append((number, deque(sorted(own, key=lambda each: each[0].start))))
    copy = board.with_start(board.start)
    while queues := [(number, queue) for number, queue in queues if queue]:
        heads: list[tuple[Any, bool, int, int]] = []
        for index, (number, queue) in enumerate(queues):
            span, action = queue[0]
            rank, needs = board.rank(action), requires(action, board.placement)
            if all(need in ready for need in needs):
                arrivals = [time + board.costs.delay(source, rank) for time, source in map(ready.__getitem__, needs)]
                begin = max([free[rank], span.start + number * period, *arrivals])
                heads.append((begin, action.op == Op.W, -number, index))
        possible = [head for head in heads if copy.why_not(queues[head[-1]][1][0][1]) is None]
        if not possible:
            reasons = [copy.why_not(queue[0][1]) or "" for _, queue in queues]
            return (), min(reasons, key=lambda each: "would hold" not in each)
        begin, *_, index = min(possible)
        span, action = queues[index][1].popleft()
        copy.extend([action])
        rank = board.rank(action)
        free[rank] = begin + span.end - span.start
        ready |= dict.fromkeys(produces(action), (free[rank], rank))
    return copy.moves, ""
