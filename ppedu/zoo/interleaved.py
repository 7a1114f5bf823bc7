"""Several chunks of the model on each rank: a smaller bubble for more messages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise

from ppedu.core import Action, B, F, Placement, Schedule, SettingError
from ppedu.core.validate import require_count
from ppedu.zoo import Facts, register


def equal_groups(ranks: int, microbatches: int) -> list[range]:
    """Return consecutive groups of equal or nearly equal size: at least `ranks` microbatches each, if there are enough.

    13 microbatches on 4 ranks make groups of 5, 4 and 4; 7 make a single group.
    """
    number = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, number)
    starts = [group * size + min(group, larger) for group in range(number + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def depth_first(
    rank: int, ranks: int, chunks: int, groups: list[range], warmup: int
) -> Iterator[tuple[Action] | tuple[Action, Action]]:
    """Yield the forwards of the warm-up, then each forward with a backward, then the backwards of the cooldown.

    Each group of microbatches passes through every chunk on a rank before the next group follows. With one chunk the
    warm-up has `warmup` forwards; each further chunk adds those of one group. On rank 0 of 2, with 2 chunks, a group of
    2 microbatches and `warmup` 1, the steps are (0F0) (0F1) (2F0), then (2F1, 2B0), then (2B1) (0B0) (0B1).
    """
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    forwards = [F(stage, m) for group in groups for stage in stages for m in group]
    backwards = [B(stage, m) for group in groups for stage in reversed(stages) for m in group]
    warmup = min(warmup + (chunks - 1) * len(groups[0]), len(forwards))
    steady = len(forwards) - warmup
    for forward in forwards[:warmup]:
        yield (forward,)
    yield from zip(forwards[warmup:], backwards[:steady], strict=True)
    for backward in backwards[steady:]:  # cooldown
        yield (backward,)


@register(
    "interleaved",
    facts=Facts(
        "arXiv 2104.04473, §2.2",
        idle="(p-1)*(F+B)/v if m >= p",
        peak="min(p*v+p-1-2*r, m*v)/v if m % p == 0",
        price="It sends about v times as many messages as 1F1B, and its longer warm-up holds more activations.",
        used=(
            "Llama 3 405B was trained with a variant (arXiv 2407.21783, §3.3.2); Megatron-LM has it, and PyTorch as "
            "`ScheduleInterleaved1F1B` (github.com/pytorch/pytorch)."
        ),
    ),
)
def interleaved(
    rank: int, ranks: int, microbatches: int, chunks: int = 2, group: int | None = None
) -> Iterator[Action]:
    """Yield the actions of `rank` in interleaved 1F1B: several stages on each rank (arXiv 2104.04473, §2.2).

    A group of microbatches passes through a rank's first stage, then through its second, and so on; then the next group
    follows (Narayanan et al.). The idle time is that of 1F1B divided by `chunks`. With one chunk this is 1F1B with
    twice the warm-up, which holds more activations and hides more of the latency.

    In a timeline: 1F1B with a finer, longer warm-up; each microbatch visits a rank `chunks` times.

    Args:
        group: The microbatches in each group but the last, which may be smaller, as in Megatron. By default those of
            `equal_groups`.

    Raises:
        SettingError: With groups of this size the ranks would deadlock.
    """
    groups = equal_groups(ranks, microbatches)
    if group is not None:
        groups = _fixed_groups(ranks, microbatches, chunks, require_count("group", group))
    yield from _interleaved(rank, ranks, chunks, groups)


def _interleaved(rank: int, ranks: int, chunks: int, groups: list[range]) -> Iterator[Action]:
    """Return the actions of `rank` in interleaved 1F1B with these groups of microbatches."""
    return chain.from_iterable(depth_first(rank, ranks, chunks, groups, warmup=2 * (ranks - 1 - rank)))


@cache
def _fixed_groups(ranks: int, microbatches: int, chunks: int, group: int) -> list[range]:
    """Return groups of `group` microbatches. Raise SettingError if the ranks then deadlock."""
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    orders = tuple(tuple(_interleaved(rank, ranks, chunks, groups)) for rank in range(ranks))
    trial = Schedule("interleaved", Placement.make("loop", ranks, chunks), microbatches, orders)
    if trial.problems:
        advice = f"group={ranks} or more" if group < ranks else f"a multiple of {group} microbatches"
        raise SettingError(
            f"interleaved with group={group} cannot run {microbatches} microbatches on {ranks} ranks with {chunks} "
            f"chunks ({trial.problems[0]}); leave group out, or take {advice}"
        )
    return groups


@register(
    "looped-bfs",
    facts=Facts(
        "arXiv 2211.05953",
        idle="(p-1)*(F+B)/v if m >= p",
        peak="m",
        price="It sends about v times as many messages as GPipe, and holds as many activations.",
        used="PyTorch has it as `ScheduleLoopedBFS` (github.com/pytorch/pytorch).",
    ),
)
def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of `rank` in looped BFS: all microbatches pass one stage, then the next (arXiv 2211.05953).

    It is breadth first (Lamy-Poirier), with the idle time of interleaved 1F1B and the memory of GPipe. Each stage's
    weights are used without interruption, which suits sharded weights. Backwards run in the reverse order of the
    forwards.

    In a timeline: GPipe, `chunks` times over.
    """
    forwards = [F(chunk * ranks + rank, m) for chunk in range(chunks) for m in range(microbatches)]
    yield from forwards
    for forward in reversed(forwards):
        yield B(forward.stage, forward.microbatch)
