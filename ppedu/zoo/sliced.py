"""TeraPipe, Seq1F1B and SlimPipe: sequences are cut into slices, so that the pipeline fills sooner and holds less."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, B, F
from ppedu.core.validate import require_count
from ppedu.zoo import Facts, register


def _backwards(microbatches: int, slices: int) -> Iterator[int]:
    """Yield all slices in the order of their backwards: of each microbatch, the last one first."""
    for microbatch in range(microbatches):
        yield from reversed(range(microbatch * slices, (microbatch + 1) * slices))


@register(
    "terapipe",
    facts=Facts(
        "arXiv 2102.07988; by simulation",
        idle="(p-1)*(F+B)/s",
        peak="m",
        price="Like GPipe, a rank holds all microbatches.",
        used="Its authors' code is a prototype (github.com/zhuohan123/terapipe).",
    ),
)
def terapipe(rank: int, ranks: int, microbatches: int, slices: int = 4) -> Iterator[Action]:
    """Yield the actions of `rank` in TeraPipe: GPipe on slices of sequences (Li et al., arXiv 2102.07988).

    A token attends to those before it only, so a stage can compute the first slice of a sequence before it has the
    others. Backwards run from the last slice to the first, because later slices add to the gradients of the keys and
    values of earlier ones. The paper makes later slices shorter, because they attend to more.

    In a timeline: GPipe with smaller steps at its edges.

    Raises:
        SettingError: `slices` is not a whole number above 0.
    """
    require_count("slices", slices)
    for number in range(microbatches * slices):
        yield F(rank, number)
    for number in _backwards(microbatches, slices):
        yield B(rank, number)


@register(
    "seq1f1b",
    facts=Facts(
        "arXiv 2406.03488, §3; by simulation",
        idle="(p-1)*(F+B)/s",
        peak="min(p-1-r+s, m*s)/s",
        price="A rank waits for a slice instead of a microbatch at both ends; it sends s times as often.",
        used="Its authors have it in a fork of Megatron-LM (github.com/thunlp/Seq1F1B).",
    ),
)
def seq1f1b(rank: int, ranks: int, microbatches: int, slices: int = 4) -> Iterator[Action]:
    """Yield the actions of `rank` in Seq1F1B: 1F1B on slices of sequences (Sun et al., arXiv 2406.03488, §3).

    The backward of a microbatch begins with its last slice, so a rank runs `slices` - 1 more forwards than in 1F1B
    before the first one: `ranks` - 1 - `rank` + `slices` - 1. Then it runs a forward and a backward in turn. A rank
    holds the activations of that many slices and one, which may be less than two microbatches.

    In a timeline: 1F1B with smaller steps at its edges.

    Raises:
        SettingError: `slices` is not a whole number above 0.
    """
    count = microbatches * require_count("slices", slices)
    warmup = min(ranks - rank + slices - 2, count)
    back = _backwards(microbatches, slices)
    for number in range(warmup):
        yield F(rank, number)
    for number in range(warmup, count):
        yield F(rank, number)
        yield B(rank, next(back))
    for number in back:
        yield B(rank, number)


@register(
    "slimpipe",
    facts=Facts(
        "arXiv 2504.14519; order of its code (github.com/kwai/Megatron-Kwai); by simulation",
        idle="(p-1)*(F+B)/(v*s)",
        sizes=("s >= p",),
        peak="min(s*v+2*(p-1-r), m*s*v)/(s*v)",
        price="It sends vs times as often as 1F1B, and also queries, keys and values, to even the attention of slices.",
        used="Its authors have it in a fork of Megatron-LM (github.com/kwai/Megatron-Kwai).",
    ),
)
def slimpipe(rank: int, ranks: int, microbatches: int, slices: int = 8, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in SlimPipe: interleaved 1F1B on equally long slices (Li et al., arXiv 2504.14519).

    A group of `ranks` slices, or of the next divisor of `slices`, passes through a rank's first stage, then through its
    second, and so on; then the next group follows. Backwards run in the opposite order. A rank holds as many slices as
    one microbatch has on it, and two more for each rank after it: with many slices, hardly more than one microbatch.

    Later slices attend to more. SlimPipe evens this out: of the slices that are on all ranks at a time, the one with
    most attention gives half of the difference to the one with least. So simulate it without `Costs(attention=…)`: all
    slices take the mean. The messages for it, and the first and the last slices, which it leaves as they are, are not
    counted. With `attention`, the timeline is that of its order without the exchange.

    In a timeline: interleaved 1F1B whose first and last microbatches are as thin as slices.

    Raises:
        SettingError: There are fewer slices than ranks.
    """
    count = microbatches * require_count("slices", slices, least=ranks)
    size = min(size for size in range(ranks, slices + 1) if slices % size == 0)
    groups = [slice(first, first + size) for first in range(0, count, size)]
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    back = [*_backwards(microbatches, slices)]
    forwards = [F(stage, number) for group in groups for stage in stages for number in range(count)[group]]
    backwards = [B(stage, number) for group in groups for stage in reversed(stages) for number in back[group]]
    warmup = min(slices * chunks + 2 * (ranks - 1 - rank), len(forwards)) - 1
    yield from forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards, strict=False):
        yield from pair
    yield from backwards[len(forwards) - warmup :]
