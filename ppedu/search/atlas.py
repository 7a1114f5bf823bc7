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

from ppedu.core import Action, Op, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, exact
from ppedu.core.validate import require_count, require_number, require_one_of
from ppedu.search.instance import held
from ppedu.sim import Costs

# By name: the placement and the stages of each copy on a rank.
PLACEMENTS = {"line": ("loop", 1), "loop": ("loop", 2), "v": ("v", 2), "bidirectional": ("bidirectional", 1)}
MOST_RANKS, MOST_MICROBATCHES = 4, 12
FILE = "atlas.txt"


@dataclass(frozen=True)
class Entry:
    """A schedule of the atlas.

    Attributes:
        placement: "line" (a loop with one stage on each rank), "loop" or "v" (two stages), or "bidirectional".
        memory: The activations of stages that a rank may hold.
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
        """One unit for each forward and each half of a backward of a stage."""
        chunks = PLACEMENTS[self.placement][1]
        return Costs(forward=chunks, input=chunks, weight=chunks, activation=chunks)

    @property
    def schedule(self) -> Schedule:
        """The schedule that the rows stand for.

        F I W are the actions of a rank's first stage, and f i w those of its second one. The n-th of a letter is for
        microbatch n: "FFIWIW" is 0F0 0F1 0I0 0W0 0I1 0W1 on rank 0 of a line. The second copy of a bidirectional
        placement begins with microbatch `Placement.split`.
        """
        place = placement_of(self.placement, self.ranks, self.microbatches)
        orders = []
        for rank, letters in enumerate(self.rows):
            stages = held(place, rank)
            counted: Counter[str] = Counter()
            order = []
            for letter in letters:
                copy, stage = stages[1] if letter.islower() else stages[0]
                first = place.split if copy == 1 else 0
                microbatch = first + counted[letter]
                order.append(Action(stage, Op(letter.upper()), microbatch))
                counted[letter] += 1
            orders.append(tuple(order))
        return Schedule(f"atlas {self.placement}", place, self.microbatches, tuple(orders))

    def __str__(self) -> str:
        numbers = self.ranks, self.microbatches, self.memory, self.makespan, self.bound
        return f"{self.placement} {' '.join(map(str, numbers))} {','.join(self.proofs)} {' '.join(self.rows)}"


def placement_of(name: str, ranks: int, microbatches: int) -> Placement:
    """Return a placement of the atlas."""
    kind, chunks = PLACEMENTS[name]
    return Placement.make(kind, ranks, chunks, microbatches)


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
        ranks, microbatches: Up to 4 and 12; at least 2 of each.
        memory: The activations of stages that a rank may hold; None for any number.
        placement: "line" (one stage on each rank), "loop" or "v" (two), or "bidirectional" (one of each copy).

    Raises:
        SettingError: The atlas has no such entry.
    """
    require_one_of("placement", placement, PLACEMENTS)
    size = placement, require_count("ranks", ranks), require_count("microbatches", microbatches)
    of_size = {entry.memory: entry for entry in entries() if entry.key[:3] == size}
    if not of_size:
        raise SettingError(
            f"the atlas has up to {MOST_RANKS} ranks and {MOST_MICROBATCHES} microbatches, at least 2 of each; got "
            f"{ranks} and {microbatches}; pp.search.optimal searches for a schedule of any size"
        )
    most = max(of_size)
    if memory is None:
        return of_size[most]
    require_number("memory", memory, lambda each: 0 < each < math.inf, "a number above 0")
    count = int(exact(memory))
    if count < min(of_size):
        raise SettingError(f"a rank holds at least {min(of_size)} activations for a microbatch; got {memory}")
    return of_size[min(count, most)]
