"""Exact numbers, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import repeat
from numbers import Rational
from typing import Any

Number = int | float | Fraction


def ratio(part: Any, whole: Any) -> Any:
    """Return part / whole, exact if both are."""
    return plain(Fraction(part) / whole) if isinstance(part, Rational) and isinstance(whole, Rational) else part / whole


def plain(number: Any) -> Any:
    """Return a whole Fraction as an int, any other number unchanged."""
    return int(number) if isinstance(number, Fraction) and number.denominator == 1 else number


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "8 microbatches"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def pretty(number: Any, unit: str = "") -> str:
    """Return a number as human-readable text, such as 57, 52.5 or 0.0123; less than a second in milliseconds."""
    if unit == "s" and abs(number) < 1:
        number, unit = number * 1000, "ms"
    text = f"{float(number):.4g}" if abs(number) < 9999.5 else f"{float(number):,.0f}"
    return f"{text} {unit}".strip()


def by_microbatch(function: Callable[..., Any], *times: Any) -> Any:
    """Return `function(*times)`. A tuple holds a time for each microbatch; with one, the result is a tuple, too.

    `by_microbatch(add, 1, 2)` is 3, and `by_microbatch(add, 1, (2, 3))` is (3, 4).
    """
    if tuple not in map(type, times):
        return function(*times)
    columns = [time if isinstance(time, tuple) else repeat(time) for time in times]
    return tuple(map(function, *columns))


def flat(times: Iterable[Any]) -> Iterator[Any]:
    """Yield all numbers of times that are numbers or tuples of numbers, in order."""
    for time in times:
        if isinstance(time, tuple):
            yield from time
        else:
            yield time


class Ticks:
    """A unit in which exact numbers are whole numbers, because Fractions are slow; `per_one` ticks make 1.

    All `numbers`, and 1, are multiples of the unit. For 1/2 and 2/3 there are 6 ticks to 1, so they are 3 and 4 ticks.
    If one of them is a float, numbers stay as they are.
    """

    def __init__(self, numbers: Iterable[Any]):
        numbers = list(numbers)
        self.exact = all(isinstance(number, Rational) for number in numbers)
        self.per_one = math.lcm(*{number.denominator for number in numbers}) if self.exact else 1
        self._numbers: dict[int, Any] = {}

    def count(self, number: Any) -> Any:
        """Return a number in ticks."""
        return int(number * self.per_one) if self.exact else number

    def numbers(self, counts: Iterable[Any]) -> list[Any]:
        """Return the number for each count of ticks."""
        counts = list(counts)
        if self.per_one == 1:
            return counts
        for count in set(counts) - self._numbers.keys():
            self._numbers[count] = plain(Fraction(count, self.per_one))
        return [self._numbers[count] for count in counts]


def exact(number: Any) -> Fraction:
    """Return a number as the Fraction that its decimal text stands for, so that three times 0.1 is 0.3."""
    return Fraction(str(number))
