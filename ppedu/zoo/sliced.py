"""TeraPipe and Seq1F1B: sequences are cut into slices, so that the pipeline fills sooner and holds less."""

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
