"""Lower bounds from `ppedu.zoo.theory`, and optima that were proved by constraint solving."""

import itertools
from fractions import Fraction
from functools import partial

import pytest

import ppedu as pp
from ppedu import Costs, SettingError
from ppedu.zoo import theory

UNIT = Costs(forward=1, input=1, weight=1)
COSTS = [
    UNIT,
    Costs(forward=2, backward=3, latency=Fraction(1, 2)),
    Costs(forward=3, input=1, weight=4),
    Costs(forward=1, input=5, weight=2, latency=3),
]
SIZES = [(1, 3), (2, 1), (3, 8), (4, 4), (5, 3), (6, 14)]


def one_stage_per_rank(p, m):
    """Yield the published schedules with a stage on each rank, one copy of the model, whole sequences, and no R."""
    for name in pp.schedules():
        try:
            schedule = pp.schedule(name, p, m)
        except SettingError:
            continue
        if schedule.stages == p and schedule.placement.copies == schedule.slices == 1 and not schedule.recomputed:
            yield schedule


def is_split(schedule):
    return any(single.op == "W" for order in schedule.orders for action in order for single in action.singles)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_no_published_schedule_beats_the_bound(p, m):
    for schedule, costs in itertools.product(one_stage_per_rank(p, m), COSTS):
        makespan = pp.simulate(schedule, costs).makespan
        assert makespan >= theory.least_makespan(p, m, costs, split=is_split(schedule)).value


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_gpipe_reaches_the_bound_for_full_backwards(costs):
    for p, m in SIZES:
        assert (
            pp.simulate(pp.schedule("gpipe", p, m), costs).makespan == theory.least_makespan(p, m, costs, False).value
        )


def test_the_bound_refuses_pairs_that_save_time():
    """1F1B with overlapped pairs would beat it."""
    saving = Costs(overlap=1)
    assert pp.simulate(pp.schedule("1f1b-overlap", 4, 8), saving).makespan < theory.least_makespan(4, 8).value
    with pytest.raises(
        SettingError, match="an overlapped pair takes as long as its parts, 3; got 1: leave out overlap"
    ):
        theory.least_makespan(4, 8, saving)
    assert theory.least_makespan(4, 8, Costs(overlap=3)) == theory.least_makespan(4, 8)


@pytest.mark.parametrize("formula", [theory.least_makespan, partial(theory.makespan, "zb-h1")])
def test_formulas_refuse_backwards_that_differ_from_the_sum_of_their_halves(formula):
    """With halves of 2 and 2 and a full backward of 9, a split schedule has less work than m(F+B)."""
    with pytest.raises(
        SettingError, match=r"formulas assume B = I \+ W; got B=9, I=2, W=2; leave out backward, or simulate"
    ):
        formula(4, 8, Costs(backward=9, input=2, weight=2))


def test_two_stages_per_rank_can_beat_the_bound_for_one():
    assert pp.simulate(pp.schedule("dualpipe", 4, 16)).makespan == 50 < theory.least_makespan(4, 16).value == 51


OPTIMA = [
    # p, m, memory in microbatches, whether backwards are split, optimal makespan, optimal span; at unit cost
    (4, 8, 4, True, 27, 27),
    (4, 8, 7, True, 27, 24),
    (4, 8, 4, False, 33, 33),
    (8, 16, 8, True, None, 55),
    (8, 32, 8, True, None, 103),
    *((4, 8, cap, True, None, 24 + bubble) for cap, bubble in enumerate((48, 17, 7, 3, 2, 1, 0, 0), 1)),
]


@pytest.mark.parametrize(("p", "m", "most", "split", "makespan", "span"), OPTIMA)
def test_no_published_schedule_beats_a_proved_optimum(p, m, most, split, makespan, span):
    assert makespan is None or theory.least_makespan(p, m, UNIT, split).value <= makespan
    for schedule in one_stage_per_rank(p, m):
        timeline = pp.simulate(schedule, UNIT)
        if max(timeline.peak_activations) <= most and split >= is_split(schedule):
            assert timeline.span >= span
            assert makespan is None or timeline.makespan >= makespan


@pytest.mark.parametrize(
    ("name", "size", "optimum"),
    [
        ("1f1b", (4, 8), 33),
        ("zb-h1", (4, 8), 27),
        ("zb-h1", (8, 16), 55),
        ("zb-h1", (8, 32), 103),
        ("zb-h2", (4, 8), 24),
    ],
)
def test_these_schedules_are_optimal_at_their_memory(name, size, optimum):
    assert pp.simulate(pp.schedule(name, *size), UNIT).span == optimum
