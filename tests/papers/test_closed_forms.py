"""The formulas of `ppedu.zoo.theory` against the simulation: correct under their conditions, and wrong without them."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest
from strategies import scaled

import ppedu as pp
from ppedu import Costs, SettingError
from ppedu.zoo import registry, theory
from ppedu.zoo.facts import split
from ppedu.zoo.registry import facts_of, options_of, published

TIMED = [name for name in published() if facts_of(name).idle or facts_of(name).makespan]


def cases(name):
    """Yield 5000 sizes, costs and options that often fulfil the conditions of a formula, and often do not."""
    draw = random.Random(name)
    for _ in range(5000):
        p = draw.choice([1, 2, 2, 3, 4, 4, 5, 6])
        m = draw.choice([draw.randint(1, 4 * p), p * draw.randint(1, 4)])
        f, i, w = draw.choices([0, 1, 2, 3, 5, Fraction(7, 3)], k=3)
        pair, latency = draw.choice([None, max(f, i + w), 1, 4]), draw.choice([0, 0, Fraction(1, 4), 1, 6])
        shape = draw.randrange(4)
        if shape == 0:
            f, i, w, pair, latency = f, f, draw.choice([w, min(f, w)]), None, 0
        elif shape == 1:
            f, i, w = w, w, w
        elif shape == 2:
            f, latency = i + w, 0
        costs = Costs(
            forward=f, input=i, weight=w, overlap=pair, latency=latency,
            weight_memory=draw.choice([1, Fraction(1, 3)]), activation=draw.choice([1, 7]),
            stage_input=draw.choice([0, 0, Fraction(1, 9)]),
        )  # fmt: skip
        yield (
            p,
            m,
            costs,
            {option: draw.choice([1, 2, 3, 4]) for option in ("chunks", "slices") if option in options_of(name)},
        )


def known(quantity, name, p, m, costs, options):
    """Return the value of a formula, or None if it is refused."""
    try:
        return getattr(theory, quantity)(name, p, m, costs, **options).value
    except SettingError:
        return None


def simulated(quantity, timeline):
    if quantity == "idle":
        return timeline.idle[0] if len(set(timeline.idle)) == 1 else timeline.idle
    return timeline.peak_activations if quantity == "peak" else getattr(timeline, quantity)


def run(name, p, m, costs, options):
    return pp.simulate(pp.schedule(name, p, m, **options), costs)


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize("least", ["span", "peak"])
def test_formulas_agree_with_the_simulation(name, least):
    """Compare all quantities in cases in which the time is known, and in cases in which the memory is known."""
    held = list(islice((case for case in cases(name) if known(least, name, *case) is not None), scaled(40)))
    assert len(held) == scaled(40)
    for case in held:
        timeline = run(name, *case)
        for quantity in ("idle", "makespan", "span", "bubble", "overhead", "peak"):
            value = known(quantity, name, *case)
            if value is not None:
                exact = quantity not in ("bubble", "overhead")
                assert (value if exact else float(value)) == simulated(quantity, timeline), (quantity, case)


def conditions(field):
    return [(name, field, each) for name in TIMED for each in split(getattr(facts_of(name), field), latency=True)[1]]


@pytest.mark.parametrize(
    ("name", "field", "condition"),
    [
        *(case for field in ("idle", "makespan", "peak") for case in conditions(field)),
        *(
            (name, "hops", "none")
            for name in TIMED
            if not facts_of(name).hops and "c" not in facts_of(name).idle + facts_of(name).makespan
        ),
    ],
)
def test_each_condition_is_needed(name, field, condition, monkeypatch):
    """If only this condition fails, or for hops if there is latency, the formula without it can be wrong."""
    formula, every = split(getattr(facts_of(name), field), latency=True)
    others = [each for each in every if each != condition] or ["p >= 1"]
    without = "0" if field == "hops" else f"{formula} if {' and '.join(others)}"
    loose = replace(facts_of(name), **{field: without})
    monkeypatch.setitem(registry._entries, "loose", replace(registry._entries[name], facts=loose))
    quantity = "peak" if field == "peak" else "span"
    for case in cases(name):
        if known(quantity, name, *case) is None:
            value = known(quantity, "loose", *case)
            if value is not None and value != simulated(quantity, run(name, *case)):
                return
    raise AssertionError("the formula holds without this condition, too")


# --- numbers that the papers and their readers quote ------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 8), (8, 32)])
def test_two_bubbles_are_in_use_and_differ(name, p, m):
    """One is a share of the makespan, (p-1)/(m+p-1); one is relative to the ideal, (p-1)/m (arXiv 2104.04473, §2.2)."""
    assert theory.bubble(name, p, m).value == Fraction(p - 1, m + p - 1)
    assert theory.overhead(name, p, m).value == Fraction(p - 1, m)


def test_1f1b_of_four_ranks_and_eight_microbatches():
    timeline = pp.simulate(pp.schedule("1f1b", 4, 8), Costs(forward=1, backward=1))
    assert (timeline.makespan, timeline.peak_activations) == (22, (4, 3, 2, 1))
    assert timeline.bubble == 3 / 11
    assert pp.simulate(pp.schedule("1f1b", 4, 8)).makespan == 33
    assert pp.simulate(pp.schedule("zb-h1", 4, 8)).makespan == 27


def test_no_bubble_in_span_is_a_bubble_in_the_makespan():
    """ZB-2p of Zero Bubble, here ZB-H2 with the same span, has a bubble of 0 in the span and 6.8 % in the makespan."""
    timeline = pp.simulate(pp.schedule("zb-h2", 8, 32), Costs(forward=1, input=1, weight=1))
    assert timeline.span == 3 * 32
    assert f"{timeline.bubble:.1%}" == "6.8%"


def test_zb_h1_as_printed_needs_w_no_longer_than_f_and_i():
    """The formula is (p-1)(F+I-W) in arXiv 2401.10241, table 2."""
    for (f, i, w), right in {(3, 3, 2): True, (2, 3, 3): False, (4, 1, 3): False}.items():
        timeline = pp.simulate(pp.schedule("zb-h1", 4, 8), Costs(forward=f, input=i, weight=w))
        assert (timeline.idle[0] == 3 * (f + i - w)) is right


@pytest.mark.parametrize("p", [2, 4, 8])
def test_latency_delays_all_microbatches_of_1f1b_but_only_the_first_of_zb_h1(p):
    """In p microbatches, 1F1B waits for all messages but one in each direction; ZB-H1 runs a W meanwhile."""

    def lost(name, m):
        slow, fast = (theory.makespan(name, p, m, Costs(latency=c)).value for c in (Fraction(1, 4), 0))
        return slow - fast

    assert lost("1f1b", 1 + 2 * p) - lost("1f1b", 1 + p) == 2 * (p - 1) * Fraction(1, 4)
    assert lost("zb-h1", 1 + 2 * p) == lost("zb-h1", 1 + p) == 4 * (p - 1) * Fraction(1, 4)


@pytest.mark.parametrize(("name", "most"), [("zb-h1", Fraction(1)), ("zb-h2", Fraction(5, 2))])
def test_zero_bubble_hides_messages_up_to_a_length(name, most):
    """ZB-H1 hides messages behind a W of 2, ZB-H2 behind half of F + I = 5. No formula is known for longer messages."""
    for latency, right in ((most, True), (most + Fraction(1, 100), False)):
        costs = Costs(forward=2, input=3, weight=2, latency=latency)
        assert (known("span", name, 4, 16, costs, {}) is not None) is right
