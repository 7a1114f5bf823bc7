"""What a cell shows of its ranks' output, however it comes in pieces."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppedu.notebook.output import Output


def shown(ranks, pieces, close=True):
    """What is shown once these (rank, piece) have come in."""
    texts = []
    screen = SimpleNamespace(text=texts.append, bar=lambda line, done: texts.extend([f"{line}\n"] * done))
    output = Output(ranks, screen, Path())
    for rank, piece in pieces:
        output.write(rank, piece)
    if close:
        output.close()
    return "".join(texts)


def test_every_line_carries_its_rank():
    assert shown(1, [(0, b"one\ntwo\n"), (0, b"")]) == "[0] one\n[0] two\n"


def test_a_higher_rank_waits_until_those_below_have_ended():
    first = [(1, b"b\n"), (1, b""), (0, b"a\n")]
    assert shown(2, first, close=False) == "[0] a\n"
    assert shown(2, [*first, (0, b"")], close=False) == "[0] a\n[1] b\n"


def test_the_lowest_rank_that_runs_is_shown_line_by_line():
    assert shown(2, [(0, b"one\ntw")], close=False) == "[0] one\n"
    assert shown(2, [(0, b""), (1, b"one\ntw")], close=False) == "[1] one\n"


def test_a_rank_without_output_holds_nobody_up():
    assert shown(3, [(2, b"c\n"), (0, b""), (1, b""), (2, b"")], close=False) == "[2] c\n"


def test_a_last_line_need_not_end():
    assert shown(2, [(0, b"a"), (0, b""), (1, b"b"), (1, b"")], close=False) == "[0] a\n[1] b\n"


def test_closing_shows_what_is_left_of_ranks_that_have_not_ended():
    assert shown(3, [(2, b"c\nd"), (1, b"b")]) == "[1] b\n[2] c\n[2] d\n"


def test_an_empty_line_is_a_line():
    assert [line.rstrip() for line in shown(1, [(0, b"a\n\nb\n")]).splitlines()] == ["[0] a", "[0]", "[0] b"]


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (b"\r10%\r50%\r100%\n", "[0] 100%\n"),
        (b"10%\r100%\r\n", "[0] 100%\n"),
        (b"10%\r100%\r", "[0] 100%\n"),
        (b"\r10%", "[0] 10%\n"),
        (b"a\r\nb\r\n", "[0] a\n[0] b\n"),
    ],
)
def test_of_a_line_that_was_written_over_the_last_state_is_shown(written, seen):
    assert shown(1, [(0, written), (0, b"")]) == seen
    assert shown(1, [(0, bytes([byte])) for byte in written]) == seen


def test_bytes_that_are_no_text_are_marked():
    assert shown(1, [(0, b"a\xffb\n"), (0, "ž".encode()[:1]), (0, b"")]) == "[0] a\ufffdb\n[0] \ufffd\n"


LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=5).map(str.rstrip)


@given(st.lists(st.lists(LINE, max_size=4), min_size=1, max_size=4), st.data())
def test_how_the_output_is_cut_and_mixed_changes_nothing(lines, data):
    written = ["".join(f"{line}\n" for line in of_rank).encode() for of_rank in lines]
    left = dict(enumerate(written))
    pieces = []
    while left:
        rank = data.draw(st.sampled_from(sorted(left)))
        size = data.draw(st.integers(1, 4))
        pieces.append((rank, left[rank][:size]))  # b"" once all has been written
        left[rank] = left[rank][size:]
        if not pieces[-1][1]:
            del left[rank]
    expected = "".join(f"[{rank}] {line}\n" for rank, of_rank in enumerate(lines) for line in of_rank)
    assert shown(len(lines), pieces, close=False) == expected
