"""The grammar of actions, and the conversion between actions and text."""

import contextlib
import re

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from ppedu import Action, B, F, I, Op, ParseError, PipelineError, Placement, Schedule, SettingError, W
from ppedu.core import overlap

TABLE = {
    "2F0": Action(2, Op.F, 0),
    "0B10": Action(0, Op.B, 10),
    "12I7": Action(12, Op.I, 7),
    "3W4": Action(3, Op.W, 4),
    "1SEND_F3": Action(1, Op.SEND_F, 3),
    "2RECV_F3": Action(2, Op.RECV_F, 3),
    "3SEND_B3": Action(3, Op.SEND_B, 3),
    "2RECV_B3": Action(2, Op.RECV_B, 3),
    "0UNSHARD": Action(0, Op.UNSHARD),
    "0RESHARD": Action(0, Op.RESHARD),
    "10REDUCE_GRAD": Action(10, Op.REDUCE_GRAD),
    "(0F1;3B0)OVERLAP_F_B": Action(-1, Op.OVERLAP_F_B, -1, (F(0, 1), B(3, 0))),
    "(3I0;0F1)OVERLAP_B_F": Action(-1, Op.OVERLAP_B_F, -1, (I(3, 0), F(0, 1))),
}

NOT_ACTIONS = [
    *["", " ", "F", "2", "x", "None", "2F0x", "x2F0", "2F0 3F0", "2F0,", "2F 0", "2 F0", "2F0\n3F0"],
    *["2F", "F0", "2SEND_F", "SEND_F3"],
    *["02F0", "2F00", "2F01", "00F0", "-1F0", "2F-1", "+2F0", "2.0F0", "1_0F0", "0x1F0", "1e3F0"],
    *["2f0", "2b0", "1send_f3", "0unshard", "1SENDF3", "1SEND_I3", "2X0", "2FB0", "2OVERLAP_F_B0"],
    *["0UNSHARD3", "UNSHARD", "0UNSHARD ED", "00UNSHARD", "0OVERLAP_F_B"],
    *["٢F0", "2F٠", "²F0", "２F0", "2Ｆ0"],
    *["(0F1;3B0)", "0F1;3B0", "(0F1)OVERLAP_F_B", "(0F1;3B0;1W0)OVERLAP_F_B", "()OVERLAP_F_B", "(;)OVERLAP_F_B"],
    *["(0F1;3B0)OVERLAP", "(0F1;3B0)F", "(0F1;3B0)OVERLAP_F_B0", "0(0F1;3B0)OVERLAP_F_B", "(0F1;3B0)overlap_f_b"],
    *["(0F1;3B)OVERLAP_F_B", "(0F1,3B0)OVERLAP_F_B", "[0F1;3B0]OVERLAP_F_B", "(0F1;03B0)OVERLAP_F_B"],
    *["((0F1;3B0)OVERLAP_F_B;1F0)OVERLAP_F_B", "(1F0;(0F1;3B0)OVERLAP_F_B)OVERLAP_F_B"],
    *["(0UNSHARD;3B0)OVERLAP_F_B", "(0UNSHARD;1RESHARD)OVERLAP_F_B", "(0SEND_F1;3B0)OVERLAP_F_B"],
    *["(0F1;1F1)OVERLAP_F_B", "(0W0;0W1)OVERLAP_B_F", "(0F1;1W0)OVERLAP_F_B", "(3B0;0F1)OVERLAP_F_B"],
]


def test_text_is_parsed_to_the_action_and_written_back():
    for text in TABLE:
        assert Action.parse(text) == TABLE[text]
        assert str(TABLE[text]) == text


def test_text_that_is_not_exactly_one_action_is_refused():
    for text in NOT_ACTIONS:
        with pytest.raises(ParseError) as caught:
            Action.parse(text)
        shown = re.match("'(.*)' is not an action", str(caught.value))
        assert shown and shown[1] in repr(text), "the message shows what was given, or the part of it that is wrong"
        assert "such as 2F0" in str(caught.value), "the message shows what would be right"
        assert isinstance(caught.value, PipelineError)


@given(strategies.actions)
@strategies.often(300)
def test_every_action_survives_a_round_trip_through_text(action):
    assert Action.parse(str(action)) == action


@given(strategies.actions, st.sampled_from([" ", "\t", "\n", "  "]))
@strategies.often(50)
def test_space_around_an_action_does_not_matter(action, space):
    assert Action.parse(f"{space}{action}{space}") == action


@given(st.text("0123FBIWSENDRCV_UHAGOLP();-x ", max_size=20))
@strategies.often(500)
def test_accepted_text_is_written_back_unchanged(text):
    try:
        action = Action.parse(text)
    except ParseError:
        return
    assert str(action) == text.strip()


@given(strategies.actions, st.data())
@strategies.often(300)
def test_changing_a_character_gives_another_action_or_an_error(action, data):
    text = str(action)
    at = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.sampled_from(sorted(set("0123456789FBIWSENDRCV_();x- ") - {text[at]})))
    changed = text[:at] + character + text[at + 1 :]
    try:
        other = Action.parse(changed)
    except ParseError:
        return
    assert other != action


# --- pairs ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["OVERLAP_F_B", "OVERLAP_B_F", "F"]), st.lists(strategies.actions, max_size=3))
@strategies.often(300)
def test_every_way_to_make_a_pair_requires_a_forward_and_a_backward(op, parts):
    """In OVERLAP_F_B the forward is first, in OVERLAP_B_F second; the other part is a B or an I."""
    ops = [part.op for part in (parts if op == "OVERLAP_F_B" else reversed(parts))]
    right = op != "F" and len(ops) == 2 and ops[0] == "F" and ops[1] in ("B", "I")
    pair = Action(-1, Op(op), -1, tuple(parts))
    alone = Placement.make("loop", 1)
    if right:
        assert Action.parse(str(pair)) == overlap(*parts) == pair
        assert Schedule("x", alone, 1, [[pair]]).orders == ((pair,),)
    elif parts:
        with pytest.raises(ParseError):
            Action.parse(str(pair))
        with pytest.raises(SettingError, match=r"^rank 0, position 1: "):
            Schedule("x", alone, 1, [[F(0, 0), pair]])


@given(strategies.actions, strategies.actions)
@strategies.often(200)
def test_overlap_makes_only_valid_pairs(first, second):
    if {*first.op, *second.op} in ({"F", "B"}, {"F", "I"}) and len(first.op + second.op) == 2:
        assert overlap(first, second).parts == (first, second)
        assert str(overlap(first, second)).endswith("OVERLAP_F_B" if first.op == "F" else "OVERLAP_B_F")
    else:
        with pytest.raises(SettingError, match="a pair is a forward and a backward"):
            overlap(first, second)


# --- the objects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make, op", [(F, "F"), (B, "B"), (I, "I"), (W, "W")])
def test_the_short_names_make_actions(make, op):
    assert str(make(2, 10)) == f"2{op}10"
    assert make(2, 10) == Action(2, Op(op), 10)


def test_an_op_is_its_own_text():
    for op in Op:
        assert op == op.value
        assert f"{op}" == str(op) == op.value
        assert {op.value: 1}[op] == 1, "an op and its text are one key"


def test_singles_are_the_action_or_its_parts():
    pair = TABLE["(0F1;3B0)OVERLAP_F_B"]
    assert F(0, 1).singles == (F(0, 1),)
    assert pair.singles == (F(0, 1), B(3, 0))


def test_an_action_shows_itself_as_text():
    assert repr(F(2, 0)) == "<2F0>"


def test_a_number_of_thousands_of_digits_is_a_parse_error_or_an_action():
    with contextlib.suppress(ParseError):
        Action.parse("1" * 5000 + "F0")
