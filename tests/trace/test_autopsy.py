"""The cause that an autopsy names is the one that was planted, and its causes sum to the bubble."""

import random
import re
from collections import Counter, defaultdict
from itertools import count
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto import csv_of
from strategies import often, slow

import ppedu as pp
from ppedu.course.drawn import PLANTED, DrawnJob
from ppedu.course.exercises.finale import Case
from ppedu.trace.records import Record
from ppedu.trace.replay import Measured, by_rank, travels

STRENGTH = {
    "imbalance": (0.4, 1.0),
    "slow worker": (0.4, 1.0),
    "variation": (0.3, 0.5),
    "messages": (0.3, 0.8),
    "pauses": (0.5, 1.5),
}
SEEDS = list(range(200))


def draw(seed, **settings):
    """Return a job with a planted cause, drawn by lot."""
    chance = random.Random(seed)
    planted = PLANTED[(seed + seed // 10) % len(PLANTED)]  # all of them, also in every twentieth seed
    name = chance.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
    ranks = chance.choice([3, 4, 6])
    schedule = pp.schedule(name, ranks, ranks * chance.choice([2, 4]))
    drawn = {
        "replicas": chance.choice([2, 3, 4]),
        "by": chance.uniform(*STRENGTH[planted]),
        "skew": chance.choice([0, 0, 0.02]),
        "warm_up": chance.choice([0, 2]),
    }
    return DrawnJob(schedule, steps=8, planted=planted, seed=seed, **{**drawn, **settings})


def load(job, folder):
    return pp.Run.load(csv_of(folder / "run.csv", job))


@pytest.mark.parametrize("step", [20, *slow([1])])
def test_the_named_cause_is_the_planted_one(tmp_path, step):
    seeds = SEEDS[::step]
    named, warm = Counter(), Counter()
    for seed in seeds:
        job = draw(seed)
        run = load(job, tmp_path)
        autopsy = run.autopsy()
        assert run.schedule.orders == job.schedule.orders
        if job.planted in ("imbalance", "messages", "pauses"):  # or else, steps vary for another reason
            warm[run.warm_up == tuple(range(job.warm_up))] += 1
        worst = max(PLANTED, key=autopsy.saved.__getitem__)
        named[worst == job.planted] += 1
        assert any(finding.cause == job.planted for finding in autopsy.findings)
    assert named[True] >= 0.97 * len(seeds), named
    assert warm[True] >= 0.95 * warm.total(), warm


@pytest.mark.parametrize("seed", range(5))
def test_the_causes_sum_to_the_idle_time_of_the_table(tmp_path, seed):
    job = draw(seed, warm_up=0, skew=0)
    spans = defaultdict(list)
    computed = Counter()
    for record in job.records():
        spans[record.step].append((record.start, record.end))
        computed[record.step] += (record.end - record.start) * (record.action is not None)
    workers = job.replicas * job.schedule.ranks
    length = {step: max(end for _, end in each) - min(start for start, _ in each) for step, each in spans.items()}
    idle = 1 - sum(computed.values()) / workers / sum(length.values())
    autopsy = load(job, tmp_path).autopsy()
    assert autopsy.bubble == pytest.approx(idle, abs=1e-4)
    assert sum(autopsy.causes.values()) == pytest.approx(idle, abs=1e-4)


@pytest.mark.parametrize("always", [False, True])
def test_a_straggler_is_named_with_its_steps(tmp_path, always):
    job = DrawnJob(
        pp.schedule("1f1b", 4, 8), replicas=3, steps=10, planted="slow worker", always=always, by=0.6, seed=3
    )
    chance = random.Random(3)  # as in `DrawnJob.records`
    replica, rank = chance.randrange(3), chance.randrange(4)
    autopsy = load(job, tmp_path).autopsy()
    (straggler,) = autopsy.stragglers
    assert (straggler.replica, straggler.rank) == (replica, rank)
    assert straggler.steps == tuple(range(0 if always else 5, 10))
    assert straggler.factor == pytest.approx(1.6, abs=0.02)
    assert f"rank {rank} of replica {replica} (stage {rank})" in str(autopsy)


@pytest.mark.parametrize("steps", [2, 4])
def test_a_straggler_is_slow_in_two_steps(tmp_path, steps):
    job = DrawnJob(
        pp.schedule("1f1b", 4, 8), replicas=3, steps=steps, planted="slow worker", by=0.6
    )  # in the last half
    slow = [each.steps for each in load(job, tmp_path).autopsy().stragglers]
    assert slow == ([] if steps == 2 else [(2, 3)])


def test_a_slow_worker_is_replayed_and_predicted_by_itself(tmp_path):
    """Costs of one replica from the even steps, for its odd ones; messages and pauses vary, too."""
    job = DrawnJob(pp.schedule("1f1b", 4, 8), steps=40, planted="slow worker", always=True, by=0.5, noise=0.015, seed=6)
    run = load(job, tmp_path)
    for replica in run.replicas:
        costs = run.only(steps=range(0, 40, 2), replicas=[replica]).costs()
        predicted = pp.simulate(run.schedule, costs).makespan
        odd = [run.timeline(step, replica).makespan for step in range(1, 40, 2)]
        assert median(abs(predicted / time - 1) for time in odd) <= 0.013
        replayed = [run.replay(step, replica).makespan for step in range(1, 40, 2)]
        assert median(abs(a / b - 1) for a, b in zip(replayed, odd, strict=True)) <= 0.002


def test_microbatches_of_unlike_length_are_named(tmp_path):
    job = DrawnJob(pp.schedule("1f1b", 4, 8), replicas=1, steps=60, planted="variation", by=0.3, seed=2)
    run = load(job, tmp_path)
    assert median(abs(run.replay(step).makespan / run.timeline(step).makespan - 1) for step in run.steps) <= 0.008
    known = run.only(steps=range(0, 60, 2))
    odd = [run.timeline(step).makespan for step in range(1, 60, 2)]
    prediction = known.predict("1f1b")
    assert median(abs(prediction.makespan / time - 1) for time in odd) <= 0.12
    assert sum(prediction.low <= time <= prediction.high for time in odd) >= 0.85 * len(odd)
    said = str(run.autopsy())
    assert "microbatches vary" in said and "once" not in said


def test_a_single_long_action_is_named():
    case = Case(next(seed for seed in count() if Case.fault(seed).name == "interruptions"))
    runs = [case.run.timeline(step, replica) for step in case.run.steps for replica in case.run.replicas]
    spans = [span for run in runs for row in run.rows for span in row]
    longest = max(spans, key=lambda span: span.end - span.start)
    autopsy = case.run.autopsy()
    assert f"{longest.action} once takes" in str(autopsy)
    assert max(autopsy.saved, key=autopsy.saved.__getitem__) == "variation"  # the stage is not slow


def test_the_time_of_a_pair_counts_once(tmp_path):
    """Four stages, whose forwards take 60 ms and backwards 120 ms, and those of the last half as long again."""
    job = DrawnJob(pp.schedule("dualpipev", 2, 8), replicas=1, planted="imbalance", by=0.5)
    assert sum(len(action.parts) for order in job.schedule.orders for action in order) > 16
    (said,) = (each.sentence for each in load(job, tmp_path).autopsy().findings if each.cause == "imbalance")
    times = [float(time) for time in re.findall(r"([0-9.]+) ms", said)]
    assert len(times) == 2 and 160 < min(times) < max(times) < 290, said


def test_what_even_stages_would_save_is_what_even_stages_take(tmp_path):
    """The oracle is a run that was drawn with even stages of the same sum."""
    schedule = pp.schedule("1f1b", 4, 8)
    long = DrawnJob(schedule, forward=(0.06, 0.06, 0.06, 0.12), backward=(0.12, 0.12, 0.12, 0.24), noise=0, seed=1)
    even = DrawnJob(schedule, forward=0.075, backward=0.15, noise=0, seed=1)
    saved = load(long, tmp_path).autopsy().saved["imbalance"]
    lengths = [load(job, tmp_path).autopsy().step for job in (long, even)]
    assert saved == pytest.approx(1 - lengths[1] / lengths[0], abs=1e-3)


@often(40)
@given(st.integers(0, 10**6))
def test_a_replay_is_the_simulation_with_the_same_times(seed):
    """Two replays that share no code: this package's, and `simulate` with a time for each stage and microbatch."""
    chance = random.Random(seed)
    schedule = pp.schedule(
        chance.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"]), 3, chance.randint(6, 9) // 3 * 3
    )
    times = {
        op: [[chance.randint(1, 9) for _ in range(schedule.microbatches)] for _ in range(schedule.stages)]
        for op in ("F", "B", "I", "W")
    }
    latency = {(a, b): chance.randint(0, 5) for a in range(3) for b in range(3) if a != b}
    costs = pp.Costs(times["F"], times["B"], times["I"], times["W"], latency=latency)
    lasts = [times[op][stage][m] for order in schedule.orders for stage, op, m, _ in order]
    measured = Measured(schedule, lasts, [0] * len(lasts), travels(schedule, costs.delay))
    assert measured.starts() == [span.start for row in pp.simulate(schedule, costs).rows for span in row]


def test_a_report_is_a_page_of_its_own(tmp_path):
    autopsy = load(draw(0), tmp_path).autopsy()
    autopsy.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for finding in autopsy.findings:
        assert finding.sentence.replace("'", "&#x27;") in page
    # Words of XML, and how the script writes a link to a paper.
    assert "https://" not in page.replace("https://www.w3.org", "").replace("https://${", "")
    with pytest.raises(pp.SettingError, match=r"end it in \.html"):
        autopsy.save(tmp_path / "report.pdf")


def test_an_autopsy_of_an_order_that_deadlocks_is_refused(tmp_path):
    """Times that no order allows: rank 0 ends a backward before rank 1 has begun it."""
    lines = ["step,stage,operation,microbatch,start,duration"]
    lines += ["0,0,B,0,0,1", "0,0,F,0,1,1", "0,1,F,0,2,1", "0,1,B,0,3,1"]
    path = tmp_path / "wrong.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(pp.PipelineError, match=r"0B0|contradicts"):
        pp.Run.load(path).autopsy()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_messages_that_are_late_in_every_step_are_not_pauses(tmp_path, name):
    """The second stage starts one forward late, as where a message is sent together with the next one."""
    schedule = pp.schedule(name, 4, 8)
    records = []
    for step in range(6):
        chance = random.Random(step)
        lasts = [0.06 * chance.gauss(1, 0.01) for order in schedule.orders for _ in order]
        waits = travels(schedule, lambda sender, receiver: 0.0004)
        waits[len(schedule.orders[0])] += 0.06  # of the first action of rank 1
        starts = Measured(schedule, lasts, [0.0] * len(lasts), waits).starts()
        for rank, row in enumerate(by_rank(schedule, zip(starts, lasts, strict=True))):
            for action, (start, time) in zip(schedule.orders[rank], row, strict=True):
                records.append(Record(step, 0, rank, action, str(action), 3 * step + start, 3 * step + start + time))
    autopsy = load(records, tmp_path).autopsy()
    assert abs(autopsy.causes["pauses"]) < 0.005 and autopsy.causes["messages"] > 0.03
    finding = next(each.sentence for each in autopsy.findings if each.cause == "messages")
    assert finding.startswith("a message from rank 0 to rank 1 takes")
