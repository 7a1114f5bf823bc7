"""R in time and memory: against replays that share nothing with ppedu, and what is published about it."""

from dataclasses import replace
from fractions import Fraction

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, read
from test_reorder import require_witness
from test_varied_costs import draw_costs, rows

import ppedu as pp
from ppedu import Costs, simulate
from ppedu.sim.reorder import reorder
from ppedu.zoo import theory

WHOLE, INPUT, KEPT = 12, 5, Fraction(1, 4)  # of each stage: its activations, its input, and what I keeps of the former
randoms = st.randoms(use_true_random=False)


@given(randoms, st.booleans(), st.booleans())
@often(120)
def test_times_are_those_of_the_judge(chance, lowered, recompute):
    """R takes as long as F. Its backward no longer recomputes; with recompute=True, those without an R do."""
    schedule = judge.recompute(chance, judge.draw(chance, lowered=lowered))
    costs, length, latency = draw_costs(chance, schedule)
    again = {each[::2] for order in schedule.orders for each in order if each.op == "R"}

    def longer(action):
        late = [each for each in action.singles if each.op in ("B", "I") and each[::2] not in again]
        more = sum(length(pp.F(each.stage, each.microbatch)) for each in late)
        return length(action) + (0 if not recompute or (action.parts and costs.overlap) else more)

    timeline = simulate(schedule, replace(costs, recompute=recompute))
    assert rows(timeline) == judge.clock(schedule, longer, latency)


def counted(row, again, recompute, time):
    """Return the memory that a rank holds within a tick, recounted from what has begun and what has ended by then."""
    begun = {each for action, start, _ in row for each in action.singles if start <= time}
    over = {each for action, _, end in row for each in action.singles if end <= time}
    held = 0
    for stage, op, m, _ in begun:
        if op == "F":
            full, half, rest = (each(stage, m) for each in (pp.B, pp.I, pp.W))
            restored = pp.R(stage, m) in begun if (stage, m) in again else not recompute or {full, half} & begun
            left = 0 if {full, rest} & over else KEPT if half in over else 1
            held += WHOLE * left if restored else INPUT
    return held


@given(randoms, st.booleans())
@often(120)
def test_a_microbatch_holds_its_input_from_f_to_r(chance, recompute):
    schedule = judge.recompute(chance, judge.draw(chance, lowered=False))
    sizes = {"activation": [WHOLE] * schedule.stages, "stage_input": INPUT, "weight_memory": KEPT}
    times = {"forward": [1] * schedule.stages, "backward": [2] * schedule.stages}
    timeline = simulate(schedule, Costs(**times, **sizes, recompute=recompute))
    again = {each[::2] for order in schedule.orders for each in order if each.op == "R"}
    for rank, row in enumerate(timeline.rows):
        expected = [counted(row, again, recompute, time) for time in range(int(timeline.makespan) + 1)]
        curve = timeline.memory(rank)
        assert [[held for time, held in curve if time <= now][-1] for now in range(len(expected))] == expected
        assert timeline.peak_activations[rank] == max(0, *expected)


@pytest.mark.parametrize("name", pp.schedules())
def test_an_r_before_each_backward_never_waits_longer_and_holds_the_same(name):
    schedule = pp.schedule(name, 4, 8)
    inside = Costs(recompute=True, stage_input=Fraction(1, 8), activation=2)
    before, after = simulate(pp.strip(schedule), inside), simulate(pp.recompute(schedule), inside)
    assert after.makespan <= before.makespan
    assert after.peak_activations == before.peak_activations or schedule.offloaded
    assert after == simulate(pp.recompute(schedule), replace(inside, recompute=False)) or after.busy == before.busy
    assert schedule.forward_only or sum(after.busy) == sum(before.busy)


def test_where_a_rank_never_waits_an_r_changes_nothing():
    alone, costs = pp.schedule("1f1b", 1, 5), Costs(recompute=True)
    assert simulate(pp.recompute(alone)).makespan == simulate(alone, costs).makespan == 20
    every = Costs(recompute=True, stage_input=1, activation=4)
    busy = read("0F0 0F1 0B0 0B1", microbatches=2)
    assert simulate(pp.recompute(busy), every).memory(0)[-1] == simulate(busy, every).memory(0)[-1]


def test_the_recomputation_of_gpipe_fills_its_bubble():
    """In GPipe, says torchgpipe's checkpoint.py, recomputation precedes the gradient to minimize the GPU's idle time.

    Then a gradient travels through the ranks in p B, not in p (F + B), and only the first R of the last rank is late.
    """
    p, m = 4, 8
    schedule, inside = pp.schedule("gpipe", p, m), Costs(recompute=True)
    assert simulate(schedule, inside).makespan == (m + p - 1) * (1 + 1 + 2)
    assert simulate(pp.recompute(schedule)).makespan == (m + p - 1) * (1 + 2) + m
    assert simulate(pp.recompute(schedule, range(p - 1))).makespan == (m + p - 1) * (1 + 2) + m - 1


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (4, 16), (8, 8), (8, 32)])
def test_mario_is_as_fast_as_recomputation_can_be(p, m):
    """Mario (PPoPP 2025): R and more forwards in the bubble, and memory that is small and equal on all ranks.

    Its abstract reports 1.57 times the speed of schedules with checkpointing, on average, and 1.16 times that of those
    without. A simulation cannot show these: at equal times, the order saves at most a quarter, and a schedule without
    checkpointing is faster still. They are of the best configurations found, which use the memory that is saved.
    """
    inside, plain = Costs(recompute=True), pp.schedule("1f1b", p, m)
    found = simulate(pp.schedule("mario", p, m))
    # The last rank but one starts after p-2 forwards, has all its work to do, and its last gradient goes back up.
    assert found.makespan == (p - 2) * (1 + 2) + m * (1 + 1 + 2)
    assert found.peak_activations == (1,) * p and simulate(plain).peak_activations[0] == min(p, m)
    apart = pp.recompute(plain, range(p - 1))
    times = [simulate(plain).makespan, found.makespan, simulate(apart).makespan, simulate(plain, inside).makespan]
    assert times == sorted(times) and len({*times[1:]}) == 3  # on 2 ranks with 3 microbatches, it costs no time
    assert times[3] / found.makespan <= Fraction(4, 3)
    with_inputs = Costs(activation=10, stage_input=1)
    assert theory.peak("mario", p, m, with_inputs).value == simulate(found.schedule, with_inputs).peak_activations


def test_zero_bubble_schedules_recompute_in_their_bubbles():
    for name, inside, apart in (("zb-h1", 38, 35), ("zb-v", 35, Fraction(67, 2))):
        schedule = pp.schedule(name, 4, 8)
        assert simulate(schedule, Costs(recompute=True)).makespan == inside
        assert simulate(pp.recompute(schedule)).makespan == apart


@given(randoms)
@often(60)
def test_a_faster_order_keeps_each_r_between_its_forward_and_its_backward(chance):
    schedule = judge.recompute(chance, judge.draw(chance, lowered=False, most_ranks=3))
    timeline = simulate(schedule, Costs(activation=[3] * schedule.stages, stage_input=1, overlap=3))
    require_witness(timeline, reorder(timeline))


def test_links_causes_fits_and_steps_know_r():
    schedule = pp.schedule("mario", 4, 8)
    streams = Costs(transport="direction", latency=1)
    assert simulate(pp.lower(schedule), streams).makespan == simulate(schedule, Costs(latency=1)).makespan
    assert set(simulate(schedule).causes()) >= {"ordering"}
    assert Costs.fit(simulate(schedule, Costs(3, 7))) == Costs([3] * 4, [7] * 4, activation=1, latency=0)
    steps = simulate(schedule, steps=2, barrier=False)
    assert pp.check(steps.schedule) == [] and len(steps.schedule.recomputed) == 2 * 3 * 8
