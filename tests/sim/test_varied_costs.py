"""Costs that vary by microbatch and by link: compared with the stepper's and the judge's times."""

import pickle
import random
import re
from fractions import Fraction
from functools import partial
from itertools import permutations

import judge
import pytest
import stepper
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, read

import ppedu as pp
from ppedu import Costs, SettingError, Timeline, simulate
from ppedu.course.board.board import Board
from ppedu.sim.reorder import reorder
from ppedu.zoo import theory

NAMES = {"F": "forward", "B": "backward", "I": "input", "W": "weight", "R": "forward"}


def rows(timeline):
    return [[tuple(span) for span in row] for row in timeline.rows]


def draw_costs(chance, schedule, overlap=None):
    """Return costs per stage, or per stage and microbatch, and the same as `length(action)` and a dict of latencies."""
    overlap = chance.random() < 0.5 if overlap is None else overlap
    size = range(schedule.microbatches)
    tables = {name: [[chance.randint(0, 4) for _ in size] for _ in range(schedule.stages)] for name in NAMES.values()}
    tables["overlap"] = [[2 * chance.randint(0, 4) for _ in size] for _ in range(schedule.stages)] if overlap else None
    given = dict(tables)
    for name, table in tables.items():
        for stage in range(schedule.stages if table else 0):
            if chance.random() < 0.3:  # a mixed list: the same for each microbatch
                table[stage] = [table[stage][0]] * len(size)
                given[name] = [*given[name][:stage], table[stage][0], *given[name][stage + 1 :]]
    latency = {link: chance.randint(0, 3) for link in permutations(range(schedule.ranks), 2)}

    def length(action):
        if action.parts and overlap:
            return sum(tables["overlap"][part.stage][part.microbatch] for part in action.parts) // 2
        return sum(tables[NAMES[each.op]][each.stage][each.microbatch] for each in action.singles)

    return Costs(**given, latency=latency), length, latency


def scaled(costs, factor):
    def times(cost):
        return [times(each) for each in cost] if isinstance(cost, tuple) else cost and cost * factor

    latency = {link: time * factor for link, time in costs.latency.items()}
    return Costs(**{name: times(getattr(costs, name)) for name in (*NAMES.values(), "overlap")}, latency=latency)


@given(st.randoms(use_true_random=False), st.booleans())
@often(120)
def test_the_judge_gives_the_same_times_for_any_placement_lowered_or_not(chance, lowered):
    schedule = judge.draw(chance, lowered=lowered, sharded=lowered and chance.random() < 0.3)
    costs, length, latency = draw_costs(chance, schedule)
    expected = judge.clock(schedule, length, latency)
    timeline = simulate(schedule, costs)
    assert rows(timeline) == expected
    assert timeline.makespan == max(end for row in expected for *_, end in row)
    exact = rows(simulate(schedule, scaled(costs, Fraction(1, 3))))
    assert exact == [[(a, Fraction(s, 3), Fraction(e, 3)) for a, s, e in row] for row in expected]
    assert {type(time) for row in exact for _, *times in row for time in times} <= {int, Fraction}


def test_times_of_microbatches_are_those_of_the_stage_whatever_the_number_of_stages():
    schedule = read("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2)
    timeline = simulate(schedule, Costs(forward=[1, [2, 5]], backward=[[1, 3], 4], latency=[[0, 1], [2, 0]]))
    assert rows(timeline) == stepper.run(
        schedule,
        lambda action: {"0F": [1, 1], "1F": [2, 5], "0B": [1, 3], "1B": [4, 4]}[str(action)[:2]][action.microbatch],
        {(0, 1): 1, (1, 0): 2},
    )


def test_missing_times_follow_microbatch_by_microbatch():
    schedule = read("0F0 0I0 0W0 0F1 0B1", microbatches=2)
    timeline = simulate(schedule, Costs(forward=[[1, 4]], weight=1, recompute=True))
    assert [span.end - span.start for span in timeline.spans(0)] == [1, 1 + 1, 1, 4, 8 + 4]
    with pytest.raises(SettingError, match="half of a split backward takes longer than the full backward"):
        simulate(schedule, Costs(forward=[[1, 4]], weight=3))


# --- functions --------------------------------------------------------------------------------------------------


def growing(stage, microbatch):
    return stage + Fraction(microbatch, 2)


def test_a_function_gives_the_same_as_a_table_and_the_timeline_holds_the_table():
    schedule = pp.schedule("zb-h1", 4, 8)
    table = [[growing(stage, microbatch) for microbatch in range(8)] for stage in range(4)]
    timeline = simulate(schedule, Costs(forward=growing, latency=1))
    assert timeline == simulate(schedule, Costs(forward=table, latency=1))
    assert timeline.costs == Costs(forward=table, latency=1)
    assert pickle.loads(pickle.dumps(timeline)) == timeline


def test_functions_are_pickled_by_name():
    costs = Costs(forward=growing, latency={(0, 1): 1, (1, 0): Fraction(1, 2)})
    assert pickle.loads(pickle.dumps(costs)) == costs and {costs: 1}[pickle.loads(pickle.dumps(costs))] == 1
    with pytest.raises(SettingError, match=r"^backward is a function that cannot be pickled, .*; define it with def"):
        pickle.dumps(Costs(backward=lambda stage, microbatch: 1))
    timeline = simulate(pp.schedule("1f1b", 2, 2), Costs(backward=lambda stage, microbatch: 1))
    assert pickle.loads(pickle.dumps(timeline)) == timeline


@pytest.mark.parametrize("function", [lambda: 1, lambda stage: 1, lambda a, b, c: 1, int])
def test_a_function_takes_a_stage_and_a_microbatch(function):
    with pytest.raises(SettingError, match=r"^forward must be a number, a list, or a function of two numbers, f\(stag"):
        Costs(forward=function)


@pytest.mark.parametrize("value", [-1, None, "1", [1], True, float("nan")])
def test_what_a_function_returns_is_checked(value):
    with pytest.raises(SettingError, match=r"^weight\(1, 2\) must be a number of at least 0; got "):
        simulate(
            pp.schedule("1f1b", 2, 4),
            Costs(weight=lambda stage, microbatch: value if (stage, microbatch) == (1, 2) else 1),
        )


# --- wrong sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "backward", "input", "weight", "overlap"])
def test_costs_for_another_number_of_microbatches_are_refused(name):
    schedule = pp.schedule("1f1b", 2, 4)
    says = "3 costs of stage 1 for 4 microbatches; give 4, one for each microbatch, or a single number for the stage"
    for steps in ({}, {"steps": 2}, {"steps": 2, "barrier": False}):
        with pytest.raises(SettingError, match=says):
            simulate(schedule, Costs(**{"backward": 9, name: [0, [1, 1, 1]]}), **steps)
        with pytest.raises(SettingError, match="1 costs for 2 stages; give 2, one for each stage"):
            simulate(schedule, Costs(**{"backward": 9, name: [[1, 1, 1, 1]]}), **steps)


def test_a_link_without_a_latency_is_named():
    schedule = pp.schedule("1f1b", 4, 8)
    latency = dict.fromkeys([(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)], 1)
    assert simulate(schedule, Costs(latency=latency)).rows == simulate(schedule, Costs(latency=1)).rows
    del latency[2, 3]
    says = (
        "the latency has no entry for the link from rank 2 to rank 3; the schedule uses this link: give it a time, "
        "such as {(2, 3): 0.5}, or give one number for all links"
    )
    for made in (schedule, pp.lower(schedule)):
        with pytest.raises(SettingError, match=re.escape(says)):
            simulate(made, Costs(latency=latency))
    with pytest.raises(SettingError, match="no entry for the link from rank 3 to rank 2"):
        simulate(schedule, Costs(latency=[[0, 1, 1], [1, 0, 1], [1, 1, 0]]))
    assert simulate(schedule.forwards, Costs(latency={(0, 1): 1, (1, 2): 2, (2, 3): 3})).makespan == 11 + 6


def test_a_matrix_and_a_dict_are_the_same_and_have_no_links_from_a_rank_to_itself():
    matrix, links = Costs(latency=[[7, 1], [2, 7]]), Costs(latency={(1, 0): 2, (0, 1): 1, (0, 0): 5})
    assert matrix == links and hash(matrix) == hash(links)
    assert repr(links.latency) == "{(0, 1): 1, (1, 0): 2}" and links.delay(1, 0) == 2 and links.delay(1, 1) == 0
    assert Costs(latency=3).delay(5, 6) == 3 and Costs(latency=3).delay(6, 6) == 0


@pytest.mark.parametrize(
    ("latency", "says"),
    [
        (
            [[0, 1]],
            "must be a number, a dict such as {(0, 1): 0.5}, or a square matrix with a row and a column for each",
        ),
        ([[0, 1], [1]], "must be a number, a dict such as"),
        ([0, 1], "must be a number, a dict such as"),
        ({(0, 1, 2): 1}, "must have a link as each key, (from_rank, to_rank), such as {(0, 1): 0.5}; got (0, 1, 2)"),
        ({0: 1}, "must have a link as each key"),
        ({(0, -1): 1}, "must have a link as each key"),
        ({(0, True): 1}, "must have a link as each key"),
        ({(0, 1): -1}, "must be a number of at least 0; got -1"),
        ([[0, None], [1, 0]], "must be a number of at least 0; got None"),
        (lambda source, target: 1, "must be a number of at least 0; got <function"),
    ],
)
def test_latencies_that_are_not_per_link_are_refused(latency, says):
    with pytest.raises(SettingError, match=f"^latency {re.escape(says)}"):
        Costs(latency=latency)


# --- what else uses costs ---------------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.booleans())
@often(60)
def test_causes_and_the_critical_path_of_varied_costs(chance, lowered):
    schedule = judge.draw(chance, lowered=lowered)
    costs, _, _ = draw_costs(chance, schedule)
    timeline = simulate(schedule, costs)
    causes = timeline.causes()
    assert sum(causes.values()) == pytest.approx(timeline.bubble, abs=1e-12)
    varies = any(
        isinstance(each, tuple) and len({*each}) > 1
        for name in (*NAMES.values(), "overlap")
        for each in getattr(costs, name) or ()
    )
    assert ("variation" in causes) == varies
    without = simulate(schedule, Costs(**{**vars(costs), "latency": 0}))
    idle = [sum(each.idle) / schedule.ranks for each in (timeline, without)]
    assert causes["communication"] * (timeline.makespan or 1) == pytest.approx(idle[0] - idle[1], abs=1e-9)
    path = timeline.critical_path()
    assert path[-1][1].end == timeline.makespan
    list(timeline.gaps())


def test_variation_is_what_vanishes_at_each_stages_mean():
    schedule = pp.schedule("gpipe", 2, 2)
    timeline = simulate(schedule, Costs(forward=[[1, 3], [3, 1]], backward=[2, 2]))
    even = simulate(schedule, Costs(forward=[2, 2], backward=[2, 2]))
    causes = timeline.causes()
    assert [*causes] == ["warm-up and cooldown", "ordering", "imbalance", "variation", "communication"]
    assert causes["variation"] == pytest.approx((timeline.makespan - even.makespan) / timeline.makespan) != 0
    assert causes["imbalance"] == 0 and causes["communication"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize("barrier", [True, False])
def test_each_step_has_the_same_costs_per_microbatch(name, barrier):
    schedule = pp.schedule(name, 4, 8)
    costs = Costs(forward=lambda stage, microbatch: 1 + (3 * stage + 5 * microbatch) % 7, latency=1)
    if name == "dualpipe" and not barrier:
        return
    three, one = simulate(schedule, costs, steps=3, barrier=barrier), simulate(schedule, costs)
    length = {span.action: span.end - span.start for row in one.rows for span in row}
    for step in three.steps:
        assert step.costs == one.costs
        assert all(length[action] == end - start for row in step.rows for action, start, end in row)
    again = simulate(three.schedule, three.costs)  # without a barrier, wherever the ranks let it be
    assert {span.action: span.end - span.start for row in again.rows for span in row} == {
        span.action: span.end - span.start for row in three.rows for span in row
    }
    assert barrier or again.rows == three.rows
    assert sum(three.causes().values()) == pytest.approx(three.bubble)


def test_saved_timelines_keep_varied_costs(tmp_path):
    costs = Costs(forward=growing, backward=[1, 2], latency={(0, 1): 1, (1, 0): Fraction(1, 2)})
    timeline = simulate(pp.schedule("1f1b", 2, 4), costs)
    timeline.save(tmp_path / "x.json")
    loaded = Timeline.load(tmp_path / "x.json")
    assert loaded.costs.latency == timeline.costs.latency and loaded.costs.forward == timeline.costs.forward
    assert loaded.causes() == pytest.approx(timeline.causes())
    timeline.save(tmp_path / "x.html")
    timeline.save(tmp_path / "x.svg")


def test_reordering_uses_the_times_of_each_microbatch():
    schedule = pp.schedule("gpipe", 2, 3)
    timeline = simulate(schedule, Costs(forward=[[1, 1, 9], [1, 1, 1]], backward=[1, [0.1, 0.2, 5.0]]))
    found = reorder(timeline)
    assert found.makespan < timeline.makespan and pp.check(found.schedule) == []


def test_a_board_knows_the_latency_of_each_link():
    board = Board(pp.Placement.make("loop", 2), 2, Costs(forward=growing, latency={(0, 1): 3, (1, 0): 4}))
    board.place("0F0")
    assert board.could_start("1F0") == 3
    board.place("1F0")
    board.place("1B0")
    assert board.could_start("0B0") == board.timeline.spans(1)[-1].end + 4


def test_widgets_show_varied_costs():
    shown = pp.explore("1f1b", 2, 4, costs=Costs(forward=[[1, 2, 3, 4], 2], latency={(0, 1): 1, (1, 0): 2}))
    assert "forward=[[1, 2, 3, 4], 2], latency={(0, 1): 1, (1, 0): 2}" in shown.code()
    shown.set(microbatches=5)
    assert "4 costs of stage 0 for 5 microbatches" in shown.wrong
    assert [label for label, _ in shown.offers] == ["4 microbatches"]
    assert "forward=growing" in pp.explore(costs=Costs(forward=growing)).code()
    pp.compare("1f1b", "gpipe", ranks=2, costs=Costs(forward=growing))


def test_formulas_are_for_equal_microbatches_and_links():
    links, stages, microbatches = Costs(latency={(0, 1): 1}), Costs(forward=[1, 2]), Costs(forward=[[1, 2]] * 2)
    for costs in (links, stages, microbatches, Costs(forward=growing)):
        for formula in (partial(theory.idle, "1f1b"), theory.least_makespan):
            with pytest.raises(SettingError, match=r"formulas are for equal .*; give one number for "):
                formula(2, 2, costs=costs)


# --- sizes --------------------------------------------------------------------------------------------------------


def held(order, sizes):
    """Return the peak of a rank's activations, of whole backwards, by walking along its order."""
    peak = now = 0
    for _, op, m, _ in order:
        now += sizes[m] if op == "F" else 0
        peak = max(peak, now)
        now -= sizes[m] if op == "B" else 0
    return peak


def test_activations_may_vary_by_microbatch():
    sizes = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    for name in ("gpipe", "1f1b"):
        made = pp.schedule(name, 2, 5)
        expected = tuple(map(held, made.orders, sizes))
        costs = Costs(activation=sizes)
        assert simulate(made, costs).peak_activations == expected
        thirds = [[Fraction(size, 3) for size in row] for row in sizes]
        third = simulate(made, Costs(activation=thirds))
        assert third.peak_activations == tuple(Fraction(peak, 3) for peak in expected)
        for barrier in (True, False):
            steps = simulate(made, costs, steps=2, barrier=barrier)
            assert steps.peak_activations == expected and steps.steps[1].peak_activations == expected
    inputs = simulate(
        pp.schedule("gpipe", 2, 5), Costs(activation=sizes, recompute=True, stage_input=[[1, 0, 0, 0, 2], 1])
    )
    # While a microbatch is recomputed, the inputs of later ones are held: that of 4, or of all.
    assert inputs.peak_activations == (4 + 2, 9 + 4)


def test_reordering_keeps_within_sizes_by_microbatch():
    chance = random.Random(5)
    for _ in range(20):
        sizes = [[chance.randint(1, 9) for _ in range(6)]] * 3
        timeline = simulate(pp.schedule("1f1b", 3, 6), Costs(sizes, activation=sizes))
        found = reorder(timeline)
        assert found.makespan <= timeline.makespan
        walked = [*map(held, found.schedule.orders, sizes)]
        assert all(peak <= most for peak, most in zip(walked, timeline.peak_activations, strict=True))
