"""The engine beside torch's own runtime: the same GPT, schedule and ranks, a step of each in turn. `make bench`.

With --gpu, on as many GPUs as there are, up to four: torch's runtime needs one for each rank. `make gpu`.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

import torch

from ppedu.notebook.pool import RankPool

GPU = "--gpu" in sys.argv
RANKS = min(4, torch.cuda.device_count()) if GPU else 4
MICROBATCHES, ROUNDS = 8, 45
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-interleaved": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
PROGRAM = """
import json, sys, time
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


def run(pool, program, *settings):
    output = [b""] * RANKS

    def write(rank, piece):
        output[rank] += piece

    pool.run(str(program), RANKS, [json.dumps(settings)], timeout=300, write=write)
    return [json.loads(text.splitlines()[-1]) for text in output]


def told(ratios):
    low, *_, high = quantiles(ratios, n=10)
    return f"{median(ratios):5.2f} [{low:.2f}–{high:.2f}]"


def main():
    pool = RankPool()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        where = "GPUs" if GPU else "ranks"
        print(f"the engine over torch, {RANKS} {where}, {MICROBATCHES} microbatches, {ROUNDS} rounds: median [80 %]")
        print(f"  {'':<16} {'step time':<20} {'CPU time':<20} peak memory of each rank, ours/torch's")
        for name, theirs in SCHEDULES.items():
            both = run(pool, program, name, theirs, ["ours", "torch"], ROUNDS, MICROBATCHES, GPU)
            alone = {each: run(pool, program, name, theirs, [each], 4, MICROBATCHES, GPU) for each in ("ours", "torch")}
            ratios = []
            for kind in (0, 1):
                total = {
                    each: [sum(report["times"][each][number][kind] for report in both) for number in range(ROUNDS)]
                    for each in ("ours", "torch")
                }
                ratios.append(told([a / b for a, b in zip(total["ours"], total["torch"], strict=True)]))
            peaks = [[report["memory"] / 1024 for report in reports] for reports in alone.values()]
            memory = "  ".join(f"{a:.1f}/{b:.1f}" for a, b in zip(*peaks, strict=True))
            print(f"  {name:<16} {ratios[0]:<20} {ratios[1]:<20} {memory} MB")
    pool.close()


if __name__ == "__main__":
    main()
