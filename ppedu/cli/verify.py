"""`ppedu verify`: a schedule before it runs, in continuous integration."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from ppedu.core import Schedule
from ppedu.core.files import named
from ppedu.core.numeric import pretty
from ppedu.sim import simulate
from ppedu.sim.shrink import shrink
from ppedu.sim.verify import Rejection, problems_of, verify

SHOWN = 20  # reasons; a mistake can have thousands of them


def peaks(text: str) -> list[Fraction]:
    """Return the numbers of `--peak`: one, or one for each rank, with commas between them."""
    try:
        return [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise ArgumentTypeError(f"{text!r}: give a number, or one for each rank, such as 4,3,2,1") from error


def report(schedule: Schedule, options: Namespace) -> int:
    """Print a line for each reason against a schedule; return 1 if there are any.

    In GitHub Actions, the lines also go to the summary of the run, with a drawing of the schedule.
    """
    baseline = None
    if options.baseline is not None:
        baseline = Schedule.read(named(options.baseline), forward_only=schedule.forward_only)
    peak = options.peak
    if peak is not None and len(peak) == 1:
        peak = peak[0]  # of every rank
    setting = {"transport": options.transport, "buffers": options.buffers}
    found = verify(schedule, **setting, peak=peak, baseline=baseline)
    reasons = [rejection.text for rejection in found[:SHOWN]]
    more = [f"… and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    if found and found[0].kind:
        part = shrink(schedule, **setting)
        if (part.stages, part.microbatches) != (schedule.stages, schedule.microbatches):
            more.append(f"\nthe same on {part.size} ({part.name}, numbered from 0):")
            more += _marked(part, **setting)
    if not found:
        held = ", ".join(map(pretty, simulate(schedule).peak_activations))
        more.append(f"{schedule.name}, {schedule.size}: legal; activations at the peak: {held}")
    in_actions = os.environ.get("GITHUB_ACTIONS") == "true"
    shown = [_annotation(options.schedule, each) for each in found[:SHOWN]] if in_actions else reasons
    print(*shown, *more, sep="\n")
    if in_actions and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        drawing = [] if schedule.problems else ["", simulate(schedule).text()]
        text = "\n".join(["```", *reasons, *more, *drawing, "```", ""])
        with suppress(OSError), Path(summary).open("a", encoding="utf-8") as file:  # a page of the run, in Markdown
            file.write(text)
    return int(bool(found))


def _marked(part: Schedule, transport: str, buffers: int | None) -> list[str]:
    """Return the order of each rank, with brackets around the actions that are wrong, or wait for each other."""
    marked = set()
    for problem in problems_of(part, transport, buffers)[1]:
        marked |= {*problem.cycle, (problem.rank, problem.index)}
    lines = []
    for rank, order in enumerate(part.orders):
        shown = [f"[{action}]" if (rank, index) in marked else str(action) for index, action in enumerate(order)]
        lines.append(f"rank {rank}: {' '.join(shown)}")
    return lines


def _annotation(name: str, rejection: Rejection) -> str:
    """Return a rejection as a command of GitHub Actions. A rank's order is a line of a .csv file."""
    place = ""
    if name.lower().endswith((".csv", ".txt")):
        place = f" file={_escaped(name, ',:')}"
        if rejection.rank is not None and name.lower().endswith(".csv"):
            place += f",line={rejection.rank + 1}"
    return f"::error{place}::{_escaped(rejection.text)}"


def _escaped(text: str, others: str = "") -> str:
    for each in "%\r\n" + others:
        text = text.replace(each, f"%{ord(each):02X}")
    return text
