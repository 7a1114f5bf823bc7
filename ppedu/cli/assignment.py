"""`ppedu assignment`: lessons without their solutions, to be graded by nbgrader, otter-grader or `ppedu grade`."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ppedu.cli.lessons import PACKAGE, lessons_folder
from ppedu.core import SettingError
from ppedu.core.files import write_text

FOLDER = "homework"  # the default target

# The call that checks an answer. Groups: the number of the exercise, the name of the answer.
CHECK = re.compile(r"""\b(?:check_answer|find_fault)\(\s*["'](\d\d\.\d+)["'],\s*(\w+)\s*\)""")

INTRODUCTION = """\
**An assignment.** Write your answers into the cells of the exercises. The cell after each of them raises an error until
the answer is right; please leave it as it is. What you click in a widget isn't saved with a notebook, so write such an
answer down, as the text beside it explains."""
LOCKED = """\
# Checks exercise {number}, also in cases that you haven't seen.
from ppedu.course.exercises import find_fault
fault = find_fault("{number}", {name})
assert fault is None, fault"""
# A doctest: it passes if nothing is wrong and nothing is printed.
OTTER_CASE = """\
>>> from ppedu.course.exercises import find_fault
>>> find_fault("{number}", {name})
"""

# Parts of a lesson's text that give answers away: folded ones, and sentences that lead to solutions.
GIVEN_AWAY = re.compile(
    r"\s*<details>.*?</details>"
    r"| ?\*Not installed here\?\*[^\n]*"
    r"| \(A solution is in the folded cell below\.\)"
    r"| A solution is in the folded cell below\."
    r"|, and a solution is in the folded cell below",
    re.DOTALL,
)


def assignment(options: argparse.Namespace) -> int:
    """write lessons without their solutions, to hand out and grade"""
    lessons = {path.name[:2]: path for path in sorted(lessons_folder().glob("[0-9][0-9]_*.ipynb"))[1:]}
    wanted: dict[str, Any] = {}  # in order, each once
    for name in options.lesson:
        wanted |= dict.fromkeys(lessons if name == "all" else [name])
    files: dict[str, str] = {}
    for name in wanted:
        if name == "tiny":
            files |= tiny()
        elif path := lessons.get(name.zfill(2)):
            notebook = without_solutions(json.loads(path.read_text(encoding="utf-8")))
            files[path.name] = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
            if options.otter:
                files |= otter_tests(notebook)
        else:
            raise SettingError(f"there is no lesson {name!r}; the lessons are {', '.join(lessons)}, all and tiny")
    folder = Path(options.out)
    if there := next((folder / name for name in files if (folder / name).exists()), None):
        raise SettingError(f"{there} exists already; choose another folder with --out")
    for name, text in files.items():
        make_folder((folder / name).parent)
        write_text(folder / name, text)
        print(f"wrote {folder / name}")
    return 0


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists; raise SettingError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


def source_of(cell: dict[str, Any]) -> str:
    """Return the text of a notebook's cell, which may be saved as a list of lines."""
    return "".join(cell["source"])


def without_solutions(lesson: dict[str, Any]) -> dict[str, Any]:
    """Return a lesson up to its last exercise, without solutions and outputs, and with cells that check the answers.

    The metadata of exercises and checks is that of nbgrader: https://nbgrader.readthedocs.io/en/stable/contributor_guide/metadata.html
    """
    title, *cells = lesson["cells"]
    text = {"cell_type": "markdown", "id": "assignment", "metadata": {}, "source": INTRODUCTION}
    found, last = [_cleared(title), text], 0
    for cell in cells:
        tags = cell["metadata"].get("tags", [])
        if "solution" in tags or not source_of(cleared := _cleared(cell)).strip():
            continue
        found.append(cleared)
        if "exercise" in tags:
            number, name = CHECK.search(source_of(cell)).groups()  # type: ignore[union-attr]  # tests require it
            cleared["metadata"]["nbgrader"] = _for_nbgrader(f"exercise-{number}", grade=False)
            metadata = {"nbgrader": _for_nbgrader(f"check-{number}", grade=True)}
            source = LOCKED.format(number=number, name=name)
            found.append(_code(id=f"check-{number}".replace(".", "-"), metadata=metadata, source=source))
            last = len(found)
    return {**lesson, "cells": found[:last]}


def _cleared(cell: dict[str, Any]) -> dict[str, Any]:
    if cell["cell_type"] == "code":
        return _code(id=cell["id"], metadata={**cell["metadata"]}, source=source_of(cell))
    return {**cell, "source": GIVEN_AWAY.sub("", source_of(cell))}


def _code(**parts: Any) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "outputs": [], **parts}


def _for_nbgrader(name: str, grade: bool) -> dict[str, Any]:
    """Return the metadata of an exercise (an autograded answer), or of its check, which is graded and locked."""
    kind: dict[str, Any] = {"grade": grade, "locked": grade, "solution": not grade, "task": False}
    return kind | {"grade_id": name.replace(".", "-"), "schema_version": 3} | ({"points": 1} if grade else {})


def checks(cells: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the number of each exercise that cells check, and the name of the answer."""
    for source in cells:
        yield from CHECK.findall(source)


def otter_tests(notebook: dict[str, Any]) -> dict[str, str]:
    """Return a test of otter-grader for each exercise, by file name."""
    tests = {}
    for number, name in checks(map(source_of, notebook["cells"])):
        case = {"code": OTTER_CASE.format(number=number, name=name), "hidden": False}
        test = {"name": number, "points": 1, "suites": [{"type": "doctest", "cases": [case]}]}
        tests[f"tests/{number.replace('.', '_')}.py"] = f"OK_FORMAT = True\ntest = {test!r}\n"
    return tests


def tiny() -> dict[str, str]:
    """Return `ppedu.course.by_hand.tiny` without what it does for each kind of action, and a program that tries it."""
    folder = PACKAGE / "course" / "by_hand"
    source, tried = ((folder / name).read_text(encoding="utf-8") for name in ("tiny.py", "try_tiny.py"))
    (match,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Match))
    lines = source.splitlines()
    for case in reversed(match.cases):
        first, last = case.body[0], case.body[-1]
        lines[first.lineno - 1 : last.end_lineno] = [f"{' ' * first.col_offset}...  # yours"]
    return {
        "tiny.py": "\n".join(lines) + "\n",
        "try_tiny.py": tried.replace("from ppedu.course.by_hand.tiny import", "from tiny import"),
    }
