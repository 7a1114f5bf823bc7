"""Stages cut from whole models, also of transformers: their gradients are those of one process."""

import pytest
import torch
from cases import BEGIN
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import dropout

import ppedu as pp
from ppedu.run import GPT, GPTConfig, cut

PROGRAM = """
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, attn_implementation="sdpa")

def model():
    torch.manual_seed(3)
    return LlamaForCausalLM(config)

def loss_fn(logits, targets):
    return fn.cross_entropy(logits.flatten(0, 1), targets.flatten())

torch.manual_seed(4)
inputs, targets = torch.randint(37, (2, 8, 16))
whole = model()
for x, y in zip(inputs.chunk(4), targets.chunk(4)):
    (loss_fn(whole(x).logits, y) / 4).backward()
wanted = {name: weight.grad for name, weight in whole.named_parameters()}

for name in ("1f1b", "interleaved", "zb-v"):
    schedule = pp.schedule(name, size, 4)
    mine = model()
    names = {id(weight): key for key, weight in mine.named_parameters()}
    costs = [1.0, *[2.0] * 8, 3.0] if name == "1f1b" else None
    stages = cut(mine, schedule, rank, costs, example=inputs[:1])
    Pipeline(schedule, stages, loss_fn).step(inputs, targets)
    for stage in stages.values():
        for weight in stage.parameters():
            assert torch.equal(weight.grad, wanted[names[id(weight)]]), (name, names[id(weight)])
    counted = torch.tensor(sum(1 for stage in stages.values() for _ in stage.parameters()))
    dist.all_reduce(counted)
    assert counted == len(wanted), name
if rank == 0:
    print("equal")
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_llama_has_the_gradients_of_one_process(ranks, size):
    pytest.importorskip("transformers")
    assert "equal" in ranks(BEGIN + PROGRAM, size, timeout=120)[0]


def all_stages(module, schedule, **options):
    stages = {}
    for rank in range(schedule.ranks):
        stages |= cut(module, schedule, rank, **options)
    return stages


def chained(module, schedule, x, **options):
    """Return what the stages of all ranks return, one after the other."""
    stages = all_stages(module, schedule, **options)
    for stage in sorted(stages):
        x = stages[stage](x)
    return x


class Tower(nn.Module):
    def __init__(self, skip=False, tied=False):
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(4 if tied else 6, 4 if not tied else 6, bias=False)
        self.skip = skip
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        y = x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(self.norm(x + y if self.skip else x))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe"])
def test_stages_return_what_the_whole_returns(name):
    torch.manual_seed(0)
    schedule, x = pp.schedule(name, 2, 4), torch.randn(3, 4)
    sequence = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    assert torch.equal(chained(sequence, schedule, x), sequence(x))
    tokens = torch.randint(13, (2, 8))
    gpt = GPT(GPTConfig(vocabulary=13, context=8, layers=4, heads=2, width=8))
    assert torch.equal(chained(gpt, schedule, tokens), gpt(tokens))
    tower = Tower()
    costs = [1, 1, 1, 1, 5]
    assert torch.equal(chained(tower, schedule, x, costs=costs, example=x), tower(x))


def test_pieces_are_cut_by_cost_or_as_a_plan_says():
    sequence = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    schedule = pp.schedule("1f1b", 2, 4)

    def lengths(costs):
        return [len(cut(sequence, schedule, rank, costs)[rank].layers) for rank in range(2)]

    assert lengths(None) == [2, 2] and lengths([1, 1, 1, 4]) == [3, 1]
    assert lengths([range(4), range(4, 4)]) == [4, 0]
    empty = cut(sequence, schedule, 1, [range(4), range(4, 4)])[1]
    x = torch.randn(2, requires_grad=True)
    assert torch.equal(empty(x), x) and empty(x) is not x
    own = {id(weight) for weight in sequence.parameters()}
    assert {id(weight) for weight in cut(sequence, schedule, 0)[0].parameters()} <= own


def test_what_is_not_a_chain_is_refused():
    schedule, x = pp.schedule("1f1b", 2, 4), torch.randn(2, 4)
    cases = [
        ((Tower(skip=True), schedule, 0, None, x), "more than a chain of first, the layers, norm, last"),
        (
            (Tower(tied=True), schedule, 0, None, x),
            r"stages 0, 1 share weights, .*tied=\[\(\(0, 'begin.first.weight'\), \(1, 'end.last.weight'\)\)\]",
        ),
        ((Tower(), schedule, 0), "give an example"),
        ((Tower(), schedule, 0, None, {"x": x}), "Tower fails for the example, which is the first argument of its"),
        ((nn.Linear(2, 2), schedule, 0), "has 0 nn.ModuleLists"),
        ((nn.Sequential(nn.Linear(2, 2)), schedule, 0), "1 layers cannot be cut into 2 stages"),
        ((nn.Sequential(*[nn.Tanh()] * 3), schedule, 0, [1, 2]), "a number for each of the 3 pieces"),
        ((nn.Sequential(*[nn.Tanh()] * 3), schedule, 0, [range(2)]), "must divide the pieces 0 to 2"),
        ((nn.Sequential(*[nn.Tanh()] * 3), schedule, 5), "there is no rank 5"),
        ((3, schedule, 0), "module must be an nn.Module"),
    ]
    for arguments, match in cases:
        with pytest.raises(pp.SettingError, match=match):
            cut(*arguments)


class Changed(Tower):
    """A tower whose forward applies `change(self, x)` between the first module and the layers."""

    def __init__(self, change, **parts):
        super().__init__()
        self.change = change
        for name, part in parts.items():
            (self.register_buffer if type(part) is torch.Tensor else self.register_parameter)(name, part)

    def forward(self, x):
        x = self.change(self, self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.last(self.norm(x))


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledGPT(GPT):
    def forward(self, x):
        return 2 * super().forward(x)


def sequence(length=2):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(length)))


def sharing(module, place, other):
    """Return the sequence, with one weight at two places of it."""
    module[other].weight = module[place].weight
    return module


LOST = {
    "a parameter that starts neutral": (
        lambda: Changed(lambda self, x: x + self.shift, shift=nn.Parameter(torch.zeros(6))),
        "the parameter 'shift' would be in no stage",
    ),
    "a frozen parameter": (
        lambda: Changed(lambda self, x: x * self.scale, scale=nn.Parameter(torch.ones(6), requires_grad=False)),
        "the parameter 'scale' would be in no stage",
    ),
    "a buffer": (
        lambda: Changed(lambda self, x: x + self.shift, shift=torch.zeros(6)),
        "the buffer 'shift' would be in no stage",
    ),
    "dropout": (lambda: Changed(lambda self, x: dropout(x, 0.5, self.training)), "other numbers in training"),
    "noise": (lambda: Changed(lambda self, x: x + self.training * torch.randn(6)), "other numbers in training"),
    "a detached output": (lambda: Changed(lambda self, x: x.detach()), "only its stages would train first.weight"),
    "a sequence with a forward of its own": (lambda: Doubled(*sequence()), "other numbers in evaluation"),
    "a forward of an instance": (
        lambda: [module := sequence(), setattr(module, "forward", lambda x: x + module[0](x))][0],
        "other numbers in evaluation",
    ),
    "a GPT with a forward of its own": (lambda: DoubledGPT(GPTConfig(4, 4, 2, 1, 4)), "other numbers in evaluation"),
    "a weight of two stages": (
        lambda: sharing(sequence(4), 1, 2),
        r"stages 0, 1 share weights, .*tied=\[\(\(0, 'layers.1.weight'\), \(1, 'layers.2.weight'\)\)\]",
    ),
    "a layer of two stages": (lambda: nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 2), "and 1 more pair like this"),
    "one layer, repeated": (
        lambda: [module := Tower(), setattr(module, "layers", nn.ModuleList([module.layers[0]] * 4))][0],
        "stages 0, 1 share weights",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_a_part_of_the_model_that_no_stage_would_have_is_refused(case):
    make, match = LOST[case]
    torch.manual_seed(0)
    x = torch.tensor([[0, 1]]) if "GPT" in case else torch.randn(2, 4)
    with pytest.raises(pp.SettingError, match=match):
        cut(make(), pp.schedule("1f1b", 2, 4), 0, example=x)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_that_no_stage_would_run_is_refused(kind):
    inner = Tower()
    for module, part in ((sequence(), None), (Tower(), None), (nn.ModuleDict({"a": inner, "b": nn.ReLU()}), inner)):
        getattr(part or module, f"register_{kind}")(lambda *_: None)
        with pytest.raises(pp.SettingError, match="a hook on"):
            cut(module, pp.schedule("1f1b", 2, 4), 0, example=torch.randn(2, 4))


def test_stages_on_the_same_ranks_may_share_weights():
    torch.manual_seed(0)
    first_and_last = sharing(sequence(4), 0, 3)
    for name in ("zb-v", "dualpipev", "dualpipe"):  # all hold the first and the last stage on the same ranks
        stages = all_stages(first_and_last, pp.schedule(name, 2, 4))
        assert stages[0].layers["0"].weight is stages[max(stages)].layers["3"].weight
    for name in ("1f1b", "interleaved"):
        with pytest.raises(pp.SettingError, match="share weights"):
            cut(first_and_last, pp.schedule(name, 2, 4), 0)
    cut(sharing(sequence(4), 0, 1), pp.schedule("1f1b", 2, 4), 0)  # within a stage


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["1f1b", "interleaved", "zb-v", "dualpipe", "gems"]),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
    st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
def test_weights_of_stages_on_different_ranks_are_refused(name, weights, costs):
    schedule, modules = pp.schedule(name, 4, 8), [nn.Linear(2, 2) for _ in range(8)]
    holders = {}  # of each module: its stage's ranks
    for rank in range(schedule.ranks):
        for stage in cut(nn.Sequential(*modules), schedule, rank, costs).values():
            for module in stage.layers.values():
                holders.setdefault(module, set()).add(rank)
    apart = any(
        one == other and holders[modules[i]] != holders[modules[j]]
        for i, one in enumerate(weights)
        for j, other in enumerate(weights)
    )
    for number, module in zip(weights, modules, strict=True):
        module.weight = modules[weights.index(number)].weight
    try:
        all_stages(nn.Sequential(*modules), schedule, costs=costs)
    except pp.SettingError as error:
        assert apart and "share weights" in str(error)
    else:
        assert not apart


def test_comparing_leaves_the_model_and_random_numbers_as_they_were():
    class Normed(Tower):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.layers[1] = nn.Sequential(nn.Dropout(0.5), nn.ReLU(inplace=True))

    torch.manual_seed(0)
    module, x = Normed(), torch.randn(3, 4)
    module.layers[0].eval()
    modes = [part.training for part in module.modules()]
    state, before = torch.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    cut(module, pp.schedule("1f1b", 2, 4), 0, example=x)
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and all(weight.grad is None for weight in module.parameters())
