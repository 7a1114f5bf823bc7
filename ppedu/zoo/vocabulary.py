"""Vocabulary parallelism: all ranks share the head, whose work and weights would otherwise be the last stage's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ppedu.core import Action, B, F, Placement, Schedule, share_head
from ppedu.core.validate import require_count
from ppedu.zoo import Facts, register
from ppedu.zoo.v_shaped import v_adaptive

PAPER = "arXiv 2411.05288"
PRICE = "In each microbatch, all ranks wait for each other once, and so hold one microbatch more."
CODE = "github.com/sail-sg/VocabularyParallelism"


@register(
    "1f1b-vocab",
    facts=Facts(
        PAPER,
        remark="about (p-1)(F+B), as 1f1b",
        peak="min(p-r+1, m)",
        price=PRICE,
        used=f"Its authors' fork of Megatron-LM has it, with `--enable-vocab-parallel` ({CODE}).",
    ),
)
def one_f_one_b_vocab(rank: int, ranks: int, microbatches: int, barriers: int = 1) -> Iterator[Action]:
    """Yield the actions of `rank` in 1F1B with vocabulary parallelism (Yeung et al., arXiv 2411.05288).

    The head's weight is split over all ranks, and so is its work: S for the logits, T for the gradients. Between them,
    and before the last stage's backward, all ranks exchange sums. A warm-up that is longer by a microbatch for each of
    these barriers gives the sums their time, so ranks wait as long as in 1F1B. The peak of the activations is that of
    p + 1 microbatches with one barrier, and of p + 2 with two. The embedding stays on the first stage; the paper splits
    it, too.

    In a timeline: 1F1B with a thin S and T in each period, at about the same time on all ranks.

    Args:
        barriers: 1 for the paper's Vocab-2, in which S also computes the gradient of the head's input; 2 for its
            Vocab-1, in which T does.

    Raises:
        SettingError: There are neither 1 nor 2 barriers.
    """
    yield from _orders("loop", ranks, microbatches, require_count("barriers", barriers, most=2))[rank]


@register(
    "v-half-vocab",
    placement="v",
    chunks=2,
    facts=Facts(
        PAPER,
        remark="as v-half, or less",
        peak="(p+2)//2 + 1 if m >= p and p >= 4 and M_W == 1",
        price=PRICE,
        used="Its authors have it in a branch, `v-half-vocab` (github.com/sail-sg/zero-bubble-pipeline-parallelism).",
    ),
)
def v_half_vocab(rank: int, ranks: int, microbatches: int, barriers: int = 1) -> Iterator[Action]:
    """Yield the actions of `rank` in V-Half with vocabulary parallelism (Yeung et al., arXiv 2411.05288).

    See `1f1b-vocab`. In V-Half, all ranks hold equally many activations, and so they have equal memory in all.

    Args:
        barriers: As in `1f1b-vocab`; each takes a microbatch's activations.

    Raises:
        SettingError: There are neither 1 nor 2 barriers.
    """
    yield from _orders("v", ranks, microbatches, require_count("barriers", barriers, most=2))[rank]


def _ahead(rank: int, ranks: int, microbatches: int, ahead: int) -> Iterator[Action]:
    """Yield 1F1B with a warm-up that is longer by some microbatches."""
    warmup = min(ranks - rank - 1 + ahead, microbatches)
    yield from (F(rank, m) for m in range(warmup))
    for m in range(microbatches):
        if warmup + m < microbatches:
            yield F(rank, warmup + m)
        yield B(rank, m)


@lru_cache(maxsize=1)  # the orders of all ranks are requested one after another
def _orders(shape: str, ranks: int, microbatches: int, barriers: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's order in 1F1B, or in V-Half for the shape "v"."""
    if shape == "v":
        memory = (ranks + 2) // 2 + barriers
        orders = [tuple(v_adaptive(rank, ranks, microbatches, memory)) for rank in range(ranks)]
    else:
        orders = [tuple(_ahead(rank, ranks, microbatches, barriers)) for rank in range(ranks)]
    placement = Placement.make(shape, ranks, 2 if shape == "v" else 1)
    return share_head(Schedule("without", placement, microbatches, tuple(orders)), barriers).orders
