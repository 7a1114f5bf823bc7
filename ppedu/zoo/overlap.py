"""A forward and a backward of different microbatches at the same time: one computes while the other communicates."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, overlap
from ppedu.zoo import Facts, register
from ppedu.zoo.interleaved import depth_first, equal_groups


@register(
    "1f1b-overlap",
    facts=Facts(
        "github.com/NVIDIA/Megatron-LM, combined 1F1B, without chunks",
        makespan="p*(F+B) + (m-1)*FB if FB >= max(F, B)",
        peak="min(2*p-2*r, m)",
        price="Rank 0 holds the activations of up to 2p microbatches, where 1F1B holds p.",
        used=(
            "Megatron-LM pairs actions like this with several stages on each rank, or without a pipeline "
            "(github.com/NVIDIA/Megatron-LM)."
        ),
    ),
)
def one_f_one_b_overlap(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in 1F1B whose forwards and backwards overlap in pairs in the steady state.

    It is Megatron's combined 1F1B with a single stage on each rank; Megatron itself needs several. A pair must not
    contain a forward and a backward that depends on it. So the warm-up has two forwards for every hop to the last rank,
    not one, and the last rank has a warm-up of one: rank 0 holds the activations of up to 2 * ranks microbatches.

    In a timeline: 1F1B with a warm-up of twice the length, then pairs.
    """
    yield from interleaved_overlap(rank, ranks, microbatches, chunks=1)


@register(
    "interleaved-overlap",
    facts=Facts(
        "github.com/NVIDIA/Megatron-LM, combined 1F1B",
        makespan="p*(F+B) + (m*v-p*(v-1)-1)*FB/v if m % p == 0 and FB >= max(F, B)",
        peak="min(p*v+p-2*r, m*v)/v if m % p == 0",
        price="Its warm-up has one more forward than that of interleaved 1F1B, whose activations are held, too.",
        used="Megatron-LM runs it with `--overlap-moe-expert-parallel-comm` (github.com/NVIDIA/Megatron-LM).",
    ),
)
def interleaved_overlap(
    rank: int, ranks: int, microbatches: int, chunks: int = 2, backward_first: bool = False
) -> Iterator[Action]:
    """Yield the actions of `rank` in interleaved 1F1B with overlapped pairs in the steady state (Megatron-LM).

    The warm-up is one forward longer than in interleaved 1F1B, so that no pair depends on itself.

    In a timeline: interleaved 1F1B with pairs in its middle.

    Args:
        backward_first: Put the backward first in each pair. The single actions are then in the order of interleaved
            1F1B.
    """
    groups = equal_groups(ranks, microbatches)
    for step in depth_first(rank, ranks, chunks, groups, warmup=2 * (ranks - 1 - rank) + 1):
        if len(step) == 1:
            yield step[0]
        else:
            forward, backward = step
            yield overlap(backward, forward) if backward_first else overlap(forward, backward)
