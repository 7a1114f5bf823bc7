"""Facts: what is known about a schedule before it is simulated, and who published it.

Formulas and conditions are Python expressions in the letters of the papers. The same strings are printed here and
evaluated by `ppedu.zoo.theory`:

    p ranks, m microbatches, v chunks on each rank, r the rank, k the most microbatches that a rank holds
    F, B, I, W    the times of one rank's share of the model; B = I + W
    FB, c         the time of an overlapped pair, and of a message from rank to rank
    M_W           the part of a microbatch's activations that a split backward keeps until W
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Closed forms of a schedule, the conditions under which they hold, and their source.

    source: the paper or the repository, and what was corrected or added to it.
    idle: the time for which every rank waits.
    makespan: instead of `idle`, where the ranks wait for different times.
    idle_in_span: the bubble of the Zero Bubble papers, which is the span less m(F+B); the same as `idle` by default.
    hops: the number of messages that lengthen the three above. Without it they hold for c = 0 only, unless c occurs in
        them.
    remark: what to print where there is no formula for the time.
    sizes: the sizes for which the schedule exists.
    holds: the conditions, in addition to `sizes`, for the formulas of time.
    peak: the peak of the activations on rank r, in microbatches.
    peak_holds: the conditions, in addition to `sizes`, for `peak`.
    """

    source: str
    idle: str = ""
    makespan: str = ""
    idle_in_span: str = ""
    hops: str = ""
    remark: str = ""
    sizes: str = ""
    holds: str = ""
    peak: str = ""
    peak_holds: str = ""

    @property
    def has_chunks(self) -> bool:
        """Whether the time depends on the number of chunks on a rank."""
        return "v" in letters_of(self.idle + self.makespan)

    def cells(self) -> tuple[str, str, str]:
        """Return the sizes, the time without latency and the peak as a table prints them; "" for what is not known."""

        def conditional(formula: str, conditions: str) -> str:
            needed = " and ".join(split_conditions(conditions, latency=False))
            return text(without_latency(formula) + (f" if {needed}" if needed else ""))

        time = self.idle or (f"makespan {self.makespan}" if self.makespan else self.remark)
        if self.idle_in_span:
            time += f", {self.idle_in_span} in span"
        return text(self.sizes), conditional(time, self.holds), conditional(self.peak, self.peak_holds)


def text(expression: str) -> str:
    """Return a formula or a condition in mathematical notation: "(p-1)(F+B) if p divides m"."""
    expression = re.sub(r"(\w) % 2 == 0", r"\1 even", expression)
    expression = re.sub(r"(\w) % (\w) == 0", r"\2 divides \1", expression)
    return expression.replace("*", "").replace("==", "=").replace(" and ", ", ")


def letters_of(expression: str) -> list[str]:
    """Return the names in a formula or a condition, in order."""
    return re.findall(r"[A-Za-z_]+", expression)


def without_latency(formula: str) -> str:
    """Return `formula` without its terms in c."""
    return re.sub(r"\+(\d\*)?c\b", "", formula)


def split_conditions(conditions: str, latency: bool) -> list[str]:
    """Return the single conditions of a conjunction; those on c only if there is `latency`."""
    each = conditions.split(" and ") if conditions else []
    return [condition for condition in each if latency or "c" not in letters_of(condition)]
