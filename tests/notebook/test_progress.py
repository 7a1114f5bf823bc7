"""Solved exercises are remembered in a file that the learner may read, edit and delete."""

import pytest

from ppedu import SettingError
from ppedu.notebook import check_answer, progress
from ppedu.notebook.exercises import EXERCISES

RIGHT, WRONG = "lambda p, m: (p - 1) / (m + p - 1)", "lambda p, m: (p - 1) / m"


@pytest.fixture
def in_a_new_kernel(folder):
    """`in_a_new_kernel(source)` returns the output of a new kernel that runs in the folder."""

    import nbformat
    from nbclient import NotebookClient

    def run(source):
        source = f"from ppedu.notebook import check_answer, progress\n{source}"
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        NotebookClient(page, resources={"metadata": {"path": str(folder)}}).execute()
        return "\n".join(each.text if "text" in each else each.data["text/plain"] for each in page.cells[0].outputs)

    return run


def test_solved_exercises_are_remembered_until_the_file_is_deleted(in_a_new_kernel, folder, capsys):
    before = in_a_new_kernel(f"progress()\ncheck_answer('03.1', {WRONG})\ncheck_answer('03.1', {RIGHT})")
    assert f"Solved: 0 of {len(EXERCISES)} exercises (★★ without a hint, ★ with one)." in before and "03.1 ·" in before
    known = in_a_new_kernel("progress()")
    assert "03.1 ★★" in known and known.count("★★") == 2
    assert f"Solved: 1 of {len(EXERCISES)} exercises (★★ without a hint, ★ with one). progress.txt" in known
    [file] = folder.iterdir()
    file.unlink()
    progress()
    assert "03.1 ★★" not in capsys.readouterr().out


def test_wrong_answers_and_the_lessons_solutions_do_not_count(folder, capsys):
    check_answer("03.1", eval(WRONG))
    assert capsys.readouterr().out.startswith("Not yet:")
    check_answer("03.1", eval(RIGHT), solution=True)
    assert capsys.readouterr().out == "Solution 03.1 is right.\n", "and nothing that would give it away"
    check_answer("03.1", eval(WRONG), solution=True)
    assert capsys.readouterr().out.startswith("Solution 03.1 is not right: with 4 ranks and 8 microbatches")
    assert not any(folder.iterdir())


def test_an_exercise_solved_twice_has_one_line(folder):
    check_answer("03.1", eval(RIGHT))
    check_answer("03.1", eval(RIGHT))
    [line] = (folder / "progress.txt").read_text().splitlines()
    assert line.startswith("03.1 solved ★★ on 20")


def test_an_edited_file_is_still_read(folder, capsys):
    (folder / "progress.txt").write_bytes(b"\xff\xfe 99.9 my notes\n03.1 was hard\n")
    progress()
    known = capsys.readouterr().out
    assert known.count(" ★★") == 1 and "03.1 ★★" in known


def test_an_answer_is_right_even_if_the_file_cannot_be_written(folder, capsys):
    (folder / "progress.txt").mkdir()
    check_answer("03.1", eval(RIGHT))
    told = capsys.readouterr().out
    assert told.startswith("Right.") and "(This could not be recorded in progress.txt: Is a directory.)" in told
    with pytest.raises(SettingError, match=r"progress\.txt cannot be read: Is a directory"):
        progress()
