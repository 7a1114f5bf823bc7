"""Updates within a step: weights after training are those of one process that replays the versions, to the last bit."""

from pathlib import Path

import pytest
import torch
from cases import BEGIN
from torch import nn

import ppedu as pp
from ppedu import SettingError
from ppedu.run import Pipeline, PostValidation

CORE = str(Path(__file__).parents[1] / "core")  # where the judge is

# One process, without a Pipeline: a stage's versions are lists of leaf tensors; each gradient is one of autograd.grad.
REPLAY = """
class Layer(nn.Module):
    def __init__(self, stage):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(stage)
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
            self.scale = nn.Parameter(torch.rand(4))
    def forward(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x)))) * self.scale + x * self.scale.mean()

def optimizer(kind, weights):
    return torch.optim.AdamW(weights, lr=0.01) if kind == "adamw" else torch.optim.SGD(weights, lr=0.05, momentum=0.9)

def replayed(schedule, kind, inputs, targets):
    "Each stage steps where its order has a U, with gradients for the weights that their forwards had."
    layers = [Layer(stage) for stage in range(schedule.stages)]
    steppers = [optimizer(kind, layer.parameters()) for layer in layers]
    weights = [[dict((name, each.detach().clone()) for name, each in layer.named_parameters())] for layer in layers]
    had = {}  # by stage and microbatch, the weights of its forward
    results, gradients, orders = {}, {}, [list(order) for order in schedule.orders]
    waiting = [[] for _ in layers]
    def run(single):
        stage, op, m = single[:3]
        if op == "F":
            x = inputs[m] if stage == 0 else results["F", stage - 1, m].detach().requires_grad_()
            own = {name: each.detach().clone().requires_grad_() for name, each in weights[stage][-1].items()}
            y = torch.func.functional_call(layers[stage], own, (x,))
            results["F", stage, m], had[stage, m] = y, (x, own)
        elif op in ("B", "I"):
            x, own = had.pop((stage, m))
            y = results["F", stage, m]
            last = stage == schedule.stages - 1
            y, dy = (fn.mse_loss(y, targets[m]) / len(inputs), None) if last else (y, results["B", stage + 1, m])
            found = torch.autograd.grad(y, [*own.values(), *([x] if stage else [])], dy)
            gradients[stage, m] = found[: len(own)]
            results["B", stage, m] = found[-1]
        if op in ("B", "W"):
            waiting[stage].append(m)
        if op == "U":
            ready = [each for each in waiting[stage] if each <= m]
            waiting[stage] = [each for each in waiting[stage] if each > m]
            for position, weight in enumerate(layers[stage].parameters()):
                total = None
                for each in ready:
                    grad = gradients[stage, each][position]
                    total = grad if total is None else total + grad
                weight.grad = total.clone()
            steppers[stage].step()
            weights[stage].append({name: each.detach().clone() for name, each in layers[stage].named_parameters()})
    for turn, index in schedule.replay.steps:
        for single in schedule.orders[turn][index].singles:
            run(single)
    return weights

def data(m):
    generator = torch.Generator().manual_seed(1)
    return [[*each] for each in torch.randn(2, m, 2, 4, generator=generator)]

def trained(schedule, kind, recompute=False):
    modules = {stage: Layer(stage) for stage in local_stages(schedule, rank)}
    optimizers = {stage: optimizer(kind, module.parameters()) for stage, module in modules.items()}
    stages = {stage: Stage(module, stage, recompute=recompute) for stage, module in modules.items()}
    return Pipeline(schedule, stages, fn.mse_loss, optimizer=optimizers), modules

def compare(schedule, kind):
    inputs, targets = data(schedule.microbatches)
    expected = replayed(schedule, kind, inputs, targets)
    pipeline, modules = trained(schedule, kind)
    held = {stage: 0 for stage in modules}
    def watch(action, step):
        step.default(action)
        stage = action.stage
        held[stage] = max(held[stage], len(pipeline.updates[stage].kept))
    pipeline.on("U", watch)
    pipeline.step(torch.cat(inputs), torch.cat(targets))
    found = pp.versions(schedule)
    for stage, module in modules.items():
        assert len(expected[stage]) == 1 + max(found.stepped[stage]) + 1
        for name, weight in module.named_parameters():
            assert torch.equal(weight, expected[stage][-1][name]), (schedule.name, stage, name)
            assert weight.grad is None
        assert held[stage] <= found.held[stage], (stage, held)
    assert max(map(len, expected)) > 2
    latest, losses = [layer_with(each[-1]) for each in expected], []
    for x, y in zip(inputs, targets, strict=True):
        for each in latest:
            x = each(x)
        losses.append(fn.mse_loss(x, y) / len(inputs))
    assert torch.equal(pipeline.eval(torch.cat(inputs), torch.cat(targets)), sum(losses).detach())
    return pipeline

def layer_with(weights):
    layer = Layer(0)
    layer.load_state_dict(weights)
    return layer
"""

CHECKS = {
    "pipedream and pipedream-2bw": """
for kind in ("sgd", "adamw"):
    for name, m, options in (("pipedream", 9, {}), ("pipedream-2bw", 14, {}), ("pipedream-2bw", 15, {"batch": 6})):
        schedule = pp.schedule(name, 4, m, **options)
        pipeline = compare(schedule, kind)
        assert [span.action for span in pipeline.timeline.rows[rank]] == [*schedule.orders[rank]]
""",
    "random orders, halves, pairs and R": """
sys.path.insert(0, CORE)
import judge
for seed in range(8):
    chance = random.Random(seed)
    placement = pp.Placement.make("loop", size, 1 + seed % 2)
    drawn = judge.draw(chance, lowered=False, most_microbatches=6, placement=placement, split=0.5, pairs=0.3)
    schedule = judge.update(chance, judge.recompute(chance, drawn) if seed % 3 == 0 else drawn)
    if schedule.microbatches > 2:
        inputs, targets = data(schedule.microbatches)
        expected = replayed(schedule, "sgd", inputs, targets)
        pipeline, modules = trained(schedule, "sgd", seed % 2 == 0)
        pipeline.step(torch.cat(inputs), torch.cat(targets))
        for stage, module in modules.items():
            for name, weight in module.named_parameters():
                assert torch.equal(weight, expected[stage][-1][name]), (seed, stage, name)
""",
}


def test_what_updates_are_not_for_is_refused():
    plain, updated = pp.schedule("1f1b", 1, 2), pp.schedule("pipedream", 1, 2)
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own, wrong = (torch.optim.SGD(each.parameters()) for each in (module, other))
    for schedule, options, message in (
        (plain, {"optimizer": {0: own}}, r"has no U, so it steps no optimizers; call their step\(\) yourself"),
        (updated, {}, "give an optimizer for each stage of this rank, such as optimizer={0: torch.optim.SGD"),
        (updated, {"optimizer": {1: own}}, "give an optimizer for each stage of this rank"),
        (
            updated,
            {"optimizer": {0: wrong}},
            "the optimizer of stage 0 must have all weights of that",
        ),
        (
            updated,
            {"optimizer": {0: own}, "tied": [((0, "weight"), (0, "bias"))]},
            "leave out replicas and tied",
        ),
        (updated, {"optimizer": PostValidation(own)}, "give an optimizer for each stage of this rank"),
    ):
        with pytest.raises(SettingError, match=message):
            Pipeline(schedule, {0: module}, **options)
    two = pp.Schedule("two", pp.Placement.make("loop", 1, 2), 1, [["0F0", "1F0", "1B0", "0B0", "0U0", "1U0"]])
    with pytest.raises(SettingError, match="two stages of this rank share a weight"):
        Pipeline(two, {0: module, 1: module}, optimizer={0: own, 1: own})
    pipeline = Pipeline(updated, {0: module}, lambda y, target: y.sum(), optimizer={0: own})
    with pytest.raises(SettingError, match="leave out loss_scale"):
        pipeline.step(torch.ones(2, 2), torch.ones(2), loss_scale=2.0)


@pytest.mark.parametrize("name", CHECKS)
def test_weights_are_those_of_one_process(ranks, name):
    ranks(f"CORE = {CORE!r}\n" + BEGIN + REPLAY + CHECKS[name], 4)
