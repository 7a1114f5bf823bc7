"""Several training steps in a row, as one schedule and as one timeline.

Step k of a schedule with m microbatches has microbatches of its own: those from k · m on. If there are two copies of
the model, those of the first copy, of all steps, are numbered before those of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from ppedu.core import Action, Schedule
from ppedu.sim.costs import TIMES, Costs
from ppedu.sim.timeline import Span, Timeline


def repeat(schedule: Schedule, steps: int) -> Schedule:
    """Return the schedule in which every rank runs its order `steps` times, and waits for no other rank in between."""
    number = _numbering(schedule, steps)
    orders = tuple(
        tuple(_renumbered(action, number, step) for step in range(steps) for action in order)
        for order in schedule.orders
    )
    placement = replace(schedule.placement, split=schedule.placement.split * steps)
    return replace(schedule, placement=placement, microbatches=schedule.microbatches * steps, orders=orders)


def repeat_costs(costs: Costs, schedule: Schedule, steps: int) -> Costs:
    """Return costs of `repeat(schedule, steps)`: in each step, a microbatch has the times that it has in `costs`.

    Functions must be tabulated.
    """
    number = _numbering(schedule, steps)
    places = sorted(
        (number(step, microbatch), microbatch) for step in range(steps) for microbatch in range(schedule.microbatches)
    )

    def repeated(cost: Any) -> Any:
        return tuple(cost[microbatch] for _, microbatch in places) if isinstance(cost, tuple) else cost

    given = {name: cost for name in TIMES if isinstance(cost := getattr(costs, name), tuple)}
    size = schedule.stages, schedule.ranks, schedule.microbatches
    tables: dict[str, Any] = {name: [*map(repeated, costs.per_stage(cost, *size))] for name, cost in given.items()}
    return replace(costs, **tables)


def _numbering(schedule: Schedule, steps: int) -> Callable[[int, int], int]:
    """Return the function from a step and a microbatch of `schedule` to the microbatch of `repeat(schedule, steps)`."""
    size = schedule.microbatches
    split = schedule.placement.split if schedule.placement.copies > 1 else size

    def number(step: int, microbatch: int) -> int:
        if microbatch < split:
            return step * split + microbatch
        return steps * split + step * (size - split) + microbatch - split

    return number


def join(steps: Sequence[Timeline]) -> Timeline:
    """Return the timelines of a schedule's consecutive steps, all on one clock, as one timeline."""
    first, parts = steps[0], tuple(steps)
    whole, costs = repeat(first.schedule, len(steps)), repeat_costs(first.costs, first.schedule, len(steps))
    rows = map(chain.from_iterable, zip(*(step.rows for step in steps), strict=True))
    return replace(first, schedule=whole, rows=tuple(map(_timed, whole.orders, rows)), costs=costs, parts=parts)


def divide(whole: Timeline, schedule: Schedule, costs: Costs) -> Iterator[Timeline]:
    """Yield the timeline of each step of a timeline of `repeat(schedule, …)`, with the costs of a step."""
    rows = [iter(row) for row in whole.rows]
    for _ in range(whole.schedule.microbatches // schedule.microbatches):
        parts = (islice(row, len(order)) for row, order in zip(rows, schedule.orders, strict=True))
        yield replace(whole, schedule=schedule, rows=tuple(map(_timed, schedule.orders, parts)), costs=costs)


def with_steps(whole: Timeline, steps: int) -> Timeline:
    """Return a timeline of `repeat(schedule, steps)` with the timelines of its steps as its parts."""
    schedule = whole.schedule
    size, split = schedule.microbatches // steps, schedule.placement.split // steps
    one = replace(schedule, placement=replace(schedule.placement, split=split), microbatches=size)
    number = _numbering(one, steps)
    original = {number(step, microbatch): microbatch for step in range(steps) for microbatch in range(size)}
    firsts = (order[: len(order) // steps] for order in schedule.orders)

    def unnumbered(_: int, microbatch: int) -> int:
        return original[microbatch]

    one = replace(one, orders=tuple(tuple(_renumbered(action, unnumbered, 0) for action in each) for each in firsts))

    def of_first(cost: Any) -> Any:
        return tuple(cost[number(0, m)] for m in range(size)) if isinstance(cost, tuple) else cost

    tables: dict[str, Any] = {
        name: tuple(map(of_first, cost)) for name in TIMES if isinstance(cost := getattr(whole.costs, name), tuple)
    }
    return replace(whole, parts=tuple(divide(whole, one, replace(whole.costs, **tables))))


def later(timeline: Timeline, time: Any) -> Timeline:
    """Return the same timeline `time` later."""
    rows = (tuple(Span(action, start + time, end + time) for action, start, end in row) for row in timeline.rows)
    return replace(timeline, rows=tuple(rows))


def _timed(order: Sequence[Action], spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the times of `spans` for the actions of `order`."""
    return tuple(Span(action, start, end) for action, (_, start, end) in zip(order, spans, strict=True))


def _renumbered(action: Action, number: Callable[[int, int], int], step: int) -> Action:
    if action.parts:
        return action._replace(parts=tuple(_renumbered(part, number, step) for part in action.parts))
    return action._replace(microbatch=number(step, action.microbatch)) if action.microbatch >= 0 else action
