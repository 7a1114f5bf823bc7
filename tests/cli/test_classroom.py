"""`ppedu assignment`, `grade` and `leaderboard`: what is handed out has no solutions, and what comes back is graded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ppedu.cli.grade import needed
from ppedu.cli.main import main
from ppedu.course.exercises import find_fault

ROOT = Path(__file__).parents[2]
LESSONS = [path for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if path.name[:2] != "00"]

# nbgrader 0.9.6, nbgrader/nbgraderformat/v3.json: the required keys, and those that v3.py requires of some cells.
REQUIRED = {"schema_version": int, "grade": bool, "locked": bool, "solution": bool, "grade_id": str}
ALLOWED = {*REQUIRED, "task", "points", "checksum", "cell_type"}

RIGHT = """\
def my_1f1b(rank, ranks, microbatches):
    warmup = min(ranks - rank, microbatches)
    yield from (pp.F(rank, m) for m in range(warmup))
    for m in range(microbatches):
        yield pp.B(rank, m)
        if warmup + m < microbatches:
            yield pp.F(rank, warmup + m)"""
WRONG = "shift = 1\ndef peak_activations(rank, ranks, microbatches):\n    return ranks - rank + shift"
BROKEN = "def eager_1f1b(rank, ranks, microbatches:\n    yield pp.F(rank, 0)"
ENDLESS = "def my_1f1b(rank, ranks, microbatches):\n    while True:\n        pass"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def tagged(cell):
    return set(cell["metadata"].get("tags", [])) & {"exercise", "solution"}


def lines(text):
    return {line.strip() for line in text.splitlines()}


def test_what_is_handed_out_has_no_line_of_a_solution(capsys):
    """Except lines that the lesson shows before the exercise, and those of the first versions of exercises."""
    assert main(["assignment", "all", "--otter"]) == 0
    for path in LESSONS:
        cells, handed_out = read(path)["cells"], Path("homework", path.name).read_text(encoding="utf-8")
        text = "\n".join(source(cell) for cell in json.loads(handed_out)["cells"])
        stubs = [source(cell) for cell in cells if tagged(cell) == {"exercise"}]
        for place, cell in enumerate(cells):
            if tagged(cell) == {"solution"} and "%my_pipeline" not in source(cell):
                shown = [source(each) for each in cells[:place] if tagged(each) != {"solution"}]
                own = lines(source(cell)) - lines("\n".join(shown + stubs))
                own = {line for line in own if not line.startswith(("import ", "from "))}
                assert len(own) > 2 and not own & lines(text), path.name
        assert not re.search(
            r"solution|<details>|folded cell below|colab\.research", text.lower().replace("the folded solution", "")
        )
        assert all(not cell["outputs"] for cell in json.loads(handed_out)["cells"] if cell["cell_type"] == "code")
    for test in Path("homework/tests").iterdir():
        assert "solution" not in test.read_text(encoding="utf-8")


def test_the_metadata_is_nbgraders(capsys):
    assert main(["assignment", "5", "14"]) == 0
    for name, count in (("05_1f1b", 3), ("14_design_your_own", 2)):
        cells = read(f"homework/{name}.ipynb")["cells"]
        assert len({cell["id"] for cell in cells}) == len(cells)
        marked = [(cell, cell["metadata"]["nbgrader"]) for cell in cells if "nbgrader" in cell["metadata"]]
        assert len({data["grade_id"] for _, data in marked}) == len(marked) == 2 * count
        for cell, data in marked:
            assert data.keys() <= ALLOWED and all(type(data[key]) is kind for key, kind in REQUIRED.items())
            assert data["schema_version"] == 3 and re.fullmatch(r"[a-zA-Z0-9_\-]+", data["grade_id"])
            assert data["grade"] == data["locked"] == (not data["solution"]) == ("points" in data)
            assert cell["cell_type"] == "code"


def test_nothing_is_overwritten(capsys):
    assert main(["assignment", "05"]) == 0
    assert main(["assignment", "04", "05"]) == 1
    assert "homework/05_1f1b.ipynb exists already" in capsys.readouterr().err
    assert not Path("homework/04_is_this_legal.ipynb").exists()


def submit(learner, **answers):
    """Save the assignment of lesson 5 as a learner's, with these cells of code instead of the first versions."""
    notebook = read("homework/05_1f1b.ipynb")
    for cell in notebook["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if name in answers:
            cell["source"] = answers[name]
        elif source(cell).startswith("import ppedu as pp"):  # without its picture
            cell["source"] = "import ppedu as pp\nfrom ppedu.notebook import check_answer, hint\n%load_ext ppedu"
    path = Path("submitted", learner, "05_1f1b.ipynb")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return str(path)


def grade(*paths):
    code = main(["grade", *paths])
    reports = [read(path) for path in Path("reports").glob("*.json")]
    found = {report["learner"]: [tuple(each.values())[1:] for each in report["exercises"]] for report in reports}
    return code, {learner: [(points, text) for points, right, text in each] for learner, each in found.items()}


def grades(*answers):
    return {f"exercise-05-{place}": answer for place, answer in enumerate(answers, 1)}


def test_right_wrong_broken_and_empty_answers_are_graded_in_a_process_each(capfd):
    main(["assignment", "05"])
    check = '\n\ncheck_answer("05.1", my_1f1b)\nhint("05.1")'
    ada = submit("ada", **grades(f"{RIGHT}{check}", WRONG, BROKEN))
    eve = submit("eve", **grades("", "", "import os\nos._exit(3)\neager_1f1b = None"))
    Path("odd.ipynb").write_text("{}")
    code, found = grade(ada, eve, "odd.ipynb")
    assert code == 1
    (right, praise), (wrong, reason), (broken, message) = found["ada"]
    assert (right, wrong, broken, praise) == (1, 0, 0, "right")
    assert reason == find_fault("05.2", lambda rank, ranks, microbatches: ranks - rank + 1)
    assert message == "your cell fails, SyntaxError at line 1: '(' was never closed"
    (empty, missing), _, (crashed, crash) = found["eve"]
    assert (empty, crashed) == (0, 0)
    assert missing == "`my_1f1b` is not defined in this notebook"
    assert crash == "it ended the Python that was to check it, with exit or a crash"
    output, errors = capfd.readouterr()
    assert (
        "ada      05.1      1 of 1  right\n" in output
        and "odd      –         –       odd.ipynb is not a notebook" in output
    )
    assert errors == "" and not Path("progress.txt").exists()


def test_an_endless_answer_is_stopped_at_the_limit(capsys):
    main(["assignment", "05"])
    endless = read(submit("max", **grades(ENDLESS)))
    endless["cells"] = [cell for cell in endless["cells"] if "05.2" not in source(cell) and "05.3" not in source(cell)]
    Path("max.ipynb").write_text(json.dumps(endless))
    assert main(["grade", "max.ipynb", "--limit", "2"]) == 0
    first, *rest = read("reports/max_05.json")["exercises"]
    assert first["feedback"] == "it did not end within 2 s; does every loop end?" and first["points"] == 0
    assert [each["feedback"][:36] for each in rest] == ["the cell of this exercise is missing"] * 2


def test_an_answer_needs_the_cells_that_define_what_it_uses_as_it_was_then():
    cells = [
        "import ppedu as pp",
        "k = 1",
        "k = 2\nother = pp",
        "def f(m):\n    return pp.F(0, k) if m else late()",
        "%%torchrun -n 2\nk = 3",
        "k = 4",
        "def late():\n    return f(1)",
    ]
    assert needed("f", cells) == [cells[place] for place in (0, 2, 3, 6)]
    assert needed("f", [*cells, "def f(m:"]) == ["def f(m:"]
    assert needed("g", cells) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_solution_gets_all_points(capsys, path):
    """In the lesson's own notebook, where the answers have the names of the exercises."""
    notebook = read(path)
    for place, cell in enumerate(notebook["cells"]):
        if tagged(cell) == {"solution"}:
            name = re.search(r"\bsolution_(\w+), solution=True", source(cell))[1]
            answer = source(cell).replace(f"solution_{name}", name).replace(", solution=True", "")
            notebook["cells"][place - 1]["source"] = answer
    Path("best.ipynb").write_text(json.dumps(notebook))
    assert main(["grade", "best.ipynb"]) == 0
    assert all(each["right"] for each in read(f"reports/best_{path.name[:2]}.json")["exercises"])


def test_the_leaderboard_ranks_by_the_mean_and_puts_schedules_that_do_not_fit_last(capsys):
    Path("reports").mkdir()
    for learner, ratios in {"bob": (1.0, None), "ada": (1.25, 1.0), "eve": (1.0, 1.125)}.items():
        score = dict(zip(("4 × 9", "5 × 12"), ratios, strict=True))
        report = {"learner": learner, "exercises": [{"exercise": "14.1", "score": score}, {"exercise": "14.2"}]}
        Path(f"reports/{learner}_12.json").write_text(json.dumps(report), encoding="utf-8")
    assert main(["leaderboard", "--save", "table.csv"]) == 0
    assert Path("table.csv").read_text(encoding="utf-8").splitlines() == [
        "learner,4 × 9,5 × 12,mean", "eve,1.000,1.125,1.062", "ada,1.250,1.000,1.125", "bob,1.000,–,–",
    ]  # fmt: skip
    Path("reports/odd.json").write_text("[]")
    assert main(["leaderboard"]) == 1
    assert "reports/odd.json is not a report of `ppedu grade`" in capsys.readouterr().err


def test_the_interpreter_is_handed_out_without_what_it_does_for_each_action(capsys):
    assert main(["assignment", "tiny", "--out", "."]) == 0
    whole, rest = lines((ROOT / "ppedu/course/by_hand/tiny.py").read_text()), lines(Path("tiny.py").read_text())
    assert rest - whole == {"...  # yours"}
    removed = whole - rest
    assert "y = modules[stage](x)" in removed and "receives[kind, stage, m] = dist.irecv(" in "\n".join(removed)
    compile(Path("tiny.py").read_text(), "tiny.py", "exec")


@pytest.mark.slow
def test_the_program_that_tries_the_interpreter_ends_if_nothing_is_filled_in(capsys):
    main(["assignment", "tiny", "--out", "."])
    done = subprocess.run([sys.executable, "try_tiny.py"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.fullmatch(r"gpipe +not yet: rank \d: a weight of stage \d has no gradient\n", done.stdout)


@pytest.mark.slow
def test_the_program_accepts_the_interpreter_itself():
    done = subprocess.run(
        [sys.executable, "-m", "ppedu.course.by_hand.try_tiny"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" right\n") == 5
