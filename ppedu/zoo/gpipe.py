"""The schedules before 1F1B: one microbatch at a time, and all forwards before all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core.actions import Action, B, F
from ppedu.zoo.registry import register


@register("naive")
def naive(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """One microbatch goes all the way down and all the way back before the next one starts.

    At any time a single rank works. Picture: a V for each microbatch, one after the other.
    """
    for m in range(microbatches):
        yield F(rank, m)
        yield B(rank, m)


@register("gpipe")
def gpipe(rank: int, ranks: int, microbatches: int, lifo: bool = False) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965).

    The ranks work at the same time, each one microbatch behind the rank before; every rank keeps the
    activations of all microbatches. `lifo` runs the last microbatch's backward first, as the paper draws it.
    Picture: a slanted block of forwards, a mirrored one of backwards.
    """
    for m in range(microbatches):
        yield F(rank, m)
    for m in reversed(range(microbatches)) if lifo else range(microbatches):
        yield B(rank, m)
