"""A stage whose module writes over what it is given has the gradients of `module(x.clone())`, or is refused."""

import copy
from contextlib import nullcontext
from fractions import Fraction

import torch
from cases import Of
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import often
from torch import nn
from torch.nn import functional as fn

import ppedu as pp
from ppedu.run import Pipeline, Stage


class Block(nn.Module):
    """Layers between changes of the input, which may be in place; `scale` is a keyword, which may be changed, too."""

    def __init__(self, first, second, on_scale, frozen):
        super().__init__()
        self.first, self.second, self.on_scale = CHANGES[first](), CHANGES[second](), CHANGES[on_scale]()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.requires_grad_(not frozen)

    def forward(self, x, scale):
        return self.other(self.second(self.one(self.first(x)))) * self.on_scale(scale)


def function(run):
    """Return a module in which nothing announces that it writes in place."""
    return Of(lambda s, x: run(x))


def unrecorded(x):
    with torch.no_grad():
        return x.mul_(3)


CHANGES = {
    "none": nn.Identity,
    "silu": lambda: nn.SiLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
    "a method": lambda: function(lambda x: x.mul_(2)),
    "a function": lambda: function(lambda x: fn.leaky_relu_(x, 0.3)),
    "an entry": lambda: function(lambda x: (x[..., :1].add_(1), x)[1]),
    "without a graph": lambda: function(unrecorded),
    "a clone": lambda: function(lambda x: x.clone().mul_(2)),
}
X, Y, SCALE = (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


def judge(module, x, loss_fn, wants_grad):
    """Return the gradients with autograd alone, on clones of everything."""
    torch.manual_seed(1)
    gradients = []
    for xs, y, scale in zip(x.split(2), Y.split(2), SCALE.split(2), strict=True):
        came = xs.clone().requires_grad_(wants_grad)
        loss = loss_fn(module(came.clone(), scale.clone()), y.clone()) / 3
        if loss.requires_grad:
            loss.backward()
        gradients.append(came.grad)
    return gradients, [weight.grad for weight in module.parameters()]


def run(module, x, loss_fn, received, wants_grad, recompute, halves):
    """Return the gradients that a stage finds: of the input, and of the weights."""
    torch.manual_seed(1)
    stage = Stage(module, 1 if received else 0, loss_fn, recompute=recompute)
    stage.begin(x.split(2), Y.split(2))
    for m, scale in enumerate(SCALE.split(2)):
        came = x.split(2)[m].clone().requires_grad_(wants_grad) if received else None
        stage.forward(m, came, scale=scale)
    found = [(stage.backward_input if halves else stage.backward)(m) for m in range(3)]
    for m in range(3 if halves else 0):
        stage.backward_weight(m)
    return found, [weight.grad for weight in module.parameters()]


def equal(found, expected):
    return all(
        one is other or (one is not None and other is not None and torch.equal(one, other))
        for mine, theirs in zip(found, expected, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )


@often(200)
@given(
    st.sampled_from(list(CHANGES)),
    st.sampled_from(list(CHANGES)),
    st.sampled_from(["none"] * 3 + list(CHANGES)),
    st.booleans(),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_change_in_place_never_changes_gradients(first, second, on_scale, frozen, given, recompute, halves, spoils):
    received, wants_grad = given
    module, before = Block(first, second, on_scale, frozen), (X.clone(), Y.clone(), SCALE.clone())

    def loss_fn(output, target):
        return fn.mse_loss(output, target.add_(1) if spoils else target + 1)

    try:
        found = run(copy.deepcopy(module), X, loss_fn, received, wants_grad, recompute, halves)
    except pp.PipelineError as error:
        assert "in place" in str(error) and "clone" in str(error), error
        hidden = {"a method", "a function", "an entry", "without a graph"}
        assert spoils or on_scale not in ("none", "a clone") or first in hidden
        for tensor, kept in zip((X, Y, SCALE), before, strict=True):
            tensor.copy_(kept)
        return
    assert all(map(torch.equal, (X, Y, SCALE), before)), "the batch is the caller's"
    if module.one.weight.requires_grad or wants_grad:
        assert equal(found, judge(module, X, loss_fn, wants_grad))


class Passes(nn.Module):
    """Returns a tensor that it has not made."""

    def __init__(self, what):
        super().__init__()
        self.what, self.weight = what, nn.Parameter(X[:2].clone())
        self.register_buffer("buffer", X[:2].clone())

    def forward(self, x):
        return {"the input": x, "a view": x[:], "a weight": self.weight, "a buffer": self.buffer[:]}[self.what]


def test_a_first_microbatch_that_does_not_count_is_not_cut_off_from_the_weights():
    """As if all its targets were padding; a stage on its own checks every backward."""
    module = nn.Linear(4, 4)
    expected = torch.autograd.grad(fn.mse_loss(module(X[2:4]), Y[2:4]), module.weight)[0]
    stage = Stage(module, 0, fn.mse_loss)
    stage.begin(X[:4].split(2), Y[:4].split(2), [Fraction(0), Fraction(1)])
    for microbatch in range(2):
        stage.forward(microbatch)
        stage.backward(microbatch)
    assert torch.equal(module.weight.grad, expected)


def subtracts(output, target):
    return output.sub_(target).square().mean()


@often(150)
@given(
    st.lists(st.sampled_from(["the input", "a view", "a weight", "a buffer", *CHANGES]), min_size=1, max_size=2),
    st.sampled_from([fn.mse_loss, subtracts]),
    st.sampled_from([nullcontext, torch.inference_mode]),
    st.booleans(),
    st.booleans(),
)
@example(["a view", "a method"], fn.mse_loss, nullcontext, False, False)
@example(["a weight", "a method"], fn.mse_loss, nullcontext, False, False)
@example(["a method"], fn.mse_loss, torch.inference_mode, True, False)
@example(["a clone"], subtracts, nullcontext, False, True)
@example(["a weight"], subtracts, nullcontext, False, False)
def test_an_evaluation_changes_neither_the_batch_nor_weights(kinds, loss_fn, mode, made_inside, wants_outputs):
    schedule = pp.schedule("interleaved", 1, 3, chunks=2) if len(kinds) == 2 else pp.schedule("1f1b", 1, 3)
    modules = [CHANGES[kind]() if kind in CHANGES else Passes(kind) for kind in kinds]
    models = copy.deepcopy(modules)
    batch = X.clone(), Y.clone()
    with mode():
        if made_inside:  # autograd does not count the changes of such tensors
            batch = X.clone(), Y.clone()
        try:
            pipeline = Pipeline(schedule, dict(enumerate(modules)), loss_fn)
            loss, outputs = pipeline.eval(*batch, outputs=True) if wants_outputs else (pipeline.eval(*batch), None)
        except pp.PipelineError as error:
            assert "in place" in str(error) and "clone" in str(error), error
            assert loss_fn is subtracts or kinds[0] in {"a method", "a function", "an entry", "without a graph"}
            return
    expected = list(X.split(2))
    for model in models:
        expected = [model.eval()(x.clone()).detach().clone() for x in expected]
    losses = [loss_fn(x.clone(), y) for x, y in zip(expected, Y.split(2), strict=True)]
    assert all(map(torch.equal, batch, (X, Y)))
    for module, model in zip(modules, models, strict=True):
        assert all(map(torch.equal, module.state_dict().values(), model.state_dict().values()))
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    assert outputs is None or torch.equal(outputs, torch.cat(expected))
