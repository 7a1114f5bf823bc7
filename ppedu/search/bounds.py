"""Bounds on the makespan of an instance by closed formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ppedu.core import Op
from ppedu.core.numeric import exact
from ppedu.search.instance import Instance, Key, held


def least_ticks(instance: Instance) -> int:
    """Return the ticks below which the makespan cannot be.

    A microbatch passes all stages and comes back. The other bounds are those of `_bounds_of`, for each rank.
    """
    ends = [_ends(instance, copy) for copy in range(instance.placement.copies)]  # of a microbatch alone
    bounds = []
    if not instance.pairs:
        for copy, microbatches in enumerate(instance.copies):
            if microbatches:
                bounds.append(ends[copy][0, instance.ops[-1]])
    for rank in range(instance.placement.ranks):
        bounds += _bounds_of(instance, rank, ends)
    return max(bounds)


def _bounds_of(instance: Instance, rank: int, ends: Sequence[Mapping[Key, int]]) -> Iterator[int]:
    """Yield bounds on the makespan by the work and the memory of a rank.

    The rank works on all microbatches after its first input. And it holds an activation until its gradient has come
    back, so that the sum of these times, each multiplied with the size of the activation, is at most the memory
    times the step: if it holds 8 activations, each for 6 ticks at least, a memory of 2 needs 8 · 6 / 2 = 24 ticks.

    Args:
        ends: By copy of the model, when each action of a microbatch alone ends.
    """
    parts = [(copy, part) for copy, part in held(instance.placement, rank) if instance.copies[copy]]
    begins, work, memory_times_ticks = [], 0, 0
    for copy, part in parts:
        count = len(instance.copies[copy])
        begin = ends[copy][part, Op.F] - instance.times[Op.F][part]
        begins.append(begin)
        work += count * sum(instance.times[op][part] for op in instance.ops)
        for (taking, freeing), sizes in instance.kept.items():
            lifetime = ends[copy][part, freeing] - begin
            if taking == Op.R:  # its backward may follow at once
                lifetime = sum(instance.times[op][part] for op in instance.ops[: instance.ops.index(freeing) + 1])
            memory_times_ticks += count * sizes[part] * lifetime
        if instance.pairs:
            work -= count * _most_saved(instance, part, [other for _, other in parts])
    first = min(begins, default=0)
    yield first + work
    if instance.memory is not None and not instance.pairs:
        yield first + math.ceil(memory_times_ticks * instance.memory_unit / exact(instance.memory))


def _most_saved(instance: Instance, stage: int, partners: Iterable[int]) -> int:
    """Return the most ticks that a pair saves: of a stage's forward with a backward of one of the partners."""
    saved = 0
    for partner in partners:
        apart = instance.times[Op.F][stage] + instance.times[Op.B][partner]
        together = instance.overlap[stage] + instance.overlap[partner]
        saved = max(saved, apart - together)
    return saved


def _ends(instance: Instance, copy: int) -> dict[Key, int]:
    """Return when each action of a microbatch ends if it is alone."""
    ends = {(0, Op.F): instance.times[Op.F][0]}
    for before, after, delay in instance.dependencies(copy):
        part, op = after
        ends[after] = max(ends.get(after, 0), ends[before] + delay + instance.times[op][part])
    return ends
