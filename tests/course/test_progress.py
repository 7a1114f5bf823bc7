"""Solved exercises, hints and stars are remembered in a file that the learner may read, edit and delete."""

import re
import sys
from collections import Counter
from dataclasses import replace
from html import unescape

import pytest

from ppedu import SettingError
from ppedu.course import exercises as package
from ppedu.course.exercises import EXERCISES, feedback
from ppedu.course.progress_file import kept, recorded
from ppedu.notebook import check_answer, hint, progress, record

RIGHT, WRONG = "lambda p, m: (p - 1) / (m + p - 1)", "lambda p, m: (p - 1) / m"


HINTS = ("How long does a rank wait?", "It waits for `p-1` microbatches, *not* `p`.")


@pytest.fixture
def with_hints(monkeypatch):
    """Give exercise 03.1 two hints."""
    monkeypatch.setitem(EXERCISES, "03.1", replace(EXERCISES["03.1"], hints=HINTS))
    monkeypatch.setattr(package, "_hints", Counter())


@pytest.fixture
def in_a_new_kernel(folder):
    """`in_a_new_kernel(source)` returns the output of a new kernel that runs in the folder."""

    import nbformat
    from nbclient import NotebookClient

    def run(source):
        source = f"from ppedu.notebook import check_answer, progress\n{source}"
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        client = NotebookClient(page, timeout=100, resources={"metadata": {"path": str(folder)}})
        client.comm_open_handlers.clear()  # https://github.com/jupyter/nbclient/issues/312: with an Output it may hang
        client.execute()
        return "\n".join(each.text if "text" in each else each.data["text/plain"] for each in page.cells[0].outputs)

    return run


def test_solved_exercises_are_remembered_until_the_file_is_deleted(in_a_new_kernel, folder, capsys):
    before = in_a_new_kernel(f"progress()\ncheck_answer('03.1', {WRONG})\ncheck_answer('03.1', {RIGHT})")
    assert (
        f"Solved: 0 of {len(EXERCISES)} exercises (★★ without a hint, ★ with one). The board" in before
        and "03.1 ☆☆" in before
    )
    known = in_a_new_kernel("progress()")
    assert "03.1 ★★" in known and known.partition("Solved")[0].count("★★") == 1
    assert f"Solved: 1 of {len(EXERCISES)} exercises (★★ without" in known and "without a hint. progress.txt" in known
    assert {file.name for file in folder.iterdir()} == {"progress.txt", "answers.json"}
    assert f"answer = {RIGHT}" in kept()["answers"]["03.1"]["program"]
    (folder / "progress.txt").unlink()
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
    assert known.partition("Solved")[0].count("★★") == 1 and "03.1 ★★" in known


def test_an_event_after_a_line_without_an_end_is_remembered(folder):
    (folder / "progress.txt").write_text("exercise 01.1 ★ on 2026-01-01")  # as some editors leave it, or a full disk
    record("board 1f1b", 2)
    assert recorded() == {"exercise 01.1": 1, "board 1f1b": 2}


def test_an_answer_is_right_even_if_the_file_cannot_be_written(folder, capsys):
    (folder / "progress.txt").mkdir()
    check_answer("03.1", eval(RIGHT))
    told = capsys.readouterr().out
    assert told.startswith("Right.") and "(This could not be recorded in progress.txt: Is a directory.)" in told
    with pytest.raises(SettingError, match=r"progress\.txt cannot be read: Is a directory"):
        progress()


def test_each_call_gives_the_next_hint_and_costs_the_second_star(folder, capsys, with_hints):
    for told in (
        "Hint 1 of 2: How long does a rank wait?",
        "Hint 2 of 2: It waits for `p-1` microbatches, not `p`.",
        "There are no more hints for 03.1. Its solution is in the folded cell below the exercise.",
    ):
        hint("03.1")
        assert capsys.readouterr().out == f"{told}\n"
    lines = (folder / "progress.txt").read_text().splitlines()
    assert [line.partition(" on ")[0] for line in lines] == ["03.1 hint 1", "03.1 hint 2"]
    progress()
    assert "03.1 ☆☆" in capsys.readouterr().out, "reading a hint does not solve an exercise"
    check_answer("03.1", eval(RIGHT))
    progress(3)
    assert capsys.readouterr().out.splitlines()[-1] == "lesson 3  03.1 ★☆  03.2 ☆☆  03.3 ☆☆"
    with pytest.raises(SettingError, match="lesson 17 has no exercises; give a number from 1 to 16"):
        progress(17)


def test_hints_read_after_the_exercise_is_solved_cost_nothing(capsys, with_hints):
    check_answer("03.1", eval(RIGHT))
    hint("03.1")
    check_answer("03.1", eval(RIGHT))
    progress()
    assert "03.1 ★★" in capsys.readouterr().out


def test_an_exercise_without_hints_has_a_sentence(capsys, monkeypatch):
    monkeypatch.setitem(EXERCISES, "03.1", replace(EXERCISES["03.1"], hints=()))
    hint("03.1")
    assert capsys.readouterr().out == "03.1 has no hints. What check_answer prints is meant to be enough.\n"
    with pytest.raises(SettingError, match=r"there is no exercise '3\.1'"):
        hint("3.1")


def test_in_a_notebook_a_hint_is_given_only_when_its_button_is_clicked(in_a_new_kernel, folder):
    give = "from dataclasses import replace\nfrom ppedu.notebook import hint\n"
    give += "from ppedu.course.exercises import EXERCISES\n"
    give += f"EXERCISES['03.1'] = replace(EXERCISES['03.1'], hints={HINTS})\n"
    assert in_a_new_kernel(f"{give}hint('03.1')") == "03.1 has 2 hints."
    assert not any(folder.iterdir()), "running all cells takes no hint"
    click = (
        "import ipywidgets\n[button] = [each for each in ipywidgets.Widget.widgets.values() if hasattr(each, 'click')]"
    )
    told = in_a_new_kernel(
        f"{give}hint('03.1')\n{click}\nbutton.click()\nprint(button.description)\nbutton.click()\n"
        "print(button.description, button.disabled)"
    )
    assert HINTS[0] in told and "Hint 2 of 2" in told and "No more hints True" in told
    assert (folder / "progress.txt").read_text().count("03.1 hint ") == 2
    still = in_a_new_kernel(f"import os\nos.environ['PPEDU_STILL'] = '1'\n{give}hint('03.1')")
    assert still == "03.1 has 2 hints. Run this cell to read them, one at a time.\n"


def test_a_page_without_ipywidgets_names_the_missing_package(capsys, with_hints, monkeypatch):
    monkeypatch.setattr(package, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    hint("03.1")
    assert capsys.readouterr().out == "hint needs ipywidgets, which is not installed: pip install 'ppedu[lab]'\n"


def test_levels_of_the_puzzle_are_shown_with_their_most_stars(folder, capsys):
    for event, stars in (("board gpipe", 1), ("board first", 3), ("board gpipe", 2), ("board first in 6", 0)):
        record(event, stars)
        record(event, stars)
    assert len((folder / "progress.txt").read_text().splitlines()) == 4
    progress()
    told = capsys.readouterr().out
    assert re.search(r"board +first ★★★ +two-ranks ☆☆☆ +gpipe ★★☆", told) and "in 6" not in told
    assert f"Solved: 0 of {len(EXERCISES)} exercises" in told


def test_feedback_is_html_with_an_icon_and_the_same_text(monkeypatch):
    shown = []
    monkeypatch.setattr(feedback, "has_page", lambda: True)
    monkeypatch.setattr(feedback, "publish", shown.append)
    check_answer("03.1", eval(WRONG))
    check_answer("03.1", eval(RIGHT))
    feedback.say("Not yet: at line 2, `a * b <c> d*e`: a *tensor* & x*y*z, 2 * 3 * 4.", "wrong")
    for bundle in shown:
        html = re.sub(r"<span [^>]*aria-hidden.*?</span>", "", bundle["text/html"])
        assert unescape(re.sub(r"<.*?>", "", html)) == bundle["text/plain"].replace("`", "")
    wrong, right, marked = (bundle["text/html"] for bundle in shown)
    assert ">!</span><b>Not yet:</b>" in wrong and ">✓</span><b>Right.</b>" in right
    assert re.findall("#[0-9a-f]{6}", wrong) != re.findall("#[0-9a-f]{6}", right)
    assert "<code>a * b &lt;c&gt; d*e</code>: a <em>tensor</em> &amp; x*y*z, 2 * 3 * 4." in marked


@pytest.mark.parametrize(
    ("text", "bold"),
    [
        ("Solution 03.1 is right.", "Solution 03.1 is right."),
        ("Not yet: 1.5 is not right.", "Not yet:"),
        ("Right. It is.", "Right."),
        ("no full stop", ""),
    ],
)
def test_the_first_words_of_feedback_are_bold(monkeypatch, text, bold):
    shown = []
    monkeypatch.setattr(feedback, "has_page", lambda: True)
    monkeypatch.setattr(feedback, "publish", shown.append)
    feedback.say(text, "right")
    assert f"</span><b>{bold}</b>{text.removeprefix(bold)}</div>" in shown[0]["text/html"]
