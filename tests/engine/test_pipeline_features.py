"""Features of a pipeline besides a plain step: each feature has the results of one process."""

import copy
import inspect
import random

import pytest
import torch
from cases import run
from releases import needs
from torch import nn
from torch.nn import functional as fn

import ppedu as pp
from ppedu.engine.ranks.versions import GRAD_DTYPE
from ppedu.run import Pipeline, Stage

CORRECT = {
    "a pipeline is made without messages": """
group = fresh()
schedule = pp.schedule("dualpipe", 4, 8)
stages = {stage: layer(stage) for stage in local_stages(schedule, rank)}
if rank == 2:  # the other ranks wait until it has made its pipeline
    Pipeline(schedule, stages, fn.mse_loss, group)
dist.barrier()
assert torch.isfinite(Pipeline(schedule, stages, fn.mse_loss, group).step(X, Y))
""",
    "an evaluation changes neither gradients nor modes": """
def stages():
    made = {stage: nn.Sequential(layer(stage), nn.Dropout(0.5), nn.BatchNorm1d(4)) for stage in range(4)}
    made[2][1].eval()
    return made
pipeline, model = make(change=stages()), nn.Sequential(*stages().values()).eval()
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
    "forward-only schedules infer, and are measured": """
for name in ["gpipe", "interleaved", "zb-v", "v-half", "dualpipev"]:
    schedule = pp.schedule(name, 4, 8).forwards
    schedule = pp.lower(schedule) if name == "zb-v" else schedule
    stages = {stage: layer(stage) for stage in range(schedule.stages)}
    pipeline, model = make(schedule, change=stages), nn.Sequential(*stages.values())
    found, expected = pipeline.forward(X), torch.cat([model(x) for x in X.split(1)])
    assert torch.equal(found, expected) if schedule.stages - 1 in pipeline.stages else found is None
    losses = [fn.mse_loss(*each) for each in zip(expected.split(1), Y.split(1))]
    assert pipeline.eval(X, Y) == torch.stack(losses).mean()
    assert pipeline.timeline.schedule.orders == pp.strip(schedule).orders
    assert "has no backwards; call eval or forward instead of step" in outcome(lambda: pipeline.step(X, Y))
    assert all(weight.grad is None for stage in stages.values() for weight in stage.parameters())
emulated = pp.run.emulate(pp.schedule("zb-v", 4, 8).forwards, pp.Costs(forward=0.01), fresh())
assert emulated.source == "emulated" and 0.05 < emulated.makespan < 1
""",
    "shapes may depend on the data": """
def keep(self, x):
    return self.a(x)[x[:, 0] > self.least]  # another number of rows for each microbatch and step

def loss_fn(y, target):
    return y.square().sum() / 8 + 0 * target.sum()

for name in some("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"):
    schedule = pp.schedule(name, 4, 8)
    def stages():
        made = {stage: Of(keep, a=layer(stage)) for stage in range(schedule.stages)}
        for stage, module in made.items():
            module.least = -0.5 if stage % 3 == 1 else -100
        return made
    options = {"loss_fn": loss_fn, "batching": Batching(variable_shapes=True)}
    pipeline, model = make(schedule, change=stages(), **options), stages()
    sizes = set()
    for step in range(2):
        xs = [numbers(rows, 4) for rows in torch.tensor([3, 5, 2, 7, 6, 5, 4, 3]).roll(step).tolist()]
        loss = pipeline.step(xs, list(xs))
        losses = []
        for x in xs:
            y = x
            for stage in range(schedule.stages):
                y = model[stage](y)
            sizes.add(len(y))
            losses.append(loss_fn(y, x))
            (losses[-1] * len(x) / sum(map(len, xs))).backward()
        agree(pipeline, model, exact=False)
        mean = sum(one * len(x) for one, x in zip(losses, xs)) / sum(map(len, xs))
        assert torch.allclose(loss, mean) and torch.allclose(pipeline.losses, torch.stack(losses))
    assert len(sizes) > 3
""",
    "microbatches may have unlike numbers of sequences and tokens": """
lengths = [9, 2, 2, 8, 3, 5, 2, 7]
groups = pp.dynamic_microbatches(lengths, 4, lambda count, length: 5 + count * length, tokens=12)
shapes = [(len(group), lengths[group[0]], 4) for group in groups]
assert len(set(shapes)) > 3
schedule = pp.dynapipe(4, len(groups), pp.Costs(activation=[[a * b for a, b, _ in shapes]] * 4), memory=24)
assert schedule.orders != pp.schedule("1f1b", 4, len(groups)).orders
batching = Batching(count=lambda y: y[..., 0].numel())
pipeline, model = make(schedule, batching=batching), [layer(stage) for stage in range(4)]
for step in range(2):  # in the second one, all shapes are in another order
    xs = [numbers(*shape) for shape in shapes[step:] + shapes[:step]]
    ys = [x.flip(1) for x in xs]
    total, losses = sum(x[..., 0].numel() for x in xs), []
    for x, y in zip(xs, ys):
        losses.append(fn.mse_loss(nn.Sequential(*model)(x), y))
        (losses[-1] * x[..., 0].numel() / total).backward()
    pipeline.step(xs, ys)
    agree(pipeline, model)
    assert torch.equal(pipeline.losses, torch.stack(losses))
""",
    "gradients of bfloat16 weights are summed in fp32": """
def stages(count, grad_dtype=torch.float32):
    made = {stage: layer(stage).to(torch.bfloat16) for stage in range(count)}
    for module in made.values():
        for weight in module.parameters():
            weight.grad_dtype = grad_dtype
    return made

for name in some("gpipe", "interleaved", "zb-h1", "1f1b", "zb-v"):
    schedule = pp.schedule(name, 4, 8)
    xs, ys = X.to(torch.bfloat16), Y.to(torch.bfloat16)
    pipeline, model = make(schedule, change=stages(schedule.stages)), stages(schedule.stages, torch.bfloat16)
    pipeline.step(xs, ys)
    weights = [weight for module in model.values() for weight in module.parameters()]
    sums = [torch.zeros(weight.shape) for weight in weights]
    for m in range(8):
        loss = fn.mse_loss(nn.Sequential(*model.values())(xs[m : m + 1]), ys[m : m + 1]) / 8
        for total, grad in zip(sums, torch.autograd.grad(loss, weights)):
            assert grad.dtype == torch.bfloat16
            total += grad
    expected = dict(zip(weights, sums))
    for index, stage in pipeline.stages.items():
        for ours, theirs in zip(stage.module.parameters(), model[index].parameters()):
            assert ours.grad.dtype == torch.float32 and torch.equal(ours.grad, expected[theirs]), (name, index)
pipeline = make("dualpipe", 8, stages(4))
pipeline.step(X.to(torch.bfloat16), Y.to(torch.bfloat16))
for stage in pipeline.stages.values():
    assert all(weight.grad.dtype == torch.float32 for weight in stage.module.parameters())
""",
    "a loss scale changes neither gradients nor losses": """
for name in some("1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe"):
    plain, scaled = make(name, 8), make(name, 8)
    for exact in (True, False):  # in the second step they are added to those of the first, in another order
        assert plain.step(X, Y) == scaled.step(X, Y, loss_scale=2.0**20)
        agree(scaled, {index: stage.module for index, stage in plain.stages.items()}, exact=exact)
assert "loss_scale must be a number above 0; got 0" in outcome(lambda: scaled.step(X, Y, loss_scale=0))
""",
    "an overflow in float16 skips the step on all ranks": """
warnings.simplefilter("ignore")
for name in some("gpipe", "interleaved", "zb-h1", "1f1b", "zb-v"):
    schedule = pp.schedule(name, 4, 8)
    model = {stage: layer(stage) for stage in range(schedule.stages)}
    whole = nn.Sequential(*model.values())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    optimizer, scales = torch.optim.SGD(whole.parameters(), 0.1), []
    for _ in range(6):
        optimizer.zero_grad()
        for x, y in zip(X.split(1), Y.split(1)):
            with torch.autocast("cpu", torch.float16):
                loss = fn.mse_loss(whole(x), y) / 8
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == 2.0**23 and len(set(scales)) > 2
    pipeline, scale = make(schedule, autocast=torch.float16), LossScale(2.0**24, every=2)
    modules = {index: stage.module for index, stage in pipeline.stages.items()}
    optimizer, found = torch.optim.SGD(nn.ModuleList(modules.values()).parameters(), 0.1), []
    for _ in range(6):
        optimizer.zero_grad()
        pipeline.step(X, Y, loss_scale=scale.value)
        if scale.update(pipeline.clip_grad_norm(float("inf"))):
            optimizer.step()
        found.append(scale.value)
    assert found == scales, (name, found, scales)
    for index, module in modules.items():
        for ours, theirs in zip(module.parameters(), model[index].parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
""",
    "each stage of a rank may get keywords of its own": """
def run(self, x, scale=None, **named):
    assert set(named) == self.named
    return self.a(x) * (1 if scale is None else scale) + sum(named.values())

for name in some("1f1b", "interleaved", "dualpipev", "zb-v", "dualpipe"):
    schedule = pp.schedule(name, 4, 8)
    last = schedule.stages - 1
    given = {0: {"first": numbers(8, 4) * 2}, last: {"second": numbers(8, 4) / 3, "whole": 0.5}}
    def stages():
        made = {stage: Of(run, a=layer(stage)) for stage in range(last + 1)}
        for stage, module in made.items():
            module.named = set(given.get(stage, ()))
        return made
    pipeline, model, scale = make(schedule, change=stages()), stages(), numbers(8, 1)
    pipeline.step(X, Y, scale=scale, stage_kwargs=given)
    for m in range(8):
        x = X[m : m + 1]
        for stage in range(last + 1):
            own = {k: v[m : m + 1] if hasattr(v, "shape") else v for k, v in given.get(stage, {}).items()}
            x = model[stage](x, scale=scale[m : m + 1], **own)
        (fn.mse_loss(x, Y[m : m + 1]) / 8).backward()
    agree(pipeline, model, exact=name != "dualpipe")
def refused(given):
    return outcome(lambda: pipeline.eval(X, Y, stage_kwargs=given))
assert "stage_kwargs names stage 99; the stages are 0 to 3" in refused({99: {}})
assert "stage_kwargs must be a dict of keywords for each stage" in refused({3: 1})
""",
    "stages may compute their activations again": """
for name in some("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"):
    schedule = pp.schedule(name, 4, 8)
    def stages(recompute):
        made = {stage: nn.Sequential(layer(stage), nn.Dropout(0.3), nn.ReLU(inplace=True)) for stage in range(8)}
        return {stage: Stage(module, stage, recompute=recompute) for stage, module in made.items()}
    plain, again = [make(schedule, change=stages(recompute), seed=3) for recompute in (False, True)]
    apart = make(pp.recompute(schedule), change=stages(False), seed=3)
    runs = Counter()
    for stage in again.stages.values():
        stage.module.register_forward_hook(lambda module, inputs, y, index=stage.index: runs.update([index]))
    for _ in range(2):
        assert plain.step(X, Y) == again.step(X, Y, loss_scale=2.0**10)
        modules = {index: stage.module for index, stage in plain.stages.items()}
        agree(again, modules, exact=False)
        apart.step(X, Y)
        agree(apart, modules)
        for stage in [*apart.stages.values(), *plain.stages.values(), *again.stages.values()]:
            stage.module.zero_grad()
            assert not stage.again and not stage.held
    assert set(runs.values()) == {2 * 2 * (8 if name != "dualpipe" else 4)}, runs
    assert plain.eval(X, Y) == again.eval(X, Y)
mixed = [make(change=stages(recompute), autocast=torch.bfloat16) for recompute in (False, True)]
mixed.append(make(pp.recompute(mixed[0].schedule), change=stages(False), autocast=torch.bfloat16))
losses = []
for pipeline in mixed:
    torch.manual_seed(4)
    losses.append(pipeline.step(X, Y))
    agree(pipeline, {index: stage.module for index, stage in mixed[0].stages.items()})
assert losses[0] == losses[1] == losses[2]
""",
    "outputs of a model may be any tensors, or something else": """
pipeline = make(change={3: Of(lambda s, x: (s.a(x), x.sum()), a=layer(3))}, batching=Batching(output_dim=1))
found = pipeline.forward(X)
assert found is None if rank < 3 else (found[0].shape, found[1].shape) == ((2, 16), (4,))
last = Of(lambda s, x: {"y": s.a(x)}, a=layer(3))
pipeline = make(change={3: last}, loss_fn=lambda y, target: fn.mse_loss(y["y"], target))
found = pipeline.forward(X)
assert found is None if rank < 3 else found["y"].shape == (8, 4)
assert pipeline.step(X, Y) == pipeline.eval(X, Y)
pipeline = make("dualpipe", 8)
found, expected = pipeline.forward(X), make("gpipe", 8).forward(X)
both = [torch.zeros(4, 4) for _ in range(4)]
dist.all_gather(both, torch.zeros(4, 4) if found is None else found)
assert rank < 3 or torch.equal(torch.cat([both[3], both[0]]), expected)
""",
    "a forward that runs again on another rank has the same random numbers, keywords and precision": """
class Noted(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.inner, self.seen = nn.Sequential(layer(stage), nn.Dropout(0.3)), []
    def forward(self, x, scale, shift=0):
        y = self.inner(x) * scale + shift
        self.seen.append(y.detach().double().sum().item())
        return y
modules = {stage: Noted(stage) for stage in range(8)}
pipeline = make("roundpipe", 8, modules, autocast=torch.bfloat16)
pipeline.step(X, Y, scale=numbers(8, 1), stage_kwargs={2: {"shift": numbers(8, 4)}})
seen, place = [None] * size, pipeline.schedule.placement
told = {stage: (module.seen, next(module.parameters()).grad) for stage, module in modules.items()}
dist.all_gather_object(seen, told)
for stage in filter(place.apart, range(8)):
    (first, grad), (again, own) = (seen[each][stage] for each in place.holders_of(stage))
    assert len(set(first)) == 8 and first == again and torch.equal(grad, own) and grad.any()
assert not any(stage.again or stage.held for stage in pipeline.stages.values())
assert torch.isfinite(pipeline.eval(X, Y, scale=numbers(8, 1)))
""",
    "a handler can replace every op": """
from ppedu.core.actions import overlap
from ppedu.engine.interpreter import METHODS
seen = set()
schedules = [pp.schedule(name, 4, 8) for name in ["zb-h1", "mario", "po-h", "dualpipe", "roundpipe", "1f1b-overlap"]]
paired = schedules[-1]
turned = [[overlap(*action.parts[::-1]) if action.parts else action for action in order] for order in paired.orders]
schedules.append(pp.Schedule("turned", paired.placement, 8, tuple(map(tuple, turned))))
for schedule in schedules:
    done = Counter()
    pipelines = [make(schedule) for _ in range(2)]
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
assert set().union(*ops) == {op for op in METHODS if op not in ("U", "S", "T", "UNSHARD", "RESHARD", "REDUCE_GRAD")}
assert "unknown op 'SEND'" in outcome(lambda: pipelines[0].on("SEND", counted))
""",
    "stages take and return several tensors, some without gradients": """
def stages():
    return {
        0: Of(lambda s, x: (s.a(x), torch.arange(len(x)).flip(0), x * 2), a=layer(0)),
        1: Of(lambda s, x, n, y: (n > 0, s.a(x)[n] + y, s.b(y), x), a=layer(1), b=layer(5)),
        2: Of(lambda s, more, x, y, z: (s.a(x * y), more.double(), z), a=layer(2)),
        3: Of(lambda s, x, more, z: s.a(x) + z * more[:, None].float(), a=layer(3)),
    }
for name in some("1f1b", "zb-h1", "gems"):
    for debug in [False, True]:
        model, pipeline = list(stages().values()), make(name, change=stages(), debug=debug)
        for _ in range(2):
            losses = reference(model)
            pipeline.step(X, Y)
            agree(pipeline, model, losses, exact=name != "gems")
""",
    "every stage gets the keywords": """
def turn(s, x, scale, table, power):
    return s.a(x) * scale[0] + table**power
def stages():
    return {stage: Of(turn, a=layer(stage)) for stage in range(4)}
def quarter(y, target):
    return fn.mse_loss(y, target) / 4
scale, table = numbers(1, 8, 1), numbers(4)
batching = Batching(input_dims={"scale": 1, "table": None})
model, pipeline = list(stages().values()), make(change=stages(), batching=batching)
pipeline.step(X, Y, scale=scale, table=table, power=2)
pieces = zip(X.split(2), Y.split(2), scale.split(2, 1))
losses = [reference(model, [x], [y], quarter, scale=piece, table=table, power=2) for x, y, piece in pieces]
agree(pipeline, model)
assert torch.allclose(pipeline.loss, torch.cat(losses).sum())
""",
    "without its own messages, an order that deadlocks with them has the results of one process": """
schedule = pp.schedule("interleaved", size, 8, chunks=2)
orders = []
for r, order in enumerate(pp.lower(schedule, fsdp=True).orders):  # each receive just before what needs it
    received = {each for each in order if each.op in ("RECV_F", "RECV_B")}
    orders.append([])
    for action in order:
        receive = pp.Action(action.stage, Op("RECV_" + action.op), action.microbatch) if action.computes else None
        orders[r] += ([receive] if receive in received else []) + ([] if action in received else [action])
own = pp.Schedule("own", schedule.placement, 8, tuple(map(tuple, orders)))
assert pp.check(own) == [] != pp.check(own, transport="rendezvous")
assert "give Pipeline(pp.strip(schedule), …)" in outcome(lambda: make(own))
pipeline = make(pp.strip(own))
model = [layer(stage) for stage in range(schedule.stages)]
pipeline.step(X, Y)
agree(pipeline, model, reference(model, X.split(1), Y.split(1)))
""",
    "batches and waits change no results": """
schedule, orders = pp.lower(pp.schedule("1f1b", size, 8)), []
for order in schedule.orders:  # neighbouring messages in batches; receives that are alone have a wait just behind
    texts = " ".join(f"{action}!" if "_" in action.op else str(action) for action in order)
    texts = re.sub(r"(\\S+)!((?: \\S+!)+)", lambda found: f"({found[0].replace('! ', ';')[:-1]})BATCH_P2P", texts)
    orders.append(re.sub(r"(\\d+)(RECV_.\\d+)!", r"\\1\\2 \\1WAIT_\\2", texts).replace("!", "").split())
own = pp.Schedule("own", schedule.placement, 8, orders)
assert "BATCH_P2P" in str(own.orders) and "WAIT_RECV" in str(own.orders) and pp.check(own, transport="rank") == []
pipeline, model = make(own), [layer(stage) for stage in range(schedule.stages)]
pipeline.step(X, Y)
agree(pipeline, model, reference(model, X.split(1), Y.split(1)))
""",
    "stages may be frozen": """
for frozen in some([0], [1], [0, 1], [0, 2], [1, 3], [0, 1, 2]):
    def stages():
        return {stage: layer(stage).requires_grad_(stage not in frozen) for stage in range(4)}
    group = fresh()
    for name in ["1f1b", "zb-h1"]:
        model, pipeline = list(stages().values()), make(name, change=stages(), group=group)
        for _ in range(2):
            losses = reference(model)
            pipeline.step(X, Y)
            agree(pipeline, model, losses)
""",
    "dropout depends on the seed, and not on the schedule": """
x, y = X[:2].repeat(4, 1), Y[:2].repeat(4, 1)  # four times the same microbatch
def trained(name, seed):
    pipeline = make(name, change={stage: nn.Sequential(layer(stage), nn.Dropout(0.5)) for stage in range(4)}, seed=seed)
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
    pipeline = make(name, change=theirs, tied=[((0, "w"), (last, "w"))])
    for _ in range(3):
        losses = reference(model)
        pipeline.step(X, Y)
        agree(pipeline, model, losses, exact=False)
""",
    "pipelines side by side average their gradients and losses": """
mine, half, group, replicas = two_replicas()
for name, stages in [("1f1b", 2), ("zb-h1", 2), ("interleaved", 4), ("zb-v", 4)]:
    schedule = pp.schedule(name, 2, 4)
    held = {stage: layer(stage) for stage in local_stages(schedule, mine)}
    pipeline = Pipeline(schedule, held, fn.mse_loss, group, replicas=replicas)
    models = [[layer(stage) for stage in range(stages)] for _ in range(2)]
    losses = [reference(model, x.split(1), y.split(1)) for model, x, y in zip(models, X.split(4), Y.split(4))]
    loss = pipeline.step(X.split(4)[half], Y.split(4)[half])
    for one, other in zip(models[0], models[1]):
        for weight, other in zip(one.parameters(), other.parameters()):
            weight.grad = (weight.grad + other.grad) / 2
    agree(pipeline, models[0])
    assert torch.equal(pipeline.losses, losses[half]) and torch.allclose(loss, torch.cat(losses).mean())
    why = ["F0 gave a loss of nan", "another replica has a loss of nan"][half]
    assert why in outcome(lambda: pipeline.step(SPOILT.split(4)[1 - half], Y[:4]))
""",
    "gradients may be views into one tensor": """
def flat(modules):
    weights = [*nn.ModuleList(modules).parameters()]
    whole = torch.zeros(sum(weight.numel() for weight in weights))
    for weight, part in zip(weights, whole.split([weight.numel() for weight in weights])):
        weight.grad = part.view_as(weight)
    return whole

mine, _, group, replicas = two_replicas()
beside = {"group": group, "replicas": replicas}
for name, ranks, options in [("1f1b", 2, beside), ("zb-v", 2, beside), ("dualpipe", 4, {}), ("1f1b", 4, {})]:
    schedule = pp.schedule(name, ranks, 8)
    held = {stage: layer(stage) for stage in local_stages(schedule, mine if options else rank)}
    model = [layer(stage) for stage in range(schedule.stages)]
    pipeline = Pipeline(schedule, held, fn.mse_loss, **{"group": fresh(), "timeout": 5} | options)
    whole, expected = flat(held.values()), flat(model[stage] for stage in held)
    for scale in (1.0, 1.0, 4.0):
        pipeline.step(X, Y, loss_scale=scale)
        reference(model, X.split(1), Y.split(1))
    torch.testing.assert_close(whole, expected)
    agree(pipeline, model, exact=False)
""",
    "a model whose first and last layer share weights can be cut, if one rank holds both or they are tied": """
for name in ["zb-v", "dualpipe", "1f1b"]:
    schedule = pp.schedule(name, 4, 8)
    def model():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            whole = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        whole[7].weight = whole[0].weight
        return whole
    whole, mine = model(), model()
    last = schedule.stages - 1
    tied = [((0, "layers.0.weight"), (last, "layers.7.weight"))] if name == "1f1b" else ()
    if tied:
        why = "tied=[((0, 'layers.0.weight'), (3, 'layers.7.weight'))])"
        assert why in outcome(lambda: cut(mine, schedule, rank))
        mine[7].weight = nn.Parameter(mine[7].weight.detach().clone())
    Pipeline(schedule, cut(mine, schedule, rank), fn.mse_loss, fresh(), tied=tied, timeout=5).step(X, Y)
    reference([whole], X.split(1), Y.split(1))
    for ours, theirs in zip(mine, whole):
        if ours.weight.grad is not None:  # on this rank
            torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    assert rank or mine[0].weight.grad is not None
    assert name == "zb-v" or rank < 3 or mine[7].weight.grad is not None
""",
    "copies whose weights were replaced still add up their gradients": """
fresh_ones, loaded = (make("dualpipe", 8) for _ in range(2))
for stage in loaded.stages.values():
    stage.module.load_state_dict({k: v.clone() for k, v in stage.module.state_dict().items()}, assign=True)
assert fresh_ones.step(X, Y) == loaded.step(X, Y)
agree(loaded, {index: stage.module for index, stage in fresh_ones.stages.items()})
""",
    "weights that change after the first call are right or refused": """
from torch.nn.utils import parametrize, prune

def pruned(stages):
    for module in stages.values():
        prune.identity(module[0], "weight")

def parametrized(stages):
    for module in stages.values():
        parametrize.register_parametrization(module[0], "weight", nn.Identity())

def joined(stages):
    for module in stages.values():
        module[2].weight = module[0].weight

def adapted(stages):
    for module in stages.values():
        module[0] = Of(lambda s, x: s.base(x) + s.low(x), base=module[0], low=nn.Linear(4, 4, bias=False))
        nn.init.ones_(module[0].low.weight)

def only(where, change):
    return lambda stages: change(stages) if rank == where else None

TIED = [((0, "0.weight"), (3, "0.weight"))]
def same():
    return {stage: layer(0) for stage in range(4)}

def stages_of(pipeline):
    return {index: stage.module for index, stage in pipeline.stages.items()}

for change in (pruned, adapted):  # no other rank holds these weights
    pipeline, model = make("1f1b"), {stage: layer(stage) for stage in range(4)}
    pipeline.step(X, Y)
    change(stages_of(pipeline))
    change(model)
    pipeline.gradients.modules[rank].zero_grad()
    pipeline.step(X, Y)
    reference([*model.values()])
    agree(pipeline, model)

CASES = [
    ("dualpipe", (), pruned, "'0.weight_orig' of stage [0-3] was added"),
    ("dualpipe", (), adapted, "'0.base.bias' of stage [0-3] was added"),
    ("dualpipe", (), joined, "'0.weight' of stage [0-3] became that of stage [0-3], '2.weight', after"),
    ("dualpipe", (), only(2, pruned), "'0.weight_orig' of stage [0-3] was added"),
    ("1f1b", TIED, parametrized, "original' of stage [0-3] was added"),
    ("1f1b", TIED, adapted, "cannot tie '0.weight' of stage [03], which has no|base.bias' of stage [12] was added"),
]
for name, ties, change, why in CASES:
    pipeline = make(name, 8, same() if ties else None, tied=ties)
    pipeline.step(X, Y)
    before = [*nn.ModuleList(stages_of(pipeline).values()).parameters()]
    change(stages_of(pipeline))
    changed = [*map(id, before)] != [*map(id, nn.ModuleList(stages_of(pipeline).values()).parameters())]
    if ties:
        assert torch.isfinite(pipeline.eval(X, Y))  # synchronizes nothing
    said = outcome(lambda: pipeline.step(X, Y))
    assert re.search(why if changed else "Error: rank", str(said)), (name, said)
    if changed:
        said = outcome(lambda: pipeline.clip_grad_norm(1.0))
        assert re.search(why + "|cannot be used after an error", str(said)), said
pipeline = make("dualpipe", 8)
pipeline.eval(X, Y)
pruned(stages_of(pipeline))
pipeline, model = make("dualpipe", 8, stages_of(pipeline)), {stage: layer(stage) for stage in range(4)}
pruned(model)
pipeline.step(X, Y)  # of a new pipeline
reference([*model.values()], X.split(1), Y.split(1))
agree(pipeline, model, exact=False)
""",
    "a failure is reported by the ranks that share gradients with the failed one": """
def failing(pipeline):
    last = pipeline.schedule.orders[pipeline.group.rank][-1]
    def handler(action, step):
        step.default(action)
        if action == last:
            raise ValueError("at the very end")
    pipeline.on(last.op, handler)
pipeline = make("dualpipe", 8)
if rank == 0:
    failing(pipeline)
said = outcome(lambda: pipeline.step(X, Y))
why = {0: "rank 0: 0W3 failed: ValueError: at the very end", 3: "rank 3 cannot synchronize the gradients: "}
assert why.get(rank, f"rank {rank} cannot end the step: not every rank") in said, said
mine, half, group, replicas = two_replicas()
pipeline = Pipeline(pp.schedule("1f1b", 2, 4), {mine: layer(mine)}, fn.mse_loss, group, replicas=replicas, timeout=1.5)
if rank == 2:
    failing(pipeline)
said = outcome(lambda: pipeline.step(X, Y))
why = ["rank 0 cannot synchronize", "rank 1 cannot end the step", "rank 0: 0B3 failed", "rank 1 cannot end the step"]
assert why[rank] in said, said
""",
    "gradients are clipped by the norm over the whole model": """
for name in some("1f1b", "chimera", "zb-v", "dualpipe"):
    pipeline = make(name, 8)
    model = [layer(stage) for stage in range(pipeline.schedule.stages)]
    reference(model, X.split(1), Y.split(1))
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
pipeline, model = make(schedule, change={0: first, 7: first}), [layer(stage) for stage in range(7)]
model.append(model[0])
reference(model)
pipeline.step(X, Y)
norm = torch.nn.utils.clip_grad_norm_(nn.ModuleList(model).parameters(), 0.01)
assert abs(pipeline.clip_grad_norm(0.01) - norm) < 1e-5 * norm
agree(pipeline, model, exact=False)
""",
    "every schedule has the same results with debug": """
group = fresh()
whole = [name for name in pp.schedules() if pp.schedule(name, 4, 8).plain]
for name in whole if FULL else whole[::8]:
    microbatches = next(m for m in range(1, 40) if outcome(lambda: pp.schedule(name, 4, m).validate()) is None)
    x, y = numbers(microbatches, 4), numbers(4, microbatches).t()
    pipelines = [make(name, microbatches, group=group, debug=debug) for debug in [True, False]]
    losses = [pipeline.step(x, y) for pipeline in pipelines for _ in range(2)]
    assert len({loss.item() for loss in losses}) == 1, name
    agree(pipelines[0], {stage: each.module for stage, each in pipelines[1].stages.items()})
""",
    "inputs and targets only where they are needed, step after step": """
pipeline, judge = make(microbatches=4), [layer(stage) for stage in range(4)]
for _ in range(3):
    losses = reference(judge)
    pipeline.step(X if rank == 0 else None, Y if rank == 3 else None)
agree(pipeline, judge, losses)
""",
    "batches may be of any size, from step to step": """
for name in ["1f1b", "zb-v"]:
    pipeline = make(name)
    model = [layer(stage) for stage in range(pipeline.schedule.stages)]
    for size in [8, 5, 11, 4]:
        x, y = numbers(size, 4), numbers(4, size).t()
        pieces = x.tensor_split(4), y.tensor_split(4)
        losses = reference(model, *pieces)
        mean = sum(loss * len(piece) for loss, piece in zip(losses, pieces[0])) / size
        assert torch.allclose(pipeline.step(x, y), mean) and torch.equal(pipeline.losses, losses)
        assert torch.allclose(pipeline.eval(x, y), mean) and torch.equal(pipeline.losses, losses)
        agree(pipeline, model, exact=False)
        found = pipeline.forward(x)
        assert found is None or torch.equal(found, torch.cat([nn.Sequential(*model)(piece) for piece in pieces[0]]))
""",
    "sent tensors are freed once they have arrived": """
from torch.multiprocessing.reductions import StorageWeakRef
most = {}
for microbatches in [8, 32]:
    pipeline, sent, alive = make("1f1b", microbatches), [], []
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
pipeline = make(autocast=torch.bfloat16, loss_fn=loss_fn)
model = [layer(stage) for stage in range(4)]
with torch.autocast("cpu", torch.bfloat16):
    losses = reference(model, loss_fn=loss_fn)
pipeline.step(X, Y)
agree(pipeline, model, losses, exact=False)
assert rank < 3 or set(seen) == {torch.bfloat16}
""",
}


@pytest.fixture(scope="module")
def right(ranks):
    return run(ranks, 4, 1, CORRECT)


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=needs(GRAD_DTYPE) if "bfloat16" in each else ()) for each in CORRECT]
)
def test_a_feature_has_the_results_of_one_process(right, case):
    assert [first for first, _, _ in right[case]] == ["fine"] * 4


def test_a_pipeline_takes_at_most_ten_keywords():
    parameters = inspect.signature(Pipeline).parameters
    assert len(set(parameters) - {"schedule", "stages"}) <= 10


X, Y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
SCHEDULES = [pp.schedule("1f1b", 1, 4), pp.schedule("interleaved", 1, 4, chunks=2)]  # of one and of two stages


def test_pipelines_of_the_same_stages_keep_their_own_losses():
    losses = [fn.mse_loss, fn.l1_loss, fn.huber_loss]
    for seed in range(10):
        draw = random.Random(seed)
        stages = {stage: Stage(nn.Linear(4, 4), stage) for stage in range(2)}
        made = []
        for _ in range(6):
            if not made or draw.random() < 0.5:
                schedule, loss_fn = draw.choice(SCHEDULES), draw.choice(losses)
                held = {stage: stages[stage] for stage in range(schedule.stages)}
                made.append((Pipeline(schedule, held, loss_fn), held, loss_fn))
            pipeline, held, loss_fn = draw.choice(made)
            whole = nn.Sequential(*(stage.module for stage in held.values()))
            expected = [loss_fn(whole(x), y).detach() for x, y in zip(X.split(2), Y.split(2), strict=True)]
            assert draw.choice([pipeline.step, pipeline.eval])(X, Y) == torch.stack(expected).mean()
            assert all(stage.loss_fn is None for stage in stages.values())


class Weighted(nn.Module):
    """A loss with dropout, and weights."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.dropout = weight, nn.Dropout(0.5)

    def forward(self, y, target):
        return fn.mse_loss(self.dropout(y) * self.weight, target)


def test_a_loss_module_is_in_evaluation_mode_when_the_stages_are():
    loss_fn, module = Weighted(1.0), nn.Linear(4, 4)
    pipeline = Pipeline(SCHEDULES[0], {0: module}, loss_fn)
    assert torch.allclose(pipeline.eval(X, Y), fn.mse_loss(module(X), Y))
    assert loss_fn.training and loss_fn.dropout.training
    assert pipeline.step(X, Y) != pipeline.step(X, Y)


def test_a_loss_has_trained_weights_only_together_with_a_stage():
    modules = {stage: nn.Linear(4, 4) for stage in range(2)}
    with pytest.raises(pp.SettingError, match="loss_fn has the weight 'weight', which no stage of this rank has"):
        Pipeline(SCHEDULES[1], modules, Weighted(nn.Parameter(torch.ones(4))))
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    for weight in (frozen, modules[0].bias):
        loss_fn = Weighted(weight)
        loss_fn.dropout.p = 0.0
        judge, judged = copy.deepcopy((modules, loss_fn))
        pipeline = Pipeline(SCHEDULES[1], modules, loss_fn)
        pipeline.step(X, Y, loss_scale=2.0**10)
        judged(judge[1](judge[0](X)), Y).backward()
        for stage, module in modules.items():
            for ours, theirs in zip(module.parameters(), judge[stage].parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            module.zero_grad()
