"""Pairs braided from their parts: against a search tick by tick, and what it says about published layers."""

import re
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu import Costs, SettingError, simulate

WHERE = ["compute", "network", "weight"]
times = st.integers(1, 3)
forwards = st.lists(st.tuples(st.just("f"), times, st.sampled_from(WHERE[:2])), max_size=4)
backwards = st.lists(st.tuples(st.just("b"), times, st.sampled_from(WHERE)), max_size=5)


def fewest_ticks(*halves):
    """Return the length of the shortest run, found by trying everything in each tick, waiting included."""
    parts = [(half, *part[1:]) for half, chain in enumerate(halves) for part in chain]

    def may_start(left, part):
        half, time, _ = parts[part]
        earlier = [left[each] for each, (of, _, on) in enumerate(parts[:part]) if of == half and on != "weight"]
        return left[part] == time and not any(earlier)

    states, ticks = {(tuple(time for _, time, _ in parts), None, None)}, 0
    while not any(sum(left) == 0 for left, *_ in states):
        reached = set()
        for left, *running in states:
            options = []
            for resource, part in enumerate(running):
                here = [each for each, (*_, on) in enumerate(parts) if (on == "network") == resource]
                free = [None, *(each for each in here if may_start(left, each))]
                options.append(free if part is None else [part])
            for busy in product(*options):
                after = tuple(time - (part in busy) for part, time in enumerate(left))
                reached.add((after, *(part if part is not None and after[part] else None for part in busy)))
        states, ticks = reached, ticks + 1
    return ticks


# The order that is ahead on both resources after three parts is not the best.
@example([("f", 4, "compute"), ("f", 1, "network"), ("f", 4, "compute")],
         [("b", 4, "compute"), ("b", 3, "compute"), ("b", 3, "network")])  # fmt: skip
@given(forwards, backwards)
@often(60)
def test_no_order_is_faster(forward, backward):
    found = pp.braid(forward, backward)
    assert found.times["overlap"] == fewest_ticks(forward, backward)
    assert found.times["forward"] == fewest_ticks(forward) and found.times["backward"] == fewest_ticks(backward)
    chain = [part for part in backward if part[2] != "weight"]
    if chain != backward:
        assert found.times["input"] == fewest_ticks(chain) == sum(time for _, time, _ in chain)
        assert found.times["overlap_input"] == fewest_ticks(forward, chain)
    rows = {"compute": [], "network": []}
    for half, parts in (("F", forward), ("B", backward)):
        ready = 0
        for (name, time, where), (named, on, start, end) in zip(parts, found.spans[half], strict=True):
            assert (named, on, end) == (name, "network" if where == "network" else "compute", start + time)
            assert start >= ready
            ready = ready if where == "weight" else end
            rows[on].append((start, end))
    for row in rows.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(row)))


FORWARD = [("attention", 1), ("dispatch", 1, "network"), ("experts", 1), ("combine", 1, "network")]
BACKWARD = [("combine", 1, "network"), ("experts", 2), ("dispatch", 1, "network"), ("attention", 2)]


def test_the_pairs_of_the_docs():
    """docs/experts.md: messages of B that take twice as long, a pair as long as B. Lesson 12: 2 instead of 3."""
    doubled = [(name, 2, *where) for name, _, *where in BACKWARD]
    assert pp.braid(FORWARD, doubled).times == {"forward": 4, "backward": 8, "overlap": 8}
    exact = [[(name, Fraction(time, 4), *where) for name, time, *where in half] for half in (FORWARD, doubled)]
    assert list(pp.braid(*exact).times.values()) == [1, 2, 2]
    page = (Path(__file__).parents[2] / "docs/experts.md").read_text(encoding="utf-8")
    program, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    names = {"pp": pp, "print": lambda pair: printed == f"{pair}\n" or pytest.fail(str(pair))}
    exec(program, names)
    assert (names["forward"], names["backward"]) == (FORWARD, BACKWARD)


def test_combined_1f1b_hides_all_messages_of_a_layer_of_experts():
    """Messages take as long as F's computing (arXiv 2412.19437, §3.2.1): 4 of the 10 units of a microbatch travel.

    Pairs hide these 4, in all but the warm-up and the cooldown.
    """
    costs = Costs(**pp.braid(FORWARD, BACKWARD).costs())
    alone, pairs = (simulate(pp.schedule(name, 8, 32), costs).makespan for name in ("1f1b", "1f1b-overlap"))
    assert (alone, pairs) == ((8 + 31) * 10, 8 * 10 + 31 * 6)
    silent = Costs(forward=2, backward=4)
    assert simulate(pp.schedule("1f1b", 8, 32), silent).makespan == (8 + 31) * 6


def test_a_pair_with_i_has_its_own_time():
    order = "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0I1)OVERLAP_F_B 0W1 0B2"
    schedule = pp.Schedule("pairs", pp.Placement.make("loop", 1), 3, [order.split()])
    both = simulate(schedule, Costs(overlap=Fraction(5, 2), overlap_input=Fraction(3, 2)))
    assert both.makespan == 1 + Fraction(5, 2) + Fraction(3, 2) + 1 + 2
    assert Costs.fit(both).overlap_input == (Fraction(3, 2),)
    assert simulate(schedule, Costs(overlap=Fraction(5, 2))).makespan == 1 + Fraction(5, 2) * 2 + 1 + 2
    assert simulate(schedule, Costs(overlap_input=Fraction(3, 2))).makespan == 1 + 3 + Fraction(3, 2) + 1 + 2


WRONG = [
    ([("attention", -1)], [], "the time of 'attention' must be a number of at least 0; got -1"),
    ([("attention", 1, "link")], [], "the place of 'attention' must be one of 'compute', 'network', 'weight'"),
    (3, [], "forward must be a list of parts, such as .*; got 3"),
    ([], [("attention",)], "backward must be a list of parts, such as "),
    ([("attention", 1)] * 24, [("attention", 1)], "the number of parts, such as those of a layer, must be at most 24"),
]


@pytest.mark.parametrize(("forward", "backward", "message"), WRONG)
def test_wrong_parts_are_named(forward, backward, message):
    with pytest.raises(SettingError, match=message):
        pp.braid(forward, backward)
