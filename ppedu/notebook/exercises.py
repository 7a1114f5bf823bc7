"""Predictions and exercises: `predict`, `outcome`, and `check_answer`, which says what is wrong and why.

An exercise is a function that takes the learner's answer and returns what is wrong with it, in a sentence,
or None; it is known by the lesson's number and its own. It may also be given a reward: the picture of what
the learner has built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from textwrap import fill
from typing import Any

from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import Costs, simulate
from ppedu.core.timeline import Timeline, several, show
from ppedu.zoo import Entry, build, schedule

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
    return show(value) if isinstance(value, (int, float)) else str(value)


@dataclass(frozen=True)
class Exercise:
    """`wrong(answer)` gives the reason, or None if the answer is right; `reward(answer)` a timeline to draw."""

    wrong: Callable[[Any], str | None]
    praise: str
    reward: Callable[[Any], Timeline] | None = None


def check_answer(exercise: str, answer: Any) -> None:
    """Say whether `answer` solves the exercise, such as "05.1"; if it does not, what is wrong and why.

    Raises:
        SettingError: there is no such exercise.
    """
    if exercise not in EXERCISES:
        raise SettingError(f"there is no exercise {exercise!r}; there is: {', '.join(EXERCISES)}")
    task = EXERCISES[exercise]
    wrong = find_fault(exercise, answer)
    print(fill(f"Not yet: {wrong}{'' if wrong[-1] in '.?!)' else '.'}" if wrong else f"Right. {task.praise}", 100))
    if not wrong and task.reward:
        task.reward(answer).plot()


def find_fault(exercise: str, answer: Any) -> str | None:
    """What is wrong with an answer, in a sentence; None if it is right."""
    try:
        return EXERCISES[exercise].wrong(answer)
    except PipelineError as error:
        return str(error)


UNIT = Costs(forward=1, backward=1)
# Fewer, as many and more microbatches than ranks; the lesson's own case first.
CASES = [(4, 8), (1, 1), (2, 1), (4, 2), (3, 3), (5, 4), (8, 20)]


def _require_function(answer: Any) -> None:
    if not callable(answer):
        raise SettingError(f"give a function of rank, ranks and microbatches, not {answer!r}")
    try:
        signature(answer).bind(0, 1, 1)
    except TypeError as error:
        raise SettingError(f"give a function of rank, ranks and microbatches; yours has {error}") from None


def _case(ranks: int, microbatches: int) -> str:
    return f"with {several(ranks, 'rank')} and {several(microbatches, 'microbatch')}"


def _learners(generator: Any, ranks: int, microbatches: int) -> Schedule:
    return build("yours", Entry(generator, "loop"), ranks, microbatches, {})


def _not_1f1b(generator: Any) -> str | None:
    _require_function(generator)
    for ranks, microbatches in CASES:
        case = _case(ranks, microbatches)
        yours = _learners(generator, ranks, microbatches)
        if not any(yours.orders):
            return f"{case} your generator yields nothing. Start with the warm-up: which forwards come first?"
        if yours.problems:
            more = len(yours.problems) - 1
            return f"{case}, {yours.problems[0]}" + (f" (and {more} more)" if more else "")
        best = simulate(schedule("1f1b", ranks, microbatches), UNIT)
        timeline = simulate(yours, UNIT)
        slower = timeline.makespan > best.makespan
        if not slower and timeline.peak_activations == best.peak_activations:
            continue
        slots = f"takes {timeline.makespan} slots instead of {best.makespan}" if slower else "no slower"
        for rank, order in enumerate(yours.orders):
            first = next(place for place, action in enumerate(order) if action.op == "B")
            enough = min(ranks - rank, microbatches)
            if first > enough:
                return (
                    f"{case} it is legal and {slots}, but rank {rank} runs {first} forwards before its first backward, "
                    f"where {enough} would do: it holds {timeline.peak_activations[rank]} activations instead of "
                    f"{best.peak_activations[rank]}"
                )
            if first < enough:
                return (
                    f"{case} it is legal, but {slots}: rank {rank} runs {several(first, 'forward')} before its first "
                    f"backward, and then waits; {enough} would keep it busy"
                )
        return (
            f"{case} it is legal, but {slots}, with peaks {_list(timeline.peak_activations)} instead of "
            f"{_list(best.peak_activations)}: the warm-up is right, so look at the order after it"
        )
    return None


def _not_the_peak(formula: Any) -> str | None:
    _require_function(formula)
    for ranks, microbatches in CASES:
        timeline = simulate(schedule("1f1b", ranks, microbatches))
        for rank, peak in enumerate(timeline.peak_activations):
            if formula(rank, ranks, microbatches) != peak:
                return (
                    f"{_case(ranks, microbatches)}, rank {rank} holds {peak} at its peak; "
                    f"your formula says {formula(rank, ranks, microbatches)!r}"
                )
    return None


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


EXERCISES = {
    "05.1": Exercise(
        _not_1f1b,
        "That is 1F1B, for any number of ranks and microbatches: this is what you built.",
        lambda generator: simulate(_learners(generator, 4, 8), UNIT),
    ),
    "05.2": Exercise(_not_the_peak, "The peak depends on the distance to the last rank, no longer on the batch."),
}
