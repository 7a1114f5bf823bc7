"""fp32 copies of bfloat16 weights."""

import torch
from torch import nn

from ppedu.run import MasterWeights


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
