"""The engine beside torch's own runtime: the same GPT, schedule and ranks, a step of each in turn. `make bench`.

`make gpu` measures the same on as many GPUs as there are, up to four: torch's runtime needs one for each rank.
"""

import json
import tempfile
from pathlib import Path
from statistics import median, quantiles

from gpu_table import cause

from ppedu.core import RankError
from ppedu.launch.pool import RankPool

MICROBATCHES = 8
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-interleaved": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
BY_GPU = ["1f1b", "zb-v", "dualpipev"]  # those that `make gpu` measures
PROGRAM = """
import json, os, sys, time
os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}  # kB, not 32 MiB each
import torch, torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules
import ppedu as pp
from ppedu.run import GPT, GPTConfig, Pipeline, local_stages, next_token_loss, place

name, theirs, who, rounds, microbatches, gpu = json.loads(sys.argv[1])
device, backend = place() if gpu else (torch.device("cpu"), "gloo")
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
config = GPTConfig(vocabulary=97, context=64, layers=8, heads=4, width=96)
schedule = pp.schedule(name, size, microbatches)
tokens = torch.randint(97, (4 * microbatches, 65), generator=torch.Generator().manual_seed(3))
inputs, targets = tokens[:, :-1].to(device).contiguous(), tokens[:, 1:].to(device).contiguous()

def made():
    return {stage: GPT.stage(config, stage, schedule.stages).to(device) for stage in local_stages(schedule, rank)}

def ours():
    modules = made()
    pipeline = Pipeline(schedule, modules, next_token_loss)
    return modules, lambda: pipeline.step(inputs, targets)

def torchs():
    modules = made()
    stages = [PipelineStage(module, stage, schedule.stages, device) for stage, module in modules.items()]
    kind = getattr(schedules, theirs)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    runtime = kind(stages[0] if single else stages, microbatches, loss_fn=next_token_loss)
    first, last = 0 in modules, schedule.stages - 1 in modules
    return modules, lambda: runtime.step(*[inputs] * first, target=targets if last else None)

def peak():
    "Return the most memory so far, in KB."
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 1024
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

made_by = {"ours": ours, "torch": torchs}
dist.barrier()
torch.rand(8, requires_grad=True).square().sum().backward()
if device.type == "cpu":
    open("/proc/self/clear_refs", "w").write("5")  # from here on the peak is counted
before = peak()
pipelines = {each: made_by[each]() for each in who}

def step(each):
    modules, run = pipelines[each]
    for module in modules.values():
        module.zero_grad()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - cpu

for each in who * 2:
    step(each)
report = {each: [] for each in who}
for number in range(rounds):
    for each in who if number % 2 else who[::-1]:
        report[each].append(step(each))
print(json.dumps(dict(times=report, memory=peak() - before)))
dist.barrier()
"""


def run(pool, program, ranks, *settings):
    output = [b""] * ranks

    def write(rank, piece):
        output[rank] += piece

    pool.run(str(program), ranks, [json.dumps(settings)], timeout=120, write=write)
    return [json.loads(next(line for line in text.splitlines() if line.startswith(b"{"))) for text in output]


def described(ratios):
    low, *_, high = quantiles(ratios, n=10)
    return f"{median(ratios):5.2f} [{low:.2f}–{high:.2f}]"


def measure(pool, name, ranks, rounds, gpu=False):
    """Return the engine's times over those of torch's runtime, and each rank's memory with either, as a line.

    If torch's runtime fails, whose interface depends on torch's release, the line says why instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)

        def reports(who, rounds):
            return run(pool, program, ranks, name, SCHEDULES[name], who, rounds, MICROBATCHES, gpu)

        try:
            theirs = reports(["torch"], 4)
        except RankError as error:
            return f"not measured, because torch's runtime fails: {cause(str(error))}"
        ours, both = reports(["ours"], 4), reports(["ours", "torch"], rounds)
    ratios = []
    for kind in (0, 1):
        total = {
            each: [sum(report["times"][each][number][kind] for report in both) for number in range(rounds)]
            for each in ("ours", "torch")
        }
        ratios.append(described([a / b for a, b in zip(total["ours"], total["torch"], strict=True)]))
    pairs = zip(ours, theirs, strict=True)
    memory = "  ".join(f"{a['memory'] / 1024:.1f}/{b['memory'] / 1024:.1f}" for a, b in pairs)
    return f"step time {ratios[0]:<20} CPU time {ratios[1]:<20} peak memory {memory} MB"


def main():
    pool, ranks, rounds = RankPool(), 4, 45
    print(f"the engine over torch, {ranks} ranks, {MICROBATCHES} microbatches, {rounds} rounds: median [80 %]")
    for name in SCHEDULES:
        print(f"  {name:<16} {measure(pool, name, ranks, rounds)}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
