"""Predictions and exercises: `predict`, `outcome`, `check_answer`, which says what is wrong and why, and `progress`.

An exercise is a function that takes the learner's answer and returns what is wrong with it, in a sentence,
or None; it is known by the lesson's number and its own. It may also be given a reward: the picture of what
the learner has built. Those of a lesson are the `EXERCISES` of its own file here, `lesson_NN.py`, which is
found by its name.
"""

from __future__ import annotations

from datetime import date
from importlib import import_module
from itertools import groupby
from numbers import Real
from pathlib import Path
from pkgutil import iter_modules
from textwrap import fill
from typing import Any

from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.timeline import show
from ppedu.notebook.exercises.common import Exercise

PROGRESS = Path("progress.txt")  # beside the notebook, for all to see: it is the learner's own

_predictions: dict[str, Any] = {}


def predict(name: str, value: Any) -> None:
    """Note what you expect `name` to be, before you run anything. `outcome` shows it beside what came out."""
    _predictions[name] = value
    print(f"Noted: {name} = {_say(value)}. Now run it.")


def outcome(name: str, value: Any) -> None:
    """Show `value`, what came out, beside what was predicted for `name`.

    Raises:
        SettingError: nothing was predicted under that name.
    """
    if name not in _predictions:
        raise SettingError(f"nothing was predicted for {name!r}; run its predict cell first")
    said, found = _say(_predictions[name]), _say(value)
    print(f"{name}: you said {said}, it is {found}{' — right.' if said == found else '.'}")


def _say(value: Any) -> str:
    return show(value) if isinstance(value, Real) else str(value)


def check_answer(exercise: str, answer: Any, solution: bool = False) -> None:
    """Say whether `answer` solves the exercise, such as "05.1"; if it does not, what is wrong and why.

    What is right is noted for `progress`, and shown. Of the lesson's own `solution` it is only said that it is right:
    all cells may be run before the exercise is done, and what there is to say of it would give it away.

    Raises:
        SettingError: there is no such exercise.
    """
    if exercise not in EXERCISES:
        raise SettingError(f"there is no exercise {exercise!r}; there is: {', '.join(EXERCISES)}")
    task = EXERCISES[exercise]
    wrong = find_fault(exercise, answer)
    if wrong:
        print(fill(f"Not yet: {wrong}{'' if wrong[-1] in '.?!)' else '.'}", 100))
    elif solution:
        print("Right.")
    else:
        print(fill(f"Right. {task.praise}", 100))
        _note(exercise)
        if task.reward:
            task.reward(answer).plot()


def progress() -> None:
    """Show which exercises have been solved, in this notebook and in those beside it, today and before.

    Raises:
        SettingError: the file that keeps it, `progress.txt` in this folder, cannot be read.
    """
    try:
        solved = _solved()
    except OSError as error:
        raise SettingError(f"{PROGRESS} cannot be read: {error.strerror}") from None
    for lesson, exercises in groupby(EXERCISES, key=lambda name: name[:2]):
        print(f"lesson {int(lesson):2} ", *(f"  {name} {'✓' if name in solved else ' '}" for name in exercises))
    print(f"{len(solved)} of {len(EXERCISES)} are solved.", end=" ")
    print(f"{PROGRESS}, beside the lessons, keeps it; delete it to begin anew." if solved else "")


def _solved() -> set[str]:
    noted = PROGRESS.read_text(encoding="utf-8", errors="replace") if PROGRESS.exists() else ""
    return EXERCISES.keys() & set(noted.split())


def _note(exercise: str) -> None:
    """One line for each; appended, since notebooks may run side by side."""
    try:
        if exercise not in _solved():
            with PROGRESS.open("a", encoding="utf-8") as file:
                file.write(f"{exercise} solved on {date.today()}\n")
    except OSError as error:
        print(f"(This could not be noted in {PROGRESS}: {error.strerror}.)")


def find_fault(exercise: str, answer: Any) -> str | None:
    """What is wrong with an answer, in a sentence; None if it is right."""
    try:
        return EXERCISES[exercise].wrong(answer)
    except PipelineError as error:
        return str(error)


def _of_all_lessons() -> dict[str, Exercise]:
    lessons = sorted(module.name for module in iter_modules(__path__) if module.name.startswith("lesson_"))
    found = (import_module(f"{__name__}.{lesson}").EXERCISES for lesson in lessons)
    return {name: exercise for exercises in found for name, exercise in exercises.items()}


EXERCISES = _of_all_lessons()
