"""The two halves of a backward equal autograd's full backward, bit for bit, and compute nothing twice."""

import copy
from collections import Counter

import pytest
import torch
from cases import Of
from hypothesis import given
from hypothesis import strategies as st
from releases import needs
from strategies import often
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import ppedu as pp
from ppedu.course.training.gpt import Block, GPTConfig
from ppedu.engine.ranks.versions import UNPACK_HOOK, lack
from ppedu.engine.stages.stage import Stage, as_tuple


class Cubed(torch.autograd.Function):
    """A custom function with a weight: x³·w."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return 3 * x**2 * w * dy, (x**3 * dy).sum(0)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))))


def x(*shape, requires_grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_(requires_grad)


def frozen(module, *names):
    for name, part in module.named_parameters():
        part.requires_grad_(not name.startswith(names))
    return module


def linears(*after):
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), *after)


def block(**options):
    return Block(GPTConfig(5, layers=1, heads=2, width=4, **options))


def again(reentrant):
    return Of(lambda s, x: checkpoint(s.block, s.before(x), use_reentrant=reentrant), before=linears(), block=block())


def hooked(module):
    """Mark a module whose weights get hooks that double their gradients. `copied` adds them: deepcopy drops hooks."""
    module.hooked = True
    return module


def copied(module):
    module = copy.deepcopy(module)
    for part in module.modules():
        if hasattr(part, "hooked"):
            for each in part.parameters():
                doubled(each)
    return module


def doubled(tensor):
    tensor.register_hook(lambda grad: 2 * grad)
    return tensor


ONE = (x(3, 4),)
SEQUENCE = (x(2, 3, 4),)
CASES = {}  # by name: a stage's module and its inputs


def case(name, module, *inputs, **parts):
    CASES[name] = (Of(module, **parts) if parts else module, inputs or ONE)


case("linears", linears())
case("a transformer block", block(), *SEQUENCE)
case("an output that is a view", linears(nn.Unflatten(1, (2, 2))))
case("an output that is transposed", lambda s, x: s.a(x).t(), a=linears())
case("an output that is a slice", lambda s, x: s.a(x)[:, 1:3], a=linears())
case("outputs that are slices of one", lambda s, x: s.a(x).chunk(2, 1), a=linears())

case("some frozen", frozen(linears(nn.Linear(4, 4)), "0.", "2.bias"))
case("all frozen", frozen(linears(), ""))
case("all frozen, no input requires grad", frozen(linears(), ""), x(3, 4, requires_grad=False))
case("no input requires grad", linears(), x(3, 4, requires_grad=False))

case("one weight in two layers", lambda s, x: fn.linear(fn.linear(x, s.w).sin(), s.w), w=weight(4, 4))
case("one layer three times", lambda s, x: s.a(s.a(s.a(x).sin()).sin()), a=nn.Linear(4, 4))
case(
    "one bias twice",
    lambda s, x: fn.linear((x @ s.w + s.b).sin(), s.v, s.b),
    w=weight(4, 4),
    v=weight(4, 4),
    b=weight(4),
)
case("one matrix twice", lambda s, x: (x @ s.w).sin() @ s.w, w=weight(4, 4))
case("one matrix in several ways", lambda s, x: ((x @ s.w).sin() @ s.w.t()) @ s.w + s.w.sum(), w=weight(4, 4))
case("slices of one weight", lambda s, x: fn.linear(fn.linear(x, s.w[:4]).sin(), s.w[4:]), w=weight(9, 4))
case("a weight computed from two weights", lambda s, x: fn.linear(x, s.u @ s.v).sin(), u=weight(5, 2), v=weight(2, 4))
case("weight norm", linears(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))


def in_common(s, x):
    common = s.u.exp() + s.v
    return fn.linear(fn.linear(x, common + s.u).sin(), common * s.v)


case("a tensor computed from weights, shared by two layers", in_common, u=weight(4, 4), v=weight(4, 4))

case("checkpointed", again(False), *SEQUENCE)
case("checkpointed, reentrant", again(True), *SEQUENCE)
case("a custom autograd function", lambda s, x: s.b(Cubed.apply(s.a(x), s.w)), a=linears(), b=linears(), w=weight(4))
case("in place", linears(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)))
case("BatchNorm", linears(nn.BatchNorm1d(4), nn.Linear(4, 4)))
case("dropout", linears(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)))
case("an LSTM", lambda s, x: (lambda y, last: (y, *last))(*s.a(x)), *SEQUENCE, a=nn.LSTM(4, 3, 2))
case("a GRU's cells", lambda s, x: s.a(x[0], s.a(x[1])), *SEQUENCE, a=nn.GRUCell(4, 4))
case("attention", lambda s, x: s.a(x, x, x)[0], *SEQUENCE, a=nn.MultiheadAttention(4, 2))
case("cross-attention", lambda s, x, y: s.a(x, y, y)[0], *SEQUENCE, *SEQUENCE, a=nn.MultiheadAttention(4, 2))
convolutions = nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.ReLU(inplace=True), nn.ConvTranspose2d(3, 2, 2)
case("convolutions", nn.Sequential(*convolutions), x(1, 2, 5, 5))

case("several inputs and outputs", lambda s, x, y: (s.a(x) * y, s.b(y), x + y), *ONE, x(3, 4), a=linears(), b=linears())
case(
    "inputs and outputs without gradients",
    lambda s, x, n, y: (n + 1, s.a(x)[n] + y, y.detach()),
    *(x(3, 4), torch.tensor([2, 0, 0]), x(3, 4, requires_grad=False)),
    a=linears(),
)
case("an unused input", lambda s, x, y: s.a(y), *ONE, x(3, 4), a=linears())
case("no input is used", lambda s, x: s.w.exp(), w=weight(4))
case("an output of weights alone", lambda s, x: (s.a(x), s.b.weight.exp()), a=linears(), b=nn.Linear(2, 2))
case("weights as outputs", lambda s, x: (x @ s.w, s.w, s.v), w=weight(4, 4), v=weight(2))
case("identity", nn.Identity())
case("an output that is an input", lambda s, x, y: (s.a(x), y, x), *ONE, x(3, 4), a=linears())

case("hooks on weights", nn.Sequential(hooked(nn.Linear(4, 4)), hooked(nn.LayerNorm(4))))
case("hooks on weights used twice", lambda s, x: s.a(s.a(x).sin()), a=hooked(nn.Linear(4, 4)))
case("a hook on an activation", lambda s, x: s.b(doubled(s.a(x)).relu()), a=nn.Linear(4, 4), b=nn.Linear(4, 4))


class Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products by kind, as torch defines them, and the calls of an LSTM."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, kind = func(*args, **(kwargs or {})), func.overloadpacket
        if kind in flop_registry:
            self.count[str(kind)] += flop_registry[kind](*args, **(kwargs or {}), out_val=out)
        elif "rnn" in str(kind):
            self.count[str(kind)] += 1
        return out


def run(module, inputs, halves, microbatches=2):
    """Run all forwards, then all backwards in a Stage; return the gradients and the FLOPs of the backwards."""
    module = copied(module)
    torch.manual_seed(0)
    stage = Stage(module, 1)
    stage.begin([None] * microbatches, [])
    grads = [grads_of(stage.forward(m, tuple(fresh(inputs)))) for m in range(microbatches)]
    with Flops() as flops:
        if halves:
            found = [stage.backward_input(m, grads[m]) for m in range(microbatches)]
            for m in range(microbatches):
                stage.backward_weight(m)
        else:
            found = [stage.backward(m, grads[m]) for m in range(microbatches)]
    assert not stage.held and not stage.weight_halves
    found = [dx if isinstance(dx, tuple) else () if dx is None else (dx,) for dx in found]
    return found, [part.grad for part in module.parameters()], flops.count


def judge(module, inputs, microbatches=2):
    """Do the same with autograd alone."""
    module = copied(module)
    torch.manual_seed(0)
    came = [tuple(fresh(inputs)) for _ in range(microbatches)]
    wanted = [[y for y in as_tuple(module(*each)) if y.requires_grad] for each in came]
    with Flops() as flops:
        for ys in wanted:
            if ys:
                torch.autograd.backward(ys, grads_of(ys))
    found = [tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in xs if x.requires_grad) for xs in came]
    return found, [part.grad for part in module.parameters()], flops.count


def fresh(inputs):
    return [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]


def grads_of(y):
    """Make a different gradient for each output that requires grad."""
    wanting = [each for each in as_tuple(y) if each.requires_grad]
    return tuple(torch.arange(1.0, 1 + y.numel()).view(y.shape) / (7 + i) for i, y in enumerate(wanting))


def agree(found, expected):
    (dx, dw, count), (dx_, dw_, count_) = found, expected
    for ours, theirs in zip([*dx, dw], [*dx_, dw_], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    assert count == count_ or lack(UNPACK_HOOK)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_a_stages_backward_equals_autograds(case, halves):
    module, inputs = CASES[case]
    agree(run(module, inputs, halves), judge(module, inputs))


@pytest.mark.parametrize("case", ["linears", "a transformer block", "one layer three times", "slices of one weight"])
def test_the_second_half_computes_only_the_products_for_the_weights(case):
    module, inputs = CASES[case]
    stage = Stage(copy.deepcopy(module), 1)
    stage.begin([None], [])
    with Flops() as forward:
        y = stage.forward(0, tuple(fresh(inputs)))
    with Flops() as first:
        stage.backward_input(0, grads_of(y))
    with Flops() as second:
        stage.backward_weight(0)
    # The backward of a product with a weight has two products of the same size, one in each half.
    of_weights = forward.count["aten.mm"] + forward.count["aten.addmm"]
    assert sum(second.count.values()) == first.count["aten.mm"] == of_weights > 0


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=needs(UNPACK_HOOK)), True])
def test_a_checkpointed_block_is_recomputed_once_in_the_first_half(reentrant):
    module, forwards = again(reentrant), []
    module.block.register_forward_pre_hook(lambda *_: forwards.append(1))  # a recomputation may stop early
    stage = Stage(module, 1)
    stage.begin([None], [])
    y = stage.forward(0, *fresh(SEQUENCE))
    assert len(forwards) == 1
    stage.backward_input(0, grads_of(y))
    assert len(forwards) == 2
    stage.backward_weight(0)
    assert len(forwards) == 2


def test_the_second_half_needs_nothing_but_itself_to_keep_a_custom_function():
    """Before PyTorch 2.13, an edge does not keep the graph of a custom function alive: an error, or a crash."""
    ones, given = torch.ones(4, 4), x(3, 4)
    twice = Of(lambda s, x: torch.tanh(x @ Cubed.apply(s.w, ones)) @ Cubed.apply(s.w, ones), w=weight(4, 4))
    twice(given).sum().backward()
    expected, twice.w.grad = twice.w.grad, None
    stage = Stage(twice, 1)
    stage.begin([None], [])
    stage.backward_input(0, torch.ones_like(stage.forward(0, given)))
    stage.backward_weight(0)
    assert torch.equal(twice.w.grad, expected)


def test_the_first_stage_leaves_everything_to_the_second_half():
    module = nn.Sequential(nn.Embedding(5, 4), *linears())
    stage = Stage(module, 0)
    stage.begin([torch.tensor([1, 4, 1])], [])
    y = stage.forward(0)
    assert stage.backward_input(0, grads_of(y)) is None
    assert all(part.grad is None for part in module.parameters())
    stage.backward_weight(0)
    expected = torch.autograd.grad(module(torch.tensor([1, 4, 1])), list(module.parameters()), grads_of(y))
    assert all(torch.equal(part.grad, other) for part, other in zip(module.parameters(), expected, strict=True))


def test_a_stage_in_the_middle_needs_no_begin():
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    stage = Stage(module, 1)
    whole, halves = [stage.forward(m, x) for m in range(2)]
    dx = stage.backward(0, torch.ones_like(whole))
    assert torch.equal(stage.backward_input(1, torch.ones_like(halves)), dx)
    stage.backward_weight(1)
    assert torch.equal(module.weight.grad, 2 * torch.ones(2, 4).t() @ x.detach())


def test_outputs_are_freed_after_the_send_and_the_graph_during_the_second_half():
    layers = 5
    module, alive, saved = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]), [], []
    for layer in module:
        layer.register_forward_hook(lambda _, xs, y: saved.append(StorageWeakRef(xs[0].untyped_storage())))
        layer.weight.register_post_accumulate_grad_hook(lambda _: alive.append(sum(not x.expired() for x in saved)))
    stage = Stage(module, 1)
    stage.begin([None], [])
    y = stage.forward(0, torch.randn(2, 4, requires_grad=True))
    sent, dy = StorageWeakRef(y.untyped_storage()), grads_of(y)
    del y
    assert sent.expired()
    dx = stage.backward_input(0, dy)
    assert not any(x.expired() for x in saved)
    stage.backward_weight(0)
    assert alive == [4, 3, 2, 1, 1]  # the last is the input itself
    assert all(x.expired() for x in saved) and dx is not None


KINDS = {
    "linear": lambda s, i, x, y: fn.linear(x, s.w[i], s.b[i]),
    "layer": lambda s, i, x, y: s.layers[i](x),
    "matrix": lambda s, i, x, y: x @ s.w[i],
    "scale": lambda s, i, x, y: x * s.b[i],
    "bias": lambda s, i, x, y: x + s.b[i],
    "sum": lambda s, i, x, y: x + y,
    "product": lambda s, i, x, y: x.sin() * y,
    "in place": lambda s, i, x, y: (x * 2).relu_(),
    "halves": lambda s, i, x, y: torch.cat([half @ s.w[i][:2, :2] for half in x.chunk(2, 1)], 1),
    "turned": lambda s, i, x, y: (s.w[i].t() @ x.t()).t(),
    "own": lambda s, i, x, y: Cubed.apply(x.sin(), s.b[i]),
    "computed": lambda s, i, x, y: fn.linear(x, s.w[i] * s.w[i - 1] + s.b[i]),
    "checkpointed": lambda s, i, x, y: checkpoint(lambda x: s.layers[i](x).sin(), x, use_reentrant=False),
    "dropout": lambda s, i, x, y: fn.dropout(x, 0.5),
    "cut off": lambda s, i, x, y: x.detach() + s.b[i],
    "norm": lambda s, i, x, y: fn.layer_norm(x, (4,), s.b[i], s.b[i - 1]),
}


@st.composite
def programs(draw):
    """Draw a random stage: inputs, steps (operation, two earlier tensors, a weight), outputs and frozen weights."""
    inputs = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    steps = []
    for number in range(draw(st.integers(1, 9))):
        earlier = st.integers(0, len(inputs) + number - 1)
        steps.append((draw(st.sampled_from(list(KINDS))), draw(earlier), draw(earlier), draw(st.integers(0, 2))))
    tensors = st.integers(0, len(inputs) + len(steps) - 1)
    return inputs, steps, draw(st.lists(tensors, min_size=1, max_size=3)), draw(st.sets(st.integers(0, 8), max_size=3))


@often(100)
@given(programs())
def test_a_random_stages_backward_equals_autograds(program):
    inputs, steps, outputs, unwanted = program

    def all_steps(s, *tensors):
        tensors = list(tensors)
        for kind, one, other, i in steps:
            tensors.append(KINDS[kind](s, i, tensors[one], tensors[other]))
        return tuple(tensors[number] for number in outputs)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = Of(
            all_steps,
            w=nn.ParameterList([weight(4, 4) for _ in range(3)]),
            b=nn.ParameterList([weight(4) for _ in range(3)]),
            layers=nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]),
        )
    for number, part in enumerate(module.parameters()):
        part.requires_grad_(number not in unwanted)
    came = [x(3, 4, requires_grad=wanted) for wanted in inputs]
    trains = any(inputs) or len(unwanted) < len([*module.parameters()])
    if trains and not any(y.requires_grad for y in module(*fresh(came))):
        for halves in (False, True):
            with pytest.raises(pp.PipelineError, match="the output of stage 1 does not depend on the weights"):
                run(module, came, halves)
        return
    expected = judge(module, came)
    agree(run(module, came, halves=False), expected)
    agree(run(module, came, halves=True), expected)
