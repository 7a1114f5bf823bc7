"""The learner's own pipeline, `my_pipeline.py`: its parts, their checks on real ranks, and the cell that adds them."""

import re
from pathlib import Path

import pytest

from ppedu.core import SettingError
from ppedu.course.exercises import find_fault, parts, progress
from ppedu.course.exercises.parts import COURSE, FILE, GIVEN, course, part_of, split
from ppedu.course.part_cell import run_part

NUMBERS = ["02.3", "03.3", "05.4", "06.5", "07.5", "10.4", "14.3"]


@pytest.fixture
def on_ranks(rank_pool, monkeypatch):
    """Check parts on the ranks that all tests share, and wait for less time."""
    monkeypatch.setattr(parts, "local_pool", lambda: rank_pool)
    monkeypatch.setattr(parts, "LIMIT", 1.5)


@pytest.fixture
def checked(monkeypatch):
    """Replace the ranks by a list of the texts that were checked, with `fault`, the verdict on each."""

    class Checked(list):
        fault = None

        def on_ranks(self, part, others):
            self.append(part.text)
            return self.fault

    seen = Checked()
    monkeypatch.setattr(parts, "_on_ranks", seen.on_ranks)
    return seen


def in_file():
    return {part.title: part for part in split(FILE.read_text())}


def test_the_course_s_file_grows_part_by_part_and_trains_as_one_process_does(on_ranks, ranks, capsys):
    for number in NUMBERS:
        run_part(number, part_of(number).text)
    told = capsys.readouterr().out
    assert told.count("Right. ") == len(NUMBERS) and "Not yet" not in told
    source = FILE.read_text()
    assert source.count(GIVEN) == source.count("def train") == 1, "the rest is the learner's"
    assert source.count("def one_f_one_b") == 1 and "ppedu.run" not in source
    progress()
    shown = capsys.readouterr().out
    assert all(f"{number} ★★" in shown for number in NUMBERS)

    losses = re.findall(r"loss (\d\.\d+), in one process (\d\.\d+)", ranks(source, 4)[3])
    assert len(losses) == 8 and all(mine == alone for mine, alone in losses)
    assert float(losses[-1][0]) < 0.9 * float(losses[0][0])


WRONG = [
    ("02.3", ".detach().requires_grad_()", "", "should be a leaf that requires grad"),
    ("02.3", "return tensor\n", "return peer_tensor\n", "in `receive`, at `return peer_tensor`: NameError"),
    ("03.3", "kept:", "kept[::-1]:", "equal those of one process, but only up to rounding"),
    ("03.3", "loss_fn(y, targets[m])", "loss_fn(y, targets[m]) / 4", "0.25 times as large; scale nothing here"),
    ("05.4", "min(last - rank, len(inputs))", "len(inputs)", "runs F F B B; 1F1B is F B F B"),
    ("06.5", None, None, "deadlock: rank 2 waits for rank 3, and rank 3 waits for rank 2: all send, none receives"),
    (
        *("06.5", "        if m < len(inputs):\n            send(y, rank + 1)\n        if m >= warmup:\n"),
        "        if m >= warmup:\n            dx = backward(*kept.pop(0), dy)\n        if m < len(inputs):\n"
        "            send(y, rank + 1)\n        if m >= warmup:\n            send(dx, rank - 1)\n"
        "            continue\n",
        "rank 2 sends the activation of microbatch 1 only after a backward, and rank 3 waits for that",
    ),
    ("07.5", "    dist.all_reduce(squares)\n", "", "That would be right if its own stage were all"),
    ("10.4", 'arrived["B", stage - 1, m] = b', 'arrived["B", stage, m] = b', "in `run`, at `send("),
    ("14.3", "lead = ", "lead = 1 + ", "0W8: there is no microbatch 8"),
]


@pytest.mark.parametrize(("number", "old", "new", "reason"), WRONG)
def test_a_wrong_part_is_refused_with_the_reason(on_ranks, number, old, new, reason):
    text = part_of(number).text.replace(old, new) if old else part_of("05.4").text
    assert text != part_of(number).text
    assert reason in find_fault(number, text)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("y.backward(dy)", "y.backward(dy", "line 25 of the cell is not valid Python: `y.backward(dy`: "),
        ("y.backward(dy)", "...", "`backward` still has `...` in it"),
        ("x.detach().requires_grad_()", "...", "`forward` still has `...` in it"),
        ("def backward", "def back", "the function `backward` is missing"),
    ],
)
def test_a_part_that_cannot_run_is_refused_without_ranks(checked, old, new, reason):
    assert reason in find_fault("02.3", part_of("02.3").text.replace(old, new))
    assert not checked


def test_parts_that_are_missing_are_filled_in_and_give_way_to_the_learners(checked, capsys):
    run_part("05.4", part_of("05.4").text + "# mine\n")
    assert list(in_file()) == ["", "hand-off", "GPipe", "1F1B"]
    assert in_file()["hand-off"].given and not in_file()["1F1B"].given
    run_part("02.3", part_of("02.3").text + "# mine, too\n")
    assert in_file()["hand-off"].text.strip().endswith("# mine, too") and GIVEN in FILE.read_text()


def test_a_later_lesson_renews_the_course_s_version_and_an_earlier_one_does_not(checked, capsys):
    for number, then in ("05.4", "05.4"), ("07.5", "06.5"), ("05.4", "06.5"):
        run_part(
            number,
            part_of(number).text.replace("    rank,", "    ...\n    rank,").replace("    return norm", "    ..."),
        )
        assert in_file()["1F1B"].number == then and in_file()["1F1B"].given


def test_a_wrong_part_leaves_the_learners_part_in_the_file(checked, capsys):
    run_part("02.3", part_of("02.3").text + "# right\n")
    before = FILE.read_text()
    checked.fault = "all wrong"
    run_part("02.3", part_of("02.3").text + "# wrong\n")
    assert FILE.read_text() == before and "Not yet: " in capsys.readouterr().out


def test_the_course_s_version_stands_in_until_the_learners_is_right(checked, capsys):
    checked.fault = "all wrong"
    run_part("02.3", part_of("02.3").text + "# wrong\n")
    assert in_file()["hand-off"].given
    assert "has the course's version until yours is right" in capsys.readouterr().out


def test_a_cell_that_is_not_filled_in_checks_what_an_editor_has_written(checked, capsys):
    run_part("02.3", part_of("02.3").text)
    FILE.write_text(FILE.read_text().replace("return x.grad", "return x.grad  # from an editor"))
    before = FILE.read_text()
    run_part("02.3", part_of("02.3").text.replace("y.backward(dy)", "..."))
    assert "# from an editor" in checked[-1] and FILE.read_text() == before
    line = before.splitlines().index("    return x.grad  # from an editor")
    assert checked[-1].splitlines()[line - 1] == "    return x.grad  # from an editor", "one line stands for the magic"


def test_a_right_part_shows_the_lines_that_it_replaces(checked, capsys):
    run_part("02.3", part_of("02.3").text)
    run_part("02.3", part_of("02.3").text.replace("return x.grad", "return x.grad  # again"))
    assert "-    return x.grad\n+    return x.grad  # again" in capsys.readouterr().out


def test_the_part_of_an_earlier_lesson_does_not_replace_that_of_a_later_one(checked, capsys):
    run_part("06.5", part_of("06.5").text + "# mine\n")
    run_part("05.4", part_of("05.4").text)
    assert in_file()["1F1B"].number == "06.5" and "keeps your part of exercise 06.5" in capsys.readouterr().out


def test_the_learners_own_lines_in_the_file_stay(checked, capsys):
    FILE.write_text("import math\n\n\n# ---- notes (exercise 00.1)\nUSED = math.pi\n")
    run_part("03.3", part_of("03.3").text)
    assert "import math" in FILE.read_text() and "USED = math.pi" in FILE.read_text()


def test_a_file_that_is_not_python_is_left_alone(checked, capsys):
    FILE.write_text("def f(:\n")
    with pytest.raises(SettingError, match=r"my_pipeline\.py is not valid Python: line 1"):
        run_part("02.3", part_of("02.3").text)
    assert FILE.read_text() == "def f(:\n"


def test_a_right_part_beside_a_wrong_one_of_the_file_names_the_other(checked, capsys, monkeypatch):
    run_part("02.3", part_of("02.3").text + "# mine\n")
    monkeypatch.setattr(parts, "_on_ranks", lambda part, others: None if others[1].given else "the gradients differ")
    told = find_fault("03.3", part_of("03.3").text)
    assert told == "this part is right, but not together with your 'hand-off' in my_pipeline.py: the gradients differ"


@pytest.mark.parametrize("line", ["", "02.9", "02.3 --solutions", "02.3 03.3"])
def test_a_wrong_line_is_explained(checked, line):
    with pytest.raises(SettingError, match=r"numbers are 02\.3|write %%my_pipeline 02\.3"):
        run_part(line, "x = 1")


def test_the_solution_is_the_course_s_version(capsys):
    run_part("02.3 --solution")
    assert part_of("02.3").text.strip() in capsys.readouterr().out and not FILE.exists()


def test_the_finished_file_has_about_a_hundred_lines_of_code():
    last = {part.title: part.text for part in course() if part.title != "training"}
    code = re.sub(r'"""[^"]*"""', "", "".join(last.values()))
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert 80 <= len(lines) <= 120
    assert Path(COURSE).name == FILE.name
