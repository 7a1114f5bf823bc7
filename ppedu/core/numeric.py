"""Exact numbers, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from numbers import Rational
from typing import Any

Number = int | float | Fraction


def ratio(part: Any, whole: Any) -> Any:
    """part / whole, exact where both are."""
    return plain(Fraction(part) / whole) if isinstance(part, Rational) and isinstance(whole, Rational) else part / whole


def plain(number: Any) -> Any:
    """A whole Fraction as an int; any other number as it is."""
    return int(number) if isinstance(number, Fraction) and number.denominator == 1 else number


def plural(number: int, noun: str) -> str:
    """1 rank, 4 ranks, 8 microbatches."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def pretty(number: Any, unit: str = "") -> str:
    """A number for people: 57, 52.5, 0.0123; less than a second in milliseconds."""
    if unit == "s" and abs(number) < 1:
        number, unit = number * 1000, "ms"
    text = f"{float(number):.4g}" if abs(number) < 10000 else f"{float(number):,.0f}"
    return f"{text} {unit}".strip()


class Ticks:
    """The largest unit of which all of some exact numbers are whole multiples: `per_one` ticks make 1.

    Whole numbers are exact and fast, fractions exact and slow. If a float is among the numbers, all are left as they
    are, and a tick is 1.
    """

    def __init__(self, numbers: Iterable[Any]):
        numbers = list(numbers)
        self.exact = all(isinstance(number, Rational) for number in numbers)
        self.per_one = math.lcm(*(Fraction(number).denominator for number in numbers)) if self.exact else 1
        self._numbers: dict[int, Any] = {}

    def count(self, number: Any) -> Any:
        """Return how many ticks a number is."""
        return int(number * self.per_one) if self.exact else number

    def numbers(self, counts: Iterable[Any]) -> list[Any]:
        """Return the number for each count of ticks."""
        counts = list(counts)
        if self.per_one == 1:
            return counts
        for count in set(counts) - self._numbers.keys():
            self._numbers[count] = plain(Fraction(count, self.per_one))
        return [self._numbers[count] for count in counts]
