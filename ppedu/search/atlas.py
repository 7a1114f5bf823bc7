"""The atlas: the best schedules for small sizes, found and proven beforehand, so that no solver is needed.

Forwards and both halves of backwards take one unit, messages none. For each size there is an entry for each memory,
counted in activations of a stage, up to the one from which on more memory does not help.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from ppedu.core import Op, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, exact
from ppedu.core.validate import require_count, require_number, require_one_of
from ppedu.search.instance import action_of, held
from ppedu.sim import Costs

MOST_RANKS, MOST_MICROBATCHES = 4, 12


class Kind(NamedTuple):
    """The placement of all entries of one name, and whether they may recompute."""

    placement: str
    chunks: int = 1  # stages of each copy on a rank
    slices: int = 1
    recompute: bool = False
    most: int = MOST_MICROBATCHES

    @property
    def parts(self) -> int:
        """How many actions of one op each microbatch has on a rank."""
        return self.chunks * self.slices


PLACEMENTS = {
    "line": Kind("loop"),
    "loop": Kind("loop", chunks=2),
    "v": Kind("v", chunks=2),
    "bidirectional": Kind("bidirectional"),
    "slices": Kind("loop", slices=2, most=8),
    "recomputed": Kind("loop", recompute=True, most=8),
}
FILE = "atlas.txt"


@dataclass(frozen=True)
class Entry:
    """A schedule of the atlas.

    Attributes:
        placement: "line" (a loop with one stage on each rank), "loop" or "v" (two stages), "bidirectional", "slices"
            (a line, with sequences cut in two) or "recomputed" (a line whose ranks may run forwards again).
        memory: The activations of stages, or of slices, that a rank may hold.
        makespan: Of the schedule.
        bound: A shorter makespan is impossible.
        proofs: What shows that; see `Found`.
        rows: The letters of each rank.
    """

    placement: str
    ranks: int
    microbatches: int
    memory: int
    makespan: int
    bound: int
    proofs: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.placement, self.ranks, self.microbatches, self.memory

    @property
    def status(self) -> str:
        return "optimal" if self.makespan == self.bound else "feasible"

    @property
    def costs(self) -> Costs:
        """One unit for each forward and each half of a backward of a stage, or of a slice. Inputs take no memory."""
        parts = PLACEMENTS[self.placement].parts
        return Costs(forward=parts, input=parts, weight=parts, activation=parts)

    @property
    def schedule(self) -> Schedule:
        """The schedule that the rows stand for.

        F I W are the actions of a rank's first stage or slice, and f i w those of its second one. The n-th of a letter
        is for microbatch n: "FFIWIW" is 0F0 0F1 0I0 0W0 0I1 0W1 on rank 0 of a line. R is a forward that runs again.
        The second copy of a bidirectional placement begins with microbatch `Placement.split`.
        """
        place = placement_of(self.placement, self.ranks, self.microbatches)
        orders = []
        for rank, letters in enumerate(self.rows):
            parts = held(place, rank)
            counted: Counter[str] = Counter()
            order = []
            for letter in letters:
                copy, part = parts[1] if letter.islower() else parts[0]
                first = place.split if copy == 1 else 0
                order.append(action_of(place, part, Op(letter.upper()), first + counted[letter]))
                counted[letter] += 1
            orders.append(tuple(order))
        return Schedule(f"atlas {self.placement}", place, self.microbatches * place.slices, tuple(orders))

    def __str__(self) -> str:
        numbers = self.ranks, self.microbatches, self.memory, self.makespan, self.bound
        return f"{self.placement} {' '.join(map(str, numbers))} {','.join(self.proofs)} {' '.join(self.rows)}"


def placement_of(name: str, ranks: int, microbatches: int) -> Placement:
    """Return a placement of the atlas."""
    placement, chunks, slices, *_ = PLACEMENTS[name]
    return Placement.make(placement, ranks, chunks, microbatches, slices)


def parse(text: str) -> Iterator[Entry]:
    """Yield the entries in a file's text."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, ranks, microbatches, memory, makespan, bound, proofs, *rows = line.split()
            size = int(ranks), int(microbatches), int(memory)
            yield Entry(name, *size, int(makespan), int(bound), tuple(proofs.split(",")), tuple(rows))


@cache
def entries() -> tuple[Entry, ...]:
    """Return all entries of the atlas."""
    return tuple(parse(files("ppedu.search").joinpath(FILE).read_text(encoding="utf-8")))


def atlas(ranks: int, microbatches: int, memory: Number | None = None, placement: str = "line") -> Entry:
    """Return the best known schedule of a small size, for F = I = W = 1 in every stage and free messages.

    Args:
        ranks, microbatches: Up to 4 and 12, with slices and recomputation 4 and 8; at least 2 of each.
        memory: The activations of stages, or of slices, that a rank may hold; None for any number.
        placement: "line" (one stage on each rank), "loop" or "v" (two), "bidirectional" (one of each copy), "slices" (a
            line, with sequences cut in two) or "recomputed" (a line whose ranks may run all their forwards again).

    Raises:
        SettingError: The atlas has no such entry.
    """
    require_one_of("placement", placement, PLACEMENTS)
    size = placement, require_count("ranks", ranks), require_count("microbatches", microbatches)
    of_size = {entry.memory: entry for entry in entries() if entry.key[:3] == size}
    if not of_size:
        raise SettingError(
            f"the atlas has up to {MOST_RANKS} ranks and {PLACEMENTS[placement].most} microbatches, at least 2 of "
            f"each; got {ranks} and {microbatches}; pp.search.optimal searches for a schedule of any size"
        )
    most = max(of_size)
    if memory is None:
        return of_size[most]
    require_number("memory", memory, lambda each: 0 < each < math.inf, "a number above 0")
    count = int(exact(memory))
    if count < min(of_size):
        raise SettingError(f"a rank holds at least {min(of_size)} activations for a microbatch; got {memory}")
    return of_size[min(count, most)]
