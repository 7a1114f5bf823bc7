"""PipeDream and PipeDream-2BW: 1F1B that does not wait for a step's end, with gradients of older weights."""

from __future__ import annotations

from collections.abc import Iterator

from ppedu.core import Action, Op, SettingError, U
from ppedu.core.validate import require_count
from ppedu.zoo import Facts, register
from ppedu.zoo.one_f_one_b import one_f_one_b


@register(
    "pipedream",
    facts=Facts(
        "arXiv 1806.03377; doi.org/10.1145/3341301.3359646",
        idle="(p-1)*(F+B)",
        hops="2*(p-1 + (m-1)*(p-1)//p)",
        peak="min(p-r, m)",
        price="Rank r holds p-r versions of its weights, and its gradients are p-r-1 updates old.",
        used="Its authors' code is public (github.com/msr-fiddle/pipedream).",
    ),
)
def pipedream(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in PipeDream: 1F1B with updates in between (Harlap et al., arXiv 1806.03377).

    A rank updates its weights after each backward. It never waits for the end of a batch, so the bubble is paid once in
    a training, and not once a step: simulate many microbatches. The price is staleness: between the forward of a
    microbatch and its backward, `ranks - rank` - 1 updates change the weights. The rank keeps those of the forward for
    the backward (weight stashing); see `ppedu.versions`.

    In a timeline: 1F1B with an update after each backward.
    """
    for action in one_f_one_b(rank, ranks, microbatches):
        yield action
        if action.op is Op.B:
            yield U(rank, action.microbatch)


@register(
    "pipedream-2bw",
    facts=Facts(
        "arXiv 2006.09503",
        idle="(p-1)*(F+B)",
        hops="2*(p-1 + (m-1)*(p-1)//p)",
        peak="min(p-r, m)",
        price="A rank holds two versions of its weights, and gradients are one update old.",
        used="Its authors' code is a branch of PipeDream's (github.com/msr-fiddle/pipedream).",
    ),
)
def pipedream_2bw(rank: int, ranks: int, microbatches: int, batch: int | None = None) -> Iterator[Action]:
    """Yield the actions of `rank` in PipeDream-2BW: an update for each `batch` (Narayanan et al., arXiv 2006.09503).

    Microbatches of batch t use, on every rank, the weights after t - 1 updates, those of the first two batches the
    initial ones. So all gradients are one update old, and two versions are enough ("double-buffered weight update").
    The paper updates after a batch's last backward, and lets the weights wait; here the update waits until the next
    batch has no forward left, which gives every microbatch the same weights.

    In a timeline: 1F1B with an update in each rank's last forward-backward pair of a batch.

    Args:
        batch: The microbatches of an update, at least `ranks`; by default as many.

    Raises:
        SettingError: `batch` is too small: when its forwards are through, the gradients of the one before are not.
    """
    batch = ranks if batch is None else require_count("batch", batch)
    if batch < ranks:
        raise SettingError(f"pipedream-2bw needs at least {ranks} microbatches a batch, one for each rank; got {batch}")
    ends = [*range(batch - 1, microbatches - 1, batch), microbatches - 1]
    for action in one_f_one_b(rank, ranks, microbatches):
        yield action
        if action.op is Op.F and action.microbatch - batch in ends:
            yield U(rank, action.microbatch - batch)
    yield from (U(rank, end) for end in ends if end + batch >= microbatches)
