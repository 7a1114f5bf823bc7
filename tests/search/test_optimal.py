"""The best schedules: proven numbers, all orders tried for small sizes, and two formulations that must agree."""

import subprocess
import sys
import time
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import slow

import ppedu as pp
from ppedu.core import Action, Op, Placement
from ppedu.search.bounds import least_ticks
from ppedu.search.instance import Instance
from ppedu.search.optimal import race, search

UNIT, CHUNKS = pp.Costs(1, 2), pp.Costs(2, 4)  # F = I = W = 1 for stages of one and of two a rank


def require_good(found):
    """The schedule is legal, fits, and takes as long as is said."""
    assert pp.check(found.schedule) == []
    timeline = pp.simulate(found.schedule, found.instance.costs)
    assert timeline.makespan == found.makespan
    assert found.instance.memory is None or max(timeline.peak_activations) <= found.instance.memory
    assert found.bound <= found.makespan


# 4 ranks with one stage each and 8 microbatches, by memory; found and proven in other programs, too.
@pytest.mark.parametrize(("memory", "least"), [(1, 72), (2, 41), *slow([(3, 31)]), (4, 27), (5, 27), (8, 27)])
def test_one_stage_on_each_rank(memory, least):
    found = pp.search.optimal(4, 8, UNIT, memory=memory, time_limit=60)
    require_good(found)
    assert (found.status, found.makespan, found.bound) == ("optimal", least, least)


def test_whole_backwards_make_1f1b_the_best():
    found = pp.search.optimal(4, 8, UNIT, memory=4, split=False, time_limit=60)
    assert (found.status, found.makespan) == ("optimal", 33)
    assert pp.simulate(pp.schedule("1f1b", 4, 8)).makespan == 33


@pytest.mark.parametrize(
    ("microbatches", "memory", "least"),
    [
        *[(4, memory, least) for memory, least in zip(range(4, 9), (35, 32, 29, 28, 27), strict=True)],
        (6, 8, 39),
        *slow([(6, memory, least) for memory, least in zip(range(4, 8), (47, 44, 41, 40), strict=True)]),
    ],
)
def test_two_chunks_in_a_v(microbatches, memory, least):
    found = pp.search.optimal(4, microbatches, CHUNKS, memory=Fraction(memory, 2), placement="v", time_limit=60)
    require_good(found)
    assert (found.status, found.makespan) == ("optimal", least)


@pytest.mark.parametrize("microbatches", [4, *slow([6])])
def test_v_adaptive_is_not_the_best(microbatches):
    adaptive = pp.simulate(pp.schedule("v-adaptive", 4, microbatches, memory=Fraction(5, 2)), CHUNKS)
    found = pp.search.optimal(4, microbatches, CHUNKS, memory=Fraction(5, 2), placement="v", time_limit=60)
    assert adaptive.makespan == found.makespan + 1


# --- all orders ---------------------------------------------------------------------------------------------------


def orders_of(actions, slices):
    """Yield all orders of a rank's actions in which none comes before another that it waits for."""
    if not actions:
        yield ()
    for each in actions:
        if not any(waits(each, other, slices) for other in actions):
            for rest in orders_of([other for other in actions if other != each], slices):
                yield (each, *rest)


def waits(action, other, slices):
    """Whether an action waits for another one of its stage and sequence."""
    if (action.stage, action.microbatch // slices) != (other.stage, other.microbatch // slices):
        return False
    if action.microbatch == other.microbatch:
        return "FRBIW".index(other.op.value) < "FRBIW".index(action.op.value)
    forwards = action.op == other.op == "F" and other.microbatch < action.microbatch
    backwards = action.op == other.op and action.op in ("B", "I") and other.microbatch > action.microbatch
    return forwards or backwards


def with_pairs(order):
    """Yield an order with any of its neighboring forwards and whole backwards as pairs."""
    if len(order) < 2:
        yield order
        return
    first, second, *rest = order
    for more in with_pairs(order[1:]):
        yield (first, *more)
    ops = {first.op, second.op}
    if ops == {Op.F, Op.B} and (first.stage, first.microbatch) != (second.stage, second.microbatch):
        parts = (first, second) if first.op == "F" else (second, first)
        for more in with_pairs(tuple(rest)):
            yield (Action(-1, Op.OVERLAP_F_B, -1, parts), *more)


def best_of_all(instance):
    """Return the least makespan of all schedules, in any order of the microbatches."""
    placement, microbatches = instance.placement, instance.microbatches * instance.placement.slices
    ops = (Op.F, Op.I, Op.W) if instance.split else (Op.F, Op.B)
    orders = []
    for rank in range(placement.ranks):
        held = [
            (stage, microbatch)
            for stage in range(placement.stages)
            for microbatch in range(microbatches)
            if placement.rank(stage, microbatch) == rank
        ]
        stages = sorted({stage for stage, _ in held})
        mine = []
        for again in product((False, True), repeat=len(stages)) if instance.recompute else [[False] * len(stages)]:
            recomputed = {stage for stage, is_so in zip(stages, again, strict=True) if is_so}
            actions = [Action(stage, op, m) for stage, m in held for op in ops]
            actions += [Action(stage, Op.R, m) for stage, m in held if stage in recomputed]
            mine += orders_of(actions, placement.slices)
        orders.append({each for order in mine for each in with_pairs(order)} if instance.pairs else mine)
    best = None
    for rows in product(*orders):
        schedule = pp.Schedule("any", placement, microbatches, rows)
        if schedule.problems:
            continue
        timeline = pp.simulate(schedule, instance.costs)
        if instance.memory is None or max(timeline.peak_activations) <= instance.memory:
            best = timeline.makespan if best is None else min(best, timeline.makespan)
    return best


times = st.integers(1, 4)


@given(st.lists(times, min_size=2, max_size=2), times, times, times, st.integers(0, 2), st.sampled_from([1, 2, None]))
def test_nothing_is_better_than_what_is_called_optimal(forward, first, second, last, latency, memory):
    costs = pp.Costs(forward=forward, input=[first, second], weight=[second, last], latency=latency)
    instance = Instance.of(Placement.make("loop", 2), 2, costs, memory=memory)
    found = search(instance, 60)
    require_good(found)
    assert (found.status, found.makespan) == ("optimal", best_of_all(instance))


or_none = st.lists(st.sampled_from([0, 0, 1]), min_size=2, max_size=2)  # a time, or none


@given(or_none, or_none, or_none, st.integers(0, 1), st.booleans())
@example([0, 1], [0, 0], [0, 1], 1, True)
@example([0, 0], [1, 0], [0, 1], 0, False)
def test_actions_that_take_no_time_hold_memory_too(forward, first, second, latency, split):
    whole = [sum(both) for both in zip(first, second, strict=True)]
    costs = pp.Costs(forward, whole, input=first, weight=second, latency=latency)
    found = search(Instance.of(Placement.make("loop", 2), 2, costs, split, memory=1), 60)
    require_good(found)
    assert (found.status, found.makespan) == ("optimal", best_of_all(found.instance))


@given(times, times, times, st.integers(0, 2), st.integers(2, 8))
def test_pairs_and_whole_backwards(forward, first, second, latency, overlap):
    costs = pp.Costs(forward, input=first, weight=second, latency=latency, overlap=overlap)
    place = Placement.make("bidirectional", 2, 1, 2)
    instance = Instance.of(place, 2, costs, split=False, pairs=True)
    found = search(instance, 60)
    assert (found.status, found.makespan) == ("optimal", best_of_all(instance))


@given(times, times, times, st.integers(0, 2), st.sampled_from([0, Fraction(1, 4)]), st.sampled_from([1, None]))
def test_recomputation_and_all_orders(forward, first, second, latency, kept, memory):
    costs = pp.Costs([forward, 1], input=[first, second], weight=[second, first], latency=latency, stage_input=kept)
    instance = Instance.of(Placement.make("loop", 2), 2, costs, split=False, memory=memory, recompute=True)
    found = search(instance, 60)
    require_good(found)
    assert (found.status, found.makespan) == ("optimal", best_of_all(instance))


OF_SLICES = [  # lengths, attention, memory; each has 4,900 pairs of orders
    ((2, 1), Fraction(1, 2), None),
    *slow([((1, 1), 0, 1), ((1, 2), 0, None), ((3, 2), Fraction(1, 2), 1), ((1, 1), Fraction(1, 2), Fraction(3, 2))]),
]


@pytest.mark.parametrize(("lengths", "attention", "memory"), OF_SLICES)
def test_slices_and_all_orders(lengths, attention, memory):
    costs = pp.Costs([2, 1], [2, 3], latency=1, attention=attention, lengths=lengths)
    instance = Instance.of(Placement.make("loop", 2, slices=2), 2, costs, split=False, memory=memory)
    found = search(instance, 60)
    require_good(found)
    assert (found.status, found.makespan) == ("optimal", best_of_all(instance))


def test_the_time_of_a_pair_is_for_searches_with_pairs():
    for search_for in (lambda costs: pp.search.optimal(2, 2, costs), lambda costs: pp.search.steady(2, costs)):
        with pytest.raises(pp.SettingError, match="overlap is the time of a pair, and pairs are not searched for"):
            search_for(pp.Costs(overlap=2))


# --- two formulations ---------------------------------------------------------------------------------------------


@given(
    st.sampled_from([("loop", 2, 1), ("loop", 3, 1), ("v", 2, 2), ("loop", 2, 2), ("bidirectional", 2, 1)]),
    st.integers(2, 4),
    st.lists(times, min_size=3, max_size=3),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([(1, False), (1, True), (2, False)]),
)
@example(("loop", 2, 1), 3, [1, 2, 1], 1, True, 1, (2, True))
def test_both_formulations_agree(place, microbatches, lengths, latency, split, more, how):
    kind, ranks, chunks = place
    slices, recompute = how
    if slices > 1:  # as many parts as two chunks
        kind, chunks, microbatches = "loop", 1, min(microbatches, 3)
    placement = Placement.make(kind, ranks, chunks, microbatches, slices)
    forward, first, second = (chunks * slices * length for length in lengths)
    costs = pp.Costs(forward, input=first, weight=second, latency=latency)
    memory = 1 + Fraction(more, chunks * slices)
    instance = Instance.of(placement, microbatches, costs, split, memory=memory, recompute=recompute)
    found = search(instance, 60)
    require_good(found)
    assert found.status == "optimal"
    least = int(found.makespan / instance.tick)
    for name in ("intervals", "counters"):
        if least > least_ticks(instance):
            assert race(instance, least - 1, 60, 1, [name]) == (None, name)
        schedule, how = race(instance, least, 60, 1, [name])
        assert how == name and pp.check(schedule) == []
        timeline = pp.simulate(schedule, costs)
        assert timeline.makespan <= found.makespan and max(timeline.peak_activations) <= memory


# --- what else is promised ----------------------------------------------------------------------------------------


def test_times_in_too_many_ticks_are_rounded_and_the_bound_stays_a_bound():
    exact = pp.search.optimal(3, 4, pp.Costs(1, input=1, weight=1, latency=Fraction(1, 3)), memory=2, time_limit=60)
    assert exact.instance.error == exact.gap == 0
    odd = pp.Costs(1.0000013, input=0.9999991, weight=1.0000003, latency=0.3333331)
    found = pp.search.optimal(3, 4, odd, memory=2, time_limit=60)
    require_good(found)
    assert 0 < found.instance.error < 0.01 and found.status == "optimal"
    assert found.bound < found.makespan and 0 < found.gap < 0.01
    assert found.bound <= exact.makespan * 1.0000013 and found.makespan == pytest.approx(exact.makespan, rel=1e-4)


def test_stages_of_unlike_times():
    costs = pp.Costs(forward=[1, 2, 1, 5], input=[1, 2, 1, 5], weight=[1, 2, 1, 5])
    found = pp.search.optimal(2, 4, costs, placement="v", time_limit=60)
    require_good(found)
    assert found.bound >= 4 * 3 * 6  # the work of rank 0: its stages take 1 and 5


def test_a_placement_of_ones_own():
    found = pp.search.optimal(2, 3, pp.Costs(3, 6), placement=Placement.custom([0, 1, 1, 1, 0, 1]), time_limit=60)
    require_good(found)
    assert found.status == "optimal"


def test_progress_is_reported_and_an_interrupt_keeps_the_best():
    told = []
    size = {"memory": 2, "placement": "loop", "chunks": 2, "time_limit": 60}
    found = pp.search.optimal(3, 3, CHUNKS, **size, progress=told.append)
    values = [each.makespan for each in told]
    assert found.status == "optimal" and values == sorted(values, reverse=True) and values[-1] == found.makespan

    def interrupt(found):
        raise KeyboardInterrupt

    stopped = pp.search.optimal(3, 3, CHUNKS, **size, progress=interrupt)
    require_good(stopped)
    assert stopped.status == "feasible" and stopped.makespan >= found.makespan and "at most" in str(stopped)


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ('optimal(4, 12, pp.Costs(2, 4), memory=2.5, placement="v", time_limit=60)', "feasible"),
        ('frontier(6, 12, pp.Costs(2, 4), placement="v", time_limit=60)', "at least"),
        ('steady(16, placement="loop", time_limit=60)', "KeyboardInterrupt"),  # has not found a pattern so early
    ],
)
def test_ctrl_c_ends_a_search(search, says):
    """In a process of its own, as the solvers once aborted it."""
    script = f"""
import os, signal, threading, ppedu as pp
from ortools.sat.python import cp_model  # takes long, before the timer starts
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    print(pp.search.{search})
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 0 and says in ended.stdout, ended.stdout + ended.stderr
    assert time.monotonic() - begin < 30


def test_no_time_gives_the_best_published_schedule():
    found = pp.search.optimal(4, 8, UNIT, memory=3, time_limit=0)
    assert found.status == "feasible" and found.proofs == ("bound",) and found.gap > 0


def test_unfinished_generators_are_left_out(unfinished):
    assert pp.search.optimal(2, 3, UNIT, time_limit=9).makespan == 10
    assert pp.search.frontier(2, 3, UNIT, time_limit=9).published


def test_without_the_solver_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    for name in [name for name in sys.modules if name.startswith("ortools.")]:
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: pp.search.optimal(2, 2), lambda: pp.search.steady(2), lambda: pp.search.frontier(2, 2)):
        with pytest.raises(
            pp.PipelineError, match=r'a search needs OR-tools; install it with: pip install "ppedu\[search\]"'
        ):
            call()
    assert pp.search.atlas(4, 8, 4).makespan == 27


REFUSED = {
    "little memory": ({"memory": Fraction(1, 2)}, "a memory of 0.5 is too little: a rank holds up to 1 for a single"),
    "no memory": ({"memory": 0}, "memory must be a number above 0; got 0"),
    "a placement": ({"placement": "ring"}, "unknown placement 'ring'; available: loop, v, bidirectional"),
    "no placement": ({"placement": 3}, 'placement must be a Placement, or "loop", "v" or "bidirectional"; got 3'),
    "other ranks": ({"placement": Placement.make("loop", 3)}, "the placement is for 3 ranks; got ranks=2"),
    "pairs of halves": ({"pairs": True}, "with pairs, take split=False"),
    "time": ({"time_limit": -1}, "time_limit must be a number of seconds, at least 0; got -1"),
    "halves or not": ({"split": None}, "split must be True or False; got None"),
    "workers": ({"workers": 0}, "workers must be at least 1"),
    "links": ({"costs": pp.Costs(transport="pair")}, "a search has no occupied links, and recomputation only"),
    "recomputation": ({"costs": pp.Costs(recompute=True)}, "a search has no occupied links, and recomputation only"),
    "a varying time": ({"costs": pp.Costs(forward=lambda stage, microbatch: 1)}, "vary by microbatch cannot be used"),
}


@pytest.mark.parametrize(("arguments", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_possible_is_refused(arguments, says):
    with pytest.raises(pp.SettingError, match=says.replace("(", r"\(")):
        pp.search.optimal(2, 4, **arguments)


def test_too_large_a_size_is_refused():
    with pytest.raises(pp.SettingError, match="are 12288 actions, more than a solver can order"):
        pp.search.optimal(64, 64)
