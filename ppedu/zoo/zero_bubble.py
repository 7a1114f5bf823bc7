"""Zero bubble: backwards split into I, which the previous stage waits for, and W, which can fill the idle time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain

from ppedu.core import Action, I, Op, W
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
        price="Each backward must run as two operations, and what W needs is kept until then.",
        used=(
            "Its authors' fork of Megatron-LM has it (github.com/sail-sg/zero-bubble-pipeline-parallelism), and so "
            "has PyTorch, as `ScheduleInterleavedZeroBubble` with one stage on each rank "
            "(github.com/pytorch/pytorch)."
        ),
    ),
)
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in ZB-H1: 1F1B with split backwards (Qi et al., arXiv 2401.10241, §2.1).

    Each W is delayed by `rank` microbatches. Let p be the ranks, and F, B, I and W the times of a forward, a backward
    and its halves: the idle time inside a rank's span shrinks from (p-1)(F+B) to (p-1)(F+I-W), at the memory of 1F1B.
    In PyTorch the schedule is called ZB1P.

    In a timeline: 1F1B whose cooldown is filled with Ws.
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
        price="It needs about twice the memory of 1F1B, and an optimizer step that does not wait for all ranks.",
        used=(
            "Its authors' fork of Megatron-LM searches for an order in the same memory, called ZB-2p (arXiv "
            "2401.10241; github.com/sail-sg/zero-bubble-pipeline-parallelism)."
        ),
    ),
)
def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in ZB-H2: ZB-H1 with twice the warm-up (Qi et al., arXiv 2401.10241, §2.2).

    Each W is delayed by `2 * rank` microbatches. If F, I and W take equally long and there are at least 2 * ranks - 1
    microbatches, a rank never waits between its own first and last action: the work of all ranks is a parallelogram. It
    needs about twice the memory of 1F1B, and an optimizer step that does not wait for all ranks.

    In a timeline: a long slanted warm-up, then F, I, W in turn, then W.
    """
    steps = depth_first(rank, ranks, 1, equal_groups(ranks, microbatches), warmup=2 * (ranks - 1 - rank))
    yield from _split(chain.from_iterable(steps), delay=2 * rank)


@register(
    "zb-interleaved",
    facts=Facts(
        "github.com/pytorch/pytorch, ScheduleInterleavedZeroBubble",
        remark="by simulation",
        price="It sends about v times as many messages as ZB-H1, and backwards must run as two operations.",
        used="PyTorch has it as `ScheduleInterleavedZeroBubble` (github.com/pytorch/pytorch).",
    ),
)
def zb_interleaved(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in interleaved 1F1B with split backwards (PyTorch's ScheduleInterleavedZeroBubble).

    Each W is delayed until `rank` more Is have run. For each hop to the last rank the warm-up has one forward, not two,
    because the gradient comes back after I, in half the time of a full backward.

    In a timeline: interleaved 1F1B with a cooldown that is filled with Ws.
    """
    steps = depth_first(rank, ranks, chunks, equal_groups(ranks, microbatches), warmup=ranks - 1 - rank)
    yield from _split(chain.from_iterable(steps), delay=rank)


def _split(order: Iterator[Action], delay: int) -> Iterator[Action]:
    """Yield forwards as in `order`, and for each full backward its I. Each W follows `delay` Is after its own.

    With `delay` 1, the order 0F0 0B0 0F1 0B1 becomes 0F0 0I0 0F1 0I1 0W0 0W1.
    """
    delayed: deque[Action] = deque()
    for action in order:
        if action.op == Op.F:
            yield action
            continue
        yield I(action.stage, action.microbatch)
        delayed.append(W(action.stage, action.microbatch))
        if len(delayed) > delay:
            yield delayed.popleft()
    yield from delayed


@register(
    "zb-v",
    placement="v",
    chunks=2,
    facts=Facts(
        "arXiv 2401.10241, §6; idle time by simulation",
        idle="(p-1)*F/2 if m >= 2*p-1 and F == I == W",
        idle_in_span="0",
        peak="p if m >= 2*p-1",
        price="Ranks may wait again where F, I and W differ, and it sends twice as many messages as ZB-H1.",
        used=(
            "PyTorch has it as `ScheduleZBVZeroBubble` (github.com/pytorch/pytorch), and its authors in their fork "
            "of Megatron-LM (github.com/sail-sg/zero-bubble-pipeline-parallelism)."
        ),
    ),
)
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in ZB-V: two stages on each rank, split backwards (Qi et al., arXiv 2401.10241, §6).

    The stages go down the ranks and back up, so rank 0 also computes the loss. If F, I and W take equally long, a rank
    never waits between its own first and last action. Every rank holds the activations of `ranks` microbatches, as many
    as rank 0 in 1F1B.

    In a timeline: V after V of forwards, each followed by its mirror image.
    """
    hops = ranks - rank  # down to the turning point, and past it
    full = max(microbatches, 2 * ranks - 1)  # with fewer microbatches, the missing ones are left out of this order
    pattern = [  # an op and a chunk; chunk 0 is on the way down, chunk 1 on the way back up
        # warm-up
        *["F0"] * (2 * hops - 1),  # until microbatch 0 is back: it has passed the stages between the rank's two
        *["F1", "F0"] * rank,  # until its gradient is here: `rank` hops on to the loss on rank 0, and `rank` back
        *["F1", "I1", "W1"] * hops,
        # steady state
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (full - 2 * ranks + rank + 1),  # the F0 that are left
        # cooldown
        *["I0", "W0", "F1", "I1", "W1"] * (hops - 1),
        *["I0", "I1"] * rank,
        *["I0", "W0"] * hops,
        *["W1"] * rank,
        *["W0"] * rank,
    ]
    stages = rank, 2 * ranks - 1 - rank
    counts: Counter[str] = Counter()  # by step: its next microbatch
    for step in pattern:
        if counts[step] < microbatches:
            op, chunk = step[0], int(step[1])
            yield Action(stages[chunk], Op(op), counts[step])
        counts[step] += 1
