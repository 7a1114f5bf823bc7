"""Schedules written by `to_torch` run in torch's own runtime and give the same gradients as the engine."""

import json

import pytest
from cases import BEGIN, NAMED, named
from releases import needs

import ppedu as pp
from ppedu.engine.ranks.versions import TORCHS_CHUNKS, TORCHS_MESSAGES, lack

RUN = """
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

config = GPTConfig(vocabulary=11, context=8, layers=8, heads=2, width=16)
for name, form, path, microbatches in json.loads(sys.argv[1]):
    schedule = named(name, size, microbatches)
    tokens = torch.randint(11, (2 * microbatches, 9), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def make():
        return {stage: GPT.stage(config, stage, schedule.stages) for stage in local_stages(schedule, rank)}

    ours = make()
    pipeline = Pipeline(schedule, ours, next_token_loss)
    pipeline.step(inputs, targets)

    theirs = make()
    stages = [PipelineStage(module, stage, schedule.stages, torch.device("cpu")) for stage, module in theirs.items()]
    runtime = _PipelineScheduleRuntime(stages, microbatches, loss_fn=next_token_loss)
    runtime._load_csv(path, format=form)
    first, last = 0 in theirs, schedule.stages - 1 in theirs
    runtime.step(*[inputs] * first, target=targets if last else None)

    far = 0.0
    for stage, module in ours.items():
        for weight, other in zip(module.parameters(), theirs[stage].parameters(), strict=True):
            far = max(far, ((weight.grad - other.grad).norm() / other.grad.norm()).item())
    print(far)
dist.barrier()
"""

FOUND = ["atlas line 3", "atlas v 5", "atlas loop 5"]  # the best for a placement and a memory
NAMES = [name for name in pp.schedules() if pp.schedule(name, 4, 8).placement.copies == 1] + FOUND
FORMS = ["compute_only", "compute_comms"]
QUICK = ["1f1b", "interleaved", "zb-v", "dualpipev", FOUND[1]]  # of each placement, with halves, and with pairs


@pytest.fixture(scope="module")
def differences(ranks, tmp_path_factory):
    """`differences(name, form)` returns the largest relative difference of a gradient on any rank."""
    folder, found = tmp_path_factory.mktemp("csv"), {}

    def get(name, form):
        if (name, form) not in found:
            found.update(run([each for each in NAMES if (each in QUICK) == (name in QUICK)], ranks, folder))
        return found[name, form]

    return get


def run(names, ranks, folder):
    asked = []
    for name in names:
        schedule = named(name, 4, 8)
        for form, written in zip(FORMS, (schedule, pp.lower(schedule)), strict=True):
            if written.lowered and lack(TORCHS_MESSAGES):
                continue
            path = str(folder / f"{name}-{form}.csv")
            pp.export.to_torch(written, path)
            asked.append((name, form, path, 8))
    output = ranks(BEGIN + NAMED + RUN, 4, json.dumps(asked), timeout=240)
    found = [[float(line) for line in text.splitlines() if line[0].isdigit()] for text in output]
    return {(name, form): max(each) for (name, form, *_), *each in zip(asked, *found, strict=True)}


@needs(TORCHS_CHUNKS)
@pytest.mark.parametrize("form", [FORMS[0], pytest.param(FORMS[1], marks=needs(TORCHS_MESSAGES))])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_torchs_runtime_computes_the_same_gradients(differences, name, form):
    assert differences(name, form) < 1e-5
