"""The board of the day: the same for everybody on that date, with a par that is proven to be the least makespan."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import cache, cached_property
from math import gcd

from ppedu.core import SettingError
from ppedu.core.numeric import Number, plural
from ppedu.course.board.levels import LEVELS, Level
from ppedu.search.atlas import Entry, entries
from ppedu.sim import Timeline, simulate

TODAY = "today"
FEWEST, MOST = 24, 48  # actions on a board of the day
WAYS = {
    "line": "down the ranks",
    "loop": "down the ranks twice",
    "v": "down and back up",
    "bidirectional": "from both ends",
}


@dataclass(frozen=True)
class Proven(Level):
    """A level whose par is an entry of the atlas that no schedule beats within its memory."""

    entry: Entry | None = None

    @cached_property
    def par(self) -> Timeline:
        assert self.entry
        return simulate(self.entry.schedule, self.entry.costs)

    @property
    def memory(self) -> Number | None:
        return self.entry.memory if self.entry else None


def actions(entry: Entry) -> int:
    """Return the number of actions on a board of the atlas."""
    return sum(map(len, entry.rows))


@cache
def candidates() -> tuple[Entry, ...]:
    """Return the entries of the atlas that can be a board of the day: proven, and neither tiny nor tedious."""
    proven = [each for each in entries() if each.status == "optimal" and each.placement in WAYS]
    return tuple(each for each in proven if FEWEST <= actions(each) <= MOST)


def board_of(day: date) -> Proven:
    """Return the board of a day. Each candidate has its turn, and neighbors in the atlas are weeks apart."""
    known = candidates()
    stride = next(step for step in range(round(len(known) * 0.618), len(known)) if gcd(step, len(known)) == 1)
    entry = known[day.toordinal() * stride % len(known)]
    size = f"{plural(entry.ranks, 'rank')}, {plural(entry.microbatches, 'microbatch')}"
    return Proven(
        *(day.isoformat(), entry.schedule.name, entry.ranks, entry.microbatches),
        f"{day.isoformat()}: {WAYS[entry.placement]}, {size}",
        f"The board of the day: microbatches run {WAYS[entry.placement]}. F, I and W take one slot each. "
        "Par is proven: within this memory, no order is faster.",
        costs=entry.costs,
        capped=True,
        entry=entry,
    )


def today() -> date:
    """Return the date where the learner is."""
    return date.today()


def find(name: str) -> Level:
    """Return a level by its name: one of `LEVELS`, "today", or a date such as "2026-05-04" for the board of that day.

    Raises:
        SettingError: The level is unknown.
    """
    if isinstance(name, str) and name in LEVELS:
        return LEVELS[name]
    try:
        return board_of(today() if name == TODAY else date.fromisoformat(name))
    except (TypeError, ValueError):
        known = ", ".join((*LEVELS, TODAY))
        raise SettingError(f"unknown level {name!r}; available: {known}, or a date such as 2026-05-04") from None
