"""The frontier: the best makespan for every memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from ppedu.core import Placement, hooks
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.tables import LINE, in_text
from ppedu.search.instance import Instance, named
from ppedu.search.optimal import Found, require_limits, search
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule, schedules
from ppedu.zoo.registry import options_of


@dataclass(frozen=True)
class Frontier:
    """The best schedule for each memory, and the published schedules of this size.

    Attributes:
        found: By memory, the least first. From the last one on, more memory does not help.
        published: The simulations of the registered schedules, of any placement. Of whole sequences, or of as many
            slices as were searched for; with recomputation if that was searched for, too.
    """

    found: tuple[Found, ...]
    published: tuple[Timeline, ...]

    @property
    def points(self) -> list[tuple[str, Number, Number, Timeline]]:
        """The name, memory, makespan and timeline of all schedules, those that were found first.

        Published schedules that are slower than all of these are left out.
        """
        slowest = max(each.makespan for each in self.found)
        rows = [(each.status, _memory_of(each), each.timeline) for each in self.found]
        rows += [
            (each.schedule.name, max(each.peak_activations), each)
            for each in self.published
            if each.makespan <= slowest
        ]
        return [(name, memory, timeline.makespan, timeline) for name, memory, timeline in rows]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return hooks.call("display frontier", self)

    def __str__(self) -> str:
        rows = [["memory", "makespan", "at least", "shown by", "published, at most this memory"]]
        unit = self.found[0].instance.costs.unit
        for each in self.found:
            limit = _memory_of(each)
            fitting = [timeline for timeline in self.published if max(timeline.peak_activations) <= limit]
            best = min(fitting, key=lambda timeline: timeline.makespan, default=None)
            beside = f"{best.schedule.name}: {pretty(best.makespan, unit)}" if best else ""
            proofs = " and ".join(each.proofs)
            rows.append([pretty(limit), pretty(each.makespan, unit), pretty(each.bound, unit), proofs, beside])
        return "\n".join(chain.from_iterable(in_text(rows, 40, LINE)))

    __repr__ = __str__


def _memory_of(found: Found) -> Any:
    """Return the memory that a search was given, or if it was given none, what its schedule needs."""
    memory = found.instance.memory
    return max(found.timeline.peak_activations) if memory is None else memory


def frontier(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    placement: Placement | str = "loop",
    chunks: int | None = None,
    split: bool = True,
    pairs: bool = False,
    slices: int | None = None,
    recompute: bool = False,
    time_limit: float = 10,
    workers: int = 2,
    progress: Callable[[Found], object] | None = None,
) -> Frontier:
    """Return the best schedule for each memory, from that of a single microbatch on.

    The arguments are those of `optimal`; `time_limit` is for each memory, and `progress` is called after each. Ctrl+C
    ends it with what it has.

    Raises:
        SettingError, PipelineError: As `optimal`.
    """
    require_limits(time_limit, workers)
    place = named(placement, ranks, chunks, microbatches, slices)
    instance = Instance.of(place, microbatches, costs, split, pairs, recompute=recompute)
    free = search(instance, time_limit, workers)
    if free.interrupted:
        return Frontier((free,), tuple(_published(instance)))
    found: list[Found] = []
    for memory in _memories(instance):
        # A schedule for less memory fits in this memory, too. And no limit lowers the bound that holds without one.
        starts = [found[-1].schedule] if found else []
        limited = search(replace(instance, memory=memory), time_limit, workers, starts=starts, least=free.ticks)
        found.append(limited)
        if progress:
            progress(limited)
        if limited.interrupted or limited.makespan <= free.makespan:
            break
    return Frontier(tuple(_with_bounds(found)), tuple(_published(instance)))


def _with_bounds(found: list[Found]) -> list[Found]:
    """Return the findings, the least memory first, with the bounds for more memory, which hold for less memory, too.

    If no schedule with a memory of 3 is faster than 20, none with a memory of 2 is: it would fit in 3.
    """
    bounded: list[Found] = []  # the most memory first
    for each in reversed(found):
        more = bounded[-1] if bounded else each
        if more.bound > each.bound:
            status = "optimal" if more.bound == each.makespan else each.status
            each = replace(each, bound=more.bound, proofs=more.proofs, ticks=more.ticks, status=status)
        bounded.append(each)
    return bounded[::-1]


def _memories(instance: Instance) -> Iterator[Number]:
    """Yield memories: that of a microbatch on the fullest rank, then more by the smallest activation of a part."""
    step = min((each for each in instance.activations if each), default=1)
    yield from (plain(memory) for memory in count(instance.least_memory or step, step))


def _published(instance: Instance) -> Iterator[Timeline]:
    for name in schedules():
        with suppress(Exception):  # it does not exist for this size or costs, or a registered generator is unfinished
            slices = instance.placement.slices
            options = {"slices": slices} if "slices" in options_of(name) else {}
            found = schedule(name, instance.placement.ranks, instance.microbatches, **options)
            again = found.recomputed and not instance.recompute
            others = found.forward_only or found.updated or found.offloaded or found.placement.barriers or again
            if not others and (slices > 1 or "slices" not in options):
                yield simulate(found, instance.costs if found.slices > 1 else replace(instance.costs, lengths=()))
