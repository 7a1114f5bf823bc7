"""DualPipe and DualPipeV: two streams of microbatches meet; each one's forwards run beside the other's backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ppedu.core.actions import Action, B, F, I, W, overlap
from ppedu.core.errors import SettingError
from ppedu.zoo.registry import register


@register("dualpipe", placement="bidirectional")
def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Half of the microbatches from each end, through two copies of the model (DeepSeek-V3, arXiv 2412.19437, §3.2.1).

    Each rank holds a stage of both copies, so twice the weights, and p+1 activations. With F = I, W no longer
    than I and a pair as long as F+B, the idle time is (p/2-1)(FB+B-3W). Picture: two slanted warm-ups from
    top and bottom that cross; pairs in the middle; weight backwards fill the end.
    """
    if ranks % 2:
        raise SettingError(
            f"dualpipe needs an even number of ranks; got {ranks} — try {f'{ranks - 1} or ' * (ranks > 1)}{ranks + 1}"
        )
    if microbatches % 2 or microbatches < 2 * ranks:
        nearest = max(2 * ranks, microbatches + microbatches % 2)
        raise SettingError(
            f"dualpipe needs an even number of microbatches, at least twice the ranks; got {microbatches} "
            f"for {ranks} ranks — try {nearest}"
        )
    down = _Stream(rank, range(microbatches // 2))
    up = _Stream(ranks - 1 - rank, range(microbatches // 2, microbatches))
    near, far = (down, up) if rank < ranks // 2 else (up, down)
    yield from _meet(min(rank, ranks - 1 - rank), ranks // 2, near, far, microbatches // 2)


@register("dualpipev", placement="v", chunks=2)
def dualpipev(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """DualPipe cut in half: one copy of the model, down the ranks and back up (DualPipe repository, "DualPipeV").

    A microbatch that has come down meets those that go down. The formulas are DualPipe's for 2p ranks, with a
    chunk's times. Picture: the upper half of DualPipe's.
    """
    if microbatches < 2 * ranks:
        raise SettingError(
            f"dualpipev needs at least twice as many microbatches as ranks; got {microbatches} for {ranks} ranks "
            f"— try {2 * ranks}"
        )
    near = _Stream(rank, range(microbatches))
    far = _Stream(2 * ranks - 1 - rank, range(microbatches))
    yield from _meet(rank, ranks, near, far, microbatches)


class _Stream:
    """A stage and the microbatches that reach it, each forward and each backward in turn."""

    def __init__(self, stage: int, microbatches: range):
        self.stage = stage
        self._forwards, self._backwards = iter(microbatches), iter(microbatches)

    def forward(self) -> Action:
        return F(self.stage, next(self._forwards))

    def backward(self) -> Action:
        return B(self.stage, next(self._backwards))


def _meet(place: int, depth: int, near: _Stream, far: _Stream, microbatches: int) -> Iterator[Action]:
    """The order of the rank that is `place` hops from where `near` starts, of `depth` to where the streams meet.

    `near` reaches it on the way in, `far` on the way out; `microbatches` is the number in each.
    """
    hops = depth - 1 - place
    late: deque[Action] = deque()  # weight backwards put off

    def split(backward: Action) -> Action:
        late.append(W(backward.stage, backward.microbatch))
        return I(backward.stage, backward.microbatch)

    for _ in range(2 * hops):
        yield near.forward()
    for _ in range(place + 1):
        yield near.forward()
        yield far.forward()
    for _ in range(hops):
        yield split(far.backward())
        yield late.popleft()
        yield far.forward()
    for turn in range(microbatches - 2 * depth + place + 1):
        if turn == 0 and hops == 0:  # where the streams meet, a pair would only make the others wait
            yield near.forward()
            yield far.backward()
        else:
            yield overlap(near.forward(), far.backward())
        yield overlap(far.forward(), near.backward())
    for _ in range(hops):
        yield far.backward()
        yield overlap(far.forward(), near.backward())
    for turn in range(2 * (place + 1)):  # the second half of these put their W off
        backward = (near if turn % 2 else far).backward()
        yield split(backward) if turn >= place + 1 else backward
    for _ in range(hops):
        yield late.popleft()
        yield split(near.backward())
    yield from late
