"""Stars for the puzzle's levels, and the learner's best results.

The results are kept until Python ends and, in notebooks, also in the learner's progress file, next to the lessons.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from ppedu.core.numeric import pretty
from ppedu.course.progress_file import record, recorded

MOST_STARS = 3
RULES = "One star for a complete board, two for par, three for par without a hint; none if it was finished for you."


class Result(NamedTuple):
    """A complete board: its stars, from 0 to MOST_STARS, and its makespan."""

    stars: int
    makespan: Any


class Keeper:
    """The best results by level.

    Args:
        in_file: Whether they are also kept in progress.txt, where they outlive Python.
    """

    def __init__(self, in_file: bool = False) -> None:
        self.in_file = in_file
        self._best: dict[str, Result] = {}

    def best(self, level: str) -> Result | None:
        """Return the best result on a level: the most stars and, separately, the smallest makespan."""
        if not self.in_file:
            return self._best.get(level)
        try:
            events = recorded()
        except OSError:
            return self._best.get(level)
        # Two kinds of events: "board 1f1b", with the stars, and "board 1f1b in 33", with the makespan.
        name, times = f"board {level}", []
        for event in events:
            with suppress(ValueError):  # another event, or an edited one
                times.append(float(event.removeprefix(f"{name} in ").replace(",", "")))
        best_stars = events.get(name)
        return Result(min(best_stars, MOST_STARS), min(times)) if best_stars and times else None

    def add(self, level: str, result: Result) -> None:
        """Keep a result if it is better than the best so far: its stars, and its makespan."""
        best = self._best.get(level, result)
        self._best[level] = Result(max(best.stars, result.stars), min(best.makespan, result.makespan))
        if self.in_file:
            record(f"board {level}", stars=result.stars)
            record(f"board {level} in {pretty(result.makespan)}")


KEEPER = Keeper()
