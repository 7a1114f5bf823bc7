"""Closed forms and lower bounds: what is known about a schedule before it is simulated.

The formulas are the `Facts` that stand beside each schedule's generator, in the letters that `ppedu.zoo.facts` defines:

    idle("interleaved", ranks=4, microbatches=8)    # 4.5 = (p-1)(F+B)/v if m >= p (arXiv 2104.04473, §2.2)

A formula is evaluated only where it holds; elsewhere SettingError names the condition that fails. A simulation has no
such limits; the formulas explain its results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from numbers import Rational
from typing import Any, NamedTuple

from ppedu.core import Op, SettingError
from ppedu.core.numeric import Number, plain, pretty
from ppedu.core.validate import require_size
from ppedu.sim import Costs, require_costs
from ppedu.sim.per_link import PerLink
from ppedu.zoo.facts import letters_of, split, text
from ppedu.zoo.registry import facts_of, published

Letters = dict[str, Any]

_NOUNS = {"idle": "idle time", "idle_in_span": "bubble in span"}

# Each quantity follows from one of the facts: for each fact, in order of preference, the formula with the fact at {0}.
_DERIVED: dict[str, dict[str, str]] = {
    "idle": {"idle": "{0}"},
    "makespan": {"idle": "m*(F+B) + {0}", "makespan": "{0}"},
    "span": {"idle_in_span": "m*(F+B) + {0}", "idle": "m*(F+B) + {0}", "makespan": "{0}"},
    "bubble": {"idle": "{0} / (m*(F+B) + {0})"},
    "overhead": {"idle": "{0} / (m*(F+B))"},
    "peak": {"peak": "{0}"},
}


class Fact(NamedTuple):
    """A number, or a tuple of one for each rank, with the formula that gives it, its conditions and its source.

    value: exact if the costs are. The attribute of a simulation's Timeline that has the name of the function, such as
        `Timeline.makespan` for `makespan`, has the same value.
    formula, holds: the formula and its conditions, in mathematical notation.
    source: the paper or the repository.
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
    """Return the time for which each rank waits in the schedule `name`.

    costs: as in `simulate`; each must be one number, because the formulas are about equal stages.
    chunks: the stages on each rank, if the schedule has such an option; 2 by default.

    Raises:
        SettingError: there is no formula, or it does not hold here; the message names its condition.
    """
    return _fact("idle", name, ranks, microbatches, costs, chunks)


def makespan(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """Return the time from the first start to the last end in a schedule. Arguments and errors as for `idle`."""
    return _fact("makespan", name, ranks, microbatches, costs, chunks)


def span(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """Return the longest time from a rank's own first start to its own last end. Arguments and errors as for `idle`."""
    return _fact("span", name, ranks, microbatches, costs, chunks)


def bubble(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """Return the share of a schedule's makespan for which each rank waits. Arguments and errors as for `idle`."""
    return _fact("bubble", name, ranks, microbatches, costs, chunks)


def overhead(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """Return idle time / busy time of a rank in a schedule. Arguments and errors as for `idle`.

    Megatron calls it the bubble (arXiv 2104.04473, §2.2). All ranks are equally busy here, so it equals makespan /
    ideal - 1, as in `Timeline.overhead`.
    """
    return _fact("overhead", name, ranks, microbatches, costs, chunks)


def peak(name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: int | None = None) -> Fact:
    """Return the peak of the activations on each rank, in the unit of `costs.activation`. Arguments as for `idle`."""
    return _fact("peak", name, ranks, microbatches, costs, chunks)


def least_makespan(ranks: int, microbatches: int, costs: Costs | None = None, split: bool = True) -> Fact:
    """Return a lower bound on the makespan of every schedule with one stage on each rank.

    Before rank r starts, a microbatch must pass through the r stages before it; then the rank has all its work to do.
    If backwards are not split, its last gradient must also travel back through those r stages. The bound is the largest
    of these times over the ranks. With equal stages that is the last rank's, and no schedule of full backwards is
    faster than GPipe (arXiv 1811.06965). With uneven stages F[r] and B[r] are the times of rank r.

    costs: as in `simulate`; a sequence has one entry for each rank.
    split: whether the backward may be split into I and W, so that the last action of a rank may be a W.

    Raises:
        SettingError: a sequence does not have one cost for each rank, or overlapped pairs save time.
    """
    costs = require_costs(costs)
    if any(isinstance(cost, tuple) for cost in (costs.forward, costs.backward, costs.input, costs.weight)):
        ranks, _, microbatches = require_size(ranks, 1, microbatches)
        letters: Letters = {"p": ranks, "m": microbatches, "c": _latency(costs), **_times(costs, ranks)}
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


def _fact(quantity: str, name: str, ranks: int, microbatches: int, costs: Costs | None, chunks: int | None) -> Fact:
    """Return the fact for `quantity`, a key of `_DERIVED`. Other arguments and errors as for `idle`."""
    facts = facts_of(name)
    if facts is None:
        raise SettingError(f"no formula is known for {name!r}; simulate it, or take one of: {', '.join(published())}")
    known = next((field for field in _DERIVED[quantity] if getattr(facts, field)), None)
    if known is None:
        instead = ", only for its makespan and its span" if facts.makespan else ""
        raise SettingError(f"there is no formula for {_of(quantity, name)}{instead}; simulate it")
    if chunks is not None and not facts.has_chunks:
        raise SettingError(f"the number of chunks of {name} is fixed; leave out chunks")
    noun = _of(known, name)
    letters = _letters(ranks, microbatches, costs, 2 if chunks is None else chunks)
    _require(f"{name} exists only for", facts.sizes, letters)
    latency = letters["c"] > 0
    formula, conditions = split(getattr(facts, known), latency)
    if known == "idle_in_span":
        _, conditions = split(facts.idle, latency)
    conditions = [*facts.sizes, *conditions]
    source = facts.source
    if quantity != "peak" and latency and facts.hops:
        formula, source = f"({formula} + {facts.hops}*c)", f"{source}; latency by simulation"
    elif quantity != "peak" and latency and "c" not in letters_of(formula):
        raise SettingError(f"{noun}, {text(formula)}, is known for zero latency only; simulate it")
    peak_formula, _ = split(facts.peak, latency)
    if peak_formula and "r" not in letters_of(peak_formula):
        letters["k"] = _evaluate(peak_formula, letters)
    formula = _DERIVED[quantity][known].format(formula)
    _require(f"{noun}, {text(formula)}, holds for", conditions, letters, "; simulate it")
    if quantity == "peak":
        value = tuple(_evaluate(f"({formula})*A", {**letters, "r": rank}) for rank in range(ranks))
    else:
        value = _evaluate(formula, letters)
    return Fact(value, text(formula), text(*conditions), source)


def _of(field: str, name: str) -> str:
    """Return a quantity of the schedule `name` in words, such as "the idle time of gpipe"."""
    return f"the {_NOUNS.get(field, field)} of {name}"


def _letters(ranks: int, microbatches: int, costs: Costs | None, chunks: int = 1) -> Letters:
    """Return the value of each letter of the formulas, exact if the costs are. Raise SettingError for uneven stages."""
    costs = require_costs(costs)
    for name, value in vars(costs).items():
        if isinstance(value, tuple) or callable(value):
            raise SettingError(f"formulas are for equal stages; give one number for {name}, not {value!r}, or simulate")
    if costs.recompute:
        raise SettingError("formulas are for activations that are kept; leave out recompute, or simulate")
    times: dict[str, Any] = {op: each for op, (each,) in _times(costs, 1).items()}
    ranks, chunks, microbatches = require_size(ranks, chunks, microbatches)
    letters: Letters = {
        "p": ranks,
        "m": microbatches,
        "v": chunks,
        **times,
        "FB": times["F"] + times["B"] if costs.overlap is None else costs.overlap,
        "c": _latency(costs),
        "M_W": costs.weight_memory,
        "A": costs.activation,
    }
    return {name: Fraction(value) if isinstance(value, Rational) else value for name, value in letters.items()}


def _latency(costs: Costs) -> Number:
    """Return the time of a message. Raise SettingError if it differs by link, or if messages wait for each other."""
    for name, cost in {"latency": costs.latency, "transfer": costs.transfer}.items():
        if isinstance(cost, PerLink):
            raise SettingError(f"formulas are for equal links; give one number for {name}, not {cost!r}, or simulate")
    if costs.links != "free":
        raise SettingError("formulas are for messages that do not wait for each other; leave out links, or simulate")
    return costs.delay(0, 1)


def _times(costs: Costs, ranks: int) -> dict[str, list[Number]]:
    """Return the times of F, B, I and W on ranks of one stage each. Raise SettingError unless B = I + W."""
    times: dict[str, list[Number]] = dict(costs.durations(ranks, ranks).items())
    for b, i, w in zip(times[Op.B], times[Op.I], times[Op.W], strict=True):
        if not math.isclose(b, i + w):
            raise SettingError(
                f"formulas assume B = I + W; got B={pretty(b)}, I={pretty(i)}, W={pretty(w)}; "
                "leave out backward, or simulate"
            )
    return times


def _require_no_gain(costs: Costs, ranks: int) -> None:
    """Raise SettingError if an overlapped pair is faster than its parts, so that a rank's work is less than m(F+B)."""
    if costs.overlap is not None:
        times = _times(costs, ranks)
        for f, b, pair in zip(times[Op.F], times[Op.B], costs.per_stage(costs.overlap, ranks, ranks), strict=True):
            if pair < f + b and not math.isclose(pair, f + b):
                raise SettingError(
                    "the bound assumes that an overlapped pair takes as long as its parts, "
                    f"{pretty(f + b)}; got {pretty(pair)}: leave out overlap"
                )


def _require(claim: str, conditions: Sequence[str], letters: Letters, advice: str = "") -> None:
    """Raise SettingError unless all conditions hold; its message is the claim, the condition, values and advice."""
    for condition in conditions:
        if not _evaluate(condition, letters):
            used = [letter for letter in letters_of(condition) if letter in letters]
            values = ", ".join(f"{letter}={pretty(letters[letter])}" for letter in used)
            raise SettingError(f"{claim} {text(condition)}; got {values}{advice}")


def _bound(formula: str, why: str, letters: Letters) -> Fact:
    """Return a lower bound as a Fact without conditions, whose source is the reason for it."""
    return Fact(_evaluate(formula, letters), text(formula), "", why)


def _evaluate(formula: str, letters: Letters) -> Any:
    """Return the value of a formula or a condition. A share of zero time is 0, as in a Timeline."""
    try:
        return plain(eval(formula, {"__builtins__": {"min": min, "max": max, "sum": sum, "range": range}, **letters}))
    except ZeroDivisionError:
        return 0
