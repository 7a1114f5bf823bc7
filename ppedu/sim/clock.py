"""TickClock: the times of a schedule's actions and messages, as whole numbers if they are exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import add
from typing import Any, NamedTuple

from ppedu.core import Action, Op, Schedule, SettingError
from ppedu.core.dependencies import Numbered
from ppedu.core.numeric import Ticks, by_microbatch, flat, plain, ratio
from ppedu.sim.costs import Costs
from ppedu.sim.lengths import shares_of
from ppedu.sim.per_link import LinkCost, PerLink, each_link, of_link


class TickClock(NamedTuple):
    """The times of a schedule's actions in ticks, so that exact times are whole numbers.

    Attributes:
        alone: `alone[op][stage]` is the time of an action on its own, or a tuple of the times by microbatch. Those of B
            and I are without recomputation.
        paired: `paired[Op.B][op][stage]` is its contribution to the time of an overlapped pair, if that is not the time
            on its own. Pairs with an I have `paired[Op.I]` if that has a time of its own.
        latency, transfer: As in `Costs`, in ticks.
        ticks: The unit.
        recompute: As in `Costs`: a B or I takes as long as an R more, unless its microbatch has an R in the order.
    """

    alone: dict[Op, list[Any]]
    paired: dict[Op, dict[Op, list[Any]]]
    latency: LinkCost
    transfer: LinkCost
    ticks: Ticks
    recompute: bool

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> TickClock:
        """Return the clock for a schedule's stages and microbatches at these costs."""
        size = schedule.stages, schedule.ranks, schedule.microbatches, schedule.slices
        alone = (replace(costs, recompute=False) if costs.recompute else costs).durations(*size)
        paired = {}
        for backward, overlap in ((Op.B, costs.overlap), (Op.I, costs.overlap_input)):
            if overlap is not None:
                pairs = costs.per_stage(overlap, *size)
                half = [by_microbatch(lambda time: ratio(time, 2), each) for each in pairs]
                paired[backward] = dict.fromkeys(alone, half) | {Op.R: [0] * schedule.stages}
        if costs.lengths or (schedule.slices > 1 and costs.attention):
            alone, *tables = (of_slices(times, *size[2:], costs) for times in (alone, *paired.values()))
            paired = dict(zip(paired, tables, strict=True))
            ops = {single.op for block in schedule.numbered.blocks for single in block.sample.singles}
            if Op.I in ops and min(flat(alone[Op.I])) < 0:
                raise SettingError("all attention of B is in I, which takes less; give less attention")
        numbers = list(flat(chain(*(times for table in (alone, *paired.values()) for times in table.values()))))
        for cost in (costs.latency, costs.transfer):
            numbers += cost.values() if isinstance(cost, PerLink) else [cost]
        ticks = Ticks(numbers)

        def counted(times: dict[Op, list[Any]]) -> dict[Op, list[Any]]:
            if not ticks.exact:
                return times
            return {op: [by_microbatch(ticks.count, time) for time in each] for op, each in times.items()}

        latency = each_link(ticks.count, costs.latency)
        transfer = each_link(ticks.count, costs.transfer)
        of_pairs = {backward: counted(times) for backward, times in paired.items()}
        return cls(counted(alone), of_pairs, latency, transfer, ticks, costs.recompute)

    def durations(self, numbered: Numbered) -> list[Any]:
        """Return how many ticks each action takes, by its entry: 0 for messages and sharding."""
        size = numbered.microbatches

        def of_block(times: dict[Op, list[Any]], action: Action) -> list[Any]:
            """Return the time of an action for each microbatch."""
            stage, op, microbatch, _ = action
            time = times[op][stage] if op in times else 0
            if self.recompute and op in (Op.B, Op.I) and ("R", stage, microbatch) not in numbered.restored:
                time = by_microbatch(add, time, times[Op.R][stage])
            return [*time] if isinstance(time, tuple) else [time] * size

        durations: list[Any] = []
        for block in numbered.blocks:
            if not block.sample.parts:
                durations += of_block(self.alone, block.sample)
                continue
            # In all pairs of a block, the second microbatch is the first one plus `later`. The last pairs would need a
            # microbatch beyond the end: they do not exist, so any duration will do.
            one, two = block.sample.parts
            of_pairs = self.paired.get(Op.B, self.alone)
            if Op.I in (one.op, two.op):
                of_pairs = self.paired.get(Op.I, of_pairs)
            first, second = of_block(of_pairs, one), of_block(of_pairs, two)
            later = two.microbatch - one.microbatch
            durations += [first[m] + second[(m + later) % size] for m in range(size)]
        return durations

    def occupies(self, sender: int, receiver: int) -> Any:
        """Return for how many ticks a message from one rank to another is transferred."""
        return of_link("transfer", self.transfer, sender, receiver)

    def delay(self, sender: int, receiver: int) -> Any:
        """Return how many ticks after its start a message from one rank to another arrives."""
        return self.occupies(sender, receiver) + of_link("latency", self.latency, sender, receiver)


def of_slices(times: dict[Op, list[Any]], microbatches: int, slices: int, costs: Costs) -> dict[Op, list[Any]]:
    """Return the times of slices, by op and stage, from the means of a sequence's. Tables have them already.

    A slice has its share of a sequence's attention, and of the rest. I has what B has more, the others no more.
    """
    shares = shares_of(costs.lengths, slices)

    def table(mean: Any, growing: Any) -> Any:
        if isinstance(mean, tuple) or isinstance(growing, tuple):
            return mean
        more = costs.attention * growing
        each = [slices * (mean * tokens + more * (attention - tokens)) for tokens, attention in shares]
        return tuple([*map(plain, each)] * (microbatches // slices))

    others = (Op.W, Op.O, Op.L, Op.S, Op.T)
    growing = {**times, Op.I: times[Op.B], **dict.fromkeys(others, [0] * len(times[Op.W]))}
    return {op: times[op] if op is Op.U else [*map(table, times[op], growing[op])] for op in times}
