"""Several steps in a row: with a barrier and without, against the stepper, and as timelines of their own."""

import re
from fractions import Fraction
from itertools import pairwise

import pytest
import stepper

import ppedu as pp
from ppedu import Action, Costs, Schedule, SettingError, simulate

ONE_COPY = ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-min", "dualpipev", "1f1b-overlap"]


def three_in_a_row(schedule):
    """Return three steps of a schedule as one, made from its text."""
    size = schedule.microbatches

    def later(action, step):
        microbatch = r"(?<=[FBIW])\d+"
        return Action.parse(re.sub(microbatch, lambda found: str(int(found[0]) + step * size), str(action)))

    orders = tuple(tuple(later(action, step) for step in range(3) for action in order) for order in schedule.orders)
    return Schedule("three", schedule.placement, 3 * size, orders)


@pytest.mark.parametrize("name", ONE_COPY)
def test_without_a_barrier_a_rank_begins_the_next_step_at_once(name):
    schedule = pp.schedule(name, ranks=4, microbatches=8)
    share = 4 // schedule.chunks  # of ticks: a stage's F, so that latency is half of a share's F
    expected = stepper.run(
        three_in_a_row(schedule),
        lambda action: share * sum(1 + (single.op == "B") for single in action.singles),
        latency=2,
    )
    timeline = simulate(schedule, Costs(latency=Fraction(1, 2)), steps=3, barrier=False)
    assert [[(a, 4 * start, 4 * end) for a, start, end in row] for row in timeline.rows] == expected
    assert timeline.makespan * 4 == max(end for row in expected for *_, end in row)


@pytest.mark.parametrize("name", [*ONE_COPY, "dualpipe"])
def test_with_a_barrier_steps_follow_each_other(name):
    schedule = pp.schedule(name, ranks=4, microbatches=8)
    one, three = simulate(schedule), simulate(schedule, steps=3)
    assert three.makespan == 3 * one.makespan and three.bubble == pytest.approx(one.bubble)
    assert [step.start for step in three.steps] == [0, one.makespan, 2 * one.makespan]
    assert three.peak_activations == one.peak_activations and not three.schedule.problems
    assert one.steps == (one,)


def test_zero_bubble_schedules_wait_only_once():
    """A rank of ZB-H2 works from its start to its end, so three steps take a makespan and two spans."""
    schedule = pp.schedule("zb-h2", ranks=4, microbatches=8)
    assert simulate(schedule, steps=3, barrier=False).makespan == 27 + 2 * 24
    assert simulate(schedule, steps=3).makespan == 3 * 27


@pytest.mark.parametrize("barrier", [True, False])
def test_each_step_is_a_timeline_of_the_schedule_on_the_clock_of_all(barrier):
    schedule = pp.lower(pp.schedule("zb-v", ranks=4, microbatches=8))
    whole = simulate(schedule, Costs(latency=Fraction(1, 4)), steps=3, barrier=barrier)
    assert len(whole.steps) == 3
    for step in whole.steps:
        assert step.schedule is schedule
        assert [[span.action for span in row] for row in step.rows] == [list(order) for order in schedule.orders]
    for rank, row in enumerate(whole.rows):
        times = [(start, end) for step in whole.steps for _, start, end in step.rows[rank]]
        assert times == [(start, end) for _, start, end in row]
    assert all((before.end <= after.start) == barrier for before, after in pairwise(whole.steps))


def test_the_wait_for_the_next_step_has_a_reason():
    timeline = simulate(pp.schedule("zb-h2", ranks=4, microbatches=8), steps=2)
    assert timeline.why_idle(0, 25) == "rank 0 waits 24–27: 0F8 is of the next step, and rank 3 ends this one at 27"
    assert timeline.why_idle(3, 28) == "rank 3 waits 27–30: 3F8 needs 2F8 from rank 2"
    path = [span for _, span in timeline.critical_path()]
    assert (path[0].start, path[-1].end) == (0, 54) and all(a.end == b.start for a, b in pairwise(path))


@pytest.mark.parametrize("barrier", [True, False])
def test_the_causes_of_several_steps_add_up_to_their_bubble(barrier):
    costs = Costs(forward=[1, 2, 1, 1], latency=Fraction(1, 4))
    timeline = simulate(pp.schedule("zb-h2", ranks=4, microbatches=8), costs, steps=3, barrier=barrier)
    assert sum(timeline.causes().values()) == pytest.approx(timeline.bubble)
    if barrier:
        assert timeline.causes() == pytest.approx(timeline.steps[0].causes())


def test_copies_of_a_model_need_the_barrier():
    schedule = pp.schedule("dualpipe", ranks=4, microbatches=8)
    with pytest.raises(SettingError, match="dualpipe has stages on two ranks, which wait for each other's grad"):
        simulate(schedule, barrier=False)
    with pytest.raises(SettingError, match="steps must be at least 1; got 0"):
        simulate(schedule, steps=0)


def test_several_steps_of_two_copies_keep_each_microbatch_in_its_copy():
    schedule = pp.schedule("dualpipe", ranks=4, microbatches=10)
    whole = simulate(schedule, steps=2)
    ranks = [[whole.schedule.placement.rank(0, m) for m in range(start, start + 5)] for start in (0, 5, 10, 15)]
    assert ranks == [[0] * 5, [0] * 5, [3] * 5, [3] * 5]
    second = [str(span.action) for span in whole.steps[1].rows[0] if span.action.op == "F"]
    assert second == [str(action) for action in schedule.orders[0] if action.op == "F"]
