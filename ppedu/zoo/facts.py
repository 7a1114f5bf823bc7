"""Facts: what is known about a schedule before it is simulated, and who published it.

Formulas and conditions are Python expressions in the letters of the papers. The same strings are printed here and
evaluated by `ppedu.zoo.theory`. `LETTERS` says what each letter stands for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LETTERS = {
    "p": "ranks",
    "m": "microbatches",
    "s": "slices of a microbatch",
    "v": "chunks on a rank",
    "r": "the rank",
    "k": "the most microbatches that a rank holds",
    "F": "the forward of a rank's share of the model",
    "B": "its backward, I + W",
    "I": "the half for the input",
    "W": "the half for the weights",
    "FB": "an overlapped pair",
    "FI": "one with I",
    "c": "a message from rank to rank",
    "A": "the activations of a microbatch on a rank",
    "M_W": "the part of a microbatch's activations that is kept until W",
    "S": "a stage's input, as a part of a microbatch's activations there",
}


@dataclass(frozen=True)
class Facts:
    """Closed forms of a schedule and their source. A formula may be followed by " if " and the conditions for it.

    Args:
        source: The paper or the repository, and what was corrected or added to it.
        idle: The time for which every rank waits.
        makespan: Instead of `idle`, where the ranks wait for different times.
        idle_in_span: The bubble of the Zero Bubble papers: a rank's idle time between its own first and last action,
            its span less m(F+B). It holds where `idle` or `makespan` does, and by default it is the same.
        hops: The messages on the way: `idle`, `makespan` and `idle_in_span` become longer by hops·c. Without it, they
            contain c, or hold for c = 0 only.
        remark: Printed in place of a formula for the time, if none is known.
        sizes: The conditions under which the schedule exists; the other conditions are in addition to these.
        peak: The peak of the activations on rank r, in microbatches.
        price: What it costs, in a sentence.
        used: Where it is used or can be had, in a sentence with its source.
    """

    source: str
    idle: str = ""
    makespan: str = ""
    idle_in_span: str = ""
    hops: str = ""
    remark: str = ""
    sizes: tuple[str, ...] = ()
    peak: str = ""
    price: str = ""
    used: str = ""

    def cells(self) -> tuple[str, str, str]:
        """Return three cells of a table: the sizes, the idle time without latency and the peak; "" if not known."""
        if self.idle:
            known = self.idle
        elif self.makespan:
            known = f"makespan {self.makespan}"
        else:
            known = self.remark
        time, conditions = split(known, latency=False)
        if self.idle_in_span:
            in_span, _ = split(self.idle_in_span, latency=False)
            time += f", {in_span} in span"
        return text(*self.sizes), _conditional(time, conditions), _conditional(*split(self.peak, latency=False))


def _conditional(formula: str, conditions: list[str]) -> str:
    """Return a formula and its conditions in mathematical notation: "(p-1)F if m >= p"."""
    return text(formula) + (f" if {text(*conditions)}" if conditions else "")


def split(fact: str, latency: bool) -> tuple[str, list[str]]:
    """Return the formula of a fact and its conditions. Without `latency`, leave out terms and conditions with c.

    "F+2*c if m >= p and 2*c <= W" has the formula "F+2*c" and two conditions; without latency, "F" and ["m >= p"].
    """
    formula, _, joined = fact.partition(" if ")
    conditions = joined.split(" and ") if joined else []
    if not latency:
        formula = re.sub(r"\+(\d\*)?c\b", "", formula)
        conditions = [each for each in conditions if "c" not in letters_of(each)]
    return formula, conditions


def letters_of(expression: str) -> list[str]:
    """Return every name in a formula or a condition, in order: "min(m, p) + m" has min, m, p and m again."""
    return re.findall(r"[A-Za-z_]+", expression)


def text(*expressions: str) -> str:
    """Return formulas or conditions in mathematical notation: "(p-1)(F+B)", "p divides m, m >= 2p"."""
    joined = re.sub(r"(\w) % 2 == 0", r"\1 even", ", ".join(expressions))
    joined = re.sub(r"(\w) % (\w) == 0", r"\2 divides \1", joined)
    return joined.replace("*", "").replace("==", "=")
