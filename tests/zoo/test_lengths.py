"""Slices that are not equally long: times and memory against sums over single tokens, and slices of equal time."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu import Costs, SettingError
from ppedu.view.link import decode


def tokens_of(lengths, attention):
    """Return the part of a sequence's time that each slice takes, token by token: token i attends to i + 1/2 tokens."""
    total = sum(lengths)
    each = [(1 - attention) * Fraction(1, total) + attention * Fraction(2 * i + 1, total**2) for i in range(total)]
    cuts = [0, *itertools.accumulate(lengths)]
    return [sum(each[start:end]) for start, end in itertools.pairwise(cuts)]


def test_times_are_those_of_the_tokens():
    dice = random.Random(1)
    for _ in range(30):
        lengths = [dice.randint(1, 9) for _ in range(dice.randint(1, 5))]
        attention, ranks, whole = dice.choice([0, Fraction(1, 3), 1]), dice.randint(1, 3), dice.randint(1, 3)
        made = pp.schedule("seq1f1b", ranks, whole, slices=len(lengths))
        found = pp.simulate(made, Costs(4, 8, attention=attention, lengths=lengths, latency=dice.choice([0, 1])))
        parts = tokens_of(lengths, attention) * whole
        table = Costs([[4 * part for part in parts]] * ranks, [[8 * part for part in parts]] * ranks)
        assert found.rows == pp.simulate(made, replace(table, latency=found.costs.latency)).rows


def test_weights_take_time_by_tokens_alone():
    """I and its W together take what B takes; W has no attention."""
    orders = [[pp.F(0, 0), pp.F(0, 1), pp.I(0, 1), pp.W(0, 1), pp.I(0, 0), pp.W(0, 0)]]
    made = pp.Schedule("split", pp.Placement.make("loop", 1, slices=2), 2, orders)
    row = pp.simulate(made, Costs(8, input=8, weight=8, attention=Fraction(1, 4), lengths=(3, 1))).rows[0]
    _, _, i, w, *_ = [end - start for _, start, end in row]
    assert w == 2 and i + w == 16 * tokens_of((3, 1), Fraction(1, 4))[1]


def test_equal_lengths_change_nothing():
    made = pp.schedule("seq1f1b", 3, 4, slices=4)
    for costs in (Costs(), Costs(4, 8, attention=Fraction(1, 2)), Costs(0.1, attention=0.3, activation=0.7)):
        known, found = (pp.simulate(made, each) for each in (costs, replace(costs, lengths=(5, 5, 5, 5))))
        assert found.rows == known.rows and found.peak_activations == known.peak_activations
    plain = Costs(4, 8)
    for schedule in (made, pp.schedule("1f1b", 3, 4)):
        assert (
            pp.simulate(schedule, plain).causes().keys()
            == pp.simulate(schedule, Costs(4, 8, lengths=())).causes().keys()
        )


def test_memory_goes_by_tokens():
    """A rank has all of the first microbatch, 16, then frees its last slice, 4, or not, for the next one's first, 8."""
    made = pp.schedule("seq1f1b", 2, 2, slices=3)
    timeline = pp.simulate(made, Costs(activation=16, lengths=(8, 4, 4)))
    assert timeline.peak_activations == (16 + 8, 16 - 4 + 8)
    assert timeline.memory(1)[:4] == [(0, 0), (Fraction(1, 2), 8), (1, 12), (Fraction(5, 4), 16)]


def test_a_wrong_number_of_lengths_is_refused():
    made = pp.schedule("seq1f1b", 2, 3, slices=3)
    for asked, says in (
        (lambda: pp.simulate(made, Costs(lengths=(1, 2))), "2 lengths for sequences of 3 slices; give 3, one for each"),
        (lambda: pp.simulate(pp.schedule("1f1b", 2, 2), Costs(lengths=(1, 2))), "2 lengths for sequences of 1 slice"),
        (lambda: Costs(lengths=3), "lengths must be the lengths of a sequence's slices, such as"),
        (lambda: Costs(lengths=(1, 0)), "a slice's length must be a number above 0; got 0"),
        (lambda: pp.theory.idle("seq1f1b", 2, 3, Costs(lengths=(1, 2)), slices=2), "formulas are for equal slices"),
        (lambda: pp.search.optimal(2, 4, Costs(lengths=(1, 2))), "2 lengths for sequences of 1 slice"),
        (lambda: pp.equal_time_slices(3, 4, 0), "3 tokens cannot be cut into 4 slices"),
        (lambda: pp.equal_time_slices(8, 4, 2), "attention must be a part of the time"),
    ):
        with pytest.raises(SettingError, match=says):
            asked()


def test_lengths_are_saved_linked_and_fitted(tmp_path):
    made = pp.schedule("seq1f1b", 3, 2, slices=3)
    timeline = pp.simulate(made, Costs(4, 8, attention=Fraction(1, 4), lengths=(6, 4, 2), latency=1))
    timeline.save(tmp_path / "t.json")
    found = pp.Timeline.load(tmp_path / "t.json")
    assert found.costs == timeline.costs and found.peak_activations == timeline.peak_activations
    assert pp.simulate(made, Costs.fit(timeline)).rows == timeline.rows
    assert "lengths=[6, 4, 2]" in decode(timeline.link().partition("#")[2])[1]["costs"]


def test_slices_of_equal_time_are_equal_but_for_whole_tokens():
    dice = random.Random(2)
    for _ in range(40):
        tokens, slices = dice.randint(50, 400), dice.randint(1, 8)
        attention = Fraction(dice.randint(0, 10), 10)
        lengths = pp.equal_time_slices(tokens, slices, attention)
        times = tokens_of(lengths, attention)
        token = tokens_of((tokens - 1, 1), attention)[1]  # the longest
        assert sum(lengths) == tokens and abs(max(times) - Fraction(1, slices)) <= token
    assert pp.equal_time_slices(131072, 4, 0.5) == (47976, 33031, 26849, 23216)
    assert pp.equal_time_slices(7, 7, 1) == (1,) * 7 and pp.equal_time_slices(9, 3, 0) == (3, 3, 3)


def test_unequal_slices_are_a_cause_of_the_bubble():
    made = pp.schedule("seq1f1b", 4, 8, slices=4)
    costs = Costs(attention=0.5)
    fixed, equal = (pp.simulate(made, each) for each in (costs, replace(costs, lengths=(6, 4, 3, 3))))
    assert round(fixed.bubble, 3) == 0.314 and round(equal.bubble, 3) == 0.128
    assert equal.causes()["variation"] < fixed.causes()["variation"]
    assert sum(equal.causes().values()) == pytest.approx(equal.bubble)
