"""The smallest part of a schedule that fails as the whole does: a deadlock of 64 ranks often needs two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TypeVar

from ppedu.core import Action, Op, Placement, Schedule, SettingError
from ppedu.core.actions import SHARDING, WAITS, batch, overlap
from ppedu.core.schedule import require_schedule
from ppedu.sim.verify import problems_of

MOST = 3_000_000  # actions of all parts that are checked, together: some seconds
Item = TypeVar("Item")
SHOWN = 6  # numbers of stages or microbatches in the name of a part


def shrink(schedule: Schedule, *, transport: str = "buffered", buffers: int | None = None) -> Schedule:
    """Return the smallest part found of an illegal schedule with a problem of the same kind.

        pp.shrink(schedule, transport="rendezvous")

    It leaves out half of the microbatches or of the stages, then fewer at a time, as long as the problem stays and no
    other kind comes up (delta debugging: Zeller and Hildebrandt, IEEE TSE 28(2), 2002). No single microbatch or stage
    can be left out of the part, unless the search would take more than some seconds. Its stages and microbatches are
    numbered from 0; its name has the numbers that they had.

    Args:
        transport, buffers: As in `ppedu.verify`. A schedule without messages that only fails with those of `lower`
            gets them.

    Raises:
        SettingError: The schedule is legal for these, or an argument is not possible.
    """
    require_schedule("shrink", schedule)
    whole, problems = problems_of(schedule, transport, buffers)
    if not problems:
        what = f"the transport {transport!r}" + (f" and buffers={buffers}" if buffers is not None else "")
        raise SettingError(f"{schedule!r} is legal for {what}; there is nothing to look for")
    kind, kinds, left = problems[0].kind, {problem.kind for problem in problems}, MOST

    def fails(stages: Sequence[int], microbatches: Sequence[int]) -> bool:
        nonlocal left
        if left < 0 or not _may_be_cut(whole.placement, whole.lowered, stages):
            return False
        part = _part(whole, stages, microbatches)
        left -= sum(map(len, part.orders))
        found = {problem.kind for problem in problems_of(part, transport, buffers)[1]}
        return kind in found and found <= kinds

    def fails_in_groups(groups: Sequence[Sequence[int]], microbatches: Sequence[int]) -> bool:
        return fails(sorted(chain(*groups)), microbatches)

    stages, microbatches = [*range(whole.stages)], [*range(whole.microbatches // whole.slices)]
    home = whole.placement.holders[0]
    if kind == "buffer":  # most are those of one stage, or of it and its neighbors on the rank
        first = problems[0].action.stage
        near = [stage for stage in stages[max(0, first - 1) : first + 2] if home[stage] == home[first]]
        stages = next((some for some in ([first], near) if fails(some, microbatches)), stages)
    before = None
    while before != (stages, microbatches):
        before = stages, microbatches
        microbatches = _fewest(microbatches, partial(fails, stages))
        groups = [[stage for stage in stages if home[stage] == rank] for rank in sorted({home[s] for s in stages})]
        groups = _fewest(groups, partial(fails_in_groups, microbatches=microbatches))  # a V stays one without a rank
        stages = _fewest(sorted(chain(*groups)), partial(fails, microbatches=microbatches))
    nothing = (len(stages), len(microbatches) * whole.slices) == (whole.stages, whole.microbatches)  # was left out
    return whole if nothing else _part(whole, stages, microbatches)


def _fewest(items: list[Item], fail: Callable[[list[Item]], bool]) -> list[Item]:
    """Return items of which none can be left out, so that they still fail. The last are left out first."""
    size = len(items) // 2
    while size:
        end = len(items)
        while end > 0:
            fewer = items[: max(0, end - size)] + items[end:]
            if fewer and fail(fewer):
                items = fewer
            end -= size
        size //= 2
    return items


def _may_be_cut(placement: Placement, lowered: bool, stages: Sequence[int]) -> bool:
    """Return whether messages still go to another rank: from each stage to the next that is left."""
    return not lowered or all(
        holders[stage] != holders[after]
        for holders in (*placement.holders, *placement.homes)
        for stage, after in pairwise(stages)
        if after != stage + 1
    )


def _part(schedule: Schedule, stages: Sequence[int], microbatches: Sequence[int]) -> Schedule:
    """Return the schedule with these stages and microbatches alone, on the ranks that run them."""
    slices = schedule.slices
    numbers = [number for first in microbatches for number in range(first * slices, (first + 1) * slices)]
    copies = sorted({schedule.placement.copy(number) for number in numbers})
    holders = [[schedule.placement.holders[copy][stage] for stage in stages] for copy in copies]
    backwards = [schedule.placement.homes[0][stage] for stage in stages] if schedule.placement.backwards else []
    ranks = sorted({rank for copy in (*holders, backwards) for rank in copy})
    *rows, back = (tuple(ranks.index(rank) for rank in copy) for copy in (*holders, backwards))
    shape = "loop" if rows == [tuple(range(len(ranks)))] and not back else "custom"
    first = sum(schedule.placement.copy(number) == copies[0] for number in numbers)
    placement = Placement(shape, len(ranks), tuple(rows), first if len(rows) > 1 else 0, slices, backwards=back)
    outside = set()  # messages to stages that are left out
    if stages[0] > 0:
        outside |= {(stages[0], Op.RECV_F), (stages[0], Op.SEND_B)}
    if stages[-1] < schedule.stages - 1:
        outside |= {(stages[-1], Op.SEND_F), (stages[-1], Op.RECV_B)}

    lost = {(copy[stage], stage) for copy in schedule.placement.holders for stage in stages}  # with a copy left out
    lost -= {(rank, stage) for copy in holders for rank, stage in zip(copy, stages, strict=True)}
    of_stage, of_microbatch = _renumbered(stages, schedule.stages), _renumbered(numbers, schedule.microbatches)

    def kept(action: Action, rank: int) -> Iterator[Action]:
        singles = []
        for stage, op, microbatch, _ in action.singles:
            here, number = of_stage(stage), -1 if op in SHARDING else of_microbatch(microbatch)
            if here is None or number is None or (stage, WAITS.get(op, op)) in outside:
                continue
            if op in SHARDING and (rank, stage) in lost:
                continue
            singles.append(Action(here, op, number))
        if action.op is Op.BATCH_P2P:
            yield from [batch(singles)] if singles else []
        else:
            yield from [overlap(*singles)] if len(singles) == 2 else singles

    # Most actions are of a microbatch that is left out, and `kept` is slower. The microbatch of pairs and of sharding
    # is -1.
    gone = {*range(schedule.microbatches)} - {*numbers}
    orders = tuple(
        tuple(each for action in schedule.orders[rank] if action.microbatch not in gone for each in kept(action, rank))
        for rank in ranks
    )
    name = f"{schedule.name}: stages {_listed(stages)}; microbatches {_listed(microbatches)}"
    return Schedule(name, placement, len(numbers), orders, schedule.forward_only)


def _renumbered(kept: Sequence[int], count: int) -> Callable[[int], int | None]:
    """Return a function from old numbers to new ones; None if left out. Numbers beyond the end stay beyond it."""
    new = {old: number for number, old in enumerate(kept)}
    return lambda old: old - count + len(kept) if old >= count else new.get(old)


def _listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more
