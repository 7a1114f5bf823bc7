"""Zero bubble: the backward in two halves. I is what the stage before waits for; W can wait and fill the bubbles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ppedu.core.actions import Action, F, I, Op, W
from ppedu.zoo.interleaved import depth_first, rounds
from ppedu.zoo.registry import register


@register("zb-h1")
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with every W put off by `rank` microbatches (Qi et al., arXiv 2401.10241, §2.1; ZB1P in PyTorch).

    The bubble shrinks from (p-1)(F+B) to (p-1)(F+I-W) at 1F1B's memory. Picture: 1F1B whose drain is filled
    with weight backwards.
    """
    yield from zb_interleaved(rank, ranks, microbatches, chunks=1)


@register("zb-interleaved")
def zb_interleaved(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Interleaved 1F1B with the backward in two halves (PyTorch's ScheduleInterleavedZeroBubble).

    W is put off by `rank` microbatches, and the warm-up is shorter by a forward for each hop to the last
    rank: an I comes back in half the time of a B. Picture: interleaved, its drain filled with W.
    """
    groups = rounds(ranks, microbatches)
    forwards, backwards = depth_first(rank, ranks, chunks, groups)
    warmup = min((chunks - 1) * len(groups[0]) + ranks - 1 - rank, len(forwards))
    yield from forwards[:warmup]
    for place, backward in enumerate(backwards):
        if warmup + place < len(forwards):
            yield forwards[warmup + place]
        yield I(backward.stage, backward.microbatch)
        if place >= rank:
            late = backwards[place - rank]
            yield W(late.stage, late.microbatch)
    for late in backwards[max(0, len(backwards) - rank) :]:
        yield W(late.stage, late.microbatch)


@register("zb-h2")
def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Twice 1F1B's warm-up, and every W put off by twice the rank (Qi et al., arXiv 2401.10241, §2.2).

    No bubble between a rank's own first and last action where F = I = W and there are at least 2p-1
    microbatches: the ranks' work is a parallelogram. It costs about twice 1F1B's memory, and the optimizer must
    not wait for all ranks. Picture: a long slanted warm-up, then F, I, W in turn, then W.
    """
    warmup = min(2 * (ranks - rank) - 1, microbatches)
    for m in range(warmup):
        yield F(rank, m)
    for m in range(microbatches):
        yield I(rank, m)
        if m >= 2 * rank:
            yield W(rank, m - 2 * rank)
        if warmup + m < microbatches:
            yield F(rank, warmup + m)
    for m in range(max(0, microbatches - 2 * rank), microbatches):
        yield W(rank, m)


@register("zb-v", placement="v", chunks=2)
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Down the ranks and back up, so that the first rank also has the loss (Qi et al., arXiv 2401.10241, §6).

    No bubble between a rank's own first and last action where F = I = W, at 1F1B's largest memory, p
    activations, on every rank. Chunk 0 goes down, chunk 1 comes back up. Picture: V after V, each a
    forward, then mirrored.
    """
    hops = ranks - rank  # to the turning point and past it
    full = max(microbatches, 2 * ranks - 1)  # with fewer, the same order with what is not there left out
    pattern = [
        *["F0"] * (2 * hops - 1),
        *["F1", "F0"] * rank,
        *["F1", "I1", "W1"] * hops,
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (full - 2 * ranks + rank + 1),
        *["I0", "W0", "F1", "I1", "W1"] * (hops - 1),
        *["I0", "I1"] * rank,
        *["I0", "W0"] * hops,
        *["W1"] * rank,
        *["W0"] * rank,
    ]
    stages = rank, 2 * ranks - 1 - rank
    yield from (action for action in _numbered(pattern, stages) if action.microbatch < microbatches)


def _numbered(pattern: Sequence[str], stages: tuple[int, ...]) -> Iterator[Action]:
    """The actions of a pattern such as F0 F1 I1, an op and a chunk each; each takes its microbatches in order."""

    def turns(step: str) -> Iterator[Action]:
        op, stage = Op(step[0]), stages[int(step[1])]
        return (Action(stage, op, m) for m in count())

    upcoming = {step: turns(step) for step in set(pattern)}
    return (next(upcoming[step]) for step in pattern)
