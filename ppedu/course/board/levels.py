"""The puzzle's levels, from one microbatch on two ranks to the middle of DualPipe. Published schedules set the par."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ppedu.core import Op, SettingError
from ppedu.core.numeric import Number
from ppedu.course.board.board import Board
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule


@dataclass(frozen=True)
class Level:
    """One task of the puzzle: a board to complete in the time of a published schedule, its par.

    Args:
        name: The argument of `level`.
        published, ranks, microbatches: The schedule that sets the par; backwards are split, and pairs allowed, as in
            it.
        title, goal: The heading above the board, and the task in a sentence or two.
        costs: The times of the actions; None for the default costs.
        capped: Whether the memory is limited to the largest peak of activations in par.
        given: For each rank, the number of actions of par that are on the board from the start; () for none.
    """

    name: str
    published: str
    ranks: int
    microbatches: int
    title: str
    goal: str
    costs: Costs | None = None
    capped: bool = False
    given: tuple[int, ...] = ()

    @cached_property
    def par(self) -> Timeline:
        """The timeline of the published schedule of this level: `par.makespan` is the time to reach."""
        return simulate(schedule(self.published, self.ranks, self.microbatches), self.costs)

    @property
    def memory(self) -> Number | None:
        """The most activations that a rank may hold on this level's board, or None for no limit."""
        return max(self.par.peak_activations) if self.capped else None

    def board(self) -> Board:
        """Return a new board for this level, with the actions in `given` on it."""
        par = self.par.schedule
        actions = [action for order in par.orders for action in order]
        ops = {single.op for action in actions for single in action.singles}
        steps = par.replay.steps if self.given else []
        either = {Op.B, Op.W} <= ops  # some backwards are full, and some are split
        return Board(
            par.placement,
            par.microbatches,
            self.costs,
            self.memory,
            split=None if either else Op.W in ops,
            pairs=any(action.parts for action in actions),
            start=[par.orders[rank][index] for rank, index, *_ in steps if index < self.given[rank]],
            par=par,
            name=self.name,
        )


# For two stages on a rank: the forward of a rank's share takes two slots, so that of a stage takes one.
_HALVES = Costs(forward=2, backward=4)

# In the first line of each: its name, the published schedule, ranks and microbatches.
_IN_ORDER = (
    Level(
        *("first", "naive", 2, 1),
        "One microbatch, two ranks",
        "The forward goes down the ranks, and the backward comes back up. Place all four actions.",
    ),
    Level(
        *("two-ranks", "gpipe", 2, 3),
        "Several microbatches",
        "While one rank works on a microbatch, the other can work on the next. Keep both as busy as you can.",
    ),
    Level(
        *("gpipe", "gpipe", 3, 4),
        "GPipe: three ranks, as much memory as you like",
        "All forwards, then all backwards, is one way to do it. Some idle time is left in any order. Avoid the rest.",
    ),
    Level(
        *("1f1b", "1f1b", 3, 6),
        "1F1B: at most three activations on a rank",
        "Run each backward as soon as it can run: it frees the memory for the next forward.",
        capped=True,
    ),
    Level(
        *("repeat", "1f1b", 4, 8),
        "A pattern: four ranks, eight microbatches",
        "64 actions, but every microbatch can go the same way. Place one microbatch, and repeat it.",
        capped=True,
    ),
    Level(
        *("interleaved", "interleaved", 2, 4),
        "Interleaving: two stages on each rank",
        "Every microbatch visits each rank twice. The ranks wait half as long at the start and at the end.",
        costs=_HALVES,
    ),
    Level(
        *("fill", "zb-h1", 3, 4),
        "Filling the bubble with W",
        "Backwards are split: the previous rank waits for I, and no rank waits for W. Put W where a rank would be "
        "idle, within the memory of 1F1B.",
        capped=True,
    ),
    Level(
        *("v", "zb-v", 2, 3),
        "A V: down the ranks and back up",
        "The first rank holds the first stage and the last, so its backward can start without waiting for others.",
        costs=_HALVES,
        capped=True,
    ),
    Level(
        *("dualpipe", "dualpipe", 4, 8),
        "DualPipe: two streams meet",
        "Microbatches enter from both ends. The first actions are given. A forward and a backward placed as a pair "
        "take less time than one after the other.",
        costs=Costs(overlap=2),
        capped=True,
        given=(7, 4, 4, 7),
    ),
)
LEVELS = {level.name: level for level in _IN_ORDER}


def level(name: str) -> Level:
    """Return the level called `name`.

    Raises:
        SettingError: there is no such level.
    """
    if not isinstance(name, str) or name not in LEVELS:
        raise SettingError(f"unknown level {name!r}; available: {', '.join(LEVELS)}")
    return LEVELS[name]
