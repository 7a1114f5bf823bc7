"""Several training steps in a row, as one schedule and as one timeline.

Step k of a schedule with m microbatches has microbatches of its own: those from k · m on. If there are two copies of
the model, those of the first copy, of all steps, are numbered before those of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from ppedu.core import Action, Schedule
from ppedu.sim.costs import TIMES, Costs
from ppedu.sim.rows import Span
from ppedu.sim.timeline import Timeline


def repeat(schedule: Schedule, steps: int) -> Schedule:
    """Return the schedule in which every rank runs its order `steps` times, and waits for no other rank in between."""
    numbers = [_numbers(schedule, steps, step) for step in range(steps)]
    orders = []
    for order in schedule.orders:
        orders.append(tuple(_renumbered(action, of_step) for of_step in numbers for action in order))
    placement = replace(schedule.placement, split=schedule.placement.split * steps)
    return replace(schedule, placement=placement, microbatches=schedule.microbatches * steps, orders=tuple(orders))


def repeat_costs(costs: Costs, schedule: Schedule, steps: int) -> Costs:
    """Return costs of `repeat(schedule, steps)`: in each step, a microbatch has the times that it has in `costs`.

    Functions must be tabulated.
    """
    original = [0] * (schedule.microbatches * steps)  # for each microbatch of the repeated schedule, that of `schedule`
    for step in range(steps):
        for microbatch, number in enumerate(_numbers(schedule, steps, step)):
            original[number] = microbatch
    size = schedule.stages, schedule.ranks, schedule.microbatches
    return _by_stage(costs, lambda cost: costs.per_stage(cost, *size), original)


def _by_stage(costs: Costs, stages: Callable[[Any], Iterable[Any]], microbatches: Sequence[int]) -> Costs:
    """Return costs with only these microbatches, in this order, where times or sizes vary by microbatch.

    Args:
        stages: Returns the cost of each stage.
    """
    tables: dict[str, Any] = {}
    for name in (*TIMES, "activation", "stage_input"):
        cost = getattr(costs, name)
        if isinstance(cost, tuple):
            tables[name] = [
                tuple(each[m] for m in microbatches) if isinstance(each, tuple) else each for each in stages(cost)
            ]
    return replace(costs, **tables)


def _numbers(schedule: Schedule, steps: int, step: int) -> list[int]:
    """Return, for each microbatch of `schedule`, its number in one step of `repeat(schedule, steps)`.

    For 4 microbatches and 2 steps, step 1 has 4, 5, 6, 7; with two copies of the model, 2 and 3 in the first copy, 6
    and 7 in the second.
    """
    size, placement = schedule.microbatches, schedule.placement
    split = placement.split if placement.copies > 1 else size
    second = steps * split  # where the microbatches of the second copy begin
    return [
        *range(step * split, (step + 1) * split),
        *range(second + step * (size - split), second + (step + 1) * (size - split)),
    ]


def join(steps: Sequence[Timeline]) -> Timeline:
    """Return the timelines of a schedule's consecutive steps, all on one clock, as one timeline."""
    first, parts = steps[0], tuple(steps)
    whole, costs = repeat(first.schedule, len(steps)), repeat_costs(first.costs, first.schedule, len(steps))
    rows = []
    for order, *rows_of_steps in zip(whole.orders, *(step.rows for step in steps), strict=True):
        rows.append(_timed(order, chain.from_iterable(rows_of_steps)))
    return replace(first, schedule=whole, rows=tuple(rows), costs=costs, parts=parts)


def divide(whole: Timeline, schedule: Schedule, costs: Costs) -> Iterator[Timeline]:
    """Yield the timeline of each step of a timeline of `repeat(schedule, …)`, with the costs of a step."""
    rows = [iter(row) for row in whole.rows]
    for _ in range(whole.schedule.microbatches // schedule.microbatches):
        parts = (islice(row, len(order)) for row, order in zip(rows, schedule.orders, strict=True))
        yield replace(whole, schedule=schedule, rows=tuple(map(_timed, schedule.orders, parts)), costs=costs)


def with_steps(whole: Timeline, steps: int) -> Timeline:
    """Return a timeline of `repeat(schedule, steps)` with the timelines of its steps as its parts."""
    schedule = whole.schedule
    split = schedule.placement.split // steps
    one = replace(
        schedule, placement=replace(schedule.placement, split=split), microbatches=schedule.microbatches // steps
    )
    numbers = _numbers(one, steps, 0)
    original = {number: microbatch for microbatch, number in enumerate(numbers)}
    firsts = (order[: len(order) // steps] for order in schedule.orders)
    one = replace(one, orders=tuple(tuple(_renumbered(action, original) for action in order) for order in firsts))
    return replace(whole, parts=tuple(divide(whole, one, _by_stage(whole.costs, iter, numbers))))


def later(timeline: Timeline, time: Any) -> Timeline:
    """Return the same timeline `time` later."""
    rows = (tuple(Span(action, start + time, end + time) for action, start, end in row) for row in timeline.rows)
    return replace(timeline, rows=tuple(rows))


def _timed(order: Sequence[Action], spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the times of `spans` for the actions of `order`."""
    return tuple(Span(action, start, end) for action, (_, start, end) in zip(order, spans, strict=True))


def _renumbered(action: Action, numbers: Sequence[int] | Mapping[int, int]) -> Action:
    """Return an action with another number in place of its microbatch."""
    if action.parts:
        return action._replace(parts=tuple(_renumbered(part, numbers) for part in action.parts))
    return action._replace(microbatch=numbers[action.microbatch]) if action.microbatch >= 0 else action
