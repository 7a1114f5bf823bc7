"""Sharded stages have the gradients of one process, with exactly the collectives that the schedule asks for."""

import json
import re

import pytest
from cases import BEGIN, ONE_PROCESS
from releases import needs

from ppedu.engine.ranks.versions import SHARDING

pytestmark = needs(SHARDING)
CASES = [("1f1b", 0), ("zb-h1", 1), ("zb-v", 0), ("dualpipev", 0), ("dualpipe", 0)]
IDS = [name + "-again" * again for name, again in CASES]

START = """
import torch.distributed.checkpoint as saved
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
replica, rank = mesh.get_coordinate()
replicas = mesh["replica"].get_group()
group = PipelineGroup(rank, 2, mesh["pipeline"].get_group())
config = GPTConfig(vocabulary=11, context=8, layers=4, heads=2, width=16)
tokens = torch.randint(11, (2, 8, 9), generator=torch.Generator().manual_seed(3))  # for each replica
inputs, targets = tokens[replica, :, :-1], tokens[replica, :, 1:]
report = {}
warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's checkpoints use it before 2.10

def make(schedule, seed=0, rank=rank, **options):
    "A rank's stages, their blocks sharded, then each as a whole."
    found = {stage: GPT.stage(config, stage, schedule.stages, seed) for stage in local_stages(schedule, rank)}
    for module in found.values():
        for part in (*module.layers.values(), module):
            fully_shard(part, mesh=mesh["replica"], **options)
    return found

def sharded(schedule, modules):
    return Pipeline(schedule, modules, next_token_loss, group, replicas=replicas)

def far(found, expected):
    return ((found - expected).norm() / expected.norm()).item()
"""

GRADIENTS = """
class Counted(TorchDispatchMode):
    "Counts the collectives."
    def __init__(self):
        super().__init__()
        self.calls = Counter()
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls[op.name()] += 1
        return op(*args, **(kwargs or {}))

def both_replicas(schedule, modules):
    "Return the loss of both replicas; leave the mean of their gradients in the modules."
    total, grads = 0, []
    for x, y in zip(tokens[:, :, :-1], tokens[:, :, 1:]):
        nn.ModuleList(modules).zero_grad()
        pieces = x.chunk(schedule.microbatches), y.chunk(schedule.microbatches)
        total += one_process(schedule, modules, *pieces, next_token_loss) / 2
        grads.append([weight.grad for weight in nn.ModuleList(modules).parameters()])
    for weight, one, other in zip(nn.ModuleList(modules).parameters(), *grads):
        weight.grad = (one + other) / 2
    return total

for name, again in json.loads(sys.argv[1]):
    schedule = pp.schedule(name, 2, 4)
    modules = make(schedule)
    for block in (block for module in modules.values() for block in module.layers.values() if again):
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    if hasattr(fsdp, "share_comm_ctx"):  # since 2.10, torch advises it for several stages on a rank
        fsdp.share_comm_ctx(list(modules.values()))
    seldom = name == "zb-v"  # one stage at a time is gathered; others are freed between a forward and its backward
    lowered = pp.lower(schedule, fsdp=True, resident=1 if seldom else 3)
    pipeline = sharded(lowered if seldom else schedule, modules)
    with Counted() as counted:
        loss = pipeline.step(inputs, targets)
    whole = [GPT.stage(config, stage, schedule.stages) for stage in range(schedule.stages)]
    weights = [weight for module in whole for weight in module.parameters()]
    expected = both_replicas(schedule, whole)
    pairs = [(weight, other) for stage, module in modules.items()
             for weight, other in zip(module.parameters(), whole[stage].parameters(), strict=True)]
    grads = [(weight.grad.full_tensor(), other.grad) for weight, other in pairs]
    norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
    found = dict(exact=all(torch.equal(*pair) for pair in grads), grads=max(far(*pair) for pair in grads),
                 loss=far(loss, expected), norm=far(torch.tensor(pipeline.clip_grad_norm(norm.item() / 2)), norm))

    for weight in weights:
        weight.grad /= 2
    for each in ([weight for weight, _ in pairs], weights):
        torch.optim.AdamW(each, lr=0.01).step()
    found["weights"] = max(far(weight.full_tensor(), other) for weight, other in pairs)
    with torch.no_grad():
        expected = next_token_loss(torch.nn.Sequential(*whole)(tokens[..., :-1].flatten(0, 1)), tokens[..., 1:])
    found["evaluated"] = far(pipeline.eval(inputs, targets), expected)

    parts = {stage: len(module.layers) + bool(module.embedding or module.head) for stage, module in modules.items()}
    unshards = [action.stage for action in lowered.order(rank) if action.op == Op.UNSHARD]
    found["gathers"] = counted.calls["c10d::_allgather_base_"], sum(parts[stage] for stage in unshards)
    found["reductions"] = counted.calls["c10d::_reduce_scatter_base_"], sum(parts.values())
    report[f"{name}-again" if again else name] = found
"""

PRECISION = """
def half_precision(name):
    schedule = pp.schedule(name, 2, 8)
    modules = make(schedule, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    sharded(schedule, modules).step(inputs, targets)
    return [weight.grad.full_tensor() for module in modules.values() for weight in module.parameters()]

report["half"] = all(map(torch.equal, half_precision("1f1b"), half_precision("zb-h1")))
"""

RESUMED = """
def started(seed):
    schedule = pp.schedule("zb-v", 2, 4)
    model = torch.nn.ModuleDict({str(stage): module for stage, module in make(schedule, seed).items()})
    pipeline = sharded(schedule, {int(stage): module for stage, module in model.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    def step():
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets).item()
        optimizer.step()
        return loss
    return step, model, optimizer

flat = StateDictOptions(flatten_optimizer_state_dict=True)  # each rank has weights of its own
step, *state = started(seed=0)
step()
saved.save(dict(zip(("model", "optimizer"), get_state_dict(*state, options=flat))), checkpoint_id=sys.argv[2])
report["went on"] = step(), step()
step, *state = started(seed=1)
loaded = get_state_dict(*state, options=flat)
saved.load(dict(zip(("model", "optimizer"), loaded)), checkpoint_id=sys.argv[2])
set_state_dict(*state, model_state_dict=loaded[0], optim_state_dict=loaded[1], options=flat)
report["resumed"] = step(), step()
"""

REFUSED = """
def error(run):
    try:
        run()
    except pp.PipelineError as error:
        return f"{type(error).__name__}: {error}"

schedule = pp.schedule("1f1b", 2, 4)
stage = GPT.stage(config, rank, 2)
if rank == 1:
    fully_shard(stage.layers["3"], mesh=mesh["replica"])
def stepped(pipeline):
    return error(lambda: pipeline.step(inputs, targets))

report["in parts"] = stepped(sharded(schedule, {rank: stage}))
report["mixed"] = stepped(sharded(schedule, {0: GPT.stage(config, 0, 2)} if rank == 0 else make(schedule)))
report["lowered"] = stepped(sharded(pp.lower(schedule), make(schedule)))
apart = pp.schedule("roundpipe", 2, 4)
report["apart"] = stepped(sharded(apart, make(apart)))
report["elsewhere"] = stepped(
    Pipeline(schedule, make(schedule), next_token_loss, group=group, replicas=dist.group.WORLD)
)

schedule = pp.schedule("gpipe", 1, 2)

def skipping(op):
    pipeline = Pipeline(schedule, make(schedule, rank=0), next_token_loss, PipelineGroup(0, 1))
    if op:
        pipeline.on(op, lambda action, step: None)
    pipeline.step(inputs, targets)
    torch.optim.SGD(pipeline.stages[0].module.parameters(), lr=1.0).step()
    return pipeline.step(inputs, targets).item()

report["ungathered"] = error(lambda: skipping(Op.UNSHARD))
report["unreduced"] = error(lambda: skipping(Op.REDUCE_GRAD))
report["kept gathered"] = skipping(Op.RESHARD), skipping(None)
print(json.dumps(report))
dist.barrier()
"""


@pytest.fixture(scope="module")
def reports(ranks, tmp_path_factory):
    program = (
        BEGIN + ONE_PROCESS + START + GRADIENTS + PRECISION + RESUMED + REFUSED
    )  # one, for it takes long to import fully_shard
    folder = tmp_path_factory.mktemp("checkpoint")
    return [json.loads(text) for text in ranks(program, 4, json.dumps(CASES), str(folder), timeout=240)]


@pytest.mark.parametrize("case", IDS)
def test_sharded_gradients_norms_and_updates_are_those_of_one_process(reports, case):
    for found in (report[case] for report in reports):
        assert found["exact"] or (case == "dualpipe" and found["grads"] <= 1e-6)  # where two copies are added last
        assert max(found["loss"], found["norm"], found["weights"], found["evaluated"]) <= 1e-6


@pytest.mark.parametrize("case", IDS)
def test_each_unshard_gathers_once_and_each_step_reduces_once(reports, case):
    for found in (report[case] for report in reports):
        for kind in ("gathers", "reductions"):
            counted, expected = found[kind]
            assert counted == expected > 0


def test_split_backwards_add_up_half_precision_gradients_in_full_precision(reports):
    assert all(report["half"] for report in reports)


def test_a_sharded_pipeline_resumes_from_a_checkpoint(reports):
    for report in reports:
        assert report["resumed"] == report["went on"]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("in parts", "SettingError: stage 1 on rank 1 has parts that are sharded.*call fully_shard on the whole stage"),
        ("mixed", "SettingError: stage 0 on rank 0 is not sharded, but stage 1 on rank 1 is.*every stage, or on none"),
        ("lowered", "SettingError: stage ([01]) is sharded, but rank \\1 never runs \\1UNSHARD or \\1REDUCE_GRAD"),
        ("apart", "SettingError: the forward and the backward of a stage are on two ranks, and its weights cannot be"),
        ("elsewhere", "SettingError: the replicas include the global ranks .*give fully_shard a mesh of all replicas"),
        ("ungathered", "PipelineError: rank 0: 0F0 failed: the weights of stage 0 are sharded; 0UNSHARD must come"),
        ("unreduced", "PipelineError: rank 0: the gradients of stage 0 have not been averaged.*0REDUCE_GRAD must call"),
    ],
)
def test_invalid_sharding_is_refused_on_every_rank(reports, what, says):
    for report in reports:
        assert re.match(says, report[what])


def test_weights_that_a_handler_keeps_gathered_are_gathered_again_in_the_next_step(reports):
    for report in reports:
        kept, usual = report["kept gathered"]
        assert kept == usual
