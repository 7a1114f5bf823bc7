"""Which rank holds which stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

from ppedu import Placement, SettingError

few = st.integers(1, 12)


def test_loop_deals_stages_out_in_turn():
    placement = Placement.make("loop", 4, 3)
    assert placement.holders == (0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3)
    assert (placement.name, placement.ranks, placement.stages, placement.chunks) == ("loop", 4, 12, 3)
    assert placement.stages_of(1) == (1, 5, 9)


@given(few, few)
@often(50)
def test_every_stage_is_held_by_one_rank_and_every_rank_holds_as_many(ranks, chunks):
    placement = Placement.make("loop", ranks, chunks)
    held = [placement.stages_of(rank) for rank in range(ranks)]
    assert sorted(stage for stages in held for stage in stages) == list(range(ranks * chunks))
    assert {len(stages) for stages in held} == {chunks}
    assert all(placement.rank(stage) == rank for rank, stages in enumerate(held) for stage in stages)


@given(few, few)
@often(30)
def test_in_a_loop_the_next_stage_is_on_the_next_rank(ranks, chunks):
    placement = Placement.make("loop", ranks, chunks)
    for stage in range(placement.stages - 1):
        assert placement.rank(stage + 1) == (placement.rank(stage) + 1) % ranks


@pytest.mark.parametrize("name", ["ring", "Loop", "", None])
def test_an_unknown_placement_is_refused_with_those_there_are(name):
    with pytest.raises(SettingError, match="no placement called") as caught:
        Placement.make(name, 4)
    assert repr(name) in str(caught.value) and "loop" in str(caught.value)


@pytest.mark.parametrize("what", ["ranks", "chunks"])
@pytest.mark.parametrize("value", [0, -1, True, "4", 4.0, None])
def test_counts_must_be_whole_numbers_above_0(what, value):
    with pytest.raises(SettingError, match=rf"^{what} must be (a whole number|at least 1); got {value!r}$"):
        Placement.make("loop", **{"ranks": 1, "chunks": 1, what: value})
