"""Closed forms and lower bounds: what is known about a schedule before anything is simulated.

`FORMS` is written in the letters of the papers; its formulas are what is printed and what is computed, both:

    p ranks, m microbatches, v chunks on each rank, r the rank, k the most microbatches that a rank holds
    F, B, I, W    the times of one rank's share of the model; B = I + W
    FB, c         the time of an overlapped pair, and of a message from rank to rank
    M_W           the part of a microbatch's activations that a split backward keeps until W

    idle("interleaved", ranks=4, microbatches=8)    # 4.5 = (p-1)(F+B)/v if m >= p (arXiv 2104.04473, §2.2)

A formula is refused where it does not hold. The simulation is right everywhere; the formulas say why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from numbers import Rational, Real
from operator import index
from typing import Any, NamedTuple

from ppedu.core.actions import Op
from ppedu.core.costs import Costs
from ppedu.core.errors import SettingError
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.validate import require_count, require_size

Letters = dict[str, Any]


class Form(NamedTuple):
    """What is known about a schedule.

    idle: the time that every rank waits; or makespan, where not all wait for the same time.
    gap: the Zero Bubble papers' bubble, the span less m(F+B); as long as idle unless given.
    hops: the messages that lengthen these. Without hops, or a c in the formula, it is known for c = 0 only.
    about: what can be said where there is no formula.
    takes: the sizes that the schedule exists for. holds: where, among these, the formulas above hold.
    peak: of the activations on rank r, in microbatches. peak_holds: where.
    """

    source: str
    idle: str = ""
    makespan: str = ""
    gap: str = ""
    hops: str = ""
    about: str = ""
    takes: str = ""
    holds: str = ""
    peak: str = ""
    peak_holds: str = ""

    def in_words(self) -> tuple[str, str, str]:
        """For people: the sizes it takes, its time without latency, its peak; "" where there is nothing to say."""

        def where(formula: str, conditions: str) -> str:
            needs = _needs(conditions, latency=False)
            return text(f"{_without_latency(formula)}{' if ' if needs else ''}{' and '.join(needs)}")

        time = self.idle or (f"makespan {self.makespan}" if self.makespan else self.about)
        if self.gap:
            time += f", {self.gap} in span"
        return text(self.takes), where(time, self.holds), where(self.peak, self.peak_holds)


_ZERO_BUBBLE = "arXiv 2401.10241, table 2; corrected by simulation"
_V_SHAPED = "arXiv 2405.15362; idle time by simulation"
_MEGATRON = "github.com/NVIDIA/Megatron-LM, combined 1F1B"

# fmt: off
FORMS = {
    "naive": Form("arXiv 1811.06965, figure 2", "(p-1)*m*(F+B)", hops="2*m*(p-1)", peak="1"),
    "gpipe": Form("arXiv 1811.06965", "(p-1)*(F+B)", hops="2*(p-1)", peak="m"),
    # Of every p microbatches, all but one wait for a message on the way down and for one on the way up.
    "1f1b": Form(
        "arXiv 2006.09503; arXiv 2104.04473, §2.2", "(p-1)*(F+B)", hops="2*(p-1 + (m-1)*(p-1)//p)",
        peak="min(p-r, m)"),
    "interleaved": Form(
        "arXiv 2104.04473, §2.2", "(p-1)*(F+B)/v", holds="m >= p",
        peak="min(p*v+p-1-2*r, m*v)/v", peak_holds="m % p == 0"),
    "looped-bfs": Form("arXiv 2211.05953", "(p-1)*(F+B)/v", holds="m >= p", peak="m"),
    "zb-h1": Form(  # the paper's F+I-W is that of W <= F and W <= I
        _ZERO_BUBBLE, "(p-1)*max(F+3*c, I+2*c, F+I+4*c-W)", gap="(p-1)*max(I+2*c, F+I+4*c-W)",
        holds="m >= p and (c == 0 or m > p) and 2*c <= W",
        peak="p-r + r*M_W", peak_holds="m >= p"),
    "zb-h2": Form(  # the paper leaves out I-F: the first gradient comes back late where I is long
        _ZERO_BUBBLE, "(p-1)*max(F+c, I+2*c-F, F+I+2*c-2*W)", gap="(p-1)*max(0, I+2*c-F, F+I+2*c-2*W)",
        holds="m >= 2*p-1 and 2*c <= F+I",
        peak="2*p-2*r-1 + 2*r*M_W", peak_holds="m >= 2*p-1"),
    "zb-interleaved": Form("github.com/pytorch/pytorch, ScheduleInterleavedZeroBubble", about="by simulation"),
    "zb-v": Form(
        "arXiv 2401.10241, §6; idle time by simulation", "(p-1)*F/2", gap="0", holds="m >= 2*p-1 and F == I == W",
        peak="p", peak_holds="m >= 2*p-1"),
    "v-adaptive": Form("arXiv 2405.15362", about="as v-half for k = memory"),
    "v-half": Form(
        _V_SHAPED, "(p-1+2*(p-k)+max(0, 3*p-4*k))*F/2", holds="m >= p and F == I == W",
        peak="(p+2)//2", peak_holds="m >= p and M_W == 1"),
    "v-min": Form(
        _V_SHAPED, "(p-1+2*(p-k)+max(0, 3*p-4*k))*F/2", holds="m >= p and F == I == W",
        peak="(p+4)//3", peak_holds="m >= p and M_W == 1"),
    "hanayo": Form(
        "arXiv 2308.15762; formulas by simulation", "2*(p-1)*max(F, B)/v", takes="v % 2 == 0", holds="m % p == 0",
        peak="p", peak_holds="m % p == 0 and m >= 2*p"),
    "1f1b-overlap": Form(
        f"{_MEGATRON}, without chunks", makespan="p*(F+B) + (m-1)*FB", holds="FB >= max(F, B)",
        peak="min(2*p-2*r, m)"),
    "interleaved-overlap": Form(
        _MEGATRON, makespan="p*(F+B) + (m*v-p*(v-1)-1)*FB/v", holds="m % p == 0 and FB >= max(F, B)",
        peak="min(p*v+p-2*r, m*v)/v", peak_holds="m % p == 0"),
    "dualpipe": Form(
        "arXiv 2412.19437, table 2", "(p/2-1)*(FB+B-3*W)", takes="p % 2 == 0 and m % 2 == 0 and m >= 2*p",
        holds="F == I and W <= I and FB == F+B", peak="p+1"),
    "dualpipev": Form(
        "github.com/deepseek-ai/DualPipe", "(p-1)*(FB+B-3*W)/2", takes="m >= 2*p",
        holds="F == I and W <= I and FB == F+B", peak="(2*p+1)/2"),
    "gems": Form(
        "doi.org/10.1109/SC41405.2020.00049; by simulation", "(p-1)*(F+m*B)", gap="(p-1)*(m*B + F*(m % 2))",
        holds="F <= B", peak="1"),
    "chimera": Form(
        "arXiv 2107.06925, table 2", "(p/2-1)*(F+B)", takes="p % 2 == 0 and m % 2 == 0",
        holds="m % p == 0 and F == B", peak="p/2+1+min(r, p-1-r)", peak_holds="m >= p"),
}
# fmt: on

_NOUNS = {"idle": "idle time", "gap": "bubble in span"}

# What follows from what is known: from a Form's field, a formula with it in the place of {0}.
_FROM: dict[str, dict[str, str]] = {
    "idle": {"idle": "{0}"},
    "makespan": {"idle": "m*(F+B) + {0}", "makespan": "{0}"},
    "span": {"gap": "m*(F+B) + {0}", "idle": "m*(F+B) + {0}", "makespan": "{0}"},
    "bubble": {"idle": "{0} / (m*(F+B) + {0})"},
    "overhead": {"idle": "{0} / (m*(F+B))"},
    "peak": {"peak": "{0}"},
}


class Fact(NamedTuple):
    """A number, or a tuple of one for each rank; the formula that gives it; where that holds; who says so.

    `value` is exact where the costs are. The Timeline of a simulation has it under the same name.
    """

    value: Any
    formula: str
    holds: str
    source: str

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        value = ", ".join(map(pretty, self.value if isinstance(self.value, tuple) else [self.value]))
        holds = f" if {self.holds}" if self.holds else ""
        return f"{value} = {self.formula}{holds} ({self.source})"


def idle(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """How long each rank waits, in the schedule `name` with so many ranks and microbatches.

    chunks: stages on each rank, where the schedule leaves the choice; 2 unless given.

    Raises:
        SettingError: there is no formula, or it does not hold there; the message says where it does.
    """
    return _fact("idle", name, ranks, microbatches, costs, chunks)


def makespan(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """From the first start to the last end. Arguments and errors as for `idle`."""
    return _fact("makespan", name, ranks, microbatches, costs, chunks)


def span(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """The longest time from a rank's own start to its own end. Arguments and errors as for `idle`."""
    return _fact("span", name, ranks, microbatches, costs, chunks)


def bubble(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """The idle share of the makespan. Arguments and errors as for `idle`."""
    return _fact("bubble", name, ranks, microbatches, costs, chunks)


def overhead(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """Return makespan / ideal - 1, as `Timeline.overhead` does. Arguments and errors as for `idle`.

    All ranks are equally busy here, so it is idle time over busy time, which Megatron calls the bubble (arXiv
    2104.04473, §2.2).
    """
    return _fact("overhead", name, ranks, microbatches, costs, chunks)


def peak(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """The most activations on each rank, in units of `costs.activation`. Arguments and errors as for `idle`."""
    return _fact("peak", name, ranks, microbatches, costs, chunks)


def least_makespan(ranks: int, microbatches: int, costs: Costs | None = None, split: bool = True) -> Fact:
    """Return a makespan that no schedule with one stage on each rank beats.

    Before rank r starts, a microbatch must come through the r stages before it; then it has all its work to do. Unless
    backwards are `split`, so that its last action may be a W, the last gradient must still go back through those r
    stages. The bound is what the slowest rank takes. Of equal stages that is the last one, and no schedule of whole
    backwards is faster than GPipe (arXiv 1811.06965). In uneven stages F[r] and B[r] are those of rank r.

    Raises:
        SettingError: the costs are not one for each rank, or overlapped pairs save time, which the bound leaves out.
    """
    costs = _require_costs(costs)
    if any(isinstance(cost, tuple) for cost in (costs.forward, costs.backward, costs.input, costs.weight)):
        require_size(ranks, 1, microbatches)
        letters: Letters = {"p": index(ranks), "m": index(microbatches), "c": costs.latency, **_times(costs, ranks)}
        why = "rank r starts after the r stages before it, and has all its work to do"
        bound = "max(sum(F[:r]) + r*c + m*(F[r]+B[r]) for r in range(p))"
        whole = "max(sum(F[:r]) + sum(B[:r]) + 2*r*c + m*(F[r]+B[r]) for r in range(p))"
    else:
        letters = _letters(ranks, microbatches, replace(costs, activation=1))
        why = "the last rank starts after p-1 forwards, and has all its work to do"
        bound, whole = "(p-1)*(F+c) + m*(F+B)", "(p-1)*(F+B+2*c) + m*(F+B)"
    _require_no_gain(costs, ranks)
    if split:
        return _bound(bound, why, letters)
    return _bound(whole, f"{why}; its last gradient has to go back up", letters)


def least_span(ranks: int, microbatches: int, costs: Costs | None = None, most: int | None = None) -> Fact:
    """Return a span that no schedule with one stage on each rank beats, if a rank holds at most `most` microbatches.

    Raises:
        SettingError: stages are uneven, or overlapped pairs save time; the bound is known for neither.
    """
    letters = _letters(ranks, microbatches, costs)
    _require_no_gain(_require_costs(costs), ranks)
    letters["k"] = letters["m"] if most is None else min(letters["m"], require_count("most", most))
    why = "until its first gradient is back, the first rank has k forwards to do"
    return _bound("m*(F+B) + max(0, (p-1)*(I+2*c) + (p-k)*F)", why, letters)


def most_activations(lifespan: Number, interval: Number) -> int:
    """The most microbatches on a rank of a schedule that repeats itself: ⌈lifespan / interval⌉ (arXiv 2405.15362).

    lifespan: from the start of a forward to the end of its backward. interval: from one microbatch to the next.

    Raises:
        SettingError: a time is not above 0.
    """
    for name, time in (("lifespan", lifespan), ("interval", interval)):
        if isinstance(time, bool) or not isinstance(time, Real) or not 0 < time < math.inf:
            raise SettingError(f"{name} must be a time above 0; got {time!r}")
    return math.ceil(lifespan / interval)


def microbatches_for(bubble: Number, ranks: int, chunks: int = 1) -> int:
    """The fewest microbatches with which 1F1B, interleaved if there are chunks, has a bubble of at most `bubble`.

    4(p-1) for a fifth: the rule of thumb of four microbatches for each rank.

    Raises:
        SettingError: the bubble is not a share between 0 and 1.
    """
    if isinstance(bubble, bool) or not isinstance(bubble, Real) or not 0 < bubble < 1:
        raise SettingError(f"bubble must be a share between 0 and 1; got {bubble!r}")
    share = Fraction(str(bubble))  # 0.3 as written, not as the float just below it
    enough = math.ceil((require_count("ranks", ranks) - 1) * (1 / share - 1) / require_count("chunks", chunks))
    return max(enough, ranks if chunks > 1 else 1)


def text(expression: str) -> str:
    """A formula or a condition of the table, for people."""
    expression = re.sub(r"(\w) % 2 == 0", r"\1 even", expression)
    expression = re.sub(r"(\w) % (\w) == 0", r"\2 divides \1", expression)
    return expression.replace("*", "").replace("==", "=").replace(" and ", ", ")


def _fact(what: str, name: str, ranks: int, microbatches: int, costs: Costs | None, chunks: int | None) -> Fact:
    if not isinstance(name, str) or name not in FORMS:
        raise SettingError(f"nothing is published about {name!r}; simulate it, or take one of: {', '.join(FORMS)}")
    form, noun = FORMS[name], f"the {_NOUNS.get(what, what)} of {name}"
    field = next((field for field in _FROM[what] if getattr(form, field)), None)
    if field is None:
        instead = ", only for its makespan and its span" if form.makespan else ""
        raise SettingError(f"there is no formula for {noun}{instead}; simulate it")
    if chunks is not None and "v" not in _words(form.idle + form.makespan):
        raise SettingError(f"{name} leaves no choice of chunks; leave them out")
    noun = f"the {_NOUNS.get(field, field)} of {name}"
    letters = _letters(ranks, microbatches, costs, 2 if chunks is None else chunks)
    for need in _needs(form.takes, latency=False):
        if not _compute(need, letters):
            raise SettingError(f"{name} takes {text(need)} only; got {_here(need, letters)}")
    if what == "peak":
        needs = _require(noun, form.peak, [form.takes, form.peak_holds], letters)
        peaks = tuple(_compute(f"({form.peak})*A", {**letters, "r": rank}) for rank in range(ranks))
        return Fact(peaks, text(form.peak), needs, form.source)
    if form.peak and "r" not in _words(form.peak):
        letters["k"] = _compute(form.peak, letters)
    formula, source = getattr(form, field), form.source
    if not letters["c"]:
        formula = _without_latency(formula)
    elif form.hops:
        formula, source = f"({formula} + {form.hops}*c)", f"{source}; latency by simulation"
    elif "c" not in _words(formula):
        raise SettingError(f"{noun}, {text(formula)}, is known without latency only; simulate it")
    formula = _FROM[what][field].format(formula)
    needs = _require(noun, formula, [form.takes, form.holds], letters)
    return Fact(_compute(formula, letters), text(formula), needs, source)


def _letters(ranks: int, microbatches: int, costs: Costs | None, chunks: int = 1) -> Letters:
    """Return what the letters stand for, exact where the costs are."""
    costs = _require_costs(costs)
    for name, value in vars(costs).items():
        if isinstance(value, tuple):
            raise SettingError(f"formulas are about equal stages; give one number for {name}, or simulate")
    times: dict[str, Any] = {op: each for op, (each,) in _times(costs, 1).items()}
    ranks, chunks, microbatches = require_size(ranks, chunks, microbatches)
    letters: Letters = {
        "p": index(ranks),  # of NumPy's or torch's kind, too
        "m": index(microbatches),
        "v": index(chunks),
        **times,
        "FB": times["F"] + times["B"] if costs.overlap is None else costs.overlap,
        "c": costs.latency,
        "M_W": costs.weight_memory,
        "A": costs.activation,
    }
    return {name: Fraction(value) if isinstance(value, Rational) else value for name, value in letters.items()}


def _require_costs(costs: Costs | None) -> Costs:
    """Return the costs, or the default ones; raise SettingError if they are anything else."""
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise SettingError(f"a formula takes costs, such as Costs(forward=1, backward=2); got {costs!r}")
    return costs


def _times(costs: Costs, ranks: int) -> dict[str, list[Number]]:
    """Return the times of F, B, I and W on ranks of one stage each; raise SettingError unless B = I + W."""
    times: dict[str, list[Number]] = dict(costs.durations(ranks, ranks).items())
    for b, i, w in zip(times[Op.B], times[Op.I], times[Op.W], strict=True):
        if not math.isclose(b, i + w):
            raise SettingError(
                f"in formulas B = I + W; got B={pretty(b)}, I={pretty(i)}, W={pretty(w)}: "
                "leave out backward, or simulate"
            )
    return times


def _require_no_gain(costs: Costs, ranks: int) -> None:
    """Raise SettingError if an overlapped pair takes less than its parts: then ranks have less work than m(F+B)."""
    if costs.overlap is not None:
        times = _times(costs, ranks)
        for f, b, pair in zip(times[Op.F], times[Op.B], costs.per_stage(costs.overlap, ranks, ranks), strict=True):
            if pair < f + b and not math.isclose(pair, f + b):
                raise SettingError(
                    "the bound is for ranks that do one thing at a time, and pairs that take as long as their parts, "
                    f"{pretty(f + b)}; got {pretty(pair)}: leave out overlap"
                )


def _needs(conditions: str, latency: bool) -> list[str]:
    """The conditions one by one, without those about latency where there is none."""
    needs = conditions.split(" and ") if conditions else []
    return [need for need in needs if latency or "c" not in _words(need)]


def _require(noun: str, formula: str, conditions: Sequence[str], letters: Letters) -> str:
    """Where a formula holds, for people, if it holds here."""
    needs = [need for each in conditions for need in _needs(each, letters["c"] > 0)]
    for need in needs:
        if not _compute(need, letters):
            here = _here(need, letters)
            raise SettingError(f"{noun}, {text(formula)}, holds for {text(need)}; got {here}; simulate it")
    return text(" and ".join(needs))


def _here(need: str, letters: Letters) -> str:
    return ", ".join(f"{word}={pretty(letters[word])}" for word in _words(need) if word in letters)


def _without_latency(formula: str) -> str:
    return re.sub(r"\+(\d\*)?c\b", "", formula)


def _bound(formula: str, why: str, letters: Letters) -> Fact:
    return Fact(_compute(formula, letters), text(formula), "", why)


def _words(formula: str) -> list[str]:
    return re.findall(r"[A-Za-z_]+", formula)


def _compute(formula: str, letters: Letters) -> Any:
    """The value of one of this file's own formulas; a share of no time at all is 0, as in a Timeline."""
    try:
        return plain(eval(formula, {"__builtins__": {"min": min, "max": max, "sum": sum, "range": range}, **letters}))
    except ZeroDivisionError:
        return 0
