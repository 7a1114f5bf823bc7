"""Several chunks of the model on each rank: a smaller bubble, for more messages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from ppedu.core.actions import Action, B, F
from ppedu.core.errors import SettingError
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.validate import require_count
from ppedu.zoo.registry import register


def rounds(ranks: int, microbatches: int) -> list[range]:
    """The microbatches in groups, each of which goes through one chunk before the next: `ranks` or a few more.

    There are as many groups as `ranks` fits into `microbatches`; they share the microbatches as evenly as possible.
    """
    number = max(1, microbatches // ranks)
    size, more = divmod(microbatches, number)
    starts = [place * size + min(place, more) for place in range(number + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def depth_first(rank: int, ranks: int, chunks: int, groups: list[range]) -> tuple[list[Action], list[Action]]:
    """A rank's forwards and its backwards, each in its order: a group through every chunk, then the next group."""
    forwards = [F(chunk * ranks + rank, m) for each in groups for chunk in range(chunks) for m in each]
    backwards = [B(chunk * ranks + rank, m) for each in groups for chunk in reversed(range(chunks)) for m in each]
    return forwards, backwards


@register("interleaved")
def interleaved(
    rank: int, ranks: int, microbatches: int, chunks: int = 2, group: int | None = None
) -> Iterator[Action]:
    """1F1B over stages that are dealt out in turn, depth first (Narayanan et al., arXiv 2104.04473, §2.2).

    A group of microbatches runs through a rank's first chunk, then through its second, and so on; then the
    next group. The bubble is that of 1F1B divided by `chunks`. `group` fixes the size of the groups, the last
    one may be smaller, as Megatron does; it is refused where the ranks would wait for each other for ever. With one
    chunk this is 1F1B with twice the warm-up: more activations, and more of the latency is hidden.
    Picture: 1F1B with a finer, longer warm-up; each microbatch comes by `chunks` times.
    """
    if group is None:
        groups = rounds(ranks, microbatches)
    else:
        groups = _fixed(ranks, microbatches, chunks, require_count("group", group))
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
def _fixed(ranks: int, microbatches: int, chunks: int, group: int) -> list[range]:
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


@register("looped-bfs")
def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """All microbatches through one chunk, then through the next (Lamy-Poirier, breadth-first, arXiv 2211.05953).

    The bubble of interleaved 1F1B with the memory of GPipe: weights of a chunk are needed in one go, which
    suits sharded weights. Backwards run last microbatch first. Picture: GPipe, `chunks` times over.
    """
    for chunk in range(chunks):
        for m in range(microbatches):
            yield F(chunk * ranks + rank, m)
    for chunk in reversed(range(chunks)):
        for m in reversed(range(microbatches)):
            yield B(chunk * ranks + rank, m)
