"""How well measured runs are replayed and other schedules predicted. `make bench`.

A run of 1F1B predicts runs of other schedules: on emulated stages, and of the toy GPT on as many ranks as there are
cores. Each run is saved and loaded again, as a user would do it.
"""

import json
import os
import tempfile
from pathlib import Path
from statistics import median

import ppedu as pp
from ppedu.launch.pool import RankPool

STEPS = {"emulated": 40, "gpt": 60}
EMULATED = """
import json, sys
import torch.distributed as dist
import ppedu as pp

dist.init_process_group("gloo")
folder, steps, names = json.loads(sys.argv[1])
for name in names:
    schedule = pp.schedule(name, dist.get_world_size(), 8)
    emulation = pp.run.Emulation(schedule, pp.Costs(0.02, 0.04, latency=0.001, unit="s"))
    emulation.step()
    timelines = [emulation.step() for _ in range(steps)]
    if dist.get_rank() == 0:
        pp.view.save(timelines, f"{folder}/emulated {name}.json")
dist.barrier()
"""
GPT = """
import json, sys
import torch, torch.distributed as dist
import ppedu as pp
from ppedu.run import GPT, GPTConfig, Pipeline, local_stages, next_token_loss

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
folder, steps, names = json.loads(sys.argv[1])
config = GPTConfig(vocabulary=97, context=64, layers=8, heads=4, width=384)
tokens = torch.randint(97, (32, 65), generator=torch.Generator().manual_seed(3))
pipelines, timelines = {}, {name: [] for name in names}
for name in names:
    schedule = pp.schedule(name, size, 8)
    modules = {stage: GPT.stage(config, stage, schedule.stages) for stage in local_stages(schedule, rank)}
    pipelines[name] = Pipeline(schedule, modules, next_token_loss)
for step in range(steps + 2):
    for name, pipeline in pipelines.items():  # in turns, so that a busy machine slows all of them
        pipeline.step(tokens[:, :-1], tokens[:, 1:])
        timelines[name].append(pipeline.timeline)
if rank == 0:
    for name in names:
        pp.view.save(timelines[name][2:], f"{folder}/gpt {name}.json")
dist.barrier()
"""
# By default, a rank gives freed memory back to the system, and takes it again in the next step, page by page; GPipe has
# most of it. On GPUs, PyTorch keeps the memory.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
NAMES = ["1f1b", "gpipe", "interleaved", "zb-h1", "dualpipev"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(KEEP_MEMORY)
        pool = RankPool()
        pool.start()
        try:
            for kind, program, ranks in (("emulated", EMULATED, 4), ("gpt", GPT, 2)):
                file = Path(folder, "program.py")
                file.write_text(program)
                pool.run(str(file), ranks, (json.dumps([folder, STEPS[kind], NAMES]),), timeout=900, write=_write)
        finally:
            pool.close()
        for kind, steps in STEPS.items():
            print(
                f"{kind}: {steps} steps of 1f1b       measured  predicted [90 %]      error  steps within   own costs"
            )
            run = pp.Run.load(f"{folder}/{kind} 1f1b.json")
            for name in NAMES:
                other = pp.Run.load(f"{folder}/{kind} {name}.json")
                times = [other.timeline(step).makespan for step in other.steps]
                truth, assumed = median(times), run.predict(name)
                known = run.predict(name, costs=other.costs())  # without assumptions about the stages
                held = sum(assumed.low <= time <= assumed.high for time in times) / len(times)
                print(
                    f"  {name:26}{truth * 1e3:9.1f} ms {assumed.makespan * 1e3:7.1f} ms "
                    f"[{assumed.low * 1e3:.1f}–{assumed.high * 1e3:.1f}] {assumed.makespan / truth - 1:+7.1%}"
                    f"{held:10.0%} {known.makespan / truth - 1:+14.1%}"
                )
            half = run.only(steps=[step for step in run.steps if step % 2 == 0]).predict(run.schedule)
            odd = [run.timeline(step).makespan for step in run.steps if step % 2]
            held = sum(half.low <= time <= half.high for time in odd) / len(odd)
            print(f"  even steps of 1f1b predict odd ones: {half.makespan / median(odd) - 1:+.2%}, {held:.0%} within")
            replayed = [run.replay(step).makespan / run.timeline(step).makespan - 1 for step in run.steps]
            print(f"  replay of 1f1b over its measured time: {median(replayed):+.2%}\n")


def _write(_: int, piece: bytes) -> None:
    print(piece.decode(), end="")


if __name__ == "__main__":
    main()
