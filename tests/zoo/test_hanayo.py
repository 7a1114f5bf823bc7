"""Hanayo: the order in the paper's figure, the bubble and the memory."""

from fractions import Fraction

import pytest
import stepper
from strategies import sample, slow

import ppedu as pp
from ppedu import Action, B, Costs, F, SettingError

CHUNKS = (2, 4, 6)


def test_two_ranks_and_two_microbatches_as_drawn():
    """Slots:     0   1   2   3   4   5   6   7   8   9
    first  rank  0F0     0F1 3F0 3B0 3F1 3B1 0B0     0B1
    second rank      1F0 2F0,1F1 2F1 2B0 1B0 2B1 1B1
    """
    drawn = ["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"]
    orders = pp.schedule("hanayo", 2, 2).orders
    assert [list(order) for order in orders] == [[Action.parse(word) for word in line.split()] for line in drawn]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, *slow([8])])
def test_more_waves_divide_the_bubble_at_the_memory_of_p_microbatches(chunks, p):
    for f, b in [(1, 1), (1, 2), (5, 2)]:
        for m in (p, 2 * p, 5 * p):
            timeline = pp.simulate(pp.schedule("hanayo", p, m, chunks=chunks), Costs(forward=f, backward=b))
            assert set(timeline.idle) == {Fraction(2 * (p - 1) * max(f, b), chunks)}
            assert max(timeline.peak_activations) == p


@pytest.mark.parametrize("chunks", CHUNKS)
def test_if_f_is_b_hanayo_waits_as_long_as_interleaved_and_holds_less(chunks):
    for p in (2, 4, 8):
        hanayo, interleaved = (
            pp.simulate(pp.schedule(name, p, 4 * p, chunks=chunks), Costs(forward=1, backward=1))
            for name in ("hanayo", "interleaved")
        )
        assert hanayo.makespan == interleaved.makespan
        assert max(hanayo.peak_activations) == max(interleaved.peak_activations) - Fraction(p - 1, chunks)


def test_no_order_of_the_same_actions_is_faster_for_p_microbatches():
    """The bound is for one wave and B = 2F.

    The last rank waits for p-1 forwards of a chunk, runs only 2p of the 3p-1 forwards that fit before its first
    backward, and after its last backward p-1 backwards of a chunk are left on other ranks.
    """
    for p in range(1, 9):
        least = Fraction((p - 1) + (p - 1) + 2 * (p - 1), 2)
        assert set(pp.simulate(pp.schedule("hanayo", p, p), Costs(forward=1, backward=2)).idle) == {least}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_hanayo_is_legal_for_any_number_of_microbatches_and_runs_in_the_stepper(chunks):
    for p in range(1, 10):
        for m in sample(range(1, 21), start=3 * p + chunks):
            schedule = pp.schedule("hanayo", p, m, chunks=chunks)
            assert pp.check(schedule) == []
            for rank, order in enumerate(schedule.orders):
                stages = [stage for stage in range(p * chunks) if stage % (2 * p) in (rank, 2 * p - 1 - rank)]
                assert sorted(order) == sorted(make(stage, k) for make in (F, B) for stage in stages for k in range(m))
            if m < 14:
                assert stepper.run(schedule) is not None


@pytest.mark.parametrize(("chunks", "instead"), [(1, "2"), (3, "2 or 4"), (5, "4 or 6")])
def test_an_odd_number_of_chunks_is_refused_with_the_nearest_even_ones(chunks, instead):
    with pytest.raises(SettingError) as caught:
        pp.schedule("hanayo", 4, 8, chunks=chunks)
    assert str(caught.value) == (f"hanayo needs an even number of chunks; got {chunks} — try {instead}")
