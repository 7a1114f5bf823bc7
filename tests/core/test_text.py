"""The text timeline, parsed back."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_schedules, often, read

import ppedu as pp
from ppedu import Costs, simulate
from ppedu.core.numeric import pretty

WIDE = 10_000


def lines(text):
    """Return the characters between the bars for each rank."""
    first, *rest = text.split("\n")
    found = [re.fullmatch(r"rank (\d+) +│(.*)│", line) for line in rest]
    assert [int(match[1]) for match in found] == list(range(len(rest)))
    return first, [match[2] for match in found]


def boxes(line, columns):
    """Parse a line into [(label, start, end)], in units of `columns` characters."""
    found = []
    for match in re.finditer(r"[^ ]+", line):
        start, end = Fraction(match.start(), columns), Fraction(match.end() + 1, columns)
        found.append((match[0].rstrip("─"), start, end))
    return found


def label(action, ranks):
    """Return the label in a loop placement: stage 5 of 4 ranks is a second chunk, marked with one prime."""
    return "".join(f"{single.op}{single.microbatch}{single.stage // ranks * chr(39)}" for single in action.singles)


@given(legal_schedules(most_microbatches=3))
@often(40)
def test_actions_are_drawn_at_their_times_and_idle_time_is_blank(schedule):
    ones = [1] * schedule.stages
    timeline = simulate(schedule, Costs(forward=ones, backward=ones, input=ones, weight=ones))
    for row, line in zip(timeline.rows, lines(timeline.text(WIDE))[1], strict=True):
        wide = 2 + schedule.chunks
        assert len(line) == wide * timeline.makespan
        assert boxes(line, wide) == [(label(action, schedule.ranks), start, end) for action, start, end in row]
        for tick in range(timeline.makespan):
            idle = not any(start <= tick < end for _, start, end in row)
            assert (not line[wide * tick : wide * tick + wide].strip()) == idle


@given(legal_schedules(split=0), st.integers(1, 4), st.booleans(), st.integers(0, 3))
@often(40)
def test_a_long_action_is_drawn_long(schedule, long, forward, latency):
    short = [1] * schedule.stages
    long = [long] * schedule.stages
    costs = Costs(forward=long if forward else short, backward=short if forward else long, latency=latency)
    timeline = simulate(schedule, costs)
    shortest = min(end - start for row in timeline.rows for _, start, end in row)
    for row, line in zip(timeline.rows, lines(timeline.text(WIDE))[1], strict=True):
        wide = Fraction(2 + schedule.chunks) / shortest
        assert boxes(line, wide) == [(label(action, schedule.ranks), start, end) for action, start, end in row]


def test_an_action_that_starts_in_the_middle_of_a_column_keeps_its_number():
    timeline = simulate(pp.schedule("gpipe", 2, 1), Costs(forward=2, backward=2, latency=1))
    _, drawn = lines(timeline.text(WIDE))
    assert [[each[0] for each in boxes(line, 3)] for line in drawn] == [["F0", "B0"], ["F0", "B0"]]


def test_1f1b_of_four_ranks_and_eight_microbatches():
    first, drawn = lines(str(pp.schedule("1f1b", 4, 8)))
    assert first == "1f1b, 4 ranks, 8 microbatches: makespan 33, bubble 27.3%, peak activations 4"
    assert drawn[3] == " " * 9 + "".join(f"F{m} B{m}─── " for m in range(8)) + " " * 18
    assert drawn[0].startswith("F0 F1 F2 F3" + " " * 19 + "B0─── F4 B1─── F5 ")
    assert drawn[0].endswith("F7 B4───    B5───    B6───    B7─── ")


def test_two_digit_numbers_fit():
    timeline = simulate(pp.schedule("gpipe", 2, 12), Costs(backward=1))
    _, drawn = lines(timeline.text(WIDE))
    assert boxes(drawn[0], 4)[11] == ("F11", 11, 12)
    assert boxes(drawn[1], 4)[-1] == ("B11", 24, 25)


def test_a_pair_shows_both_of_its_parts():
    pairs = read("0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 0B0 (1B1;0F2)OVERLAP_B_F 1F2 0B1 1B2 0B2", microbatches=3, chunks=2)
    _, drawn = lines(str(pairs))
    assert drawn[0].startswith("F0─ F0' F1B0'────── F1' B0───── B1'F2────── F2' B1───── ")


@given(legal_schedules(pairs=0.2), st.integers(12, 200))
@often(40)
def test_lines_are_equally_long_and_never_wider_than_requested(schedule, width):
    text = simulate(schedule).text(width).split("\n")[1:]
    assert {len(line) for line in text} == {len(text[0])}
    assert len(text[0]) <= width


def test_narrow_text_shows_letters_instead_of_numbers():
    timeline = simulate(pp.schedule("1f1b", 4, 8))
    _, drawn = lines(timeline.text(60))
    assert drawn[3] == " " * 3 + "FBB" * 8 + " " * 6
    assert drawn[0] == "FFFF" + " " * 6 + "BBFBBFBBFBBFBB BB BB BB"


def test_very_narrow_text_shows_one_letter_for_several_actions():
    timeline = simulate(pp.schedule("gpipe", 4, 100), Costs(backward=1))
    _, drawn = lines(timeline.text(49))
    assert {len(line) for line in drawn} == {40}
    assert all(re.fullmatch(" ?F{19,20} {0,2}B{19,20} ?", line) for line in drawn)


@pytest.mark.parametrize(
    "costs", [Costs(forward=0), Costs(forward=0, backward=0), Costs(input=2, weight=0, backward=2)]
)
def test_actions_that_take_no_time_are_not_drawn(costs):
    _, drawn = lines(simulate(read("0F0 0I0 0W0", "1F0 1I0 1W0"), costs).text(WIDE))
    assert len(drawn) == 2


def test_messages_are_not_printed():
    lowered = read("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    assert str(lowered) == str(read("0F0 0B0", "1F0 1B0"))


def test_the_smallest_width_still_gives_lines():
    assert len(simulate(pp.schedule("1f1b", 2, 2)).text(width=9).split("\n")) == 3


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (1, "s", "1 s"),
        (0.0123, "s", "12.3 ms"),
        (-0.25, "s", "-250 ms"),
        (-5, "s", "-5 s"),
        (0.5, "", "0.5"),
        (-12345.6, "GB", "-12,346 GB"),
    ],
)
def test_numbers_as_text(number, unit, text):
    assert pretty(number, unit) == text
