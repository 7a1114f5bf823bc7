"""A stage whose module writes over what it is given has the gradients of `module(x.clone())`, or is refused."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import often
from torch import nn
from torch.nn import functional as fn

import ppedu as pp
from ppedu.run import Stage


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


class Function(nn.Module):
    """A module in which nothing announces that it writes in place."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def unrecorded(x):
    with torch.no_grad():
        return x.mul_(3)


CHANGES = {
    "none": nn.Identity,
    "silu": lambda: nn.SiLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
    "a method": lambda: Function(lambda x: x.mul_(2)),
    "a function": lambda: Function(lambda x: fn.leaky_relu_(x, 0.3)),
    "an entry": lambda: Function(lambda x: (x[..., :1].add_(1), x)[1]),
    "without a graph": lambda: Function(unrecorded),
    "a clone": lambda: Function(lambda x: x.clone().mul_(2)),
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
