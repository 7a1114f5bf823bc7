"""Mario: 1F1B that recomputes its activations in the bubble."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, B, F, R
from ppedu.zoo import Facts, register


@register(
    "mario",
    facts=Facts(
        "doi.org/10.1145/3710848.3710878, after its abstract; formulas by simulation",
        makespan="m*(2*F+B) + (p-2)*(F+B+2*c) + max(0, B+2*c-2*F) if p >= 2 and m >= 3 and 2*c <= 2*F+B",
        peak="1 + min(2*(p-r-1), m-1)*S",
        price="All ranks but the last run every forward twice.",
        used=(
            "torchgpipe recomputes before the gradient arrives (github.com/kakaobrain/torchgpipe), as does MindSpeed "
            "with `--recompute-in-advance` (gitcode.com/Ascend/MindSpeed)."
        ),
    ),
)
def mario(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in 1F1B with activation checkpointing in the bubble (Liu et al., PPoPP 2025, Mario).

    A rank keeps the input of each microbatch, and runs its forward again (R) just before its backward. R does not wait
    for the gradient, so it fills the bubble. The last rank needs none: its backwards follow their forwards. Inputs are
    small, so the warm-up can be twice that of 1F1B, as in ZB-H2, which leaves the least bubble and hides messages.

    In a timeline: 1F1B with a longer warm-up, and an R before each backward but on the last rank.
    """
    warmup = min(2 * (ranks - rank - 1), microbatches)
    yield from (F(rank, m) for m in range(warmup))
    for m in range(microbatches):
        if warmup + m < microbatches:
            yield F(rank, warmup + m)
        if rank < ranks - 1:
            yield R(rank, m)
        yield B(rank, m)
