"""The tables of docs/optima.md are those of the atlas and of the searches, and its claims hold for all entries."""

import re
from fractions import Fraction
from pathlib import Path

import pytest
from strategies import slow
from test_steady import LEAST

import ppedu as pp
from ppedu.search.atlas import entries

PAGE = (Path(__file__).parents[2] / "docs" / "optima.md").read_text(encoding="utf-8")


def table(head):
    """Return the rows of the table that begins with `head`: a name and the cells after it."""
    lines = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[0], rows[2:]


def test_the_least_memories():
    ranks, rows = table("ranks")
    for place, *numbers in rows:
        assert dict(zip(map(int, ranks), map(int, numbers), strict=True)) == LEAST[place]
    for ranks, least in LEAST["v"].items():
        assert least == (2 * ((ranks + 4) // 3) if ranks > 2 else 3)


@pytest.mark.parametrize("place", ["v", "loop", "recomputed", "slices"])
def test_the_makespans(place):
    head, rows = table(f"{place}, memory")
    counts = [int(cell.removeprefix("m = ")) for cell in head]
    for memory, *cells in rows:
        for count, cell in zip(counts, cells, strict=True):
            entry = pp.search.atlas(4, count, int(memory), place)
            assert cell == f"{entry.makespan}{'' if entry.status == 'optimal' else '?'}"


def test_the_published_vs():
    for entry in entries():
        if entry.placement != "v":
            continue
        ranks, count, memory = entry.key[1:]
        options = {"v-min": {}, "v-half": {}, "zb-v": {}, "v-adaptive": {"memory": Fraction(memory, 2)}}
        for name, option in options.items():
            if name == "zb-v" and 2 * count < 3 * ranks:
                continue
            try:
                timeline = pp.simulate(pp.schedule(name, ranks, count, **option), entry.costs)
            except pp.SettingError:
                assert name == "v-adaptive" and memory < 4
                continue
            needs = memory if name == "v-adaptive" else max(timeline.peak_activations)
            if needs == memory and entry.status == "optimal":
                better = (name, ranks, memory) == ("v-adaptive", 4, 5)
                assert timeline.makespan == entry.makespan + better, (name, entry)


def test_the_schedule_that_is_shown():
    shown = PAGE.partition("takes 44:\n\n```\n")[2].partition("\n```")[0].splitlines()
    entry = pp.search.atlas(4, 6, 5, "v")
    assert tuple(shown) == entry.rows and entry.makespan == 44


def test_what_another_microbatch_costs():
    for place, costs in {"v": {2: 12, 3: 10, 4: 6}, "loop": {2: 14, 3: Fraction(19, 2), 4: 7, 5: 6}}.items():
        for memory, cost in costs.items():
            known = [pp.search.atlas(4, count, memory, place) for count in (4, 6, 8)]
            assert [each.status for each in known] == ["optimal"] * 3
            more = known[-1].makespan - known[0].makespan
            assert more == 4 * cost + ((place, memory) == ("loop", 5))  # 57, where the pattern would give 56


def test_who_recomputes():
    for entry in entries():
        if entry.placement == "recomputed" and entry.ranks == 4 and entry.microbatches > 2 and entry.memory <= 4:
            again = ["R" in row for row in entry.rows]
            assert not again[-1] and again == sorted(again, reverse=True)
            assert any(again) or entry.makespan == pp.search.atlas(*entry.key[1:]).makespan


WHOLE = [("mario", 4, 4, 1), ("seq1f1b", 4, 4, 2)]
WHOLE += slow([("mario", ranks, count, 1) for ranks in (2, 4) for count in (2, 8)] + [("mario", 2, 4, 1)])
WHOLE += slow([("seq1f1b", ranks, count, 2) for ranks in (2, 4) for count in (2, 8)] + [("seq1f1b", 2, 4, 2)])
WHOLE += slow([("seq1f1b", ranks, count, 4) for ranks in (2, 4) for count in (2, 4)])


@pytest.mark.parametrize(("name", "ranks", "count", "slices"), WHOLE)
def test_none_with_whole_backwards_is_faster(name, ranks, count, slices):
    costs = pp.Costs(slices, 2 * slices)
    timeline = pp.simulate(pp.schedule(name, ranks, count, **({"slices": slices} if slices > 1 else {})), costs)
    options = {"slices": slices} if slices > 1 else {"recompute": True, "memory": max(timeline.peak_activations)}
    found = pp.search.optimal(ranks, count, costs, split=False, time_limit=60, **options)
    assert (found.status, found.makespan) == ("optimal", timeline.makespan)


def test_halves_are_faster():
    for entry in entries():
        if entry.ranks in (2, 4) and entry.microbatches in (4, 8) and entry.placement in ("recomputed", "slices"):
            recomputes = entry.placement == "recomputed"
            name, options, less = ("mario", {}, 2) if recomputes else ("seq1f1b", {"slices": 2}, 6)
            timeline = pp.simulate(pp.schedule(name, *entry.key[1:3], **options), entry.costs)
            if max(timeline.peak_activations) == entry.memory:
                saved = less if entry.ranks == 4 else 0 if recomputes else 2
                assert timeline.makespan - entry.makespan == saved, entry
                assert not recomputes or entry.ranks == 2 or timeline.makespan == 4 * entry.microbatches + 6


@pytest.mark.parametrize(("lengths", "room"), [((1, 1), Fraction(1, 2)), *slow([((618, 382), 0)])])
def test_slices_with_attention(lengths, room):
    costs = pp.Costs(2, 4, attention=Fraction(1, 2), lengths=lengths)
    timeline = pp.simulate(pp.schedule("seq1f1b", 4, 4, slices=2), costs)
    memory = max(timeline.peak_activations)
    found = pp.search.optimal(4, 4, costs, memory=memory, split=False, slices=2, time_limit=60)
    assert (found.status, timeline.makespan - found.makespan) == ("optimal", room)
    assert room == 0 or found.makespan == Fraction(157, 4)


def test_the_proofs_are_counted():
    optimal = [each for each in entries() if each.status == "optimal"]
    twice = sum(len(each.proofs) > 1 for each in optimal)
    total = len(entries())
    said = re.search(r"Of (\d+) entries, ([0-9.]+)% are proven to be the best, ([0-9.]+)% twice", PAGE)
    assert said.groups() == (str(total), f"{len(optimal) / total:.1%}"[:-1], f"{twice / total:.1%}"[:-1])
    assert twice / total >= 0.9
