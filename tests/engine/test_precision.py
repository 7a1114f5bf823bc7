"""fp32 copies of bfloat16 weights, and losses of float64."""

import pytest
import torch
from releases import needs
from torch import nn

import ppedu as pp
from ppedu.engine.ranks import versions
from ppedu.engine.ranks.versions import GRAD_DTYPE
from ppedu.run import MasterWeights, Pipeline


@needs(GRAD_DTYPE)
def test_a_shared_weight_has_one_copy_and_is_trained():
    one, other = (nn.Linear(4, 4, bias=False).bfloat16() for _ in range(2))
    other.weight = one.weight
    masters = MasterWeights([*one.parameters(), *other.parameters()])
    expected = one.weight.detach().float().requires_grad_()
    other(one(torch.ones(2, 4, dtype=torch.bfloat16))).sum().backward()
    expected.grad = one.weight.grad.clone()
    with masters:
        torch.optim.SGD(masters.copies, 1.0).step()
    torch.optim.SGD([expected], 1.0).step()
    assert torch.equal(one.weight, expected.bfloat16())


@needs(GRAD_DTYPE)
def test_weights_that_are_loaded_between_steps_are_trained_and_the_others_keep_their_precision():
    weight = nn.Parameter(torch.tensor([1.0, 1.0]).bfloat16())
    masters = MasterWeights([weight])
    optimizer = torch.optim.SGD(masters.copies, 1e-4)
    for loaded in None, 5.0:
        if loaded is not None:
            weight.data[1] = loaded
        weight.grad = torch.ones(2)
        with masters:
            optimizer.step()
    expected = torch.tensor([1.0, 5.0])
    expected -= torch.tensor([1e-4, 0])
    expected -= 1e-4
    assert torch.equal(masters.copies[0], expected) and torch.equal(weight, expected.bfloat16())


def test_float64_weights_keep_their_precision():
    weight = nn.Parameter(torch.tensor([1 / 3], dtype=torch.float64))
    masters = MasterWeights([weight])
    weight.square().sum().backward()
    expected = weight.detach() - weight.grad
    with masters:
        torch.optim.SGD(masters.copies, 1.0).step()
    assert torch.equal(weight, expected)


@needs(GRAD_DTYPE)
def test_gradients_stay_after_an_error_in_the_step():
    weight = nn.Parameter(torch.ones(2).bfloat16())
    masters = MasterWeights([weight])
    weight.grad = torch.ones(2)
    with pytest.raises(KeyboardInterrupt), masters:
        raise KeyboardInterrupt
    assert torch.equal(weight.grad, torch.ones(2)) and masters.copies[0].grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_of_float64_keep_their_precision(dtype):
    module, x = nn.Linear(3, 3).to(dtype), torch.ones(4, 3, dtype=dtype)
    scale = 1e60 if dtype == torch.float64 else 1.0
    pipeline = Pipeline(pp.schedule("gpipe", 1, 2), {0: module}, lambda y, _: y.square().mean() * scale)
    loss = pipeline.step(x, x)
    expected = (module(x[:2]).square().mean() * scale).detach()
    assert torch.equal(pipeline.losses, expected.to(pipeline.losses.dtype).repeat(2)) and loss == expected
    assert loss.dtype == pipeline.losses.dtype == torch.promote_types(dtype, torch.float32)


def test_releases_that_would_add_up_gradients_in_bfloat16_refuse_to_do_otherwise(monkeypatch):
    monkeypatch.setattr(versions, "RELEASE", (2, 9))
    lower, full = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)
    refusal = "a gradient in another dtype than its weight needs at least PyTorch 2.10; this is 2"
    with pytest.raises(pp.PipelineError, match=refusal):
        MasterWeights(lower.parameters())
    assert len(MasterWeights(full.parameters()).copies) == 2
    for weight in lower.parameters():
        weight.grad_dtype = torch.float32  # which torch would ignore
    with pytest.raises(pp.PipelineError, match=refusal):
        Pipeline(pp.schedule("gpipe", 1, 2), {0: lower}, nn.functional.mse_loss)
