"""Parameters of published models, and activations and FLOPs by published formulas."""

import pytest

import ppedu as pp
from ppedu.planning.pieces import per_weight
from ppedu.planning.presets import MACHINES, MODELS

# The numbers of parameters in the published checkpoints.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-7b": 8_537_680_896,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
}
# arXiv 2205.05198, table 3: heads, width, layers; sequences of 2048 tokens, 8 GPUs that split each layer
MEGATRON = {
    "megatron-22b": (64, 6144, 48),
    "megatron-175b": (96, 12288, 96),
    "megatron-530b": (128, 20480, 105),
    "megatron-1t": (160, 25600, 128),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
    model = MODELS[name]
    assert model.parameters == PUBLISHED[name]
    copied = model.vocabulary * model.width if model.tied else 0
    assert model.pieces(2048).parameters == PUBLISHED[name] + copied


@pytest.mark.parametrize("name", MEGATRON)
def test_activations_as_published(name):
    """From arXiv 2205.05198, equations 1, 2, 4 and 6, and table 2."""
    model, (a, h, layers), s, t = MODELS[name], MEGATRON[name], 2048, 8
    assert (model.heads, model.width, model.layers) == (a, h, layers)
    whole = 34 * s * h + 5 * a * s * s  # s · h · (34 + 5 · a · s / h)
    assert model.layer_activation(s) == whole
    assert t * model.layer_activation(s, t) == 10 * s * h * t + 24 * s * h + 5 * a * s * s
    assert t * model.layer_activation(s, t, sequence_parallel=True) == whole
    assert t * model.layer_activation(s, t, sequence_parallel=True, recompute="selective") == 34 * s * h
    assert model.layer_activation(s, recompute="full") == 2 * s * h
    assert t * model.pieces(s, batch=4, tensor=t).pieces[1].activation == 4 * whole


@pytest.mark.parametrize("name", MEGATRON)
def test_flops_as_published(name):
    """72·L·s·h²·(1 + s/6h + V/12Lh) a sequence: arXiv 2205.05198, equation 7, which counts masked attention, too."""
    model, (_, h, layers), s = MODELS[name], MEGATRON[name], 2048
    masked = layers * 3 * 2 * s * s * h
    assert model.pieces(s).flops + masked == pytest.approx(
        72 * layers * s * h * h * (1 + s / (6 * h) + model.vocabulary / (12 * layers * h)), rel=1e-12
    )


def test_the_weight_half_is_a_smaller_part_of_longer_sequences():
    """W has no attention: at 4096 numbers a token, W/F falls from nearly 1 to below a half."""
    model = MODELS["llama-3-8b"]
    ratios = [third / first for first, _, third in map(model.layer_flops, (128, 8192, 131072))]
    assert ratios[0] > 0.99 and ratios == sorted(ratios, reverse=True) and ratios[-1] < 0.5
    first, second, third = model.layer_flops(8192)
    assert second + third == 2 * first


def test_logits_are_kept_in_both_formats():
    head = MODELS["llama-3-8b"].pieces(8192).pieces[-1]
    assert head.logits == 8192 * 128256 * 6
    assert head.activation - head.logits == 8192 * 4096 * 4
    assert MODELS["llama-3-8b"].pieces(8192, element=4).pieces[-1].logits == 8192 * 128256 * 4


def test_mixture_of_experts_counts_visited_experts_only():
    dense, sparse = MODELS["mistral-7b"], MODELS["mixtral-8x7b"]
    router = 2 * 8 * 4096 * 2048
    perceptron = 2 * 3 * 4096 * 14336 * 2048
    assert sparse.layer_flops(2048)[0] - dense.layer_flops(2048)[0] == router + perceptron


@pytest.mark.parametrize("tensor", [1, 4])
def test_matrices_and_what_they_multiply_are_read(tensor):
    """Bytes of each matrix of a layer, its inputs and its outputs: in W also the gradients in fp32."""
    width, ffn, heads, keys, tokens = 64, 96, 8, 4, 80
    model = pp.Model(2, width, heads, 100, kv_heads=keys, ffn=ffn)
    size = width // heads
    # into a layer's matrices, each as the numbers of a token that one GPU has: the input, the output
    split_outputs = [(width, (heads + 2 * keys) * size / tensor), (width, 2 * ffn / tensor)]
    split_inputs = [(heads * size / tensor, width), (ffn / tensor, width)]
    matrices = split_outputs + split_inputs
    weights = sum(each * other for each, other in matrices)
    numbers = tokens * sum(each + other for each, other in matrices)
    read, also_read, added = (work.operands for work in model.pieces(20, 4, tensor=tensor).pieces[1].work)
    assert read == also_read == pytest.approx(2 * (numbers + weights), rel=0.02)  # and norms
    assert added == pytest.approx(2 * numbers + 8 * weights, rel=0.02)
    eights = model.pieces(20, 4, tensor=tensor, precision="fp8").pieces[1].work[0].operands
    assert eights == pytest.approx(1.5 * numbers + weights, rel=0.02)


def test_few_tokens_use_a_gpu_worse_than_many():
    few, many = (MODELS["llama-3-8b"].pieces(tokens).timed(MACHINES["h100"]).pieces[1] for tokens in (512, 8192))
    assert 16 * few.weight > 1.2 * many.weight


def test_half_of_an_exchange_is_hidden():
    machine = pp.Machine(80e9, flops=1e15, bandwidth=1e9)
    shown, hidden = (
        MODELS["llama-3-8b"].pieces(512, tensor=4, tensor_overlap=overlap).timed(machine).pieces[1].forward
        for overlap in (False, True)
    )
    assert shown - hidden == pytest.approx(4 * 2 * 512 * 4096 * 3 / 4 / (0.75 * 1e9) / 2)


def test_sizes_that_are_not_possible():
    for changes, match in [
        ({"layers": 0}, "layers must be at least 1"),
        ({"width": -8}, "width must be at least 1"),
        ({"heads": 7}, "cannot be divided among 7 heads"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"norm": "batch"}, 'norm must be "rms" or "layer"'),
        ({"biases": True}, 'biases must be "none"'),
        ({"gated": 1}, "gated must be True or False"),
        ({"experts": 4, "active": 5}, "a token visits 1 to 4 experts"),
        ({"active": 2}, "a token visits"),
        ({"vocabulary": 2.5}, "vocabulary must be a whole number"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            pp.Model(**{"layers": 2, "width": 64, "heads": 8, "vocabulary": 97, **changes})
    model = MODELS["gpt2"]
    for arguments, match in [
        ({"sequence": 0}, "sequence must be at least 1"),
        ({"sequence": 8, "tensor": 5}, "a divisor of the 12 heads"),
        ({"sequence": 8, "recompute": "some"}, "recompute must be"),
        ({"sequence": 8, "bytes_per_weight": (2, 2)}, "three parts"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            model.pieces(**arguments)


def test_measured_times():
    model = pp.Model.measured([0, 3, 3, 5], activation=2, weights=[7, 8, 8, 7], unit="ms")
    assert [piece.backward for piece in model.pieces] == [0, 6, 6, 10]
    assert [piece.weight for piece in model.pieces] == [0, 3, 3, 5]
    assert [piece.name for piece in model.pieces] == ["embedding", "layer 0", "layer 1", "head"]
    halves = pp.Model.measured([0, 3, 3, 5], input=[0, 4, 4, 6], weight=[1, 2, 2, 3])
    assert [piece.backward for piece in halves.pieces] == [1, 6, 6, 9]
    assert per_weight(18) == (2, 2, 14) and per_weight([4, 4, 8]) == (4, 4, 8)
    for arguments, match in [
        ({"forward": []}, "a time for each piece"),
        ({"forward": 3}, "a list with a number for each piece"),
        ({"forward": [1, -1]}, "numbers of at least 0"),
        ({"forward": [1, 2], "backward": [1]}, "forward has 2 pieces and backward 1"),
        ({"forward": [1, 2], "input": [1, 2]}, "both input and weight"),
        ({"forward": [1, 2], "unit": "h"}, 'unit must be "s"'),
        ({"forward": [1, 2], "bytes_per_weight": 3}, "at least 4"),
        ({"forward": [1, 2], "logits": 5}, "bytes of the last piece's activation"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            pp.Model.measured(**arguments)
