"""The toy GPT: its stages are slices of the whole model, and its block equals torch's own module."""

import pytest
import torch
from torch import nn

from ppedu import SettingError
from ppedu.course.training.gpt import Block
from ppedu.run import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(vocabulary=13, context=8, layers=4, heads=2, width=16)


def tokens(batch=3, seed=0):
    return torch.randint(13, (batch, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_have_the_names_and_values_of_the_whole_model(stages):
    whole = GPT(CONFIG, seed=5).state_dict()
    pieces = [GPT.stage(CONFIG, stage, stages, seed=5).state_dict() for stage in range(stages)]
    assert [name for piece in pieces for name in piece] == list(whole)
    for piece in pieces:
        for name, weight in piece.items():
            assert torch.equal(weight, whole[name]), name


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_chained_stages_compute_the_output_of_the_whole_model(stages):
    x = tokens()
    for stage in range(stages):
        x = GPT.stage(CONFIG, stage, stages)(x)
    assert torch.equal(x, GPT(CONFIG)(tokens()))


def test_the_first_stage_embeds_and_the_last_returns_logits():
    first, last = GPT.stage(CONFIG, 0, 2), GPT.stage(CONFIG, 1, 2)
    assert first(tokens()).shape == (3, 8, 16)
    assert last(torch.zeros(3, 8, 16)).shape == (3, 8, 13)


@pytest.mark.parametrize("stages", [5, 100])
def test_more_stages_than_layers_are_refused(stages):
    with pytest.raises(SettingError, match=f"4 layers cannot be cut into {stages} stages"):
        GPT.stage(CONFIG, 0, stages)


@pytest.mark.parametrize("stages", [0, -1, 1.5])
def test_the_number_of_stages_must_be_a_positive_integer(stages):
    with pytest.raises(SettingError, match="stages must be"):
        GPT.stage(CONFIG, 0, stages)


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_out_of_range_is_refused(stage):
    with pytest.raises(SettingError, match="stage"):
        GPT.stage(CONFIG, stage, 2)


@pytest.mark.parametrize("name", ["vocabulary", "context", "layers", "heads", "width"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "4", None, True])
def test_every_size_must_be_a_positive_integer(name, value):
    with pytest.raises(SettingError, match=f"{name} must be"):
        GPTConfig(**{"vocabulary": 13, name: value})


def test_a_width_that_is_not_a_multiple_of_the_heads_is_refused():
    with pytest.raises(SettingError, match="width must be a multiple of the 4 heads, such as 32; got 10"):
        GPTConfig(13, heads=4, width=10)


def test_the_seed_determines_the_weights():
    same, other = GPT(CONFIG, seed=1).state_dict(), GPT(CONFIG, seed=2).state_dict()
    assert all(torch.equal(weight, same[name]) for name, weight in GPT(CONFIG, seed=1).state_dict().items())
    assert not torch.equal(same["embedding.token.weight"], other["embedding.token.weight"])


def test_all_layers_start_with_different_weights():
    whole = GPT(CONFIG)
    firsts = [layer.attention.weight for layer in whole.layers.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])


def test_building_a_model_does_not_change_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    GPT(CONFIG)
    assert torch.equal(torch.rand(4), expected)


def test_a_block_equals_torchs_transformer_layer():
    ours = Block(CONFIG).double()
    theirs = nn.TransformerEncoderLayer(
        16, 2, dim_feedforward=64, dropout=0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    pairs = {
        "self_attn.in_proj_": ours.attention,
        "self_attn.out_proj.": ours.projection,
        "linear1.": ours.mlp[0],
        "linear2.": ours.mlp[2],
        "norm1.": ours.norm_1,
        "norm2.": ours.norm_2,
    }
    theirs.load_state_dict(
        {f"{name}{kind}": getattr(module, kind) for name, module in pairs.items() for kind in ("weight", "bias")}
    )
    x = torch.rand(3, 8, 16, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
    assert torch.allclose(ours(x), theirs(x, src_mask=mask, is_causal=True), rtol=0, atol=1e-12)


def test_a_logit_does_not_depend_on_later_tokens():
    model, before, after = GPT(CONFIG), tokens(1), tokens(1)
    after[0, 5:] = (after[0, 5:] + 1) % 13
    one, other = model(before), model(after)
    assert torch.allclose(one[0, :5], other[0, :5], rtol=0, atol=1e-6)
    assert not torch.allclose(one[0, 5:], other[0, 5:], rtol=0, atol=1e-3)


def test_the_loss_is_the_mean_cross_entropy_of_the_next_token():
    logits, targets = torch.rand(3, 8, 13), tokens()
    surprises = [
        -logits[row, place].softmax(0)[targets[row, place]].log().item() for row in range(3) for place in range(8)
    ]
    assert next_token_loss(logits, targets).item() == pytest.approx(sum(surprises) / 24)
