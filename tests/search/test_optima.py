"""The tables of docs/optima.md are those of the atlas and of the searches, and its claims hold for all entries."""

import re
from fractions import Fraction
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("place", ["v", "loop"])
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


def test_the_proofs_are_counted():
    optimal = [each for each in entries() if each.status == "optimal"]
    twice = sum(len(each.proofs) > 1 for each in optimal)
    total = len(entries())
    said = re.search(r"Of (\d+) entries, ([0-9.]+)% are proven to be the best, ([0-9.]+)% twice", PAGE)
    assert said.groups() == (str(total), f"{len(optimal) / total:.1%}"[:-1], f"{twice / total:.1%}"[:-1])
    assert twice / total >= 0.9
