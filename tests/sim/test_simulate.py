"""Simulated times: by hand, and properties of any schedule. test_varied_costs compares them with the judge's."""

from dataclasses import replace
from fractions import Fraction

import judge
import pytest
import stepper
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_schedules, often, read
from test_varied_costs import draw_costs, rows, scaled

import ppedu as pp
from ppedu import Action, Costs, ScheduleError, SettingError, simulate
from ppedu.core.numeric import by_microbatch


def test_an_overlap_given_as_a_number_is_for_a_ranks_share():
    schedule = read("0F0 0F1 1F0 (1F1;1B0)OVERLAP_F_B 0B0 1B1 0B1", microbatches=2, chunks=2)
    pair = simulate(schedule, Costs(overlap=Fraction(5, 2))).spans(0)[3]
    assert (pair.start, pair.end) == (Fraction(3, 2), Fraction(3, 2) + Fraction(5, 4))


@given(legal_schedules(pairs=0.2))
@often(30)
def test_by_default_a_backward_takes_two_forwards_and_each_half_of_it_one(schedule):
    """Costs are for a rank's share, so with v chunks each stage takes 1/v of them."""
    ticks = {"F": 1, "B": 2, "I": 1, "W": 1}
    expected = stepper.run(schedule, lambda action: sum(ticks[single.op] for single in action.singles))
    share = Fraction(1, schedule.chunks)
    assert rows(simulate(schedule)) == [[(a, start * share, end * share) for a, start, end in row] for row in expected]


@given(st.randoms(use_true_random=False))
@often(60)
def test_a_rank_that_waits_for_a_message_is_as_late_as_it(chance):
    schedule = judge.loosen(chance, judge.draw(chance, apart=chance.random() < 0.3))
    if not judge.legal(schedule):
        return
    costs, length, latency = draw_costs(chance, schedule)
    found = [[span for span in row if not judge.is_wait(span[0])] for row in rows(simulate(schedule, costs))]
    assert found == judge.clock(schedule, length, latency)


@given(st.randoms(use_true_random=False), st.floats(0.001, 1000))
@often(30)
def test_floats_are_close_to_the_exact_times(chance, factor):
    schedule = judge.draw(chance)
    costs, length, latency = draw_costs(chance, schedule)
    expected = judge.clock(schedule, length, latency)
    for row, exact in zip(rows(simulate(schedule, scaled(costs, factor))), expected, strict=True):
        assert [span[0] for span in row] == [span[0] for span in exact]
        times = [time / factor for span in row for time in span[1:]]
        assert times == pytest.approx([time for span in exact for time in span[1:]], rel=1e-9, abs=1e-9)


@given(st.randoms(use_true_random=False))
@often(30)
def test_no_action_gets_earlier_when_something_takes_longer(chance):
    schedule = judge.draw(chance)
    costs, _, latency = draw_costs(chance, schedule, overlap=False)
    name = chance.choice(["forward", "backward", "input", "weight", "latency"])
    if name == "latency":
        new = {link: time + chance.randint(0, 2) for link, time in latency.items()}
    else:
        new = [by_microbatch(lambda time: time + chance.randint(0, 2), each) for each in getattr(costs, name)]
    slower = replace(costs, **{name: new})
    for before, after in zip(simulate(schedule, costs).rows, simulate(schedule, slower).rows, strict=True):
        assert all(old.start <= new.start and old.end <= new.end for old, new in zip(before, after, strict=True))


def test_latency_is_paid_between_ranks_only():
    loop = read("0F0 1F0 2F0 2B0 1B0 0B0", chunks=3)
    assert simulate(loop, Costs(latency=100)).makespan == simulate(loop).makespan == 3
    line = pp.schedule("naive", 3, 1)
    assert simulate(line, Costs(latency=100)).makespan == 9 + 4 * 100


def test_latency_keeps_no_rank_busy():
    timeline = simulate(pp.schedule("gpipe", 2, 4), Costs(forward=1, backward=1, latency=1))
    assert [(span.start, span.end) for span in timeline.spans(0)[:4]] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [(span.start, span.end) for span in timeline.spans(1)[:4]] == [(2, 3), (3, 4), (4, 5), (5, 6)]


def test_the_rank_before_continues_after_the_first_half_of_a_backward():
    timeline = simulate(read("0F0 0B0", "1F0 1I0 1W0"))
    assert [tuple(span)[1:] for span in timeline.spans(1)] == [(1, 2), (2, 3), (3, 4)]
    assert [tuple(span)[1:] for span in timeline.spans(0)] == [(0, 1), (3, 5)]


def test_messages_and_sharding_take_no_time():
    plain = read("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2)
    lowered = read(
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD",
        "1UNSHARD 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
        microbatches=2,
    )
    costs = Costs(forward=3, backward=4, latency=2)
    timeline, expected = simulate(lowered, costs), simulate(plain, costs)
    compute = tuple(tuple(span for span in row if span.action.op in ("F", "B")) for row in timeline.rows)
    assert compute == expected.rows
    assert (timeline.busy, timeline.idle, timeline.span) == (expected.busy, expected.idle, expected.span)


def test_a_message_leaves_when_it_is_sent_and_not_before():
    late = read(
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        *["1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"],
        microbatches=2,
    )
    assert simulate(late).spans(1)[1] == (Action.parse("1F0"), 2, 3)


def test_the_timeline_knows_its_schedule_and_costs():
    schedule, costs = pp.schedule("1f1b", 2, 3), Costs(forward=3)
    timeline = simulate(schedule, costs)
    assert timeline.schedule is schedule and timeline.costs is costs and timeline.source == "simulated"
    assert simulate(schedule).costs == Costs()


def test_simulating_an_illegal_schedule_raises_its_problems():
    schedule = read("0F0")
    with pytest.raises(ScheduleError, match="0B0 is never run") as caught:
        simulate(schedule)
    assert [problem.kind for problem in caught.value.problems] == ["missing"]


@pytest.mark.parametrize("name", ["forward", "backward", "input", "weight", "overlap", "activation"])
@pytest.mark.parametrize("value", [[1], [1, 1, 1]])
def test_costs_for_another_number_of_stages_are_refused(name, value):
    given = {name: value, "backward": [9, 9]} if name in ("input", "weight") else {name: value}
    with pytest.raises(
        SettingError, match=f"{len(value)} costs for 2 stages; give 2, one for each stage, or a single number"
    ):
        timeline = simulate(pp.schedule("1f1b", 2, 2), Costs(**given))
        assert timeline.peak_activations  # computed only here
