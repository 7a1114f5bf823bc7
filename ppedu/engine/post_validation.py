"""Stepping the optimizer without waiting for other ranks, and taking a step back that proves wrong.

Clipping needs the norm of all gradients, and a loss that is not finite must not reach the weights. So at the end of a
step every rank ordinarily waits for all others, which undoes what zero-bubble schedules gain. With post-validation
(arXiv 2401.10241, section 4), a rank steps its optimizer as if nothing had to be clipped, and begins the forwards of
the next step. Norms and losses travel meanwhile. Before any backward of the next step, every rank knows them. If the
step was wrong, all ranks restore their weights, step again with clipped gradients or not at all, and run these forwards
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from ppedu.core import PipelineError, Schedule, SettingError
from ppedu.core.numeric import plural
from ppedu.core.validate import require_instance, require_number
from ppedu.engine import results
from ppedu.engine.control import Control
from ppedu.engine.gradients import GradientSync
from ppedu.engine.interpreter import Step
from ppedu.engine.ranks.versions import keep_buffers, version
from ppedu.engine.results import Results


@dataclass(frozen=True)
class PostValidation:
    """How a pipeline steps the optimizer itself, without a barrier at the end of a step.

    The optimizer must have all weights of the rank's stages that are trained. For the time of a step, a rank keeps a
    copy of weights, buffers, gradients and the optimizer's state: with Adam in fp32, 16 bytes for each weight.

    A step whose loss, or the norm of whose gradients, is not finite is taken back on all ranks: weights and optimizer
    are as before it, and its forwards have changed only buffers, such as BatchNorm's. The next call raises an error
    with that step's number, and does nothing else; make it again, and training goes on without that step.

    Between two calls, weights and buffers are those of a step that may be taken back. Call `flush` before you use or
    change them: the next call raises an error if weights were changed without it, other than through `.data`. Hooks of
    the optimizer run twice for a step that is clipped, and once for a step that is taken back.

    Args:
        optimizer: of this rank's weights. The pipeline calls its `step` and clears the gradients.
        max_norm: of all gradients together; None for no clipping.

    Raises:
        SettingError: the optimizer is not one of torch, or max_norm is not a number above 0.
    """

    optimizer: torch.optim.Optimizer
    max_norm: float | None = None

    def __post_init__(self) -> None:
        require_instance("optimizer", self.optimizer, torch.optim.Optimizer, "an optimizer of torch")
        require_instance("max_norm", self.max_norm, (int, float, NoneType), "a number above 0")
        if self.max_norm is not None:
            require_number("max_norm", self.max_norm, lambda norm: norm > 0, "a number above 0")


class Validation:
    """Steps the optimizer of one rank provisionally; `pending` is set until the step is validated.

    Raises:
        SettingError: the optimizer has weights that are not in this rank's stages, and would not be restored; or it
            lacks some, which another optimizer could only change in between.
    """

    def __init__(self, options: PostValidation, control: Control, gradients: GradientSync):
        self.options, self.control, self.gradients = options, control, gradients
        stepped = dict.fromkeys(w for group in options.optimizer.param_groups for w in group["params"])
        known = dict.fromkeys(gradients.weights)
        foreign = [w for w in stepped if w not in known]
        lacking = [w for w in known if w not in stepped and w.requires_grad]
        if foreign:
            raise _wrong_optimizer(f"has {plural(len(foreign), 'weight')} that no stage of this rank has", foreign[0])
        if lacking:
            raise _wrong_optimizer(f"lacks {plural(len(lacking), 'weight')} of this rank's stages", lacking[0])
        self.pending: tuple[Callable[[], torch.Tensor], Schedule, Snapshot] | None = None

    def step(self, step: Step, offset: float, modules: Iterable[nn.Module]) -> None:
        """Start to exchange this rank's results and norm, and step the optimizer.

        Args:
            step: the one that has just run.
            offset: of this rank's clock; see `results.row`.
            modules: all that forwards run, whose weights and buffers are restored if the step is taken back.
        """
        row = results.row(step, offset, self.gradients.norm().item())
        arrives = self.control.start(row, "end the step", "validate the last step")
        before = Snapshot(self.options.optimizer, modules)
        self.options.optimizer.step()
        for weight in self.gradients.weights:
            weight.grad = None
        self.pending = arrives, step.program.schedule, before
        self._left = self._versions()

    def require_unchanged(self) -> None:
        """Raise PipelineError if weights have been changed since the step, as taking it back would undo that."""
        if self.pending and self._versions() != self._left:
            raise PipelineError(
                "weights have been changed after a step that may still be taken back, which would undo the change; "
                "call flush() before you change weights, and let PostValidation's optimizer step all of them"
            )

    def settle(self) -> tuple[Results, bool]:
        """Wait for all ranks' results, and correct the step if it was wrong. All ranks of all replicas decide alike.

        Returns:
            The results, and whether the weights were wrong, so that forwards that used them must run again.
        """
        assert self.pending
        arrives, schedule, before = self.pending
        rows = arrives()
        self.pending = None
        with self.control.required_for("validate the last step"):
            found = results.read(rows, schedule, self.gradients.gather_replicas)
        most = math.inf if self.options.max_norm is None else self.options.max_norm
        finite = bool(found.loss.isfinite()) and math.isfinite(found.norm)
        clipped = found.norm + 1e-6 > most  # as in torch's clip_grads_with_norm_
        wrong = clipped or not finite
        if wrong:
            before.restore()
        if clipped and finite:
            before.step_clipped(most, found.norm)
        return found, wrong

    def _versions(self) -> list[tuple[int, int]]:
        """Return numbers that change whenever a weight is changed in place or replaced."""
        return [(id(weight), version(weight)) for weight in self.gradients.weights]


def _wrong_optimizer(how: str, first: torch.Tensor) -> SettingError:
    return SettingError(
        f"the optimizer of PostValidation {how}, the first of shape {tuple(first.shape)}; make it from all parameters "
        "of the rank's stages, or freeze those that it should not have"
    )


class Snapshot:
    """The weights, buffers, gradients and optimizer state of a rank, to restore bit for bit."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]):
        self.optimizer = optimizer
        whole = nn.ModuleList(modules)
        # A forward may write to a buffer, or assign another one.
        self._restore_buffers = keep_buffers(whole)
        self._weights = [(weight, weight.detach().clone()) for weight in whole.parameters()]
        # Some optimizers write to the gradients.
        self._grads = {weight: weight.grad.clone() for weight in whole.parameters() if weight.grad is not None}
        self._state = {weight: _cloned(state) for weight, state in optimizer.state.items()}
        self._groups = [_settings(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Restore all but the settings of the optimizer, such as its learning rate."""
        self._restore_buffers()
        with torch.no_grad():
            for weight, values in self._weights:
                weight.copy_(values)
        self.optimizer.state.clear()
        self.optimizer.state.update({weight: _cloned(state) for weight, state in self._state.items()})

    def step_clipped(self, max_norm: float, norm: float) -> None:
        """Step the optimizer with the settings that it had, and the gradients, whose norm is `norm`, clipped."""
        for weight, grad in self._grads.items():
            weight.grad = grad
        clip_grads_with_norm_(self._grads, max_norm, torch.tensor(norm, dtype=torch.float64))
        now = [_settings(group) for group in self.optimizer.param_groups]
        self._use(self._groups)
        self.optimizer.step()
        self._use(now)
        for weight in self._grads:
            weight.grad = None

    def _use(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: each.clone() if isinstance(each, torch.Tensor) else deepcopy(each) for name, each in state.items()}
