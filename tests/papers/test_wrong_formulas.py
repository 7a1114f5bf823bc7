"""Published formulas and orders that are wrong, and mistakes that are legal but slow."""

from fractions import Fraction

import pytest

import ppedu as pp
from ppedu import B, Costs, F, Schedule

UNIT = Costs(forward=1, backward=1)


def with_warmup(p, m, warmup):
    """Return 1F1B with a warm-up of `warmup(rank)` forwards."""
    orders = []
    for rank in range(p):
        first = min(max(warmup(rank), 0), m)
        order = [F(rank, i) for i in range(first)]
        for i in range(first, m):
            order += [F(rank, i), B(rank, i - first)]
        orders.append((*order, *(B(rank, i) for i in range(m - first, m))))
    return Schedule("mine", pp.Placement.make("loop", p), m, tuple(orders))


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 32)])
def test_the_bubble_of_1f1b_is_not_p_minus_1_over_2m_minus_2_plus_p(p, m):
    bubble = pp.simulate(pp.schedule("1f1b", p, m), UNIT).bubble
    assert bubble == pp.simulate(pp.schedule("gpipe", p, m), UNIT).bubble
    assert bubble != pytest.approx((p - 1) / (2 * (m - 1) + p))


def test_where_gpipe_idles_for_43_percent_1f1b_does_too_and_not_for_19():
    """One README claims 43 % for GPipe and 19 % for 1F1B, for the same p and m."""
    for name in ("gpipe", "1f1b"):
        assert f"{pp.simulate(pp.schedule(name, 4, 4)).bubble:.0%}" == "43%"


def test_no_rank_holds_p_plus_m_over_pm_of_all_activations():
    """All activations are m microbatches of p shares; a rank that keeps all of its own holds 1/p of them."""
    for p, m in [(2, 4), (4, 8), (8, 8)]:
        for name in ("naive", "gpipe", "1f1b"):
            peak = max(pp.simulate(pp.schedule(name, p, m)).peak_activations)
            assert Fraction(peak, p * m) <= Fraction(1, p) < Fraction(p + m, p * m)


def test_a_warmup_that_is_short_by_one_is_legal_and_slow():
    timeline = pp.simulate(with_warmup(4, 8, lambda rank: 2 - rank), UNIT)
    assert timeline.makespan == 36
    assert pp.simulate(pp.schedule("1f1b", 4, 8), UNIT).makespan == 22
    assert timeline.peak_activations == (3, 2, 1, 1)


def test_a_warmup_in_reverse_hangs():
    problems = pp.check(with_warmup(4, 8, lambda rank: rank))
    assert [problem.kind for problem in problems] == ["deadlock"]


def test_an_order_in_which_the_last_rank_runs_f1_to_fm_loses_one_and_invents_one():
    base = pp.schedule("1f1b", 4, 8)
    last = tuple(
        action._replace(microbatch=action.microbatch + 1) if action.op == "F" else action for action in base.orders[3]
    )
    problems = pp.check(Schedule("mine", base.placement, 8, (*base.orders[:3], last)))
    assert [(p.kind, str(p.action)) for p in problems if p.kind in ("range", "missing")] == [
        *[("range", "3F8"), ("missing", "3F0")]
    ]


def test_a_table_in_which_every_rank_runs_its_forwards_first_is_gpipe_and_not_1f1b():
    all_first = with_warmup(4, 8, lambda rank: 8)
    assert all_first.orders == pp.schedule("gpipe", 4, 8).orders != pp.schedule("1f1b", 4, 8).orders
