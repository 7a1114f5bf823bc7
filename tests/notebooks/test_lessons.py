"""Every lesson holds to the pattern, and runs with its solutions as well as it does as first opened (nbval)."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

START, *LESSONS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem)
def lesson(request):
    return nbformat.read(request.param, as_version=4)


@pytest.fixture(params=[START, *LESSONS], ids=lambda path: path.stem)
def page(request):
    return nbformat.read(request.param, as_version=4)


def _tagged(lesson, tag):
    return [place for place, cell in enumerate(lesson.cells) if tag in cell.metadata.get("tags", [])]


def _text(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def test_lesson_has_the_parts_of_the_pattern(lesson):
    prose = "\n".join(cell.source for cell in lesson.cells if cell.cell_type == "markdown")
    for part in (
        "**Question.**",
        "## Predict",
        "## Run",
        "## Compare",
        "## Do",
        "## What to remember",
        "## In the wild",
    ):
        assert part in prose
    exercises, solutions = _tagged(lesson, "exercise"), _tagged(lesson, "solution")
    assert exercises
    assert solutions == [place + 1 for place in exercises], "a solution follows each exercise"
    assert all(lesson.cells[place].metadata["jupyter"]["source_hidden"] for place in solutions)
    assert [place for place, cell in enumerate(lesson.cells) if ", solution=True)" in cell.source] == solutions, (
        "only what the learner has solved is noted as solved"
    )


def test_a_page_is_saved_as_it_ran_from_top_to_bottom(page):
    counts = [cell.execution_count for cell in page.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    failed = [any(out.output_type == "error" for out in cell.get("outputs", [])) for cell in page.cells]
    assert [place for place, each in enumerate(failed) if each] == _tagged(page, "raises-exception")
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "widgets" not in page.metadata


def test_the_first_page_names_each_lesson_by_its_question_and_leads_there():
    text = "\n".join(cell.source for cell in nbformat.read(START, as_version=4).cells if cell.cell_type == "markdown")
    titles = [nbformat.read(path, as_version=4).cells[0].source.splitlines()[0] for path in LESSONS]
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    expected = zip(LESSONS, (re.fullmatch(r"# (\d+) · (.+)", title).groups() for title in titles), strict=True)
    for row, (path, (number, question)) in zip(rows, expected, strict=True):
        assert row.startswith(f"| {number} | [{question}]({path.name}) | ")
    assert f"]({LESSONS[0].name})." in text.splitlines()[-1]


def test_an_exercise_is_saved_as_not_yet_solved_and_its_solution_as_right(lesson):
    for place in _tagged(lesson, "exercise"):
        assert _text(lesson.cells[place]).startswith("Not yet:")
        assert _text(lesson.cells[place + 1]).startswith("Right."), "and nbval sees that it is so"


@pytest.mark.slow
def test_lesson_runs_with_its_solutions_in_the_place_of_the_exercises(lesson, tmp_path):
    exercises = _tagged(lesson, "exercise")
    for place in exercises:
        lesson.cells[place].source = lesson.cells[place + 1].source
    NotebookClient(lesson, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for place in exercises:
        assert _text(lesson.cells[place]).startswith("Right.")
