"""TickClock: the times of a schedule's actions and messages, as whole numbers if they are exact."""

from __future__ import annotations

from itertools import chain
from operator import add
from typing import Any, NamedTuple

from ppedu.core import Action, Op, Schedule
from ppedu.core.numeric import Ticks, by_microbatch, flat, ratio
from ppedu.sim.costs import Costs
from ppedu.sim.per_link import LinkCost, PerLink, each_link, of_link


class TickClock(NamedTuple):
    """The times of a schedule's actions in ticks, so that exact times are whole numbers.

    alone: `alone[op][stage]` is the time of an action on its own, or a tuple of the times by microbatch.
    paired: `paired[op][stage]` is its contribution to the time of an overlapped pair.
    """

    alone: dict[Op, list[Any]]
    paired: dict[Op, list[Any]]
    latency: LinkCost
    transfer: LinkCost
    ticks: Ticks

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> TickClock:
        """Return the clock for a schedule's stages and microbatches at these costs."""
        size = schedule.stages, schedule.ranks, schedule.microbatches
        alone = costs.durations(*size)
        paired = alone
        if costs.overlap is not None:
            half = [by_microbatch(lambda time: ratio(time, 2), each) for each in costs.per_stage(costs.overlap, *size)]
            paired = dict.fromkeys(alone, half)
        messages = (each.values() if isinstance(each, PerLink) else [each] for each in (costs.latency, costs.transfer))
        ticks = Ticks(chain(*map(flat, (*alone.values(), *paired.values())), *messages))

        def counted(times: dict[Op, list[Any]]) -> dict[Op, list[Any]]:
            return {op: [by_microbatch(ticks.count, time) for time in each] for op, each in times.items()}

        latency, transfer = (each_link(ticks.count, each) for each in (costs.latency, costs.transfer))
        return cls(counted(alone), counted(paired), latency, transfer, ticks)

    def duration(self, action: Action) -> Any:
        """Return how many ticks an action takes: 0 for messages and sharding."""
        times = self.paired if action.parts else self.alone
        return sum(_at(times[op][stage], microbatch) for stage, op, microbatch, _ in action.singles if op in times)

    def durations(self, sample: Action, microbatches: int) -> list[Any]:
        """Return how many ticks the actions of a block take, by the microbatch of the action or of a pair's first part.

        sample: One of these actions; see `ppedu.core.dependencies.Block`.
        """

        def row(times: dict[Op, list[Any]], action: Action) -> list[Any]:
            time = times[action.op][action.stage] if action.op in times else 0
            return [*time] if isinstance(time, tuple) else [time] * microbatches

        if not sample.parts:
            return row(self.alone, sample)
        first, second = (row(self.paired, part) for part in sample.parts)
        later = sample.parts[1].microbatch - sample.parts[0].microbatch
        return [*map(add, first, second[later:] + second[:later])]  # where the second does not exist, any number

    def occupies(self, sender: int, receiver: int) -> Any:
        """Return for how many ticks a message from one rank to another is transferred."""
        return of_link("transfer", self.transfer, sender, receiver)

    def delay(self, sender: int, receiver: int) -> Any:
        """Return how many ticks after its start a message from one rank to another arrives."""
        return self.occupies(sender, receiver) + of_link("latency", self.latency, sender, receiver)


def _at(time: Any, microbatch: int) -> Any:
    """Return the time of a microbatch."""
    return time[microbatch] if isinstance(time, tuple) else time
