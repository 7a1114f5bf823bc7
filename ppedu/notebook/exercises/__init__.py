"""Predictions and exercises: `predict`, `outcome`, `check_answer`, `is_right` and `progress`.

An exercise is a function that takes the learner's answer and returns what is wrong with it, in a sentence,
or None; it is known by the lesson's number and its own. It may also be given a reward: the picture of what
the learner has built. Those of a lesson are the `EXERCISES` of its own file here, `lesson_NN.py`, which is
found by its name.
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

PROGRESS = Path("progress.txt")  # beside the notebook, for all to see: it is the learner's own
MOST = 1000  # characters of a reason

_predictions: dict[str, Any] = {}  # by name; `...` until the learner puts a prediction in its place


def predict(name: str, value: Any = ...) -> None:
    """Note what you expect `name` to be, before you run anything. `outcome` shows it beside the result.

    value: your prediction. The lessons leave `...` in its place, and then it is asked for.
    """
    _predictions[name] = value
    if value is ...:
        print(f"{name}: what is your prediction? Put it in place of the three dots and run this cell again.")
    else:
        print(f"Noted: {name} = {_say(value)}. Now run it.")


def outcome(name: str, value: Any) -> None:
    """Show `value`, the result, beside what was predicted for `name`, if anything was."""
    found, predicted = _say(value), _predictions.get(name, ...)
    if predicted is not ...:
        said = _say(predicted)
        print(f"{name}: you said {said}, it is {found}{' — right.' if said == found else '.'}")
        return
    near = [] if name in _predictions else get_close_matches(name, _predictions)
    print(f"{name}: it is {found}. You made no prediction{f' of that name, but one of {near[0]!r}' if near else ''}.")


def _say(value: Any) -> str:
    return pretty(value) if isinstance(value, Real) else str(value)


def check_answer(exercise: str, answer: Any, solution: bool = False) -> None:
    """Say whether `answer` solves the exercise, such as "05.1"; if it does not, what is wrong and why.

    A right answer is noted for `progress`, and shown. A lesson's own `solution` is checked only: it is not the
    learner's, all cells may be run before the exercise is done, and more about it would give it away.

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
    """Return whether `answer` solves the exercise, and print nothing: for cells that go on with the answer.

    Raises:
        SettingError: there is no such exercise.
    """
    return find_fault(exercise, answer) is None


def _shortened(wrong: str) -> str:
    """The reason without its middle if it is long, as with a large object that the learner's function returns."""
    return wrong if len(wrong) <= MOST else f"{wrong[: MOST // 2]} … {wrong[-MOST // 2 :]}"


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
    """Return what is wrong with an answer, in a sentence; None if it is right.

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
        raise SettingError(f"there is no exercise {exercise!r}; there is: {', '.join(EXERCISES)}")
    return EXERCISES[exercise]


def _of_all_lessons() -> dict[str, Exercise]:
    lessons = sorted(module.name for module in iter_modules(__path__) if module.name.startswith("lesson_"))
    found = (import_module(f"{__name__}.{lesson}").EXERCISES for lesson in lessons)
    return {name: exercise for exercises in found for name, exercise in exercises.items()}


EXERCISES = _of_all_lessons()
