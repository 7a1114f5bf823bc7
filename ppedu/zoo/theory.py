"""Closed forms and lower bounds: what is known about a schedule before it is simulated.

The formulas are the `Facts` that stand beside each schedule's generator, in the letters that `ppedu.zoo.facts` defines:

    idle("interleaved", ranks=4, microbatches=8)    # 4.5 = (p-1)(F+B)/v if m >= p (arXiv 2104.04473, §2.2)

A formula is evaluated only where it holds; elsewhere SettingError names the condition that fails. A simulation has no
such limits; the formulas explain its results.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from numbers import Rational
from types import CodeType
from typing import Any, NamedTuple

from ppedu.core import Op, SettingError
from ppedu.core.numeric import plain, pretty, ratio
from ppedu.core.validate import require_count, require_size
from ppedu.sim import Costs, require_costs
from ppedu.sim.per_link import PerLink
from ppedu.zoo.facts import letters_of, split, text
from ppedu.zoo.registry import facts_of, options_of, published, require_registered

Letters = dict[str, Any]
Count = int | None  # None: that of the schedule

# By quantity: the facts from which it follows, in order of preference, each with a formula in which {0} is the fact.
# GPipe has a fact for its idle time, "(p-1)*(F+B)", so its makespan is "m*(F+B) + (p-1)*(F+B)".
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

    Attributes:
        value: Exact if the costs are. The attribute of a simulation's Timeline that has the name of the function, such
            as `Timeline.makespan` for `makespan`, has the same value.
        formula, holds: The formula and its conditions, in mathematical notation.
        source: The paper or the repository.
        filled: The formula with the values in place of its letters, but for r, the rank.
    """

    value: Any
    formula: str
    holds: str
    source: str
    filled: str

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        values = self.value if isinstance(self.value, tuple) else [self.value]
        holds = f" if {self.holds}" if self.holds else ""
        return f"{', '.join(map(pretty, values))} = {self.formula}{holds} ({self.source})"


def idle(
    name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: Count = None, slices: Count = None
) -> Fact:
    """Return the time for which each rank waits in the schedule `name`.

    Args:
        costs: As in `simulate`; each must be one number, because the formulas are about equal stages.
        chunks, slices: The stages on each rank, and the slices of each microbatch, if the schedule has such an option.
            By default they are those of the schedule.

    Raises:
        SettingError: There is no formula, or it does not hold here; the message names its condition.
    """
    return _fact("idle", name, ranks, microbatches, costs, chunks=chunks, slices=slices)


def makespan(
    name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: Count = None, slices: Count = None
) -> Fact:
    """Return the time from the first start to the last end in a schedule. Arguments and errors as for `idle`."""
    return _fact("makespan", name, ranks, microbatches, costs, chunks=chunks, slices=slices)


def span(
    name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: Count = None, slices: Count = None
) -> Fact:
    """Return the longest time from a rank's own first start to its own last end. Arguments and errors as for `idle`."""
    return _fact("span", name, ranks, microbatches, costs, chunks=chunks, slices=slices)


def bubble(
    name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: Count = None, slices: Count = None
) -> Fact:
    """Return the share of a schedule's makespan for which each rank waits. Arguments and errors as for `idle`."""
    return _fact("bubble", name, ranks, microbatches, costs, chunks=chunks, slices=slices)


def overhead(
    name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: Count = None, slices: Count = None
) -> Fact:
    """Return idle time / busy time of a rank in a schedule. Arguments and errors as for `idle`.

    Megatron calls it the bubble (arXiv 2104.04473, §2.2). All ranks are equally busy here, so it equals makespan /
    ideal - 1, as in `Timeline.overhead`.
    """
    return _fact("overhead", name, ranks, microbatches, costs, chunks=chunks, slices=slices)


def peak(
    name: str, ranks: int, microbatches: int, costs: Costs | None = None, chunks: Count = None, slices: Count = None
) -> Fact:
    """Return the peak of the activations on each rank, in the unit of `costs.activation`. Arguments as for `idle`."""
    return _fact("peak", name, ranks, microbatches, costs, chunks=chunks, slices=slices)


def least_makespan(ranks: int, microbatches: int, costs: Costs | None = None, split: bool = True) -> Fact:
    """Return a lower bound on the makespan of every schedule of whole sequences with one stage on each rank.

    Before the last rank starts, a microbatch must pass through all other stages; then the rank has all its work to do.
    If backwards are not split, its last gradient must also travel back through those stages: then no schedule is faster
    than GPipe (arXiv 1811.06965).

    Args:
        costs: As in `simulate`; each time must be one number.
        split: Whether the backward may be split into I and W, so that the last action of a rank may be a W.

    Raises:
        SettingError: Stages are uneven, or overlapped pairs save time.
    """
    # Activations take no time, so they may differ from stage to stage; the letters need one number.
    letters = _letters(ranks, microbatches, replace(require_costs(costs), activation=1))
    work = letters["F"] + letters["B"]
    if letters["FB"] < work and not math.isclose(letters["FB"], work):
        raise SettingError(
            "the bound assumes that an overlapped pair takes as long as its parts, "
            f"{pretty(work)}; got {pretty(letters['FB'])}: leave out overlap"
        )
    formula = "(p-1)*(F+c) + m*(F+B)" if split else "(p-1)*(F+B+2*c) + m*(F+B)"
    back = "" if split else "; its last gradient has to go back up"
    why = f"the last rank starts after p-1 forwards, and has all its work to do{back}"
    return Fact(_evaluate(formula, letters), text(formula), "", why, _filled(formula, letters))


def _fact(quantity: str, name: str, ranks: int, microbatches: int, costs: Costs | None, **options: int | None) -> Fact:
    """Return the fact for `quantity`, a key of `_DERIVED`. Other arguments and errors as for `idle`."""
    facts = facts_of(name)
    if facts is None:
        raise SettingError(f"no formula is known for {name!r}; simulate it, or take one of: {', '.join(published())}")
    field = next((field for field in _DERIVED[quantity] if getattr(facts, field)), None)
    if field is None:
        instead = ", only for its makespan and its span" if facts.makespan else ""
        raise SettingError(f"there is no formula for {_of(quantity, name)}{instead}; simulate it")
    given = {option: value for option, value in options.items() if value is not None}
    known = {option: each.default for option, each in options_of(name).items() if option in options}
    if other := next((option for option in given if option not in known), None):
        raise SettingError(f"the number of {other} of {name} is fixed; leave out {other}")
    noun = _of(field, name)
    letters = _letters(ranks, microbatches, costs, **{"chunks": require_registered(name).chunks, **known, **given})
    _require(f"{name} exists only for", facts.sizes, letters)
    latency = letters["c"] > 0
    formula, conditions = split(getattr(facts, field), latency)
    if field == "idle_in_span":  # it holds where the idle time or the makespan does
        _, conditions = split(facts.idle or facts.makespan, latency)
    conditions = [*facts.sizes, *conditions]
    source = facts.source
    if latency and quantity != "peak":
        if facts.hops:
            formula = f"({formula} + {facts.hops}*c)"
            source = f"{source}; latency by simulation"
        elif "c" not in letters_of(formula):
            raise SettingError(f"{noun}, {text(formula)}, is known for zero latency only; simulate it")
    # The idle times of V-Half and V-Min contain k, the peak. A peak with r in it differs from rank to rank.
    peak_formula, _ = split(facts.peak, latency)
    if peak_formula and "r" not in letters_of(peak_formula):
        letters["k"] = _evaluate(peak_formula, letters)
    derived = _DERIVED[quantity][field]
    formula = derived.format(f"({formula})" if "/" in derived and _is_sum(formula) else formula)
    _require(f"{noun}, {text(formula)}, holds for", conditions, letters, "; simulate it")
    if quantity == "peak":
        if letters["A"] != 1:
            formula = "A" if formula == "1" else f"A*({formula})"
        value = tuple(_evaluate(formula, {**letters, "r": rank}) for rank in range(ranks))
    else:
        value = _evaluate(formula, letters)
    return Fact(value, text(formula), text(*conditions), source, _filled(formula, letters))


def _is_sum(formula: str) -> bool:
    """Return whether a formula is a sum or a difference, which needs parentheses in a quotient."""
    tree = ast.parse(formula, mode="eval").body
    return isinstance(tree, ast.BinOp) and isinstance(tree.op, (ast.Add, ast.Sub))


def _of(field: str, name: str) -> str:
    """Return a quantity of the schedule `name` in words, such as "the idle time of gpipe"."""
    words = {"idle": "idle time", "idle_in_span": "bubble in span"}
    return f"the {words.get(field, field)} of {name}"


def _letters(ranks: int, microbatches: int, costs: Costs | None, chunks: int = 1, slices: int = 1) -> Letters:
    """Return the value of each letter of the formulas, exact if the costs are.

    Raises:
        SettingError: The formulas are not for these costs.
    """
    costs = require_costs(costs)
    if costs.lengths or (costs.attention and slices > 1):
        raise SettingError("formulas are for equal slices; leave out attention and lengths, or simulate")
    for name, value in vars(costs).items():
        if isinstance(value, PerLink):
            raise SettingError(f"formulas are for equal links; give one number for {name}, not {value!r}, or simulate")
        if (isinstance(value, tuple) and value) or callable(value):
            raise SettingError(f"formulas are for equal stages; give one number for {name}, not {value!r}, or simulate")
    if costs.recompute:
        raise SettingError("formulas are for activations that are kept; leave out recompute, or simulate")
    if costs.transport != "buffered":
        raise SettingError("in a formula, messages do not wait for each other; leave out transport, or simulate")
    times = costs.durations(stages=1, ranks=1)
    f, b, i, w = (times[op][0] for op in (Op.F, Op.B, Op.I, Op.W))
    if not math.isclose(b, i + w):
        raise SettingError(
            f"formulas assume B = I + W; got B={pretty(b)}, I={pretty(i)}, W={pretty(w)}; "
            "leave out backward, or simulate"
        )
    ranks, chunks, microbatches = require_size(ranks, chunks, microbatches)
    slices = require_count("slices", slices)
    letters: Letters = {"p": ranks, "m": microbatches, "v": chunks, "s": slices, "F": f, "B": b, "I": i, "W": w}
    letters["FB"] = f + b if costs.overlap is None else costs.overlap
    with_i = costs.overlap if costs.overlap_input is None else costs.overlap_input
    letters["FI"] = f + i if with_i is None else with_i
    letters |= {"c": costs.delay(0, 1), "M_W": costs.weight_memory, "A": costs.activation}
    letters["S"] = ratio(costs.stage_input, costs.activation) if costs.activation else 0
    return {name: Fraction(value) if isinstance(value, Rational) else value for name, value in letters.items()}


def _require(claim: str, conditions: Sequence[str], letters: Letters, advice: str = "") -> None:
    """Raise SettingError unless all conditions hold; its message is the claim, the condition, values and advice."""
    for condition in conditions:
        if not _evaluate(condition, letters):
            used = [letter for letter in letters_of(condition) if letter in letters]
            values = ", ".join(f"{letter}={pretty(letters[letter])}" for letter in used)
            raise SettingError(f"{claim} {text(condition)}; got {values}{advice}")


def _filled(formula: str, letters: Letters) -> str:
    """Return a formula with the values of its letters: "(4-1)·(1+2)"."""
    known = re.sub(r"[A-Za-z_]+", lambda found: pretty(letters[found[0]]) if found[0] in letters else found[0], formula)
    return known.replace("*", "·")


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")


def _evaluate(formula: str, letters: Letters) -> Any:
    """Return the value of a formula or a condition. A share of zero time is 0, as in a Timeline."""
    try:
        return plain(eval(_compiled(formula), {"__builtins__": {"min": min, "max": max}, **letters}))
    except ZeroDivisionError:
        return 0
