"""Traces that torch.profiler wrote: of torch's own schedules, of its runtime, and of the engine, on real processes."""

import gzip
import json
from statistics import median
from typing import NamedTuple

import pytest

import ppedu as pp

# Stages whose actions sleep, so that ranks can share a core: the forward, the backward for the input and the backward
# for the weight 10 ms each.
PROGRAM = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile
import ppedu as pp
from ppedu.run import Pipeline, local_stages

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x, before, after):
        context.after = after
        time.sleep(before)
        return x.clone()

    @staticmethod
    def backward(context, dy):
        time.sleep(context.after)
        return dy.clone(), None, None

class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(8)), seconds

    def forward(self, x):
        return Sleep.apply(x, self.seconds, self.seconds) @ Sleep.apply(self.weight, 0.0, self.seconds)

dist.init_process_group("gloo")
world = dist.get_world_size()
for name, runtime, path, ranks, compiled, labelled, out in json.loads(sys.argv[1]):
    mesh = init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("dp", "pp"))
    group = mesh["pp"].get_group()
    rank = dist.get_rank(group)
    schedule = pp.schedule(name, ranks, 4)
    loss_fn = lambda y, target: ((y - target) ** 2).mean()
    modules = {stage: Slow(0.01 + 0.005 * (stage == 0)) for stage in local_stages(schedule, rank)}
    if compiled:
        modules = {
            stage: nn.Sequential(module, torch.compile(nn.Linear(8, 8), backend="aot_eager"))
            for stage, module in modules.items()
        }
    inputs = torch.randn(4, 8)
    if runtime == "ours":
        step = lambda: pipeline.step(inputs, inputs)
        pipeline = Pipeline(schedule, modules, loss_fn)
    else:
        device = torch.device("cpu")
        stages = [PipelineStage(part, stage, schedule.stages, device, group=group) for stage, part in modules.items()]
        kind = getattr(schedules, runtime)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        made = kind(stages[0] if single else stages, 4, loss_fn=loss_fn)
        if path:
            made._load_csv(path, format="compute_only")
        first, last = 0 in modules, schedule.stages - 1 in modules
        step = lambda: made.step(*[inputs] * first, target=inputs if last else None)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
            if labelled:
                profiler.step()
    profiler.export_chrome_trace(f"{out}.rank{dist.get_rank()}.json")
    dist.barrier()
"""


class Case(NamedTuple):
    """A schedule, the class that runs it, and whether that reads the order from a CSV file.

    labelled: the profiler numbers the steps.
    """

    name: str
    runtime: str
    from_csv: bool = False
    ranks: int = 2
    replicas: int = 1
    compiled: bool = False
    labelled: bool = False

    def __str__(self):
        return "-".join(map(str, self))


RUNTIME = "_PipelineScheduleRuntime"
CASES = [
    Case("gpipe", "ScheduleGPipe"),
    Case("gpipe", RUNTIME, from_csv=True),
    Case("1f1b", RUNTIME, from_csv=True),
    Case("interleaved", "ScheduleInterleaved1F1B"),
    Case("looped-bfs", "ScheduleLoopedBFS"),
    Case("zb-v", "ScheduleZBVZeroBubble"),
    Case("dualpipev", "ScheduleDualPipeV"),
    Case("zb-h1", "ours"),
    Case("dualpipev", "ours"),
    Case("gpipe", "ScheduleGPipe", compiled=True),
    Case("1f1b", RUNTIME, from_csv=True, compiled=True, labelled=True),
    Case("gpipe", "ScheduleGPipe", ranks=4),
    Case("interleaved", "ScheduleInterleaved1F1B", ranks=4),
    Case("zb-v", "ScheduleZBVZeroBubble", ranks=4),
    Case("gpipe", "ScheduleGPipe", replicas=2),
    Case("zb-v", "ScheduleZBVZeroBubble", replicas=2),
    Case("1f1b", RUNTIME, from_csv=True, replicas=2, labelled=True),
]
UNMARKED = Case("1f1b", "Schedule1F1B")


@pytest.fixture(scope="module")
def traces(ranks, tmp_path_factory):
    """Return a function that returns the files of a case."""
    folder = tmp_path_factory.mktemp("traces")
    for together in (2, 4):
        cases = []
        for case in (case for case in [*CASES, UNMARKED] if case.ranks * case.replicas == together):
            path = folder / f"{case}.csv"
            if case.from_csv:
                pp.export.to_torch(pp.schedule(case.name, case.ranks, 4), path)
            csv = str(path) if case.from_csv else ""
            cases.append(
                (case.name, case.runtime, csv, case.ranks, case.compiled, case.labelled, str(folder / str(case)))
            )
        ranks(PROGRAM, together, json.dumps(cases), timeout=120)
    return lambda case: sorted(folder.glob(f"{case}.rank*.json"))


def assert_is(run, case, steps=3):
    assert run.schedule.name == case.name
    assert run.schedule.orders == pp.schedule(case.name, case.ranks, 4).orders
    assert len(run.steps) == steps and len(run.replicas) == case.replicas
    for replica in run.replicas:
        ratios = [run.replay(step, replica).makespan / run.timeline(step, replica).makespan for step in run.steps]
        assert median(ratios) == pytest.approx(1, abs=0.15)  # on quiet cores 0.99 to 1; see `make bench`
    times = run.costs()
    assert times.forward[0] == pytest.approx(0.015, rel=0.5)
    assert times.forward[1] == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_trace_is_read_recognized_and_replayed(traces, case):
    run = pp.Run.load(traces(case))
    assert_is(run, case)
    assert not run.remarks


def zipped(folder, files):
    for file in files:
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    return folder


def renamed(folder, files):
    """As tensorboard_trace_handler names them, of processes that did not initialize torch.distributed."""
    for rank, file in enumerate(files):
        text = file.read_text().replace('"distributedInfo"', '"nothing"')
        (folder / f"host_{4711 + 13 * rank}_rank-{rank}.1712134567{890 + rank}.pt.trace.json").write_text(text)
    return folder


def merged(folder, files):
    """One file of all ranks, whose processes keep their ids."""
    traces = [json.loads(file.read_text()) for file in files]
    base = min(trace["baseTimeNanoseconds"] for trace in traces)
    for trace in traces:
        for event in trace["traceEvents"]:
            event["ts"] = event["ts"] + (trace["baseTimeNanoseconds"] - base) / 1000 if "ts" in event else 0
    events = [event for trace in traces for event in trace["traceEvents"]]
    (folder / "all.json").write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": base}))
    return folder / "all.json"


def cut(folder, files):
    """Without what began in the first half of a step, or in the last one."""
    for rank, file in enumerate(files):
        trace = json.loads(file.read_text())
        marks = sorted(
            event["ts"] for event in trace["traceEvents"] if event["name"].startswith(("PP:", "Forward", "Backward"))
        )
        first, last = marks[len(marks) // 6], marks[-len(marks) // 6]
        trace["traceEvents"] = [event for event in trace["traceEvents"] if first <= event.get("ts", 0) < last]
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder


@pytest.mark.parametrize("change", [zipped, renamed, merged, cut])
@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_a_trace_is_read_after_a_change(traces, tmp_path, case, change):
    run = pp.Run.load(change(tmp_path, traces(case)))
    assert_is(run, case, steps=1 if change is cut else 3)


def test_a_trace_without_ranges_names_the_way_out(traces):
    with pytest.raises(
        pp.ParseError, match=r"no range of a pipeline's action.*Schedule1F1B does not mark any.*Runtime"
    ):
        pp.Run.load(traces(UNMARKED))
