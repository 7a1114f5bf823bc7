"""Whether a planned gain appears: a toy GPT with a large head, cut evenly and as a plan says. `make bench`.

As many ranks as there are cores run 1F1B with both cuts in turns. The plan takes the times of the run that is cut
evenly: what a layer takes, and by how much the last stage is longer.
"""

import json
import tempfile
from pathlib import Path
from statistics import median

import ppedu as pp
from ppedu.launch.pool import RankPool

LAYERS, STEPS, MICROBATCHES = 8, 80, 8
PROGRAM = """
import json, sys
import torch, torch.distributed as dist
import ppedu as pp
from ppedu.run import GPT, GPTConfig, Pipeline, next_token_loss
from ppedu.run import cut

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
layers, microbatches, cuts, steps, path = json.loads(sys.argv[1])
config = GPTConfig(vocabulary=4096, context=64, layers=layers, heads=4, width=128)
schedule = pp.schedule("1f1b", size, microbatches)
tokens = torch.randint(4096, (4 * microbatches, 65), generator=torch.Generator().manual_seed(3))
pipelines = []
for each in cuts:
    partition = each and [range(*bounds) for bounds in each]
    pipelines.append(Pipeline(schedule, cut(GPT(config), schedule, rank, partition), next_token_loss))
timelines = [[] for _ in cuts]
for step in range(steps + 2):
    for pipeline, kept in zip(pipelines, timelines):
        pipeline.step(tokens[:, :-1], tokens[:, 1:])
        kept.append(pipeline.timeline)
if rank == 0:
    for number, kept in enumerate(timelines):
        pp.view.save(kept[2:], f"{path}/{number}.json")
dist.barrier()
"""


def main() -> None:
    ranks = 2
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        pool = RankPool()
        pool.start()

        def runs(*cuts: object) -> list[pp.Run]:
            arguments = json.dumps([LAYERS, MICROBATCHES, cuts, STEPS, folder])
            pool.run(
                str(program), ranks, (arguments,), timeout=300, write=lambda _, piece: print(piece.decode(), end="")
            )
            return [pp.Run.load(f"{folder}/{number}.json") for number in range(len(cuts))]

        try:
            [even] = runs(None)
            costs, each = even.costs(), LAYERS // ranks
            rows = {}
            for name, times in (("forward", costs.forward), ("backward", costs.backward)):
                layer = times[0] / each
                rows[name] = [0, *[layer] * LAYERS, max(0, times[-1] - layer * each)]
            plan = pp.plan(pp.Model.measured(**rows), pp.Machine(80e9), ranks, MICROBATCHES, schedules=["1f1b"])
            planned = [[pieces.start, pieces.stop] for pieces in plan.best.partition]
            before, after = runs(None, planned)
        finally:
            pool.close()
        measured = [median(run.timeline(step).makespan for step in run.steps) for run in (before, after)]
        even_cut = pp.simulate(even.schedule, pp.Costs(costs.forward, costs.backward)).makespan
        promised, ratio = float(plan.best.step_time) / even_cut, measured[1] / measured[0]
        even_ms, planned_ms = (f"{time * 1e3:.1f} ms" for time in measured)
        print(f"1f1b on {ranks} ranks, layers and head cut evenly: {even_ms}, as planned: {planned_ms}")
        print(f"stages {planned}; ratio {ratio:.3f}, planned {promised:.3f}, off by {ratio / promised - 1:+.1%}")


if __name__ == "__main__":
    main()
