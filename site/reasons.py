"""Plans and the atlas as sentences and tables whose numbers say where they come from."""

from __future__ import annotations

import re

from ppedu.planning.choice import Choice
from ppedu.planning.findings import findings, words
from ppedu.planning.plan import INTERRUPTED, SHOWN, Plan
from ppedu.search.atlas import Entry
from ppedu.sim import Timeline
from ppedu.view.why import PROOFS, Told, Why, causes, makespan, numbers, why
from ppedu.zoo.theory import least_makespan

Paragraph = str | Told | dict[str, str | list[Told]]  # a dict holds the rows of a table, and the words that open it


def summary(timeline: Timeline) -> list[Paragraph]:
    """Return the numbers of a timeline and the causes of its bubble, in sentences."""
    told: Told = [f"{timeline.schedule.name}, {timeline.schedule.size}:"]
    for name, number in numbers(timeline).items():
        told += [f" {name} ", number, ","]
    return [[*told[:-1], "."], causes(timeline)]


def of_entry(entry: Entry, timeline: Timeline) -> list[Paragraph]:
    """Return what the atlas knows of a size: the makespan, and what shows that no other is shorter."""
    held = f"A rank may hold the activations of {entry.memory} of its stages at a time, of one microbatch each."
    told: Told = ["The best makespan in a memory of ", why(str(entry.memory), [held]), ": ", makespan(timeline), ", "]
    proofs = [PROOFS[each] for each in entry.proofs]
    if entry.placement == "line" and "bound" in entry.proofs:
        fact = least_makespan(entry.ranks, entry.microbatches, entry.costs)
        proofs.append(f"The formula: {fact.formula} = {fact.filled} = {fact.value}; {fact.source}.")
    if entry.status == "optimal":
        told += ["proven by ", why(" and ".join(entry.proofs), proofs), "."]
    else:
        known = f"No schedule is shorter than {entry.bound}; whether one takes less than {entry.makespan} is not known."
        told += ["at least ", why(str(entry.bound), [known, *proofs]), "."]
    return [told, *summary(timeline)]


def of_plan(plan: Plan) -> list[Paragraph]:
    """Return a plan with the same words as its text, and a table."""
    head, *rows = plan.rows(len(plan.choices))
    choices = [each for each in plan.choices if not each.excess]
    table: list[Told] = []
    for choice, row in zip(choices, rows, strict=True):
        table.append([_cell(plan, choice, title, text) for title, text in zip(head, row, strict=True)])
    report: list[Paragraph] = [[f"{plan.size}; ", *_settings(plan), "."], {"rows": [[*head], *table[:SHOWN]]}]
    if rest := table[SHOWN:]:
        report.append({"opens": f"… and {len(rest)} more", "rows": [[*head], *rest]})
    report.append(plan.stages)
    for number, finding in enumerate(findings(plan), 1):
        parts = [part if isinstance(part, str) else why(*part) for part in finding]
        report.append([f"{number}. ", *parts, "."])
    return [*report, INTERRUPTED] if plan.interrupted else report


def _settings(plan: Plan) -> Told:
    """Return the settings of a plan; numbers that no reader has given say where they come from."""
    host = "Launching its kernels takes so long, however fast the GPU. Fitted to published runs: docs/published.md."
    said = {
        "9.5 ms": [host],
        f"{float(plan.job.machine.spread or 0):.0%}": ["Measured, on published runs: docs/published.md."],
    }
    parts = re.split(f"({'|'.join(said)})", plan.settings)
    return [why(part, said[part]) if part in said else part for part in parts]


def _cell(plan: Plan, choice: Choice, title: str, text: str) -> str | Why:
    """Return a cell of a plan's table; numbers say where they come from."""
    said = words(plan, choice).get(title.partition(" [")[0])
    return why(text, said) if said and text else text
