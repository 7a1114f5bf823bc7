"""GEMS, Chimera and BitPipe: two copies of the model in opposite directions, in turns or at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppedu.core import Action, B, F
from ppedu.zoo import Facts, register, require_even


@register(
    "gems",
    placement="bidirectional",
    facts=Facts(
        "doi.org/10.1109/SC41405.2020.00049; by simulation",
        idle="(p-1)*(F+m*B) if F <= B",
        idle_in_span="(p-1)*(m*B + F*(m % 2))",
        peak="1",
        price="Every rank holds the weights of two stages, and waits almost as long as in the naive schedule.",
        used="Its authors' library for training on large images has it (github.com/OSU-Nowlab/MPI4DL).",
    ),
)
def gems(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in GEMS: microbatches alternate between two copies of the model (Jain et al., 2020).

    One copy has its first stage on rank 0, the other on the last rank. The first half of the microbatches goes down the
    ranks through the former, the second half up through the latter. The forwards of a microbatch start during the
    backwards of the one before. A rank holds the weights of two stages, and the activations of one microbatch at a
    time. Its idle time is slightly shorter than in the naive schedule.

    In a timeline: the Vs of the naive schedule, every other one upside down, slightly closer together.
    """
    half = microbatches - microbatches // 2
    for i in range(half):
        yield F(rank, i)
        yield B(rank, i)
        if half + i < microbatches:
            yield F(ranks - 1 - rank, half + i)
            yield B(ranks - 1 - rank, half + i)


@register(
    "chimera",
    placement="bidirectional",
    facts=Facts(
        "arXiv 2107.06925, table 2",
        idle="(p/2-1)*(F+B) if m % p == 0 and F == B",
        sizes=("p % 2 == 0", "m % 2 == 0"),
        peak="p/2+1+min(r, p-1-r) if m >= p",
        price="Every rank holds the weights of two stages, and the activations of p/2+1 to p microbatches.",
        used="Its authors published the code with which they trained BERT and GPT-2 (github.com/Shigangli/Chimera).",
    ),
)
def chimera(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in Chimera: half of the microbatches go down the ranks, half up (arXiv 2107.06925).

    There are two copies of the model in opposite directions (Li and Hoefler, §3), so a rank holds the weights of two
    stages. Time is divided into slots, each for a forward or a backward. Let p be the ranks and m the microbatches. A
    unit is p/2 microbatches in each direction, started two slots apart; no two of its actions need the same slot of a
    rank. Units follow each other 2p slots apart. If a forward takes as long as a backward and p divides m, the idle
    share of the time is (p-2)/(2m+p-2). A rank holds the activations of p/2+1 to p microbatches.

    In a timeline: two sets of slanted lines, woven together.

    Raises:
        SettingError: The number of ranks or of microbatches is odd.
    """
    require_even("chimera", "ranks", ranks)
    require_even("chimera", "microbatches", microbatches)
    yield from _woven(microbatches, ranks, ranks, ([rank], [ranks - 1 - rank]))


@register(
    "bitpipe",
    placement="bidirectional",
    chunks=2,
    facts=Facts(
        "arXiv 2410.19367, figure 2, for p microbatches; more by simulation",
        idle="(p/2-1)*(B+(m/p-1)*(B-F)) if m % p == 0 and F <= B",
        sizes=("p % 2 == 0", "m % 2 == 0"),
        peak="3*p/4+1/2+min(r, p-1-r)/2 if m >= p",
        price="Every rank holds the weights of four stages, twice its share of the model, and sends twice as often.",
        used="Its authors trained GPT and BERT with it, in a fork of Megatron-LM (github.com/wuhouming/BitPipe).",
    ),
)
def bitpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in BitPipe: Chimera with a V in each direction (Wu et al., arXiv 2410.19367).

    Each copy of the model is a V, so a rank holds two stages of each. Units of p microbatches follow each other, as in
    `chimera`, with slots for half as much work. With p microbatches, each rank waits for (p/2-1)B, half as long as in
    Chimera if F = B. The paper's bubble for more, (p-2)/(3m+p-2), assumes that further units add no idle time. They add
    (p/2-1)(B-F) each, and in the paper's own figure of two units on 4 ranks it is half of that: there, two forwards of
    the second unit start before the last backward of the first.

    In a timeline: two sets of Vs, one upside down, woven together.

    Raises:
        SettingError: The number of ranks or of microbatches is odd.
    """
    require_even("bitpipe", "ranks", ranks)
    require_even("bitpipe", "microbatches", microbatches)
    last = 2 * ranks - 1
    yield from _woven(microbatches, ranks, 2 * ranks, ([rank, last - rank], [ranks - 1 - rank, ranks + rank]))


def _woven(microbatches: int, ranks: int, stages: int, held: Sequence[Sequence[int]]) -> Iterator[Action]:
    """Yield a rank's actions in the order of their slots. It holds the stages `held` of each copy, down and up."""
    half = microbatches // 2
    slots = []
    for copy, own in enumerate(held):
        for i in range(half):
            unit, position = divmod(i, ranks // 2)
            start = 2 * stages * unit + 2 * position  # the slot in which stage 0 runs the forward
            for stage in own:
                slots.append((start + stage, F(stage, half * copy + i)))
                slots.append((start + 2 * stages - 1 - stage, B(stage, half * copy + i)))
    yield from (action for _, action in sorted(slots))
