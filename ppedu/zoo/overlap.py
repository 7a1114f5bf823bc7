"""Forward and backward of different microbatches at the same time: one computes while the other's messages travel."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core.actions import Action, B, F, overlap
from ppedu.zoo.interleaved import depth_first, rounds
from ppedu.zoo.registry import register


@register("1f1b-overlap")
def one_f_one_b_overlap(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with each forward and backward of the steady phase as one pair (after Megatron's combined 1F1B).

    Megatron itself does so only with several chunks on a rank, as below. A pair must not contain a forward and the
    backward that waits for it, so every hop to the last rank adds two forwards to the warm-up, not one, and the
    last rank has one itself: 2p activations on rank 0.
    Picture: 1F1B with a warm-up of twice the length, then pairs.
    """
    warmup = min(2 * (ranks - 1 - rank) + 1, microbatches)
    for m in range(warmup):
        yield F(rank, m)
    for m in range(warmup, microbatches):
        yield overlap(F(rank, m), B(rank, m - warmup))
    for m in range(microbatches - warmup, microbatches):
        yield B(rank, m)


@register("interleaved-overlap")
def interleaved_overlap(
    rank: int, ranks: int, microbatches: int, chunks: int = 2, backward_first: bool = False
) -> Iterator[Action]:
    """Interleaved 1F1B with the steady phase in pairs (Megatron's combined 1F1B).

    One forward more of warm-up than interleaved, so that no pair waits for itself. `backward_first` pairs the
    backward with the forward after it: F, then (B, F) pairs, then B, in the same order of actions.
    Picture: interleaved with pairs in its middle.
    """
    groups = rounds(ranks, microbatches)
    forwards, backwards = depth_first(rank, ranks, chunks, groups)
    warmup = min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank) + 1, len(forwards))
    steady = len(forwards) - warmup
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield overlap(backward, forward) if backward_first else overlap(forward, backward)
    yield from backwards[steady:]
