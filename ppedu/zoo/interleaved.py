"""Several chunks of the model on each rank: a smaller bubble for more messages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from ppedu.core.actions import Action, B, F
from ppedu.core.errors import SettingError
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.validate import require_count
from ppedu.zoo import Facts, register


def equal_groups(ranks: int, microbatches: int) -> list[range]:
    """Split the microbatches into groups of `ranks` or slightly more, as equal in size as possible."""
    number = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, number)
    starts = [group * size + min(group, larger) for group in range(number + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def depth_first(rank: int, ranks: int, chunks: int, groups: list[range]) -> tuple[list[Action], list[Action]]:
    """Return a rank's forwards and its backwards: each group passes through every chunk before the next group."""
    forwards = [F(chunk * ranks + rank, m) for group in groups for chunk in range(chunks) for m in group]
    backwards = [B(chunk * ranks + rank, m) for group in groups for chunk in reversed(range(chunks)) for m in group]
    return forwards, backwards


@register(
    "interleaved",
    facts=Facts("arXiv 2104.04473, §2.2", idle="(p-1)*(F+B)/v if m >= p", peak="min(p*v+p-1-2*r, m*v)/v if m % p == 0"),
)
def interleaved(
    rank: int, ranks: int, microbatches: int, chunks: int = 2, group: int | None = None
) -> Iterator[Action]:
    """Run 1F1B over several chunks on each rank, depth first (Narayanan et al., arXiv 2104.04473, §2.2).

    A group of microbatches passes through a rank's first chunk, then through its second, and so on; then the next group
    follows. The bubble is that of 1F1B divided by `chunks`. With one chunk this is 1F1B with twice the warm-up, which
    holds more activations and hides more of the latency.

    group: microbatches in each group but the last, which may be smaller, as in Megatron. By default the groups have
        `ranks` microbatches or slightly more. A size with which the ranks would deadlock is refused.

    Picture: 1F1B with a finer, longer warm-up; each microbatch visits a rank `chunks` times.
    """
    groups = equal_groups(ranks, microbatches)
    if group is not None:
        groups = _fixed_groups(ranks, microbatches, chunks, require_count("group", group))
    yield from _one_f_one_b(rank, ranks, chunks, groups)


def _one_f_one_b(rank: int, ranks: int, chunks: int, groups: list[range]) -> Iterator[Action]:
    forwards, backwards = depth_first(rank, ranks, chunks, groups)
    warmup = min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


@cache
def _fixed_groups(ranks: int, microbatches: int, chunks: int, group: int) -> list[range]:
    """Split the microbatches into groups of `group`. Raise SettingError if the schedule then deadlocks."""
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    orders = tuple(tuple(_one_f_one_b(rank, ranks, chunks, groups)) for rank in range(ranks))
    trial = Schedule("interleaved", Placement.make("loop", ranks, chunks), microbatches, orders)
    if trial.problems:
        advice = f"group={ranks} or more" if group < ranks else f"a multiple of {group} microbatches"
        raise SettingError(
            f"interleaved with group={group} cannot run {microbatches} microbatches on {ranks} ranks with {chunks} "
            f"chunks ({trial.problems[0]}); leave group out, or take {advice}"
        )
    return groups


@register("looped-bfs", facts=Facts("arXiv 2211.05953", idle="(p-1)*(F+B)/v if m >= p", peak="m"))
def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Run all microbatches through one chunk, then through the next: breadth first (Lamy-Poirier, arXiv 2211.05953).

    It has the bubble of interleaved 1F1B and the memory of GPipe. Each chunk's weights are used without interruption,
    which suits sharded weights. Backwards run in reverse order, last microbatch first.

    Picture: GPipe, `chunks` times over.
    """
    for chunk in range(chunks):
        for m in range(microbatches):
            yield F(chunk * ranks + rank, m)
    for chunk in reversed(range(chunks)):
        for m in reversed(range(microbatches)):
            yield B(chunk * ranks + rank, m)
