"""The atlas: each entry is replayed; known optima are in it; its proofs fit together."""

import runpy
from collections import defaultdict
from pathlib import Path

import pytest

import ppedu as pp
from ppedu.search.atlas import MOST_RANKS, PLACEMENTS, entries, placement_of
from ppedu.zoo.registry import options_of


def test_each_entry_is_legal_fits_and_takes_as_long_as_it_says():
    for entry in entries():
        schedule = entry.schedule
        assert pp.check(schedule) == [], entry
        timeline = pp.simulate(schedule, entry.costs)
        assert timeline.makespan == entry.makespan and max(timeline.peak_activations) <= entry.memory, entry
        assert entry.bound <= entry.makespan


def test_there_is_an_entry_for_each_size_and_memory():
    found = {entry.key for entry in entries()}
    assert len(found) == len(entries())
    for name, kind in PLACEMENTS.items():
        for ranks in range(2, MOST_RANKS + 1):
            for microbatches in range(2, kind.most + 1):
                memories = sorted(key[3] for key in found if key[:3] == (name, ranks, microbatches))
                assert memories == [*range(kind.parts, memories[-1] + 1)]


def test_more_memory_is_never_slower_and_more_microbatches_never_faster():
    for entry in entries():
        name, ranks, microbatches, memory = entry.key
        if memory > PLACEMENTS[name].parts:
            before = pp.search.atlas(ranks, microbatches, memory - 1, name)
            assert entry.makespan <= before.makespan and entry.bound <= before.makespan
        if microbatches < PLACEMENTS[name].most:
            assert entry.bound <= pp.search.atlas(ranks, microbatches + 1, memory, name).makespan


def test_no_published_schedule_is_below_a_bound():
    sizes = defaultdict(list)
    for entry in entries():
        sizes[entry.key[:3]].append(entry)
    for (name, ranks, microbatches), some in sizes.items():
        place = placement_of(name, ranks, microbatches)
        for published in pp.schedules():
            options = {"slices": place.slices} if "slices" in options_of(published) else {}
            try:
                schedule = pp.schedule(published, ranks, microbatches, **options)
            except pp.SettingError:
                continue
            if (
                schedule.updated
                or schedule.offloaded
                or (schedule.recomputed and not PLACEMENTS[name].recompute)
                or schedule.placement.holders != place.holders
                or schedule.slices != place.slices
                or any(each.parts for order in schedule.orders for each in order)
            ):
                continue
            timeline = pp.simulate(schedule, some[0].costs)
            for entry in some:
                if max(timeline.peak_activations) <= entry.memory:
                    assert timeline.makespan >= entry.bound, (published, entry)


KNOWN = {  # placement, ranks, microbatches: by memory
    ("line", 4, 8): {1: 72, 2: 41, 3: 31, 4: 27},
    ("v", 4, 4): {4: 35, 5: 32, 6: 29, 7: 28, 8: 27},
    ("v", 4, 6): {4: 47, 5: 44, 6: 41, 7: 40, 8: 39},
}


@pytest.mark.parametrize("size", KNOWN)
def test_known_optima(size):
    name, ranks, microbatches = size
    for memory, makespan in KNOWN[size].items():
        entry = pp.search.atlas(ranks, microbatches, memory, name)
        assert (entry.makespan, entry.status) == (makespan, "optimal") and len(entry.proofs) == 2


def test_the_file_is_what_its_entries_write():
    root = Path(__file__).parents[2]
    tool = runpy.run_path(str(root / "tools/atlas.py"))
    assert tool["written"](reversed(entries())) == (root / "ppedu/search/atlas.txt").read_text()
    assert all(tool["rows_of"](entry.schedule) == entry.rows for entry in entries())


def test_more_memory_than_helps_gives_the_last_entry():
    assert pp.search.atlas(4, 8) == pp.search.atlas(4, 8, 100) == pp.search.atlas(4, 8, 4)
    assert pp.search.atlas(4, 8, 2.9) == pp.search.atlas(4, 8, 2)


def test_what_is_not_there_is_refused():
    with pytest.raises(pp.SettingError, match=r"up to 4 ranks and 12 microbatches, at least 2 of each; got 5 and 8; "):
        pp.search.atlas(5, 8)
    with pytest.raises(pp.SettingError, match=r"placement must be one of 'line', 'loop', 'v', .*'recomputed'; got 'w'"):
        pp.search.atlas(4, 8, placement="w")
    with pytest.raises(pp.SettingError, match="a rank holds at least 2 activations for a microbatch; got 1"):
        pp.search.atlas(4, 8, 1, "v")
    for wrong in (0, float("inf"), "1"):
        with pytest.raises(pp.SettingError, match="memory must be a number above 0"):
            pp.search.atlas(4, 8, wrong)
    with pytest.raises(pp.SettingError, match="placement must be one of"):
        pp.search.atlas(4, 8, placement=["line"])
