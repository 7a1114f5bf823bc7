"""Many actions with one move: a microbatch's whole way, and a block of actions that is repeated for later microbatches.

A block that has all of a microbatch is a building block (arXiv 2405.15362): its copies run interleaved, each one period
after the one before. The copies of any other block run one after the other, behind what is placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

from ppedu.core import Action, Op, ScheduleError, overlap
from ppedu.course.board.board import Board

MOST_PERIODS = 24  # that are tried


class Repeat(NamedTuple):
    """What `repeat` did: the block, how many copies of it were placed, and the time between two copies."""

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
    """Place copies of a block of placed actions for the next microbatches, as many as fit. It is one step of `undo`.

    Raises:
        ScheduleError: The block is empty, or not even one copy fits; the message has the reason.
    """
    copies = dict(_copies(board, block))
    if not copies:
        raise ScheduleError("no microbatch is left for which these actions could be placed again")
    starts = {span.action: span.start for row in board.timeline.rows for span in row}
    starts |= dict.fromkeys(board.start, -1)  # nothing comes before the actions that are given
    end, reason = board.timeline.makespan, ""
    best: list[int] = []  # the numbers of the copies that fit
    moves: tuple[Action, ...] = ()
    taken = end
    for period in [*_periods(board, block), end]:
        for fitting in range(len(copies), len(best), -1):
            some = list(copies)[:fitting]
            at = [(start, 0, action) for action, start in starts.items()]
            for number in some:
                at += [(starts[old] + number * period, number, new) for old, new in copies[number]]
            tried, reason = _arranged(board, at)
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


def _arranged(board: Board, at: list[tuple[Any, int, Action]]) -> tuple[tuple[Action, ...], str]:
    """Return moves that run each rank's actions by time; () if there are none, and why.

    Of actions at the same time, those of later copies come first, since more depends on them, and W last.
    """
    orders: list[list[Action]] = [[] for _ in range(board.ranks)]
    for _, _, action in sorted(at, key=lambda each: (each[0], each[2].op == Op.W, -each[1])):
        orders[board.rank(action)].append(action)
    copy, reached = board.with_start(()), [0] * board.ranks
    while True:
        before = sum(reached)
        for rank, order in enumerate(orders):
            while reached[rank] < len(order) and copy.why_not(order[reached[rank]]) is None:
                copy.extend([order[reached[rank]]])
                reached[rank] += 1
        if sum(reached) == len(at):
            return copy.moves, ""
        if sum(reached) == before:
            waiting = [order[place] for order, place in zip(orders, reached, strict=True) if place < len(order)]
            return (), min(filter(None, map(copy.why_not, waiting)), key=lambda each: "would hold" not in each)
