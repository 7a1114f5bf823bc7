"""Results, texts and errors of `pp.theory`. tests/papers compares the formulas with the simulation."""

from fractions import Fraction
from functools import partial

import pytest

import ppedu as pp
from ppedu import Costs, SettingError
from ppedu.zoo import theory


@pytest.mark.parametrize(
    ("fact", "reads"),
    [
        (
            theory.idle("interleaved", ranks=4, microbatches=8),
            "4.5 = (p-1)(F+B)/v if m >= p (arXiv 2104.04473, §2.2)",
        ),
        (
            theory.bubble("gpipe", ranks=4, microbatches=8),
            "0.2727 = (p-1)(F+B) / (m(F+B) + (p-1)(F+B)) (arXiv 1811.06965)",
        ),
        (
            theory.peak("interleaved", 2, 4, chunks=3),
            "2.333, 1.667 = min(pv+p-1-2r, mv)/v if p divides m (arXiv 2104.04473, §2.2)",
        ),
        (
            theory.makespan("gpipe", 4, 8, Costs(latency=Fraction(1, 2))),
            "36 = m(F+B) + ((p-1)(F+B) + 2(p-1)c) (arXiv 1811.06965; latency by simulation)",
        ),
        (
            theory.span("zb-h2", 4, 8, Costs(forward=1, input=2, weight=1, latency=1)),
            "41 = m(F+B) + (p-1)max(0, I+2c-F, F+I+2c-2W) if m >= 2p-1, 2c <= F+I "
            "(arXiv 2401.10241, table 2; corrected by simulation)",
        ),
        (
            theory.idle("dualpipe", 4, 8),
            "2 = (p/2-1)(FB+B-3W) if p even, m even, m >= 2p, F = I, W <= I, FB = F+B (arXiv 2412.19437, table 2)",
        ),
    ],
    ids=range(6),
)
def test_a_fact_prints_its_value_formula_conditions_and_source(fact, reads):
    assert str(fact) == repr(fact) == reads


def test_values_are_exact_if_the_costs_are():
    bubble = theory.bubble("1f1b", 4, 8)
    assert bubble.value == Fraction(3, 11) and float(bubble) == 3 / 11
    assert type(theory.idle("1f1b", 4, 8).value) is int
    inexact = theory.idle("1f1b", 4, 8, Costs(forward=0.1, backward=0.2, latency=0.05)).value
    assert type(inexact) is float
    assert inexact == pytest.approx(pp.simulate(pp.schedule("1f1b", 4, 8), Costs(0.1, 0.2, latency=0.05)).idle[0])


@pytest.mark.parametrize(("module", "name"), [("numpy", "int64"), ("torch", "tensor")])
@pytest.mark.parametrize(
    "ask", [partial(theory.makespan, "1f1b"), partial(theory.peak, "gpipe"), theory.least_makespan]
)
def test_counts_may_be_integers_of_numpy_and_torch(module, name, ask):
    kind = getattr(pytest.importorskip(module), name)
    assert ask(kind(4), kind(8)) == ask(4, 8)
    assert theory.idle("interleaved", kind(4), kind(8), chunks=kind(2)) == theory.idle("interleaved", 4, 8, chunks=2)


def test_the_bubble_is_0_if_no_action_takes_time():
    nothing = Costs(forward=0, backward=0)
    assert theory.bubble("1f1b", 4, 8, nothing).value == pp.simulate(pp.schedule("1f1b", 4, 8), nothing).bubble == 0
    assert theory.overhead("1f1b", 4, 8, nothing).value == 0


def test_chunks_default_to_those_of_the_schedule():
    for name in ("interleaved", "looped-bfs", "interleaved-overlap"):
        assert theory.makespan(name, 4, 8) == theory.makespan(name, 4, 8, chunks=pp.schedule(name, 4, 8).chunks)


UNEQUAL = Costs(forward=2, input=1, weight=3)


@pytest.mark.parametrize(
    ("quantity", "asked", "says"),
    [
        ("span", ("zb-h2", 4, 6), "the bubble in span of zb-h2, .*, holds for m >= 2p-1; got m=6, p=4; simulate it"),
        ("idle", ("zb-interleaved", 4, 8), "no formula for the idle time of zb-interleaved; simulate it"),
        ("bubble", ("1f1b-overlap", 4, 8), "no formula for the bubble .*, only for its makespan and its span"),
        ("peak", ("zb-interleaved", 4, 8), "no formula for the peak of zb-interleaved; simulate it"),
        ("idle", ("interleaved", 4, 3), "the idle time of interleaved, .*, holds for m >= p; got m=3, p=4"),
        ("peak", ("interleaved", 4, 6), "the peak of interleaved, .*, holds for p divides m; got m=6, p=4"),
        ("idle", ("dualpipe", 5, 10), "dualpipe exists only for p even; got p=5"),
        ("idle", ("dualpipe", 4, 8, UNEQUAL), "holds for F = I; got F=2, I=1"),
        ("idle", ("interleaved", 4, 8, Costs(latency=1)), "of interleaved, .*, is known for zero latency only"),
        ("span", ("zb-h2", 4, 8, Costs(latency=2)), r"holds for 2c <= F\+I; got c=2, F=1, I=1"),
        (
            "idle",
            ("1f1b", 4, 8, Costs(forward=[1, 2, 1, 1])),
            r"one number for forward, not \(1, 2, 1, 1\), or simulate",
        ),
        ("idle", ("1f1b", 4, 8, {"forward": 1}), "costs must be Costs, such as Costs"),
        ("idle", ("mine", 4, 8), "no formula is known for 'mine'; simulate it, or take one of: naive, gpipe"),
        ("idle", (None, 4, 8), "no formula is known for None"),
        ("idle", ("1f1b", 0, 8), "ranks must be at least 1; got 0"),
        ("idle", ("1f1b", 4, 8.0), "microbatches must be a whole number; got 8.0"),
    ],
)
def test_a_formula_that_does_not_hold_is_refused_with_its_condition(quantity, asked, says):
    with pytest.raises(SettingError, match=says):
        getattr(theory, quantity)(*asked)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"name": "interleaved", "chunks": 0}, "chunks must be at least 1; got 0"),
        ({"name": "1f1b", "chunks": 2}, "the number of chunks of 1f1b is fixed"),
        ({"name": "seq1f1b", "slices": 0}, "slices must be at least 1; got 0"),
        ({"name": "seq1f1b", "costs": Costs(attention=0.5)}, "for equal slices; leave out attention"),
    ],
)
def test_an_option_that_a_formula_does_not_have_is_refused(asked, says):
    with pytest.raises(SettingError, match=says):
        theory.idle(ranks=4, microbatches=8, **asked)


def test_a_sum_is_in_parentheses_where_it_is_divided():
    """Of the idle time F+B on 2 ranks with 4 microbatches: 3 of 15, and of 12."""

    @pp.register("late", facts=pp.zoo.Facts("here", idle="F+B"))
    def late(rank, ranks, microbatches):
        return [action for m in range(microbatches) for action in (pp.F(rank, m), pp.B(rank, m))]

    assert str(theory.bubble("late", 2, 4)) == "0.2 = (F+B) / (m(F+B) + (F+B)) (here)"
    assert theory.overhead("late", 2, 4).value == Fraction(1, 4)
    assert theory.makespan("late", 2, 4).value == 15
