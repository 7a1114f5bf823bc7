"""Which published schedule has the orders of a board?"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import NamedTuple

from ppedu.core import Op, PipelineError, Schedule
from ppedu.zoo import schedule
from ppedu.zoo.registry import published

Orders = tuple[tuple[tuple[tuple[int, Op, tuple[int, int]], ...], ...], ...]


class Built(NamedTuple):
    """A published schedule with the orders of a board: its name, and whether its microbatches have other numbers."""

    name: str
    renamed: bool

    def __str__(self) -> str:
        return f"{self.name}, with other numbers for the microbatches" if self.renamed else self.name


def recognize(made: Schedule, likely: str = "") -> Built | None:
    """Return the published schedule with the orders of `made`, or None.

    Microbatches are alike, so orders also count as the same if they are so after a renaming of the microbatches. If
    several schedules have the same orders, `likely` is returned if it is one of them, otherwise the simplest.
    """
    found: list[Built] = []
    for name in published():
        known = _published(name, made.ranks, made.microbatches)
        if known and known.placement == made.placement and _renamed(known) == _renamed(made):
            found.append(Built(name, known.orders != made.orders))
    named = [built for built in found if built.name == likely]
    return min(named or found, key=lambda built: built.renamed, default=None)


@cache
def _published(name: str, ranks: int, microbatches: int) -> Schedule | None:
    with suppress(PipelineError):  # it does not exist for these sizes
        return schedule(name, ranks, microbatches)
    return None


def _renamed(made: Schedule) -> Orders:
    """Return the orders with microbatches numbered as they enter their copy of the model; a pair has two actions."""
    place = made.placement
    entered: tuple[list[int], list[int]] = [], []
    for order in made.orders:
        for action in order:
            for stage, op, microbatch, _ in action.singles:
                if op == Op.F and stage == 0:
                    entered[place.copy(microbatch)].append(microbatch)
    number = {microbatch: (copy, at) for copy, each in enumerate(entered) for at, microbatch in enumerate(each)}
    return tuple(
        tuple(tuple((stage, op, number[microbatch]) for stage, op, microbatch, _ in each.singles) for each in order)
        for order in made.orders
    )
