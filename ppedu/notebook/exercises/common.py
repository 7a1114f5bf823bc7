"""What the exercises of several lessons use: `Exercise` itself, and ways to question a learner's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from numbers import Real
from typing import Any

from ppedu.core.errors import SettingError
from ppedu.core.timeline import Timeline, several, show


@dataclass(frozen=True)
class Exercise:
    """`wrong(answer)` gives the reason, or None if the answer is right; `reward(answer)` a timeline to draw."""

    wrong: Callable[[Any], str | None]
    praise: str
    reward: Callable[[Any], Timeline] | None = None


# Fewer, as many and more microbatches than ranks; the lesson's own case first.
CASES = [(4, 8), (1, 1), (2, 1), (4, 2), (3, 3), (5, 4), (8, 20)]


def require_function(answer: Any, *of: str) -> None:
    *first, last = of
    before = f"{', '.join(first)} and " if first else ""
    wanted = f"give a function of {before}{last}"
    if not callable(answer):
        raise SettingError(f"{wanted}, not {answer!r}")
    try:
        signature(answer).bind(*of)
    except TypeError as error:
        raise SettingError(f"{wanted}; yours has {error}") from None


def with_sizes(ranks: int, microbatches: int, *others: str) -> str:
    *first, last = several(ranks, "rank"), several(microbatches, "microbatch"), *others
    return f"with {', '.join(first)} and {last}"


def ask(function: Any, case: str, *sizes: Any) -> Any:
    """The number that a learner's function gives.

    Raises:
        SettingError: it gives something else, or divides by zero.
    """
    try:
        answer = function(*sizes)
    except ZeroDivisionError:
        raise SettingError(f"{case} your function divides by zero; is it right for any of these?") from None
    if isinstance(answer, bool) or not isinstance(answer, Real):
        forgotten = "; is there a return?" if answer is None else ""
        raise SettingError(f"{case} your function gives {answer!r}, where a number is wanted{forgotten}")
    return answer


def unlike(number: Any, other: Any) -> str:
    """The number as people write it, but with all its digits where it would look like the other."""
    return str(number) if show(number) == show(other) else show(number)


def equal(one: Any, other: Any) -> bool:
    return bool(abs(one - other) < 1e-9)


def listed(values: Any) -> str:
    return ", ".join(map(str, values))
