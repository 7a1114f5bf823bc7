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
from ppedu.course.progress_file import keep
from ppedu.view.interactive import in_notebook

MOST_STOPS = 10_000  # of a slider
HANDLE, RAIL = (
    "○",
    "─" * 24,
)  # of a picture of a control: JupyterLab removes drawings from a page that it does not trust
BOX = "display: inline-block; padding: 0.4em 0.9em; line-height: 1.7; border: 1px solid #8a8a8a; border-radius: 4px;"
SIDES = ("too low", "too high")  # of a slider's prediction that is wrong
EMPTY = "← drag me"  # the first stop of a slider


@dataclass
class Guess:
    """A prediction, and the result that it was compared with.

    options: the values to choose from: the stops of a slider, or choices.
    step: the distance between the stops; None for choices.
    value: the learner's prediction; None until there is one.
    compared: the prediction at the time of the outcome, and the outcome.
    """

    options: Sequence[Any]
    step: Any = None
    value: Any = None
    compared: tuple[Any, Any] | None = None
    control: dict[str, Any] | None = None  # what displays it, by MIME type


_predictions: dict[str, Guess] = {}


def predict(name: str, *given: Any) -> None:
    """Ask the learner to predict `name`, with a slider or a choice that starts empty; see `outcome`.

        predict("makespan", 20, 120)
        predict("share of idle time", 0, 1, 0.05)
        predict("who waits longest", ["rank 0", "rank 3", "all the same"])

    given: the least and the greatest value of a slider, and the distance between its stops, 1 by default; or a list of
        choices. Without a kernel, the question is shown closed.

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
        show(_closed(name, asked), question)
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


def _closed(name: str, asked: Guess) -> str:
    """Return HTML: the question and its options, in a box that cannot be used until the cell runs."""
    if asked.step:
        options = f"{pretty(asked.options[0])} {HANDLE}{RAIL} {pretty(asked.options[-1])}"
    else:
        options = " &emsp; ".join(
            f'<span style="white-space: nowrap">{HANDLE} {escape(each)}</span>' for each in asked.options
        )
    return (
        f'<div style="{BOX}"><b>{escape(name)}</b>: your prediction?<br>{options}<br>'
        '<small style="opacity: 0.75">Run this cell to choose.</small></div>'
    )


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

    replies: A sentence for each wrong choice that explains why it is wrong; for a slider, one for "too low" and one for
        "too high".

    Raises:
        SettingError: there is a reply to something that cannot be chosen.
    """
    found, made = _readable(value), _predictions.get(name)
    if made:
        made.compared = made.value, value
        possible = SIDES if made.step else made.options
        if wrong := [each for each in replies or {} if each not in possible]:
            raise SettingError(
                f"outcome({name!r}, …) replies to {wrong[0]!r}, which cannot be chosen; possible: {', '.join(possible)}"
            )
    if made and made.value is not None:
        verdict = _verdict(made.value, value, made.step)
        keep("predictions", name, {"said": _readable(made.value), "is": found, "right": verdict.startswith("right")})
        text = f"{name}: you said {_readable(made.value)}, it is {found}{verdict and f': {verdict}'}."
        on_line = _on_a_line(made, value) if made.step and isinstance(value, Real) else ""
        side = next((each for each in SIDES if verdict.endswith(each)), "") if made.step else made.value
        reply = "" if verdict.startswith("right") else (replies or {}).get(side, "")
        show(
            f"<div>{escape(text)}</div>{on_line}{reply and f'<div>{rendered(reply)}</div>'}", f"{text} {reply}".rstrip()
        )
        return
    near = [] if made else get_close_matches(name, _predictions)
    other = f" with that name, but one for {near[0]!r}" if near else ""
    fold(f"{name}: you made no prediction{other}.", f"It is {found}.")


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


def _on_a_line(made: Guess, value: Any) -> str:
    """Return HTML: a slider's range, with the prediction as a circle and the outcome as a dot.

    The ends stand beside the picture: JupyterLab removes it from a page that it does not trust, but not its text.
    """
    low, high = made.options[0], made.options[-1]
    said, found = (
        10 + 340 * float(min(max(each, low), high) - low) / float(high - low) for each in (made.value, value)
    )
    color = TONES["right" if _verdict(made.value, value, made.step).startswith("right") else "wrong"][0]
    return (
        f'<div>from {pretty(low)} <svg width="360" height="24" aria-hidden="true" style="vertical-align: middle">'
        '<line x1="10" x2="350" y1="12" y2="12" stroke="currentColor" stroke-opacity="0.4" stroke-width="2"/>'
        f'<line x1="{said:.0f}" x2="{found:.0f}" y1="12" y2="12" stroke="{color}" stroke-width="4"/>'
        f'<circle cx="{found:.0f}" cy="12" r="7" fill="{color}"/>'
        f'<circle cx="{said:.0f}" cy="12" r="7" fill="none" stroke="currentColor" stroke-width="2"/>'
        f"</svg> to {pretty(high)}</div>"
    )


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
