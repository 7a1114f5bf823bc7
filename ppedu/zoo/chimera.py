"""GEMS and Chimera: two whole pipelines in opposite directions, taking turns, or merged without a conflict."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core.actions import Action, B, F
from ppedu.core.errors import SettingError
from ppedu.zoo.registry import register


@register("gems", placement="bidirectional")
def gems(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """One microbatch down, one up, in turn: one's backward as the other sets out (Jain et al., GEMS, SC 2020).

    A single microbatch's activations on each rank, for twice the weights and little less idle time than naive's.
    Picture: naive's Vs, every other one upside down, a little closer together.
    """
    half = microbatches - microbatches // 2
    for i in range(half):
        yield F(rank, i)
        yield B(rank, i)
        if half + i < microbatches:
            yield F(ranks - 1 - rank, half + i)
            yield B(ranks - 1 - rank, half + i)


@register("chimera", placement="bidirectional")
def chimera(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Half of the microbatches down, half up, each rank taking turns (Li and Hoefler, arXiv 2107.06925, §3).

    A unit is p/2 microbatches in each direction, started two slots apart, where a slot is a forward or a
    backward; it fits together without a conflict, and units follow each other 2p slots apart. For
    F = B the idle share of the time is (p-2)/(2m+p-2), where p divides m. Twice the weights; p/2+1 to p
    activations. Picture: two sets of slanted lines, woven.
    """
    if ranks % 2:
        raise SettingError(
            f"chimera needs an even number of ranks; got {ranks} — try {f'{ranks - 1} or ' * (ranks > 1)}{ranks + 1}"
        )
    if microbatches % 2:
        raise SettingError(f"chimera needs an even number of microbatches; got {microbatches} — try {microbatches + 1}")
    slots = []
    for first, stage in ((0, rank), (microbatches // 2, ranks - 1 - rank)):
        for i in range(microbatches // 2):
            unit, place = divmod(i, ranks // 2)
            start = 2 * ranks * unit + 2 * place
            slots.append((start + stage, F(stage, first + i)))
            slots.append((start + 2 * ranks - 1 - stage, B(stage, first + i)))
    yield from (action for _, action in sorted(slots))
