"""DualPipe and DualPipeV: two streams of microbatches meet, and the forwards of each overlap the other's backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from ppedu.core import Action, B, F, I, W, overlap
from ppedu.core.validate import require_count
from ppedu.zoo import Facts, register, require_even

# The forwards and the backwards of one stage, each in the order of the microbatches.
Stream = tuple[Iterator[Action], Iterator[Action]]


@register(
    "dualpipe",
    placement="bidirectional",
    facts=Facts(
        "arXiv 2412.19437, table 2",
        idle="(p/2-1)*(FB+B-3*W) if F == I and W <= I and FB == F+B",
        sizes=("p % 2 == 0", "m % 2 == 0", "m >= 2*p"),
        peak="p+1",
        price="Every rank holds the weights of two stages, and the activations of p+1 microbatches.",
        used=(
            "DeepSeek-V3 was trained with it (arXiv 2412.19437, §3.2.1); the code is at "
            "github.com/deepseek-ai/DualPipe."
        ),
    ),
)
def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in DualPipe: microbatches from both ends overlap (DeepSeek-V3, arXiv 2412.19437).

    There are two copies of the model in opposite directions (§3.2.1); half of the microbatches pass through each. In
    the steady state a forward of one stream overlaps a backward of the other. Let p be the ranks, F, B, I and W the
    times of a forward, a backward and its halves, and FB that of an overlapped pair. Each rank holds a stage of both
    copies, so twice the weights, and the activations of p+1 microbatches. If F = I, W <= I and FB = F+B, the idle time
    is (p/2-1)(FB+B-3W).

    In a timeline: slanted warm-ups from the top and the bottom that cross, pairs in the middle, Ws at the end.

    Raises:
        SettingError: The number of ranks or of microbatches is odd, or there are fewer than 2p microbatches.
    """
    require_even("dualpipe", "ranks", ranks)
    require_count(f"microbatches of dualpipe on {ranks} ranks", microbatches, least=2 * ranks)
    require_even("dualpipe", "microbatches", microbatches)
    down = _stream(rank, range(microbatches // 2))
    up = _stream(ranks - 1 - rank, range(microbatches // 2, microbatches))
    near, far = (down, up) if rank < ranks // 2 else (up, down)
    depth = min(rank, ranks - 1 - rank)
    yield from _two_streams(depth, ranks // 2, near, far, microbatches // 2)


@register(
    "dualpipev",
    placement="v",
    chunks=2,
    facts=Facts(
        "github.com/deepseek-ai/DualPipe",
        idle="(p-1)*(FB+B-3*W)/2 if F == I and W <= I and FB == F+B",
        sizes=("m >= 2*p",),
        peak="(2*p+1)/2",
        price=(
            "It needs at least 2p microbatches, and holds the activations of half a microbatch more than 1F1B's rank 0."
        ),
        used=(
            "PyTorch has it as `ScheduleDualPipeV` (github.com/pytorch/pytorch); DeepSeek's own code is at "
            "github.com/deepseek-ai/DualPipe."
        ),
    ),
)
def dualpipev(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in DualPipeV: DualPipe with one copy of the model (github.com/deepseek-ai/DualPipe).

    The stages go down the ranks and back up, two on each rank. So the forwards of microbatches on their way down
    overlap the backwards of earlier ones on their way up. The formulas are those of DualPipe for twice the ranks, with
    the times of one of a rank's two stages.

    In a timeline: the upper half of DualPipe's.

    Raises:
        SettingError: There are fewer than 2 * ranks microbatches.
    """
    require_count(f"microbatches of dualpipev on {ranks} ranks", microbatches, least=2 * ranks)
    near = _stream(rank, range(microbatches))
    far = _stream(2 * ranks - 1 - rank, range(microbatches))
    yield from _two_streams(rank, ranks, near, far, microbatches)


def _stream(stage: int, microbatches: range) -> Stream:
    """Return two iterators: over the forwards of a stage, and over its backwards."""
    return (F(stage, m) for m in microbatches), (B(stage, m) for m in microbatches)


def _two_streams(depth: int, half: int, near: Stream, far: Stream, microbatches: int) -> Iterator[Action]:
    """Yield the order of the rank at `depth` hops from the end where the stream `near` enters the pipeline.

    The streams meet after `half` ranks. `near` passes this rank on its way in, `far` on its way out; each has
    `microbatches` microbatches. The steps have the names of DeepSeek's code, where 0 is `near` and 1 is `far`.
    """
    near_forwards, near_backwards = near
    far_forwards, far_backwards = far
    hops = half - 1 - depth  # to where the streams meet
    delayed: deque[Action] = deque()

    def split(backward: Action) -> Action:
        """Return the I of a backward and delay its W."""
        delayed.append(W(backward.stage, backward.microbatch))
        return I(backward.stage, backward.microbatch)

    yield from islice(near_forwards, 2 * hops)  # step 1: nF0
    for _ in range(depth + 1):  # step 2: nF0F1
        yield next(near_forwards)
        yield next(far_forwards)
    for _ in range(hops):  # step 3: nB1W1F1
        yield split(next(far_backwards))
        yield delayed.popleft()
        yield next(far_forwards)
    left = microbatches - 2 * hops - (depth + 1)  # forwards of `near` after steps 1 and 2
    for turn in range(left):  # step 4, the steady state: nF0B1F1B0
        if turn == 0 and hops == 0:  # where the streams meet: the forward's result leaves before the backward runs
            yield next(near_forwards)
            yield next(far_backwards)
        else:
            yield overlap(next(near_forwards), next(far_backwards))
        yield overlap(next(far_forwards), next(near_backwards))
    for _ in range(hops):  # step 5: nB1F1B0
        yield next(far_backwards)
        yield overlap(next(far_forwards), next(near_backwards))
    for turn in range(2 * (depth + 1)):  # step 6: nB1B0, the second half of them split
        backward = next(near_backwards if turn % 2 else far_backwards)
        yield split(backward) if turn >= depth + 1 else backward
    for _ in range(hops):  # step 7: nWB0
        yield delayed.popleft()
        yield split(next(near_backwards))
    yield from delayed  # step 8: nW
