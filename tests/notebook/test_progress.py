"""What has been solved is still known after a restart, from a file that the learner may read, write and delete."""

import nbformat
import pytest
from nbclient import NotebookClient

from ppedu import SettingError
from ppedu.notebook import check_answer, progress
from ppedu.notebook.exercises import EXERCISES

RIGHT, WRONG = "lambda p, m: (p - 1) / (m + p - 1)", "lambda p, m: (p - 1) / m"


@pytest.fixture
def in_a_new_kernel(folder):
    """`in_a_new_kernel(source)`: what a kernel prints that is started in the folder for it."""

    def run(source):
        source = f"from ppedu.notebook import check_answer, progress\n{source}"
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        NotebookClient(page, resources={"metadata": {"path": str(folder)}}).execute()
        return "".join(output.text for output in page.cells[0].outputs)

    return run


def test_what_is_solved_is_known_after_a_restart_until_its_file_is_deleted(in_a_new_kernel, folder):
    assert f"0 of {len(EXERCISES)} are solved." in in_a_new_kernel("progress()")
    in_a_new_kernel(f"check_answer('03.1', {WRONG})\ncheck_answer('03.1', {RIGHT})")
    known = in_a_new_kernel("progress()")
    assert "03.1 ✓" in known and known.count("✓") == 1
    assert f"1 of {len(EXERCISES)} are solved. progress.txt" in known
    [file] = folder.iterdir()
    file.unlink()
    assert "✓" not in in_a_new_kernel("progress()")


def test_neither_a_wrong_answer_nor_the_lessons_solution_counts(folder, capsys):
    check_answer("03.1", eval(WRONG))
    assert capsys.readouterr().out.startswith("Not yet:")
    check_answer("03.1", eval(RIGHT), solution=True)
    assert capsys.readouterr().out == "Solution 03.1 is right.\n", "and nothing that would give it away"
    check_answer("03.1", eval(WRONG), solution=True)
    assert capsys.readouterr().out.startswith("Solution 03.1 is not right: with 4 ranks and 8 microbatches")
    assert not any(folder.iterdir())


def test_one_line_an_exercise_however_often_it_is_solved(folder):
    check_answer("03.1", eval(RIGHT))
    check_answer("03.1", eval(RIGHT))
    [line] = (folder / "progress.txt").read_text().splitlines()
    assert line.startswith("03.1 solved on 20")


def test_a_file_in_which_something_else_was_written_is_read_as_well_as_it_can_be(folder, capsys):
    (folder / "progress.txt").write_bytes(b"\xff\xfe 99.9 my notes\n03.1 was hard\n")
    progress()
    known = capsys.readouterr().out
    assert known.count("✓") == 1 and "03.1 ✓" in known


def test_a_file_that_cannot_be_written_is_told_and_the_answer_is_right_all_the_same(folder, capsys):
    (folder / "progress.txt").mkdir()
    check_answer("03.1", eval(RIGHT))
    told = capsys.readouterr().out
    assert told.startswith("Right.") and "(This could not be noted in progress.txt: Is a directory.)" in told
    with pytest.raises(SettingError, match=r"progress\.txt cannot be read: Is a directory"):
        progress()
