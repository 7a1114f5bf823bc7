"""Traces as they come: merged, renamed, cut, repeated, of CUDA graphs, of replicas. The oracle is the drawn run."""

import json
import random
import re
from functools import partial
from itertools import pairwise

import pytest
from kineto import START, by_rank, csv_of, drawn, event, events_of, files_of, kineto, shuffled

import ppedu as pp


def assert_is(run, job, steps=None):
    """Check that a run has the schedule and the times of a job."""
    assert run.schedule.orders == job.schedule.orders
    assert run.replicas == tuple(range(job.replicas))
    expected = {}
    for (replica, rank), records in by_rank(job).items():
        for record in records:
            if record.action:
                expected[record.step, replica, rank, record.action] = record.start, record.end
    kept = range(job.steps) if steps is None else steps
    assert len(run.steps) == len(kept)
    zero = min(expected[key][0] for key in expected if key[0] == kept[0])
    first = min(
        span.start for replica in run.replicas for row in run.timeline(run.steps[0], replica).rows for span in row
    )
    for step, number in zip(run.steps, kept, strict=True):
        for replica in run.replicas:
            for rank, row in enumerate(run.timeline(step, replica).rows):
                for action, start, end in row:
                    known = expected[number, replica, rank, action]
                    assert (start - first, end - first) == pytest.approx([time - zero for time in known], abs=2e-5)


def merged(folder, job, pid=lambda replica, rank: rank, **how):
    """Write one trace of all ranks, and return its file."""
    ranks = by_rank(job).items()
    events = [each for (replica, rank), records in ranks for each in events_of(records, pid(replica, rank), **how)]
    return kineto(folder / "all.json", None, shuffled(events))


STEPS = {"forward_step": "F", "backward_step": "B"}


def called_step(record):
    return "forward_step" if record.action.op == "F" else "backward_step"


def as_gpipe(record):
    return f"{'Forward' if record.action.op == 'F' else 'Backward'} {record.action.microbatch}"


@pytest.mark.parametrize("device", ["cuda_runtime", "cuda_driver", "xpu_runtime", "Runtime"])
@pytest.mark.parametrize("lead", [1e-4, 0.5])
def test_all_kernels_of_a_graph_count(tmp_path, device, lead):
    """Also if the host is half a second ahead of the device."""
    job = drawn()
    assert_is(pp.Run.load(files_of(tmp_path, job, device=device, lead=lead)), job)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("lead", [0.002, 0.5])
def test_actions_that_launch_nothing_keep_their_place(tmp_path, name, lead):
    """In torch, the first stage's I does nothing, and its W runs the whole backward."""
    job = drawn(name, 4, 8)
    nothing = lambda record: record.action.op == "I" and record.action.stage == 0  # noqa: E731
    run = pp.Run.load(files_of(tmp_path, job, device="cuda_runtime", lead=lead, idle=nothing))
    assert run.schedule.orders == job.schedule.orders and not run.remarks
    costs = run.costs()
    assert costs.input[0] == pytest.approx(0, abs=1e-6) and costs.weight[0] == pytest.approx(0.06, rel=0.1)


def test_kernels_without_launches_are_refused(tmp_path):
    files = files_of(tmp_path, drawn(), device="cuda_runtime")
    for file in files:
        file.write_text(file.read_text().replace('"cuda_runtime"', '"lost"'))
    with pytest.raises(
        pp.ParseError, match="does not say what launched its kernels; profile the CPU's activities, too"
    ):
        pp.Run.load(files)


@pytest.mark.parametrize("device", ["", "cuda_runtime"])
@pytest.mark.parametrize("lead", [0.01, 1.5])
def test_time_outside_the_pipeline_is_its_own(tmp_path, device, lead):
    """NCCL's kernels count there; what the host does ahead of the device, and ranges around whole steps, do not."""
    job = drawn("1f1b", 4, 8, tail=(("all_reduce_gradients", 0.4),))
    known = pp.Run.load(csv_of(tmp_path / "x.csv", job)).autopsy()
    files = files_of(tmp_path, job, device=device, lead=lead)
    for file in files:
        trace = json.loads(file.read_text())
        marked = [each for each in trace["traceEvents"] if each["cat"] == "user_annotation"]
        ranges = [each for each in marked if each["name"].startswith("PP:")]
        first, last = min(each["ts"] for each in ranges), max(each["ts"] for each in ranges)
        events = [event("run_training_epoch", first - 99, last - first + 2e6)]
        starts = [*sorted(each["ts"] - 50 for each in ranges if each["name"].endswith("F0")), last + 9e5]
        for step, (start, end) in enumerate(pairwise(starts)):
            events += [
                event(f"ProfilerStep#{step}", start, end - start - 5),
                event("enumerate(DataLoader)", start + 5, 30),
            ]
        trace["traceEvents"] += events
        file.write_text(json.dumps(trace))
    causes = pp.Run.load(files).autopsy().causes
    assert causes["tail"] == pytest.approx(known.causes["tail"], abs=0.002) and causes["tail"] > 0.1


@pytest.mark.parametrize("lost", [1, -1, 4])
def test_ranks_that_begin_to_record_in_unlike_steps(tmp_path, lost):
    """With equal numbers of steps, but not the same ones; and clocks that are right, or seconds apart."""
    job = drawn("1f1b", 4, 8, steps=8 + abs(lost))

    def recorded(rank, records, apart):
        early = (rank == 1) == (lost < 0)
        kept = [each for each in records if (each.step < 8 if early else each.step >= abs(lost))]
        shift = apart * (rank == 1)
        return [each._replace(start=each.start + shift, end=each.end + shift) for each in kept]

    for apart in (0.0, 7.7):
        run = pp.Run.load(files_of(tmp_path, job, partial(recorded, apart=apart)))
        assert_is(run, job, steps=range(abs(lost), 8))
        assert any("recorded" in remark for remark in run.remarks)


def without_first(count, ranks, rank, records):
    return records[count:] if rank in ranks else records


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("cut", range(4))
def test_a_trace_without_numbers_may_begin_within_a_step(tmp_path, name, cut):
    """The first actions of one rank, or of all, are lost."""
    job = drawn(name, 4, 8)
    for ranks in ([cut], range(4)):
        files = files_of(tmp_path, job, partial(without_first, 1 + cut, ranks), called=called_step)
        run = pp.Run.load(files, names=STEPS)
        assert_is(run, job, steps=[1, 2])
        assert run.remarks[0] == "microbatches have no numbers, and were counted in the order in which they ran"


def test_a_profilers_step_may_hold_two_steps(tmp_path):
    job = drawn("1f1b", 4, 8, steps=4)
    records = [record._replace(step=record.step // 2) for record in job.records()]
    run = pp.Run.load(csv_of(tmp_path / "x.csv", records))
    assert_is(run, job)
    assert "holds several steps of the pipeline" in run.remarks[0]


def test_halves_of_backwards_may_be_called_b_and_w(tmp_path):
    """As in the papers on zero bubbles, where B is the half for the input."""
    job = drawn("zb-h1", 4, 8)
    path = csv_of(tmp_path / "x.csv", job.records())
    path.write_text(re.sub(r"(\d)I(\d)", r"\1B\2", path.read_text()))
    assert_is(pp.Run.load(path), job)


def test_a_table_may_number_the_ranks_of_all_replicas(tmp_path):
    job = drawn("1f1b", 2, 4, replicas=2)
    lines = ["step,rank,stage,operation,microbatch,start,duration"]
    for (replica, rank), records in by_rank(job).items():
        for step, _, _, action, _, start, end in records:
            lines.append(f"{step},{2 * replica + rank},{rank},{action.op},{action.microbatch},{start},{end - start}")
    (tmp_path / "x.csv").write_text("\n".join(lines))
    assert_is(pp.Run.load(tmp_path / "x.csv"), job)


@pytest.mark.parametrize("tensor", [1, 2])
def test_megatrons_process_groups(tmp_path, tensor):
    """Several groups have the same ranks; one named after everything is more than a pipeline."""
    job = drawn("1f1b", 2, 4, replicas=2 * tensor)

    def number(replica, rank):
        data, part = divmod(replica, tensor)
        return (rank * 2 + data) * tensor + part

    def groups(replica, rank):
        peers = range(replica // tensor * tensor, (replica // tensor + 1) * tensor)  # of the tensor group
        pipeline = [number(replica, stage) for stage in (0, 1)]
        model = sorted(number(each, stage) for stage in (0, 1) for each in peers)
        return [
            {"pg_desc": "default_pg", "pg_size": 4 * tensor, "ranks": []},
            {"pg_desc": "MODEL_PARALLEL_GROUP", "ranks": model},
            {"pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": pipeline},
            {"pg_desc": "EMBEDDING_GROUP", "ranks": pipeline},
            {"pg_desc": "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "ranks": model},
        ]

    files = files_of(tmp_path, job, told=number, groups=groups, called=called_step)
    assert_is(pp.Run.load(files, names=STEPS), job)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v", "dualpipe"])
def test_a_merged_file_has_a_rank_for_each_process(tmp_path, name):
    job = drawn(name, 4, 8)
    assert_is(pp.Run.load(merged(tmp_path, job, lambda replica, rank: 4711 - rank)), job)


def test_replicas_in_a_merged_file_are_told_apart(tmp_path):
    job = drawn("1f1b", 4, 8, replicas=3, noise=0.02)
    assert_is(pp.Run.load(merged(tmp_path, job, lambda replica, rank: 1000 * replica + rank)), job)


def test_a_merged_file_of_gpus_is_refused(tmp_path):
    file = merged(tmp_path, drawn(), device="cuda_runtime")
    with pytest.raises(
        pp.ParseError, match="holds 2 processes, and does not say which kernel is whose; give a file for"
    ):
        pp.Run.load(file)


@pytest.mark.parametrize("outer", ["replica", "pipeline"])
def test_replicas_of_torchs_gpipe_are_found_by_their_process_groups(tmp_path, outer):
    """Its ranges do not name the stage, so a global rank is not one."""
    job = drawn("gpipe", 2, 4, replicas=2)
    number = {
        (replica, rank): 2 * replica + rank if outer == "replica" else 2 * rank + replica
        for replica in (0, 1)
        for rank in (0, 1)
    }

    def groups(replica, rank, names=("default_pg", "mesh_dp", "mesh_pp")):
        data = sorted(number[each, rank] for each in (0, 1))
        pipeline = sorted(number[replica, each] for each in (0, 1))
        return [
            {"pg_desc": name, "ranks": each} for name, each in zip(names, ([0, 1, 2, 3], data, pipeline), strict=True)
        ]

    how = {"told": lambda *key: number[key], "called": as_gpipe}
    files = files_of(tmp_path, job, groups=groups, **how)
    nameless = partial(groups, names=["undefined"] * 3)
    unnamed = files_of(tmp_path, job, named="unnamed{}.{}.json", groups=nameless, **how)
    assert_is(pp.Run.load(files), job)
    with pytest.raises(
        pp.ParseError, match=r"does not say which of its process groups is the pipeline.*\{\(replica, rank\): file\}"
    ):
        pp.Run.load(unnamed)
    assert_is(pp.Run.load(dict(zip(number, unnamed, strict=True))), job)


NAMES = [
    "rank-{1}.Apr_03_12_00.pt.trace.json",
    "worker_{1}.1712134567890.pt.trace.json",
    "r{1}/trace.json",
    "rank{1}/host_123.json.gz",
    "node7_{1}_17.json",
    "trace.{1}.json",
    "{1}-at-17{1}.json",  # both numbers tell the files apart, and one of them counts
]


@pytest.mark.parametrize("name", NAMES)
def test_the_rank_is_found_in_the_name(tmp_path, name):
    job = drawn("gpipe", 3, 4)
    files = files_of(tmp_path, job, named=name, told=lambda *_: None, called=as_gpipe)
    for given in (files, files[::-1], tmp_path, dict(enumerate(files))):
        assert_is(pp.Run.load(given), job)


def test_a_dict_says_what_names_do_not(tmp_path):
    job = drawn("gpipe", 2, 4)
    files = [
        kineto(tmp_path / name, None, list(events_of(each, called=as_gpipe)))
        for name, each in zip(("beta.json", "alpha.json"), by_rank(job).values(), strict=True)
    ]
    with pytest.raises(pp.ParseError, match=r"does not say of which rank it is, and nor does its name; give a dict"):
        pp.Run.load(files)
    assert_is(pp.Run.load(dict(enumerate(files))), job)
    for wrong in ({"0": files[0]}, {-1: files[0]}, {(0, 1, 2): files[0]}, {0: None}, {}, tmp_path / "none"):
        with pytest.raises(pp.PipelineError):
            pp.Run.load(wrong)


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("gpipe", 2), ("1f1b", 1)])
@pytest.mark.parametrize("labelled", [False, True])
def test_names_of_ones_own_are_mapped(tmp_path, name, ranks, labelled):
    """Without a stage or a microbatch, as in Megatron's forward_step: both are found from the order."""
    job = drawn(name, ranks, 8)

    def labels(rank, records):
        for step in range(job.steps if labelled else 0):
            mine = [record for record in records if record.step == step]
            begin, end = START + 1e6 * (mine[0].start - 0.0005), START + 1e6 * (mine[-1].end + 0.0001)
            yield event(f"ProfilerStep#{step + 7}", begin, end - begin)

    files = files_of(tmp_path, job, told=lambda *_: None, more=labels, called=called_step)
    if (name, ranks, labelled) == ("1f1b", 1, False):
        return  # a rank alone has nothing in flight after each microbatch
    run = pp.Run.load(files, names=STEPS)
    assert_is(run, job)
    assert run.steps == tuple(range(7, 7 + job.steps) if labelled else range(job.steps))
    with pytest.raises(pp.ParseError, match=r"its ranges are 'backward_step', 'forward_step'.*names=\{'forward_step'"):
        pp.Run.load(files)


def test_names_may_contain_the_numbers(tmp_path):
    job = drawn("zb-v", 2, 4)

    def called(record):
        return f"{record.action.op}(mb={record.action.microbatch}, layer group {record.action.stage})"

    files = files_of(tmp_path, job, called=called)
    assert_is(pp.Run.load(files, names={r"([FBIW])\(mb=(\d+), layer group (\d+)\)": r"\3\1\2"}), job)
    for wrong in ({"(": "F"}, {"a": r"\1"}, {1: "F"}, {"a": 1}, ["a"], "a"):
        with pytest.raises(pp.SettingError, match="names"):
            pp.Run.load(files, names=wrong)


def test_a_table_of_nvtx_ranges(tmp_path):
    """As `nsys stats --report nvtx_pushpop_trace --format csv` prints it."""
    job = drawn("1f1b", 4, 8)
    lines = ["Start (ns),End (ns),Duration (ns),Name,PID,TID,Lvl"]
    for (_, rank), records in by_rank(job).items():
        for record in records:
            start, end = (round(1e9 * time) + 10**12 for time in (record.start, record.end))
            lines.append(f'{start},{end},{end - start},":{called_step(record)}",{900 - rank},{rank},0')
    path = tmp_path / "nvtx.csv"
    path.write_text("\n".join(shuffled(lines[:1]) + shuffled(lines[1:])))
    assert_is(pp.Run.load(path, names={":forward_step": "F", ":backward_step": "B"}), job)


def test_a_trace_that_begins_and_ends_within_a_step(tmp_path):
    job = drawn("1f1b", 4, 8, steps=4)
    run = pp.Run.load(files_of(tmp_path, job, lambda rank, records: records[5 + rank : len(records) - 3]))
    assert_is(run, job, steps=[1, 2])
    assert any("incomplete step" in remark for remark in run.remarks)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_with_fewer_steps(tmp_path, lost):
    """Steps are matched by time."""
    job = drawn("1f1b", 3, 4)

    def kept(rank, records):
        return [record for record in records if rank != 1 or record.step != lost]

    run = pp.Run.load(files_of(tmp_path, job, kept))
    assert_is(run, job, steps=[step for step in range(3) if step != lost])
    assert run.remarks[0] == "rank 1 recorded 2 of 3 steps"


def test_what_is_unknown_is_counted_and_left_out(tmp_path):
    job = drawn()
    files = []
    for (_, rank), records in by_rank(job).items():
        events = list(events_of(records))
        events += [event("PP::fwd_send (stage 0)", START + 1e3 * n, 5) for n in range(4)]
        events += [
            event("aten::mm", START, -1e9, "cpu_op"),
            event("PP:0F0", None, 1),
            event("PP:0F0", START, 1, tid={}),
        ]
        text = json.dumps(
            {"traceEvents": shuffled(events), "distributedInfo": {"rank": rank}, "baseTimeNanoseconds": None}
        )
        text = text.replace('"args": {}', '"args": {"Concrete Inputs": [-inf, nan, inf]}')
        files.append(kineto(tmp_path / f"r{rank}.json", rank, [], text))
    run = pp.Run.load(files)
    assert_is(run, job)
    assert set(run.remarks) == {
        "left out: 8 ranges 'PP::fwd_send (stage 0)'",
        "left out: 6 events without a name, a usable time or a thread",
        "left out: 2 time bases None",
    }


def test_lines_that_are_repeated_or_cut_off(tmp_path):
    job = drawn("zb-h1", 4, 8)
    records = list(job.records())
    path = csv_of(tmp_path / "x.csv", shuffled([*records, *records[::5]]))
    path.write_text(path.read_text() + "2,0,1,3F")
    run = pp.Run.load(path)
    assert_is(run, job)
    repeated = len(records[::5])
    assert run.remarks[1] == f"left out: {repeated} repeated lines" and "line" in run.remarks[0]
    head, *lines = path.read_text().splitlines()
    for wrong in ("1.5", "-1", "nan", "1e99"):
        damaged = [line.replace("1,", f"{wrong},", 1) if line.startswith("1,") else line for line in lines]
        path.write_text("\n".join([head, *damaged]))
        with pytest.raises(pp.ParseError, match=rf"step {wrong} is not a whole number.*and \d+ more lines like it"):
            pp.Run.load(path)


@pytest.mark.parametrize("scale", [1, 0.05])
def test_small_overlaps_are_trimmed_and_counted(tmp_path, scale):
    """The same autopsy and predictions as without them, whatever the unit of the actions."""
    plain, shifted = [], []
    chance = random.Random(1)
    for records in by_rank(drawn("1f1b", 4, 8, replicas=2, steps=6, noise=0.02, overhead=0.0)).values():
        for before, record in zip([None, *records], records, strict=False):
            record = record._replace(start=scale * record.start, end=scale * record.end)
            plain.append(record)
            touches = before and before.step == record.step and scale * before.end > record.start - 1e-9
            early = touches and chance.random() < 0.2
            shifted.append(record._replace(start=record.start - 0.0004 * scale) if early else record)
    known, run = (pp.Run.load(csv_of(tmp_path / name, each)) for name, each in (("a.csv", plain), ("b.csv", shifted)))
    assert run.autopsy().causes == pytest.approx(known.autopsy().causes, abs=1e-3)
    for name in ("1f1b", "zb-h1"):
        assert run.predict(name).makespan == pytest.approx(known.predict(name).makespan, rel=1e-3)
    count = int(run.remarks[0].split()[1])
    assert run.remarks == (
        f"trimmed: {count} overlaps of at most {run.remarks[0].split()[6]} ms between actions of a rank",
    )
    assert float(run.remarks[0].split()[6]) == pytest.approx(0.4 * scale, abs=0.002)
    assert count > 30 and not known.remarks


def test_concurrency_is_refused_with_where_and_how_much(tmp_path):
    """Many small overlaps are concurrency, and so is a large one; of a single step, it costs that step only."""
    records = list(drawn("1f1b", 2, 4, steps=4, noise=0).records())

    def early(record, part):
        return record._replace(start=record.start - part * 0.06)

    many = [early(record, 0.05) for record in records]
    with pytest.raises(
        pp.ParseError, match=r"no whole step; step 0: on rank \d, .* ms at once, where its usual action"
    ):
        pp.Run.load(csv_of(tmp_path / "x.csv", many))
    once = [early(record, 0.5) if record.step == 2 and str(record.action) == "1B2" else record for record in records]
    run = pp.Run.load(csv_of(tmp_path / "y.csv", once))
    assert run.steps == (0, 1, 3)
    assert "1 incomplete step (step 2: on rank 1, 1B2 begins at" in run.remarks[0]


def test_a_pause_before_the_first_backward_is_read(tmp_path):
    lines = ["step,stage,operation,microbatch,start,duration"]
    lines += ["0,0,F,0,0,1", "0,0,F,1,1,1", "0,1,F,0,1,1", "0,1,F,1,2,1"]
    lines += ["0,1,B,0,4.1,2", "0,1,B,1,6.1,2", "0,0,B,0,6.1,2", "0,0,B,1,8.1,2"]
    path = tmp_path / "x.csv"
    path.write_text("\n".join(lines))
    run = pp.Run.load(path)
    assert run.schedule.name == "gpipe"


def test_a_saved_timeline_may_be_zipped(tmp_path):
    import gzip

    timeline = pp.simulate(pp.schedule("zb-h1", 4, 8), pp.Costs(0.01, 0.02, unit="s"))
    timeline.save(tmp_path / "x.json")
    (tmp_path / "x.json.gz").write_bytes(gzip.compress((tmp_path / "x.json").read_bytes()))
    for name in ("x.json", "x.json.gz"):
        assert pp.Timeline.load(tmp_path / name).makespan == pytest.approx(timeline.makespan, abs=1e-6)
        assert pp.Run.load(tmp_path / name).schedule.name == "zb-h1"
    (tmp_path / "x.json.gz").write_bytes((tmp_path / "x.json.gz").read_bytes()[:-100])
    with pytest.raises(pp.PipelineError, match=r"cannot read .*it is damaged"):
        pp.Run.load(tmp_path / "x.json.gz")


def test_a_part_of_a_run_knows_when_the_run_was_warming_up(tmp_path):
    """Every second step predicts the others, although too few slow ones are left to be seen."""
    job = drawn("1f1b", 4, 8, steps=24, noise=0.01, warm_up=4)
    run = pp.Run.load(csv_of(tmp_path / "x.csv", job))
    assert run.warm_up == (0, 1, 2, 3)
    for half in (run.steps[::2], run.steps[1::2]):
        part = run.only(steps=half)
        assert part.warm_up == tuple(step for step in half if step < 4)
        others = [each.timeline.makespan for key, each in run.steady.items() if key[0] not in half]
        prediction = part.predict("1f1b")
        assert max(abs(prediction.makespan / time - 1) for time in others) < 0.02
    assert run.only(steps=[1, 2]).warm_up == ()


@pytest.mark.parametrize("drift", [0.5e-3, 20e-3])
def test_clocks_that_drift_apart_a_little(tmp_path, drift):
    """Half a millisecond between the first and the last step is accepted; a third of a forward is not."""
    records = []
    for (_, rank), mine in by_rank(drawn("1f1b", 3, 6, steps=8, latency=0.0)).items():
        length = mine[-1].end
        for record in mine:
            shift = drift * (rank - 1) * (record.start / length - 0.5)
            records.append(record._replace(start=record.start + shift, end=record.end + shift))
    path = csv_of(tmp_path / "x.csv", records)
    if drift > 1e-3:
        with pytest.raises(pp.ParseError, match="contradicts itself: no constant shift"):
            pp.Run.load(path)
        return
    run = pp.Run.load(path)
    remark = run.remarks[-1]
    assert remark.startswith("messages arrive up to 0.") and remark.endswith("however the clocks are shifted")
    known = pp.Run.load(csv_of(tmp_path / "y.csv", drawn("1f1b", 3, 6, steps=8, latency=0.0)))
    assert run.autopsy().causes == pytest.approx(known.autopsy().causes, abs=2e-3)
    assert run.predict("zb-h1").makespan == pytest.approx(known.predict("zb-h1").makespan, rel=2e-3)
