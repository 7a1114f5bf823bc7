"""RoundPipe: stages go round the ranks, whose weights come from the host."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, B, F, Placement, R
from ppedu.zoo import Facts, register


@register("roundpipe", placement="round", facts=Facts("arXiv 2604.27085"))
def roundpipe(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in RoundPipe (Luo et al., arXiv 2604.27085)."""
    place = Placement.make("round", ranks, chunks)
    last = place.stages - 1
    forwards = [stage for stage in range(last) if place.rank(stage) == rank]
    while forwards:
        turn = [stage for stage in forwards if (last - stage - 1) // 3 == (last - forwards[0] - 1) // 3]
        yield from (F(stage, m) for m in range(microbatches) for stage in turn)
        forwards = forwards[len(turn) :]
    for stage in reversed(range(place.stages)):
        if place.rank(stage, op="B") == rank:
            for m in range(microbatches):
                yield (F if stage == last else R)(stage, m)
                yield B(stage, m)
