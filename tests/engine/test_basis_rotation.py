"""AdamW along the axes of gradients: against the program of SOAP's authors, torch's AdamW, and a turned quadratic."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ppedu import SettingError
from ppedu.run import BasisRotation

PAGE = (Path(__file__).parents[2] / "docs/asynchronous.md").read_text(encoding="utf-8")
# The last weights of SOAP at github.com/nikhilvyas/SOAP (a1e5535), which was made to compute in float64, for the
# gradients of the test.
SOAP = [[-0.38732537, -0.10278423], [0.26450693, -0.05523116], [-0.16347037, 0.38196976]]


def axes(n):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q


def test_steps_are_those_of_soap():
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    optimizer = BasisRotation([weight], 0.1, (0.9, 0.95), eps=1e-12, weight_decay=0, every=3)
    for step in range(20):
        weight.grad = torch.sin(torch.arange(6, dtype=torch.float64) * (step + 1) + step).reshape(3, 2)
        optimizer.step()
        if step == 10:  # as after a checkpoint
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = BasisRotation([weight])
            optimizer.load_state_dict(state)
    torch.testing.assert_close(weight.detach(), torch.tensor(SOAP, dtype=torch.float64), atol=1e-8, rtol=0)


def test_steps_without_rotation_are_those_of_adamw():
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in [(3, 4), (5,), (2, 3, 4), (2, 2)]]
    ours = copy.deepcopy(plain)
    adamw = torch.optim.AdamW(plain, 0.1, weight_decay=0.3)
    rotation = BasisRotation([{"params": ours[:1], "every": 0}, {"params": ours[1:]}], 0.1, weight_decay=0.3)
    for _ in range(5):
        for one, other in zip(plain[:3], ours[:3], strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        adamw.step()
        assert rotation.step(lambda: 7) == 7
    for one, other in zip(plain, ours, strict=True):  # the last has no gradient, and stays
        torch.testing.assert_close(one, other)


def test_along_turned_axes_steps_are_those_of_adamw_turned():
    """The first gradient gives the axes: those of a quadratic, of which AdamW has the same steps along its entries."""
    torch.manual_seed(0)
    u, v, curvature = axes(3), axes(4), torch.rand(3, 4, dtype=torch.float64)
    plain = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    turned = nn.Parameter(u @ plain.detach() @ v.T)
    optimizers = torch.optim.AdamW([plain], 0.1, weight_decay=0), BasisRotation([turned], 0.1, weight_decay=0, every=99)
    turned.grad = u @ torch.diag(torch.tensor([3.0, 2, 1, 0], dtype=torch.float64))[:3] @ v.T
    optimizers[1].step()
    for _ in range(30):
        plain.grad = curvature * plain.detach()
        turned.grad = u @ (curvature * (u.T @ turned.detach() @ v)) @ v.T
        for each in optimizers:
            each.step()
    torch.testing.assert_close(u.T @ turned.detach() @ v, plain.detach())


def test_late_gradients_hurt_adamw_where_the_curvature_is_not_along_entries():
    """The claim of arXiv 2602.03515, with the quadratic of the page and its numbers."""
    torch.manual_seed(0)
    square = torch.eye(4, dtype=torch.float64)
    turned = axes(4), axes(4)

    def mean_loss(late, make, u, v):
        curvature = torch.logspace(0, -3, 4, dtype=torch.float64)[:, None]
        weight = nn.Parameter(u @ torch.ones_like(square) @ v.T)
        optimizer, past, losses = make([weight], 0.05, betas=(0.9, 0.95), weight_decay=0), [], []
        for _ in range(200):
            past.append(u.T @ weight.detach() @ v)
            losses.append((curvature * past[-1] ** 2).sum() / 2)
            weight.grad = u @ (curvature * past[max(0, len(past) - 1 - late)]) @ v.T
            optimizer.step()
        return torch.stack(losses[100:]).mean().item()

    adamw = torch.optim.AdamW
    cases = (adamw, square, square), (adamw, *turned), (BasisRotation, *turned)
    for late, name in {0: "on time", 1: "1 late", 3: "3 late", 7: "7 late"}.items():
        along, mixed, rotated = map(float, re.search(rf"\n\| {name} \| (.*) \|", PAGE)[1].split(" | "))
        assert [mean_loss(late, *case) for case in cases] == pytest.approx([along, mixed, rotated], rel=0.15)
        assert not late or rotated < 1.05 * along < mixed / 3


def test_an_interval_below_0():
    with pytest.raises(SettingError, match="every must be at least 0; got -1"):
        BasisRotation([nn.Parameter(torch.ones(2, 2))], every=-1)
