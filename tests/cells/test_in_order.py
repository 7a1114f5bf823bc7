"""The order and limits of the output that a cell shows, however it arrives in pieces."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppedu.cells import output
from ppedu.cells.output import Output


def shown(ranks, pieces, close=True, folder=Path()):
    """Return the text shown after these pairs (rank, piece)."""
    texts = []
    screen = SimpleNamespace(text=texts.append, bar=lambda line, done: texts.extend([f"{line}\n"] * done))
    shows = Output(ranks, screen, folder)
    for rank, piece in pieces:
        shows.write(rank, piece)
    if close:
        shows.close()
    return "".join(texts)


def test_every_line_carries_its_rank():
    assert shown(1, [(0, b"one\ntwo\n"), (0, b"")]) == "[0] one\n[0] two\n"


def test_a_rank_is_shown_after_all_lower_ranks_have_ended():
    first = [(1, b"b\n"), (1, b""), (0, b"a\n")]
    assert shown(2, first, close=False) == "[0] a\n"
    assert shown(2, [*first, (0, b"")], close=False) == "[0] a\n[1] b\n"


def test_the_lowest_rank_that_runs_is_shown_line_by_line():
    assert shown(2, [(0, b"one\ntw")], close=False) == "[0] one\n"
    assert shown(2, [(0, b""), (1, b"one\ntw")], close=False) == "[1] one\n"


def test_a_rank_without_output_does_not_delay_the_others():
    assert shown(3, [(2, b"c\n"), (0, b""), (1, b""), (2, b"")], close=False) == "[2] c\n"


def test_a_last_line_need_not_end():
    assert shown(2, [(0, b"a"), (0, b""), (1, b"b"), (1, b"")], close=False) == "[0] a\n[1] b\n"


def test_close_shows_the_output_of_ranks_that_have_not_ended():
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
def test_the_last_state_of_an_overwritten_line_is_shown(written, seen):
    assert shown(1, [(0, written), (0, b"")]) == seen
    assert shown(1, [(0, bytes([byte])) for byte in written]) == seen


def test_invalid_utf8_is_replaced():
    assert shown(1, [(0, b"a\xffb\n"), (0, "ž".encode()[:1]), (0, b"")]) == "[0] a\ufffdb\n[0] \ufffd\n"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), max_size=30), st.integers(1, 9), st.integers(0, 200))
def test_output_beyond_the_limits_is_in_the_file(written, most_lines, most_bytes):
    with TemporaryDirectory() as folder, patch.multiple(output, MAX_LINES=most_lines, MAX_SHOWN=most_bytes):
        lines = [(rank, f"{number:02} {'é' * length}") for number, (rank, length) in enumerate(written)]
        pieces = [(rank, f"{line}\n".encode()) for rank, line in lines]
        text = shown(2, [*pieces, (0, b""), (1, b"")], folder=Path(folder)).splitlines()
        kept = Path(folder, "output.txt")
        more = kept.read_text().splitlines() if kept.exists() else []
    for rank in range(2):
        own = [line for line in text if line.startswith(f"[{rank}]") and "continued in" not in line]
        rest = [line for line in more if line.startswith(f"[{rank}]")]
        assert [f"[{rank}] {line}".rstrip() for of, line in lines if of == rank] == [
            *own,
            *(line.rstrip() for line in rest),
        ]
        assert len(own) <= most_lines and len("".join(line[4:] for line in own).encode()) <= most_bytes
        assert sum(f"[{rank}] … continued in" in line for line in text) == bool(rest)


LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=5).map(str.rstrip)


@given(st.lists(st.lists(LINE, max_size=4), min_size=1, max_size=4), st.data())
def test_the_order_of_the_pieces_does_not_change_the_output(lines, data):
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
