"""V-Min, V-Half and v-adaptive: the published memory, the least idle time it allows, and the memory limit."""

import itertools
from fractions import Fraction

import pytest
import stepper
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, sample, slow

import ppedu as pp
from ppedu import Costs, F, I, SettingError, W

UNIT = Costs(forward=2, backward=4)  # F = I = W = 1 in each chunk
PEAKS = {"v-min": lambda p: (p + 4) // 3, "v-half": lambda p: (p + 2) // 2, "v-adaptive": lambda p: p}


def idle(schedule, costs=UNIT):
    (time,) = set(pp.simulate(schedule, costs).idle)
    return time


def most_held(order):
    """Return the peak of the chunks between their F and the end of their W; it follows from the order alone."""
    return max(itertools.accumulate({"F": 1, "I": 0, "W": -1}[action.op] for action in order))


def complete(schedule):
    """Return whether each rank r runs F, I and W of every microbatch in its stages, r and 2p-1-r, exactly once."""
    for rank, order in enumerate(schedule.orders):
        stages = rank, 2 * schedule.ranks - 1 - rank
        wanted = {make(stage, m) for make in (F, I, W) for stage in stages for m in range(schedule.microbatches)}
        if set(order) != wanted or len(order) != len(wanted):
            return False
    return True


def least_idle(p, k):
    """Return a lower bound on the idle time, in ticks, of V-shaped schedules that hold k microbatches, for m >= p.

    The last rank cannot work for p-1 ticks. Its first I comes after 3p-1 ticks, when the first microbatch has passed
    down, up and down again; before that it can run at most 2k forwards. After its last forward 3p ticks remain: up,
    down and up again, and a W. It then holds at most 2k chunks, and has at most I and W to run for each.
    """
    return max(p - 1, 3 * p - 1 - 2 * k) + max(0, 3 * p - 4 * k)


@pytest.mark.parametrize("p", [*range(1, 9), *slow(range(9, 17))])
def test_adaptive_v_idles_as_little_as_its_memory_allows(p):
    for k in range((p + 4) // 3, p + 1):
        for m in (p, 2 * p + 1) if p < 10 else (p,):
            schedule = pp.schedule("v-adaptive", p, m, memory=k)
            assert idle(schedule) == least_idle(p, k)
            assert max(map(most_held, schedule.orders)) == 2 * k


# arXiv 2405.15362: peaks of floor((p+4)/3) and floor((p+2)/2). The idle times are those of the authors' own scheduler
# (sail-sg/zero-bubble-pipeline-parallelism, zbv_greedy.py) at unit cost, for any m >= 3p.
THEIRS = {
    "v-min": {2: 3, 3: 5, 4: 11, 5: 15, 6: 17, 7: 23, 8: 27, 9: 29, 10: 35, 11: 39, 12: 41},
    "v-half": {2: 1, 3: 5, 4: 5, 5: 11, 6: 11, 7: 17, 8: 17, 9: 23, 10: 23, 11: 29, 12: 29},
}


@pytest.mark.parametrize("name", THEIRS)
def test_idle_time_is_at_most_the_published_at_the_published_memory(name):
    for p, theirs in THEIRS[name].items():
        for m in (2 * p, 3 * p + 1):
            timeline = pp.simulate(pp.schedule(name, p, m), UNIT)
            assert timeline.idle[0] <= theirs
            assert set(timeline.peak_activations) == {PEAKS[name](p)}


@pytest.mark.parametrize("p", [*range(3, 9), *slow(range(9, 17))])
def test_the_closed_forms_in_the_docstrings_hold(p):
    assert idle(pp.schedule("v-half", p, p)) == (3 * p - 4 if p % 2 else 3 * p - 7)
    assert idle(pp.schedule("v-min", p, p)) == 4 * p - {0: 7, 1: 5, 2: 9}[p % 3]


def test_v_adaptive_is_no_slower_than_zb_v_in_its_memory():
    for p in range(1, 9):
        for m in range(1, 2 * p + 1):
            zb_v, ours = (
                pp.simulate(pp.schedule(name, p, m, **options), UNIT)
                for name, options in (("zb-v", {}), ("v-adaptive", {"memory": p}))
            )
            assert ours.makespan <= zb_v.makespan


@pytest.mark.parametrize("name", PEAKS)
def test_v_shaped_schedules_are_legal_for_any_number_of_microbatches_and_run_in_the_stepper(name):
    for p in range(1, 10):
        for m in sample(range(1, 21), start=3 * p):
            schedule = pp.schedule(name, p, m)
            assert pp.check(schedule) == []
            assert complete(schedule)
            if m < 14:
                rows = stepper.run(schedule)
                assert max(row[-1][2] for row in rows) == pp.simulate(schedule, UNIT).makespan


@given(st.data())
@often(60)
def test_the_memory_limit_holds_and_more_memory_is_never_slower(data):
    p, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 24))
    memory = Fraction(data.draw(st.integers(2 * ((p + 4) // 3), 2 * p + 2)), 2)
    less, more = (pp.schedule("v-adaptive", p, m, memory=each) for each in (memory, memory + Fraction(1, 2)))
    assert pp.check(less) == []
    assert max(map(most_held, less.orders)) <= 2 * memory
    assert pp.simulate(more, UNIT).makespan <= pp.simulate(less, UNIT).makespan


TIMES = [(2, 3, 2), (3, 3, 2), (4, 5, 3), (3, 4, 5), (3, 2, 3)]  # of F, I and W


@pytest.mark.parametrize("p", [3, 4, 5, *slow([8, 11, 12])])
def test_the_bubble_of_v_half_does_not_grow_with_m_for_unequal_times(p):
    """All of these fulfil the conditions of arXiv 2405.15362, §3: W + 2I >= 2F and W + 2F >= 2I."""
    for f, i, w in TIMES:
        costs = Costs(forward=f, input=i, weight=w)
        assert idle(pp.schedule("v-half", p, 3 * p), costs) == idle(pp.schedule("v-half", p, 5 * p), costs)


def test_the_bubble_of_v_min_grows_with_m_for_unequal_times():
    costs = Costs(forward=2, input=3, weight=2)
    assert idle(pp.schedule("v-min", 8, 32), costs) > idle(pp.schedule("v-min", 8, 16), costs)


def test_memory_defaults_to_halfway_to_zb_v_and_counts_in_halves():
    assert pp.schedule("v-adaptive", 8, 16) == pp.schedule("v-adaptive", 8, 16, memory=6)
    assert pp.schedule("v-adaptive", 4, 9, memory=float("inf")) == pp.schedule("v-adaptive", 4, 9, memory=4)
    assert pp.schedule("v-adaptive", 4, 9, memory=2.5) == pp.schedule("v-adaptive", 4, 9, memory=Fraction(11, 4))
    assert max(pp.simulate(pp.schedule("v-adaptive", 4, 9, memory=2.5)).peak_activations) == Fraction(5, 2)


@pytest.mark.parametrize("memory", [1, 0, -1, 1.5, True, "2", [2], float("nan")], ids=repr)
def test_too_little_memory_is_refused_with_the_minimum(memory):
    with pytest.raises(SettingError) as caught:
        pp.schedule("v-adaptive", 4, 8, memory=memory)
    assert str(caught.value) == f"the memory of v-adaptive must be at least 2 microbatches on 4 ranks; got {memory!r}"
