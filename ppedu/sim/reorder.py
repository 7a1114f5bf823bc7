"""A faster order of the same actions: a lower bound on what reordering saves.

This is list scheduling: whenever a rank is free, it starts the most urgent action whose inputs exist and whose
activation fits in the rank's memory. Urgency is a rule of thumb. `reorder` tries three rules and keeps the best order,
which is legal and needs no more memory. A better one may exist: finding the best order is NP-hard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import chain
from typing import Any

from ppedu.core import Action, Op, Result, Schedule, produces, requires, strip
from ppedu.core.garbage import without_gc
from ppedu.core.numeric import exact
from ppedu.sim.clock import TickClock
from ppedu.sim.costs import Costs
from ppedu.sim.simulation import simulate, simulate_partial
from ppedu.sim.timeline import Timeline

# Gradients that other ranks wait for come first; W and R fill the gaps.
TURN = {Op.B: 0, Op.I: 0, Op.F: 1, Op.W: 2, Op.R: 2}


@without_gc()
def reorder(timeline: Timeline) -> Timeline:
    """Return the fastest timeline found for the same actions on the same ranks at the same costs.

    No rank's activations have a higher peak than in `timeline`. Overlapped pairs stay pairs; messages and sharding are
    dropped. If no faster order is found, the order does not change, nor if it has a U: forwards before and after it use
    other weights, or an S, whose sums must meet. Latency is ignored, so the costs should have 0.
    """
    schedule, costs = strip(timeline.schedule), replace(timeline.costs, transport="buffered")
    if schedule != timeline.schedule:
        timeline = simulate(schedule, costs)
    if schedule.updated or schedule.offloaded or schedule.placement.barriers:
        return timeline
    tasks = Tasks(schedule, costs)
    turns = (min(TURN[single.op] for single in action.singles) for action in tasks.actions)
    backwards_first = list(zip(turns, tasks.path, strict=True))
    longest_path_first = [-path for path in tasks.path]
    attempts = [
        list_schedule(tasks, tasks.needed_by, backwards_first),
        list_schedule(tasks, tasks.needed_by, longest_path_first),
        list_schedule(tasks, tasks.needed_by_with_forwards_in_order(), longest_path_first),  # never gets stuck
    ]
    ticks, started = min(attempt for attempt in attempts if attempt)
    if Fraction(ticks, tasks.per_one) >= timeline.makespan:
        return timeline
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    for task in started:
        orders[tasks.rank[task]].append(tasks.actions[task])
    found = simulate_partial(replace(schedule, orders=tuple(map(tuple, orders))), costs)
    return min(timeline, found, key=lambda each: each.makespan)


class Tasks:
    """A schedule's actions, numbered so that each comes after its dependencies.

    Times and memory are whole numbers, so that 0.1 + 0.2 and 0.3 are the same moment.
    """

    def __init__(self, schedule: Schedule, costs: Costs):
        steps = schedule.replay.steps
        self.rank = [rank for rank, _ in steps]
        self.actions = [schedule.orders[rank][index] for rank, index in steps]
        costs = replace(costs, latency=0, transfer=0)
        costs = replace(costs, **{name: _exact(cost) for name, cost in vars(costs).items()})
        clock, entries = TickClock.of(schedule, costs), schedule.numbered.orders
        durations, self.per_one = clock.durations(schedule.numbered), clock.ticks.per_one
        self.duration = [durations[entries[rank][index]] for rank, index in steps]

        table, _, period = costs.memory_changes(schedule)
        again = schedule.recomputed
        memory = [
            [table[op, stage, m % period, (stage, m) in again] for stage, op, m, _ in action.singles]
            for action in self.actions
        ]
        self.takes = [sum(taken for taken, _ in each) for each in memory]
        self.gives_back = [sum(freed for _, freed in each) for each in memory]
        self.room = [0] * schedule.ranks  # the peak of each rank's activations
        held = [0] * schedule.ranks
        for rank, takes, gives_back in zip(self.rank, self.takes, self.gives_back, strict=True):
            self.room[rank] = max(self.room[rank], held[rank] + takes)
            held[rank] += takes - gives_back

        self.needed_by: list[list[int]] = [[] for _ in steps]
        producer: dict[Result, int] = {}
        for task, action in enumerate(self.actions):
            wanted = {producer[each] for each in requires(action, schedule.placement, restored=schedule.restored)}
            for earlier in wanted:
                self.needed_by[earlier].append(task)
            producer.update(dict.fromkeys(produces(action), task))

        self.path = list(self.duration)  # the longest, from the task's start through its dependents
        for task in reversed(range(len(steps))):
            self.path[task] += max((self.path[later] for later in self.needed_by[task]), default=0)

    def needed_by_with_forwards_in_order(self) -> list[list[int]]:
        """Return for each task the tasks that depend on it; on a forward, the next forward of its rank depends, too.

        Then list scheduling cannot get stuck: of the tasks not yet started, the one with the lowest number has all its
        inputs, and its rank holds no more memory than it did at this point of the original order.
        """
        needed_by = [[*later] for later in self.needed_by]
        before: dict[int, int] = {}
        for task, (rank, takes) in enumerate(zip(self.rank, self.takes, strict=True)):
            if takes:
                if rank in before:
                    needed_by[before[rank]].append(task)
                before[rank] = task
        return needed_by


def list_schedule(
    tasks: Tasks, needed_by: Sequence[Sequence[int]], urgency: Sequence[Any]
) -> tuple[int, list[int]] | None:
    """Return the makespan and the tasks in the order they start; None if the ranks run out of memory.

    Of the tasks that a free rank can start, the one with the least `urgency` goes first.
    """
    missing = [0] * len(needed_by)  # how many inputs each task still waits for
    for later in chain(*needed_by):
        missing[later] += 1
    room = list(tasks.room)  # the free memory of each rank
    # Heaps of tasks, by rank and by the memory they take: a task that does not fit must not hide one that does.
    ready: list[dict[int, list[tuple[Any, int]]]] = [{} for _ in room]
    idle = [True] * len(room)
    running: list[tuple[int, int]] = []  # a heap of (end, task)
    started: list[int] = []
    now = 0

    def make_ready(task: int) -> None:
        heappush(ready[tasks.rank[task]].setdefault(tasks.takes[task], []), (urgency[task], task))

    for task, count in enumerate(missing):
        if not count:
            make_ready(task)
    woken = set(range(len(room)))
    while woken:
        for rank in woken:
            if not idle[rank]:
                continue
            fitting = [heap for takes, heap in ready[rank].items() if heap and takes <= room[rank]]
            if fitting:
                _, task = heappop(min(fitting))
                idle[rank] = False
                room[rank] -= tasks.takes[task]
                started.append(task)
                heappush(running, (now + tasks.duration[task], task))
        woken = set()
        if running:
            now = running[0][0]
        while running and running[0][0] == now:
            _, task = heappop(running)
            rank = tasks.rank[task]
            idle[rank] = True
            room[rank] += tasks.gives_back[task]
            woken.add(rank)
            for later in needed_by[task]:
                missing[later] -= 1
                if not missing[later]:
                    make_ready(later)
                    woken.add(tasks.rank[later])
    return (now, started) if len(started) == len(missing) else None


def _exact(cost: Any) -> Any:
    """Return floats as the decimals they stand for, other values unchanged."""
    if isinstance(cost, tuple):
        return tuple(map(_exact, cost))
    return exact(cost) if isinstance(cost, float) else cost
