"""Layers cut into stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

from ppedu import SettingError
from ppedu.core.partition import evenly


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
