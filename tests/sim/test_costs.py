"""Costs: valid and invalid values, and defaults."""

import math
import pickle
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_schedules, often, read

import ppedu as pp
from ppedu import Costs, SettingError, simulate
from ppedu.course.board.board import Board

NUMBERS = ["forward", "backward", "input", "weight", "overlap", "latency", "weight_memory", "activation"]
SPLIT = read("0F0 0I0 0W0 0F1 0B1", microbatches=2)  # a split and a full backward

# Values of NumPy and torch are tested where both are installed.
SEQUENCES, SCALARS, ARRAYS = [[1, 2.5], (1, 2.5)], [], []
with suppress(ImportError):
    import numpy as np
    import torch

    SEQUENCES += [np.array([1, 2.5]), torch.tensor([1, 2.5]), [np.int64(1), torch.tensor(2.5)]]
    SCALARS += [np.float64(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)]
    ARRAYS += [np.ones((2, 2, 2)), torch.ones(2, 2, 2), np.array([]), np.array(["1"]), np.nan, np.bool_(1)]


def lengths(**costs):
    """Return the times of F, I, W and B in a schedule of one stage."""
    f, i, w, _, b = (span.end - span.start for span in simulate(SPLIT, Costs(**costs)).spans(0))
    return {"F": f, "I": i, "W": w, "B": b}


@pytest.mark.parametrize(
    "costs, expected",
    [
        ({}, {"F": 1, "B": 2, "I": 1, "W": 1}),
        ({"backward": 3}, {"F": 1, "B": 3, "I": Fraction(3, 2), "W": Fraction(3, 2)}),
        ({"backward": 3.0}, {"F": 1, "B": 3.0, "I": 1.5, "W": 1.5}),
        ({"backward": 5, "weight": 2}, {"F": 1, "B": 5, "I": 3, "W": 2}),
        ({"backward": 5, "input": 2}, {"F": 1, "B": 5, "I": 2, "W": 3}),
        ({"input": 4}, None),
        ({"input": Fraction(1, 2)}, {"F": 1, "B": 2, "I": Fraction(1, 2), "W": Fraction(3, 2)}),
        ({"weight": Fraction(1, 2)}, {"F": 1, "B": 2, "I": Fraction(3, 2), "W": Fraction(1, 2)}),
        ({"input": 4, "weight": 3}, {"F": 1, "B": 7, "I": 4, "W": 3}),
        ({"backward": 5, "input": 4, "weight": 3}, {"F": 1, "B": 5, "I": 4, "W": 3}),
        ({"forward": 0, "backward": 0}, {"F": 0, "B": 0, "I": 0, "W": 0}),
        ({"recompute": True}, {"F": 1, "B": 3, "I": 2, "W": 1}),
        ({"forward": 2, "backward": 3, "weight": 1, "recompute": True}, {"F": 2, "B": 5, "I": 4, "W": 1}),
    ],
)
def test_missing_times_follow_from_given_times(costs, expected):
    if expected is None:
        with pytest.raises(SettingError, match="half of a split backward takes longer than the full backward"):
            lengths(**costs)
    else:
        assert lengths(**costs) == expected


@pytest.mark.parametrize("costs", [{"weight": 3}, {"backward": 1, "weight": 2}, {"backward": [1], "input": [2]}])
def test_half_a_backward_cannot_take_longer_than_all_of_it(costs):
    with pytest.raises(SettingError, match="takes longer than the full backward; give both input and weight"):
        simulate(SPLIT, Costs(**costs))


def test_costs_that_are_not_numbers_of_at_least_0_are_refused():
    for name in NUMBERS:
        for value in [-1, -0.001, math.nan, math.inf, True, "1", Decimal(1), 1j, (), [()], [[1], []], [[[1], [1]]] * 2]:
            with pytest.raises(SettingError, match=f"^{name} must be a number"):
                Costs(**{name: value})


@pytest.mark.parametrize("name", ["activation", "stage_input", "weight_memory"])
def test_memory_is_given_by_numbers_alone(name):
    for value in [[[1]] if name == "weight_memory" else [[[1]]], {}, {(0, 1): 1}, lambda stage, microbatch: 1]:
        with pytest.raises(SettingError, match=f"^{name} must be a number of at least 0; got "):
            Costs(**{name: value})


def test_the_error_shows_the_value_that_is_not_a_number():
    """None for a cost with a default, an entry of a sequence, or a sequence for a cost of all stages."""
    wrong = [(name, None, "None") for name in ("forward", "latency", "weight_memory", "activation")]
    wrong += [(name, [1, -2, 3], "-2") for name in NUMBERS if name != "latency"]
    for name, value, shown in wrong:
        with pytest.raises(SettingError, match=f"^{name} must be a number of at least 0; got {shown}"):
            Costs(**{name: value})
    with pytest.raises(SettingError, match=r"^latency must be a number, a dict .*; got \(1, 1\)"):
        Costs(latency=[1, 1])


@pytest.mark.parametrize("value", [1.001, 2, Fraction(3, 2), [1, 1.5]])
def test_weight_memory_is_at_most_1(value):
    with pytest.raises(SettingError, match="weight_memory is a part of the activation, 0 to 1; got"):
        Costs(weight_memory=value)


def test_sequences_are_stored_as_tuples_of_python_numbers():
    for name in ["forward", "backward", "input", "weight", "overlap", "activation"]:
        for value in SEQUENCES:
            halves = {"backward": [9, 9]} if name in ("input", "weight") else {}
            costs = Costs(**{**halves, name: value})
            assert getattr(costs, name) == (1, 2.5)
            assert all(type(number) in (int, float) for number in getattr(costs, name))
            assert pickle.loads(pickle.dumps(costs)) == costs and hash(costs) == hash(
                Costs(**{**halves, name: (1, 2.5)})
            )


def test_scalars_of_numpy_and_torch_are_numbers():
    for name in NUMBERS:
        for one in SCALARS:
            assert type(getattr(Costs(**{name: one}), name)) is float
            assert simulate(SPLIT, Costs(**{name: one})) == simulate(SPLIT, Costs(**{name: 0.5}))


def test_arrays_of_anything_else_are_refused():
    for name in NUMBERS:
        for value in ARRAYS:
            with pytest.raises(SettingError, match=f"^{name} must be a number"):
                Costs(**{name: value})


def test_a_list_that_changes_later_does_not_change_the_costs():
    times = [1, 2]
    costs = Costs(forward=times)
    times[0] = -1
    assert costs.forward == (1, 2)


def test_costs_whose_sums_would_overflow_are_refused():
    for name in NUMBERS:
        for value in [1e308, 10**400, Fraction(10**3000, 7), 1.1e100]:
            says = f"^{name} must be at most 1e.100, or sums would overflow; give it in a larger unit$"
            with pytest.raises(SettingError, match=says):
                Costs(**{name: value})
            if name != "latency":
                with pytest.raises(SettingError, match=says):
                    Costs(**{name: [1, value]})


EXTREME = st.sampled_from([0, 1e-100, Fraction(1, 10**100), 1, 1e100, 10**100, Fraction(10**101, 11)])


@given(legal_schedules(pairs=0.2), st.lists(EXTREME, min_size=5, max_size=5))
@often(60)
def test_accepted_costs_give_finite_times_that_can_be_printed(schedule, values):
    names = ("forward", "input", "weight", "latency", "activation")
    timeline = simulate(schedule, Costs(**dict(zip(names, values, strict=True))))
    assert math.isfinite(timeline.makespan) and math.isfinite(max(timeline.peak_activations))
    assert 0 <= timeline.bubble <= 1 and sum(timeline.causes().values()) == pytest.approx(timeline.bubble)
    assert len(timeline.text().split("\n")) == 1 + schedule.ranks


@pytest.mark.parametrize("unit", [None, 5, b"s", ["s"]])
@pytest.mark.parametrize(("name", "example"), [("unit", "s"), ("memory_unit", "GB")])
def test_a_unit_that_is_not_text_is_refused(name, example, unit):
    with pytest.raises(SettingError, match=f'^{name} must be text, such as "{example}"; got '):
        Costs(**{name: unit})


def test_boards_and_formulas_do_not_recompute():
    costs = Costs(recompute=True)
    with pytest.raises(SettingError, match="formulas are for activations that are kept"):
        pp.theory.idle("1f1b", 4, 8, costs=costs)
    with pytest.raises(SettingError, match="a board does not recompute activations"):
        Board(pp.Placement.make("loop", 2), 2, costs)
    with pytest.raises(SettingError, match="recompute must be True or False; got 1"):
        Costs(recompute=1)
