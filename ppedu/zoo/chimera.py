"""GEMS and Chimera: two copies of the model in opposite directions, used one after the other or at the same time."""

from __future__ import annotations

from collections.abc import Iterator

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
    half = microbatches // 2
    slots = []  # actions, each with its slot
    for first, stage in ((0, rank), (half, ranks - 1 - rank)):  # down, then up
        for i in range(half):
            unit, position = divmod(i, ranks // 2)
            start = 2 * ranks * unit + 2 * position  # the slot in which stage 0 runs the forward
            slots.append((start + stage, F(stage, first + i)))
            slots.append((start + 2 * ranks - 1 - stage, B(stage, first + i)))
    yield from (action for _, action in sorted(slots))
