"""Predictions and exercises: `predict`, `outcome`, `predictions`, `check_answer`, `hint`, `is_right` and `progress`.

An exercise checks the learner's answer, and explains in a sentence what is wrong with it. It is named by its lesson
and its number, such as "05.1". It may come with hints, with a picture of a wrong answer, and with a reward: a picture
of the schedule that the learner has built. The exercises of a lesson are `EXERCISES` in its file `lesson_NN.py`; all
files with such a name are imported.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from importlib import import_module
from itertools import groupby
from pkgutil import iter_modules
from typing import Any

from ppedu.core import PipelineError, SettingError
from ppedu.core.numeric import plural
from ppedu.course.board.levels import LEVELS
from ppedu.course.board.results import MOST_STARS
from ppedu.course.exercises.common import Exercise
from ppedu.course.exercises.feedback import has_page, publish, rendered, say, show, show_pictures, table
from ppedu.course.exercises.prediction import outcome, predict, predictions
from ppedu.course.exercises.programs import UnwritableError, program
from ppedu.course.progress_file import PROGRESS, STAR, keep, record, recorded, stars
from ppedu.view.interactive import in_notebook

__all__ = ["check_answer", "find_fault", "hint", "is_right", "outcome", "predict", "predictions", "progress", "record"]

MOST = 1000  # characters; a longer reason is shortened
COLUMNS = 5  # of the table of progress, after the first

_hints: Counter[str] = Counter()  # the hints given, by exercise


def check_answer(exercise: str, answer: Any, solution: bool = False) -> None:
    """Check the answer to an exercise such as "05.1", and show that it is right, or what is wrong and why.

    A right answer is recorded for `progress`, and its picture is drawn. A wrong answer that is a schedule is drawn with
    its fault outlined.

    Args:
        solution: `answer` is the lesson's own solution. The result is shown, but not recorded as the learner's, and
            without a picture: learners may run all cells before they solve the exercise, and it would give too much
            away.

    Raises:
        SettingError: there is no such exercise.
    """
    judge(exercise, answer, solution)


def judge(exercise: str, answer: Any, solution: bool = False) -> bool:
    """Do what `check_answer` does, and return whether the answer is right."""
    task, wrong = _task(exercise), find_fault(exercise, answer)
    if solution:
        say(f"Solution {exercise} is {f'not right: {wrong}' if wrong else 'right.'}", "wrong" if wrong else "right")
    elif wrong:
        short = wrong if len(wrong) <= MOST else f"{wrong[: MOST // 2]} … {wrong[-MOST // 2 :]}"
        say(f"Not yet: {short}{'' if wrong.endswith(('.', '?', '!', '.)')) else '.'}", "wrong")
        if task.draw_wrong:
            task.draw_wrong(answer, wrong)
            show_pictures()
    else:
        say(f"Right. {task.praise(answer) if callable(task.praise) else task.praise}", "right")
        _record_solved(exercise, answer)
        if task.reward:
            task.reward(answer).plot()
            show_pictures()
    return wrong is None


def _record_solved(exercise: str, answer: Any) -> None:
    """Record the stars of a right answer, and the answer as a program, or the reason why it cannot be one."""
    hinted = False
    with suppress(OSError):  # `record` reports it
        hinted = any(event.startswith(f"{exercise} hint") for event in recorded())
    record(f"{exercise} solved", stars=1 if hinted else 2)
    try:
        keep("answers", exercise, {"program": program(answer)})
    except UnwritableError as error:
        keep("answers", exercise, {"not verifiable": str(error)})


def is_right(exercise: str, answer: Any) -> bool:
    """Return whether `answer` solves the exercise, without printing anything: for cells that build on the answer.

    Raises:
        SettingError: there is no such exercise.
    """
    return find_fault(exercise, answer) is None


def hint(exercise: str) -> None:
    """Offer the hints of an exercise one by one. They cost nothing but the second star of the exercise.

    In a notebook, a button shows the next hint, so that running all cells shows none. Elsewhere, each call shows one.

    Raises:
        SettingError: there is no such exercise.
    """
    hints = _task(exercise).hints
    if not hints:
        print(f"{exercise} has no hints. What check_answer prints is meant to be enough.")
    elif in_notebook():
        _show_button(exercise, len(hints))
    elif has_page():
        print(f"{exercise} has {plural(len(hints), 'hint')}. Run this cell to read them, one at a time.")
    elif _hints[exercise] < len(hints):
        _give(exercise, _hints[exercise] + 1)
    else:
        print(f"There are no more hints for {exercise}. Its solution is in the folded cell below the exercise.")


def _give(exercise: str, number: int) -> None:
    """Show a hint, and record it."""
    hints = _task(exercise).hints
    _hints[exercise] = max(number, _hints[exercise])
    record(f"{exercise} hint {number}")
    say(f"Hint {number} of {len(hints)}: {hints[number - 1]}", "hint")


def _show_button(exercise: str, count: int) -> None:
    """Show the hints that were given before the cell ran again, and a button that gives the next one."""
    try:
        from ipywidgets import Button, Output

        from ppedu.view.named import displayed, named
    except ImportError as error:
        print(f"hint needs {error.name}, which is not installed: pip install 'ppedu[lab]'")
        return
    button, shown = Button(), Output()

    def label() -> None:
        button.disabled = _hints[exercise] >= count
        button.description = "No more hints" if button.disabled else f"Hint {_hints[exercise] + 1} of {count}"

    def press(_: Any) -> None:
        with shown:
            _give(exercise, _hints[exercise] + 1)
        label()

    with shown:
        for number in range(1, _hints[exercise] + 1):
            _give(exercise, number)
    label()
    button.on_click(press)
    data, _ = displayed(named([button, shown], {}))
    publish({**data, "text/plain": f"{exercise} has {plural(count, 'hint')}."})


def progress(lesson: int | None = None) -> None:
    """Show the stars so far, in all notebooks of this folder: of the exercises, and of the puzzle's levels.

    An exercise has two stars if it was solved without a hint, and one if with a hint.

    Args:
        lesson: The number of a lesson, to show the stars of its exercises only.

    Raises:
        SettingError: No lesson has this number, or `progress.txt` in this folder, which records the stars, cannot be
            read.
    """
    shown = [name for name in EXERCISES if lesson is None or name[:2] == str(lesson).zfill(2)]
    if not shown:
        raise SettingError(f"lesson {lesson} has no exercises; give a number from 1 to {max(EXERCISES)[:2]}")
    try:
        events = recorded()
    except OSError as error:
        raise SettingError(f"{PROGRESS} cannot be read: {error.strerror}") from None
    solved = stars_by_exercise(events)
    rows = []
    for number, names in groupby(shown, key=lambda name: name[:2]):
        rows += _rows(f"lesson {int(number)}", [f"{name} {stars(solved.get(name, 0), 2)}" for name in names])
    if lesson is not None:
        show(*table(rows))
        return
    rows += _rows("board", [f"{level} {stars(events.get(f'board {level}', 0), MOST_STARS)}" for level in LEVELS])
    html, text = table(rows)
    where = f" {PROGRESS}, next to the lessons, records this; delete it to start over." if events else ""
    summary = (
        f"Solved: {len(solved)} of {len(EXERCISES)} exercises ({STAR * 2} without a hint, {STAR} with one). The board "
        f"is a game in lesson 4: {STAR} complete, {STAR * 2} as fast as par, {STAR * 3} without a hint.{where}"
    )
    show(f"{html}<p>{rendered(summary)}</p>", f"{text}\n{summary}")


def _rows(head: str, items: list[str]) -> list[list[str]]:
    """Return the rows of a table that hold these items, with `head` before the first."""
    full = [items[start : start + COLUMNS] for start in range(0, len(items), COLUMNS)]
    return [[head if row is full[0] else "", *row, *[""] * (COLUMNS - len(row))] for row in full]


def stars_by_exercise(events: dict[str, int]) -> dict[str, int]:
    """Return the solved exercises, each with its stars. A line that learners wrote themselves counts fully."""
    solved: dict[str, int] = {}
    for event, earned in events.items():
        name, _, rest = event.partition(" ")
        if name in EXERCISES and not rest.startswith("hint"):
            solved[name] = max(earned or 2, solved.get(name, 0))
    return solved


def find_fault(exercise: str, answer: Any) -> str | None:
    """Explain in a sentence what is wrong with an answer; return None if it is right.

    Raises:
        SettingError: there is no such exercise.
    """
    task = _task(exercise)
    try:
        return task.wrong(answer)
    except PipelineError as error:
        return str(error)


def _task(exercise: str) -> Exercise:
    if exercise not in EXERCISES:
        raise SettingError(f"there is no exercise {exercise!r}; the exercises are: {', '.join(EXERCISES)}")
    return EXERCISES[exercise]


EXERCISES: dict[str, Exercise] = {}
for _module in sorted(module.name for module in iter_modules(__path__) if module.name.startswith("lesson_")):
    EXERCISES |= import_module(f"{__name__}.{_module}").EXERCISES
