"""AdamW along the axes of a matrix's gradients, for gradients that come late (arXiv 2602.03515)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ppedu.core.validate import require_count


class BasisRotation(torch.optim.Optimizer):
    """AdamW that scales the steps of a matrix along the axes of its gradients, not entry by entry.

    Of a matrix of shape (m, n) with gradient G, the axes are the columns of U, (m, m), and of V, (n, n): eigenvectors
    of running means of G Gᵀ and of Gᵀ G. Along them, the gradient is UᵀGV, and AdamW's step S there is U S Vᵀ here.
    That is SOAP (arXiv 2409.11321), which arXiv 2602.03515 turns against late gradients. Leave an embedding as it is:

        groups = [{"params": matrices}, {"params": others, "every": 0}]
        pipe = Pipeline(schedule, {stage: module}, loss_fn, optimizer={stage: BasisRotation(groups, lr=0.005)})

    The first gradient of a matrix only finds the axes. The state keeps 2m² + 2n² numbers more than that of AdamW.

    Args:
        weights: Or groups of them, as for all of torch's optimizers. Those without two dimensions take AdamW's steps.
        lr, eps, weight_decay: As of `torch.optim.AdamW`.
        betas: What part of the mean gradient remains after a step, and of the means of all squares and products.
        every: The number of steps between turns of the axes. With 0, all steps are AdamW's.

    Raises:
        SettingError: `every` is below 0.
    """

    def __init__(
        self,
        weights: Iterable[Any],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
    ):
        require_count("every", every, least=0)
        super().__init__(weights, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change each weight that has a gradient; `closure` may compute them first, and its result is returned."""
        result = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight *= 1 - group["lr"] * group["weight_decay"]
                    weight -= group["lr"] * _direction(weight.grad, self.state[weight], group)
        return result


def _direction(grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Return Adam's step for a learning rate of 1, and take the gradient into the means of `state`."""
    kept, kept_squares = group["betas"]
    rotated = grad.dim() == 2 and group["every"]
    products = [grad @ grad.T, grad.T @ grad] if rotated else []
    if not state:
        state.update(step=0, mean=torch.zeros_like(grad), square=torch.zeros_like(grad))
        if rotated:  # along its own axes, a gradient is diagonal, and rounding would decide the rest of the step
            state["products"] = [(1 - kept_squares) * each for each in products]
            state["axes"] = [torch.linalg.eigh(each).eigenvectors.flip(1) for each in state["products"]]
            return torch.zeros_like(grad)
    state["step"] += 1
    mean, seen = state["mean"].lerp_(grad, 1 - kept), grad
    if rotated:
        left, right = state["axes"]
        mean, seen = left.T @ mean @ right, left.T @ seen @ right
    state["square"].lerp_(seen.square(), 1 - kept_squares)
    size = (state["square"] / (1 - kept_squares ** state["step"])).sqrt() + group["eps"]
    direction = mean / (1 - kept ** state["step"]) / size
    for side, latest in enumerate(products):
        state["products"][side].lerp_(latest, 1 - kept_squares)
        if state["step"] % group["every"] == 0:
            _turn(state, side)
    return left @ direction @ right.T if rotated else direction


def _turn(state: dict[str, Any], side: int) -> None:
    """Turn the axes of a side, 0 or 1, by one power iteration: those along which gradients are largest come first."""
    products, axes = state["products"][side], state["axes"][side]
    order = (axes * (products @ axes)).sum(0).argsort(descending=True)
    state["square"] = state["square"].index_select(side, order)
    state["axes"][side] = torch.linalg.qr(products @ axes[:, order]).Q
