"""Repeating patterns: proven least memories, and schedules made of them."""

from fractions import Fraction

import pytest

import ppedu as pp

CHUNKS = pp.Costs(2, 4)  # F = I = W = 1 for stages of two a rank

LEAST = {  # by placement and ranks: activations of stages
    "v": {2: 3, 3: 4, 4: 4, 5: 6, 6: 6, 7: 6, 8: 8, 9: 8, 10: 8, 12: 10, 16: 12},
    "loop": {2: 3, 3: 4, 4: 6, 5: 7, 6: 8, 7: 8, 8: 9, 9: 10, 10: 12, 12: 14, 16: 18},
}
SIZES = [(place, ranks) for place, each in LEAST.items() for ranks in each]


@pytest.mark.parametrize(
    ("place", "ranks"), [pytest.param(*size, marks=pytest.mark.slow if size[1] > 4 else []) for size in SIZES]
)
def test_the_least_memory_without_idle_time(place, ranks):
    pattern = pp.search.steady(ranks, CHUNKS, placement=place, chunks=2, time_limit=60)
    assert (pattern.status, pattern.period, 2 * pattern.memory) == ("optimal", 6, LEAST[place][ranks])
    for microbatches in (1, 2 * ranks, 5 * ranks):
        schedule = pattern.schedule(microbatches)
        assert pp.check(schedule) == []
        timeline = pp.simulate(schedule, CHUNKS)
        assert max(timeline.peak_activations) <= pattern.memory
        # Each further microbatch costs one period.
        assert timeline.makespan <= microbatches * 6 + 12 * ranks
    longer = pp.simulate(pattern.schedule(5 * ranks + 10), CHUNKS)
    assert longer.makespan == timeline.makespan + 60
    assert max(longer.peak_activations) == pattern.memory


def test_v_mins_memory_is_the_least_but_for_two_ranks():
    for ranks in range(2, 8):
        published = Fraction((ranks + 4) // 3)
        assert Fraction(LEAST["v"][ranks], 2) == (published if ranks > 2 else Fraction(3, 2))
        assert max(pp.simulate(pp.schedule("v-min", ranks, 3 * ranks)).peak_activations) == published


def test_less_memory_takes_a_longer_period():
    free = pp.search.steady(4, CHUNKS, placement="loop", chunks=2, time_limit=60)
    tight = pp.search.steady(4, CHUNKS, placement="loop", chunks=2, memory=2, time_limit=60)
    assert tight.memory <= 2 < free.memory and tight.period > free.period and tight.status == "optimal"
    timeline = pp.simulate(tight.schedule(20), CHUNKS)
    assert max(timeline.peak_activations) <= 2
    assert pp.simulate(tight.schedule(21), CHUNKS).makespan == timeline.makespan + tight.period


def test_whole_backwards_latency_and_unlike_stages():
    one = pp.search.steady(4, pp.Costs(1, 2), placement="loop", split=False)
    assert one.memory == 4 and one.period == 3  # as 1F1B
    late = pp.search.steady(4, pp.Costs(1, 2, latency=1), placement="loop", split=False)
    assert late.memory > 4
    costs = pp.Costs(forward=[1, 2, 1, 1], input=[1, 2, 1, 1], weight=[1, 2, 1, 1])
    odd = pp.search.steady(4, costs, placement="loop")
    assert odd.period == 6
    assert pp.simulate(odd.schedule(30), costs).makespan == pp.simulate(odd.schedule(29), costs).makespan + 6


def test_memory_in_bytes():
    costs = pp.Costs(2, 4, activation=7e9)
    pattern = pp.search.steady(4, costs, placement="loop", chunks=2, memory=1e30, time_limit=60)
    assert pattern.memory == 3 * 7e9
    assert max(pp.simulate(pattern.schedule(20), costs).peak_activations) == pattern.memory


def test_what_is_not_possible_is_refused():
    with pytest.raises(pp.SettingError, match="a pattern is of one copy of the model"):
        pp.search.steady(4, placement="bidirectional")
    with pytest.raises(pp.SettingError, match="split must be True or False"):
        pp.search.steady(4, split=None)
    with pytest.raises(pp.SettingError, match="too little: a rank holds up to 1 for a single microbatch"):
        pp.search.steady(4, memory=Fraction(1, 2))
    for costs, split in ((pp.Costs(0), True), (pp.Costs(1, [0, 2]), False), (pp.Costs(1, weight=0), True)):
        with pytest.raises(pp.SettingError, match=r"actions that take time, and an [FBW] takes none; give it a small"):
            pp.search.steady(2, costs, placement="loop", split=split)
    with pytest.raises(pp.SettingError, match="time_limit must be a number of seconds above 0"):
        pp.search.steady(4, time_limit=0)
    with pytest.raises(pp.SettingError, match="microbatches must be at least 1"):
        pp.search.steady(2).schedule(0)
