"""Why a number is what it is: sentences, and the formula, with the numbers of the timeline that is shown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ppedu.core import SEND, Op, Schedule, SettingError
from ppedu.core.numeric import plural, pretty, ratio
from ppedu.sim import Timeline, versions
from ppedu.view.label import encodable
from ppedu.zoo import theory
from ppedu.zoo.facts import LETTERS
from ppedu.zoo.registry import facts_of, options_of, papers_in, published
from ppedu.zoo.theory import Fact

PLAYGROUND = "https://ppedu.github.io/ppedu/"
CAUSES = {
    "warm-up and cooldown": "ranks wait for their first microbatch and for the last gradients, or until there is "
    "memory for the next forward. This remains when the other causes are gone",
    "ordering": "what a faster order of the same actions, with no more memory, would save",
    "imbalance": "what stages that all take the mean time would save",
    "variation": "what microbatches, or slices, that all take the mean time would save",
    "communication": "what messages that take no time would save",
}
PROOFS = {
    "bound": "A formula gives a makespan below which no schedule of this size is possible.",
    "intervals": "Intervals: a solver with a start time for each action showed that no schedule is shorter.",
    "counters": "Counters: so did one that only counts the actions begun until each moment.",
}
LISTED = 16  # ranks


class Why(NamedTuple):
    """A number in a text, with the sentences that a click on it opens, and the papers behind them."""

    text: str
    words: list[str]
    sources: list[tuple[str, str]]  # names and addresses


Told = list[str | Why]  # a text with numbers in it


def why(text: str, words: Iterable[str], known: Fact | None = None) -> Why:
    """Return a number with its sentences, and the papers of a known formula."""
    return Why(encodable(text), [*map(encodable, words)], papers_in(known.source) if known else [])


def makespan(timeline: Timeline, text: str | None = None) -> Why:
    """Return the makespan and the critical path. text: Replaces the number; so below."""
    unit, time = timeline.costs.unit, timeline.makespan
    taken: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for _, (action, start, end) in timeline.critical_path():
        op = "+".join(single.op for single in action.singles)
        taken[op] += end - start
        counts[op] += 1
    parts = [f"{counts[op]} {op} take{'s' * (counts[op] == 1)} {pretty(taken[op], unit)}" for op in counts]
    between = time - sum(taken.values())
    if between and not math.isclose(float(time), float(sum(taken.values()))):
        parts.append(f"{pretty(between, unit)} pass between them")
    words = [
        "The time from the first start to the last end, over all ranks.",
        f"The critical path, in which each action waits for the one before, is as long: {_listed(parts)}.",
        f"The busiest rank works for {pretty(max(timeline.busy), unit)} of it.",
    ]
    known = _known("makespan", timeline)
    return why(text or pretty(time, unit), [*words[: 3 if counts else 1], *_formula(known, pretty(time))], known)


def bubble(timeline: Timeline, text: str | None = None) -> Why:
    """Return the bubble and the times of all ranks that it is a ratio of."""
    unit, ranks = timeline.costs.unit, timeline.schedule.ranks
    total, work = ranks * timeline.makespan, sum(timeline.busy)
    words = ["The share of all ranks' time in which they are idle."]
    if total:
        product = f"{plural(ranks, 'rank')} × {pretty(timeline.makespan, unit)} = {pretty(total, unit)}"
        quotient = f"{pretty(total - work, unit)} / {pretty(total, unit)}"
        exact = ratio(total - work, total)
        if isinstance(exact, Fraction) and exact.denominator < min(total, 1000):
            quotient += f" = {exact.numerator} / {exact.denominator}"
        words.append(f"{product}. They work for {pretty(work, unit)} of it: {quotient} = {timeline.bubble:.1%}.")
    known, share = _known("bubble", timeline), f"{timeline.bubble:.1%}"
    return why(text or share, [*words, *_formula(known, share)], known)


def peak(timeline: Timeline, text: str | None = None) -> Why:
    """Return the most activations that any rank holds."""
    held = timeline.peak_activations
    first = held.index(max(held))
    found = next(peaks(timeline, [first]))
    words = [f"The most memory that activations take at once on any rank. {_life(timeline)}", *found.words]
    if 1 < len(held) <= LISTED:
        words.insert(2, f"By rank: {', '.join(map(pretty, held))}.")
    if timeline.schedule.updated and not timeline.schedule.problems:
        words.append(f"Weights do not count: {versions(timeline.schedule)}.")
    return found._replace(text=encodable(text or pretty(held[first], timeline.costs.memory_unit)), words=words)


def peaks(timeline: Timeline, ranks: Iterable[int]) -> Iterator[Why]:
    """Yield the most activations that each of some ranks holds, as "peak 4", and when it does first."""
    costs, known = timeline.costs, _known("peak", timeline)
    for rank in ranks:
        most, done = timeline.peak_activations[rank], Counter[str]()
        first = max(timeline.memory(rank), key=lambda step: step[1])[0]
        for action, start, end in (span for span in timeline.rows[rank] if span.action.computes):
            if start > first:
                break
            for single in action.singles:
                if single.op is Op.F or end <= first:
                    done[f"{single.op} {'begun' if single.op is Op.F else 'ended'}"] += 1
        clock = pretty(first - timeline.start, costs.unit)
        counts = _listed([f"{count} {what}" for what, count in done.items()])
        words = (
            [f"Rank {rank} first holds {pretty(most, costs.memory_unit)} at {clock}, with {counts}."] if most else []
        )
        yield why(f"peak {pretty(most)}", [*words, *_formula(known, pretty(most), rank)], known)


def _life(timeline: Timeline) -> str:
    """Return which actions take and free the memory of activations, in a sentence."""
    costs, schedule = timeline.costs, timeline.schedule
    ops = {single.op for block in schedule.numbered.blocks for single in block.sample.singles}
    if schedule.forward_only:
        return "F takes it until it ends."
    frees = " or ".join(op for op, backward in (("B", Op.B), ("W", Op.I)) if backward in ops)
    part = "; I frees a part of it before" if Op.I in ops and costs.weight_memory != 1 else ""
    part += "; O frees it early, and L takes it again" if Op.O in ops else ""
    if costs.recompute or Op.R in ops:
        rest = "R" if Op.R in ops else "its backward"
        return f"F takes the memory of its input, {rest} the rest, and {frees} frees all{part}."
    return f"F takes it, {frees} frees it{part}."


def numbers(timeline: Timeline) -> dict[str, Why]:
    """Return the numbers of a timeline by name, as `Panel.numbers` has them."""
    return {"makespan": makespan(timeline), "bubble": bubble(timeline), "peak activations": peak(timeline)}


def causes(timeline: Timeline) -> Told:
    """Return the causes of a bubble in a sentence."""
    found = {cause: share for cause, share in timeline.causes().items() if abs(share) >= 0.0005}
    if not found:
        return ["There is no bubble."]
    unit, total = timeline.costs.unit, timeline.schedule.ranks * timeline.makespan
    told: Told = ["The bubble (", bubble(timeline), ") is made up of"]
    for cause, share in found.items():
        product = f"{share:.1%} of the {pretty(total, unit)} of all ranks is {pretty(share * float(total), unit)}."
        told += [f" {cause} ", why(f"{share:.1%}", [f"{cause.capitalize()}: {CAUSES[cause]}.", product]), ","]
    return [*told[:-1], "."]


def messages(made: Schedule) -> Why:
    """Return the number of messages that the ranks of a schedule send each other."""
    if made.lowered:
        sent = sum(action.op in SEND for order in made.orders for action in order)
        return why(str(sent), ["The sends of all ranks."])
    place = made.placement
    if place.backwards and not made.forward_only:
        sent = sum(op in SEND for ops in place.links[0] for op in ops)
        way = "forward, back, and with its inputs to where forwards run again"
        words = [f"A microbatch goes from one rank to another {plural(sent, 'time')}: {way}."]
        count = made.microbatches * sent
        return why(str(count), [*words, f"{plural(made.microbatches, 'microbatch')} × {sent} = {count}."])
    of_copy = [sum(rank != following for rank, following in pairwise(ranks)) for ranks in place.holders]
    hops = [of_copy[place.copy(microbatch)] for microbatch in range(made.microbatches)]
    ways = 1 if made.forward_only else 2  # a backward comes back the way of its forward
    count = ways * sum(hops)
    part = "slice" if made.slices > 1 else "microbatch"
    words = [
        f"Through {plural(place.stages, 'stage')}, a {part} goes from one rank to another {plural(max(hops), 'time')}."
    ]
    if made.microbatches * hops[0] == sum(hops):
        back = "" if ways == 1 else " × 2, forward and back,"
        words.append(f"{plural(made.microbatches, part)} × {hops[0]}{back} = {count}.")
    return why(str(count), words)


def sources(name: str) -> list[tuple[str, str]]:
    """Return a published schedule's page in the gallery, and where it was published, each by name and address."""
    if name not in published():
        return []
    facts = facts_of(name)
    page = f"{PLAYGROUND.removeprefix('https://')}schedules/{name}.html"
    return [(name, page), *papers_in(facts.source if facts else "")[:1]]


def _known(quantity: str, timeline: Timeline) -> Fact | None:
    """Return what is known of the schedule's peak, makespan or bubble, if the timeline agrees with it."""
    made, values = timeline.schedule, getattr(timeline, "peak_activations" if quantity == "peak" else quantity)
    if made.forward_only:
        return None  # formulas are of training
    with suppress(SettingError):
        cut = {name: getattr(made, name) for name in options_of(made.name) if name in ("chunks", "slices")}
        whole = made.microbatches // made.slices
        fact: Fact = getattr(theory, quantity)(made.name, made.ranks, whole, timeline.costs, **cut)
        known = fact.value if isinstance(fact.value, tuple) else (fact.value,)
        if all(map(math.isclose, known, values if isinstance(values, tuple) else (values,))):
            return fact
    return None


def _formula(fact: Fact | None, result: str, rank: int = 0) -> list[str]:
    """Return a formula with its numbers, and its letters."""
    if not fact:
        return []
    filled = re.sub(r"\br\b", str(rank), fact.filled)
    equal = "\n= ".join(dict.fromkeys((fact.formula, filled, result)))
    used = re.findall(r"min|max|M_W|F[BI]|[A-Za-z]", fact.formula)
    letters = ", ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items() if letter in used)
    condition = f", if {fact.holds}" if fact.holds else ""
    return [f"The formula{condition}:\n{equal}.", *([f"Letters: {letters}."] if letters else [])]


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
