"""Stages cut from whole models, also of transformers: their gradients are those of one process."""

import pytest
import torch
from torch import nn

import ppedu as pp
from ppedu.run import GPT, GPTConfig, cut

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
import ppedu as pp
from ppedu.run import Pipeline, cut

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
config = LlamaConfig(
    vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, attn_implementation="sdpa")

def model():
    torch.manual_seed(3)
    return LlamaForCausalLM(config)

def loss_fn(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())

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


@pytest.mark.parametrize("size", [2, 4])
def test_a_llama_has_the_gradients_of_one_process(ranks, size):
    pytest.importorskip("transformers")
    assert "equal" in ranks(PROGRAM, size, timeout=120)[0]


def chained(module, schedule, x, **options):
    """Return what the stages of all ranks return, one after the other."""
    stages = {}
    for rank in range(schedule.ranks):
        stages |= cut(module, schedule, rank, **options)
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
        ((Tower(tied=True), schedule, 0, None, x), "shares the embedding's weights"),
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
