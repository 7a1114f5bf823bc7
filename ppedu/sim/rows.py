"""The spans of a rank: of a simulated one, they are created when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from operator import sub
from typing import Any, NamedTuple

from ppedu.core import COMPUTE, COPIES, Action
from ppedu.core.numeric import Ticks


class Span(NamedTuple):
    """An action and its time, from `start` to `end`."""

    action: Action
    start: Any
    end: Any


class Row(Sequence[Span]):
    """The spans of a simulated rank, equal to a tuple of them.

    All are created when one is first accessed: a large schedule has millions, and its makespan and its peak activations
    need none.

    Args:
        starts, ends: The times of the actions in `ticks`.
    """

    def __init__(self, actions: Sequence[Action], starts: Sequence[Any], ends: Sequence[Any], ticks: Ticks):
        self.actions, self._starts, self._ends, self._ticks = actions, starts, ends, ticks

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        return tuple(map(Span, self.actions, self.starts, self.ends))

    @property
    def starts(self) -> list[Any]:
        """The start of each span."""
        return self._ticks.numbers(self._starts)

    @property
    def ends(self) -> list[Any]:
        """The end of each span."""
        return self._ticks.numbers(self._ends)

    @property
    def total(self) -> Any:
        """The sum of the times that the spans take."""
        return self._ticks.numbers([sum(map(sub, self._ends, self._starts))])[0]

    def floats(self) -> Row:
        """Return the row with floats in place of fractions, which are slow. Equal times stay equal."""
        one, exact = self._ticks.per_one, self._ticks.exact
        if exact and one == 1:
            return self
        both = self._starts, self._ends
        starts, ends = ([time / one for time in times] if exact else [*map(float, times)] for times in both)
        return Row(self.actions, starts, ends, Ticks([0.0]))

    @property
    def start(self) -> Any:
        """The start of the first span."""
        return self._ticks.numbers([min(self._starts)])[0]

    @property
    def end(self) -> Any:
        """The end of the last span."""
        return self._ticks.numbers([max(self._ends)])[0]

    def __getitem__(self, index: Any) -> Any:
        return self._spans[index]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)  # that of Sequence takes ten times as long

    def __len__(self) -> int:
        return len(self.actions)

    def __eq__(self, other: object) -> bool:
        return self._spans == (other._spans if isinstance(other, Row) else other)

    def __hash__(self) -> int:
        return hash(self._spans)

    def __repr__(self) -> str:
        return repr(self._spans)


Columns = tuple[Sequence[Action], Sequence[Any], Sequence[Any], Sequence[int], Sequence[int]]


def computing(row: Sequence[Span]) -> Columns:
    """Return the compute actions in a row, their starts and ends, their places in it, and their halves of pairs."""
    if isinstance(row, Row) and {op for _, op, _, _ in row.actions} <= COMPUTE:  # as columns already
        return row.actions, row.starts, row.ends, range(len(row)), [0] * len(row)
    found = [
        (single, start, end, step, half)
        for step, (action, start, end) in enumerate(row)
        for half, single in (enumerate(action.parts, 1) if action.parts else ((0, action),))
        if single.op in COMPUTE
    ]
    return _columns(found)


def copying(row: Sequence[Span]) -> Columns:
    """Return the copies to the host and back in a row, as `computing` returns the compute actions."""
    found = ((action, start, end, step, 0) for step, (action, start, end) in enumerate(row) if action.op in COPIES)
    return _columns([*found])


def _columns(found: Sequence[tuple[Any, ...]]) -> Columns:
    return tuple(zip(*found, strict=True)) if found else ((),) * 5  # type: ignore[return-value]


def floats(row: Sequence[Span]) -> Sequence[Span]:
    """Return a row with floats instead of fractions."""
    if isinstance(row, Row):
        return row.floats()
    if Fraction not in {type(span.end) for span in row}:
        return row
    return tuple(Span(each, float(start), float(end)) for each, start, end in row)
