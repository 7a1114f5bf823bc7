"""Exact numbers, and numbers as text."""

from __future__ import annotations

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
