"""The puzzle's levels, from one microbatch on two ranks to DualPipe's middle. Published schedules set their par."""

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
    """A board to be completed in as little time as a published schedule.

    name, title, goal: what to type, what to read above the board, and what is wanted, in a sentence or two.
    published, ranks, microbatches: the schedule that sets par. Whether backwards are split and whether there are pairs
        is as in it.
    costs: what the actions take.
    capped: no rank may hold more activations than the most that a rank holds in par.
    given: how many of par's first actions are on the board from the start, for each rank.
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
        """The published schedule, simulated: `par.makespan` is the time to reach, `par.schedule` reaches it."""
        return simulate(schedule(self.published, self.ranks, self.microbatches), self.costs)

    @property
    def memory(self) -> Number | None:
        """The most activations that a rank may hold; None where there is no limit."""
        return max(self.par.peak_activations) if self.capped else None

    def board(self) -> Board:
        """A fresh board."""
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


# Where a rank holds two stages, a share's forward takes two slots, so that a stage's takes one.
_HALVES = Costs(forward=2, backward=4)

LEVELS = {
    level.name: level
    for level in (
        Level(
            "first",
            "One microbatch, two ranks",
            "The forward goes down the ranks, the backward comes back up. Place all of it.",
            *("naive", 2, 1),
        ),
        Level(
            "two-ranks",
            "Several microbatches",
            "While one rank works on a microbatch, the other can work on the next. Leave as little idle as you can.",
            *("gpipe", 2, 3),
        ),
        Level(
            "gpipe",
            "GPipe: three ranks, as much memory as you like",
            "All the forwards, then all the backwards, is one way. Which idle time can no order avoid?",
            *("gpipe", 3, 4),
        ),
        Level(
            "1f1b",
            "1F1B: the same time in less memory",
            "A rank may not hold the activations of all microbatches. As soon as a backward can run, let it: it makes "
            "room for the next forward.",
            *("1f1b", 3, 6),
            capped=True,
        ),
        Level(
            "interleaved",
            "Interleaving: two stages on each rank",
            "Every microbatch comes by twice. The ranks wait for half as long at the start and at the end.",
            *("interleaved", 2, 4),
            costs=_HALVES,
        ),
        Level(
            "fill",
            "Filling the bubble with W",
            "A backward is in two halves: the rank before waits for I, and nobody for W. Put W where a rank would be "
            "idle, in the memory of 1F1B.",
            *("zb-h1", 3, 4),
            capped=True,
        ),
        Level(
            "v",
            "A V: down the ranks and back up",
            "The first rank has the first stage and the last, so its backward can start without waiting for others.",
            *("zb-v", 2, 3),
            costs=_HALVES,
            capped=True,
        ),
        Level(
            "dualpipe",
            "DualPipe: two streams meet",
            "Microbatches come in from both ends. The beginning is there; a forward and a backward placed as a pair "
            "take less time than one after the other.",
            *("dualpipe", 4, 8),
            costs=Costs(overlap=2),
            capped=True,
            given=(7, 4, 4, 7),
        ),
    )
}


def level(name: str) -> Level:
    """The level called `name`.

    Raises:
        SettingError: there is none.
    """
    if not isinstance(name, str) or name not in LEVELS:
        raise SettingError(f"there is no level called {name!r}; there is: {', '.join(LEVELS)}")
    return LEVELS[name]
