"""Plans with activations on the host, against simulations of their own, replays, and all that could be moved."""

from dataclasses import replace
from itertools import accumulate, combinations
from pathlib import Path

import pytest

import ppedu as pp
from ppedu.planning.choice import Workload, load

ROOT = Path(__file__).parents[2]
HOST = 1e9
EVEN = [0, *[3] * 8, 2]  # forwards: embedding, layers, head
KEPT = [0, *[2e8] * 8, 1e8]


def asked(memory, forward=EVEN, activation=KEPT, **more):
    options = {"ranks": 4, "microbatches": 8, "recompute": False, "host_bandwidth": HOST} | more
    model = pp.Model.measured(forward, activation=activation, message=1e6, weight_memory=0.5)
    return {"model": model, "machine": pp.Machine(memory, latency=0.25), **options}


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "dualpipev", "looped-bfs"])
def test_a_plan_says_what_a_simulation_says(name, tmp_path):
    """Its schedule is remade from what it saves; its times and bytes are sums of the pieces'."""
    free = pp.plan(**asked(1e12, host_bandwidth=None, seconds=0), schedules=[name]).best
    cut = [len(stage) for stage in free.partition]
    question = asked(max(free.memory) * 0.8, partition=cut)
    with pytest.raises(pp.SettingError, match="nothing fits"):
        pp.plan(**question | {"host_bandwidth": None}, schedules=[name])
    plan = pp.plan(**question, schedules=[name])
    choice = next(each for each in plan.choices if each.schedule.offloaded and not each.excess)
    choice.save(tmp_path / "plan.json")
    saved = load(tmp_path / "plan.json")
    made = pp.offload(pp.schedule(name, 4, 8, **saved["options"]), saved["offload"])
    assert made == choice.schedule and choice.name.endswith(", offloading") and "offloading" in str(plan)
    bytes_of, time_of = ([sum(row[piece] for piece in stage) for stage in choice.partition] for row in (KEPT, EVEN))
    copies = [size / HOST for size in bytes_of]
    costs = pp.Costs(time_of, latency=0.25, activation=bytes_of, weight_memory=0.5, offload=copies)
    timeline = pp.simulate(made, costs)
    assert choice.step_time == pytest.approx(timeline.makespan) and choice.bubble == pytest.approx(timeline.bubble)
    held = [kinds["activations"] + kinds["logits"] for kinds in choice.kinds]
    assert held == pytest.approx(timeline.peak_activations)
    assert max(choice.memory) <= question["machine"].memory


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("gpipe", 2, 6), ("interleaved", 2, 4), ("zb-h2", 3, 6)])
def test_no_set_that_fits_is_smaller_or_faster(name, ranks, microbatches):
    """Of all sets of the first rank's activations, which alone are too many."""
    pieces = pp.Model.measured([1, *[3] * 6, 2], activation=[8e8, *[1e8] * 6, 0])
    schedule = pp.schedule(name, ranks, microbatches)
    job = Workload(pieces, pp.Machine(1e12), ranks, 1, host_bandwidth=0.3e9)
    free = job.cutting(schedule, False)
    free.start()
    costs = job.cutting(schedule, False, offload=True).costs(free.best)
    places = [(stage, m) for stage in schedule.placement.stages_of(0) for m in range(microbatches)]
    every = []
    for count in range(len(places) + 1):
        for chosen in combinations(places, count):
            timeline = pp.simulate(pp.offload(schedule, chosen), costs)
            every.append((timeline.peak_activations[0], len(timeline.schedule.offloaded), timeline.makespan))
    answers = set()
    for part in (0.9, 0.8, 0.7, 0.6, 0.4):
        limit = part * free.memory(free.best)[0]
        search = job.cutting(schedule, False, limit=limit, offload=True)
        fits = [(count, time) for peak, count, time in every if peak <= limit]
        assert bool(search.excess(free.best)) is not bool(fits)
        if fits:
            found = search.simulated(free.best)
            answers.add(len(found.schedule.offloaded))
            assert (len(found.schedule.offloaded), found.makespan) == min(fits)
            assert found.makespan == min(time for _, time in fits)
    assert len(answers) > 1


def test_slices_leave_their_keys_and_values():
    """Nor do their gradients go, from the last slice's backward on: against a replay of the plan's times."""
    kv, width, tokens = 2 * 2 * 256, 1024, 32768
    model = pp.Model(6, width, heads=8, kv_heads=2, ffn=2816, vocabulary=320)
    machine = pp.Machine(80e9, flops=400e12, bandwidth=20e9)
    question = {"ranks": 2, "microbatches": 4, "sequence": tokens, "recompute": False, "schedules": ["terapipe"]}
    free = next(each for each in pp.plan(model, machine, **question, partition=[4, 4]).choices if len(each.slices) == 4)
    tight = replace(machine, memory=max(free.memory) * 0.8)
    plan = pp.plan(model, tight, **question, partition=[4, 4], host_bandwidth=100e9)
    choice = next(each for each in plan.choices if len(each.slices) == 4 and each.schedule.offloaded)
    assert not choice.excess
    pieces = model.pieces(tokens).pieces
    for rank, row in enumerate(choice.timeline().rows):
        layers = sum(0 < piece < 7 for piece in choice.partition[rank]) * kv
        each = sum(pieces[piece].activation for piece in choice.partition[rank]) / tokens - layers
        changes = []
        for (_, op, number, _), start, end in row:
            size = choice.slices[number % 4] * each
            if op in "FL":
                changes.append((start, 1, size))
            if op in "BO":
                changes.append((end, 0, -size))
            if op in "OL":
                assert end - start == pytest.approx(size / 100e9)
            if (op, number % 4) in (("F", 0), ("B", 3)):
                changes.append((start, 1, layers * tokens))
            if (op, number % 4) == ("B", 0):
                changes.append((end, 0, -2 * layers * tokens))
        peak = max(accumulate(size for *_, size in sorted(changes)))
        held = choice.kinds[rank]["activations"] + choice.kinds[rank]["logits"]
        assert held == pytest.approx(peak)


# The plans in docs/guide.md; searches for their partitions take minutes.
GUIDE = {
    "activations on the host": ("zb-interleaved", 7, [2, *[3] * 23, 4, 2, 2, 3], {"host_bandwidth": 25e9}),
    "slices": ("slimpipe", 7, [3, 2, 2, *[3] * 25], {}),
    "whole microbatches": ("gis-h", 3, [8, 7, 7, 7, 4, 7, 7, 6, 8, 7, 7, 7], {}),
    "recomputed stages": ("interleaved", 7, [*[3] * 26, 2, 2], {"recompute": True}),
}


def gigabytes_on_the_host(timeline, rank):
    """Return the most that a rank has there at a time, from the start of an O to the end of its L."""
    copies = [span for span in timeline.rows[rank] if span.action.op in ("O", "L")]
    sizes = {span.action.stage: timeline.costs.activation[span.action.stage] for span in copies}
    ends = {span.action[::2]: span.end for span in copies if span.action.op == "L"}
    there = [(span.start, ends[span.action[::2]], sizes[span.action.stage]) for span in copies if span.action.op == "O"]
    return max(sum(size for begin, end, size in there if begin <= now < end) for now, *_ in there)


def test_the_guide_compares_these_plans():
    page = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    asked = {"tensor": 8, "microbatches": 16, "sequence": 131072}

    def best(name, partition=None, ranks=4, **more):
        more = {"recompute": False} | more
        options = {"schedules": [name], "partition": partition, "ranks": ranks, "context": 16 // ranks}
        plans.append(pp.plan("llama-3-70b", "h100", **asked, **options, **more))
        return plans[-1].best

    plans, found = [], {}
    for what, (name, chunks, partition, more) in GUIDE.items():
        found[what] = choice = best(name, partition, **more)
        cut = f", {len(choice.slices)} slices" if choice.slices else ""
        size = f"{max(choice.memory) / 1e9:.1f} GB"
        assert f"| {what}: `{name}`, {chunks} chunks{cut} | {choice.whole:.1f} s | {size} |" in page
        assert choice.schedule.chunks == chunks
    away = found["activations on the host"]
    longer = {what: f"{choice.longer(away):.0%}" for what, choice in found.items()}
    assert (longer["slices"], longer["whole microbatches"]) == ("4%", "16%")
    assert f"works for {away.busiest:.1f} s" in page
    most = max(gigabytes_on_the_host(away.timeline(), rank) for rank in range(4))
    assert f"up to {most:.1f} GB of each GPU there" in page and f"up to {most:.1f} GB at a time" in str(plans[0])
    slow, usual = (best("interleaved", GUIDE["recomputed stages"][2], host_bandwidth=speed) for speed in (12e9, 25e9))
    assert slow.schedule.offloaded and slow.longer(usual) < 0.001
    sliced, far = (
        best("seq1f1b", [6, *[5] * 14, 6], ranks=16),
        best("gis", [2, *[1] * 78, 2], ranks=16, host_bandwidth=25e9),
    )
    assert (len(sliced.slices), f"{far.longer(sliced):.0%}") == (16, "9%") and far.schedule.offloaded
