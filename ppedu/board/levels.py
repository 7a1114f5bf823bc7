"""The puzzle's levels, from one microbatch on two ranks to the middle of DualPipe. Published schedules set the par."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ppedu.board.board import Board
from ppedu.core.actions import Op
from ppedu.core.costs import Costs
from ppedu.core.errors import SettingError
from ppedu.core.numeric import Number
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Timeline
from ppedu.zoo import schedule


@dataclass(frozen=True)
class Level:
    """A board to complete in the time of a published schedule, its par.

    name, title, goal: the argument of `level`, the heading above the board, and the task in a sentence or two.
    published, ranks, microbatches: the schedule that sets the par; backwards are split, and pairs allowed, as in it.
    costs: the times of the actions.
    capped: whether the memory is limited to the largest peak of activations in par.
    given: for each rank, the number of actions of par that are on the board from the start.
    """

    name: str
    title: str
    goal: str
    published: str
    ranks: int
    microbatches: int
    costs: Costs | None = None
    capped: bool = False
    given: tuple[int, ...] = ()

    @cached_property
    def par(self) -> Timeline:
        """The timeline of the published schedule: `par.makespan` is the time to reach."""
        return simulate(schedule(self.published, self.ranks, self.microbatches), self.costs)

    @property
    def memory(self) -> Number | None:
        """The most activations that a rank may hold, or None for no limit."""
        return max(self.par.peak_activations) if self.capped else None

    def board(self) -> Board:
        """Return a new board of this level."""
        par = self.par.schedule
        actions = [action for order in par.orders for action in order]
        ops = {single.op for action in actions for single in action.singles}
        steps = par.replay.steps if self.given else []
        return Board(
            par.placement,
            par.microbatches,
            self.costs,
            self.memory,
            split=None if {Op.B, Op.W} <= ops else Op.W in ops,
            pairs=any(action.parts for action in actions),
            start=[par.orders[rank][index] for rank, index, *_ in steps if index < self.given[rank]],
            par=par,
            name=self.name,
        )


# For two stages on a rank: the forward of a rank's share takes two slots, so that of a stage takes one.
_HALVES = Costs(forward=2, backward=4)

LEVELS = {
    level.name: level
    for level in (
        Level(
            "first",
            "One microbatch, two ranks",
            "The forward goes down the ranks, and the backward comes back up. Place all four actions.",
            *("naive", 2, 1),
        ),
        Level(
            "two-ranks",
            "Several microbatches",
            "While one rank works on a microbatch, the other can work on the next. Keep both as busy as you can.",
            *("gpipe", 2, 3),
        ),
        Level(
            "gpipe",
            "GPipe: three ranks, as much memory as you like",
            "All forwards, then all backwards, is one way. Which idle time can no order avoid?",
            *("gpipe", 3, 4),
        ),
        Level(
            "1f1b",
            "1F1B: the same time in less memory",
            "A rank may not hold the activations of all microbatches. Run each backward as soon as it can run: it "
            "frees the memory for the next forward.",
            *("1f1b", 3, 6),
            capped=True,
        ),
        Level(
            "interleaved",
            "Interleaving: two stages on each rank",
            "Every microbatch visits each rank twice. The ranks wait half as long at the start and at the end.",
            *("interleaved", 2, 4),
            costs=_HALVES,
        ),
        Level(
            "fill",
            "Filling the bubble with W",
            "Backwards are split: the previous rank waits for I, and no rank waits for W. Put W where a rank would be "
            "idle, within the memory of 1F1B.",
            *("zb-h1", 3, 4),
            capped=True,
        ),
        Level(
            "v",
            "A V: down the ranks and back up",
            "The first rank holds the first stage and the last, so its backward can start without waiting for others.",
            *("zb-v", 2, 3),
            costs=_HALVES,
            capped=True,
        ),
        Level(
            "dualpipe",
            "DualPipe: two streams meet",
            "Microbatches enter from both ends. The first actions are given. A forward and a backward placed as a pair "
            "take less time than one after the other.",
            *("dualpipe", 4, 8),
            costs=Costs(overlap=2),
            capped=True,
            given=(7, 4, 4, 7),
        ),
    )
}


def level(name: str) -> Level:
    """Return the level called `name`.

    Raises:
        SettingError: there is no such level.
    """
    if not isinstance(name, str) or name not in LEVELS:
        raise SettingError(f"unknown level {name!r}; available: {', '.join(LEVELS)}")
    return LEVELS[name]
