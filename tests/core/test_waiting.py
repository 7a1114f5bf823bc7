"""Cycles of waiting ranks."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from ppedu.core import waiting
from ppedu.core.waiting import cycles

RANK = st.integers(0, 7)


def is_cycle(cycle, waits_for):
    return all(b in waits_for[a] for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True))


def can_reach(start, waits_for):
    """Return the ranks that `start` waits for, directly or through others."""
    found, left = set(), list(waits_for.get(start, ()))
    while left:
        rank = left.pop()
        if rank not in found:
            found.add(rank)
            left += waits_for.get(rank, ())
    return found


def test_rings_among_ranks_that_wait_for_one_other():
    assert list(cycles({0: [1], 1: [2], 2: [1], 3: [3], 4: [9]})) == [[1, 2], [3]]


@given(st.dictionaries(RANK, st.tuples(RANK)))
def test_every_ring_is_found_if_each_rank_waits_for_one_other(waits_for):
    found = list(cycles(waits_for))
    assert all(is_cycle(cycle, waits_for) for cycle in found)
    on_cycles = sorted(rank for cycle in found for rank in cycle)
    assert on_cycles == sorted(rank for rank in waits_for if rank in can_reach(rank, waits_for))


@given(st.dictionaries(RANK, st.lists(RANK, unique=True)))
def test_a_ring_is_found_if_there_is_any(waits_for):
    found = list(cycles(waits_for))
    assert all(is_cycle(cycle, waits_for) for cycle in found)
    assert bool(found) == any(rank in can_reach(rank, waits_for) for rank in waits_for)


def test_a_long_chain_needs_no_deep_recursion():
    chain = {rank: [rank + 1] for rank in range(100_000)}
    assert list(cycles(chain)) == []
    assert len(next(cycles({**chain, 100_000: [0]}))) == 100_001


def test_a_published_wait_is_current_until_it_ends():
    def outer() -> waiting.Wait:
        return waiting.Wait("outer", "all")

    with waiting.published(outer):
        with contextlib.suppress(KeyError), waiting.published(lambda: waiting.Wait("inner", "all")):
            assert waiting.current().doing == "inner"
            raise KeyError
        assert waiting.current is outer
    assert waiting.current is None
