"""Mixed precision: a scale for the losses of float16, and fp32 copies of weights that are stored in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ppedu.core.validate import require_count, require_number
from ppedu.engine.ranks.versions import set_grad_dtype


class LossScale:
    """The factor by which losses are multiplied in float16, halved when gradients overflow (arXiv 1710.03740, §3.2).

        loss = pipe.step(inputs, targets, loss_scale=scale.value)
        if scale.update(pipe.clip_grad_norm(1.0)):
            optimizer.step()

    The defaults are those of torch.amp.GradScaler.

    Args:
        value: at the start.
        every: the number of steps in a row without an overflow after which it is doubled.

    Raises:
        SettingError: the value is not a number above 0, or `every` is not a whole number above 0.
    """

    def __init__(self, value: float = 2.0**16, every: int = 2000):
        require_number("value", value, lambda number: 0 < number < math.inf, "a number above 0")
        self.value, self.every = float(value), require_count("every", every)
        self._good = 0  # steps since the value last changed

    def update(self, norm: float) -> bool:
        """Return whether to take the step, whose gradients have this norm, and adapt the value.

        The norm that `clip_grad_norm` returns is the same on all ranks, so that all ranks skip the same steps.
        """
        if not math.isfinite(norm):
            self.value, self._good = self.value / 2, 0
            return False
        self._good += 1
        if self._good == self.every:
            self.value, self._good = self.value * 2, 0
        return True

    def state_dict(self) -> dict[str, float]:
        """Return what changes in training, for a checkpoint."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from the state that `state_dict` returned."""
        self.value, self._good = state["value"], int(state["good"])


class MasterWeights:
    """fp32 copies of weights for an optimizer, since a small update vanishes when it is added to a bfloat16 weight.

        weights = list(module.parameters())
        masters = MasterWeights(weights)
        optimizer = torch.optim.AdamW(masters.copies)
        pipe.step(inputs, targets)
        with masters:
            optimizer.step()

    Gradients are accumulated in fp32 as well, by the `grad_dtype` of torch. A weight that is given twice, because two
    modules share it, has one copy. Copies of float64 weights are in float64. Numbers of a weight that change otherwise,
    as when a checkpoint is loaded, are copied again before the next step. If the step raises an error, the gradients
    return to the weights.

    Raises:
        PipelineError: this release of PyTorch cannot add up gradients of a bfloat16 weight in fp32.
    """

    def __init__(self, weights: Iterable[nn.Parameter]):
        self.weights = list(dict.fromkeys(weights))
        self.copies = []
        for weight in self.weights:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            set_grad_dtype(weight, dtype)
            self.copies.append(nn.Parameter(weight.detach().to(dtype)))

    def __enter__(self) -> None:
        """Give the gradients to the copies."""
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                rounded = copy.to(weight.dtype)
                copy.copy_(torch.where(rounded == weight, copy, weight))  # where they differ, the weight was changed
                copy.grad, weight.grad = weight.grad, None

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Round the copies to the weights."""
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)
                weight.grad = copy.grad if error else None
                copy.grad = None
