"""Plans and the atlas as sentences and tables whose numbers say where they come from."""

from __future__ import annotations

from ppedu.core.numeric import Number, plural, pretty
from ppedu.planning.choice import Choice
from ppedu.planning.partition import KINDS
from ppedu.planning.pieces import SECONDS
from ppedu.planning.plan import GB, INTERRUPTED, SHOWN, Plan
from ppedu.search.atlas import Entry
from ppedu.sim import Timeline
from ppedu.view.why import Told, Why, causes, makespan, numbers, why
from ppedu.zoo.theory import least_makespan

Paragraph = str | Told | dict[str, str | list[Told]]  # a dict holds the rows of a table, and the words that open it
PROOFS = {
    "bound": "A formula gives a makespan below which no schedule of this size is possible.",
    "intervals": "Intervals: a solver with a start time for each action showed that no schedule is shorter.",
    "counters": "Counters: so did one that only counts the actions begun until each moment.",
}


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
    report: list[Paragraph] = [f"{plan.size}; {plan.settings}.", {"rows": [[*head], *table[:SHOWN]]}]
    if rest := table[SHOWN:]:
        report.append({"opens": f"… and {len(rest)} more", "rows": [[*head], *rest]})
    report += [plan.stages, *(f"{number}. {finding}." for number, finding in enumerate(plan.findings, 1))]
    return [*report, INTERRUPTED] if plan.interrupted else report


def _cell(plan: Plan, choice: Choice, title: str, text: str) -> str | Why:
    """Return a cell of a plan's table; numbers say where they come from."""
    column, unit = title.partition(" [")[0], plan.job.pieces.unit
    words = _words(plan, choice, unit).get(column)
    return why(text, words) if words and text else text


def _words(plan: Plan, choice: Choice, unit: str) -> dict[str, list[str]]:
    """Return the sentences for each column of a plan's table."""
    job, best, ranks, microbatches = plan.job, plan.best, choice.schedule.ranks, choice.schedule.microbatches

    def time(number: Number) -> str:
        return pretty(number, unit)

    total, whole = ranks * choice.step_time, time(choice.whole)
    idle = total * choice.bubble
    step = "The simulated time from the first action of a step to the last, with the stages that the search has found."
    idles = f"{ranks} ranks × {time(choice.step_time)} = {time(total)}. They wait for {time(idle)} of it"
    seconds = float(choice.whole) * SECONDS[unit]
    longer = f"{whole} / {microbatches} microbatches, there {time(best.whole)} / {best.schedule.microbatches}"
    rank = max(range(ranks), key=choice.memory.__getitem__)
    kinds = [f"{kind} {float(size) / GB:.2f}" for kind in KINDS if (size := choice.kinds[rank][kind]) >= GB / 200]
    words = {
        "step": [step, f"The busiest rank works for {time(choice.busiest)} of it."],
        "": ["The fastest that fits in memory, or hardly slower and with less memory."]
        if choice is best
        else [f"How much longer a microbatch takes than with {best.name}: {longer}: {choice.longer(best):+.1%}."],
        "busiest rank": [
            "The work of the rank that has most.",
            f"{time(choice.busiest)} / {microbatches} microbatches = {time(choice.busiest / microbatches)} for each.",
        ],
        "bubble": ["The share of all ranks' time in which they are idle.", f"{idles}: {choice.bubble:.1%}."],
        "gradients, optimizer": [
            "The time that summing up gradients and the optimizer add to a step; computation hides the rest (arXiv "
            "1910.02054, section 7)."
        ],
        "GB": [
            f"The memory of the fullest rank, {rank}, at its peak.",
            f"In GB: {' + '.join(kinds) or 'nothing'} = {float(choice.memory[rank]) / GB:.1f}.",
        ],
    }
    if job.pieces.tokens and seconds:
        product = f"{job.pieces.tokens:,} tokens × {microbatches} microbatches × {plural(job.replicas, 'replica')}"
        words["tokens/s"] = [f"{product} / {seconds:.4g} s, the step with gradients and optimizer."]
    if job.pieces.flops and job.machine.peak:
        peak = job.machine.peak * job.machine.speedup(job.pieces.precision)
        words["MFU"] = [
            "The floating-point operations that the model needs, as a share of those that all GPUs could do.",
            f"{microbatches} × {float(job.pieces.flops):.3g} / ({ranks * job.pieces.gpus} GPUs × {float(peak):.3g} per "
            f"second × {seconds:.4g} s) = {choice.mfu or 0:.1%}.",
        ]
    return words
