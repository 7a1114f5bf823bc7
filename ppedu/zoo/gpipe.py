"""The schedules before 1F1B: one microbatch at a time, and all forwards before all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, B, F
from ppedu.zoo import Facts, register


@register(
    "naive",
    facts=Facts(
        "arXiv 1811.06965, figure 2",
        idle="(p-1)*m*(F+B)",
        hops="2*m*(p-1)",
        peak="1",
        price="Only one rank works at a time, so all of them together take as long as one would alone.",
        used=(
            "Hugging Face Accelerate runs a model that is spread over several GPUs this way, for inference "
            "(github.com/huggingface/accelerate)."
        ),
    ),
)
def naive(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` when each microbatch runs forward and backward before the next one starts.

    Only one rank works at any time.

    In a timeline: a V for each microbatch, one after the other.
    """
    for m in range(microbatches):
        yield F(rank, m)
        yield B(rank, m)


@register(
    "gpipe",
    facts=Facts(
        "arXiv 1811.06965",
        idle="(p-1)*(F+B)",
        hops="2*(p-1)",
        peak="m",
        price="Every rank keeps the activations of all microbatches.",
        used=(
            "PyTorch has it as `ScheduleGPipe` (github.com/pytorch/pytorch); torchgpipe is built around it "
            "(github.com/kakaobrain/torchgpipe)."
        ),
    ),
)
def gpipe(rank: int, ranks: int, microbatches: int, lifo: bool = False) -> Iterator[Action]:
    """Yield the actions of `rank` in GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965).

    The ranks work at the same time, each one microbatch behind the rank before it. Every rank keeps the activations of
    all microbatches.

    In a timeline: a slanted block of forwards, then its mirror image of backwards.

    Args:
        lifo: Run the backwards in reverse order, last microbatch first, as in the paper's figure.
    """
    for m in range(microbatches):
        yield F(rank, m)
    backwards = range(microbatches)
    for m in reversed(backwards) if lifo else backwards:
        yield B(rank, m)
