"""`ppedu grade` and `ppedu leaderboard`: check the exercises of learners' notebooks, and compare their reports.

Each answer is checked in a process of its own, with a time limit. That process runs only the cells that the answer
needs, so a cell that trains on several ranks, or that fails, does not affect the exercises.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import subprocess
import symtable
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

from ppedu.cli.assignment import checks, make_folder, source_of
from ppedu.cli.lessons import lessons_folder
from ppedu.core import PipelineError, SettingError
from ppedu.core.files import named, opened, write_text
from ppedu.core.numeric import pretty

LIMIT = 60.0  # seconds for an exercise
REPORTS = "reports"  # the default folder
WIDTH = 90  # characters of feedback in the table

# The names that a cell defines, if it is not valid Python.
MEANT = re.compile(r"^(?:(?:async +)?def|class) +(\w+)|^(\w+) *=", re.MULTILINE)


def grade(options: argparse.Namespace) -> int:
    """check the exercises of learners' notebooks, and write a report on each"""
    from ppedu.course.exercises.feedback import table

    if not options.limit > 0:
        raise SettingError(f"--limit must be a number of seconds above 0; got {options.limit}")
    folder, rows, unread = named(options.out), [["learner", "exercise", "points", "feedback"]], 0
    make_folder(folder)
    reports: set[str] = set()
    for path in map(named, options.notebook):
        learner = _learner(path)
        try:
            cells, asked = read(path)
        except PipelineError as error:
            unread += 1
            rows.append([learner, "–", "–", str(error)])
            continue
        report = f"{learner}_{next(iter(asked))[:2]}.json"
        if report in reports:
            raise SettingError(f"{path} and a notebook before it are both of {learner!r}; name each after its learner")
        reports.add(report)
        exercises = [{"exercise": number, **_graded(number, asked[number], cells, options.limit)} for number in asked]
        result = {"learner": learner, "notebook": str(path), "exercises": exercises}
        write_text(folder / report, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        for each in exercises:
            feedback = shorten(each["feedback"], WIDTH, placeholder=" …")
            rows.append([learner, each["exercise"], f"{each['points']} of 1", feedback])
    print(table(rows)[1])
    return int(unread > 0)


def _learner(path: Path) -> str:
    """Return the name of the file, or of its folder if the file still has the name of a lesson."""
    return path.resolve().parent.name if (lessons_folder() / path.name).exists() else path.stem


def read(path: Path) -> tuple[list[str], dict[str, str | None]]:
    """Return the source of a notebook's cells of code, and for each exercise of its lesson the name of the answer.

    The name is None if the notebook does not check this exercise any more.

    Raises:
        PipelineError: the file cannot be read, or is not a notebook with exercises.
    """
    from ppedu.course.exercises import EXERCISES
    from ppedu.course.exercises.parts import course

    with opened(path) as file:
        try:
            notebook = json.loads(file.read())
            cells = [source_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
            found = dict(checks(cells))
        except (ValueError, KeyError, TypeError):
            raise PipelineError(f"{path} is not a notebook") from None
    lessons = {number[:2] for number in found if number in EXERCISES}
    if len(lessons) != 1:
        raise PipelineError(f"{path} has the exercises of {len(lessons)} lessons; grade an assignment or a lesson")
    elsewhere = {part.number for part in course()}  # in a file of the learner's own
    numbers = [number for number in EXERCISES if number[:2] in lessons and number not in elsewhere]
    return cells, {number: found.get(number) for number in numbers}


def _graded(number: str, name: str | None, cells: list[str], limit: float) -> dict[str, Any]:
    """Return whether an answer is right, the points, the feedback, and the score if the exercise has one.

    The answer is checked in a fresh process, which is killed after `limit` seconds.
    """
    from ppedu.launch.environment import module_path
    from ppedu.launch.launcher import kill_group

    if name is None:
        return {"points": 0, "right": False, "feedback": "the cell of this exercise is missing, or checks no answer"}
    command = [sys.executable, "-m", "ppedu.cli.attempt", str(os.getpid()), number, name]
    environment = os.environ | module_path() | {"MPLBACKEND": "agg", "PPEDU_STILL": "1"}
    with TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            verdict = json.loads(process.communicate(json.dumps(needed(name, cells)), timeout=limit)[0])
        except subprocess.TimeoutExpired:
            verdict = {"right": False, "feedback": f"it did not end within {pretty(limit)} s; does every loop end?"}
        except ValueError:  # the verdict is missing
            verdict = {"right": False, "feedback": "it ended the Python that was to check it, with exit or a crash"}
        finally:
            process.kill()
            kill_group(process.pid)
            process.wait()
    return {"points": int(verdict["right"]), **verdict}


def needed(name: str, cells: list[str]) -> list[str]:
    """Return the cells that define `name`, and whatever they use, in the order of the notebook.

    For the name "b" and the cells "a = 1", "c = 2", "b = a", "a = 3", these are "a = 1" and "b = a".
    """
    defines, uses = zip(*map(_names, cells), strict=True) if cells else ((), ())
    chosen: set[int] = set()

    def choose(wanted: str, before: int) -> None:
        """Choose the last cell before `before` that defines `wanted`, or else the first one after it."""
        places = [place for place, names in enumerate(defines) if wanted in names]
        if not places:
            return
        earlier = [place for place in places if place < before]
        place = earlier[-1] if earlier else places[0]
        if place in chosen:
            return
        chosen.add(place)
        for used in uses[place]:
            # In a cell such as `a = a + 1`, the value of `a` is that of a cell before it.
            choose(used, place if used in defines[place] else place + 1)

    choose(name, len(cells))
    return [cells[place] for place in sorted(chosen)]


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the global names that a cell defines, and those that it uses."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        module = symtable.symtable(TransformerManager().transform_cell(source), "a cell", "exec")
    except (SyntaxError, ValueError):
        return {one or other for one, other in MEANT.findall(source)}, set()
    symbols = module.get_symbols()
    defines = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    uses = {each.get_name() for each in symbols if each.is_referenced()}
    tables = module.get_children()  # of its functions and classes
    while tables:
        table = tables.pop()
        uses |= {each.get_name() for each in table.get_symbols() if each.is_global()}
        tables += table.get_children()
    return defines, uses


def leaderboard(options: argparse.Namespace) -> int:
    """compare learners' schedules of lesson 14 with the least possible times"""
    from ppedu.course.exercises.feedback import table

    scores: dict[str, dict[str, float | None]] = {}
    for path in sorted(named(options.folder).glob("*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            for each in report["exercises"]:
                if "score" in each:
                    scores[report["learner"]] = each["score"]
        except (OSError, ValueError, KeyError, TypeError):
            raise SettingError(f"{path} is not a report of `ppedu grade`; move it to another folder") from None
    if not scores:
        raise SettingError(f"no report in {options.folder} has a right answer to exercise 14.1; grade lesson 14 first")

    standings = []
    for learner, score in scores.items():
        known = [ratio for ratio in score.values() if ratio is not None]
        missing = len(score) - len(known)
        standings.append((missing, mean(known or [0]), learner))
    rows = [["learner", *next(iter(scores.values())), "mean"]]
    for missing, average, learner in sorted(standings):
        ratios = [*scores[learner].values(), None if missing else average]
        rows.append([learner, *("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios)])
    print(table(rows)[1])
    print("Makespan over the least possible one, by ranks × microbatches; –: illegal, or more memory than allowed.")
    if options.save:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_text(options.save, text.getvalue())
    return 0
