"""Reordering: the result is legal, needs no more memory, and is never better than the best of all orders."""

import random
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import judge
import pytest
from exhaustive import fastest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu import Costs, F, I, Schedule, SettingError, W, simulate
from ppedu.sim.reorder import reorder
from ppedu.zoo import theory


def draw(chance, most=14):
    """Draw a run of at most `most` actions with any placement."""
    while True:
        schedule = judge.draw(chance, lowered=False, most_ranks=3)
        if sum(map(len, schedule.orders)) <= most:
            return simulate(schedule, draw_costs(chance, schedule.stages))


def draw_costs(chance, stages):
    forward, first, second = (chance.randint(0, 4) for _ in range(3))
    return Costs(
        forward=forward,
        input=first,
        weight=second,
        overlap=chance.choice([None, 3]),
        activation=[chance.randint(0, 3) for _ in range(stages)],
        weight_memory=chance.choice([1, Fraction(1, 3), 0]),
    )


def require_witness(timeline, found):
    """Assert that `found` runs the same actions legally, in no more time and no more memory."""
    assert pp.check(found.schedule) == [] and judge.legal(found.schedule)
    for before, after in zip(timeline.schedule.orders, found.schedule.orders, strict=True):
        assert Counter(action for action in before if action.computes) == Counter(after)
    length = {action: end - start for row in timeline.rows for action, start, end in row}
    assert [[tuple(span) for span in row] for row in found.rows] == judge.clock(found.schedule, length.get, 0)
    assert found.makespan <= timeline.makespan
    assert all(map(lambda after, before: after <= before, found.peak_activations, timeline.peak_activations))


@given(st.randoms(use_true_random=False))
@often(150)
def test_the_order_found_works_in_the_same_memory_and_is_no_better_than_the_best(chance):
    timeline = draw(chance)
    found = reorder(timeline)
    require_witness(timeline, found)
    assert found.makespan >= fastest(timeline)
    if found.makespan == timeline.makespan:
        assert found.schedule == timeline.schedule, "an order that gains nothing is not changed"


def test_nearly_all_that_the_best_order_saves_is_found():
    """A lower bound of 0 would always be correct, but useless."""
    chance = random.Random(7)
    possible = found = 0
    for _ in range(150):
        timeline = draw(chance)
        possible += timeline.makespan - fastest(timeline)
        found += timeline.makespan - reorder(timeline).makespan
    assert found >= 0.89 * possible > 0  # needs all three rules


@pytest.mark.parametrize("name", pp.schedules())
def test_published_schedules_have_witnesses_too(name):
    """They are too large to try all orders, and in some of them the memory of every rank is full most of the time."""
    for size in (4, 8), (3, 7), (8, 4):
        try:
            schedule = pp.schedule(name, *size)
        except SettingError:
            continue  # not for these sizes
        if schedule.placement.barriers or schedule.offloaded:
            continue  # its order stays
        timeline = simulate(schedule, Costs(forward=2, input=3, weight=2))
        require_witness(timeline, reorder(timeline))


def test_weight_backwards_that_delay_other_ranks_are_moved_back():
    """GPipe with each W right after its I. The best order takes 3 forwards, then 3 actions a microbatch."""
    placement = pp.Placement.make("loop", 4)
    orders = [
        (*(F(rank, m) for m in range(8)), *(half(rank, m) for m in range(8) for half in (I, W))) for rank in range(4)
    ]
    timeline = simulate(Schedule("split", placement, 8, tuple(orders)))
    assert timeline.makespan == 30
    assert reorder(timeline).makespan == theory.least_makespan(4, 8).value == 27


def test_floats_give_the_same_order_as_exact_times():
    """0.1 + 0.2 > 0.3 in floats. If reordering saw a difference, a rank would start the wrong action."""
    chance = random.Random(7)
    for _ in range(60):
        timeline = draw(chance)
        tenth = {name: getattr(timeline.costs, name) for name in ("forward", "input", "weight", "overlap")}
        exact = {name: time and Fraction(time, 10) for name, time in tenth.items()}
        rounded = {name: time and time / 10 for name, time in tenth.items()}
        makespans = [
            reorder(simulate(timeline.schedule, replace(timeline.costs, **costs))).makespan
            for costs in (exact, rounded)
        ]
        assert makespans[1] == pytest.approx(float(makespans[0]))


def test_messages_and_sharding_are_left_out():
    plain = simulate(pp.schedule("zb-v", 3, 4))
    lowered = simulate(pp.lower(plain.schedule, fsdp=True))
    assert reorder(lowered) == reorder(plain)


def test_64_ranks_and_256_microbatches_take_seconds():
    timeline = simulate(pp.schedule("1f1b", 64, 256))
    assert timeline.makespan == 957
    start = time.process_time()
    assert reorder(timeline) is timeline
    assert time.process_time() - start < 5  # about 0.5 on an idle machine
