"""What goes wrong in a step is one clear error on every rank, in time; and what must not go wrong does not."""

import json
import re
from dataclasses import replace

import pytest
from torch import nn

import ppedu as pp
from ppedu.run import Pipeline

# Cases are run one after the other, each with fresh connections, by pipelines of 3 or 4 ranks side by side.
PRELUDE = """
import json, os, sys, time, traceback, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as fn
import ppedu as pp
from ppedu import Op
from ppedu.run import GPT, Batching, GPTConfig, Pipeline, PipelineGroup, local_stages, next_token_loss

warnings.simplefilter("error")
dist.init_process_group("gloo")
size = int(sys.argv[1])
place, rank = divmod(dist.get_rank(), size)
own = range(place * size, place * size + size)

def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

X, Y = numbers(8, 4), numbers(4, 8).t()
SPOILT = X.clone()
SPOILT[4, 0] = torch.nan  # in microbatch 2

class Of(nn.Module):
    "A module with these parts, which computes `run(self, *inputs)`."
    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)
    def forward(self, *inputs, **keywords):
        return self.run(self, *inputs, **keywords)

def layer(stage):
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

def fresh():
    return PipelineGroup(rank, size, dist.new_group(own, use_local_synchronization=True))

def made(schedule="1f1b", microbatches=4, change=None, **options):
    "A pipeline of small layers; `change` has other modules."
    if isinstance(schedule, str):
        schedule = pp.schedule(schedule, size, microbatches)
    stages = {stage: (change or {}).get(stage) or layer(stage) for stage in local_stages(schedule, rank)}
    return Pipeline(schedule, stages, **{"loss_fn": fn.mse_loss, "group": fresh(), "timeout": 1.5} | options)

def interrupt():
    raise KeyboardInterrupt

def told(call):
    try:
        return call()
    except BaseException as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == "<string>"]
        return f"{type(error).__name__}: {error} (lines {lines})"

def parts(pieces):
    return [each if isinstance(each, tuple) else (each,) for each in pieces]

def judge(modules, inputs=X.split(2), targets=Y.split(2), loss_fn=fn.mse_loss, **keywords):
    "On one process, without a pipeline: each microbatch's loss; their mean's gradients are left in the modules."
    losses, total = [], sum(map(len, targets))
    for x, y in zip(parts(inputs), targets, strict=True):
        for module in modules:
            x = parts([module(*x, **keywords)])[0]
        losses.append(loss_fn(*x, y))
        (losses[-1] * len(y) / total).backward()
    return torch.stack(losses).detach()

def agree(pipeline, modules, losses=None, exact=True):
    "The gradients of a pipeline, and its loss and losses, are those of one process."
    for index, stage in pipeline.stages.items():
        for ours, theirs in zip(stage.module.parameters(), modules[index].parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None, index
            elif exact:
                assert torch.equal(ours.grad, theirs.grad), index
            else:
                torch.testing.assert_close(ours.grad, theirs.grad)
    if losses is not None:
        assert torch.equal(pipeline.losses, losses) and torch.allclose(pipeline.loss, losses.mean())

for case, code in json.loads(sys.argv[2])[place]:
    names = dict(globals())
    start = time.monotonic()
    first = told(lambda: exec(code, names)) or "fine"
    took = time.monotonic() - start
    then = told(lambda: round(names["pipeline"].step(X, Y).item(), 4)) if first != "fine" and size == 3 else ""
    print(json.dumps([case, first, then, took]), flush=True)
    fresh()
dist.barrier()
"""


def run(ranks, size, side_by_side, cases):
    """By case, what each rank has said: of the case, and of a step after it; and how long the case took."""
    shares = [[(name, cases[name]) for name in list(cases)[place::side_by_side]] for place in range(side_by_side)]
    output = ranks(PRELUDE, size * side_by_side, str(size), json.dumps(shares), timeout=200)
    found = {}
    for text in output:
        for case, first, then, took in map(json.loads, text.splitlines()):
            found.setdefault(case, []).append((first, str(then), took))
    return found


LATE = "rank {rank}[ :].*(has not come to it within|not every rank reached it within|the connection to .* is lost)"
STOPPED = "PipelineError: this pipeline cannot be used after an error within a step "
AGAIN = "0.82"  # the loss of a good step


def handled(rank, op, what, debug=False):
    return f'''
pipeline = made(debug={debug})
if rank == {rank}:
    pipeline.on("{op}", lambda action, step: {what})
pipeline.step(X, Y)
'''


def with_stage(stage, run, call="pipeline.step(X, Y)", **options):
    return f"""
pipeline = made(change={{{stage}: Of({run}, a=layer({stage}))}}, **{options})
{call}
"""


STEP = "pipeline.step(X, Y)"
ALTERNATELY = "step.post(action._replace(microbatch=action.microbatch ^ 1))"
ALL_BUT_ONE = "action.microbatch == 1 or step.default(action)"
# What each of the three ranks says; a step after it is refused, or works.
FAILURES = {
    "a swapped receive": (
        handled(1, "RECV_F", ALTERNATELY, debug=True),
        [
            LATE,
            "CommunicationError: rank 1: 1RECV_F1 expects the message of 0SEND_F1, but that of 0SEND_F0 arrived",
            LATE,
        ],
        STOPPED,
    ),
    "a missing send": (
        handled(0, "SEND_F", ALL_BUT_ONE),
        [
            LATE,
            r"rank 1: 1F3 waits for 1RECV_F3 \(rank 0 → 1: F of microbatch 3\): ",
            LATE,
        ],
        STOPPED,
    ),
    "a missing send, debug": (
        handled(0, "SEND_F", ALL_BUT_ONE, debug=True),
        [
            LATE,
            "CommunicationError: rank 1: 1RECV_F1 expects the message of 0SEND_F1, but that of 0SEND_F2 arrived",
            LATE,
        ],
        STOPPED,
    ),
    "a missing send of a gradient": (
        handled(2, "SEND_B", None),
        [LATE, r"rank 1: 1B0 waits for 1RECV_B0 \(rank 2 → 1: B of microbatch 0\): ", LATE],
        STOPPED,
    ),
    "a missing receive": (
        handled(1, "RECV_F", None),
        [LATE, "CommunicationError: rank 1: 1F0 waits for 1RECV_F0, which is not posted", LATE],
        STOPPED,
    ),
    "a forward that gives nothing": (
        handled(0, "F", None),
        [
            "PipelineError: rank 0: 0SEND_F0 failed: there is no result of 0F0: its handler must call step.give",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "another shape than earlier": (
        with_stage(
            0,
            "lambda s, x: s.a(x) if x.isfinite().all() else s.a(x)[:1]",
            "pipeline.step(SPOILT, Y)",
        ),
        [
            r"CommunicationError: rank 0: 0SEND_F2 sends float32 \(1, 4\), but the receiver expects float32",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "another dtype than earlier": (
        with_stage(
            0,
            "lambda s, x: s.a(x) if x.isfinite().all() else s.a(x).double()",
            "pipeline.step(SPOILT, Y)",
        ),
        [
            r"CommunicationError: rank 0: 0SEND_F2 sends float64 \(2, 4\), but the receiver expects float32",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "a shape that does not fit": (
        with_stage(0, "lambda s, x: s.a(x)[:, :3]"),
        [LATE, "PipelineError: rank 1: 1F0 failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied", LATE],
        STOPPED,
    ),
    "a dtype that does not fit": (
        with_stage(0, "lambda s, x: s.a(x).double()"),
        [LATE, "PipelineError: rank 1: 1F0 failed: RuntimeError: mat1 and mat2 must have the same dtype", LATE],
        STOPPED,
    ),
    "a dtype that cannot be sent": (
        with_stage(0, "lambda s, x: torch.complex(s.a(x), x)"),
        ["PipelineError: rank 0: 0SEND_F0 failed: cannot send a 2-dimensional tensor of torch.complex64", LATE, LATE],
        STOPPED,
    ),
    "a dict between stages": (
        with_stage(0, "lambda s, x: {'x': s.a(x)}"),
        ["PipelineError: rank 0: 0F0 failed: pass a tensor or a tuple of tensors between stages; got dict", LATE, LATE],
        STOPPED,
    ),
    "a tuple of more than tensors between stages": (
        with_stage(1, "lambda s, x: (s.a(x), None)"),
        [
            LATE,
            "rank 1: 1F0 failed: pass a tensor or a tuple of tensors between stages; got tuple of Tensor, NoneType",
            LATE,
        ],
        STOPPED,
    ),
    "a DTensor between stages": (
        """
from torch.distributed.tensor import DTensor, init_device_mesh
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
pipeline = made(change={0: Of(lambda s, x: DTensor.from_local(s.a(x), mesh), a=layer(0))})
pipeline.step(X, Y)
""",
        [
            "PipelineError: rank 0: 0SEND_F0 failed: a message can only have dense tensors of one rank; got a DTensor",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "a sparse tensor between stages": (
        with_stage(0, "lambda s, x: s.a(x).to_sparse()"),
        [
            "PipelineError: rank 0: 0SEND_F0 failed: a message can only .* got a sparse tensor: send its to_dense",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "a message that torch refuses": (
        """
pipeline = made()
if rank == 0:
    pipeline.messages.channel = type("Refusing", (), {"send": lambda *a: exec("raise RuntimeError('no such luck')")})()
pipeline.step(X, Y)
""",
        [
            r"CommunicationError: rank 0: 0SEND_F0 \(.*\): RuntimeError: no such luck \(in the order: ",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "an input changed in place": (
        with_stage(1, "lambda s, x: s.a(x.relu_())"),
        [
            LATE,
            "PipelineError: rank 1: 1F0 failed: stage 1 changes its input in place, .* with x = x.clone",
            LATE,
        ],
        STOPPED,
    ),
    "a stage that raises": (
        with_stage(
            1,
            "lambda s, x: s.a(x) if x.isfinite().all() else 1 // 0",
            "pipeline.step(SPOILT, Y)",
        ),
        [LATE, "PipelineError: rank 1: 1F2 failed: ZeroDivisionError: integer division or modulo by zero", LATE],
        STOPPED,
    ),
    "a backward that raises": (
        """
class Broken(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, dy: 1 // 0)
pipeline = made("zb-h1", change={1: Of(lambda s, x: Broken.apply(s.a(x)), a=layer(1))})
pipeline.step(X, Y)
""",
        [LATE, "PipelineError: rank 1: 1I0 failed: ZeroDivisionError", LATE],
        STOPPED,
    ),
    "an interrupt": (
        with_stage(1, "lambda s, x: interrupt()"),
        [LATE, "KeyboardInterrupt", LATE],
        STOPPED,
    ),
    "a loss that is not finite": (
        """
pipeline = made()
pipeline.step(SPOILT, Y)
""",
        ["PipelineError: rank 2: 2F2 gave a loss of nan; check microbatch 2 and the learning rate"] * 3,
        AGAIN,
    ),
    "a loss of several numbers": (
        """
pipeline = made(loss_fn=lambda y, target: (y - target).square())
pipeline.eval(X, Y)
""",
        [
            LATE,
            LATE,
            r"PipelineError: rank 2: 2F0 failed: a microbatch.s loss must be .* got a tensor of shape \(2, 4\)",
        ],
        STOPPED,
    ),
    "a loss that is no tensor": (
        """
pipeline = made(loss_fn=lambda y, target: 0.5)
pipeline.step(X, Y)
""",
        [
            LATE,
            LATE,
            "PipelineError: rank 2: 2F0 failed: a microbatch's loss must be a tensor with one element; got float",
        ],
        STOPPED,
    ),
    "no loss_fn": (
        """
pipeline = made(loss_fn=None)
pipeline.step(X, Y)
""",
        [
            LATE,
            LATE,
            r"PipelineError: rank 2: 2F0 failed: .* got .*: return a scalar from loss_fn, or from the last stage",
        ],
        STOPPED,
    ),
    "no targets": (
        """
pipeline = made()
pipeline.step(X)
""",
        [None, None, "SettingError: rank 2 holds the last stage, so step needs the targets there"],
        None,
    ),
    "no inputs": (
        """
pipeline = made()
pipeline.step(None, Y)
""",
        ["SettingError: rank 0 holds the first stage, so step needs the inputs there", None, None],
        None,
    ),
    "microbatches that do not fit": (
        """
pipeline = made()
pipeline.step(list(X.split(3)), Y)
""",
        ["SettingError: input 0 is a list of 3 microbatches, but the schedule has 4"] * 3,
        AGAIN,
    ),
    "another batch on one rank": (
        """
pipeline = made()
pipeline.step(X if rank < 2 else X[:6], Y)
""",
        ["CommunicationError: microbatch 2 of the inputs has a different shape or dtype on rank 0 than on rank 2"] * 3,
        AGAIN,
    ),
    "another batch on one rank, later": (
        """
pipeline = made()
pipeline.step(X, Y)
pipeline.step(X if rank < 2 else X[:6], Y)
""",
        [
            LATE,
            LATE,
            r"rank 2 cannot start step \(here, the call or the batch's shapes differ from the last ones\): not every",
        ],
        STOPPED,
    ),
    "another schedule on one rank": (
        """
pipeline = made("1f1b" if rank < 2 else "gpipe")
pipeline.step(X, Y)
""",
        ["CommunicationError: rank 2 has a different schedule than rank 0; give all ranks the same"] * 3,
        "CommunicationError",
    ),
    "another number of microbatches on one rank": (
        """
pipeline = made(microbatches=4 if rank else 8)
pipeline.step(X, Y)
""",
        ["CommunicationError: rank 1 has a different schedule than rank 0; give all ranks the same"] * 3,
        "CommunicationError",
    ),
    "debug on one rank": (
        """
pipeline = made(debug=rank == 1)
pipeline.step(X, Y)
""",
        ["CommunicationError: rank 1 has a different debug than rank 0; give all ranks the same"] * 3,
        "CommunicationError",
    ),
    "another seed on one rank": (
        """
pipeline = made()
pipeline.seed = rank
pipeline.step(X, Y)
""",
        ["CommunicationError: rank 1 has a different seed than rank 0; give all ranks the same"] * 3,
        "CommunicationError",
    ),
    "a norm below 0 to clip to": (
        """
pipeline = made()
pipeline.step(X, Y)
pipeline.clip_grad_norm(-1.0)
""",
        ["SettingError: max_norm must be a number above 0; got -1.0"] * 3,
        AGAIN,
    ),
    "a step in inference mode": (
        """
pipeline = made()
with torch.inference_mode():
    pipeline.step(X, Y)
""",
        ["SettingError: step cannot compute gradients within torch.inference_mode"] * 3,
        AGAIN,
    ),
    "an eval on one rank": (
        """
pipeline = made()
pipeline.eval(X, Y) if rank == 1 else pipeline.step(X, Y)
""",
        ["CommunicationError: rank 0 calls step, but rank 1 calls eval; call the same on all"] * 3,
        AGAIN,
    ),
    "an eval on one rank, later": (
        """
pipeline = made()
pipeline.step(X, Y)
pipeline.eval(X, Y) if rank == 1 else pipeline.step(X, Y)
""",
        [
            LATE,
            r"rank 1 cannot start eval \(here, the call or the batch's shapes differ from the last ones\): not every",
            LATE,
        ],
        STOPPED,
    ),
    "weights unfrozen between steps": (
        """
pipeline = made(change={0: layer(0).requires_grad_(False)})
pipeline.step(X, Y)
if rank == 0:
    pipeline.stages[0].module.requires_grad_()
pipeline.step(X, Y)
""",
        [
            "CommunicationError: rank 0: 0SEND_F0 sends .* make a new Pipeline after \\(un\\)freezing",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "orders that run only if sends are buffered": (
        """
lowered = pp.lower(pp.schedule("1f1b", size, 4))
orders = [[], [], []]
for order, late in zip(lowered.orders, orders):
    for action in order:
        if action.op in ("F", "B"):  # each receive just before what needs it
            receive = pp.Action(action.stage, Op("RECV_" + action.op), action.microbatch)
            late += [receive] * (receive in order)
        if action.op not in ("RECV_F", "RECV_B"):
            late.append(action)
late = pp.Schedule("late", lowered.placement, 4, tuple(map(tuple, orders)))
assert not pp.check(late)
pipeline = made(late)
""",
        ["SettingError: .* would run only if every send were buffered: deadlock: rank 1 waits at position"] * 3,
        None,
    ),
    "a write after a send": (
        """
class Reused(nn.Module):
    "Gives the same memory again and again."
    def __init__(self):
        super().__init__()
        self.a, self.memory = layer(0), torch.zeros(2, 4)
    def forward(self, x):
        y = self.a(x)
        y.data = self.memory.copy_(y.detach())
        return y
pipeline = made("gpipe", change={0: Reused()}, debug=True)
pipeline.step(X, Y)
""",
        [
            "CommunicationError: rank 0: a tensor of 0SEND_F0 was written to after it was sent; make a new tensor",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "a rank that does not come": (
        """
pipeline = made()
if rank == 2:
    time.sleep(2)
pipeline.step(X, Y)
""",
        [
            "CommunicationError: rank 0 cannot start step: not every rank reached it within 1.5 s",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
    "a rank that is slow": (
        with_stage(1, "lambda s, x: (time.sleep(2), s.a(x))[1]"),
        [
            r"rank 0: 0B0 waits for 0RECV_B0 \(rank 1 → 0: B of microbatch 0\): rank 1 has not come to it within 1.5 s",
            LATE,
            LATE,
        ],
        STOPPED,
    ),
}


@pytest.fixture(scope="module")
def failures(ranks):
    return run(ranks, 3, 5, {case: code for case, (code, _, _) in FAILURES.items()})


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_one_clear_error_on_each_rank(failures, case):
    _, expected, after = FAILURES[case]
    for rank, (why, (first, then, took)) in enumerate(zip(expected, failures[case], strict=True)):
        assert why is None or re.search(why.format(rank=rank) if why == LATE else why, first), first
        assert after is None or then.startswith(after), then
        assert took < 10  # the timeout is 1.5 s


CORRECT = {
    "an evaluation is that of one process, and leaves gradients and modes as they were": """
def stages():
    made = {stage: nn.Sequential(layer(stage), nn.Dropout(0.5), nn.BatchNorm1d(4)) for stage in range(4)}
    made[2][1].eval()
    return made
pipeline, model = made(change=stages()), nn.Sequential(*stages().values()).eval()
weights = [weight for stage in pipeline.stages.values() for weight in stage.module.parameters()]
weights[0].grad = before = torch.ones_like(weights[0])
for _ in range(2):
    y = pipeline.forward(X)
    assert torch.equal(y, torch.cat([model(x) for x in X.split(2)])) if rank == 3 else y is None
    loss = pipeline.eval(X, Y)
    assert torch.equal(pipeline.losses, torch.stack([fn.mse_loss(model(x), y) for x, y in zip(X.split(2), Y.split(2))]))
    assert loss == pipeline.losses.mean()
assert weights[0].grad is before and before.eq(1).all() and all(weight.grad is None for weight in weights[1:])
modes = [part.training for part in pipeline.stages[rank].module.children()]
assert modes == [True, rank != 2, True] and pipeline.steps == 0
""",
    "what a model gives may be any tensors, or something else": """
pipeline = made(change={3: Of(lambda s, x: (s.a(x), x.sum()), a=layer(3))}, batching=Batching(output_dim=1))
found = pipeline.forward(X)
assert found is None if rank < 3 else (found[0].shape, found[1].shape) == ((2, 16), (4,))
last = Of(lambda s, x: {"y": s.a(x)}, a=layer(3))
pipeline = made(change={3: last}, loss_fn=lambda y, target: fn.mse_loss(y["y"], target))
found = pipeline.forward(X)
assert found is None if rank < 3 else found["y"].shape == (8, 4)
assert pipeline.step(X, Y) == pipeline.eval(X, Y)
pipeline = made("dualpipe", 8)
found, expected = pipeline.forward(X), made("gpipe", 8).forward(X)
both = [torch.zeros(4, 4) for _ in range(4)]
dist.all_gather(both, torch.zeros(4, 4) if found is None else found)
assert rank < 3 or torch.equal(torch.cat([both[3], both[0]]), expected)
""",
    "a handler may stand for every op": """
from collections import Counter
from ppedu.core.actions import overlap
from ppedu.run.interpreter import METHODS
seen = set()
schedules = [pp.schedule(name, 4, 8) for name in ["zb-h1", "dualpipe", "1f1b-overlap"]]
paired = schedules[-1]
turned = [[overlap(*action.parts[::-1]) if action.parts else action for action in order] for order in paired.orders]
schedules.append(pp.Schedule("turned", paired.placement, 8, tuple(map(tuple, turned))))
for schedule in schedules:
    done = Counter()
    pipelines = [made(schedule) for _ in range(2)]
    for op in METHODS:
        def counted(action, step):
            done[action.op] += 1
            step.default(action)
        pipelines[0].on(op, counted)
    losses = [pipeline.step(X, Y) for pipeline in pipelines]
    assert losses[0] == losses[1]
    agree(pipelines[0], {stage: pipelines[1].stages[stage].module for stage in pipelines[1].stages})
    orders = pp.lower(schedule).order(rank)
    expected = Counter(one.op for action in orders for one in (action, *action.parts))
    assert done == expected, (done, expected)
    seen |= set(done)
ops = [None] * size
dist.all_gather_object(ops, seen)
assert set().union(*ops) == {op for op in METHODS if op not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")}
assert "unknown op 'SEND'" in told(lambda: pipelines[0].on("SEND", counted))
""",
    "stages take and return several tensors, some without gradients": """
def stages():
    return {
        0: Of(lambda s, x: (s.a(x), torch.arange(len(x)).flip(0), x * 2), a=layer(0)),
        1: Of(lambda s, x, n, y: (n > 0, s.a(x)[n] + y, s.b(y), x), a=layer(1), b=layer(5)),
        2: Of(lambda s, more, x, y, z: (s.a(x * y), more.double(), z), a=layer(2)),
        3: Of(lambda s, x, more, z: s.a(x) + z * more[:, None].float(), a=layer(3)),
    }
for name in ["1f1b", "zb-h1", "gems"]:
    for debug in [False, True]:
        model, pipeline = list(stages().values()), made(name, change=stages(), debug=debug)
        for _ in range(2):
            losses = judge(model)
            pipeline.step(X, Y)
            agree(pipeline, model, losses, exact=name != "gems")
""",
    "every stage is given the keywords": """
def turn(s, x, scale, table, power):
    return s.a(x) * scale[0] + table**power
def stages():
    return {stage: Of(turn, a=layer(stage)) for stage in range(4)}
def quarter(y, target):
    return fn.mse_loss(y, target) / 4
scale, table = numbers(1, 8, 1), numbers(4)
batching = Batching(input_dims={"scale": 1, "table": None})
model, pipeline = list(stages().values()), made(change=stages(), batching=batching)
pipeline.step(X, Y, scale=scale, table=table, power=2)
pieces = zip(X.split(2), Y.split(2), scale.split(2, 1))
losses = [judge(model, [x], [y], quarter, scale=piece, table=table, power=2) for x, y, piece in pieces]
agree(pipeline, model)
assert torch.allclose(pipeline.loss, torch.cat(losses).sum())
""",
    "stages may be frozen": """
for frozen in [[0], [1], [0, 1], [0, 2], [1, 3], [0, 1, 2]]:
    def stages():
        return {stage: layer(stage).requires_grad_(stage not in frozen) for stage in range(4)}
    group = fresh()
    for name in ["1f1b", "zb-h1"]:
        model, pipeline = list(stages().values()), made(name, change=stages(), group=group)
        for _ in range(2):
            losses = judge(model)
            pipeline.step(X, Y)
            agree(pipeline, model, losses)
""",
    "dropout is that of the seed, whatever the schedule": """
x, y = X[:2].repeat(4, 1), Y[:2].repeat(4, 1)  # four times the same microbatch
def trained(name, seed):
    pipeline = made(name, change={stage: nn.Sequential(layer(stage), nn.Dropout(0.5)) for stage in range(4)}, seed=seed)
    state = torch.get_rng_state()
    losses = [loss for _ in range(2) for loss in (pipeline.step(x, y), pipeline.losses)[1].tolist()]
    assert torch.equal(state, torch.get_rng_state())
    return losses, {stage: each.module for stage, each in pipeline.stages.items()}, pipeline
losses, model, _ = trained("gpipe", 1)
assert len(set(losses)) == 8
for name in ["1f1b", "zb-h1"]:
    again, _, pipeline = trained(name, 1)
    assert again == losses
    agree(pipeline, model)
assert trained("gpipe", 2)[0] != losses
""",
    "tied weights have the gradients of one weight, step after step": """
def stages(last):
    w = nn.Parameter(numbers(4, 4))
    first = Of(lambda s, x: s.a(x @ s.w), a=layer(0), w=w)
    ends = {0: first, last: Of(lambda s, x: s.a(x) @ s.w.t(), a=layer(last), w=w)}
    return {stage: ends.get(stage) or layer(stage) for stage in range(last + 1)}
for name in ["1f1b", "zb-v", "gems"]:
    last = pp.schedule(name, 4, 4).stages - 1
    model, theirs = list(stages(last).values()), stages(last)
    theirs[last].w = nn.Parameter(numbers(4, 4))
    pipeline = made(name, change=theirs, tied=[((0, "w"), (last, "w"))])
    for _ in range(3):
        losses = judge(model)
        pipeline.step(X, Y)
        agree(pipeline, model, losses, exact=False)
""",
    "pipelines side by side average their gradients and losses": """
mine, half = rank % 2, rank // 2
group = PipelineGroup(mine, 2, dist.new_group([2 * half, 2 * half + 1], use_local_synchronization=True))
replicas = dist.new_group([mine, 2 + mine], use_local_synchronization=True)
for name, stages in [("1f1b", 2), ("zb-h1", 2), ("interleaved", 4), ("zb-v", 4)]:
    schedule = pp.schedule(name, 2, 4)
    held = {stage: layer(stage) for stage in local_stages(schedule, mine)}
    pipeline = Pipeline(schedule, held, fn.mse_loss, group, replicas=replicas)
    models = [[layer(stage) for stage in range(stages)] for _ in range(2)]
    losses = [judge(model, x.split(1), y.split(1)) for model, x, y in zip(models, X.split(4), Y.split(4))]
    loss = pipeline.step(X.split(4)[half], Y.split(4)[half])
    for one, other in zip(models[0], models[1]):
        for weight, other in zip(one.parameters(), other.parameters()):
            weight.grad = (weight.grad + other.grad) / 2
    agree(pipeline, models[0])
    assert torch.equal(pipeline.losses, losses[half]) and torch.allclose(loss, torch.cat(losses).mean())
    why = ["F0 gave a loss of nan", "another replica has a loss of nan"][half]
    assert why in told(lambda: pipeline.step(SPOILT.split(4)[1 - half], Y[:4]))
""",
    "who shares gradients with a rank that fails is told in time": """
def failing(pipeline):
    last = pipeline.schedule.orders[pipeline.group.rank][-1]
    def handler(action, step):
        step.default(action)
        if action == last:
            raise ValueError("at the very end")
    pipeline.on(last.op, handler)
pipeline = made("dualpipe", 8)
if rank == 0:
    failing(pipeline)
said = told(lambda: pipeline.step(X, Y))
why = {0: "rank 0: 0W3 failed: ValueError: at the very end", 3: "rank 3 cannot synchronize the gradients: "}
assert why.get(rank, f"rank {rank} cannot end the step: not every rank") in said, said
mine, half = rank % 2, rank // 2
group = PipelineGroup(mine, 2, dist.new_group([2 * half, 2 * half + 1], use_local_synchronization=True))
replicas = dist.new_group([mine, 2 + mine], use_local_synchronization=True)
pipeline = Pipeline(pp.schedule("1f1b", 2, 4), {mine: layer(mine)}, fn.mse_loss, group, replicas=replicas, timeout=1.5)
if rank == 2:
    failing(pipeline)
said = told(lambda: pipeline.step(X, Y))
why = ["rank 0 cannot synchronize", "rank 1 cannot end the step", "rank 0: 0B3 failed", "rank 1 cannot end the step"]
assert why[rank] in said, said
""",
    "gradients are clipped by the norm over the whole model": """
for name in ["1f1b", "zb-v", "dualpipe", "chimera"]:
    pipeline = made(name, 8)
    model = [layer(stage) for stage in range(pipeline.schedule.stages)]
    judge(model, X.split(1), Y.split(1))
    pipeline.step(X, Y)
    weights = [weight for module in model for weight in module.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(weights, 1e9)
    assert abs(pipeline.clip_grad_norm(1e9) - norm) < 1e-5 * norm
    agree(pipeline, model, exact=False)
    torch.nn.utils.clip_grad_norm_(weights, norm / 3)
    pipeline.clip_grad_norm(norm.item() / 3)
    agree(pipeline, model, exact=False)
schedule = pp.schedule("zb-v", 4, 4)  # its first stage and its last one are on the same rank, and may be one
first = layer(0)
pipeline, model = made(schedule, change={0: first, 7: first}), [layer(stage) for stage in range(7)]
model.append(model[0])
judge(model)
pipeline.step(X, Y)
norm = torch.nn.utils.clip_grad_norm_(nn.ModuleList(model).parameters(), 0.01)
assert abs(pipeline.clip_grad_norm(0.01) - norm) < 1e-5 * norm
agree(pipeline, model, exact=False)
""",
    "with debug, every schedule runs, and to the same end": """
group = fresh()
for name in pp.schedules():
    microbatches = next(m for m in range(1, 40) if told(lambda: pp.schedule(name, 4, m).validate()) is None)
    x, y = numbers(microbatches, 4), numbers(4, microbatches).t()
    pipelines = [made(name, microbatches, group=group, debug=debug) for debug in [True, False]]
    losses = [pipeline.step(x, y) for pipeline in pipelines for _ in range(2)]
    assert len({loss.item() for loss in losses}) == 1, name
    agree(pipelines[0], {stage: each.module for stage, each in pipelines[1].stages.items()})
""",
    "batches may be of any size, from step to step": """
for name in ["1f1b", "zb-v"]:
    pipeline = made(name)
    model = [layer(stage) for stage in range(pipeline.schedule.stages)]
    for size in [8, 5, 11, 8, 4, 5]:
        x, y = numbers(size, 4), numbers(4, size).t()
        pieces = x.tensor_split(4), y.tensor_split(4)
        losses = judge(model, *pieces)
        mean = sum(loss * len(piece) for loss, piece in zip(losses, pieces[0])) / size
        assert torch.allclose(pipeline.step(x, y), mean) and torch.equal(pipeline.losses, losses)
        assert torch.allclose(pipeline.eval(x, y), mean) and torch.equal(pipeline.losses, losses)
        agree(pipeline, model, exact=False)
        found = pipeline.forward(x)
        assert found is None or torch.equal(found, torch.cat([nn.Sequential(*model)(piece) for piece in pieces[0]]))
""",
    "what was sent is freed when it has arrived": """
from torch.multiprocessing.reductions import StorageWeakRef
most = {}
for microbatches in [8, 32]:
    pipeline, sent, alive = made("1f1b", microbatches), [], []
    def remembered(action, step):
        step.default(action)
        sent.extend(StorageWeakRef(each.untyped_storage()) for each in step.messages.sent[action].tensors)
        alive.append(sum(not each.expired() for each in sent))
    for op in ["SEND_F", "SEND_B"]:
        pipeline.on(op, remembered)
    x, y = numbers(microbatches, 4), numbers(4, microbatches).t()
    for _ in range(2):
        pipeline.step(x, y)
    assert all(each.expired() for each in sent)
    most[microbatches] = max(alive)
assert most[32] == most[8] <= 2 * size, most
""",
    "forwards in mixed precision send and receive it": """
seen = []
def loss_fn(y, target):
    seen.append(y.dtype)
    return fn.mse_loss(y.float(), target)
pipeline = made(autocast=torch.bfloat16, loss_fn=loss_fn)
model = [layer(stage) for stage in range(4)]
with torch.autocast("cpu", torch.bfloat16):
    losses = judge(model, loss_fn=loss_fn)
pipeline.step(X, Y)
agree(pipeline, model, losses, exact=False)
assert rank < 3 or set(seen) == {torch.bfloat16}
""",
}


@pytest.fixture(scope="module")
def right(ranks):
    return run(ranks, 4, 1, CORRECT)


@pytest.mark.parametrize("case", CORRECT)
def test_what_must_not_go_wrong_does_not(right, case):
    assert [first for first, _, _ in right[case]] == ["fine"] * 4


DYING = """
pipeline = made(change={1: Of(lambda s, x: os._exit(0), a=layer(1))}, timeout=30)
print(json.dumps([case, told(lambda: pipeline.step(X, Y)), "", 0]), flush=True)
time.sleep(rank == 0)  # the others meet there
os._exit(0)
"""


def test_the_end_of_a_rank_is_told_by_those_that_wait_for_it(ranks):
    first, last = run(ranks, 3, 1, {"dying": DYING})["dying"]
    assert (
        "rank 0: 0B0 waits for 0RECV_B0 (rank 1 → 0: B of microbatch 0): the connection to rank 1 is lost" in first[0]
    )
    assert (
        "rank 2: 2RECV_F0 (rank 1 → 2: F of microbatch 0): the connection to rank 1 is lost; that rank has" in last[0]
    )


ENDED = """
pipeline = made(timeout=30)
pipeline.step(X, Y)
if rank == 1:
    os._exit(0)
time.sleep(1)
print(json.dumps([case, told(lambda: pipeline.step(X, Y)), "", 0]), flush=True)
time.sleep(rank == 0)
os._exit(0)
"""


def test_the_end_of_a_rank_between_steps_is_told_by_the_others(ranks):
    first, last = run(ranks, 3, 1, {"ended": ENDED})["ended"]
    assert first[0].startswith("CommunicationError: rank 0 cannot start step: ")
    assert last[0].startswith("CommunicationError: rank 2: 2RECV_F0 (rank 1 → 2: F of microbatch 0): the connection")


def with_change(change):
    """A lowered schedule, with the orders changed."""
    schedule = pp.lower(pp.schedule("1f1b", ranks=2, microbatches=3))
    orders = [list(order) for order in schedule.orders]
    change(orders)
    return replace(schedule, orders=tuple(map(tuple, orders)))


def swap(order, one, other):
    here, there = (order.index(pp.Action.parse(word)) for word in (one, other))
    order[here], order[there] = order[there], order[here]


def test_orders_that_would_go_wrong_are_refused_before_anything_is_sent():
    swapped = with_change(lambda orders: swap(orders[1], "1RECV_F0", "1RECV_F1"))
    with pytest.raises(pp.ScheduleError, match="1RECV_F1 would get what 0SEND_F0 sends"):
        Pipeline(swapped, {})
    missing = with_change(lambda orders: orders[0].remove(pp.Action.parse("0SEND_F1")))
    with pytest.raises(pp.ScheduleError, match="rank 0: 0SEND_F1 is never run"):
        Pipeline(missing, {})


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ({}, "rank 0 holds the stages 0, 1; got none: give a module for each"),
        ({0: nn.Identity()}, "rank 0 holds the stages 0, 1; got 0: give a module for each"),
        ({0: nn.Identity(), 1: nn.Identity(), 2: nn.Identity()}, "rank 0 holds the stages 0, 1; got 0, 1, 2: give"),
        ([nn.Identity()], "rank 0 holds the stages 0, 1; got [Identity()]: give a module for each"),
        ({0: nn.Identity(), 1: abs}, "the module of stage 1 must be a torch.nn.Module; got <built-in function abs>"),
    ],
)
def test_stages_that_are_not_those_of_the_rank_are_refused(stages, why):
    with pytest.raises(pp.SettingError, match=re.escape(why)):
        Pipeline(pp.schedule("interleaved", ranks=1, microbatches=2, chunks=2), stages)


def test_too_few_ranks_are_refused():
    with pytest.raises(pp.SettingError, match="needs 2 ranks; the group has 1"):
        Pipeline(pp.schedule("1f1b", ranks=2, microbatches=2), {0: nn.Identity()})
