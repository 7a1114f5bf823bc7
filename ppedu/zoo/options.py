"""Numbers and options of a schedule, read from the text that a command line or a widget passes."""

from __future__ import annotations

from argparse import ArgumentTypeError
from contextlib import suppress
from fractions import Fraction
from typing import Any

from ppedu.core.numeric import plain


def number(text: str) -> int | Fraction:
    """A whole number, a decimal or a fraction, exactly.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        if "e" in text.lower():
            raise ValueError  # 1e999999999 would be written out
        exact: int | Fraction = plain(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise ArgumentTypeError(f"{text!r} is no number such as 2, 0.5 or 1/3") from None
    return exact


def option(text: str) -> tuple[str, Any]:
    """The name and the value of "chunks=3" or "lifo=True".

    Raises:
        ArgumentTypeError: it is no such text.
    """
    name, _, value = text.partition("=")
    words = {"True": True, "False": False, "None": None}
    if name.isidentifier() and name not in ("name", "ranks", "microbatches"):
        if value in words:
            return name, words[value]
        with suppress(ArgumentTypeError):
            return name, number(value)
    raise ArgumentTypeError(f"{text!r} is no option such as chunks=3 or lifo=True")
