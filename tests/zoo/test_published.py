"""Published schedules are legal for every size they accept, and take the published time and memory."""

from dataclasses import replace
from fractions import Fraction

import pytest
from strategies import sample, slow

import ppedu as pp
from ppedu import Costs, SettingError

RANKS = range(1, 8)
EVEN = (2, 4, 6, 8)
DOUBLE = Costs(forward=1, backward=2, overlap=3)


def idle(schedule, costs=DOUBLE):
    return set(pp.simulate(schedule, costs).idle)


LEGAL = [
    *[(name, {}, range(1, 9), lambda p: range(1, 20)) for name in ("naive", "gpipe", "1f1b")],
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
    ("stp", {}, RANKS, lambda p: range(1, 20)),
    ("dualpipe", {}, EVEN, lambda p: range(2 * p, 4 * p, 2)),
    ("dualpipev", {}, RANKS, lambda p: range(2 * p, 4 * p)),
    ("chimera", {}, EVEN, lambda p: range(2, 4 * p, 2)),
    ("bitpipe", {}, EVEN, lambda p: range(2, 4 * p, 2)),
]


def test_a_schedule_is_legal_for_every_size_for_which_it_exists():
    for name, options, ranks, microbatches in LEGAL:
        for p in ranks:
            for m in sample(microbatches(p), start=3 * p):  # fewer and more than p
                schedule = pp.schedule(name, p, m, **options)
                assert pp.check(schedule) == [], (p, m)
                assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, p, m)


# Makespans at each (p, m) for F=1, B=2, I=W=1 and a pair of 3, by the formulas of arXiv 2412.19437 and 2104.04473.
SIZES = [(4, 16), (8, 32), (16, 64), (32, 128), (64, 256)]
MAKESPANS = {
    ("1f1b", None): [57, 117, 237, 477, 957],
    ("zb-h1", None): [51, 103, 207, 415, 831],
    ("interleaved", 2): [52.5, 106.5, 214.5, 430.5, 862.5],
    ("interleaved", 4): [50.25, 101.25, 203.25, 407.25, 815.25],
    ("dualpipe", None): [50, 102, 206, 414, 830],
    ("dualpipev", None): [51, 103, 207, 415, 831],
}


@pytest.mark.parametrize("index", [0, 1, *slow([2, 3, 4])])
@pytest.mark.parametrize(("name", "chunks"), MAKESPANS)
def test_the_makespan_equals_the_published_one(name, chunks, index):
    options = {} if chunks is None else {"chunks": chunks}
    (p, m), makespan = SIZES[index], MAKESPANS[name, chunks][index]
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


@pytest.mark.parametrize(("p", "m", "makespan", "waits", "peak"), [(4, 10, 66, 6, 9), (8, 20, 134, 14, 17)])
def test_dualpipev_in_chunks(p, m, makespan, waits, peak):
    """The table of the DualPipe repository, for times and memory of a chunk: F=1, B=2, W=1, a pair 3."""
    chunk = [1] * 2 * p
    costs = Costs(forward=chunk, backward=[2] * 2 * p, overlap=[3] * 2 * p, activation=chunk)
    timeline = pp.simulate(pp.schedule("dualpipev", p, m), costs)
    assert (timeline.makespan, set(timeline.idle), max(timeline.peak_activations)) == (makespan, {waits}, peak)


# Two figures of arXiv 2410.19367, for 4 ranks with one unit and with two. A digit is a forward of a microbatch, which
# takes one tick; two equal letters are its backward: a is that of 1. Half of each unit's microbatches go up.
ONE_UNIT = """
1.233441aa2.bbccccddddaa..bb
.13243142.aaccbbddccaaddbb
.31421324.ccaaddbbaaccbbdd
3.411223cc4.ddaaaabbbbcc..dd
"""
TWO_UNITS = """
1.233441aa2.bbccccddddaa56bb77885ee6.ffgggghhhhee..ff
.13243142.aaccbbddccaaddbb57687586.eeggffhhggeehhff
.31421324.ccaaddbbaaccbbdd75865768.ggeehhffeeggffhh
3.411223cc4.ddaaaabbbbcc78dd55667gg8.hheeeeffffgg..hh
"""


def drawn(timeline, numbers):
    """Return the rows of a figure without gaps, some of which the paper draws later than they have to be."""
    rows = []
    for row in timeline.rows:
        marks = [(numbers[span.action.microbatch], span.action.op is pp.Op.F) for span in row]
        rows.append("".join(str(number) if forward else 2 * "_abcdefgh"[number] for number, forward in marks))
    return rows


def test_bitpipe_is_that_of_its_figures():
    """In that of two units, two forwards of the second start earlier than ours, which saves one tick of 54."""
    ticks = Costs(forward=2, backward=4)
    one, two = (pp.simulate(pp.schedule("bitpipe", 4, m), ticks) for m in (4, 8))
    assert drawn(one, [1, 2, 3, 4]) == ONE_UNIT.replace(".", "").split()
    assert one.makespan == 28 == len(ONE_UNIT.split()[0])
    orders = [list(order) for order in two.schedule.orders]
    for rank, microbatch in ((0, 1), (3, 5)):
        last = orders[rank].index(pp.B(0, microbatch))
        orders[rank].insert(last, orders[rank].pop(last + 1))
    theirs = pp.simulate(replace(two.schedule, orders=tuple(map(tuple, orders))), ticks)
    assert drawn(theirs, [1, 2, 5, 6, 3, 4, 7, 8]) == TWO_UNITS.replace(".", "").split()
    assert theirs.makespan == 53 == len(TWO_UNITS.split()[0])
    assert two.makespan == 54


def test_pairs_can_begin_with_the_backward():
    first, second = (
        pp.schedule("interleaved-overlap", 4, 8, backward_first=backward_first) for backward_first in (False, True)
    )
    assert "(0F7;4B0)OVERLAP_F_B" in map(str, first.orders[0])
    assert "(4B0;0F7)OVERLAP_B_F" in map(str, second.orders[0])


REFUSED = [
    ("dualpipe", 5, 20, {}, "even number of ranks; got 5 — try 4 or 6"),
    ("dualpipe", 1, 20, {}, "even number of ranks; got 1 — try 2"),
    ("dualpipe", 4, 6, {}, "microbatches of dualpipe on 4 ranks must be at least 8; got 6"),
    ("dualpipe", 4, 9, {}, "even number of microbatches; got 9 — try 8 or 10"),
    ("dualpipev", 4, 7, {}, "microbatches of dualpipev on 4 ranks must be at least 8; got 7"),
    ("chimera", 3, 6, {}, "even number of ranks; got 3 — try 2 or 4"),
    ("chimera", 4, 3, {}, "even number of microbatches; got 3 — try 2 or 4"),
    ("bitpipe", 3, 6, {}, "even number of ranks; got 3 — try 2 or 4"),
    ("interleaved", 4, 8, {"chunks": 0}, "chunks must be at least 1; got 0"),
    ("interleaved", 4, 8, {"chunks": 1.5}, "chunks must be a whole number"),
    ("interleaved", 4, 8, {"group": 0}, "group must be at least 1"),
    ("interleaved", 4, 5, {"chunks": 3, "group": 4}, "group=4 cannot run 5 microbatches on 4 ranks.*deadlock"),
]


def test_invalid_sizes_are_refused_with_valid_ones():
    for name, ranks, microbatches, options, says in REFUSED:
        with pytest.raises(SettingError, match=says):
            pp.schedule(name, ranks, microbatches, **options)


def test_a_fixed_group_wastes_time_if_the_last_one_is_smaller():
    """With Megatron's groups of p, the last one smaller, the idle time is 9.5 instead of 4.5."""
    assert idle(pp.schedule("interleaved", 4, 10, group=4)) == {Fraction(19, 2)}
    assert idle(pp.schedule("interleaved", 4, 10)) == {Fraction(9, 2)}
