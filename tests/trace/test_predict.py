"""Predictions from a run of 1F1B, compared with runs of other schedules on the same machines."""

import json
from dataclasses import replace

import pytest
from kineto import csv_of

import ppedu as pp
from ppedu.course.drawn import DrawnJob
from ppedu.trace.calibrate import calibrate, settled


def load(job, folder):
    return pp.Run.load(csv_of(folder / "run.csv", job))


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "interleaved", "dualpipev", "zb-v"])
@pytest.mark.parametrize("forward", [0.06, (0.06, 0.08, 0.05, 0.1)])
def test_another_schedule(tmp_path, name, forward):
    times = {"noise": 0.03, "latency": 0.002, "overhead": 0.001}
    old = DrawnJob(pp.schedule("1f1b", 4, 8), replicas=1, steps=12, forward=forward, **times)
    schedule = pp.schedule(name, 4, 8)
    parts = schedule.stages // 4
    stages = [forward] * 4 if isinstance(forward, float) else list(forward)
    cut = [time / parts for time in stages for _ in range(parts)]
    backward = [0.12 / parts] * schedule.stages
    new = DrawnJob(schedule, replicas=1, steps=12, forward=cut, backward=backward, seed=9, **times)
    prediction = load(old, tmp_path).predict(schedule)
    measured = load(new, tmp_path)
    truth = measured.timeline().makespan
    assert prediction.makespan == pytest.approx(truth, rel=0.01)
    assert prediction.low < prediction.makespan < prediction.high
    halves, pairs = name in ("zb-h1", "zb-v", "dualpipev"), name == "dualpipev"
    assert len(prediction.assumptions) == (parts > 1) * (1 if forward == 0.06 else 2) + halves + pairs


@pytest.mark.parametrize(
    ("planted", "by"),
    [("variation", 0.3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((None, 0.0), ("pauses", 0.5)))],
)
def test_the_interval_holds_nine_of_ten_steps(tmp_path, planted, by):
    """The first 200 steps predict the other 200, in each of two runs."""
    held = []
    for seed in range(2):
        job = DrawnJob(
            pp.schedule("1f1b", 4, 8),
            replicas=1,
            steps=400,
            noise=0.03,
            latency=0.002,
            planted=planted,
            by=by,
            seed=seed,
        )
        run = load(job, tmp_path)
        prediction = run.only(steps=range(200)).predict("1f1b")
        held += [prediction.low <= run.timeline(step).makespan <= prediction.high for step in range(200, 400)]
    assert 0.85 <= sum(held) / len(held) <= 0.95


def test_messages_that_are_fast_in_some_steps_make_these_fast(tmp_path):
    """For the run's own schedule, the steps that are drawn are those of the run."""
    times = {"replicas": 1, "steps": 10, "noise": 0, "overhead": 0, "tail": ()}
    fast, slow = (list(DrawnJob(pp.schedule("1f1b", 4, 8), latency=each, **times).records()) for each in (0.002, 0.03))
    later = max(record.end for record in fast) + 1
    slow = [each._replace(step=each.step + 10, start=each.start + later, end=each.end + later) for each in slow]
    run = load([*fast, *slow], tmp_path)
    prediction = run.predict("1f1b")
    assert run.warm_up == () and run.timeline(19).makespan > run.timeline(0).makespan + 0.1
    assert prediction.low == pytest.approx(run.timeline(0).makespan, rel=1e-3)
    assert prediction.high == pytest.approx(run.timeline(19).makespan, rel=1e-3)


def test_a_tenth_of_the_actions_is_below_and_a_tenth_above_the_spread():
    """One rank whose 20 forwards take 1 to 20 s: two take less than 3, and two more than 18."""
    schedule, now, row = pp.schedule("gpipe", 1, 20), 0.0, []
    for action in schedule.orders[0]:
        lasts = 1 + 7 * action.microbatch % 20 if action.op == "F" else 1
        row.append(pp.Span(action, now, now + lasts))
        now += lasts
    found = calibrate([pp.Timeline(schedule, (tuple(row),), pp.Costs(unit="s"), "measured")])
    assert found.spread == {"forward": [(3, 18)], "backward": [(1, 1)]} and found.costs.forward == (10.5,)


EMULATED = """
import json, sys
import torch.distributed as dist
import ppedu as pp

dist.init_process_group("gloo")
folder, names = json.loads(sys.argv[1])
for name in names:
    schedule = pp.schedule(name, dist.get_world_size(), 8)
    emulation = pp.run.Emulation(schedule, pp.Costs(0.016, 0.032, latency=0.001, unit="s"))
    timelines = [emulation.step() for _ in range(4)]
    if dist.get_rank() == 0:
        pp.view.save(timelines, f"{folder}/{name}.json")
dist.barrier()
"""


def test_emulated_stages(ranks, tmp_path):
    """On 4 real ranks, whose stages are as a prediction assumes. On quiet cores, it is within 1 %; see `make bench`.

    On busy ones, the runs themselves differ by more.
    """
    names = ["1f1b", "gpipe", "interleaved", "zb-h1", "dualpipev"]
    ranks(EMULATED, 4, json.dumps([str(tmp_path), names]))
    run = pp.Run.load(tmp_path / "1f1b.json")
    for name in names:
        other = pp.Run.load(tmp_path / f"{name}.json")
        truth = min(other.timeline(step).makespan for step in other.steps)
        assert run.predict(name).makespan == pytest.approx(truth, rel=0.15), name


def test_other_microbatches(tmp_path):
    times = {"noise": 0.02, "latency": 0.002, "replicas": 1}
    run = load(DrawnJob(pp.schedule("1f1b", 4, 8), steps=20, **times), tmp_path)
    truth = load(DrawnJob(pp.schedule("1f1b", 4, 16), steps=20, seed=5, **times), tmp_path).timeline().makespan
    prediction = run.predict(pp.schedule("1f1b", 4, 16))
    assert prediction.makespan == pytest.approx(truth, rel=0.01)
    assert prediction.assumptions == ("the 16 microbatches are as large as the run's 8",)


def test_other_layers(tmp_path):
    """A head that takes as long as 3 of 32 layers; layers move from the last stage to the others."""
    times = {"noise": 0.01, "replicas": 1, "steps": 10}

    def job(layers, **more):
        forward = [0.01 * count for count in layers]
        forward[-1] += 0.03
        return DrawnJob(
            pp.schedule("1f1b", 4, 8), forward=forward, backward=[2 * each for each in forward], **times, **more
        )

    run = load(job([8, 8, 8, 8]), tmp_path)
    truth = load(job([9, 9, 8, 6], seed=2), tmp_path).timeline().makespan
    remark = "stage 3 can be cut like the others, though it takes 1.4× as long; if that is its head, give layers=…"
    assert remark in run.predict("interleaved").assumptions and remark not in run.predict("zb-h1").assumptions
    halves = ([8, 8, 8, 8], [4] * 8)
    assert remark not in run.predict("interleaved", layers=halves).assumptions
    prediction = run.predict("1f1b", layers=([8, 8, 8, 8], [9, 9, 8, 6]))
    assert prediction.makespan == pytest.approx(truth, rel=0.01)
    for wrong, match in [
        (([8, 8, 8], [9, 9, 8, 6]), "has 4"),
        (([8, 8, 8, 8], [9, 9, 9, 6]), "are 33"),
        ("8888", "such as"),
        (([8, 8, 8, 8], [9, 9, 15, -1]), "fewer than 0 layers"),
        (([16, 0, 0, 16], [8, 8, 8, 8]), "stage 1 is said to have no layers, and takes 79"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            run.predict("1f1b", layers=wrong)


def test_costs_that_are_given_replace_assumptions(tmp_path):
    run = load(DrawnJob(pp.schedule("1f1b", 4, 8), replicas=1, steps=5, noise=0), tmp_path)
    known = run.costs()
    given = replace(known, weight=tuple(time / 4 for time in known.backward))
    prediction = run.predict("zb-h1", costs=given)
    assert prediction.assumptions == ("the costs that were given",)
    simulated = pp.simulate(pp.schedule("zb-h1", 4, 8), given).makespan
    assert prediction.makespan == pytest.approx(simulated, rel=1e-3)


def test_costs_of_the_new_stages(tmp_path):
    """With what another run showed of its stages, no assumption about them is left."""
    times = {"noise": 0.02, "latency": 0.002, "replicas": 1, "steps": 20}
    run = load(DrawnJob(pp.schedule("1f1b", 4, 8), **times), tmp_path)
    stages = {"forward": [0.01, 0.03] * 4, "backward": [0.05, 0.06] * 4}
    other = load(DrawnJob(pp.schedule("interleaved", 4, 8), seed=3, **stages, **times), tmp_path)
    prediction = run.predict("interleaved", costs=other.costs())
    assert prediction.makespan == pytest.approx(other.timeline().makespan, rel=0.01)
    assert prediction.assumptions == ("the costs that were given",)


def test_wrong_costs(tmp_path):
    run = load(DrawnJob(pp.schedule("1f1b", 4, 8), replicas=1, steps=2), tmp_path)
    with pytest.raises(pp.SettingError, match="costs of 3 stages; the run has 4, and interleaved 8"):
        run.predict("interleaved", costs=pp.Costs([1, 2, 3]))
    with pytest.raises(pp.SettingError, match="costs of 3 stages"):
        run.predict("gpipe", costs=pp.Costs(1, [1, 2, 3]))
    for by_microbatch in ([[0.1] * 8] * 4, min):
        with pytest.raises(pp.SettingError, match="give forward as one time for each stage"):
            run.predict("gpipe", costs=pp.Costs(by_microbatch))
    with pytest.raises(pp.SettingError, match="8 costs for 4 stages"):
        run.predict("1f1b", costs=pp.Costs([1.0] * 8), layers=([8] * 4, [8] * 4))


def test_wrong_questions(tmp_path):
    run = load(DrawnJob(pp.schedule("1f1b", 4, 8), replicas=1, steps=2), tmp_path)
    with pytest.raises(pp.SettingError, match="the run has 4 ranks and 1f1b 2"):
        run.predict(pp.schedule("1f1b", 2, 8))
    with pytest.raises(pp.SettingError, match="unknown schedule"):
        run.predict("2f2b")
    with pytest.raises(pp.SettingError, match="takes a schedule"):
        run.predict(8)
    with pytest.raises(pp.SettingError, match="leave out lower"):
        run.predict(pp.lower(pp.schedule("1f1b", 4, 8)))


@pytest.mark.parametrize(
    ("times", "warmup"),
    [
        ([15, 15, 10, 10, 11, 10, 10, 11, 10], 2),
        ([5, 10, 10, 11, 10, 10], 1),  # shorter, such as a step without its loader
        ([16, 13, 13, 14, 11, 12, 11, 15], 0),  # times that vary all along
        ([10, 10, 10, 10, 15, 15, 15], 0),  # a change after the first third
        ([10.2, 10, 10, 10, 10, 10], 0),  # hardly longer
        ([10], 0),
    ],
)
def test_steps_that_vary_are_not_a_warm_up(times, warmup):
    assert settled(times) == warmup
