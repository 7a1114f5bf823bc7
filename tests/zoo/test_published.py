"""Each published schedule is legal wherever it says it works, and takes the time and memory that its paper states."""

from fractions import Fraction

import pytest

import ppedu as pp
from ppedu import Costs, SettingError

RANKS = range(1, 8)
EVEN = (2, 4, 6, 8)
DOUBLE = Costs(forward=1, backward=2, overlap=3)


def idle(schedule, costs=DOUBLE):
    return set(pp.simulate(schedule, costs).idle)


LEGAL = [
    ("gpipe", {"lifo": True}, RANKS, lambda p: range(1, 12)),
    ("interleaved", {"chunks": 1}, RANKS, lambda p: range(1, 20)),
    ("interleaved", {"chunks": 3}, RANKS, lambda p: range(1, 20)),
    ("looped-bfs", {"chunks": 3}, RANKS, lambda p: range(1, 12)),
    ("zb-h1", {}, RANKS, lambda p: range(1, 20)),
    ("zb-h2", {}, RANKS, lambda p: range(1, 20)),
    ("zb-interleaved", {"chunks": 3}, RANKS, lambda p: range(1, 20)),
    ("zb-v", {}, RANKS, lambda p: range(1, 20)),
    ("1f1b-overlap", {}, RANKS, lambda p: range(1, 20)),
    ("interleaved-overlap", {"chunks": 1}, RANKS, lambda p: range(1, 20)),
    ("interleaved-overlap", {"chunks": 2}, RANKS, lambda p: range(1, 20)),
    ("interleaved-overlap", {"chunks": 3, "backward_first": True}, RANKS, lambda p: range(1, 20)),
    ("dualpipe", {}, EVEN, lambda p: range(2 * p, 4 * p, 2)),
    ("dualpipev", {}, RANKS, lambda p: range(2 * p, 4 * p)),
    ("chimera", {}, EVEN, lambda p: range(2, 4 * p, 2)),
]


@pytest.mark.parametrize(("name", "options", "ranks", "microbatches"), LEGAL)
def test_it_is_legal_for_every_size_it_takes(name, options, ranks, microbatches):
    for p in ranks:
        for m in microbatches(p):
            assert pp.check(pp.schedule(name, p, m, **options)) == [], (p, m)


# arXiv 2412.19437 and 2104.04473 give the formulas; F=1, B=2, I=W=1, a pair 3: the makespans at (p, m).
SIZES = [(4, 16), (8, 32), (16, 64), (32, 128), (64, 256)]
MAKESPANS = {
    ("1f1b", None): [57, 117, 237, 477, 957],
    ("zb-h1", None): [51, 103, 207, 415, 831],
    ("interleaved", 2): [52.5, 106.5, 214.5, 430.5, 862.5],
    ("interleaved", 4): [50.25, 101.25, 203.25, 407.25, 815.25],
    ("dualpipe", None): [50, 102, 206, 414, 830],
    ("dualpipev", None): [51, 103, 207, 415, 831],
}


@pytest.mark.parametrize(("name", "chunks"), MAKESPANS)
def test_the_makespan_is_the_published_one(name, chunks):
    options = {} if chunks is None else {"chunks": chunks}
    for (p, m), makespan in zip(SIZES, MAKESPANS[name, chunks], strict=True):
        timeline = pp.simulate(pp.schedule(name, p, m, **options), DOUBLE)
        assert timeline.makespan == makespan
        assert set(timeline.idle) == {makespan - 3 * m}


@pytest.mark.parametrize(
    ("name", "makespan"),
    [("1f1b-overlap", 101.5), ("interleaved-overlap", 92.75), ("dualpipe", 89), ("dualpipev", 89.5)],
)
def test_a_pair_that_is_faster_than_its_parts_shortens_the_run(name, makespan):
    costs = Costs(forward=1, backward=2, overlap=Fraction(5, 2))
    assert pp.simulate(pp.schedule(name, 8, 32), costs).makespan == makespan


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_chunks_divide_the_bubble_for_any_number_of_microbatches(p, v):
    for m in range(p, 3 * p + 3):
        assert idle(pp.schedule("interleaved", p, m, chunks=v)) == {Fraction(3 * (p - 1), v)}
        assert idle(pp.schedule("looped-bfs", p, m, chunks=v)) == {Fraction(3 * (p - 1), v)}


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaving_holds_a_chunk_for_each_step_of_the_way(p, v):
    """Where the ranks divide the microbatches: min(pv + p - 1, mv) chunks on rank 0; looped BFS holds all."""
    for m in (p, 2 * p, 3 * p):
        peak = pp.simulate(pp.schedule("interleaved", p, m, chunks=v)).peak_activations[0]
        assert peak == Fraction(min(p * v + p - 1, m * v), v)
        assert pp.simulate(pp.schedule("looped-bfs", p, m, chunks=v)).peak_activations[0] == m


def test_interleaving_holds_more_where_the_first_group_is_larger():
    """Three microbatches on two ranks are one group of three: the closed form above does not hold."""
    assert pp.simulate(pp.schedule("interleaved", 2, 3, chunks=2)).peak_activations[0] == 3 > Fraction(2 * 2 + 1, 2)


COSTS = [(1, 1, 1), (3, 3, 2), (2, 2, 1), (2, 3, 3), (1, 4, 2), (5, 4, 3), (7, 2, 2), (2, 7, 5), (1, 2, 4)]


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "i", "w"), COSTS)
def test_zb_h1_idles_for_the_way_back_of_the_first_backward(p, f, i, w):
    """(p-1)(I + max(0, F-W)); with W no longer than F that is the paper's (p-1)(F+I-W), arXiv 2401.10241."""
    for m in (p, p + 1, 2 * p, 3 * p + 1):
        timeline = pp.simulate(pp.schedule("zb-h1", p, m), Costs(forward=f, input=i, weight=w))
        if w <= i:
            assert set(timeline.idle) == {(p - 1) * (i + max(0, f - w))}
        assert max(timeline.peak_activations) == p


def test_the_papers_formula_for_zb_h1_needs_w_no_longer_than_f():
    assert idle(pp.schedule("zb-h1", 2, 8), Costs(forward=2, input=3, weight=3)) == {3} != {2 + 3 - 3}


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "i", "w"), COSTS)
def test_zb_h2_has_no_bubble_of_its_own_where_the_parts_are_equal(p, f, i, w):
    """In span: the larger of 0, the paper's (p-1)(F+I-2W), and (p-1)(I-F), which it leaves out."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        timeline = pp.simulate(pp.schedule("zb-h2", p, m), Costs(forward=f, input=i, weight=w))
        if w <= i:
            assert timeline.span - m * (f + i + w) == max(0, (p - 1) * (f + i - 2 * w), (p - 1) * (i - f))
        assert max(timeline.peak_activations) == 2 * p - 1


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_has_no_bubble_of_its_own_and_the_memory_of_1f1b_on_every_rank(p):
    for m in (2 * p - 1, 2 * p, 4 * p):
        timeline = pp.simulate(pp.schedule("zb-v", p, m), Costs(forward=1, input=1, weight=1))
        assert timeline.span == 3 * m
        assert set(timeline.peak_activations) == {p}


@pytest.mark.parametrize("p", EVEN)
@pytest.mark.parametrize(("f", "w"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_dualpipe_idles_as_its_formula_says(p, f, w):
    """(p/2-1)(FB+B-3W) for F = I and FB = F+B; p+1 activations on every rank."""
    b = f + w
    costs = Costs(forward=f, input=f, weight=w, overlap=f + b)
    for m in (2 * p, 2 * p + 2, 4 * p):
        timeline = pp.simulate(pp.schedule("dualpipe", p, m), costs)
        assert set(timeline.idle) == {(p // 2 - 1) * (f + b + b - 3 * w)}
        assert set(timeline.peak_activations) == {p + 1}


@pytest.mark.parametrize(("p", "m", "makespan", "waits", "peak"), [(4, 10, 66, 6, 9), (8, 20, 134, 14, 17)])
def test_dualpipev_in_chunks(p, m, makespan, waits, peak):
    """The DualPipe repository's table, in the times and the memory of a chunk: F=1, B=2, W=1, a pair 3."""
    chunk = [1] * 2 * p
    costs = Costs(forward=chunk, backward=[2] * 2 * p, overlap=[3] * 2 * p, activation=chunk)
    timeline = pp.simulate(pp.schedule("dualpipev", p, m), costs)
    assert (timeline.makespan, set(timeline.idle), max(timeline.peak_activations)) == (makespan, {waits}, peak)


@pytest.mark.parametrize("p", EVEN)
def test_chimera_has_half_the_bubble(p):
    """(p-2)/(2m+p-2) of the makespan where F = B, and p/2+1 to p activations (arXiv 2107.06925, table 2)."""
    for m in (p, 2 * p, 3 * p):
        timeline = pp.simulate(pp.schedule("chimera", p, m), Costs(forward=1, backward=1))
        assert timeline.bubble == pytest.approx(Fraction(p - 2, 2 * m + p - 2), abs=1e-12)
        assert (min(timeline.peak_activations), max(timeline.peak_activations)) == (p // 2 + 1, p)


def test_pairs_can_begin_with_the_backward():
    first, second = (
        pp.schedule("interleaved-overlap", 4, 8, backward_first=backward_first) for backward_first in (False, True)
    )
    assert "(0F7;4B0)OVERLAP_F_B" in map(str, first.orders[0])
    assert "(4B0;0F7)OVERLAP_B_F" in map(str, second.orders[0])


REFUSED = [
    ("dualpipe", 5, 20, {}, "even number of ranks; got 5 — try 4 or 6"),
    ("dualpipe", 1, 20, {}, "even number of ranks; got 1 — try 2"),
    ("dualpipe", 4, 6, {}, "at least twice the ranks; got 6 for 4 ranks — try 8"),
    ("dualpipe", 4, 9, {}, "even number of microbatches.* got 9 for 4 ranks — try 10"),
    ("dualpipev", 4, 7, {}, "got 7 for 4 ranks — try 8"),
    ("chimera", 3, 6, {}, "even number of ranks; got 3 — try 2 or 4"),
    ("chimera", 4, 3, {}, "even number of microbatches; got 3 — try 4"),
    ("interleaved", 4, 8, {"chunks": 0}, "chunks must be at least 1; got 0"),
    ("interleaved", 4, 8, {"chunks": 1.5}, "chunks must be a whole number"),
    ("interleaved", 4, 8, {"group": 0}, "group must be at least 1"),
    ("interleaved", 4, 5, {"chunks": 3, "group": 4}, "group=4 cannot run 5 microbatches on 4 ranks.*deadlock"),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options", "says"), REFUSED)
def test_what_cannot_work_is_refused_with_what_would(name, ranks, microbatches, options, says):
    with pytest.raises(SettingError, match=says):
        pp.schedule(name, ranks, microbatches, **options)


def test_a_fixed_group_wastes_time_where_the_last_one_is_short():
    """Megatron's groups of p, the last one short: idle 9.5 where 4.5 would do."""
    assert idle(pp.schedule("interleaved", 4, 10, group=4)) == {Fraction(19, 2)}
    assert idle(pp.schedule("interleaved", 4, 10)) == {Fraction(9, 2)}
