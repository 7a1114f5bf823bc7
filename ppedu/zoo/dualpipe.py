"""DualPipe and DualPipeV: two streams of microbatches meet, and the forwards of each overlap the other's backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ppedu.core.actions import Action, B, F, I, W, overlap
from ppedu.core.errors import SettingError
from ppedu.zoo import Facts, register
from ppedu.zoo.registry import require_even


@register(
    "dualpipe",
    placement="bidirectional",
    facts=Facts(
        "arXiv 2412.19437, table 2",
        idle="(p/2-1)*(FB+B-3*W) if F == I and W <= I and FB == F+B",
        sizes=("p % 2 == 0", "m % 2 == 0", "m >= 2*p"),
        peak="p+1",
    ),
)
def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Feed half of the microbatches from each end into two copies of the model (DeepSeek-V3, arXiv 2412.19437, §3.2.1).

    Each rank holds a stage of both copies, so twice the weights, and the activations of p+1 microbatches. If F = I,
    W <= I and a pair takes F+B, the idle time is (p/2-1)(FB+B-3W).

    Picture: slanted warm-ups from the top and the bottom that cross, pairs in the middle, weight backwards at the end.
    """
    require_even("dualpipe", "ranks", ranks)
    if microbatches % 2 or microbatches < 2 * ranks:
        nearest = max(2 * ranks, microbatches + microbatches % 2)
        raise SettingError(
            f"dualpipe needs an even number of microbatches, at least twice the ranks; got {microbatches} "
            f"for {ranks} ranks — try {nearest}"
        )
    down = _Stream(rank, range(microbatches // 2))
    up = _Stream(ranks - 1 - rank, range(microbatches // 2, microbatches))
    near, far = (down, up) if rank < ranks // 2 else (up, down)
    yield from _two_streams(min(rank, ranks - 1 - rank), ranks // 2, near, far, microbatches // 2)


@register(
    "dualpipev",
    placement="v",
    chunks=2,
    facts=Facts(
        "github.com/deepseek-ai/DualPipe",
        idle="(p-1)*(FB+B-3*W)/2 if F == I and W <= I and FB == F+B",
        sizes=("m >= 2*p",),
        peak="(2*p+1)/2",
    ),
)
def dualpipev(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Cut DualPipe in half: one copy of the model, down the ranks and back up (DualPipe repository, "DualPipeV").

    A microbatch on its way back up meets those on their way down. The formulas are those of DualPipe for 2p ranks, with
    the times of a chunk.

    Picture: the upper half of DualPipe's.
    """
    if microbatches < 2 * ranks:
        raise SettingError(
            f"dualpipev needs at least twice as many microbatches as ranks; got {microbatches} for {ranks} ranks "
            f"— try {2 * ranks}"
        )
    near = _Stream(rank, range(microbatches))
    far = _Stream(2 * ranks - 1 - rank, range(microbatches))
    yield from _two_streams(rank, ranks, near, far, microbatches)


class _Stream:
    """The forwards and the backwards of one stage, each handed out in the order of the microbatches."""

    def __init__(self, stage: int, microbatches: range):
        self.stage = stage
        self._forwards, self._backwards = iter(microbatches), iter(microbatches)

    def forward(self) -> Action:
        return F(self.stage, next(self._forwards))

    def backward(self) -> Action:
        return B(self.stage, next(self._backwards))


def _two_streams(depth: int, half: int, near: _Stream, far: _Stream, microbatches: int) -> Iterator[Action]:
    """Yield the order of the rank at `depth` hops from the end where `near` enters the pipeline.

    The streams meet after `half` ranks. `near` passes this rank on its way in, `far` on its way out; each has
    `microbatches` of them.
    """
    hops = half - 1 - depth  # to where the streams meet
    delayed: deque[Action] = deque()

    def split(backward: Action) -> Action:
        """Return the I of a backward and delay its W."""
        delayed.append(W(backward.stage, backward.microbatch))
        return I(backward.stage, backward.microbatch)

    for _ in range(2 * hops):
        yield near.forward()
    for _ in range(depth + 1):
        yield near.forward()
        yield far.forward()
    for _ in range(hops):
        yield split(far.backward())
        yield delayed.popleft()
        yield far.forward()
    for turn in range(microbatches - 2 * half + depth + 1):
        if turn == 0 and hops == 0:  # where the streams meet, a pair would only make the other ranks wait
            yield near.forward()
            yield far.backward()
        else:
            yield overlap(near.forward(), far.backward())
        yield overlap(far.forward(), near.backward())
    for _ in range(hops):
        yield far.backward()
        yield overlap(far.forward(), near.backward())
    for turn in range(2 * (depth + 1)):
        backward = (near if turn % 2 else far).backward()
        yield split(backward) if turn >= depth + 1 else backward  # the second half of them
    for _ in range(hops):
        yield delayed.popleft()
        yield split(near.backward())
    yield from delayed
