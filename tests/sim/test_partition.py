"""Partitions of layers into stages."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import often

from ppedu import SettingError
from ppedu.sim.partition import by_cost, evenly, imbalance


def test_ten_layers_in_four_stages():
    assert evenly(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]


@given(st.integers(1, 40).flatmap(lambda stages: st.tuples(st.integers(stages, 200), st.just(stages))))
@often(100)
def test_pieces_follow_each_other_and_differ_by_at_most_one_longer_ones_first(size):
    layers, stages = size
    pieces = evenly(layers, stages)
    lengths = [len(piece) for piece in pieces]
    assert [layer for piece in pieces for layer in piece] == list(range(layers))
    assert len(pieces) == stages
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_more_stages_than_layers_are_refused_with_what_would_fit():
    with pytest.raises(SettingError, match="3 layers cannot be cut into 4 stages; take at most 3 stages"):
        evenly(3, 4)


@pytest.mark.parametrize(
    "layers, stages, name", [(0, 1, "layers"), (4, 0, "stages"), (4, -1, "stages"), ("4", 1, "layers")]
)
def test_counts_must_be_whole_numbers_above_0(layers, stages, name):
    with pytest.raises(SettingError, match=f"^{name} must be"):
        evenly(layers, stages)


# --- by cost ----------------------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(0, 6), st.fractions(0, 3, max_denominator=4), st.floats(0, 4))


def weights(pieces, costs, first=0, last=0):
    """Return the exact weight of each piece."""
    found = [sum(Fraction(costs[layer]) for layer in piece) for piece in pieces]
    found[0] += Fraction(first)
    found[-1] += Fraction(last)
    return found


@given(costs=st.lists(numbers, min_size=1, max_size=8), data=st.data(), first=numbers, last=numbers)
@often(150)
def test_the_partition_is_the_best_of_all_cuts(costs, data, first, last):
    """All cuts are tried: the lightest heaviest piece, then the least sum of squares, then the longest pieces."""
    stages = data.draw(st.integers(1, len(costs)))

    def order(pieces):
        each = weights(pieces, costs, first, last)
        return max(each), sum(weight**2 for weight in each), [-len(piece) for piece in pieces]

    cuts = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), stages - 1))
    best = min(([range(begin, end) for begin, end in pairwise(cut)] for cut in cuts), key=order)
    assert by_cost(costs, stages, first, last) == best
    mean = sum(weights(best, costs, first, last)) / stages
    assert imbalance(costs, best, first, last) == (float(order(best)[0] / mean - 1) if mean else 0)


def cut(weights, stages, cost):
    """Return the least cost of cutting into `stages` pieces, and the ends of the pieces, as late as possible."""
    layers = len(weights)
    least = {layers: (0, ())}
    for _ in range(stages):
        choices = {
            begin: [
                (cost(sum(weights[begin:end]), least[end][0]), [-each for each in (end, *least[end][1])])
                for end in range(begin + 1, layers + 1)
                if end in least
            ]
            for begin in range(layers)
        }
        best = {begin: min(ways) for begin, ways in choices.items() if ways}
        least = {begin: (total, tuple(-each for each in ends)) for begin, (total, ends) in best.items()}
    return least[0]


few, wide = st.sampled_from([0, 1, 1, 2, 40]), st.integers(0, 60)


@given(st.one_of(*[st.lists(each, min_size=8, max_size=20) for each in (few, wide)]), st.integers(1, 8))
@example([5, 4, 3, 1, 17, 8, 10, 0, 0, 49, 31, 8, 6, 3], 4)  # an end would be better if its piece were not too heavy
@often(60)
def test_the_partition_of_more_layers_is_the_best_by_dynamic_programming(costs, stages):
    limit, _ = cut(costs, stages, max)
    _, ends = cut(costs, stages, lambda weight, rest: weight**2 + rest if weight <= limit else float("inf"))
    assert [piece.stop for piece in by_cost(costs, stages)] == list(ends)


@pytest.mark.timeout(20)  # enough for a slow machine; trying every end takes minutes
@pytest.mark.parametrize("layers, stages, last", [(20_000, 64, 0), (20_000, 8, 10_000), (2_000, 1_000, 0.5)])
def test_many_layers_are_cut_quickly(layers, stages, last):
    pieces = by_cost([1] * layers, stages, last=last)
    assert len(pieces) == stages and sum(map(len, pieces)) == layers


@pytest.mark.parametrize("make", [lambda: evenly(10**9, 10**9), lambda: by_cost([1] * 10**4, 10**3)])
def test_far_too_many_stages_are_refused(make):
    with pytest.raises(SettingError, match="must be at most"):
        make()


@given(st.integers(1, 12).flatmap(lambda stages: st.tuples(st.integers(stages, 60), st.just(stages))))
@often(50)
def test_layers_of_equal_costs_are_cut_evenly(size):
    assert by_cost([1.1] * size[0], size[1]) == evenly(*size)


def test_the_heaviest_piece_counts_before_evenness():
    """1 | 5 | 2 3 has a lighter heaviest piece than 1 5 | 2 | 3, and a larger sum of squares: 51 against 49."""
    assert by_cost([1, 5, 2, 3], 3) == [range(1), range(1, 2), range(2, 4)]


def test_a_heavy_head_takes_layers_off_the_last_stage():
    layers = [1] * 12
    pieces = by_cost(layers, 4, last=3)
    assert [len(piece) for piece in pieces] == [4, 4, 3, 1]
    assert imbalance(layers, pieces, last=3) == pytest.approx(4 / 3.75 - 1)
    assert imbalance(layers, evenly(12, 4), last=3) == pytest.approx(6 / 3.75 - 1)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "1", None, True, 1j], ids=repr)
def test_costs_must_be_numbers_of_at_least_0(wrong):
    for layers, head in [([1, wrong, 1], 0), ([1, 1, 1], wrong)]:
        with pytest.raises(SettingError, match="a cost must be a number of at least 0; got "):
            by_cost(layers, 2, last=head)
    with pytest.raises(SettingError, match="a cost must be a number of at least 0; got "):
        imbalance([1, wrong], evenly(2, 2))


@pytest.mark.parametrize(
    "costs, stages, says",
    [
        ([1, 1], 0, "stages must be at least 1; got 0"),
        ([1, 1], 1.0, "stages must be a whole number"),
        ([1, 1], 3, "2 layers cannot be cut into 3 stages; take at most 2"),
        ([], 1, "layers must be at least 1; got 0"),
        (4, 2, "costs must be numbers, one for each layer; got 4"),
    ],
)
def test_impossible_cuts_are_refused(costs, stages, says):
    with pytest.raises(SettingError, match=says):
        by_cost(costs, stages)


@pytest.mark.parametrize("pieces", [[range(2)], [range(1), range(2, 3)], [range(3), range(3, 3)], []], ids=repr)
def test_pieces_that_are_not_all_layers_in_order_are_refused(pieces):
    with pytest.raises(SettingError, match="the pieces must be all of the layers 0 to 2 in order; got "):
        imbalance([1, 1, 1], pieces)
