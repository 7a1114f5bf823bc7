"""Counted pieces of models that run, compared with the formulas of `ppedu.Model`."""

import pytest
import torch
from llama import LLAMA, LlamaBlock
from releases import needs
from torch import nn
from torch.nn import functional

import ppedu as pp
from ppedu.engine.ranks.versions import FUSED_GROUPS
from ppedu.run import GPT, GPTConfig

SEQUENCE = 256


def gpt(width=128, heads=4, layers=2, vocabulary=97):
    sizes = {"layers": layers, "heads": heads, "width": width, "vocabulary": vocabulary}
    with torch.device("meta"):
        module, tokens = GPT(GPTConfig(context=SEQUENCE, **sizes)), torch.zeros(1, SEQUENCE, dtype=torch.long)
    return module, tokens, pp.Model(gated=False, norm="layer", biases="all", positions=SEQUENCE, **sizes)


def test_flops_of_a_gpt():
    module, tokens, model = gpt()
    counted = pp.Model.of(module, tokens)
    assert counted.parameters == model.parameters == sum(weight.numel() for weight in module.parameters())
    masked = 2 * SEQUENCE**2 * model.width  # the half of attention that the formulas leave out
    forward, first, second = model.layer_flops(SEQUENCE)
    for piece in counted.pieces[1:-1]:
        assert (piece.forward, piece.input, piece.weight) == (forward + masked, first + 2 * masked, second)
    head = counted.pieces[-1]
    assert head.forward == head.input == head.weight == model.head_flops(SEQUENCE)
    assert counted.pieces[0].backward == 0


@pytest.mark.parametrize("width", [128, 256])
def test_bytes_of_a_gpts_layer(width):
    _, _, model = gpt(width)
    with torch.device("cpu"):
        real = GPT(GPTConfig(vocabulary=97, context=SEQUENCE, layers=2, heads=4, width=width))
    counted = pp.Model.of(real, torch.zeros(1, SEQUENCE, dtype=torch.long))
    assert counted.pieces[1].activation == pytest.approx(model.layer_activation(SEQUENCE, element=4), rel=0.03)
    assert counted.message == SEQUENCE * width * 4


@needs(FUSED_GROUPS)
def test_bytes_and_flops_of_a_llama_block():
    width, heads, kv_heads, ffn = 128, 4, 2, 448
    block = nn.Sequential(LlamaBlock(width, heads, kv_heads, ffn, SEQUENCE))
    piece = pp.Model.of(block, torch.randn(1, SEQUENCE, width)).pieces[0]
    model = pp.Model(1, width, heads, 97, kv_heads=kv_heads, ffn=ffn)
    assert piece.weights == model.layer_parameters
    # On a CPU, torch keeps more than a GPU's fused kernels: the normalized input of both norms, and keys and values
    # repeated for each head.
    more = 2 * 4 * width + 2 * 4 * (heads - kv_heads) * width // heads
    expected = model.layer_activation(SEQUENCE, element=4) + SEQUENCE * more
    assert piece.activation == pytest.approx(expected, rel=0.03)
    forward, first, second = model.layer_flops(SEQUENCE)
    masked = 2 * SEQUENCE**2 * width
    assert (piece.forward, piece.input, piece.weight) == (forward + masked, first + 2 * masked, second)


def test_a_counted_model_is_planned():
    module, tokens, _ = gpt(layers=4)
    plan = pp.plan(pp.Model.of(module, tokens), pp.Machine(80e9, flops=1e12), 2, 4, schedules=["1f1b"])
    assert [piece for each in plan.best.partition for piece in each] == [*range(6)]


def test_what_cannot_be_counted():
    with pytest.raises(pp.SettingError, match="has 0 nn"):
        pp.Model.of(nn.Linear(2, 2), torch.zeros(2, 2))
    with pytest.raises(pp.SettingError, match="layer 0 fails for its input of shape"):
        pp.Model.of(nn.Sequential(nn.Linear(2, 2)), torch.zeros(3, 3))
    with pytest.raises(pp.SettingError, match="example must be a tensor"):
        pp.Model.of(nn.Sequential(nn.Linear(2, 2)), [[1, 2]])


def test_the_meta_device_counts_what_the_cpu_does():
    found = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = GPT(GPTConfig(vocabulary=97, context=256, layers=2, heads=4, width=128))
            found[device] = pp.Model.of(model, torch.zeros(2, 256, dtype=torch.long))
    assert found["meta"] == found["cpu"]
    layer, head = found["meta"].pieces[1].activation, found["meta"].pieces[-1]
    assert layer < 18 * 2 * 256 * 128 * 4, "the matrix of the attention would be 8 more"
    assert head.logits >= 2 * 256 * 97 * 4, "the loss keeps the logarithms of the probabilities"


def test_the_bytes_that_a_gpu_kept():
    """Of Llama 3 8B's layer in bf16 on an H200, with torch 2.11: allocated, in blocks of 512 bytes."""
    with torch.device("meta"):
        example = torch.zeros(1, LLAMA["sequence"], LLAMA["width"], dtype=torch.bfloat16)
        piece = pp.Model.of(nn.Sequential(LlamaBlock(**LLAMA).bfloat16()), example).pieces[0]
    assert piece.activation == pytest.approx(721_978_368, rel=1e-5)
    model = pp.Model(1, LLAMA["width"], LLAMA["heads"], 128256, kv_heads=LLAMA["kv_heads"], ffn=LLAMA["ffn"])
    compiled = {4096: 2_283_933_696, 8192: 4_567_863_296}  # of 4 layers, by torch.compile
    for sequence, kept in compiled.items():
        assert 4 * model.pieces(sequence).pieces[1].activation == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize(
    ("norm", "kept"),
    [
        (lambda x, weight: functional.rms_norm(x, (4, 8)), 256 + 2 * 4),
        (lambda x, weight: functional.rms_norm(x, (8,), eps=1e-6), 256 + 8 * 4),
        (lambda x, weight: torch.rms_norm(x, (8,), weight, 1e-6), 256 + 8 * 4),
        (lambda x, weight: functional.rms_norm(x, (8,), 1 + weight), 256 + 8 * 4 + 32),
    ],
)
def test_a_norm_keeps_its_input_a_number_for_each_row_and_a_weight_that_is_computed(norm, kept):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return norm(x, self.weight)

    with torch.device("meta"):
        assert pp.Model.of(nn.Sequential(Norm()), torch.zeros(2, 4, 8)).pieces[0].activation == kept
