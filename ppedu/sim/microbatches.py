"""Microbatches that take unlike times: which sequences share one, in which order they enter, and a schedule for them.

These are three ideas of DynaPipe (arXiv 2311.10418), for sequences of different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain, pairwise, permutations
from typing import Any

from ppedu.core import Action, B, F, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, exact, pretty
from ppedu.core.validate import require_count, require_instance, require_number, require_size
from ppedu.sim.costs import Costs, require_costs

MOST_CLUSTERS = 8  # they have 40,320 orders


def dynamic_microbatches(
    lengths: Iterable[int], ranks: int, time: Callable[[int, int], Number], *, tokens: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of each microbatch, by their positions in `lengths`, that make a step the shortest.

        dynamic_microbatches([9, 2, 2, 8, 3], 4, lambda count, length: 5 + count * length)  # ((0, 3), (4, 1, 2))

    A microbatch's sequences are padded to the length of its longest. On `ranks` ranks, GPipe takes the sum of the
    microbatches' times, and ranks - 1 times the longest of them, in whatever order: this is minimized. In the order of
    lengths, a microbatch has sequences that follow each other. No others are better, because times grow with lengths.

    Args:
        lengths: Those of the sequences of a batch, in tokens.
        time: From a number of sequences and the length of each, to the time of this microbatch's forward and backward
            on a rank. It grows with both. A part of it should not, such as the launch of kernels; without, every
            sequence is best alone.
        tokens: The most that a microbatch may have, with padding, so that its activations fit. None for any number.

    Raises:
        SettingError: `lengths` is empty, the longest sequence has too many tokens, or a number is not suitable.
    """
    lengths = [require_count("a length", length) for length in _listed("lengths", lengths)]
    ranks = require_count("ranks", ranks)
    require_instance("time", time, Callable, "a function of a number of sequences and their length")
    most = math.inf if tokens is None else require_count("tokens", tokens)
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    if not order or lengths[order[0]] > most:
        longest = f"a sequence of {lengths[order[0]]}" if order else "none"
        raise SettingError(f"give sequences of at most {most} tokens; got {longest}")

    def timed(count: int, length: int) -> Number:
        found = time(count, length)
        require_number(f"time({count}, {length})", found, lambda each: 0 <= each < math.inf, "a number of at least 0")
        return found

    times: list[dict[int, Number]] = []  # of the microbatch that ends before a place in the order, by where it starts
    for end in range(1, len(order) + 1):
        starts = [start for start in range(end) if (end - start) * lengths[order[start]] <= most]
        times.append({start: timed(end - start, lengths[order[start]]) for start in starts})

    def cut(limit: Number) -> list[int] | None:
        """Return where to cut for the least sum of times that are below the limit; None if one cannot be."""
        best: list[tuple[Any, int]] = [(0, 0)]  # up to each place: the least sum, and where its last microbatch starts
        for of_end in times:
            sums = ((best[start][0] + each, start) for start, each in of_end.items() if each < limit)
            best.append(min(sums, default=(math.inf, 0)))
        if best[-1][0] == math.inf:
            return None
        cuts = [len(order)]
        while cuts[-1]:
            cuts.append(best[cuts[-1]][1])
        return cuts[::-1]

    found: list[tuple[Any, list[int]]] = []
    limit: Any = math.inf
    while cuts := cut(limit):
        taken = [times[end - 1][start] for start, end in pairwise(cuts)]
        limit = max(taken)  # a better cut has a larger sum, so all of its times are shorter
        found.append((sum(taken) + (ranks - 1) * limit, cuts))
    _, cuts = min(found)
    return tuple(tuple(order[start:end]) for start, end in pairwise(cuts))


def order_by_clusters(
    times: Iterable[Number], makespan: Callable[[tuple[int, ...]], Number], clusters: int = 4
) -> tuple[int, ...]:
    """Return an order of microbatches that is good for a schedule: the best of those that keep similar times together.

    Sorted by time, they are cut into clusters of as many microbatches each as possible; within one, the longest comes
    first. All orders of the clusters are tried.

    Args:
        times: Those of the microbatches.
        makespan: From microbatches in an order, such as (2, 0, 1), to the time of their step, as by `simulate`.
        clusters: At most MOST_CLUSTERS.

    Raises:
        SettingError: There are too many clusters, or a time is not suitable.
    """
    times = _listed("times", times)
    for time in times:
        require_number("a time", time, lambda each: 0 <= each < math.inf, "a number of at least 0")
    require_instance("makespan", makespan, Callable, "a function of an order of microbatches")
    clusters = require_count("clusters", clusters, most=MOST_CLUSTERS)
    order = sorted(range(len(times)), key=lambda microbatch: -times[microbatch])
    cuts = [len(order) * number // clusters for number in range(clusters + 1)]
    parts = [order[start:end] for start, end in pairwise(cuts)]
    return min((tuple(chain(*each)) for each in permutations(parts)), key=makespan)


def _listed(name: str, numbers: Iterable[Any]) -> list[Any]:
    try:
        return [*numbers]
    except TypeError:
        raise SettingError(f"{name} must be numbers, such as [9, 2, 2]; got {numbers!r}") from None


def dynapipe(ranks: int, microbatches: int, costs: Costs | None = None, *, memory: Number | None = None) -> Schedule:
    """Return a schedule in which as many microbatches are in flight as fit into each rank's memory.

    In each cycle, a rank runs the next backward and the next forward, if they have arrived in the cycle before, and if
    the forward's activation fits. 1F1B waits for the backward that it expects. Here a rank has others at hand, so that
    a long microbatch delays it less; the price is memory. For equal microbatches, 1F1B is as fast with less.

    Args:
        costs: Their `activation` counts, which may differ by stage and by microbatch; not their times.
        memory: What each rank may hold, in the unit of `costs.activation`. None for any amount.

    Raises:
        SettingError: A microbatch alone does not fit, or a number is not suitable.
    """
    ranks, _, microbatches = require_size(ranks, 1, microbatches)
    most: Any = math.inf
    if memory is not None:
        require_number("memory", memory, lambda each: 0 <= each < math.inf, "a number of at least 0")
        most = exact(memory)
    costs = require_costs(costs)
    sizes = [
        [*map(exact, size)] if isinstance(size, tuple) else [exact(size)] * microbatches
        for size in costs.per_stage(costs.activation, ranks, ranks, microbatches)
    ]
    largest, rank = max((max(size), rank) for rank, size in enumerate(sizes))
    if largest > most:
        raise SettingError(f"rank {rank} needs {pretty(largest)} for a microbatch, over the memory of {pretty(most)}")

    orders: list[list[Action]] = [[] for _ in range(ranks)]
    forwards, backwards = [0] * ranks, [0] * ranks  # of each rank until now
    while backwards[0] < microbatches:
        arrived, returned = [microbatches, *forwards], [*backwards[1:], forwards[-1]]
        for rank, order in enumerate(orders):
            if backwards[rank] < returned[rank]:
                order.append(B(rank, backwards[rank]))
                backwards[rank] += 1
            next_one = forwards[rank]
            if next_one < arrived[rank] and sum(sizes[rank][backwards[rank] : next_one + 1]) <= most:
                order.append(F(rank, next_one))
                forwards[rank] += 1
    return Schedule("dynapipe", Placement.make("loop", ranks), microbatches, tuple(map(tuple, orders)))
