"""Tables and traces that are right, and those that lie."""

import gzip
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto import csv_of, drawn, event, files_of, kineto
from strategies import often

import ppedu as pp
from ppedu.course.drawn import DrawnJob, table_of

HEAD = "step,stage,operation,microbatch,start,duration"
RIGHT = ["0,0,F,0,0,1", "0,1,F,0,1,1", "0,1,B,0,2,2", "0,0,B,0,4,2"]


def write(path, *lines, head=HEAD):
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_a_table_in_other_words(tmp_path):
    """The names of columns and operations that frameworks use, one replica after the other, with messages."""
    head = "dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id"
    lines = []
    for replica, rank in ((0, 0), (1, 1)):
        lines += [
            f"{replica},0,{rank},7,forward-compute,{replica},1,0,0,0",
            f"{replica},0,{rank},7,forward-send,{replica + 1},0.1,0,-1,-1",
            f"{replica},1,{rank + 2},7,forward-compute,{replica + 1.5},1,0,0,0",
            f"{replica},1,{rank + 2},7,backward-compute,{replica + 3},2,0,0,0",
            f"{replica},0,{rank},7,backward-compute,{replica + 6},2,0,0,0",
            f"{replica},0,{rank},7,optimizer,{replica + 9},1,0,-1,-1",
        ]
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress("\n".join([head, *lines]).encode()))
    run = pp.Run.load(path)
    assert (run.steps, run.replicas) == ((7,), (0, 1))
    assert run.schedule.orders == pp.schedule("1f1b", 2, 1).orders
    one = run.recorded[7, 1]
    assert [span.start for span in one.timeline.rows[1]] == [2.5, 4]
    assert (one.start, one.end) == (1, 11)
    assert one.others[0].name == "optimizer"


def test_chunks_in_a_table(tmp_path):
    schedule = pp.schedule("interleaved", 2, 2)
    timeline = pp.simulate(schedule, pp.Costs(1.0, 2.0))
    lines = [
        f"0,{rank},{action.stage // 2},{action.op},{action.microbatch},{start},{end - start}"
        for rank, row in enumerate(timeline.rows)
        for action, start, end in row
    ]
    random.Random(1).shuffle(lines)
    run = pp.Run.load(write(tmp_path / "x.csv", *lines, head="step,stage,chunk,operation,microbatch,start,duration"))
    assert run.schedule.name == "interleaved"
    assert run.timeline().makespan == timeline.makespan


@pytest.mark.parametrize("chunk", ["", "-1", "0"])
def test_without_chunks_there_is_one(tmp_path, chunk):
    lines = [line.replace(",", f",{chunk},", 1) for line in RIGHT]
    run = pp.Run.load(write(tmp_path / "x.csv", *lines, head=HEAD.replace("step,", "step,chunk,")))
    assert run.schedule.orders == pp.schedule("1f1b", 2, 1).orders


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (["0,0,F,0,zero,1"], r"line 2: '0,0,F,0,zero,1' is not an operation"),
        (["0,0,F,0,0,-1"], "is not an operation"),
        (["0,0,F,,0,1"], "no forwards and backwards; left out: .*line 2: .*it has no microbatch"),
        (["0,0,optimizer,0,0,1"], "no forwards and backwards"),
        ([], "no forwards and backwards"),
        (RIGHT[:3], r"no whole step; step 0: .*0B0"),
        ([*RIGHT, "0,0,B,0,7,1"], "runs 0B0 twice"),
        ([*RIGHT[:3], "0,0,B,0,0.5,2"], "on rank 0, 0B0 begins at 0.5 s, before 0F0 ends at 1 s"),
        ([RIGHT[0], "0,1,F,0,0.5,1", "0,1,B,0,2,2", "0,0,B,0,3,2"], "contradicts itself"),
        ([*RIGHT, "0,3,F,0,7,1", "0,3,B,0,8,1"], "no whole step"),
    ],
)
def test_tables_that_lie(tmp_path, lines, match):
    with pytest.raises(pp.ParseError, match=match):
        pp.Run.load(write(tmp_path / "x.csv", *lines))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_may_be_separated_otherwise(tmp_path, separator):
    plain = pp.Run.load(write(tmp_path / "x.csv", *RIGHT))
    path = write(tmp_path / "y.csv", *RIGHT)
    path.write_text(path.read_text().replace(",", separator))
    assert pp.Run.load(path).timeline().rows == plain.timeline().rows


def test_an_incomplete_step_is_left_out_and_named(tmp_path):
    later = [line.replace("0,", "1,", 1) for line in RIGHT[:3]]
    run = pp.Run.load(write(tmp_path / "x.csv", *RIGHT, *later))
    assert run.steps == (0,)
    assert run.remarks == ("left out: 1 incomplete step (step 1: rank 0: 0B0 is never run (1 action missing))",)
    assert run.remarks[0] in str(run.autopsy())


def test_files_that_are_not_tables(tmp_path):
    with pytest.raises(pp.ParseError, match=r"no column 'operation' or 'start' or 'duration'; its first line is 'step"):
        pp.Run.load(write(tmp_path / "x.csv", head="step,stage"))
    with pytest.raises(pp.ParseError, match=r"pandas.read_parquet\(.*x.parquet'\).to_csv\('x.csv', index=False\)"):
        pp.Run.load(tmp_path / "x.parquet")
    for missing in ("none.csv", "none.json"):
        with pytest.raises(pp.PipelineError, match="cannot read"):
            pp.Run.load(tmp_path / missing)
    for wrong in (None, [], 7, b"x"):
        with pytest.raises(pp.SettingError, match=r"name of a trace file|file name must be text"):
            pp.Run.load(wrong)


def two_ranks(folder, skew=0.0, device=""):
    """Write the traces of two ranks and one microbatch, in milliseconds: F 0–10, 12–22, B 22–42, 44–64."""
    tail = (("Optimizer.step#SGD.step", 0.005),)
    job = drawn(ranks=2, microbatches=1, steps=1, forward=0.01, backward=0.02, noise=0, tail=tail)

    def skewed(rank, records):
        return [each._replace(start=each.start + skew * rank, end=each.end + skew * rank) for each in records]

    return files_of(folder, job, skewed, device=device)


@pytest.mark.parametrize("device", ["", "cuda_runtime"])
@pytest.mark.parametrize("skew", [0, -0.02])
def test_times_are_those_of_the_work(tmp_path, device, skew):
    run = pp.Run.load(two_ranks(tmp_path, skew, device))
    timeline = run.timeline()
    times = [[1e3 * (time - timeline.start) for span in row for time in span[1:]] for row in timeline.rows]
    assert times == [pytest.approx([0, 10, 44, 64], abs=1e-3), pytest.approx([12, 22, 22, 42], abs=1e-3)]
    assert run.clocks[0].shifts == pytest.approx((0, -skew), abs=1e-6)
    assert {other.name for other in run.recorded[0, 0].others} == {"Optimizer.step#SGD.step"}


def test_traces_that_lie(tmp_path):
    first, second = two_ranks(tmp_path)
    with pytest.raises(pp.ParseError, match=r"no whole step; step 0: 0F0 is never run \(1 forward missing\)"):
        pp.Run.load(second)
    with pytest.raises(pp.ParseError, match="are both of rank 0"):
        pp.Run.load([first, kineto(tmp_path / "again.json", 0, json.loads(first.read_text())["traceEvents"])])
    text = first.read_text()
    for cut in (1, 40, len(text) // 2, len(text) - 1):
        with pytest.raises(pp.ParseError, match=r"ends too early: it holds [0-9]+ whole events"):
            pp.Run.load([kineto(tmp_path / "cut.json", 0, [], text[:cut]), second])
    for wrong, match in (
        ("PNG", "is not a trace"),
        ('{"loss": [1, 2]}', "holds no events"),
        ("[1, 2]", "holds no events"),
        ('{"traceEvents": [{]}', "ends too early|is damaged"),
        ('{"traceEvents": [{"ph": "X", "name": "PP:0F0"}]}', "no range .*it has 1 event without a name, a usable time"),
    ):
        with pytest.raises(pp.ParseError, match=match):
            pp.Run.load(kineto(tmp_path / "wrong.json", 0, [], wrong))
    other = kineto(tmp_path / "other.json", 0, [event("forward", 0, 1), event("data", 2, 1)])
    with pytest.raises(pp.ParseError, match=r"no range of a pipeline's action.*its ranges are 'data', 'forward'"):
        pp.Run.load([other])
    with pytest.raises(pp.ParseError, match=r"no range of a pipeline's action, .*it has 1 range 'PP:2G0'"):
        pp.Run.load([kineto(tmp_path / "odd.json", 0, [event("PP:2G0", 0, 1)])])
    unknown = [tmp_path / f"{name}.json" for name in ("alpha", "beta")]
    for path, source in zip(unknown, (first, second), strict=True):
        path.write_text(source.read_text().replace("distributedInfo", "nothing"))
    with pytest.raises(pp.ParseError, match="does not say of which rank it is"):
        pp.Run.load(unknown)


@often(30)
@given(st.integers(0, 10**6), st.integers(2, 5), st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=5))
def test_clocks_are_corrected_within_the_error_they_state(seed, ranks, skews):
    """The oracle is the same job without skew."""
    from ppedu.trace.assemble import assemble
    from ppedu.trace.clocks import align

    job = DrawnJob(pp.schedule("1f1b", ranks, 2 * ranks), replicas=1, steps=2, seed=seed, latency=0.003)
    wrong = [0.0, *skews[: ranks - 1]]
    records = [
        record._replace(start=record.start + wrong[record.rank], end=record.end + wrong[record.rank])
        for record in job.records()
    ]
    whole, _ = assemble(records, [], "drawn")
    clocks = align([each.timeline for each in whole.values()])
    for skew, shift in zip(wrong, clocks.shifts, strict=True):
        assert abs(skew + shift) <= 2 * clocks.error + 1e-9
    assert clocks.error < 0.05


def test_a_clock_is_set_to_the_middle_between_its_bounds():
    """Rank 1's clock is 10 s early. If its shift were below 9.8 s or above 10.4 s, a message would come too early."""
    from ppedu.trace.clocks import align

    rows = (
        (pp.Span(pp.F(0, 0), 0.0, 1.0), pp.Span(pp.B(0, 0), 4.6, 6.6)),
        (pp.Span(pp.F(1, 0), -8.8, -7.8), pp.Span(pp.B(1, 0), -7.8, -5.8)),
    )
    clocks = align([pp.Timeline(pp.schedule("1f1b", 2, 1), rows, pp.Costs(unit="s"), "measured")])
    assert clocks.shifts == pytest.approx((0, 10.1)) and clocks.error == pytest.approx(0.3)


@pytest.mark.parametrize("part", [0.4, 0.6])
def test_clocks_that_are_off_by_more_than_half_a_step_are_pointed_out(tmp_path, part):
    """Perhaps the ranks have then recorded unlike steps. A step takes 0.54 s of the first rank's time."""
    job = DrawnJob(pp.schedule("gpipe", 2, 2), replicas=1, steps=3, noise=0, latency=0, overhead=0, tail=())
    records = [
        record._replace(start=record.start + part * 0.54, end=record.end + part * 0.54) if record.rank else record
        for record in job.records()
    ]
    run = pp.Run.load(csv_of(tmp_path / "x.csv", records))
    assert run.timeline().makespan == pytest.approx(0.54, abs=1e-4)
    assert any("over half a step" in remark for remark in run.remarks) == (part > 0.5)


def test_a_large_trace_is_read_in_a_stream(tmp_path):
    """22 MB of events that do not matter take little more memory than the reader's buffer."""
    import tracemalloc

    first, second = two_ranks(tmp_path)
    about = json.loads(first.read_text())
    filler = json.dumps(event("aten::item", 1, 1, "python_function", stack="x" * 300))
    events = [json.dumps(each) for each in about["traceEvents"]]
    large = ",".join([filler] * 26_000 + events + [filler] * 26_000)
    first.write_text('{"distributedInfo": {"rank": 0}, "traceEvents": [' + large + '], "traceName": "x"}')
    parts = []
    tracemalloc.start()
    try:
        run = pp.Run.load([first, second], progress=parts.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert run.timeline().makespan == pytest.approx(0.064, abs=1e-6)
    assert parts == sorted(parts) and parts[-1] == 1
    assert first.stat().st_size > 21e6 and peak < 19e6


def test_a_table_of_a_run_reads_back(tmp_path):
    job = DrawnJob(pp.schedule("dualpipev", 2, 4), replicas=2, steps=2)
    run = pp.Run.load(csv_of(tmp_path / "x.csv", job))
    assert run.schedule.name == "dualpipev"
    assert (run.steps, run.replicas) == ((0, 1), (0, 1))


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zb-v"])
def test_a_saved_timeline_keeps_its_steps(tmp_path, name):
    schedule = pp.schedule(name, 4, 8)
    costs = pp.Costs(forward=lambda stage, microbatch: 0.01 + 0.001 * microbatch, backward=0.02, unit="s")
    timeline = pp.simulate(schedule, costs, steps=3)
    timeline.save(tmp_path / "x.json")
    loaded = pp.Timeline.load(tmp_path / "x.json")
    assert [step.schedule.orders for step in loaded.steps] == [schedule.orders] * 3
    assert [step.makespan for step in loaded.steps] == pytest.approx([step.makespan for step in timeline.steps])
    assert loaded.steps[2].costs.forward == timeline.steps[2].costs.forward
    run = pp.Run.load(tmp_path / "x.json")
    assert (run.schedule.name, run.steps) == (name, (0, 1, 2))


def test_of_measured_and_simulated_timelines_in_a_file_the_measured_ones_count(tmp_path):
    simulated = pp.simulate(pp.schedule("1f1b", 2, 4), pp.Costs(1.0))
    measured = replace(pp.simulate(pp.schedule("gpipe", 2, 4), pp.Costs(1.0)), source="measured")
    pp.view.save([simulated, measured, measured], tmp_path / "x.json")
    run = pp.Run.load(tmp_path / "x.json")
    assert (run.schedule.name, run.steps) == ("gpipe", (0, 1))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("lost", range(4))
def test_a_missing_rank_is_missed(tmp_path, name, lost):
    """Without the last rank, all that is left is a complete pipeline, whose last stage waits for no reason."""
    job = DrawnJob(pp.schedule(name, 4, 8), replicas=1, steps=3)
    head, *rows = table_of(job.records()).splitlines()
    kept = [row for row in rows if row.split(",")[2] != str(lost)]
    path = write(tmp_path / "x.csv", *kept, head=head)
    if lost < 3:
        with pytest.raises(pp.ParseError, match="Give the traces of all ranks"):
            pp.Run.load(path)
        return
    (remark,) = pp.Run.load(path).remarks
    assert "stage 2 waits at least" in remark and "give the traces of all ranks" in remark


def test_microbatches_that_count_from_1_are_pointed_out(tmp_path):
    lines = ["0,0,F,1,0,1", "0,1,F,1,1,1", "0,1,B,1,2,2", "0,0,B,1,4,2"]
    with pytest.raises(pp.ParseError, match=r"0F0 is never run \(2 forwards missing\); microbatches count from 0"):
        pp.Run.load(write(tmp_path / "x.csv", *lines))
