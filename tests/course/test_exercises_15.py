"""The exercises of lesson 15: right and wrong partitions of a V, and plans."""

from itertools import combinations_with_replacement, pairwise

import pytest
from answers import test_wrong_answers_are_refused_with_the_reason  # noqa: F401

import ppedu as pp
from ppedu.course.exercises import find_fault
from ppedu.course.exercises.lesson_15 import CASES, TIMES, least_busiest, ranks_of_v


def every(times, ranks):
    """Yield all ways to cut `times` into stages, as numbers of pieces."""
    for inner in combinations_with_replacement(range(len(times) + 1), 2 * ranks - 1):
        yield [after - before for before, after in pairwise([0, *inner, len(times)])]


def busiest(lengths, times):
    return max(ranks_of_v(lengths, times))


@pytest.mark.parametrize(("times", "ranks"), [case for case in CASES if len(case[0]) <= 9])
def test_the_least_is_that_of_all_partitions(times, ranks):
    assert least_busiest(times, ranks) == pytest.approx(min(busiest(each, times) for each in every(times, ranks)))


def test_the_lessons_busiest_rank_has_five_layers():
    """Eight ranks have 30 layers left beside rank 0's, which has the head: some rank has five."""
    assert least_busiest(TIMES, 8) == 60


def test_sharing_only_the_head_would_not_help_but_sharing_stages_in_pairs_does():
    *layers, head = TIMES[1:]

    def most_layers(limit, own):
        return [int((limit - each) // layers[0]) for each in own]

    under = 60 - 1e-6  # the two ranks that share the head have three layers, the others four: 30 of 32
    assert sum(most_layers(under, [head / 2] * 2 + [0] * 6)) == 30 < len(layers)
    # DualPipe's cut in the lesson: rank 1 has stages of four and five layers, each for half of the microbatches.
    best = pp.plan(
        pp.Model.measured(TIMES, unit="ms"), pp.Machine(1e9, latency=0.5), 8, 32, replicas=2, schedules=["dualpipe"]
    ).best
    busiest = [best.step_time - idle for idle in best.timeline().idle]
    assert max(busiest) == pytest.approx(32 * 3 * 4.5 * 12)
    assert sorted(len(best.partition[stage]) for stage in best.schedule.placement.stages_of(1)) == [4, 5]


def test_the_last_rank_of_zb_h1_keeps_eight_microbatches():
    last = {name: pp.simulate(pp.schedule(name, 8, 32)).peak_activations[-1] for name in ("1f1b", "zb-h1")}
    assert last == {"1f1b": 1, "zb-h1": 8}


def equal(times, ranks):
    stages = 2 * ranks
    return [len(times) * (stage + 1) // stages - len(times) * stage // stages for stage in range(stages)]


def by_stage(times, ranks):
    return (
        [len(each) for each in pp.partition.by_cost(times, 2 * ranks)]
        if len(times) >= 2 * ranks
        else equal(times, ranks)
    )


WRONG = {
    "15.2": {
        "equal stages": (equal, "rank 0 works 65.5 on each microbatch, with 2 pieces in stage 0 and 3 in stage 15"),
        "even stages, by cost": (by_stage, "You balanced the stages, not the ranks"),
        "a stage for each rank": (lambda times, ranks: [1] * ranks, "there are two on each rank"),
        "pieces that are lost": (lambda times, ranks: [1] * (2 * ranks), "the model has 34"),
        "nothing": (lambda times, ranks: None, "is a return missing?"),
        "times": (lambda times, ranks: [sum(times) / ranks / 2] * (2 * ranks), "the number of pieces in each stage"),
        "an error": (lambda times, ranks: times[99], "IndexError"),
    }
}


def test_plans():
    times = [1, 2, 2, 3]

    def plan(ranks, microbatches, *schedules):
        model, machine = pp.Model.measured(times, unit="ms"), pp.Machine(1e9)
        return pp.plan(model, machine, ranks, microbatches, schedules=[*schedules])

    mine = plan(2, 4, "1f1b", "zb-h1")
    assert find_fault("15.1", mine) is None
    assert "one rank is not a pipeline" in find_fault("15.1", plan(1, 4, "1f1b", "gpipe"))
    assert "1f1b is the only schedule of your plan that fits" in find_fault("15.1", plan(2, 4, "1f1b"))
    # A step takes 3 · (8 + 3), of which a rank works for 2 · 3 · 8 / 4 on average.
    assert f"ranks wait for {1 - 12 / 33:.0%} of a step" in find_fault("15.1", plan(4, 2, "1f1b", "gpipe"))
    lessons = pp.plan(pp.Model.measured(TIMES), pp.Machine(1e9), 2, 4, schedules=["1f1b"])
    assert "that's the lesson's model" in find_fault("15.1", lessons)
    llama = pp.Model(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128_256)
    lessons = pp.plan(llama, "h100", 4, 16, sequence=4096, schedules=["1f1b"])
    assert "that's the lesson's model" in find_fault("15.1", lessons)
    assert find_fault("15.1", pp.plan(llama, "a100", 4, 16, sequence=4096, schedules=["1f1b", "zb-h1"])) is None
    assert "give a plan" in find_fault("15.1", mine.best)
