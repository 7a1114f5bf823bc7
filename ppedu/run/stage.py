"""A piece of the model on its rank: runs forwards and backwards, and keeps the graphs of microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from ppedu.core.actions import B, F, I, W
from ppedu.core.errors import PipelineError
from ppedu.core.validate import require_instance
from ppedu.run.clock import Clock
from ppedu.run.split_backward import backward_input, pop_grad

Loss = Callable[..., torch.Tensor]
Tensors = torch.Tensor | Sequence[torch.Tensor]


class Stage:
    """One stage of a pipeline.

    module: takes one or more tensors and returns a tensor or a tuple of tensors.
    index: the number of the stage, from 0.
    loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar. Only for the last stage.

    Raises:
        SettingError: `module` is not a torch.nn.Module.
    """

    def __init__(self, module: nn.Module, index: int, loss_fn: Loss | None = None):
        require_instance(f"the module of stage {index}", module, nn.Module, "a torch.nn.Module")
        self.module = module
        self.index = index
        self.loss_fn = loss_fn
        # Autograd forbids in-place changes of a leaf, and the input that `forward` gets is one.
        self._clones_input = any(getattr(part, "inplace", False) for part in module.modules())
        self.begin((), ())

    @property
    def device(self) -> torch.device:
        """The device of the weights and buffers; the CPU if the module has neither."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def begin(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_weights: Sequence[Fraction] = (),
        *,
        loss_kwargs: dict[str, Any] | None = None,
        outputs: bool = False,
        timed: bool = True,
    ) -> None:
        """Start a step on these microbatches.

        inputs, targets: one entry per microbatch. A stage other than the first or the last ignores them.
        loss_weights: by which each microbatch's loss is multiplied in the batch's loss; 1/m each by default.
        loss_kwargs: keyword arguments for `loss_fn`.
        outputs: keep the module's output of every microbatch in `outputs`.
        timed: record the time of every action in `clock`; False if the caller does that.
        """
        self.inputs, self.targets = inputs, targets
        self.loss_weights = loss_weights or [Fraction(1, len(inputs)) for _ in inputs]
        self.loss_kwargs = loss_kwargs or {}
        self.losses: dict[int, torch.Tensor] = {}  # by microbatch, unweighted
        self.outputs: dict[int, Any] = {}
        self._keeps_outputs = outputs
        self._weighted: list[torch.Tensor] = []  # the same, each times its weight
        self.clock = Clock(self.device, timed)
        # By microbatch in flight: the inputs that require grad, and the edges through which gradients enter the graph,
        # first those of the outputs and then those of additional losses.
        self.held: dict[int, tuple[list[torch.Tensor], list[GradientEdge], list[GradientEdge]]] = {}
        self.weight_halves: dict[int, Callable[[], None]] = {}  # from backward_input, for backward_weight

    @property
    def loss(self) -> torch.Tensor:
        """The batch's loss, summed over the forwards so far; 0 on a stage without `loss_fn`."""
        return sum(self._weighted, torch.zeros((), device=self.device))

    def forward(self, microbatch: int, x: Tensors | None = None, **keywords: Any) -> Any:
        """Return the stage's output for a microbatch; on the last stage, its loss times its weight.

        x: the output of the stage before; None on the first stage, which reads `inputs`.
        keywords: keyword arguments for the module.

        As the losses are weighted, the gradients of all microbatches add up to those of the batch.

        Raises:
            PipelineError: the module changes its input in place, or the loss is not a scalar.
        """
        value = self.inputs[microbatch] if x is None else as_tuple(x)
        xs = value if isinstance(value, tuple) else (value,)  # the batch may contain inputs that are not tensors
        start = self.clock.now()
        try:
            clone = x is not None and self._clones_input
            y = self.module(*([each.clone() for each in xs] if clone else xs), **keywords)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise PipelineError(
                f"stage {self.index} changes its input in place, but that tensor is needed for the gradient it sends "
                "back; begin the stage's forward with x = x.clone()"
            ) from error
        if self._keeps_outputs:
            self.outputs[microbatch] = tree_map_only(torch.Tensor, torch.Tensor.detach, y)
        if self.loss_fn and len(self.targets):
            # Without a target that counts, a mean has no terms, and loss_fn may return NaN.
            counts = self.loss_weights[microbatch] > 0
            target = self.targets[microbatch]
            loss = self.loss_fn(y, target, **self.loss_kwargs) if counts else torch.zeros((), device=self.device)
            y = self._add(microbatch, loss)
        self.clock.note(F(self.index, microbatch), start)
        if torch.is_grad_enabled():
            leaves = [] if x is None else [each for each in xs if each.requires_grad]
            edges = [get_gradient_edge(each) for each in as_tuple(y) if each.requires_grad]
            self.held[microbatch] = leaves, edges, []  # edges, so that the outputs can be freed once they are sent
        return y

    def add_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Add an additional loss of this stage, such as a load-balancing loss, to the loss of a microbatch.

        Raises:
            PipelineError: the loss is not a scalar, or the microbatch is not between its forward and its backward.
        """
        weighted = self._add(microbatch, loss)
        if torch.is_grad_enabled() and weighted.requires_grad:
            if microbatch not in self.held:
                raise PipelineError(f"add a loss to microbatch {microbatch} after its forward and before its backward")
            self.held[microbatch][2].append(get_gradient_edge(weighted))

    def backward(self, microbatch: int, dy: Tensors | None = None) -> Any:
        """Add the gradients of the weights to their `.grad`, and return the gradient of the input.

        dy: the gradient of the output, a tuple if there are several outputs, with an entry for each that requires
            grad; None on the last stage.

        Returns a tuple if several inputs require grad, None on the first stage.

        Raises:
            PipelineError: the output does not depend on the weights, although some require grad.
        """
        start = self.clock.now()
        xs, edges, grads = self._ready(microbatch, dy)
        if edges:  # there are no edges if all weights are frozen
            torch.autograd.backward(edges, grads)
        self.clock.note(B(self.index, microbatch), start)
        return _one_or_several([pop_grad(x) for x in xs])

    def backward_input(self, microbatch: int, dy: Tensors | None = None) -> Any:
        """Run the first half of `backward`: return the gradient of the input. Later, `backward_weight` must follow."""
        start = self.clock.now()
        xs, edges, grads = self._ready(microbatch, dy)
        found, self.weight_halves[microbatch] = backward_input(edges, grads, xs)
        self.clock.note(I(self.index, microbatch), start)
        return _one_or_several(found)

    def backward_weight(self, microbatch: int) -> None:
        """Run the second half of `backward`: add the gradients of the weights to their `.grad`."""
        start = self.clock.now()
        self.weight_halves.pop(microbatch)()
        self.clock.note(W(self.index, microbatch), start)

    def _add(self, microbatch: int, loss: Any) -> torch.Tensor:
        """Record one more loss of a microbatch, and return it times the microbatch's weight."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(
                f"a microbatch's loss must be a tensor with one element; got {got}: return a scalar from loss_fn, or "
                "from the last stage if there is no loss_fn"
            )
        weight = self.loss_weights[microbatch]
        weighted = (loss * weight.numerator if weight.numerator > 1 else loss) / weight.denominator
        before = self.losses.get(microbatch)
        self.losses[microbatch] = loss.detach() if before is None else before + loss.detach()
        self._weighted.append(weighted.detach())
        return weighted

    def _ready(self, microbatch: int, dy: Tensors | None) -> tuple[list[torch.Tensor], list[GradientEdge], list[Any]]:
        """Return the inputs that require grad, and the edges at which a backward starts, each with its gradient."""
        xs, edges, losses = self.held.pop(microbatch)
        learns = bool(xs) or any(weight.requires_grad for weight in self.module.parameters())
        if not edges + losses and learns and self.loss_weights[microbatch] > 0:
            output = "the loss" if self.loss_fn else f"the output of stage {self.index}"
            raise PipelineError(
                f"{output} does not depend on the weights: something is detached, a plain number, or not of a "
                "floating-point dtype; if this is intended, freeze the weights with requires_grad_(False)"
            )
        grads = [None] * len(edges) if dy is None else list(as_tuple(dy))[: len(edges)]
        return xs, edges + losses, grads + [None] * len(losses)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the tensor or tensors passed between two stages as a tuple.

    Raises:
        PipelineError: `value` is neither a tensor nor a tuple of tensors.
    """
    if isinstance(value, torch.Tensor):
        return (value,)
    several = isinstance(value, (tuple, list))
    if several and all(isinstance(each, torch.Tensor) for each in value):
        return tuple(value)
    parts = f" of {', '.join(type(each).__name__ for each in value)}" if several else ""
    raise PipelineError(f"pass a tensor or a tuple of tensors between stages; got {type(value).__name__}{parts}")


def _one_or_several(values: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    return tuple(values) if len(values) > 1 else values[0] if values else None
