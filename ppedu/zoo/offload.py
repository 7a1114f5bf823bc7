"""PipeOffload: interleaved schedules for less memory, and their activations on the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import gcd

from ppedu.core import Action, F, I, W
from ppedu.core.lowering import offloaded
from ppedu.zoo import Facts, register
from ppedu.zoo.interleaved import depth_first, equal_groups

USED = "Its authors' fork of Megatron-LM has it (github.com/sail-sg/zero-bubble-pipeline-parallelism)."


def _split(rank: int, ranks: int, chunks: int, groups: list[range]) -> Iterator[Action]:
    """Yield interleaved 1F1B with split backwards and the least warm-up that keeps the ranks busy."""
    for action in chain.from_iterable(depth_first(rank, ranks, chunks, groups, ranks - 1 - rank)):
        stage, op, microbatch, _ = action
        yield from (action,) if op == "F" else (I(stage, microbatch), W(stage, microbatch))


@register(
    "gis",
    facts=Facts(
        "arXiv 2503.01328, table 1",
        idle="(p-1)*(F+I)/v if m % p == 0",
        peak="(p*v-r)/v if m % p == 0",
        price="Each backward must run as two operations.",
        used=USED,
    ),
)
def gis(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in GIS, interleaved 1F1B with less warm-up (Wan et al., arXiv 2503.01328, section 3).

    Gradients come back after I alone, so each hop to the last rank needs one forward in the warm-up, not two. W follows
    its I at once. The ranks wait less than in interleaved 1F1B, and hold the activations of 1F1B.

    In a timeline: interleaved 1F1B, a little earlier, with I and W side by side.
    """
    yield from _split(rank, ranks, chunks, equal_groups(ranks, microbatches))


@register(
    "gis-h",
    facts=Facts(
        "arXiv 2503.01328, table 1",
        remark="by simulation",
        peak="((p+1)//2*(v-1)+p-r)/v if m % p == 0",
        price="The ranks wait between the chunks of the first microbatches.",
        used=USED,
    ),
)
def gis_h(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in GIS-H: GIS in groups of half as many microbatches (arXiv 2503.01328, section 3.2).

    A group is as small as possible: when its last forward on a chunk has ended, its first is back for the next chunk.
    With many chunks, a rank holds half the activations of GIS.

    In a timeline: GIS whose first forwards wait between their chunks.
    """
    yield from _split(rank, ranks, chunks, equal_groups((ranks + 1) // 2, microbatches))


def _uniform(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Return PipeOffload without copies: a microbatch every 3 slots for each chunk, in which F, I and W take one each.

    The authors' `GroupBuildingBlockScheduler` gives a chunk its slots as soon as half the ranks have had theirs. Where
    another chunk has these already, it and all later ones come a period later.
    """
    half = (ranks + 1) // 2
    early = [3 * (half * chunk + chunk // (chunks // gcd(chunks, half))) for chunk in range(chunks)]
    first = early[-1] + 3 * (ranks - rank) - 2 + rank  # the slot of the first I
    slots: list[tuple[int, Action]] = []
    for m in range(microbatches):
        for chunk, wait in enumerate(early):
            start, stage, back = 3 * chunks * m + wait, chunk * ranks + rank, (chunks - 1 - chunk) * ranks + rank
            slots += (start + rank, F(stage, m)), (start + first, I(back, m)), (start + first + 1, W(back, m))
    return [action for _, action in sorted(slots)]


@register(
    "po-h",
    facts=Facts(
        "arXiv 2503.01328, section 3.2",
        remark="by simulation",
        price="It waits longer than interleaved 1F1B, and half of its activations travel to the host and back.",
        used=USED,
    ),
)
def po_h(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in PO-H, which offloads half of its activations (Wan et al., arXiv 2503.01328).

    Microbatches start one by one at equal distances, so that what a chunk holds is as much as it holds it long. The
    half that is held longest is most of the memory: it goes to the host (O), and is loaded (L) for its backward.

    In a timeline: forwards and backwards of all chunks in turn, and copies beside those of the first chunks.
    """
    longest = [(chunk * ranks + rank, m) for chunk in range((chunks + 1) // 2) for m in range(microbatches)]
    yield from offloaded(_uniform(rank, ranks, microbatches, chunks), longest)


@register(
    "po-f",
    facts=Facts(
        "arXiv 2503.01328, section 3.2",
        remark="by simulation",
        price="Copies take at least 2/3 of the time of forwards and backwards if they take as long as a forward.",
        used=USED,
    ),
)
def po_f(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in PO-F, which offloads all activations (Wan et al., arXiv 2503.01328).

    It has the order of PO-H. A rank holds about four activations of single stages, however many stages there are. The
    ranks do not wait for the copies as long as these take no longer than the computations.

    In a timeline: PO-H with copies beside all chunks.
    """
    every = [(chunk * ranks + rank, m) for chunk in range(chunks) for m in range(microbatches)]
    yield from offloaded(_uniform(rank, ranks, microbatches, chunks), every)
