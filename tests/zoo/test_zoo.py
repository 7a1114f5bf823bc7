"""The simple published schedules: their orders at any size, and the errors of `pp.schedule`."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ppedu as pp
from ppedu import Action, SettingError, zoo

ZOO = ("naive", "gpipe", "1f1b")
PRINTED = {
    "naive": ["F0 B0 F1 B1 F2 B2 F3 B3"] * 3,
    "gpipe": ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3,
    "1f1b": ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
}
sizes = given(ranks=st.integers(1, 10), microbatches=st.integers(1, 24))
many = settings(max_examples=40, deadline=None)


def kinds(order):
    return "".join(action.op for action in order)


def test_every_module_with_a_schedule_is_a_family():
    files = Path(zoo.__file__).parent.glob("*.py")
    assert {file.stem for file in files if "@register(" in file.read_text(encoding="utf-8")} - {"registry"} == {
        *zoo.FAMILIES
    }


@pytest.mark.parametrize("name", ZOO)
def test_three_ranks_and_four_microbatches_as_printed(name):
    expected = [[Action.parse(f"{rank}{word}") for word in line.split()] for rank, line in enumerate(PRINTED[name])]
    assert [list(order) for order in pp.schedule(name, 3, 4).orders] == expected


@pytest.mark.parametrize("name", ZOO)
@sizes
@many
def test_each_rank_runs_the_microbatches_in_order(name, ranks, microbatches):
    for order in pp.schedule(name, ranks, microbatches).orders:
        for op in "FB":
            assert [action.microbatch for action in order if action.op == op] == list(range(microbatches))


@sizes
@many
def test_1f1b_has_a_warm_up_a_steady_state_and_a_cooldown(ranks, microbatches):
    for rank, order in enumerate(pp.schedule("1f1b", ranks, microbatches).orders):
        warmup = min(ranks - 1 - rank, microbatches)
        assert kinds(order) == "F" * warmup + "FB" * (microbatches - warmup) + "B" * warmup


@sizes
@many
def test_in_the_naive_schedule_one_rank_works_at_a_time(ranks, microbatches):
    timeline = pp.simulate(pp.schedule("naive", ranks, microbatches))
    spans = sorted((span.start, span.end) for row in timeline.rows for span in row)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert timeline.makespan == sum(timeline.busy)


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["ranks", "microbatches"])
@pytest.mark.parametrize("value", [0, -1, -100])
def test_counts_below_1_are_refused(what, value):
    with pytest.raises(SettingError, match=f"^{what} must be at least 1; got {value}$"):
        pp.schedule("1f1b", **{"ranks": 2, "microbatches": 2, what: value})


def test_counts_that_are_not_whole_numbers_are_refused():
    for what in ["ranks", "microbatches"]:
        for value in [True, False, "4", 4.0, 0.5, None, [4]]:
            with pytest.raises(SettingError) as caught:
                pp.schedule("1f1b", **{"ranks": 2, "microbatches": 2, what: value})
            assert str(caught.value) == f"{what} must be a whole number; got {value!r}"


@pytest.mark.parametrize("name", ["1F1B", "zero-bubble", "", None])
def test_an_unknown_name_is_refused_with_the_available_ones(name):
    with pytest.raises(SettingError, match=r"unknown schedule|give the name of a schedule") as caught:
        pp.schedule(name, 2, 2)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in ZOO)


@pytest.mark.parametrize(("said", "meant"), [("1F1B", "1f1b"), ("DualPipe", "dualpipe"), ("interleave", "interleaved")])
def test_a_misspelled_name_is_refused_with_the_closest_one(said, meant):
    with pytest.raises(SettingError, match=f"unknown schedule {said!r}; did you mean {meant!r}. available: naive,"):
        pp.schedule(said, 2, 2)


@pytest.mark.parametrize("name", ZOO)
def test_an_unknown_option_is_refused(name):
    with pytest.raises(SettingError, match=f"the schedule {name!r} .*'colour'"):
        pp.schedule(name, 2, 2, colour="red")
