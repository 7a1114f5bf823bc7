"""Hanayo: the model zigzags over the ranks, so that a microbatch passes through them in waves."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core.actions import Action, B, F
from ppedu.core.placement import Placement
from ppedu.zoo import Facts, register
from ppedu.zoo.interleaved import equal_groups
from ppedu.zoo.registry import require_even


@register(
    "hanayo",
    placement="v",
    chunks=2,
    facts=Facts(
        "arXiv 2308.15762; formulas by simulation",
        idle="2*(p-1)*max(F, B)/v if m % p == 0",
        sizes=("v % 2 == 0",),
        peak="p if m % p == 0 and m >= 2*p",
    ),
)
def hanayo(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Go down the ranks and back up, once for each wave of two chunks (Liu et al., Hanayo, arXiv 2308.15762).

    Time is divided into slots, each for a backward and a forward after it. A microbatch starts two slots after the
    previous one and never waits. A group of p microbatches fits together without a conflict; the forwards of the next
    group run between their backwards. If p divides m, the idle time is 2(p-1) times the longer of F and B, divided by
    `chunks`, and a rank holds the activations of at most p microbatches.

    Picture: Chimera, with each microbatch travelling in both of its directions.
    """
    require_even("hanayo", "chunks", chunks)
    stages = Placement.make("v", ranks, chunks).stages_of(rank)
    slots = []
    for group in equal_groups(ranks, microbatches):
        for m in group:
            start = chunks * group.start + 2 * (m - group.start)
            for stage in stages:
                slots.append((start + stage, F(stage, m)))
                slots.append((start + 2 * chunks * ranks - 1 - stage, B(stage, m)))
    # The sort is stable: of two actions in a slot the older microbatch's, a backward, goes first.
    yield from (action for _, action in sorted(slots, key=lambda slot: slot[0]))
