"""Hanayo: the model zigzags over the ranks, so that a microbatch passes through them in waves."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, B, F, Placement
from ppedu.zoo import Facts, register, require_even
from ppedu.zoo.interleaved import equal_groups


@register(
    "hanayo",
    placement="v",
    facts=Facts(
        "arXiv 2308.15762; formulas by simulation",
        idle="2*(p-1)*max(F, B)/v if m % p == 0",
        sizes=("v % 2 == 0",),
        peak="p if m % p == 0 and m >= 2*p",
        price="It sends v times as many messages as 1F1B.",
        used=(
            "Its authors built a runtime of their own for it (arXiv 2308.15762); we don't know a library that has it."
        ),
    ),
)
def hanayo(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in Hanayo: stages zigzag over the ranks in waves (Liu et al., arXiv 2308.15762).

    A wave is two stages on each rank, one on the way down the ranks and one on the way back up. Time is divided into
    slots, each for a backward and a forward after it. Within a group, a microbatch starts two slots after the previous
    one, and never waits. Let p be the ranks: in a group of p microbatches no two forwards, and no two backwards, need
    the same slot of a rank; the forwards of the next group run between the backwards of this one. If p divides the
    microbatches, the idle time is 2(p-1) times the longer of a forward and a backward, divided by `chunks`, and a rank
    holds the activations of at most p microbatches.

    In a timeline: Chimera, with each microbatch traveling in both of its directions.

    Raises:
        SettingError: `chunks` is odd.
    """
    require_even("hanayo", "chunks", chunks)
    stages = Placement.make("v", ranks, chunks).stages_of(rank)
    slots = []  # actions, each with its slot
    for group in equal_groups(ranks, microbatches):
        for m in group:
            # The slot in which stage 0 runs the forward. A rank runs `chunks` forwards of each microbatch of the groups
            # before, a slot each; within a group, microbatches are two slots apart.
            start = chunks * group.start + 2 * (m - group.start)
            for stage in stages:
                slots.append((start + stage, F(stage, m)))
                slots.append((start + 2 * chunks * ranks - 1 - stage, B(stage, m)))
    # The sort is stable: of two actions in a slot the older microbatch's, a backward, goes first.
    yield from (action for _, action in sorted(slots, key=lambda slot: slot[0]))
