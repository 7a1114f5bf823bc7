"""A forward and a backward of different microbatches at the same time: one computes while the other communicates."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import count

from ppedu.core import Action, Op, W, overlap
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


@register(
    "stp",
    placement="v",
    chunks=2,
    facts=Facts(
        "arXiv 2510.27257; the order of github.com/MICLAB-BUPT/STP, times and memory by simulation",
        idle="(p-1)*(2*F+I-3*W+max(F, I))/2 if m >= 3*p-1 and FB == F+B and FI == F+I and W <= F and W <= I",
        peak="(3*p+max(1, r))/2 if m >= 3*p-1 and M_W == 1",
        price="It holds 1.5 to 2 times the activations of ZB-V, and only gains where its pairs hide messages.",
        used="Its authors' code, for Megatron-LM, is at github.com/MICLAB-BUPT/STP.",
    ),
)
def stp(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in STP: a V in pairs that hide tensor parallelism (Qi et al., arXiv 2510.27257).

    Each pair is of one stage: the forward computes while the all-reduce of the backward is on its way, and the other
    way round. A backward without a pair is whole, and hides its own behind W. The authors also braid two forwards in
    the warm-up, and a forward with a W; here they follow each other.

    In a timeline: a warm-up that runs further ahead than ZB-V's, then pairs of the two stages in turn.
    """
    full = max(microbatches, 3 * ranks - 1)  # with fewer microbatches, the missing ones are left out of this order
    hops, whole = ranks - 1 - rank, 2 * (full - 3 * ranks) + rank + 3  # to the turning point; pairs with a B
    steady = [f"F{'B' if turn < whole else 'I'}{(turn + 1) % 2}" for turn in range(whole + rank)]
    steps = ["F0"] * 2 * hops + ["F0", "F1"] * (rank + 1) + ["F0"] * (rank + 1) + ["FI1", "F0", "W"] * hops + steady
    steps += ["B0", "FI1"] * (hops + ranks - 1) + ["B0", "B1"] * (rank + 1) + ["B0", "W", "W"] * hops + ["B0"]
    numbers: defaultdict[tuple[bool, str], count[int]] = defaultdict(count)  # of forwards and of backwards, by chunk
    delayed: deque[Action] = deque()
    for step in steps + ["W"] * 2 * rank:
        stage = 2 * ranks - 1 - rank if step[-1] == "1" else rank
        parts = [Action(stage, Op(op), next(numbers[op == "F", step[-1]])) for op in step[:-1]] or [delayed.popleft()]
        delayed.extend(W(stage, part.microbatch) for part in parts if part.op is Op.I)
        parts = [part for part in parts if part.microbatch < microbatches]
        if parts:
            yield overlap(*parts) if len(parts) == 2 else parts[0]
