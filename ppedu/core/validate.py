"""Checks of arguments: counts, ranks, sizes and names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from numbers import Real
from operator import index
from typing import Any

from ppedu.core.errors import SettingError


def shown(value: Any) -> str:
    """Return a value as text for an error. Python refuses to write integers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def require_instance(name: str, value: Any, kind: Any, such_as: str) -> None:
    """Raise SettingError unless `value` is a `kind`: a class, or a tuple of classes."""
    if not isinstance(value, kind):
        raise SettingError(f"{name} must be {such_as}; got {shown(value)}")


def require_number(name: str, value: Any, fits: Callable[[Any], bool], wanted: str) -> None:
    """Raise SettingError unless `value` is a real number, not a bool, that `fits`. `wanted` describes such numbers."""
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
        raise SettingError(f"{name} must be {wanted}; got {shown(value)}")


def require_rank(rank: Any, ranks: int) -> int:
    """Return `rank` as an int. Raise SettingError unless it is one of `ranks`."""
    whole = _whole(rank)
    if whole is None or not 0 <= whole < ranks:
        raise SettingError(f"there is no rank {shown(rank)}; the ranks are 0 to {ranks - 1}")
    return whole


MOST_FORWARDS = 5_000_000  # of a schedule: some gigabytes


def require_size(ranks: Any, chunks: Any, microbatches: Any, slices: Any = 1) -> tuple[int, int, int]:
    """Return the first three as ints. Raise SettingError unless such a schedule is possible and fits in memory."""
    counts = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches, "slices": slices}
    counts = {name: require_count(name, count) for name, count in counts.items()}
    forwards = math.prod(counts.values())
    if forwards > MOST_FORWARDS:
        size = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "slices" or count > 1)
        raise SettingError(f"{size} make {forwards} forwards; at most {MOST_FORWARDS} fit here: take fewer of them")
    return counts["ranks"], counts["chunks"], counts["microbatches"]


def require_one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Raise SettingError unless `value` is one of the known words."""
    if not isinstance(value, str) or value not in known:
        raise SettingError(f"{name} must be one of {', '.join(map(repr, known))}; got {shown(value)}")


def require_count(name: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    """Return `value` as an int. Raise SettingError unless it is a whole number from `least` to `most`."""
    whole = _whole(value)
    if whole is None:
        raise SettingError(f"{name} must be a whole number; got {shown(value)}")
    if whole < least:
        raise SettingError(f"{name} must be at least {least}; got {shown(whole)}")
    if whole > most:
        raise SettingError(f"{name} must be at most {most}; got {shown(whole)}")
    return whole


def _whole(value: Any) -> int | None:
    """Return an integer of Python, NumPy or torch as an int; None for any other value, also for True and 2.0."""
    try:
        return None if isinstance(value, bool) else index(value)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
        return None


# Characters that an SVG or a file cannot hold, or that a terminal obeys. Tabs and line breaks are harmless.
UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def require_name(what: str, name: Any) -> None:
    """Raise SettingError unless `name` is text without control characters and lone surrogates."""
    if not isinstance(name, str) or UNWRITABLE.search(name):
        raise SettingError(f"{what} must be text without control characters; got {name!r}")
