"""Measures of a timeline: compared with values by hand and with a count at every tick, and checked for general laws."""

from dataclasses import replace
from fractions import Fraction

import pytest
import stepper
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_schedules, often, read

import ppedu as pp
from ppedu import Action, Costs, SettingError, Span, Timeline, simulate

SMALL = simulate(pp.schedule("1f1b", 2, 2))
#        0  1  2  3  4  5  6  7  8  9
# rank 0 F0 F1 .  .  B0 B0 .  B1 B1
# rank 1 .  F0 B0 B0 F1 B1 B1 .  .


def moved(timeline, by):
    """Return the same run with all times shifted."""
    rows = tuple(tuple(Span(a, start + by, end + by) for a, start, end in row) for row in timeline.rows)
    return Timeline(timeline.schedule, rows, timeline.costs, "measured")


def measures(timeline):
    names = "makespan", "span", "busy", "idle", "bubble", "overhead", "peak_activations"
    return {name: getattr(timeline, name) for name in names}


@st.composite
def timelines(draw):
    """Draw a simulated run with uneven stages."""
    schedule = draw(legal_schedules(pairs=0.2))
    each = st.lists(st.integers(1, 4), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(
        forward=draw(each),
        backward=draw(each),
        input=draw(each),
        weight=draw(each),
        latency=draw(st.integers(0, 2)),
        activation=draw(each),
        weight_memory=[Fraction(part, 4) for part in draw(each)],
    )
    return simulate(schedule, costs)


# --- by hand ----------------------------------------------------------------------------------------------------


def test_the_spans_of_two_ranks_and_two_microbatches():
    assert [tuple(map(str, span)) for span in SMALL.spans(0)] == [
        ("0F0", "0", "1"), ("0F1", "1", "2"), ("0B0", "4", "6"), ("0B1", "7", "9"),
    ]  # fmt: skip
    assert [tuple(map(str, span)) for span in SMALL.spans(1)] == [
        ("1F0", "1", "2"), ("1B0", "2", "4"), ("1F1", "4", "5"), ("1B1", "5", "7"),
    ]  # fmt: skip


def test_the_measures_of_two_ranks_and_two_microbatches():
    assert measures(SMALL) == {
        "makespan": 9,
        "span": 9,
        "busy": (6, 6),
        "idle": (3, 3),
        "bubble": 1 / 3,
        "overhead": 0.5,
        "peak_activations": (2, 1),
    }
    assert (SMALL.start, SMALL.end) == (0, 9)


def test_the_memory_of_two_ranks_and_two_microbatches():
    assert SMALL.memory(0) == [(0, 0), (0, 1), (1, 2), (6, 1), (9, 0)]
    assert SMALL.memory(1) == [(0, 0), (1, 1), (4, 0), (4, 1), (7, 0)]


def test_the_span_is_the_longest_time_of_a_single_rank():
    costs = Costs(forward=[1, 1], backward=[6, 31], input=[1, 1], weight=[1, 30])
    timeline = simulate(read("0F0 0B0", "1F0 1I0 1W0"), costs)
    assert [(row[0].start, row[-1].end) for row in timeline.rows] == [(0, 9), (1, 33)]
    assert (timeline.makespan, timeline.span) == (33, 32)


def test_overhead_is_measured_against_the_busiest_rank():
    timeline = simulate(pp.schedule("gpipe", 2, 1), Costs(forward=[1, 3], backward=[1, 5]))
    assert timeline.busy == (2, 8)
    assert timeline.makespan == 10 and timeline.overhead == 10 / 8 - 1


def test_a_split_backward_keeps_part_of_the_activation_until_w():
    schedule = read("0F0 0I0 0W0")
    assert simulate(schedule, Costs(activation=8)).memory(0) == [(0, 0), (0, 8), (3, 0)]
    assert simulate(schedule, Costs(activation=8, weight_memory=Fraction(1, 4))).memory(0) == [
        *[(0, 0), (0, 8), (2, 2), (3, 0)]
    ]
    assert simulate(schedule, Costs(activation=8, weight_memory=0)).memory(0) == [(0, 0), (0, 8), (2, 0)]


def test_memory_is_counted_in_activations_of_a_ranks_share():
    """With two stages per rank, each stage holds half of the activations of a share."""
    timeline = simulate(read("0F0 1F0 1B0 0B0", chunks=2))
    assert [value for _, value in timeline.memory(0)] == [0, Fraction(1, 2), 1, Fraction(1, 2), 0]
    assert timeline.peak_activations == (1,)


def test_the_summary_is_one_line():
    line = "1f1b, 4 ranks, 8 microbatches: makespan 33, bubble 27.3%, peak activations 4"
    timeline = simulate(pp.schedule("1f1b", 4, 8))
    assert timeline.summary() == line
    assert repr(timeline) == f"<Timeline: {line}>"


@pytest.mark.parametrize("source", ["measured", "emulated"])
def test_the_summary_names_a_source_other_than_simulation(source):
    simulated = simulate(pp.schedule("1f1b", 2, 3))
    timeline = Timeline(simulated.schedule, simulated.rows, simulated.costs, source)
    assert timeline.summary() == f"{source} {simulated.summary()}"
    assert timeline.text() == f"{source} {simulated.text()}" and repr(timeline) == f"<Timeline: {timeline.summary()}>"


@pytest.mark.parametrize(
    "forward, unit, shown",
    [
        (1, "", "3"), (Fraction(1, 2), "", "2.5"), (1, "s", "3 s"), (0.0001, "s", "2 s"),
        (0.123456, "", "2.123"), (20_000, "", "20,002"), (0.5, "s", "2.5 s"),
    ],
)  # fmt: skip
def test_times_are_shown_with_their_unit(forward, unit, shown):
    timeline = simulate(pp.schedule("naive", 1, 1), Costs(forward=forward, backward=2, unit=unit))
    assert f"makespan {shown}, " in timeline.summary()


def test_less_than_a_second_is_shown_in_milliseconds():
    timeline = simulate(pp.schedule("naive", 1, 1), Costs(forward=0.0125, backward=0.025, unit="s"))
    assert "makespan 37.5 ms, " in timeline.summary()


@pytest.mark.parametrize("rank", [-1, 2, 99])
@pytest.mark.parametrize("ask", [Timeline.spans, Timeline.memory])
def test_a_rank_that_does_not_exist_is_refused(ask, rank):
    with pytest.raises(SettingError, match=f"there is no rank {rank}; the ranks are 0 to 1"):
        ask(SMALL, rank)


# --- by laws ----------------------------------------------------------------------------------------------------


@given(timelines())
@often(40)
def test_idle_and_bubble_are_the_time_that_ranks_do_not_work(timeline):
    ticks = timeline.makespan
    working = [sum(any(start <= tick < end for _, start, end in row) for tick in range(ticks)) for row in timeline.rows]
    ranks = len(working)
    assert timeline.busy == tuple(working)
    assert timeline.idle == tuple(ticks - each for each in working)
    assert timeline.bubble == float(Fraction(ticks * ranks - sum(working), ticks * ranks))
    assert timeline.overhead == float(Fraction(ticks, max(working)) - 1)


@given(timelines())
@often(40)
def test_memory_and_its_peak_equal_those_counted_at_every_tick(timeline):
    weighs, kept = timeline.costs.activation, timeline.costs.weight_memory
    for rank, row in enumerate(timeline.rows):
        counted = stepper.held(row, weighs.__getitem__, kept.__getitem__)
        steps = timeline.memory(rank)
        assert [time for time, _ in steps] == sorted(time for time, _ in steps)
        read = [[value for time, value in steps if time <= tick][-1] for tick in range(len(counted))]
        assert read == counted
        assert timeline.peak_activations[rank] == max(counted)
        assert steps[0][1] == steps[-1][1] == 0, "all is given back"


@given(timelines(), st.integers(-1000, 1000))
@often(30)
def test_when_a_run_starts_makes_no_difference(timeline, by):
    later = moved(timeline, by)
    assert measures(later) == measures(timeline)
    assert later.text() == f"measured {timeline.text()}"
    for rank in range(timeline.schedule.ranks):
        assert later.memory(rank) == [(time + by, value) for time, value in timeline.memory(rank)]


@given(timelines(), st.integers(2, 9))
@often(30)
def test_a_slower_clock_scales_times_and_leaves_shares_and_memory(timeline, factor):
    rows = tuple(tuple(Span(a, start * factor, end * factor) for a, start, end in row) for row in timeline.rows)
    slow, fast = measures(Timeline(timeline.schedule, rows, timeline.costs)), measures(timeline)
    assert slow["makespan"] == factor * fast["makespan"] and slow["span"] == factor * fast["span"]
    assert slow["idle"] == tuple(factor * time for time in fast["idle"])
    assert [slow[name] for name in ("bubble", "overhead", "peak_activations")] == [
        fast[name] for name in ("bubble", "overhead", "peak_activations")
    ]


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30))
@often(40)
def test_the_bubble_of_a_rank_that_never_waits_is_not_below_0(durations):
    schedule = pp.schedule("naive", 1, 1)
    spans, now = [], 0.1
    for duration in durations:
        spans.append(Span(Action.parse("0F0"), now, now + duration))
        now += duration
    timeline = Timeline(schedule, (tuple(spans),), Costs(), "measured")
    assert 0 <= timeline.bubble < 1e-9


def test_exact_times_are_whole_numbers_where_they_can_be():
    timeline = simulate(pp.schedule("1f1b", 2, 2), Costs(forward=Fraction(1, 2), backward=Fraction(3, 2)))
    assert [type(each) for each in (timeline.makespan, timeline.span, *timeline.busy, *timeline.idle)] == [int] * 6
    assert (timeline.makespan, timeline.busy, timeline.idle) == (6, (4, 4), (2, 2))


def test_recomputed_activations_are_held_from_the_start_of_a_backward():
    costs = Costs(activation=8, weight_memory=Fraction(1, 4), recompute=True, stage_input=1)
    whole, split = read("0F0 0F1 0B0 0B1", microbatches=2), read("0F0 0I0 0W0")
    # F takes 1 and holds the input, B takes 3: the forward again, then itself.
    assert simulate(whole, costs).memory(0) == [(0, 0), (0, 1), (1, 2), (2, 9), (5, 1), (5, 8), (8, 0)]
    assert simulate(split, costs).memory(0) == [(0, 0), (0, 1), (1, 8), (3, 2), (4, 0)]
    interleaved = simulate(pp.schedule("interleaved", 4, 8), replace(costs, stage_input=0))
    assert set(interleaved.peak_activations) == {4}  # a chunk's, while its backward runs
    assert simulate(pp.schedule("gpipe", 4, 8), costs).peak_activations == (8 + 7,) * 4
    # Each of two stages on a rank makes half of the activations, 4, and has a whole input.
    halves = simulate(read("0F0 1F0 1B0 0B0", chunks=2), replace(costs, weight_memory=1)).memory(0)
    assert [held for _, held in halves] == [0, 1, 2, 5, 1, 4, 0]


def test_pairs_recompute_while_they_run():
    costs = Costs(activation=8, recompute=True, stage_input=1)
    timeline = simulate(pp.schedule("1f1b-overlap", 2, 4), costs)
    pair = next(span for span in timeline.rows[0] if span.action.parts)
    assert pair.end - pair.start == 4
    held = max(value for time, value in timeline.memory(0) if time == pair.start)
    before = [value for time, value in timeline.memory(0) if time < pair.start][-1]
    assert held == before + 1 + 7
