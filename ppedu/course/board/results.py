"""Stars for the puzzle's levels, and the learner's best results.

The results are kept until Python ends, unless another Keeper takes them over: that of `ppedu.notebook` writes them to
the learner's progress file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MOST_STARS = 3
RULES = "One star for a complete board, two for par, three for par without a hint; none if it was finished for you."


class Result(NamedTuple):
    """A complete board: its stars, from 0 to MOST_STARS, and its makespan."""

    stars: int
    makespan: Any


class Keeper:
    """The best results by level, kept until Python ends."""

    def __init__(self) -> None:
        self._best: dict[str, Result] = {}

    def best(self, level: str) -> Result | None:
        """Return the best result on a level: the most stars and, separately, the smallest makespan."""
        return self._best.get(level)

    def add(self, level: str, result: Result) -> None:
        """Keep a result if it is better than the best so far: its stars, and its makespan."""
        best = self._best.get(level, result)
        self._best[level] = Result(max(best.stars, result.stars), min(best.makespan, result.makespan))


def stars(number: int) -> str:
    """Return stars as text: "★★☆"."""
    return "★" * number + "☆" * (MOST_STARS - number)


_keepers = [Keeper()]


def keeper() -> Keeper:
    return _keepers[-1]


def keep_with(other: Keeper) -> None:
    """Let another keeper take over."""
    _keepers[:] = [other]
