"""O and L in time and memory: against replays with two resources for each rank that share nothing with ppedu."""

from dataclasses import replace
from fractions import Fraction

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, read
from test_varied_costs import draw_costs, rows

import ppedu as pp
from ppedu import Costs, simulate

WHOLE, INPUT, KEPT = 12, 5, Fraction(1, 4)  # of each stage: its activations, its input, and what I keeps of the former
randoms = st.randoms(use_true_random=False)


def drawn(chance, lowered=False):
    schedule = judge.draw(chance, lowered=lowered)
    return judge.offload(chance, judge.recompute(chance, schedule) if chance.random() < 0.5 else schedule)


@given(randoms, st.booleans())
@often(150)
def test_copies_run_beside_computations(chance, lowered):
    schedule = drawn(chance, lowered)
    costs, length, latency = draw_costs(chance, schedule)
    copies = [Fraction(chance.randint(0, 9), chance.choice([1, 2])) for _ in range(schedule.stages)]
    timeline = simulate(schedule, replace(costs, offload=copies))

    def longer(action):
        return copies[action.stage] if action.op in judge.COPIES else length(action)

    assert rows(timeline) == judge.clock(schedule, longer, latency)
    busy = [sum(end - start for each, start, end in row if each.op not in judge.COPIES) for row in timeline.rows]
    if not lowered:
        assert [*timeline.busy] == busy
        moved = replace(schedule, orders=[[each for each in o if each.op not in judge.COPIES] for o in schedule.orders])
        assert simulate(moved, costs).makespan <= timeline.makespan
        free = simulate(schedule, replace(costs, offload=0))
        assert free.makespan == simulate(moved, costs).makespan


def held(row, again, time):
    """Return the memory that a rank holds within a tick, recounted from what has begun and what has ended by then."""
    begun = {each for action, start, _ in row for each in action.singles if start <= time}
    over = {each for action, _, end in row for each in action.singles if end <= time}
    total = 0
    for stage, op, m, _ in begun:
        if op == "F":
            full, half, rest, rerun, out, back = (each(stage, m) for each in (pp.B, pp.I, pp.W, pp.R, pp.O, pp.L))
            left = 0 if {full, rest} & over else KEPT if half in over else 1
            there = out not in over or back in begun
            total += (INPUT if (stage, m) in again and rerun not in begun else WHOLE * left) * there
    return total


@given(randoms)
@often(150)
def test_memory_is_free_from_the_end_of_o_to_the_start_of_l(chance):
    schedule = drawn(chance)
    sizes = {"activation": [WHOLE] * schedule.stages, "stage_input": INPUT, "weight_memory": KEPT}
    copies = [chance.randint(1, 3) for _ in range(schedule.stages)]
    times = {"forward": [1] * schedule.stages, "backward": [2] * schedule.stages, "offload": copies}
    timeline = simulate(schedule, Costs(**times, **sizes))
    again = {each[::2] for order in schedule.orders for each in order if each.op == "R"}
    for rank, row in enumerate(timeline.rows):
        expected = [held(row, again, time) for time in range(int(timeline.end) + 1)]
        curve = timeline.memory(rank)
        assert [[held for time, held in curve if time <= now][-1] for now in range(len(expected))] == expected
        assert timeline.peak_activations[rank] == max(0, *expected)


def test_the_default_copy_is_as_long_as_a_forward_and_slices_take_their_part():
    schedule = read("0F0 0O0 0L0 0B0")
    assert [(str(a), s, e) for a, s, e in simulate(schedule, Costs(forward=3)).spans(0)] == [
        ("0F0", 0, 3),
        ("0O0", 3, 6),
        ("0L0", 6, 9),
        ("0B0", 9, 15),
    ]
    sliced = pp.offload(pp.schedule("seq1f1b", 2, 2))
    times = {e - s for row in simulate(sliced, Costs(offload=3)).rows for a, s, e in row if a.op in judge.COPIES}
    assert times == {Fraction(3, sliced.slices)}


def test_why_a_rank_waits_for_its_copies():
    timeline = simulate(read("0F0 0O0 0F1 0L0 0B0 0B1", microbatches=2), Costs(offload=4))
    assert timeline.why_idle(0, 3) == "rank 0 waits 2–9: 0B0 needs 0L0 from the copy engine"
    path = [str(span.action) for _, span in timeline.critical_path()]
    assert path == ["0F0", "0O0", "0L0", "0B0", "0B1"]
    assert [gap.why for gap in timeline.gaps()] == [timeline.why_idle(0, 3)]
    shares = timeline.causes()
    assert abs(sum(shares.values()) - timeline.bubble) < 1e-12
    steps = simulate(timeline.schedule, Costs(offload=4), steps=2, barrier=False)
    assert steps.makespan == 2 * timeline.makespan and len(steps.steps) == 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe"])
def test_copies_cost_little_time_up_to_k_1(name):
    """If the round trip takes no longer than F and B (k <= 1), offload is a free lunch, says arXiv 2503.01328, §1."""
    plain = simulate(pp.schedule(name, 8, 32))
    moved = pp.offload(plain.schedule)
    for time in (1, Fraction(3, 2)):
        found = simulate(moved, Costs(offload=time))
        assert found.makespan <= plain.makespan * Fraction(105, 100)
        assert found.peak_activations[0] <= plain.peak_activations[0] * Fraction(3, 5)
    assert simulate(moved, Costs(offload=2)).makespan >= 2 * 2 * 32 * Fraction(9, 10)  # now copies take longest
