"""Stars and best times on the puzzle's levels are recorded in the progress file."""

import pytest

import ppedu as pp
from ppedu.course.board import puzzle
from ppedu.course.board.results import Keeper
from ppedu.notebook import progress


@pytest.fixture(autouse=True)
def kept_in_a_file(monkeypatch):
    monkeypatch.setattr(puzzle, "KEEPER", Keeper(in_file=True))


def solve(board, schedule=None):
    board.handle({"do": "reset"})
    par = schedule or board.level.par.schedule
    for rank, index in par.replay.steps:
        board.handle({"place": str(par.orders[rank][index])})


def test_the_best_stars_and_the_best_time_are_recorded(folder, capsys):
    board = pp.puzzle("two-ranks")
    solve(board, pp.schedule("naive", 2, 3))
    assert puzzle.KEEPER.best("two-ranks") == (1, 18)
    solve(board)
    solve(board, pp.schedule("naive", 2, 3))
    assert Keeper(in_file=True).best("two-ranks") == (3, 12), "also after the kernel was restarted"
    assert Keeper(in_file=True).best("first") is None
    lines = [line.partition(" on ")[0] for line in (folder / "progress.txt").read_text().splitlines()]
    assert lines == ["board two-ranks ★", "board two-ranks in 18", "board two-ranks ★★★", "board two-ranks in 12"]
    progress()
    shown = capsys.readouterr().out
    assert "board" in shown and "two-ranks ★★★" in shown and "in 18" not in shown


def test_the_menu_of_levels_shows_the_stars():
    solve(pp.puzzle("first"))
    menu = dict(pp.puzzle("1f1b").state()["levels"])
    assert menu["first"].endswith("★★★") and "★" not in menu["1f1b"]


def test_a_board_that_was_finished_for_the_learner_is_not_recorded(folder):
    pp.puzzle("first").handle({"do": "finish"})
    assert not any(folder.iterdir())


@pytest.mark.parametrize("content", ["board first on 2026-01-01", "board first ★★★", "board first in a hurry", "\0 x"])
def test_an_edited_file_does_no_harm(folder, content):
    (folder / "progress.txt").write_text(f"{content}\n")
    solve(pp.puzzle("first"))
    assert Keeper(in_file=True).best("first") == (3, 6)


def test_results_are_kept_for_the_session_if_the_file_cannot_be_written(folder, capsys):
    (folder / "progress.txt").mkdir()
    solve(pp.puzzle("first"))
    assert puzzle.KEEPER.best("first") == (3, 6)
    assert "could not be recorded" in capsys.readouterr().out
