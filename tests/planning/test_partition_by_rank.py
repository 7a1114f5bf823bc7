"""Partitions that make a schedule's step shortest, compared with all partitions, and memory with simulations."""

import random
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu.planning.partition import Cutting
from ppedu.sim.held import Sizes, in_flight
from ppedu.sim.partition import by_cost
from ppedu.zoo.registry import published

NAMES = [name for name, entry in published().items() if not entry.forward_only and pp.schedule(name, 4, 8).plain]


def drawn(chance, count):
    times = [chance.randint(0, 9) for _ in range(count)]
    return pp.Model.measured(
        times,
        backward=[time + chance.randint(0, 9) for time in times],
        activation=[chance.randint(0, 9) for _ in range(count)],
        weights=[chance.randint(0, 3) for _ in range(count)],
    )


@pytest.mark.parametrize("name", [*NAMES, "mario"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kept", [1, 0])
def test_peaks_are_those_of_a_simulation(name, recompute, kept):
    schedule, chance = pp.schedule(name, 4, 8), random.Random(name)
    whole = [chance.randint(2, 9) for _ in range(schedule.stages)]
    freed = [0 if kept else chance.randint(0, size) for size in whole]
    parts = [Fraction(size - less, size) for size, less in zip(whole, freed, strict=True)]
    costs = pp.Costs(activation=whole, stage_input=[2] * len(whole), recompute=recompute, weight_memory=parts)
    found = in_flight(schedule, recompute)
    sizes = [Sizes([whole[stage] for stage in mine], [freed[stage] for stage in mine], 2) for mine in found.stages]
    peaks = [found.peak(rank, of_rank) for rank, of_rank in enumerate(sizes)]
    assert tuple(size for _, size in peaks) == pp.simulate(schedule, costs).peak_activations
    assert all(found.size(held, of_rank) == size for (held, size), of_rank in zip(peaks, sizes, strict=True))


def every(schedule, pieces, memory, delay=1):
    """Yield the step time of each partition that fits, by simulating all of them. Independent of `Cutting`."""
    stages, count = schedule.stages, len(pieces)
    for inner in combinations_with_replacement(range(count + 1), stages - 1):
        cuts = [0, *inner, count]
        parts = [pieces.pieces[begin:end] for begin, end in pairwise(cuts)]
        costs = pp.Costs(
            forward=[sum(piece.forward for piece in part) for part in parts],
            backward=[sum(piece.backward for piece in part) for part in parts],
            input=[sum(piece.input for piece in part) for part in parts],
            weight=[sum(piece.weight for piece in part) for part in parts],
            activation=[sum(piece.activation for piece in part) for part in parts],
            latency=delay,
        )
        timeline = pp.simulate(schedule, costs)
        sizes = [
            held + 16 * sum(piece.weights for stage in schedule.placement.stages_of(rank) for piece in parts[stage])
            for rank, held in enumerate(timeline.peak_activations)
        ]
        if max(sizes) <= memory:
            yield timeline.makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe", "hanayo"])
def test_few_partitions_are_all_tried(name):
    chance = random.Random(name)
    for _ in range(3):
        schedule = pp.schedule(name, 2, 4)
        pieces = drawn(chance, chance.randint(3, 6))
        memory = chance.randint(150, 300)
        found = Cutting(schedule, pieces, memory, 1)
        found.start()
        found.improve(0)
        assert found.proven
        best = min(every(schedule, pieces, memory), default=None)
        if best is None:
            assert found.excess(found.best) > 0
        else:
            assert found.excess(found.best) == 0
            assert found.time(found.best) == best
            assert found.bound <= best


@often(60)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 10**6), recompute=st.booleans())
def test_never_worse_than_equal_stages_nor_below_its_bounds(name, seed, recompute):
    chance = random.Random(seed)
    schedule, pieces = pp.schedule(name, 4, 8), drawn(chance, 12)
    found = Cutting(schedule, pieces, 10**9, 1, recompute)
    found.start()
    found.improve(200_000)
    stages = by_cost([piece.forward + piece.backward for piece in pieces.pieces], schedule.stages)
    cuts = (0, *(each.stop for each in stages))
    assert found.bound <= found.time(found.best) <= found.time(cuts)
    assert max(found.loads(cuts)) <= found.time(cuts)
    assert found.time(cuts) == pp.simulate(schedule, found.costs(cuts)).makespan
    assert found.memory(cuts) == [sum(kinds.values()) for kinds in found.kinds(cuts)]


def test_two_copies_of_the_model_share_the_heaviest_piece():
    """Each copy runs two of the four microbatches, which take 3 each: a rank for each copy needs 6."""
    found = Cutting(pp.schedule("dualpipe", 2, 4), pp.Model.measured([0, 1, 0]), 10**9)
    found.start()
    found.improve(0)
    assert found.bound == 6 <= found.time(found.best) < 12


def test_a_better_partition_of_another_search_is_taken_over():
    pieces = drawn(random.Random(7), 14)
    search = Cutting(pp.schedule("zb-v", 3, 6), pieces, 10**6)
    search.start()
    before = search.time(search.best)
    worse = (0, 14, 14, 14, 14, 14, 14)
    assert not search.adopt([worse, search.best]) and search.time(search.best) == before
    other = Cutting(pp.schedule("dualpipev", 3, 6), pieces, 10**6)
    other.start()
    other.improve(300_000)
    assert search.adopt([worse, other.best]) and search.best == other.best and search.time(other.best) < before
