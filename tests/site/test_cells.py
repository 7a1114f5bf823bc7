"""The lessons' cells in the page's Python: they print what a Jupyter kernel has printed, or say why they cannot run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ppedu as pp

sys.path.insert(0, str(Path(__file__).parents[2] / "site"))
import cells as site_cells
import record

ROOT = Path(__file__).parents[2]
# Cells of each lesson that need processes or PyTorch, or what such a cell computes. All others run in the page.
RECORDED = {1: 5, 2: 17, 3: 5, 4: 0, 5: 6, 6: 5, 7: 16, 8: 3, 9: 1, 10: 5, 11: 0, 12: 1, 13: 1, 14: 4, 15: 0, 16: 3}
SLOW = {15}
WORKER = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "site")!r})
from cells import start
cells = start()
for line in sys.stdin:
    print(cells.ask(line), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    """`worker(questions)` returns the answers to questions, in a process that stands for the page's worker."""
    for name in ("cluster.csv", "model.toml"):
        (tmp_path / name).write_bytes((ROOT / "notebooks" / name).read_bytes())

    (tmp_path / "progress.txt").write_text("finale case 3 on 2026-01-01\n")  # a case that needs no PyTorch

    def ask(questions):
        lines = "\n".join(map(json.dumps, questions))
        run = subprocess.run([sys.executable, "-c", WORKER], input=lines, capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        return [json.loads(line) for line in run.stdout.splitlines()]

    return ask


def cell(source, first=False):
    return {"cell": 0, "source": source, "first": first}


def texts(outputs):
    return "".join(each.get("text", "").rstrip("\n") + "\n" for each in outputs if "drawn" not in each)


def recorded(outputs):
    """Return the text of outputs as a notebook stores them."""
    parts = []
    for each in outputs:
        text = "".join(each["text"] if each["output_type"] == "stream" else each["data"]["text/plain"])
        parts += [] if text.startswith("<Figure") else [text.rstrip("\n") + "\n"]
    return "".join(parts)


@pytest.mark.parametrize(
    "number", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in RECORDED]
)
def test_cells_print_what_a_kernel_printed(worker, number):
    [path] = (ROOT / "notebooks").glob(f"{number:02}_*.ipynb")
    cells = [each for each in json.loads(path.read_text())["cells"] if each["cell_type"] == "code"]
    answers = worker([cell("".join(each["source"]), True) for each in cells])
    kept = 0
    for each, answer in zip(cells, answers, strict=True):
        if why := answer["outputs"] and answer["outputs"][0].get("recorded"):
            assert "was recorded" in why or "So was its output" in why
            kept += 1
            continue
        assert not [output for output in answer["outputs"] if "error" in output], each["id"]
        if "nbval-ignore-output" not in each["metadata"].get("tags", []):  # what was measured differs
            assert texts(answer["outputs"]) == recorded(each["outputs"]), each["id"]
    assert kept == RECORDED[number]


def test_the_recordings_are_those_of_the_lessons():
    """After a change of such a cell, `make recordings` records it again."""
    sources = []
    for number in record.LESSONS:
        [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        sources += ["".join(each["source"]) for each in json.loads(path.read_text())["cells"]]
    kept = json.loads((ROOT / "site" / record.FILE).read_text())
    gives = [each for each in sources if each.startswith("%%torchrun") and "pp.give_back(" in each]
    assert {*kept} <= {record.key(each) for each in gives}
    assert [each.splitlines()[0] for each in gives if record.key(each) not in kept] == ["%%torchrun -n 4 --timeout 180"]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=9), inner, max_size=3)
        ),
    )
)
def test_recorded_values_survive(value):
    assert record.decoded(json.loads(json.dumps(record.encoded(value)))) == value


def test_recorded_timelines_survive_and_tensors_are_refused():
    timeline = replace(pp.simulate(pp.schedule("zb-v", 2, 4)), source="measured")
    again = record.decoded(json.loads(json.dumps(record.encoded({"zb-v": (timeline,)}))))
    assert again["zb-v"][0].rows == timeline.rows and again["zb-v"][0].schedule == timeline.schedule
    with pytest.raises(TypeError, match="object cannot be recorded"):
        record.encoded([object()])


def test_a_learners_own_cells(worker):
    setup = "import ppedu as pp\nfrom ppedu.notebook import check_answer, hint, outcome, predict"
    answers = worker(
        [
            cell(setup),
            cell("predict('makespan', 10, 40)"),
            {"predict": "makespan", "value": "25"},
            {"predict": "nothing", "value": "25"},
            cell("outcome('makespan', pp.simulate(pp.schedule('1f1b', 4, 8)).makespan)"),
            cell("hint('03.1')"),
            cell("pp.simulate(pp.schedule('1f1b', 2, 2))"),
            {"widget": 0, "message": {"case": 0, "missing": "0F1"}},
            {"widget": 9, "message": {}},
            cell("x = 1\nx / 0"),
            cell("prnit(1)"),
            cell("f(:"),
            cell("import numpy"),
            cell("%%torchrun -n 2\nprint(1)"),
            cell("results[0]"),
            cell("predict('skipped', 1, 9)\noutcome('skipped', 7)"),
            cell("from matplotlib import pyplot as plt\nplt.plot([1])\nplt.show()"),
        ]
    )
    shown = [answer.get("outputs") for answer in answers]
    assert shown[1][0]["asked"] == {"name": "makespan", "choices": [], "min": "10", "max": "40", "step": "1"}
    assert answers[2] == {"predicted": True} and "wrong" in answers[3]
    assert shown[4][0]["text"].startswith("makespan: you said 25, it is 33")
    assert shown[5][0]["text"].startswith("Hint 1 of 3")
    assert shown[6][0]["state"]["kind"] == "show" and "makespan 9" in shown[6][0]["text"]
    assert answers[7]["widget"] == 0 and "wrong" in answers[8]
    errors = ["line 2: ZeroDivisionError", "NameError", "line 1: SyntaxError", "This page does not have numpy."]
    for outputs, error in zip(shown[9:13], errors, strict=True):
        assert error in outputs[-1]["error"]
    assert "several processes" in shown[13][0]["recorded"]
    assert "'results'" in shown[14][0]["recorded"] and shown[16] == []
    assert shown[15][1]["answer"] == "It is 7."


def test_a_lesson_counts_as_read_once_all_its_exercises_are_solved(monkeypatch):
    solved = dict.fromkeys(("05.1 solved", "05.2 solved", "05.3 solved", "04.1 solved"), 2)
    monkeypatch.setattr(site_cells, "recorded", lambda: solved)
    assert not site_cells._solved()
    solved["05.4 solved"] = 1
    assert site_cells._solved()
