"""Error feedback for gradients that come one update late (arXiv 2606.30634)."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def error_feedback(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Let each step of `optimizer` also correct the step before it, and return the optimizer.

    With gradients one update late, step t changes the weights by u(t), which was due at step t - 1. That step had
    u(t - 1) instead. The error, u(t) - u(t - 1), is made up for now:

        optimizer = {stage: error_feedback(torch.optim.AdamW(module.parameters(), lr=0.001))}
        pipe = Pipeline(pp.schedule("pipedream-2bw", 4, 64), {stage: module}, loss_fn, optimizer=optimizer)

    The first step has nothing to correct. A weight without a gradient stays as it is. The optimizer's state keeps u(t),
    one more number for each weight, also in a checkpoint; during a step, there is a copy of the weights as well.
    """
    before: dict[torch.Tensor, torch.Tensor] = {}

    def remember(*_: Any) -> None:
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        before.update((weight, weight.detach().clone()) for weight in weights if weight.grad is not None)

    @torch.no_grad()
    def correct(*_: Any) -> None:
        for weight, old in before.items():
            update, state = weight - old, optimizer.state[weight]
            weight += update - state.get("last_update", update)
            state["last_update"] = update
        before.clear()

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(correct)
    return optimizer
