"""1F1B: as soon as a backward can run, run it."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core.actions import Action, B, F
from ppedu.zoo.registry import register


@register("1f1b")
def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Warm up, then one forward and one backward in turn, then drain.

    Known as PipeDream-Flush (Narayanan et al., arXiv 2006.09503) and DAPPLE (arXiv 2007.01045). It takes
    as long as GPipe, but a rank holds no more activations than there are ranks from it to the end.
    Picture: a slanted edge of forwards, a chequered middle, a slanted edge of backwards.
    """
    warmup = min(ranks - rank - 1, microbatches)  # as many as the last rank needs to answer the first
    for m in range(warmup):
        yield F(rank, m)
    for m in range(warmup, microbatches):
        yield F(rank, m)
        yield B(rank, m - warmup)
    for m in range(microbatches - warmup, microbatches):
        yield B(rank, m)
