"""Run schedules with `run_schedule` and with `Pipeline`; each rank prints, for every schedule, how the results differ.

usage: tiny_beside_pipeline.py CASES, a JSON list of [name, microbatches, options, options of pp.lower or null].
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import ppedu as pp
from ppedu.run import Pipeline, local_stages, run_schedule

WIDTH, SAMPLES = 6, 2  # of a microbatch


def make(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
for name, microbatches, options, lowering in json.loads(sys.argv[1]):
    schedule = pp.schedule(name, ranks, microbatches, **options)
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(2, SAMPLES * microbatches, WIDTH, generator=generator)
    ours, theirs = ({stage: make(stage) for stage in local_stages(schedule, rank)} for _ in range(2))
    expected = Pipeline(schedule, theirs, mse_loss).step(inputs, targets)
    given = schedule if lowering is None else pp.lower(schedule, **lowering)
    loss = run_schedule(given, ours, inputs.split(SAMPLES), targets.split(SAMPLES), (SAMPLES, WIDTH), mse_loss)
    pairs = [
        (weight.grad, other.grad)
        for stage in ours
        for weight, other in zip(ours[stage].parameters(), theirs[stage].parameters(), strict=True)
    ]
    report = {
        "different": sum(not torch.equal(ours, theirs) for ours, theirs in pairs),
        "all zero": sum(not ours.any() for ours, _ in pairs),
        "loss": loss.item(),
        "expected loss": expected.item() if schedule.stages - 1 in ours else 0,
    }
    print(json.dumps(report))
dist.barrier()
