"""Placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

from ppedu import Placement, SettingError

few = st.integers(1, 12)


def test_loop_deals_stages_out_in_turn():
    placement = Placement.make("loop", 4, 3)
    assert placement.holders == ((0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3),)
    assert (placement.name, placement.ranks, placement.stages, placement.chunks) == ("loop", 4, 12, 3)
    assert placement.stages_of(1) == (1, 5, 9)


@given(few, few)
@often(50)
def test_every_rank_holds_the_same_number_of_stages(ranks, chunks):
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
def test_an_unknown_placement_is_refused_with_the_available_names(name):
    with pytest.raises(SettingError, match="unknown placement") as caught:
        Placement.make(name, 4)
    assert repr(name) in str(caught.value) and "loop" in str(caught.value)


def test_counts_must_be_whole_numbers_above_0():
    for what in ["ranks", "chunks"]:
        for value in [0, -1, True, "4", 4.0, None]:
            with pytest.raises(SettingError, match=rf"^{what} must be (a whole number|at least 1); got {value!r}$"):
                Placement.make("loop", **{"ranks": 1, "chunks": 1, what: value})


def test_a_v_goes_down_and_comes_back_up():
    placement = Placement.make("v", 3, chunks=3)
    assert [placement.rank(stage) for stage in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [placement.chunk(stage) for stage in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert placement.stages_of(0) == (0, 5, 6)


def test_in_two_directions_the_microbatch_decides_the_copy():
    placement = Placement.make("bidirectional", 4, microbatches=6)
    assert (placement.stages, placement.copies, placement.chunks) == (4, 2, 1)
    for microbatch, ranks in [(0, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [3, 2, 1, 0]), (5, [3, 2, 1, 0])]:
        assert [placement.rank(stage, microbatch) for stage in range(4)] == ranks
    assert placement.stages_of(1) == (1, 2)
    assert [Placement.make("bidirectional", 2, microbatches=3).copy(m) for m in range(3)] == [0, 0, 1]


def test_in_two_directions_there_can_be_a_v_in_each():
    placement = Placement.make("bidirectional", 3, chunks=2, microbatches=4)
    assert placement.holders == ((0, 1, 2, 2, 1, 0), (2, 1, 0, 0, 1, 2))
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 2, 3, 5), (1, 4), (0, 2, 3, 5)]


def test_a_custom_placement_gives_every_rank_a_stage():
    placement = Placement.custom([0, 0, 1, 2, 1])
    assert (placement.ranks, placement.stages, placement.chunks) == (3, 5, 2)
    for holders in ([], [0, 2], [1]):
        with pytest.raises(SettingError, match="each rank from 0 on"):
            Placement.custom(holders)


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "0", None])
def test_a_stage_that_does_not_exist_is_on_no_rank(stage):
    placement = Placement.make("loop", 4)
    for ask in (placement.rank, placement.chunk):
        with pytest.raises(SettingError, match=r"there is no stage .*; the stages are 0 to 3"):
            ask(stage)
