"""The lessons' cells in the page's Python: they print what a Jupyter kernel has printed, or say why they cannot run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Cells of each lesson that need processes or PyTorch, or what such a cell computes. All others run in the page.
RECORDED = {1: 6, 2: 11, 3: 4, 4: 0, 5: 6, 6: 3, 7: 15, 8: 11, 9: 5, 10: 7, 11: 2, 12: 4, 13: 0}
SLOW = {13}
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
        assert texts(answer["outputs"]) == recorded(each["outputs"]), each["id"]
    assert kept == RECORDED[number]


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
    assert "'results'" in shown[14][0]["recorded"] and shown[15] == []
