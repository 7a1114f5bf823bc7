"""Traces that torch.profiler wrote: of torch's own schedules, of its runtime, and of the engine, on real processes."""

import json
from statistics import median

import pytest

import ppedu as pp

# Stages whose actions sleep, so that ranks can share a core: the forward, the backward for the input and the backward
# for the weight 20 ms each.
PROGRAM = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
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
rank, size = dist.get_rank(), dist.get_world_size()
for name, runtime, path, microbatches, out in json.loads(sys.argv[1]):
    schedule = pp.schedule(name, size, microbatches)
    loss_fn = lambda y, target: ((y - target) ** 2).mean()
    modules = {stage: Slow(0.02 + 0.01 * (stage == 0)) for stage in local_stages(schedule, rank)}
    inputs = torch.randn(microbatches, 8)
    if runtime == "ours":
        step = lambda: pipeline.step(inputs, inputs)
        pipeline = Pipeline(schedule, modules, loss_fn)
    else:
        device = torch.device("cpu")
        stages = [PipelineStage(module, stage, schedule.stages, device) for stage, module in modules.items()]
        kind = getattr(schedules, runtime)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        made = kind(stages[0] if single else stages, microbatches, loss_fn=loss_fn)
        if path:
            made._load_csv(path, format="compute_only")
        first, last = 0 in modules, schedule.stages - 1 in modules
        step = lambda: made.step(*[inputs] * first, target=inputs if last else None)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    profiler.export_chrome_trace(f"{out}/{name}.{runtime}.{size}.rank{rank}.json")
    dist.barrier()
"""

# (schedule, runtime, whether it reads the order from a CSV file, ranks)
CASES = [
    ("gpipe", "ScheduleGPipe", False, 2),
    ("gpipe", "_PipelineScheduleRuntime", True, 2),
    ("1f1b", "_PipelineScheduleRuntime", True, 2),
    ("interleaved", "ScheduleInterleaved1F1B", False, 2),
    ("looped-bfs", "ScheduleLoopedBFS", False, 2),
    ("zb-v", "ScheduleZBVZeroBubble", False, 2),
    ("dualpipev", "ScheduleDualPipeV", False, 2),
    ("1f1b", "Schedule1F1B", False, 2),
    ("zb-h1", "ours", False, 2),
    ("dualpipev", "ours", False, 2),
    ("interleaved", "ScheduleInterleaved1F1B", False, 4),
    ("zb-v", "ScheduleZBVZeroBubble", False, 4),
]


@pytest.fixture(scope="module")
def traces(ranks, tmp_path_factory):
    """Return the folder with the traces of all cases."""
    folder = tmp_path_factory.mktemp("traces")
    for together in (2, 4):
        cases = []
        for name, runtime, from_csv, size in CASES:
            path = folder / f"{name}.csv"
            if from_csv:
                pp.export.to_torch(pp.schedule(name, size, 4), path)
            if size == together:
                cases.append((name, runtime, str(path) if from_csv else "", 4, str(folder)))
        ranks(PROGRAM, together, json.dumps(cases), timeout=120)
    return folder


@pytest.mark.parametrize(
    ("name", "runtime", "size"),
    [(name, runtime, size) for name, runtime, _, size in CASES if runtime != "Schedule1F1B"],
)
def test_a_trace_is_read_recognized_and_replayed(traces, name, runtime, size):
    run = pp.Run.load(sorted(traces.glob(f"{name}.{runtime}.{size}.rank*.json")))
    assert run.schedule.name == name
    assert run.schedule.orders == pp.schedule(name, size, 4).orders
    assert run.steps == (0, 1, 2) and not run.remarks
    ratios = [run.replay(step).makespan / run.timeline(step).makespan for step in run.steps]
    assert median(ratios) == pytest.approx(1, abs=0.15)  # on quiet cores 0.99 to 1; see `make bench`
    times = run.costs()
    assert times.forward[0] == pytest.approx(0.03, rel=0.3)
    assert times.forward[1] == pytest.approx(0.02, rel=0.3)


def test_a_trace_without_ranges_names_the_way_out(traces):
    with pytest.raises(
        pp.ParseError, match=r"no range of a pipeline's action.*Schedule1F1B does not mark any.*Runtime"
    ):
        pp.Run.load(sorted(traces.glob("1f1b.Schedule1F1B.*.json")))
