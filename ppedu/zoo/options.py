"""Numbers and options of a schedule, read from the text that a command line or a widget passes.

Text that is neither raises argparse's ArgumentTypeError, whose message argparse prints.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from contextlib import suppress
from fractions import Fraction
from typing import Any

from ppedu.core.numeric import plain


def number(text: str) -> int | Fraction:
    """Return the number that `text` stands for, exactly: an int for "2", a Fraction for "0.5" or "1/3"."""
    try:
        if "e" in text.lower():
            raise ValueError  # Fraction would write out 1e999999999
        exact: int | Fraction = plain(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise ArgumentTypeError(f"{text!r} is not a number such as 2, 0.5 or 1/3") from None
    return exact


def option(text: str) -> tuple[str, Any]:
    """Return the name and the value of an option of a schedule: ("chunks", 3) for "chunks=3"."""
    name, _, value = text.partition("=")
    words = {"True": True, "False": False, "None": None}
    if name.isidentifier() and name not in ("name", "ranks", "microbatches"):
        if value in words:
            return name, words[value]
        with suppress(ArgumentTypeError):
            return name, number(value)
    raise ArgumentTypeError(f"{text!r} is not an option such as chunks=3 or lifo=True")
