"""The smallest part of a schedule that fails as the whole does: a deadlock of 64 ranks often needs two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from ppedu.core import Action, Op, Placement, Schedule, SettingError
from ppedu.core.actions import COMMUNICATION, overlap
from ppedu.core.schedule import require_schedule
from ppedu.sim.verify import problems_of

MOST = 3_000_000  # actions of all parts that are checked, together: some seconds


def shrink(schedule: Schedule, *, transport: str = "buffered") -> Schedule:
    """Return the smallest part found of an illegal schedule with a problem of the same kind.

        pp.shrink(schedule, transport="rendezvous")

    It leaves out half of the microbatches or of the stages, then fewer at a time, as long as the problem stays (delta
    debugging: Zeller and Hildebrandt, IEEE TSE 28(2), 2002). What is left is numbered from 0. No single microbatch or
    stage can be left out of it, unless the search would take more than some seconds.

    Args:
        transport: As in `ppedu.verify`. A schedule without messages that only fails with those of `lower` gets them.

    Raises:
        SettingError: The schedule is legal for this transport, or an argument is not possible.
    """
    require_schedule("shrink", schedule)
    whole, problems = problems_of(schedule, transport)
    if not problems:
        raise SettingError(f"{schedule!r} is legal for the transport {transport!r}; there is nothing to look for")
    kind, left = problems[0].kind, MOST

    def fails(stages: Sequence[int], microbatches: Sequence[int]) -> bool:
        nonlocal left
        if left < 0 or not _may_be_cut(whole.placement, whole.lowered, stages):
            return False
        part = _part(whole, stages, microbatches)
        left -= sum(map(len, part.orders))
        return any(problem.kind == kind for problem in problems_of(part, transport)[1])

    stages, microbatches = [*range(whole.stages)], [*range(whole.microbatches)]
    before = None
    while before != (stages, microbatches):
        before = stages, microbatches
        microbatches = _fewest(microbatches, partial(fails, stages))
        stages = _fewest(stages, partial(fails, microbatches=microbatches))
    nothing = (len(stages), len(microbatches)) == (whole.stages, whole.microbatches)  # was left out
    return whole if nothing else _part(whole, stages, microbatches)


def _fewest(items: list[int], fail: Callable[[list[int]], bool]) -> list[int]:
    """Return items of which none can be left out, so that they still fail."""
    size = len(items) // 2
    while size:
        place = 0
        while place < len(items):
            fewer = items[:place] + items[place + size :]
            if fewer and fail(fewer):
                items = fewer
            else:
                place += size
        size //= 2
    return items


def _may_be_cut(placement: Placement, lowered: bool, stages: Sequence[int]) -> bool:
    """Return whether messages still go to another rank: from each stage to the next that is left."""
    return not lowered or all(
        holders[stage] != holders[after]
        for holders in placement.holders
        for stage, after in pairwise(stages)
        if after != stage + 1
    )


def _part(schedule: Schedule, stages: Sequence[int], microbatches: Sequence[int]) -> Schedule:
    """Return the schedule with these stages and microbatches alone, on the ranks that run them."""
    copies = sorted({schedule.placement.copy(microbatch) for microbatch in microbatches})
    holders = [[schedule.placement.holders[copy][stage] for stage in stages] for copy in copies]
    ranks = sorted({rank for copy in holders for rank in copy})
    rows = tuple(tuple(ranks.index(rank) for rank in copy) for copy in holders)
    name = "loop" if rows == (tuple(range(len(ranks))),) else "custom"
    first = sum(schedule.placement.copy(microbatch) == copies[0] for microbatch in microbatches)
    placement = Placement(name, len(ranks), rows, first if len(rows) > 1 else 0)
    of_stage = {stage: number for number, stage in enumerate(stages)}
    of_microbatch = {microbatch: number for number, microbatch in enumerate(microbatches)} | {-1: -1}
    outside = {(stages[0], Op.RECV_F), (stages[0], Op.SEND_B), (stages[-1], Op.SEND_F), (stages[-1], Op.RECV_B)}

    def kept(action: Action) -> Iterator[Action]:
        singles = [
            Action(of_stage[stage], op, of_microbatch[microbatch])
            for stage, op, microbatch, _ in action.singles
            if stage in of_stage and microbatch in of_microbatch
            if op not in COMMUNICATION or (stage, op) not in outside
        ]
        yield from [overlap(*singles)] if len(singles) == 2 else singles

    orders = tuple(tuple(each for action in schedule.orders[rank] for each in kept(action)) for rank in ranks)
    return Schedule(schedule.name, placement, len(microbatches), orders, schedule.forward_only)
