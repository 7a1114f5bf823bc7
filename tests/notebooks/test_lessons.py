"""Every lesson follows the same pattern, and runs with right, wrong and failing answers (nbval runs it as saved).

A solution defines a single name: `solution_` plus the name of the exercise's answer.
"""

import ast
import json
import re
import struct
import symtable
import sys
from base64 import b64decode
from html import escape, unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from ipykernel.kernelspec import get_kernel_dict

import ppedu as pp

START, *LESSONS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
BUILDING_ON_ANSWERS = [path for path in LESSONS if "is_right(" in path.read_text(encoding="utf-8")]


class Node(dict):
    """A JSON object with its values as attributes and its lines joined, as nbformat reads it, which takes seconds."""

    def __init__(self, given):
        super().__init__(given)
        self.update((key, "".join(self[key])) for key in ("source", "text") if key in self)

    __getattr__ = dict.__getitem__


def read(path):
    return json.loads(path.read_text(encoding="utf-8"), object_hook=Node)


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem)
def lesson(request):
    return read(request.param)


@pytest.fixture(params=[START, *LESSONS], ids=lambda path: path.stem)
def page(request):
    return read(request.param)


def _tagged(lesson, tag):
    return [place for place, cell in enumerate(lesson.cells) if tag in cell.metadata.get("tags", [])]


def _text(cell):
    """Return the printed text of a cell, and the text of its displayed objects."""
    texts = [output.get("text") or "".join(output.get("data", {}).get("text/plain", "")) for output in cell.outputs]
    return "\n".join(texts)


PARTS = ("*New here?*", "## What to remember", "## What I'd pick", "## Check yourself")


def _prose(lesson):
    text = "\n".join(cell.source for cell in lesson.cells if cell.cell_type == "markdown")
    return text.replace("’", "'")


def _code(lesson):
    return [cell for cell in lesson.cells if cell.cell_type == "code"]


def test_lesson_has_the_parts_of_the_pattern(lesson):
    prose = _prose(lesson)
    places = [prose.find(part) for part in PARTS]
    assert -1 not in places and places == sorted(places)


def test_a_lesson_is_short(lesson):
    """Counted without code, outputs, and what states an exercise; a source in brackets is not an aside."""
    exercises = _tagged(lesson, "exercise") + _tagged(lesson, "part")
    prose = [cell for place, cell in enumerate(lesson.cells) if place + 1 not in exercises]
    text = "\n".join(cell.source for cell in prose if cell.cell_type == "markdown")
    text = re.sub(r"(?<=\])\([^)]*\)|</?[a-z][^>\n]*>|\$[^$\n ][^$\n]{0,60}\$|`[^`]*`", " ", text)
    assert len(re.findall(r"[A-Za-z0-9][\w'’.,-]*", text)) <= 1500
    assert len(re.findall(r"\((?!\[)[^()]{6,}\)", text)) <= 8, "asides in brackets"


def test_lessons_are_small_enough_for_slow_lines():
    assert max(path.stat().st_size for path in LESSONS) < 1_000_000, "`make lessons` makes the pictures smaller"


def test_each_exercise_is_followed_by_its_folded_solution(lesson):
    exercises, solutions = _tagged(lesson, "exercise"), _tagged(lesson, "solution")
    assert exercises
    assert solutions == [place + 1 for place in sorted(exercises + _tagged(lesson, "part"))], (
        "one follows each exercise"
    )
    assert all(lesson.cells[place].metadata["jupyter"]["source_hidden"] for place in solutions)
    shown = [", solution=True)" in cell.source or " --solution" in cell.source for cell in lesson.cells]
    assert [place for place, each in enumerate(shown) if each] == solutions, (
        "a lesson's solution must not be recorded as the learner's"
    )


def test_a_part_of_the_learners_own_file_is_saved_unfinished_with_its_hints_and_its_solution(lesson):
    from ppedu.course.exercises import EXERCISES
    from ppedu.course.exercises.parts import part_of

    for place in _tagged(lesson, "part"):
        part, solution, hints = lesson.cells[place : place + 3]
        number = part.source.splitlines()[0].removeprefix("%%my_pipeline ")
        assert EXERCISES[number].hints and hints.source == f'hint("{number}")'
        assert "still has `...` in it" in _text(part) and _text(part).startswith("Not yet:")
        assert solution.source == f"# Solution {number}\n%my_pipeline {number} --solution"
        assert solution.metadata["jupyter"]["outputs_hidden"] and part_of(number).text.strip() in _text(solution)


def test_a_lesson_opens_with_a_scene_and_a_picture(lesson):
    title, *scene = lesson.cells[0].source.splitlines()
    assert re.fullmatch(r"# \d+ · .+", title) and "*New here?*" in lesson.cells[0].source
    assert len(re.findall(r"[.?!][\"”]?(\s|$)", " ".join(scene))) >= 4, "the scene, and the words that are new"
    outputs = [output for cell in lesson.cells[2:4] if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)


ELSEWHERE = (
    f"https://colab.research.google.com/github/ppedu/ppedu/blob/v{pp.__version__}/notebooks/",
    f"https://kaggle.com/kernels/welcome?src=https://github.com/ppedu/ppedu/blob/v{pp.__version__}/notebooks/",
)


@pytest.mark.parametrize("path", [START, *LESSONS], ids=lambda path: path.stem)
def test_a_page_opens_in_colab_and_kaggle_and_installs_its_release_there(path):
    title, setup, *_ = read(path).cells
    assert all(f"]({address}{path.name})" in title.source for address in ELSEWHERE)
    assert setup.source == read(START).cells[1].source and not setup.outputs
    assert setup.metadata["jupyter"]["source_hidden"] and f"ppedu/ppedu@v{pp.__version__}" in setup.source


@pytest.mark.parametrize("there", [True, False])
def test_the_setup_cell_installs_only_what_is_missing(monkeypatch, there):
    """Another release of torch, or one for another CUDA, would not fit the machine."""
    lines = []
    shell = SimpleNamespace(run_line_magic=lambda *given: lines.append(given))
    if not there:
        monkeypatch.setitem(sys.modules, "ppedu", None)
    exec(read(START).cells[1].source, {"get_ipython": lambda: shell})
    packages = f"anywidget git+https://github.com/ppedu/ppedu@v{pp.__version__}"
    assert lines == ([] if there else [("pip", f"install -q {packages}")])


def test_ranks_use_the_gpus_or_the_lesson_says_why_not(page):
    told = False
    for cell in page.cells:
        if cell.cell_type == "markdown":
            told = told or "even on a machine with GPUs" in cell.source
        elif backends := re.findall(r"\binit_process_group\((.*?)\)", cell.source):
            chosen = re.search(r"^device, backend = (pp\.run\.)?place\(\)", cell.source, re.MULTILINE)
            assert backends == ["backend" if chosen else '"gloo"'] and (chosen or told), cell.source


def test_a_lesson_ends_with_predictions_questions_progress_and_a_link(lesson):
    prose = _prose(lesson)
    questions = re.findall(r"<details>\s*<summary>(.+?)</summary>(.+?)</details>", prose[prose.find(PARTS[-1]) :], re.S)
    assert 3 <= len(questions) <= 5
    assert all(answer.strip() for _, answer in questions)
    code = _code(lesson)
    [compared] = [place for place, cell in enumerate(code) if cell.source.strip().endswith("predictions()")]
    assert "outcome(" not in "".join(cell.source for cell in code[compared + 1 :])
    [progress] = [cell for cell in code if re.search(r"^progress\(\d*\)", cell.source, re.MULTILINE)]
    assert "nbval-ignore-output" in progress.metadata.tags


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_last_cell_links_to_the_next_lesson(path):
    *_, last = read(path).cells
    after = dict(zip(LESSONS, [*LESSONS[1:], START], strict=True))[path]
    assert last.cell_type == "markdown" and f"]({after.name})" in last.source


def test_code_that_draws_is_folded_or_short(lesson):
    for cell in _code(lesson):
        drawing = re.findall(r"^.*\b(?:ax|axes|fig|figure|plt|pyplot)\b.*$", cell.source, re.MULTILINE)
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            assert cell.source.startswith(("#", "%%torchrun")), "a folded cell still shows its first line"
        else:
            assert len(drawing) <= 8, drawing


def test_code_is_not_cut_off_on_a_page_of_1024_pixels(page):
    assert not [line for cell in _code(page) for line in cell.source.splitlines() if len(line) > 107]


def test_dollars_are_not_taken_for_formulas(page):
    """JupyterLab sets whatever is between two dollar signs of a paragraph as a formula, escaped or not."""
    text = [cell.source for cell in page.cells if cell.cell_type == "markdown"]
    paragraphs = "\n\n".join(text).split("\n\n")
    assert not [each for each in paragraphs if each.count("$") > 1 and (each.count("$") % 2 or "\\$" in each)]


def test_links_lead_to_lessons_or_to_the_web(page):
    """A learner may have a copy of the lessons alone."""
    text = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
    assert not re.search(r"(?<!\])\(https?://", text), "an address without the text of its link"
    links = re.findall(r"\]\((.+?)\)", text)
    assert {link for link in links if not link.startswith("https://")} <= {path.name for path in [START, *LESSONS]}


def test_every_exercise_has_hints_and_one_is_harder(lesson):
    from ppedu.course.exercises import EXERCISES

    text = "\n".join(cell.source for cell in lesson.cells)
    for place in _tagged(lesson, "exercise"):
        number, _ = _number_and_name(lesson.cells[place])
        assert EXERCISES[number].hints, number
    assert "Optional, harder" in text and re.search(r'\bhint\("\d\d\.\d"\)', text)


def _number_and_name(cell):
    """Return the number of an exercise or solution, and the name of the answer."""
    [found] = re.findall(r'check_answer\("(.+?)", (\w+)', cell.source)
    return found


def _bound(source):
    symbols = symtable.symtable(source, "a cell", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def test_a_solution_is_labelled_and_defines_one_name_of_its_own(lesson):
    for place in _tagged(lesson, "exercise"):
        exercise, solution = lesson.cells[place : place + 2]
        number, name = _number_and_name(exercise)
        assert solution.source.startswith(f"# Solution {number}\n"), "this line stays visible in a folded cell"
        assert _number_and_name(solution) == (number, f"solution_{name}")
        assert _bound(solution.source) == {f"solution_{name}"}
        assert "register" not in solution.source and "global" not in solution.source


def test_no_cell_depends_on_a_solution(lesson):
    solutions = _tagged(lesson, "solution")
    code = [
        cell.source for place, cell in enumerate(lesson.cells) if place not in solutions and cell.cell_type == "code"
    ]
    assert not any("solution" in source for source in code), "deleting the solutions must not break the lesson"


def _cells_using_the_answer(lesson, place):
    """Return the name of an exercise's answer, and the cells after the solution that read it."""
    _, name = _number_and_name(lesson.cells[place])
    magics = re.compile(r"%%|# Solution .*\n%")
    after = [cell for cell in lesson.cells[place + 2 :] if cell.cell_type == "code" and not magics.match(cell.source)]
    return name, [cell for cell in after if name in _read(cell.source) - _bound(cell.source)]


def _read(source):
    nodes = ast.walk(ast.parse(source))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def test_a_page_is_saved_with_the_outputs_of_one_run_from_top_to_bottom(page):
    counts = [cell.execution_count for cell in page.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    failed = [any(out.output_type == "error" for out in cell.get("outputs", [])) for cell in page.cells]
    assert [place for place, each in enumerate(failed) if each] == _tagged(page, "raises-exception")
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "widgets" not in page.metadata


def test_a_picture_is_shown_on_one_screen_of_a_laptop(page):
    for cell in page.cells:
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                width, height = struct.unpack(">II", b64decode(picture)[16:24])
                shown = output.get("metadata", {}).get("image/png", {}).get("height", height * min(1, 1185 / width))
                assert shown <= 640 or "lineup()" in cell.source  # whose five timelines are judged one by one


def test_the_first_page_links_to_each_lesson_by_its_question():
    text = "\n".join(cell.source for cell in read(START).cells if cell.cell_type == "markdown")
    titles = [read(path).cells[0].source.splitlines()[0] for path in LESSONS]
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    expected = zip(LESSONS, (re.fullmatch(r"# (\d+) · (.+)", title).groups() for title in titles), strict=True)
    for row, (path, (number, question)) in zip(rows, expected, strict=True):
        assert row.startswith(f"| {number} | [{question}]({path.name}) | ")
    assert f"]({LESSONS[0].name})." in text.splitlines()[-1]


def test_exercises_are_saved_unsolved_and_solutions_as_right(lesson):
    for place in _tagged(lesson, "exercise"):
        number, _ = _number_and_name(lesson.cells[place])
        assert _text(lesson.cells[place]).startswith("Not yet:")
        right = f"Solution {number} is right."
        assert _text(lesson.cells[place + 1]).strip() == right, "nbval compares this output"
        html = "".join(lesson.cells[place + 1].outputs[0].get("data", {}).get("text/html", ""))
        assert not html or f"<b>{right}</b>" in html


def test_a_cell_that_uses_an_answer_reports_that_it_is_not_right_yet(lesson):
    for place in _tagged(lesson, "exercise"):
        number, name = _number_and_name(lesson.cells[place])
        _, cells = _cells_using_the_answer(lesson, place)
        for cell in cells[:1]:
            assert f'is_right("{number}", {name})' in cell.source
            assert f"Exercise {number} is not right yet." in _text(cell)


def test_opening_a_lesson_in_jupyterlab_does_not_change_it(lesson):
    """JupyterLab writes the name of the kernel that it has started; another one would mark the lesson as changed."""
    assert lesson.metadata["kernelspec"]["display_name"] == get_kernel_dict()["display_name"]


def test_predictions_are_left_to_the_learner(lesson):
    code = _code(lesson)
    source = "\n".join(cell.source for cell in code if cell.source[:2] != "%%")
    names = re.findall(r"^predict\((\".+?\"),\s", source, re.MULTILINE)
    assert names and names == re.findall(r"outcome\((\".+?\")", source)
    told = "\n".join(map(_text, code))
    assert "you said" not in told
    for name in names:
        assert re.search(rf"{re.escape(name[1:-1])}: your prediction", told)
        assert f"{name[1:-1]}: you made no prediction." in told


def test_predictions_are_controls_and_their_outcomes_are_computed(lesson):
    calls = [
        node
        for cell in _code(lesson)
        if cell.source[:2] != "%%"
        for node in ast.walk(ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert "You made no predictions here." in "\n".join(map(_text, _code(lesson)))
    outputs = [output for cell in _code(lesson) for output in cell.outputs]
    pages = "\n".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    for call in calls:
        if call.func.id == "outcome":
            assert not isinstance(call.args[1], ast.Constant), f"{ast.unparse(call)}: compute the outcome"
        if call.func.id == "predict":
            name, *given = map(ast.literal_eval, call.args)
            [found] = re.findall(rf"<summary>{re.escape(escape(name))}: .+</summary><div>It is (.+)\.</div>", pages)
            if isinstance(given[0], list):
                assert unescape(found) in map(str, given[0])
            else:
                assert len(given) in (2, 3) and given[0] <= float(found.replace(",", "")) <= given[1]


COUNT = """
import functools, inspect
used, kept = {}, {}

def counted(answer, name):
    kept[name] = answer
    if not callable(answer):
        return answer
    used[name] = 0

    @functools.wraps(answer)
    def call(*given, **named):
        checked = any("exercises" in frame.filename for frame in inspect.stack(0))
        used[name] += not checked
        return answer(*given, **named)

    kept[name] = call
    return call
"""


QUICK = "12"
ANSWERED = [
    pytest.param(path, marks=[] if path.stem[:2] == QUICK else pytest.mark.slow, id=path.stem) for path in LESSONS
]


@pytest.mark.kernel
@pytest.mark.parametrize("with_ranks", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ANSWERED)
def test_a_lesson_keeps_the_learners_right_answers_and_uses_them(path, with_ranks, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    lesson = nbformat.read(path, as_version=4)
    if not with_ranks:  # in seconds; cells that use the ranks' results may then fail
        lesson.cells = [cell for cell in lesson.cells if cell.source[:2] != "%%"]
    exercises, uses = _tagged(lesson, "exercise"), {}
    for place in exercises:
        name, cells = _cells_using_the_answer(lesson, place)
        uses[name] = bool(cells)
        answer = re.sub(r"\bsolution_", "", lesson.cells[place + 1].source)
        check = f'check_answer("{_number_and_name(lesson.cells[place])[0]}", {name}'
        answer = answer.replace(f"{check}, solution=True)", f"{check})")
        lesson.cells[place].source = answer.replace(check, f'{name} = counted({name}, "{name}")\n{check}')
    lesson.cells[0] = nbformat.v4.new_code_cell(COUNT)  # in place of the title
    end = f"{{{', '.join(f'{name!r}: {name}' for name in uses)}}} == kept, used"
    lesson.cells.append(nbformat.v4.new_code_cell(end))
    folder = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(lesson, timeout=120, allow_errors=not with_ranks, resources=folder)
    client.comm_open_handlers.clear()  # https://github.com/jupyter/nbclient/issues/312: with an Output it may hang
    client.execute()
    for place in exercises:
        number, _ = _number_and_name(lesson.cells[place])
        assert _text(lesson.cells[place]).startswith("Right.")
        assert _text(lesson.cells[place + 1]).strip() == f"Solution {number} is right."
    printed = [_text(cell) for cell in lesson.cells if cell.cell_type == "code"]
    assert not any("not right yet" in each or "you said" in each for each in printed), "Run All makes no prediction"
    unchanged, used = eval(lesson.cells[-1].outputs[-1].data["text/plain"])
    assert unchanged
    assert not with_ranks or all(uses[name] == (calls > 0) for name, calls in used.items())


@pytest.mark.slow
@pytest.mark.parametrize("path", BUILDING_ON_ANSWERS, ids=lambda path: path.stem)
def test_a_lesson_runs_to_its_end_with_failing_answers(path, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    lesson = nbformat.read(path, as_version=4)
    exercises = _tagged(lesson, "exercise")
    for place in exercises:
        number, name = _number_and_name(lesson.cells[place])
        failing = f'def {name}(*given):\n    return no_such_name\n\ncheck_answer("{number}", {name})'
        lesson.cells[place].source = failing
    client = NotebookClient(lesson, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.comm_open_handlers.clear()  # as above
    client.execute()
    for place in exercises:
        assert _text(lesson.cells[place]).startswith("Not yet:")
