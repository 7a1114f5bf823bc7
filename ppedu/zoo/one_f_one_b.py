"""1F1B: run each backward as soon as it can run."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, B, F
from ppedu.zoo import Facts, register


@register(
    "1f1b",
    facts=Facts(
        "arXiv 2006.09503; arXiv 2104.04473, §2.2",
        idle="(p-1)*(F+B)",
        # The first microbatch costs a round trip of 2(p-1) messages. At most p are in flight, so each further one adds
        # a p-th of that; what they add together each way is rounded down.
        hops="2*(p-1 + (m-1)*(p-1)//p)",
        peak="min(p-r, m)",
        price="The ranks wait as long as in GPipe; what it saves is memory.",
        used=(
            "It is Megatron-LM's default (arXiv 2104.04473), and PyTorch has it as `Schedule1F1B` "
            "(github.com/pytorch/pytorch)."
        ),
    ),
)
def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in 1F1B: one forward and one backward in turn (Narayanan et al., arXiv 2006.09503).

    Also known as PipeDream-Flush and DAPPLE (arXiv 2007.01045). The name is that of PipeDream's order (Harlap et al.,
    arXiv 1806.03377), which does not wait between steps. It takes as long
    as GPipe, but a rank holds the activations of at most `ranks - rank` microbatches. With 3 microbatches, rank 0 of 2
    runs 0F0, 0F1 0B0, 0F2 0B1, 0B2, and rank 1 runs 1F0 1B0, 1F1 1B1, 1F2 1B2.

    In a timeline: a slanted edge of forwards, a chequered middle, a slanted edge of backwards.
    """
    warmup = min(ranks - rank - 1, microbatches)  # the hops to the last rank, where the first backward starts
    for m in range(warmup):
        yield F(rank, m)
    for m in range(warmup, microbatches):  # steady state
        yield F(rank, m)
        yield B(rank, m - warmup)
    for m in range(microbatches - warmup, microbatches):  # cooldown
        yield B(rank, m)
