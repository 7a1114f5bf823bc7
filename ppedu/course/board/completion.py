"""How a board can be completed: whether the memory suffices, and a good way to do it. Internal; call `Board.finish`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from operator import add, le, sub
from typing import TYPE_CHECKING, Any

from ppedu.core import Action, F, ScheduleError
from ppedu.core.numeric import plural, pretty

if TYPE_CHECKING:
    from ppedu.course.board.board import Board


def can_end(board: Board, moves: Sequence[Action]) -> bool:
    """Return whether the memory suffices to complete the board after `moves`, which replace those on the board.

    A microbatch releases no memory before its last forward, and needs no more memory after it. So one of the
    microbatches in flight is the first to run all its forwards while the others only allocate memory; it may as well
    run first and alone. After it has finished, more memory is free than before, so it does not matter which one was
    chosen. If the microbatches that fit run one by one, and some are left that do not fit, there is no way to complete
    the board.

    For example, let 4 stages be on 2 ranks, 0 and 2 on rank 0, and let a rank hold 2 stages' activations. After 0F0 and
    0F1, both microbatches still need stage 2 on rank 0, which is full: the board cannot be completed.
    """
    placement, stages = board.placement, range(board.placement.stages)
    placed = {single for action in moves for single in action.singles}
    free = [board.limit] * board.ranks
    in_flight = []
    for microbatch in range(board.microbatches):
        # The microbatch's activations on each rank, and the further ones that its other forwards will need.
        held, needed = [Fraction(0)] * board.ranks, [Fraction(0)] * board.ranks
        for stage in stages:
            rank = placement.rank(stage, microbatch)
            if F(stage, microbatch) in placed:
                held[rank] += board.weights[stage]
            else:
                needed[rank] += board.weights[stage]
        if any(needed):
            free = list(map(sub, free, held))
            in_flight.append((held, needed))
    while in_flight:
        fits = [all(map(le, needed, free)) for _, needed in in_flight]
        if not any(fits):
            return False
        held, _ = in_flight.pop(fits.index(True))
        free = list(map(add, free, held))
    return True


def activations(number: Any) -> str:
    """Return a number of activations as text: "1 activation" or "2.5 activations"."""
    return f"{pretty(number)} activation{'' if number == 1 else 's'}"


def undo_advice(board: Board) -> str:
    """Return the advice to undo the fewest actions after which the board can be completed."""
    moves = board.moves
    back = next(number for number in range(1, len(moves) + 1) if can_end(board, moves[:-number]))
    return f"undo {plural(back, 'action')} and place other forwards first"


def remaining(board: Board) -> tuple[Action, ...]:
    """Return actions that complete the board: the rest of par if the board follows it, else by the times of par.

    Raises:
        ScheduleError: The board cannot be completed from here within the memory.
    """
    if not can_end(board, board.moves):
        limit = activations(board.memory)
        raise ScheduleError(f"no order can be completed from here within {limit}; {undo_advice(board)}")
    starts_in_par: dict[Action, Any] = {}
    if board.par:
        par, orders = board.par.schedule, board.schedule.orders
        follows_par = all(wanted[: len(order)] == order for wanted, order in zip(par.orders, orders, strict=True))
        if follows_par:
            return tuple(par.orders[rank][index] for rank, index in par.replay.steps if index >= len(orders[rank]))
        for row in board.par.rows:
            for action, start, _ in row:
                starts_in_par |= dict.fromkeys((action, *action.singles), start)
    copy = board.with_start(board.moves)

    def urgency(action: Action) -> tuple[Any, ...]:
        """Return a key to sort by: the times of par, pairs first, and then whatever can start soonest."""
        single = action.singles[0]
        return (
            starts_in_par.get(action, math.inf),
            not action.parts,
            copy.could_start(action),
            "BIFW".index(single.op),
            single.microbatch,
            single.stage,
        )

    while choices := [action for rank in range(copy.ranks) for action in copy.choices(rank)]:
        safe = (action for action in sorted(choices, key=urgency) if can_end(copy, (*copy.moves, action)))
        copy.extend([next(safe)])
    return copy.moves[len(board.moves) :]
