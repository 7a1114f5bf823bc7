"""The frontier: the best makespan for every memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from ppedu.core import Placement, hooks
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.tables import LINE, in_text
from ppedu.core.validate import require_count, require_number
from ppedu.search.instance import Instance
from ppedu.search.optimal import Found, named, search
from ppedu.search.solve import require_solver
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule, schedules

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Frontier:
    """The best schedule for each memory, and the published schedules of this size.

    found: By memory, the least first. From the last one on, more memory does not help.
    published: The simulations of the registered schedules, of any placement.
    """

    found: tuple[Found, ...]
    published: tuple[Timeline, ...]

    @property
    def points(self) -> list[tuple[str, Number, Number, Timeline]]:
        """The name, memory, makespan (or span) and timeline of all schedules, those that were found first.

        Published schedules that are slower than all of these are left out.
        """
        value, slowest = self.found[0].instance.value, max(each.value for each in self.found)
        own = [(each.status, instance_memory(each), each.value, each.timeline) for each in self.found]
        others = [(each.schedule.name, max(each.peak_activations), value(each), each) for each in self.published]
        others = [point for point in others if point[2] <= slowest]
        return own + others

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the frontier, its bounds and the published schedules with matplotlib.

        ax: Axes to draw into; by default those of a new figure.
        """
        return hooks.call("plot frontier", self, ax)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return hooks.call("display frontier", self)

    def __str__(self) -> str:
        instance = self.found[0].instance
        rows = [["memory", instance.objective, "at least", "shown by", "published, at most this memory"]]
        for each in self.found:
            limit, unit = instance_memory(each), instance.costs.unit
            fitting = [timeline for timeline in self.published if max(timeline.peak_activations) <= limit]
            best = min(fitting, key=instance.value, default=None)
            beside = f"{best.schedule.name}: {pretty(instance.value(best), unit)}" if best else ""
            proofs = " and ".join(each.proofs)
            rows.append([pretty(limit), pretty(each.value, unit), pretty(each.bound, unit), proofs, beside])
        return "\n".join(chain.from_iterable(in_text(rows, 40, LINE)))

    __repr__ = __str__


def instance_memory(found: Found) -> Any:
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
    split: bool | None = True,
    pairs: bool = False,
    objective: str = "makespan",
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
    require_count("workers", workers)
    require_number("time_limit", time_limit, lambda each: each >= 0, "a number of seconds, at least 0")
    place = named(placement, ranks, chunks, microbatches)

    def instance(memory: Number | None) -> Instance:
        return Instance.of(place, microbatches, costs, split, pairs, memory, objective)

    require_solver()
    free = search(instance(None), time_limit, workers)
    found: list[Found] = []
    for memory in () if free.interrupted else _memories(free.instance):
        starts = [each.schedule for each in found[-1:]]
        found.append(search(instance(memory), time_limit, workers, None, starts, free.ticks))
        if progress:
            progress(found[-1])
        if found[-1].interrupted or found[-1].value <= free.value:
            break
    return Frontier(tuple(_with_bounds(found or [free])), tuple(_published(free.instance)))


def _with_bounds(found: list[Found]) -> list[Found]:
    """Return what was found with the bounds for more memory, which hold for less memory, too."""
    better: list[Found] = []
    for each in reversed(found):
        if better and better[-1].bound > each.bound:
            bound, proofs = better[-1].bound, better[-1].proofs
            status = "optimal" if bound == each.value else each.status
            each = replace(each, bound=bound, proofs=proofs, ticks=better[-1].ticks, status=status)
        better.append(each)
    return better[::-1]


def _memories(instance: Instance) -> Iterator[Number]:
    """Yield memories: that of a microbatch on the fullest rank, then more by the smallest activation of a stage."""
    step = min((each for each in instance.activations if each), default=1)
    yield from (plain(memory) for memory in count(instance.least_memory or step, step))


def _published(instance: Instance) -> Iterator[Timeline]:
    for name in schedules():
        with suppress(Exception):  # it does not exist for this size or costs, or a registered generator is unfinished
            timeline = simulate(schedule(name, instance.placement.ranks, instance.microbatches), instance.costs)
            if not timeline.schedule.forward_only:
                yield timeline
