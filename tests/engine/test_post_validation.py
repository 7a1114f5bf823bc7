"""Training without a barrier: bit for bit the same weights as with one, also after steps that are taken back."""

import random
from contextlib import nullcontext

import pytest
import torch
from cases import run
from torch import nn
from torch.nn import functional as fn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import ppedu as pp
from ppedu.run import Pipeline, PostValidation

TRAIN = """
def train(name, max_norm, validated, steps=5, **options):
    "Return the losses, the weights and buffers, and which steps were taken back."
    schedule = pp.schedule(name, 4, 8)
    def module(stage):
        linear = layer(stage)
        return nn.Sequential(linear, nn.BatchNorm1d(4), nn.Dropout(0.1))
    stages = {stage: module(stage) for stage in local_stages(schedule, rank)}
    optimizer = torch.optim.AdamW(nn.ModuleList(stages.values()).parameters(), lr=1e-2)
    validation = PostValidation(optimizer, max_norm) if validated else None
    pipeline = Pipeline(schedule, stages, fn.mse_loss, fresh(), optimizer=validation, timeout=20, **options)
    torch.manual_seed(7 + rank)
    losses, norms = [], []
    for step in range(steps):
        x, y = numbers(32, 4 + step)[:, :4].contiguous(), numbers(32, 8 + step)[:, :4] * (4 if step % 3 == 0 else 1)
        losses.append(pipeline.step(x, y.contiguous()))
        if not validated:
            norms.append(pipeline.clip_grad_norm(max_norm or float("inf")))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9  # as a scheduler does, before a step is validated
    if validated:
        assert losses.pop(0) is None
        losses.append(pipeline.flush())
        assert pipeline.flush() is None
        assert all(weight.grad is None for weight in nn.ModuleList(stages.values()).parameters())
        assert pipeline.timeline.makespan > 0
    state = [value.clone() for stage in stages.values() for value in stage.state_dict().values()]
    return torch.stack(losses), state, norms
"""

SAME = """
for max_norm in MAX_NORMS:
    losses, state, norms = train(NAME, max_norm, validated=False)
    again, found, _ = train(NAME, max_norm, validated=True)
    assert max_norm is None or {norm > max_norm for norm in norms} == EXPECTED[max_norm], norms
    assert torch.equal(losses, again) and all(map(torch.equal, state, found))
"""
EXPECTED = "{12.0: {True, False}, 0.001: {True}, 1e9: {False}}"
SAME_AFTER_SOME = SAME.replace("MAX_NORMS", "[12.0]").replace("EXPECTED", EXPECTED)
CASES = {name: SAME_AFTER_SOME.replace("NAME", repr(name)) for name in ["1f1b", "zb-v"]}
OTHERS = {
    name: SAME_AFTER_SOME.replace("NAME", repr(name))
    for name in ["gpipe", "interleaved", "zb-h1", "zb-h2", "v-min", "dualpipev"]
}
CASES["with any norm"] = (
    SAME.replace("NAME", '"zb-h1"').replace("MAX_NORMS", "[None, 0.001, 1e9]").replace("EXPECTED", EXPECTED)
)
CASES["shapes that depend on the data"] = """
losses, state, _ = train("1f1b", 8.0, validated=False)
again, found, _ = train("1f1b", 8.0, validated=True, batching=Batching(variable_shapes=True))
assert torch.equal(losses, again) and all(map(torch.equal, state, found))
"""
CASES["a loss that is not finite"] = """
pipeline = make(microbatches=4)
weights = [weight for stage in pipeline.stages.values() for weight in stage.module.parameters()]
optimizer = torch.optim.SGD(weights, 0.1)
pipeline = make(microbatches=4, change={rank: pipeline.stages[rank].module}, optimizer=PostValidation(optimizer))
assert pipeline.step(X, Y) is None
first = pipeline.flush()
before = [weight.detach().clone() for weight in weights]
assert pipeline.step(SPOILT, Y) is None
assert "3F2 gave a loss of nan" in outcome(lambda: pipeline.step(X, Y))
assert all(map(torch.equal, before, weights))
assert pipeline.step(X, Y) is None and pipeline.flush() < first  # it can be used, and the step was not taken
expected = [weight.detach().clone() for weight in weights]
pipeline.step(X, Y)
assert torch.isfinite(pipeline.eval(X, Y)) and not any(map(torch.equal, expected, weights))
assert pipeline.flush() is None  # the evaluation has waited
"""
CASES["a step that is taken back"] = """
def train(schedule, spoilt):
    "Return the weights and losses after three good steps, and the errors of the steps in `spoilt`."
    schedule = pp.schedule(schedule, 4, 4)
    stages = {stage: nn.Sequential(layer(stage), nn.Dropout(0.2)) for stage in local_stages(schedule, rank)}
    weights = list(nn.ModuleList(stages.values()).parameters())
    optimizer = PostValidation(torch.optim.AdamW(weights, 0.01), 0.5)
    pipeline = Pipeline(schedule, stages, fn.mse_loss, fresh(), optimizer=optimizer, timeout=20)
    losses, errors = [], []
    def call(number, *batch):
        torch.manual_seed(number)
        try:
            losses.append(pipeline.step(*batch))
        except pp.PipelineError as error:
            errors.append(str(error))
            state = torch.get_rng_state()
            torch.manual_seed(number)
            assert torch.equal(torch.get_rng_state(), state)  # the call has done nothing
            losses.append(pipeline.step(*batch))
    for number in range(3):
        batch = numbers(8, 4 + number)[:, :4].contiguous(), Y
        call(number, *batch)
        if number in spoilt:
            losses.append(pipeline.flush())
            pipeline.step(SPOILT, Y)
    losses.append(outcome(pipeline.flush))
    return [weight.detach().clone() for weight in weights], losses, errors

for name in ("1f1b", "zb-h1", "zb-v"):
    expected, losses, errors = train(name, [])
    found, again, told = train(name, [0, 1])
    assert all(map(torch.equal, expected, found)) and not errors and len(told) == 2
    assert [each.item() for each in losses if each is not None] == [each.item() for each in again if each is not None]
    assert "F2 gave a loss of nan" in told[0] and "that was step 1, counted from 0; it has been taken back" in told[0]
    assert "that was step 3," in told[1]
    assert told[1].endswith("and this call has done nothing: call step again with the same batch")
    assert train(name, [2])[1][-1].split(" (lines")[0].endswith("taken back, so the weights are as before it")
"""
CASES["replicas decide alike"] = """
mine, half, group, replicas = two_replicas()
for seed, name in enumerate(["gpipe", "1f1b", "zb-h1"]):
    draw, held, judge = random.Random(seed), layer(mine), [layer(0), layer(1)]
    max_norm = draw.choice([None, 0.3])
    optimizer = PostValidation(torch.optim.SGD(held.parameters(), 0.1), max_norm)
    schedule = pp.schedule(name, 2, 4)
    pipeline = Pipeline(schedule, {mine: held}, fn.l1_loss, group, replicas=replicas, optimizer=optimizer, timeout=20)
    weights = [weight for module in judge for weight in module.parameters()]
    good = True
    for step in range(8):
        x, y = numbers(16, 4) + step, torch.cat([Y, -Y])
        spoilt = draw.choice([[], [], [0], [1], [0, 1]])
        for replica in spoilt:
            y[8 * replica + draw.randrange(8), 0] = torch.inf
        batch = [each.split(8)[half].contiguous() for each in (x, y)]
        told = outcome(lambda: pipeline.step(*batch))
        assert good != isinstance(told, str), (step, told)
        if not good:
            assert pipeline.step(*batch) is None
        good = not spoilt
        if good:
            reference(judge, x.split(2), y.split(2), fn.l1_loss)
            nn.utils.clip_grad_norm_(weights, max_norm or torch.inf)
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    outcome(pipeline.flush)
    state = torch.cat([weight.detach().flatten() for weight in held.parameters()])
    both = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(both, state, group=replicas)
    assert torch.equal(*both), name
    torch.testing.assert_close(state, torch.cat([weight.detach().flatten() for weight in judge[mine].parameters()]))
"""
CASES["what does not fit"] = """
foreign = PostValidation(torch.optim.SGD([*layer(0).parameters()]))
assert "optimizer of PostValidation has 4 weights that no stage of this rank has, the first of" in outcome(
    lambda: make(optimizer=foreign)
)
own = {rank: layer(rank)}
optimizer = torch.optim.SGD(own[rank].parameters())
pipeline = make(optimizer=PostValidation(optimizer), change=own)
assert "the pipeline steps the optimizer, and clips before" in outcome(lambda: pipeline.clip_grad_norm(1.0))
assert "optimizer must be a PostValidation" in outcome(lambda: make(optimizer=optimizer))
assert "optimizer must be an optimizer of torch" in outcome(lambda: PostValidation(1))
assert "max_norm must be a number above 0; got 0" in outcome(lambda: PostValidation(optimizer, 0))
other = PostValidation(optimizer, 1.0 + rank)
assert "has a different max_norm than rank 0" in outcome(lambda: make(optimizer=other, change=own).step(X, Y))
"""


def outcomes(ranks, cases):
    """Return "fine" or the error on each rank, by case."""
    found = run(ranks, 4, 1, {name: TRAIN + code for name, code in cases.items()})
    return {name: [first for first, _, _ in each] for name, each in found.items()}


@pytest.fixture(scope="module")
def found(ranks):
    return outcomes(ranks, CASES)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_losses_are_those_of_training_with_a_barrier(found, case):
    assert found[case] == ["fine"] * 4


@pytest.mark.slow
def test_weights_and_losses_of_other_schedules_are_those_of_training_with_a_barrier(ranks):
    assert outcomes(ranks, OTHERS) == dict.fromkeys(OTHERS, ["fine"] * 4)


X, Y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


class Average(nn.Module):
    """Layers that subtract a running average of their outputs, which each forward assigns or writes to."""

    def __init__(self, assigns=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.assigns = assigns
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        y = self.layers(x)
        if self.training:
            average = 0.9 * self.average + 0.1 * y.detach().float().mean(0)
            if self.assigns:
                self.average = average
            else:
                self.average.copy_(average)
        return y - self.average


def alone(module, optimizer, max_norm=None, loss_fn=fn.mse_loss):
    """Return a pipeline of this process alone."""
    return Pipeline(pp.schedule("1f1b", 1, 4), {0: module}, loss_fn, optimizer=PostValidation(optimizer, max_norm))


class Centered(nn.Module):
    """A loss with a buffer, the running mean of the outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, y, target):
        loss = fn.mse_loss(y - self.center, target)
        self.center = 0.9 * self.center + 0.1 * y.detach().float().mean(0)
        return loss


def judge(module, optimizer, max_norm, batches, precision, loss_fn=fn.mse_loss):
    """Train with torch alone."""
    weights = list(module.parameters())
    for xs, ys in batches:
        with precision():
            for x, y in zip(xs.split(2), ys.split(2), strict=True):
                (loss_fn(module(x), y) / 4).backward()
        if max_norm:
            norm = get_total_norm([weight.grad for weight in weights]).double()
            clip_grads_with_norm_(weights, max_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9


OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
}


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_buffer_and_context_gives_the_weights_of_torch_alone(name):
    kind = torch.optim.SGD if name == "nesterov" else getattr(torch.optim, name)
    for seed in range(3):
        draw = random.Random(f"{name} {seed}")
        max_norm, assigns, foreach = draw.choice([None, 0.1, 0.5]), draw.random() < 0.5, draw.random() < 0.7
        precision, outer = draw.choice([(nullcontext, nullcontext), (bfloat16, nullcontext), (bfloat16, bfloat16)])
        inner = nullcontext if outer is bfloat16 else precision  # around each call, or around all of them
        batches = [(X + step, Y * draw.choice([1, 4])) for step in range(3)]
        ours, theirs = Average(assigns), Average(assigns)
        optimizer, other = (kind(each.parameters(), foreach=foreach, **OPTIMIZERS[name]) for each in (ours, theirs))
        losses = (Centered(), Centered()) if draw.random() < 0.5 else (fn.mse_loss, fn.mse_loss)
        judge(theirs, other, max_norm, batches, precision, losses[1])
        pipeline, clears = alone(ours, optimizer, max_norm, losses[0]), draw.random() < 0.5
        with outer():
            for batch in batches:
                with inner():
                    pipeline.step(*batch)
                if clears:  # as in a loop that was written for training with a barrier
                    optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] *= 0.9
        pipeline.flush()
        for mine, right in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            assert torch.equal(mine, right), (seed, max_norm, assigns, foreach, precision, outer, clears)


def test_gradients_that_are_not_finite_are_an_error_and_training_goes_on():
    module, judged = Average(), Average()
    optimizer, other = (torch.optim.Adam(each.parameters()) for each in (module, judged))
    spoils = [False]

    def loss_fn(y, target):
        spoilt = (0 * y).sum().sqrt() if spoils[0] else 0  # 0, and its derivative NaN
        return fn.mse_loss(y, target) + spoilt

    pipeline = alone(module, optimizer, None, loss_fn)
    before = [weight.detach().clone() for weight in module.parameters()]
    spoils[0] = True
    pipeline.step(X, Y)
    spoils[0] = False
    with pytest.raises(pp.PipelineError, match=r"the norm of the gradients over all stages is nan.* that was step 0"):
        pipeline.step(X, Y)
    assert all(map(torch.equal, before, module.parameters()))
    judged.average.copy_(module.average)
    judge(judged, other, None, [(X, Y)], nullcontext)
    pipeline.step(X, Y)
    pipeline.flush()
    assert all(map(torch.equal, judged.parameters(), module.parameters()))


def assign(layer):
    layer.weight = nn.Parameter(layer.weight.detach().clone())


CHANGES = {
    "clamp": lambda layer: layer.weight.detach().clamp_(-0.1, 0.1),
    "load": lambda layer: layer.load_state_dict(layer.state_dict()),
    "assign": assign,
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_before_a_step_is_validated_are_refused(change):
    for flushed in (True, False):
        for call in ("step", "flush"):
            module = Average()
            pipeline = alone(module, torch.optim.SGD(module.parameters(), 0.1))
            pipeline.step(X, Y)
            if flushed:
                pipeline.flush()
            CHANGES[change](module.layers[0])
            run = pipeline.flush if call == "flush" else lambda pipeline=pipeline: pipeline.step(X, Y)
            if flushed:
                run()
            else:
                with pytest.raises(pp.PipelineError, match=r"would undo the change; call flush\(\) before"):
                    run()


def test_weights_that_a_forward_changes_are_not_refused():
    module = nn.Sequential(nn.Embedding(4, 4, max_norm=0.5), nn.Linear(4, 4))
    pipeline = alone(module, torch.optim.SGD(module.parameters(), 0.1), 0.1)
    for _ in range(3):
        pipeline.step(torch.arange(8) % 4, Y)
    assert pipeline.flush().isfinite()


def test_an_optimizer_without_all_trained_weights_is_refused():
    module = Average()
    optimizer = torch.optim.SGD(module.layers[0].parameters())
    with pytest.raises(pp.SettingError, match=r"lacks 2 weights of this rank's stages, the first of shape \(4, 4\)"):
        alone(module, optimizer)
    module.layers[2].requires_grad_(False)
    assert alone(module, optimizer).step(X, Y) is None
