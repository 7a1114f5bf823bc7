"""Mixtures of experts, latent attention and further predictions, against torch, published numbers, and counts."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import often
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ppedu as pp
from ppedu.planning.presets import MACHINES, MODELS

SPARSE = {"layers": 6, "width": 64, "heads": 4, "vocabulary": 96, "ffn": 32, "experts": 8, "active": 2, "shared": 1}
LATENT = {"head_size": 16, "key_rank": 24, "query_rank": 40, "rotary": 8}


@pytest.mark.parametrize(
    ("name", "billions", "with_predictions"),
    [
        ("deepseek-v3", 671, 671 + 11.5),  # README_WEIGHTS.md of github.com/deepseek-ai/DeepSeek-V3
        ("qwen3-235b-a22b", 235, None),  # its name
        ("kimi-k2", 1026.4, None),  # "1T" in its README; a sum of its shapes
    ],
)
def test_published_numbers_of_parameters(name, billions, with_predictions):
    model = MODELS[name]
    assert model.parameters == pytest.approx(billions * 1e9, rel=5e-4)
    assert model.pieces(4096).parameters == model.parameters
    if with_predictions:
        pieces = pp.Model(**{**vars(model), "predictions": 1}).pieces(4096)
        assert pieces.parameters == pytest.approx(with_predictions * 1e9, rel=5e-4)


class Latent(nn.Module):
    """Latent attention as in arXiv 2405.04434, section 2.1, with the position in numbers of their own."""

    def __init__(self, width=64, heads=4, size=16, key_rank=24, query_rank=40, rotary=8):
        super().__init__()
        self.heads, self.size, self.rotary, self.key_rank = heads, size, rotary, key_rank
        self.query_down = nn.Linear(width, query_rank, bias=False)
        self.query_norm = nn.RMSNorm(query_rank)
        self.query_up = nn.Linear(query_rank, heads * (size + rotary), bias=False)
        self.key_down = nn.Linear(width, key_rank + rotary, bias=False)
        self.key_norm = nn.RMSNorm(key_rank)
        self.key_up = nn.Linear(key_rank, heads * 2 * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x):
        batch, tokens, _ = x.shape
        queries = self.query_up(self.query_norm(self.query_down(x))).view(batch, tokens, self.heads, -1)
        compressed, position = self.key_down(x).split([self.key_rank, self.rotary], -1)
        keys, values = self.key_up(self.key_norm(compressed)).view(batch, tokens, self.heads, -1).chunk(2, -1)
        keys = torch.cat([keys, position.unsqueeze(2).expand(-1, -1, self.heads, -1)], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores, values).flatten(2))


def test_latent_attention_has_the_parameters_and_flops_of_a_module_of_torch():
    module, tokens = Latent(), 32
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, tokens, 64))
    model = pp.Model(layers=1, width=64, heads=4, vocabulary=96, **LATENT)
    attention = model.attention
    assert attention.parameters == sum(each.numel() for each in module.parameters())
    masked = 2 * tokens * tokens * attention.scored  # the counter takes the masked half, too
    assert counter.get_total_flops() == 2 * tokens * attention.matrices + masked
    assert model.layer_flops(tokens)[0] == 2 * tokens * (attention.matrices + model.perceptron) + masked / 2


def test_queries_keys_and_values_are_made_again():
    """Selective recompute of latent attention keeps three tensors less, and takes two more matrix products."""
    model = pp.Model(layers=1, width=64, heads=4, vocabulary=96, **LATENT)
    whole, less = (model.pieces(32, recompute=kind) for kind in ("none", "selective"))
    numbers = 4 * (16 + 8) + 4 * (16 + 8) + 4 * 16
    assert whole.pieces[1].activation - less.pieces[1].activation == less.restored == 2 * 32 * numbers
    module = Latent()
    again = 2 * 32 * (module.query_up.weight.numel() + module.key_up.weight.numel())
    assert less.pieces[1].input - whole.pieces[1].input == again
    with pytest.raises(pp.SettingError, match="which flash attention does not keep"):
        pp.Model(layers=1, width=64, heads=4, vocabulary=96).pieces(32, recompute="selective")


def test_first_layers_are_dense():
    model = pp.Model(**SPARSE, dense=2, dense_ffn=256)
    usual, dense = pp.Model(**SPARSE), pp.Model(layers=2, width=64, heads=4, vocabulary=96, ffn=256)
    pieces = model.pieces(128).pieces
    assert pieces[1] == dense.pieces(128).pieces[1] and pieces[3:] == usual.pieces(128).pieces[3:]
    assert pieces[2].experts == 0 and pieces[3].experts == 8 * 3 * 64 * 32
    assert model.flops(128) == usual.flops(128) + 6 * (dense.layer_flops(128)[0] - usual.layer_flops(128)[0])


@often(60)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    expert=st.sampled_from([1, 2, 4, 8]),
    replicas=st.sampled_from([1, 2, 8]),
    name=st.sampled_from(["1f1b", "zb-v", "dualpipe"]),
    zero=st.integers(0, 3),
)
def test_all_gpus_together_hold_every_parameter_as_often_as_asked(tensor, expert, replicas, name, zero):
    """All GPUs together hold shared numbers once, and others once in each replica, or in each group of experts."""
    model, ranks = pp.Model(**SPARSE), 2
    asked = {"sequence": 128, "schedules": name, "recompute": False}
    if tensor * replicas % expert:
        with pytest.raises(pp.SettingError, match=f"experts on {expert} GPUs need a multiple of that many GPUs"):
            pp.plan(model, "h100", ranks, 8, tensor=tensor, expert=expert, replicas=replicas, **asked)
        return
    best = pp.plan(model, "h100", ranks, 8, tensor=tensor, expert=expert, replicas=replicas, zero=zero, **asked).best
    copies, experts = best.schedule.placement.copies, 6 * 8 * 3 * 64 * 32
    groups = tensor * replicas // expert if expert > 1 else replicas
    whole = (model.parameters - experts) * replicas * copies + experts * groups * copies
    kept = {kind: sum(rank[kind] for rank in best.kinds) * tensor * replicas for kind in best.kinds[0]}
    for kind, size, stage in (("optimizer", 12, 1), ("gradients", 4, 2), ("weights", 2, 3)):
        wanted = model.parameters if zero >= stage else whole
        assert kept[kind] == pytest.approx(size * wanted, rel=2e-3), kind  # a tensor group rounds up


def test_a_token_goes_to_few_nodes():
    """The mean number of copies that leave the first of 4 places, over all choices of 2 of 16 experts."""
    chosen = [*combinations(range(16), 2)]
    once = sum(len({expert // 4 for expert in pair} - {0}) for pair in chosen) / len(chosen)
    each = sum(expert >= 4 for pair in chosen for expert in pair) / len(chosen)
    model = pp.Model(**SPARSE | {"experts": 32})
    machine = pp.Machine(80e9, flops=1e12, node=8)
    for dispatcher, others in (("deepep", once), ("alltoall", each)):
        for expert, wanted in ((32, others), (4, others), (1, 0)):  # 4 nodes, 4 GPUs, one GPU
            pieces = model.pieces(128, expert=expert, dispatcher=dispatcher)
            assert machine._copies(pieces) == pytest.approx(wanted, rel=0.05)
    assert each > 1.1 * once


def test_tokens_take_as_long_as_their_bytes():
    """F with experts on 4 GPUs takes longer by two messages to each of the other places; overlapped, it is hidden."""
    model = pp.Model(**SPARSE)
    slow = pp.Machine(80e9, flops=1e15, bandwidth=1e9)
    alone, spread, beside = (
        model.pieces(128, expert=expert, overlap=overlap, graphs=True).timed(slow).pieces[1]
        for expert, overlap in ((1, False), (4, False), (4, True))
    )
    sent = 2 * 128 * 64 * 2 * 3 * (1 - (3 / 4) ** 2) / (0.75 * 1e9)
    for name in ("forward", "input"):
        assert getattr(spread, name) - getattr(alone, name) == pytest.approx(sent)
        assert getattr(beside, name) == pytest.approx(sent)
    assert alone.weight == spread.weight == beside.weight
    # Where a GPU computes for longer, 20 of its 132 multiprocessors send for as long as the tokens are on their way.
    busy = pp.Machine(80e9, flops=1e9, bandwidth=1e9)
    alone, beside = (
        model.pieces(128, expert=expert, overlap=True, graphs=True).timed(busy).pieces[1] for expert in (1, 4)
    )
    assert beside.forward - alone.forward == pytest.approx(20 / 132 * sent, rel=1e-6) and alone.forward > 10 * sent


def test_kernels_of_experts_start_one_after_the_other():
    """A layer with experts takes at least 9.5 ms without graphs, or 12.7 ms if F runs twice; a dense one does not."""
    model, machine = pp.Model(**SPARSE, dense=1, dense_ffn=64), pp.Machine(80e9, flops=1e15)
    for options, least in (({}, 9.5e-3), ({"recompute": "full"}, 12.7e-3)):
        _, dense, sparse, *_ = model.pieces(128, **options).timed(machine).pieces
        assert sparse.forward + sparse.backward == pytest.approx(least) and dense.forward + dense.backward < 1e-3
    assert model.pieces(128, graphs=True).timed(machine).pieces[2].forward < 1e-3
    slow = pp.Machine(80e9, flops=1e9)
    assert model.pieces(128).timed(slow).pieces == model.pieces(128, graphs=True).timed(slow).pieces


def test_uneven_experts_take_longer_and_more_memory():
    even, uneven = (pp.Model(**SPARSE, imbalance=number).pieces(128, expert=4).pieces[1] for number in (1, 2))
    assert uneven.weight - even.weight == 2 * 128 * 2 * 3 * 64 * 32  # two experts of three matrices
    assert uneven.activation > even.activation and uneven.weights == even.weights
    assert uneven.work[0].routed == 2 * even.work[0].routed
    # One of 4 GPUs has at most all tokens, which is 4 times the mean; a GPU that has all experts has all tokens, too.
    most, beyond = (pp.Model(**SPARSE, imbalance=number).pieces(128, expert=4) for number in (4, 9))
    assert most.pieces == beyond.pieces
    assert pp.Model(**SPARSE, imbalance=2).pieces(128).pieces == pp.Model(**SPARSE).pieces(128).pieces


def test_a_plan_says_how_tokens_are_sent_and_kernels_started():
    asked = {
        "ranks": 2,
        "microbatches": 2,
        "sequence": 128,
        "schedules": "1f1b",
        "replicas": 4,
        "expert": 4,
        "tensor": 2,
    }
    asked |= {"dispatcher": "alltoall", "tensor_overlap": True}
    plan = pp.plan(pp.Model(**SPARSE), "h100", **asked)
    for text in (" ".join(str(plan).split()), plan._repr_html_()):
        for said in (
            "tokens are sent to them, once for each expert;",
            "a layer with experts takes the host 9.5 ms at least;",
            "half of a tensor group&#x27;s" if "<" in text else "half of a tensor group's exchange is hidden;",
        ):
            assert said in text


def test_numbers_of_numpy_are_those_of_python():
    numpy = pytest.importorskip("numpy")
    sizes = {name: numpy.int8(size) for name, size in SPARSE.items()}
    options = {"tensor": 2, "context": 2, "expert": 4, "element": 2}
    wanted = pp.Model(**SPARSE).pieces(4096, **options)
    assert pp.Model(**sizes).pieces(4096, **{name: numpy.int8(size) for name, size in options.items()}) == wanted


def test_a_further_prediction_has_a_layer_and_the_head():
    model = pp.Model(**SPARSE, predictions=1)
    *_, layer, prediction, head = model.pieces(128).pieces
    assert prediction.name == "prediction" and prediction.weights == layer.weights + 2 * 64 * 64 + 3 * 64
    assert prediction.forward == layer.forward + head.forward + 2 * 128 * 2 * 64 * 64
    plan = pp.plan(model, "h100", 2, 4, sequence=128, schedules="1f1b", partition="Et*3|t*3mL")
    assert plan.best.megatron() == "Et*3|t*3mL" and "layers 3–5, prediction, head" in plan.partition()
    with pytest.raises(pp.SettingError, match="6 times t, then 1 times m, then an L"):
        pp.plan(model, "h100", 2, 4, sequence=128, schedules="1f1b", partition="Et*3|t*3L")
    with pytest.raises(pp.SettingError, match="torchtitan's models predict one token"):
        plan.best.torchtitan()


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_sharded_vocabulary_is_the_same_work_in_equal_parts(tensor):
    model = pp.Model(layers=8, width=64, heads=4, vocabulary=9600)
    whole, shared = (model.pieces(128, tensor=tensor, shard_vocabulary=flag) for flag in (False, True))
    for name in ("forward", "input", "weight", "activation", "logits", "weights"):
        first, second = (sum(getattr(piece, name) for piece in pieces.pieces) for pieces in (whole, shared))
        assert first == pytest.approx(second, rel=1e-3), name
    assert shared.pieces[0].weights == shared.pieces[-1].forward == 0
    balanced = pp.plan(shared, pp.Machine(80e9, flops=1e12), 4, 8, schedules="1f1b").best
    assert [len(each) for each in balanced.partition] == [3, 2, 2, 3] and balanced.bubble == pytest.approx(3 / 11, 1e-3)


def test_weights_that_are_shared_are_gathered_while_a_gpu_computes():
    """With ZeRO 3 over a slow network, a step takes as long as gathering; over a fast one, as without."""
    model = pp.Model(layers=8, width=64, heads=4, vocabulary=96)
    asked = {"model": model, "ranks": 2, "microbatches": 4, "sequence": 64, "replicas": 2, "schedules": "gpipe"}
    fast, slow = (pp.Machine(80e9, flops=1e12, bandwidth=bandwidth, memory_bandwidth=1e12) for bandwidth in (1e13, 1e8))
    usual, shared = (pp.plan(machine=fast, zero=zero, partition=[5, 5], **asked).best for zero in (2, 3))
    assert shared.step_time == pytest.approx(usual.step_time, rel=1e-3)
    late = pp.plan(machine=slow, zero=3, partition=[5, 5], **asked).best
    forward = 2 * sum(piece.weights for piece in model.pieces(64).pieces[:5]) / 2 / (0.75 * 1e8)
    assert late.costs.forward[0] == pytest.approx(forward, rel=1e-2)


def test_formats_that_a_gpu_lacks_are_refused():
    for machine, precision in (("a100", "fp8"), ("a100", "mxfp8"), ("h100", "nvfp4")):
        with pytest.raises(
            pp.SettingError,
            match=r"the machine has no matrix products in (mx|nv)?fp[48]; if it does, .*\(…, (fp8|nvfp4)=2\)",
        ):
            pp.plan("llama-3-8b", machine, 4, 8, sequence=4096, tensor=4, precision=precision)
    asked = {
        "ranks": 4,
        "microbatches": 8,
        "sequence": 4096,
        "schedules": "1f1b",
        "tensor": 2,
        "partition": [9, 8, 8, 9],
    }
    speeds = [
        pp.plan("llama-3-8b", "gb300", precision=precision, **asked).best.tokens_per_second
        for precision in ("bf16", "mxfp8", "fp8", "nvfp4")
    ]
    assert speeds == sorted(speeds) and speeds[3] < 6 * speeds[0]
    assert 1.03 < speeds[2] / speeds[1] < 1.09  # published: 1.06 to 1.08, of a larger model
    assert {name for name, machine in MACHINES.items() if machine.nvfp4} == {"b200", "b300", "gb200", "gb300"}


def test_sizes_of_experts_that_are_not_possible():
    for changes, match in [
        ({"dense": 2}, "dense_ffn is their width; got dense=2 and dense_ffn=None"),
        ({"dense": 9, "dense_ffn": 8}, "at most the 6 layers"),
        ({"rotary": 2}, "give key_rank, too"),
        ({"key_rank": 8, "kv_heads": 2}, "leave out kv_heads"),
        ({"imbalance": 0.5}, "imbalance must be at least 1"),
        ({"imbalance": 2, "experts": 0, "active": 0, "shared": 0}, "imbalance is for models with experts"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            pp.Model(**SPARSE | changes)
    for model, expert, match in [
        (pp.Model(**SPARSE), 3, "a divisor of the 8 experts of a layer; got 3"),
        (MODELS["gpt2"], 2, "the model has no experts; got 2"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            model.pieces(128, expert=expert)


def test_divisions_among_experts():
    """16 GPUs: every number of GPUs that the experts can be divided among is tried, and the table has a column."""
    found = pp.divide(pp.Model(**SPARSE), "h100", 16, 32, 128, tensor=1, ranks=[2, 4], microbatch=1, schedules=["1f1b"])
    assert {(row.expert, row.plan.job.ranks) for row in found.rows} == {
        (expert, ranks) for expert in (1, 2, 4, 8) for ranks in (2, 4) if 16 // ranks % expert == 0
    }
    assert str(found).splitlines()[0].split()[:4] == ["tensor", "context", "expert", "ranks"]
    with pytest.raises(pp.SettingError, match="unknown argument 'experts'; did you mean expert"):
        pp.plan(pp.Model(**SPARSE), "h100", 2, sequence=128, experts=2)
