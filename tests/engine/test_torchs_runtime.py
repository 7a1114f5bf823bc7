"""Schedules run in torch's own runtime, by `pp.run.to_torch`, and give the same gradients as the engine."""

import json

import pytest
import torch
from cases import BEGIN, NAMED
from releases import needs

import ppedu as pp
from ppedu.engine.ranks.versions import TORCHS_CHUNKS, TORCHS_MESSAGES, TORCHS_ORDERS, lack

RUN = """
from ppedu.engine.torchs import to_torch

config = GPTConfig(vocabulary=11, context=8, layers=8, heads=2, width=16)
for name, form, microbatches in json.loads(sys.argv[1]):
    schedule = named(name, size, microbatches)
    tokens = torch.randint(11, (2 * microbatches, 9), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def make():
        return {stage: GPT.stage(config, stage, schedule.stages) for stage in local_stages(schedule, rank)}

    ours = make()
    pipeline = Pipeline(schedule, ours, next_token_loss)
    pipeline.step(inputs, targets)

    theirs = make()
    runtime = to_torch(pp.lower(schedule) if form == "compute_comms" else schedule, theirs, next_token_loss)
    first, last = 0 in theirs, schedule.stages - 1 in theirs
    runtime.step(*[inputs] * first, target=targets if last else None)

    far = 0.0
    for stage, module in ours.items():
        for weight, other in zip(module.parameters(), theirs[stage].parameters(), strict=True):
            far = max(far, ((weight.grad - other.grad).norm() / other.grad.norm()).item())
    print(far)

    # The way back: the engine runs the runtime's order with the runtime's modules.
    back = Pipeline.from_torch(runtime)
    assert back.schedule.orders == schedule.orders and back.schedule.placement == schedule.placement
    for module in theirs.values():
        module.zero_grad()
    assert back.step(inputs, targets).equal(pipeline.loss)
    for stage, module in ours.items():
        for weight, other in zip(module.parameters(), theirs[stage].parameters(), strict=True):
            assert weight.grad.equal(other.grad)
dist.barrier()
"""

FOUND = ["atlas line 3", "atlas v 5", "atlas loop 5"]  # the best for a placement and a memory
MADE = {name: pp.schedule(name, 4, 8) for name in pp.schedules()}
NAMES = [name for name, each in MADE.items() if each.plain and each.placement.copies == 1]
NAMES += FOUND
FORMS = ["compute_only", "compute_comms"]
QUICK = ["1f1b", "interleaved", "zb-v", "dualpipev", FOUND[1]]  # of each placement, with halves, and with pairs


@pytest.fixture(scope="module")
def differences(ranks):
    """`differences(name, form)` returns the largest relative difference of a gradient on any rank."""
    found = {}

    def get(name, form):
        if (name, form) not in found:
            found.update(run([each for each in NAMES if (each in QUICK) == (name in QUICK)], ranks))
        return found[name, form]

    return get


def run(names, ranks):
    asked = []
    for name in names:
        asked += [(name, form, 8) for form in FORMS if form == FORMS[0] or not lack(TORCHS_MESSAGES)]
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


REFUSED = """
loss = fn.mse_loss
held = {rank: nn.Linear(2, 2)}
for given in [
    (pp.schedule("dualpipe", 2, 4), held, loss),
    (pp.schedule("1f1b", 2, 4).forwards, held, loss),
    (pp.schedule("1f1b", 4, 4), held, loss),
    (pp.schedule("1f1b", 2, 4), {1 - rank: nn.Linear(2, 2)}, loss),
    (pp.schedule("1f1b", 2, 4), held, "mse"),
    ("1f1b", held, loss),
]:
    try:
        pp.run.to_torch(*given)
    except pp.PipelineError as error:
        print(error)
try:
    pp.run.to_torch(pp.schedule("1f1b", 2, 4), held, loss, microbatch=3)
except pp.SettingError as error:
    print(error)
"""


def test_torchs_runtime_is_refused_with_the_reason(ranks):
    with pytest.raises(pp.CommunicationError, match="torch's runtime needs a process group; call"):
        pp.run.to_torch(pp.schedule("1f1b", 1, 2), {0: torch.nn.Linear(2, 2)}, torch.nn.functional.mse_loss)
    found = ranks(BEGIN + REFUSED, 2)[0].splitlines()
    expected = [
        "take a schedule with one copy, such as dualpipev",
        "runs forwards alone, and torch's runtime is for training; take Pipeline",
        "needs 4 ranks; the group has 2",
        "rank 0 holds the stages 0; got 1",
        "loss_fn must be a function of an output and a target; got 'mse'",
        "to_torch",
        "torch's runtime cannot be made like this",
    ]
    assert len(found) == len(expected), found
    assert all(part in line for part, line in zip(expected, found, strict=True)), found


BACK = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, microbatch

def made(**settings):
    stage = PipelineStage(nn.Linear(2, 2), rank, 2, torch.device("cpu"))
    return Schedule1F1B(stage, 4, fn.mse_loss, **settings)

mask = {"mask": microbatch.TensorChunkSpec(1)}
pipeline = Pipeline.from_torch(made(kwargs_chunk_spec=mask, scale_grads=False), seed=3)
print(pipeline.schedule.orders == pp.schedule("1f1b", 2, 4).orders, pipeline.batching.input_dims, pipeline.seed)
print(pipeline.batching.reduction, pipeline.step(torch.ones(8, 2), torch.zeros(8, 2)) > 0)
for wrong in (made(args_chunk_spec=("rows",)), pp.schedule("1f1b", 2, 4)):
    try:
        Pipeline.from_torch(wrong)
    except pp.SettingError as error:
        print(error)
"""


@needs(TORCHS_ORDERS)
def test_a_schedule_of_torch_becomes_a_pipeline(ranks):
    for text in ranks(BEGIN + BACK, 2):
        assert text.splitlines() == [
            "True {'mask': 1} 3",
            "sum tensor(True)",
            "Pipeline cannot cut or join 0 as torch does, by 'rows'; give it a batching=",
            "runtime must be a schedule of torch.distributed.pipelining, such as Schedule1F1B(…); got "
            "Schedule('1f1b', ranks=2, stages=2, microbatches=4)",
        ]
