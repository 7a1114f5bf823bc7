"""Predictions and exercises: `predict`, `outcome`, `check_answer`, `is_right` and `progress`.

An exercise checks the learner's answer, and explains in a sentence what is wrong with it. It is named by its lesson
and its number, such as "05.1". It may come with a reward: a picture of the schedule that the learner has built. The
exercises of a lesson are `EXERCISES` in its file `lesson_NN.py`; all files with such a name are imported.
"""

from __future__ import annotations

from datetime import date
from difflib import get_close_matches
from importlib import import_module
from itertools import groupby
from numbers import Real
from pathlib import Path
from pkgutil import iter_modules
from textwrap import fill
from typing import Any

from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.numeric import pretty
from ppedu.notebook.exercises.common import Exercise

PROGRESS = Path("progress.txt")  # next to the notebook, where learners see it and can delete it
MOST = 1000  # characters; a longer reason is shortened

_predictions: dict[str, Any] = {}  # by name; `...` until the learner replaces it


def predict(name: str, value: Any = ...) -> None:
    """Record what you expect `name` to be, before you run anything; `outcome` shows it next to the result.

    value: your prediction. While it is still `...`, as in the lessons, `predict` asks for it.
    """
    _predictions[name] = value
    if value is ...:
        print(f"{name}: what is your prediction? Put it in place of the three dots and run this cell again.")
    else:
        print(f"Noted: {name} = {_readable(value)}. Now run it.")


def outcome(name: str, value: Any) -> None:
    """Show the result `value`, and next to it the prediction for `name`, if there is one."""
    found, predicted = _readable(value), _predictions.get(name, ...)
    if predicted is not ...:
        expected = _readable(predicted)
        print(f"{name}: you said {expected}, it is {found}{' — right.' if expected == found else '.'}")
        return
    near = [] if name in _predictions else get_close_matches(name, _predictions)
    print(
        f"{name}: it is {found}. You made no prediction{f' with that name, but one for {near[0]!r}' if near else ''}."
    )


def _readable(value: Any) -> str:
    return pretty(value) if isinstance(value, Real) else str(value)


def check_answer(exercise: str, answer: Any, solution: bool = False) -> None:
    """Check the answer to an exercise such as "05.1", and print that it is right, or what is wrong and why.

    A right answer is recorded for `progress`, and its picture is drawn.

    solution: `answer` is the lesson's own solution. The result is printed, but not recorded as the learner's, and
        without a picture: learners may run all cells before they solve the exercise, and it would give too much away.

    Raises:
        SettingError: there is no such exercise.
    """
    task, wrong = _task(exercise), find_fault(exercise, answer)
    if solution:
        print(fill(f"Solution {exercise} is {f'not right: {wrong}' if wrong else 'right.'}", 100))
    elif wrong:
        print(fill(f"Not yet: {_shortened(wrong)}{'' if wrong[-1] in '.?!)' else '.'}", 100))
    else:
        print(fill(f"Right. {task.praise}", 100))
        _note(exercise)
        if task.reward:
            task.reward(answer).plot()


def is_right(exercise: str, answer: Any) -> bool:
    """Return whether `answer` solves the exercise, without printing anything: for cells that build on the answer.

    Raises:
        SettingError: there is no such exercise.
    """
    return find_fault(exercise, answer) is None


def _shortened(wrong: str) -> str:
    """Return the reason with its middle left out if it is long, as when it quotes a large object."""
    return wrong if len(wrong) <= MOST else f"{wrong[: MOST // 2]} … {wrong[-MOST // 2 :]}"


def progress() -> None:
    """Show which exercises have been solved so far, in all notebooks of this folder.

    Raises:
        SettingError: `progress.txt` in this folder, which records them, cannot be read.
    """
    try:
        solved = _solved()
    except OSError as error:
        raise SettingError(f"{PROGRESS} cannot be read: {error.strerror}") from None
    for lesson, exercises in groupby(EXERCISES, key=lambda name: name[:2]):
        print(f"lesson {int(lesson):2} ", *(f"  {name} {'✓' if name in solved else ' '}" for name in exercises))
    where = f" {PROGRESS}, next to the lessons, records this; delete it to start over." if solved else ""
    print(f"Solved: {len(solved)} of {len(EXERCISES)} exercises.{where}")


def _solved() -> set[str]:
    noted = PROGRESS.read_text(encoding="utf-8", errors="replace") if PROGRESS.exists() else ""
    return EXERCISES.keys() & set(noted.split())


def _note(exercise: str) -> None:
    """Record that an exercise is solved. The line is appended, because several notebooks may run at once."""
    try:
        if exercise not in _solved():
            with PROGRESS.open("a", encoding="utf-8") as file:
                file.write(f"{exercise} solved on {date.today()}\n")
    except OSError as error:
        print(f"(This could not be recorded in {PROGRESS}: {error.strerror}.)")


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


def _exercises_of_all_lessons() -> dict[str, Exercise]:
    lessons = sorted(module.name for module in iter_modules(__path__) if module.name.startswith("lesson_"))
    found = (import_module(f"{__name__}.{lesson}").EXERCISES for lesson in lessons)
    return {name: exercise for exercises in found for name, exercise in exercises.items()}


EXERCISES = _exercises_of_all_lessons()
