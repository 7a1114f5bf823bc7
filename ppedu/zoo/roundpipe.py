"""RoundPipe: stages go round the ranks, whose weights come from the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ppedu.core import Action, B, F, Placement, R
from ppedu.zoo import Facts, register


@register(
    "roundpipe",
    placement="round",
    facts=Facts(
        "arXiv 2604.27085, after its authors' program; formulas by simulation",
        makespan="(m + 4*(p*v-1)//(3*p)*m + 4*(p*v-1)//3 % p)*3*F/v if m >= p and B == 2*F and (p*v-1) % 3 == 0",
        idle_in_span="(1 + 4*(p*v-1)//(3*p))*3*m*F/v - m*(F+B)",
        peak="1/v if S == 0",
        price="All forwards but the last stage's run twice, and weights pass to the GPU for each turn.",
        used="Its authors' program is public (github.com/ITcarrot/RoundPipe).",
    ),
)
def roundpipe(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in RoundPipe: stages go round the ranks, in turns (Luo et al., arXiv 2604.27085).

    Weights are on the host, and no rank owns a stage. A turn is all microbatches through three forwards, the last
    stage, or the backward of one, which recomputes and takes as long; their program plans turns by measured times. The
    next rank takes the next turn. Not modelled: loading weights, which it hides, and its optimizer, a step late.

    In a timeline: blocks of forwards, then of R and B, each one rank further down.
    """
    last = ranks * chunks - 1
    place = Placement.make("round", ranks, chunks)
    for stages in (tuple(turn) for _, turn in groupby(range(last), lambda stage: (last - 1 - stage) // 3)):
        if place.rank(stages[0]) == rank:
            yield from (F(stage, m) for m in range(microbatches) for stage in stages)
    for stage in range(last, -1, -1):
        if place.rank(stage, op="B") == rank:
            yield from (make(stage, m) for m in range(microbatches) for make in (F if stage == last else R, B))
