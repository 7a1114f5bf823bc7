"""Zero bubble: backwards split into I, which the previous stage waits for, and W, which can fill the bubble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ppedu.core.actions import Action, F, I, Op, W
from ppedu.zoo import Facts, register
from ppedu.zoo.interleaved import depth_first, equal_groups


@register(
    "zb-h1",
    facts=Facts(
        "arXiv 2401.10241, table 2; corrected by simulation",
        # The paper's F+I-W is for W <= F and W <= I.
        idle="(p-1)*max(F+3*c, I+2*c, F+I+4*c-W) if m >= p and (c == 0 or m > p) and 2*c <= W",
        idle_in_span="(p-1)*max(I+2*c, F+I+4*c-W)",
        peak="p-r + r*M_W if m >= p",
    ),
)
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Run 1F1B with every W delayed by `rank` microbatches (Qi et al., arXiv 2401.10241, §2.1; ZB1P in PyTorch).

    The bubble shrinks from (p-1)(F+B) to (p-1)(F+I-W) at the memory of 1F1B.

    Picture: 1F1B whose cooldown is filled with weight backwards.
    """
    yield from zb_interleaved(rank, ranks, microbatches, chunks=1)


@register(
    "zb-h2",
    facts=Facts(
        "arXiv 2401.10241, table 2; corrected by simulation",
        # The paper leaves out I-F: the first gradient comes back late if I is long.
        idle="(p-1)*max(F+c, I+2*c-F, F+I+2*c-2*W) if m >= 2*p-1 and 2*c <= F+I",
        idle_in_span="(p-1)*max(0, I+2*c-F, F+I+2*c-2*W)",
        peak="2*p-2*r-1 + 2*r*M_W if m >= 2*p-1",
    ),
)
def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Double the warm-up of 1F1B and delay every W by `2 * rank` microbatches (Qi et al., arXiv 2401.10241, §2.2).

    If F = I = W and there are at least 2p-1 microbatches, a rank has no bubble between its own first and last action:
    the work of all ranks is a parallelogram. It needs about twice the memory of 1F1B, and an optimizer step that does
    not wait for all ranks.

    Picture: a long slanted warm-up, then F, I, W in turn, then W.
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


@register(
    "zb-interleaved", facts=Facts("github.com/pytorch/pytorch, ScheduleInterleavedZeroBubble", remark="by simulation")
)
def zb_interleaved(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Run interleaved 1F1B with split backwards (PyTorch's ScheduleInterleavedZeroBubble).

    W is delayed by `rank` microbatches. For each hop to the last rank the warm-up has one forward, not two, because an
    I comes back in half the time of a B.

    Picture: interleaved 1F1B with a cooldown that is filled with W.
    """
    groups = equal_groups(ranks, microbatches)
    forwards, backwards = depth_first(rank, ranks, chunks, groups)
    warmup = min((chunks - 1) * len(groups[0]) + ranks - 1 - rank, len(forwards))
    yield from forwards[:warmup]
    for index, backward in enumerate(backwards):
        if warmup + index < len(forwards):
            yield forwards[warmup + index]
        yield I(backward.stage, backward.microbatch)
        if index >= rank:
            delayed = backwards[index - rank]
            yield W(delayed.stage, delayed.microbatch)
    for delayed in backwards[max(0, len(backwards) - rank) :]:
        yield W(delayed.stage, delayed.microbatch)


@register(
    "zb-v",
    placement="v",
    chunks=2,
    facts=Facts(
        "arXiv 2401.10241, §6; idle time by simulation",
        idle="(p-1)*F/2 if m >= 2*p-1 and F == I == W",
        idle_in_span="0",
        peak="p if m >= 2*p-1",
    ),
)
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Go down the ranks and back up, so that the first rank also has the loss (Qi et al., arXiv 2401.10241, §6).

    If F = I = W, a rank has no bubble between its own first and last action. Every rank holds the activations of p
    microbatches, as much as the first rank of 1F1B. Chunk 0 is on the way down, chunk 1 on the way back up.

    Picture: V after V of forwards, each followed by its mirror image.
    """
    hops = ranks - rank  # down to the turning point, and past it
    full = max(microbatches, 2 * ranks - 1)  # with fewer microbatches, the missing ones are left out of this order
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
    """Turn a pattern of ops and chunks, such as F0 F1 I1, into actions, counting the microbatches of each."""

    def microbatches_of(step: str) -> Iterator[Action]:
        op, stage = Op(step[0]), stages[int(step[1])]
        return (Action(stage, op, m) for m in count())

    upcoming = {step: microbatches_of(step) for step in set(pattern)}
    return (next(upcoming[step]) for step in pattern)
