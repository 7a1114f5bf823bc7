"""A rehearsal step by step: the program with each rank beside its line, and whom each rank waits for."""

from __future__ import annotations

import inspect
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from ppedu.core.waiting import cycles
from ppedu.view.interactive import in_notebook

if TYPE_CHECKING:
    from ppedu.course.rehearsal import HeldCall, Moment, Rehearsal

WAITS, RUNS, STUCK, IDLE = "#c2701c", "#2f8f6b", "#c0392b", "#7a7a7a"  # a rank that waits, continues, is stuck, is idle

# A badge is a rank's number in a circle.
BADGE = (
    "display: inline-block; min-width: 1.5em; line-height: 1.5em; margin-right: 0.25em; border-radius: 0.75em; "
    "text-align: center; font-weight: bold; color: white; background: {};"
)
LINE = "display: grid; grid-template-columns: {}em auto; line-height: 1.7; min-height: 1.7em; background: {};"
CODE = "font-family: var(--jp-code-font-family, monospace); white-space: pre;"


class Doing(NamedTuple):
    """A rank's activity: a phrase, the line of its call, and a color. Line 0: it has not begun, or has ended."""

    phrase: str
    line: int
    color: str


class Picture(NamedTuple):
    """The ranks after an event, a sentence."""

    event: str
    ranks: tuple[Doing, ...]


def steps(rehearsal: Rehearsal) -> list[Picture]:
    """Return the steps of a rehearsal. The last one says how it ended."""
    ranks = [Doing("has not begun", 0, IDLE) for _ in rehearsal.ranks]
    found = []
    for moment in rehearsal.moments:
        if moment.wait is None:
            ranks[moment.rank] = Doing("has ended", 0, IDLE)
        else:
            ranks[moment.rank] = Doing(_waits(moment.wait), moment.wait.line, WAITS)
        for wait in moment.matched:
            ranks[wait.rank] = Doing(f"is done with {wait.doing} and continues", wait.line, RUNS)
        found.append(Picture(_event(moment), tuple(ranks)))
    at = {wait.rank: wait for wait in rehearsal.waits}
    cycle = next(cycles({rank: wait.peers for rank, wait in at.items()}), [])
    for rank, wait in at.items():
        victim = " (a victim: outside the cycle)" if cycle and rank not in cycle else ""
        ranks[rank] = Doing(_waits(wait) + victim, wait.line, WAITS if victim else STUCK)
    return [*found, Picture(_verdict(at, cycle), tuple(ranks))]


def _event(moment: Moment) -> str:
    if moment.wait is None:
        return f"Rank {moment.rank} ends."
    calls = f"Rank {moment.rank} calls {moment.wait.doing}"
    if not moment.matched:
        return f"{calls} and waits{_whom(moment.wait)}."
    if moment.wait.kind == "all":
        return f"{calls}, as the last of all ranks. They get the sum and continue."
    [other] = [wait for wait in moment.matched if wait.rank != moment.rank]
    values = [wait.value for wait in moment.matched if hasattr(wait.value, "microbatch")]
    if values:
        arrives = " and ".join(map(str, values)) + (" arrives" if len(values) == 1 else " arrive")
    else:
        arrives = "the message arrives"
    return f"{calls}, and rank {other.rank} is in {other.doing}: {arrives}, and both continue."


def _waits(wait: HeldCall) -> str:
    return f"waits in {wait.doing}{_whom(wait)}"


def _whom(wait: HeldCall) -> str:
    return " for " + (" and ".join(f"rank {rank}" for rank in wait.peers) or "the other ranks")


def _verdict(at: dict[int, HeldCall], cycle: list[int]) -> str:
    if not at:
        return "All ranks have ended."
    if cycle:
        return "Deadlock: " + ", and ".join(f"rank {rank} waits{_whom(at[rank])}" for rank in cycle) + "."
    waits = ", and ".join(f"rank {rank} waits{_whom(wait)}" for rank, wait in at.items())
    return f"Stuck: {waits}, which will not answer anymore."


def text(rehearsal: Rehearsal) -> str:
    """Return the steps of a rehearsal as text, a line for each."""
    *events, verdict = steps(rehearsal)
    return "\n".join([*(f"{place:3}  {step.event}" for place, step in enumerate(events, 1)), f"     {verdict.event}"])


def bundle(rehearsal: Rehearsal) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a MIME bundle, data and metadata: steps with a slider and, without a kernel, the last step and a list."""
    *events, last = found = steps(rehearsal)
    rows = "".join(f"<li>{escape(step.event)}</li>" for step in events)
    listed = f"<details><summary>All {len(found)} steps</summary><ol>{rows}</ol></details>"
    static = {
        "text/plain": text(rehearsal),
        "text/html": _card(rehearsal, last, len(found), len(found)) + listed,
    }
    if not in_notebook():
        return static, {}
    try:
        from ipywidgets import HTML, BoundedIntText, HBox, Layout, Play, link

        from ppedu.view.named import displayed, named
    except ImportError:
        return static, {}
    card = HTML(layout=Layout(width="100%"))
    limits = {"value": 1, "min": 1, "max": len(found)}
    play = Play(**limits, interval=1500, show_repeat=False)
    number = BoundedIntText(
        **limits, description="step", layout=Layout(width="9em"), style={"description_width": "2.5em"}
    )
    link((play, "value"), (number, "value"))

    def show(_: Any = None) -> None:
        card.value = _card(rehearsal, found[number.value - 1], number.value, len(found))

    show()
    number.observe(show, "value")
    names = {f".widget-play button:nth-of-type({place})": name for place, name in ((1, "play or pause"), (2, "stop"))}
    data, metadata = displayed(named([HBox([play, number]), card], names))
    return {**data, **static}, metadata


def _card(rehearsal: Rehearsal, step: Picture, number: int, count: int) -> str:
    """Return a step as HTML: its event, the program with each rank beside its line, and a line for each rank."""
    rows = [f"<div>{_badge(rank, doing.color)} {escape(doing.phrase)}</div>" for rank, doing in enumerate(step.ranks)]
    box = "display: flex; flex-wrap: wrap; gap: 0.8em 2.5em; align-items: center; line-height: 1.9;"
    head = f"<div style='margin: 0.3em 0;'><b>Step {number} of {count}.</b> {escape(step.event)}</div>"
    return f"{head}<div style='{box}'>{_listing(rehearsal, step)}<div>{''.join(rows)}</div></div>"


def _listing(rehearsal: Rehearsal, step: Picture) -> str:
    """Return the program as HTML, with the ranks beside their lines; empty if its source is not known."""
    try:
        source, first = inspect.getsourcelines(rehearsal.program)
    except (OSError, TypeError):
        return ""
    lines = []
    margin = min(2 * len(step.ranks), 8)
    for number, line in enumerate(source, first):
        here = [(rank, doing.color) for rank, doing in enumerate(step.ranks) if doing.line == number]
        shade = "color-mix(in srgb, currentColor 8%, transparent)" if here else "none"
        badges = "".join(_badge(rank, color) for rank, color in here)
        code = f"<span>{badges}</span><span>{escape(line.rstrip())}</span>"
        lines.append(f"<div style='{LINE.format(margin, shade)}'>{code}</div>")
    return f"<div style='{CODE}'>{''.join(lines)}</div>"


def _badge(rank: int, color: str) -> str:
    return f"<span style='{BADGE.format(color)}'>{rank}</span>"
