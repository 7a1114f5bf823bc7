"""Predictions: `predict` asks for one with a slider or a choice, `outcome` compares it with the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from html import escape
from itertools import count
from numbers import Real
from typing import Any

from ppedu.core import SettingError
from ppedu.core.numeric import pretty
from ppedu.course.exercises.feedback import TONES, fold, publish, rendered, show, table
from ppedu.course.exercises.progress_file import keep
from ppedu.view.interactive import in_notebook

MOST_STOPS = 10_000  # of a slider
SIDES = ("too low", "too high")  # of a slider's prediction that is wrong
EMPTY = "← drag me"  # the first stop of a slider


@dataclass
class Guess:
    """A prediction, and the result that it was compared with.

    Args:
        options: the values to choose from: the stops of a slider, or choices.
        step: the distance between the stops; None for choices.
        value: the learner's prediction; None until there is one.
        compared: the prediction at the time of the outcome, and the outcome.
        control: what displays it, by MIME type.
    """

    options: Sequence[Any]
    step: Any = None
    value: Any = None
    compared: tuple[Any, Any] | None = None
    control: dict[str, Any] | None = None


_predictions: dict[str, Guess] = {}


def predict(name: str, *given: Any) -> None:
    """Ask the learner to predict `name`, with a slider or a choice that starts empty; see `outcome`.

        predict("makespan", 20, 120)
        predict("share of idle time", 0, 1, 0.05)
        predict("who waits longest", ["rank 0", "rank 3", "all the same"])

    Args:
        given: the least and the greatest value of a slider, and the distance between its stops, 1 by default; or a
            list of choices. Without a kernel, the question is shown alone.

    Raises:
        SettingError: the arguments are neither of these.
    """
    asked = _asked(name, *given)
    before = _predictions.get(name)
    if before and (before.options, before.step) == (asked.options, asked.step):
        asked = before  # the cell runs again: the prediction is still the learner's
    _predictions[name] = asked
    question = _question(name, asked)
    if not in_notebook():
        show(f"<div>{escape(question)} <small>Run this cell to choose.</small></div>", question)
        return
    try:
        asked.control = asked.control or _control(name, asked)
    except ImportError as error:
        print(f"{question} (There is no control, because {error.name} is not installed: pip install 'ppedu[lab]'.)")
        return
    publish({**asked.control, "text/plain": question})


def forget(name: str) -> None:
    """Let `predict` start again: the prediction was about something else."""
    _predictions.pop(name, None)


def _asked(name: str, *given: Any) -> Guess:
    wanted = f"predict({name!r}, …) takes the ends of a slider, as in 20, 120, or a list of at least two choices"
    if len(given) == 1 and isinstance(given[0], list) and len(given[0]) > 1:
        return Guess([str(choice) for choice in given[0]])
    if len(given) not in (2, 3) or not all(isinstance(number, Real) for number in given):
        raise SettingError(f"{wanted}; got {', '.join(map(repr, given)) or 'neither'}")
    low, high, step = given if len(given) == 3 else (*given, 1)
    if not low < high or not 0 < step <= high - low or (high - low) / step > MOST_STOPS:
        raise SettingError(f"{wanted}; got {low!r}, {high!r} and a step of {step!r}")
    steps = int((high - low) / step + 1e-9)
    return Guess([round(low + step * each, 12) for each in range(steps + 1)], step)


def _question(name: str, asked: Guess) -> str:
    options = [pretty(each) if asked.step else each for each in asked.options]
    if asked.step:
        return f"{name}: your prediction, from {options[0]} to {options[-1]}?"
    return f"{name}: your prediction? Choose {', '.join(options[:-1])} or {options[-1]}."


def _control(name: str, asked: Guess) -> dict[str, Any]:
    """Make a widget that sets the value of a prediction, and return what displays it, by MIME type."""
    import ipywidgets

    from ppedu.view.named import displayed, named

    values = [None, *asked.options] if asked.step else asked.options
    if asked.step:
        labels = [EMPTY, *map(pretty, asked.options)]
        layout = {"width": "min(100%, 36em)", "margin": "2px 8px"}
        style = {"handle_color": TONES["hint"][0]}
        control = ipywidgets.SelectionSlider(options=[*zip(labels, count())], layout=layout, style=style)
    else:
        layout = {"width": "max-content", "max_width": "100%"}
        control = ipywidgets.RadioButtons(options=asked.options, index=None, layout=layout)

    def keep(change: Any) -> None:
        asked.value = None if change.new is None else values[change.new]

    control.observe(keep, "index")
    rest = _question(name, asked).removeprefix(name) if asked.step else ": your prediction?"
    question = ipywidgets.HTML(f"<b>{escape(name)}</b>{rest}")
    names = dict.fromkeys((".noUi-handle", ".widget-radio-box"), name + rest)
    return displayed(named([question, control], names))[0]


def outcome(name: str, value: Any, replies: Mapping[str, str] | None = None) -> None:
    """Show the result `value` next to the prediction for `name`. Without a prediction, it is folded.

        outcome("who waits longest", longest, {"rank 0": "It starts first, and waits for its last gradient only."})

    Args:
        replies: a sentence for each wrong choice that explains why it is wrong; for a slider, one for "too low" and
            one for "too high".

    Raises:
        SettingError: there is a reply to something that cannot be chosen.
    """
    made, replies = _predictions.get(name), replies or {}
    if made:
        made.compared = made.value, value
        possible = SIDES if made.step else made.options
        if wrong := [each for each in replies if each not in possible]:
            raise SettingError(
                f"outcome({name!r}, …) replies to {wrong[0]!r}, which cannot be chosen; possible: {', '.join(possible)}"
            )
    if made is None or made.value is None:
        near = [] if made else get_close_matches(name, _predictions)
        other = f" with that name, but one for {near[0]!r}" if near else ""
        fold(f"{name}: you made no prediction{other}.", f"It is {_readable(value)}.")
        return
    said, found, verdict = _readable(made.value), _readable(value), _verdict(made.value, value, made.step)
    right = verdict.startswith("right")
    keep("predictions", name, {"said": said, "is": found, "right": right})
    text = f"{name}: you said {said}, it is {found}{verdict and f': {verdict}'}."
    side = next((each for each in SIDES if verdict.endswith(each)), "") if made.step else made.value
    reply = "" if right else replies.get(side, "")
    show(f"<div>{escape(text)}</div>{reply and f'<div>{rendered(reply)}</div>'}", f"{text} {reply}".rstrip())


def _verdict(said: Any, found: Any, step: Any) -> str:
    """Return whether a prediction is right, or how far off it is; empty if that cannot be measured."""
    if _readable(said) == _readable(found):
        return "right"
    if not all(isinstance(each, Real) for each in (said, found)):
        return ""
    if step and 2 * abs(said - found) <= step:
        return "right, as near as the slider goes"
    shown = [Decimal(_readable(each).replace(",", "")) for each in (said, found)]
    return f"{pretty(float(abs(shown[0] - shown[1])))} too {'low' if said < found else 'high'}"


def predictions() -> None:
    """Show all predictions made in this notebook next to their outcomes."""
    if all(made.value is None for made in _predictions.values()):
        print("You made no predictions here. Make them before you run a cell, and this shows how close they were.")
        return
    rows = [["", "you said", "it is", ""]]
    for name, made in _predictions.items():
        said, found = made.compared or (made.value, None)
        verdict = "" if said is None or found is None else _verdict(said, found, made.step)
        rows.append([name, *("–" if each is None else _readable(each) for each in (said, found)), verdict])
    show(*table(rows, head=True))


def _readable(value: Any) -> str:
    return pretty(value) if isinstance(value, Real) else str(value)
