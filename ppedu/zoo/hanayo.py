"""Hanayo: the model zigzags over the ranks, so that a microbatch runs through them in waves."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core.actions import Action, B, F
from ppedu.core.errors import SettingError
from ppedu.core.placement import Placement
from ppedu.zoo.interleaved import rounds
from ppedu.zoo.registry import register


@register("hanayo", placement="v", chunks=2)
def hanayo(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Down the ranks and back up, once for each wave of two chunks (Liu et al., Hanayo, arXiv 2308.15762).

    A microbatch starts two slots after the one before and rests nowhere; a slot has time for a backward and for a
    forward after it. p of them fit together without a conflict; the next group's forwards run between their
    backwards. Where p divides m, the idle time is 2(p-1) times the longer of F and B, divided by `chunks`, and no
    rank holds more than p activations. Picture: Chimera, each microbatch taking both of its directions.
    """
    if chunks % 2:
        nearest = " or ".join(str(number) for number in (chunks - 1, chunks + 1) if number)
        raise SettingError(f"hanayo needs an even number of chunks, two for each wave; got {chunks} — try {nearest}")
    stages = Placement.make("v", ranks, chunks).stages_of(rank)
    slots = []
    for group in rounds(ranks, microbatches):
        for m in group:
            start = chunks * group.start + 2 * (m - group.start)
            for stage in stages:
                slots.append((start + stage, F(stage, m)))
                slots.append((start + 2 * chunks * ranks - 1 - stage, B(stage, m)))
    # Where two share a slot, the older microbatch goes first: it is on its way back.
    yield from (action for _, action in sorted(slots, key=lambda slot: slot[0]))
