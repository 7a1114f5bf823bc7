"""A piece of the model on its rank: runs forwards and backwards, and keeps what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ppedu.core.actions import B, F, I, W
from ppedu.core.errors import PipelineError
from ppedu.run.backward import backward_input, taken
from ppedu.run.clock import Clock

Loss = Callable[[Any, Any], torch.Tensor]
Tensors = torch.Tensor | Sequence[torch.Tensor]


class Stage:
    """One stage of a pipeline.

    module: takes a tensor, or several, and returns a tensor or a tuple of them. index: which stage this is, from 0.
    loss_fn: `loss_fn(output, target)` → the microbatch's mean loss, a scalar. Given on the last stage only.
    """

    def __init__(self, module: nn.Module, index: int, loss_fn: Loss | None = None):
        self.module = module
        self.index = index
        self.loss_fn = loss_fn
        self.begin((), ())

    @property
    def device(self) -> torch.device:
        """Where the weights are; the CPU if there are none."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def begin(
        self, inputs: Sequence[Any], targets: Sequence[Any], shares: Sequence[Fraction] = (), timed: bool = True
    ) -> None:
        """Start a step on these microbatches, as many as there are targets.

        shares: what part of the batch each microbatch is; equal parts if not given. timed: have `clock` note when what
        is done; False where somebody else does.
        """
        self.inputs, self.targets = inputs, targets
        self.shares = shares or [Fraction(1, len(inputs)) for _ in inputs]
        device = self.device
        self.loss = torch.zeros((), device=device)  # mean over the batch; stays 0 where there is no loss_fn
        self.losses: dict[int, torch.Tensor] = {}  # each microbatch's own
        self.clock = Clock(device, timed)
        # In flight: the inputs that want a gradient, and where the gradients of the outputs enter.
        self.held: dict[int, tuple[list[torch.Tensor], list[GradientEdge]]] = {}
        self.left: dict[int, Callable[[], None]] = {}  # what backward_input has left for backward_weight

    def forward(self, microbatch: int, x: Tensors | None = None, **keywords: Any) -> Any:
        """The output for `x`, what the stage before sent; on the first stage, which is sent None, for the input.

        On the last stage the output is the loss times the microbatch's share of the batch, so that the gradients of
        all microbatches add up to the gradient of the batch's mean loss.
        """
        given = self.inputs[microbatch] if x is None else as_tuple(x)
        xs = given if isinstance(given, tuple) else (given,)  # a first stage may be given what is no tensor
        start = self.clock.now()
        y = self.module(*xs, **keywords)
        if self.loss_fn and len(self.targets):
            y = self._weighted(self.loss_fn, y, microbatch)
            if not y.requires_grad and torch.is_grad_enabled() and self.shares[microbatch] and self._learns(xs):
                raise PipelineError("the loss does not depend on the weights: something is detached, or a plain number")
            self.loss = self.loss + y.detach()
        self.clock.note(F(self.index, microbatch), start)
        if torch.is_grad_enabled():
            wanting = [] if x is None else [each for each in xs if each.requires_grad]
            edges = [get_gradient_edge(each) for each in as_tuple(y) if each.requires_grad]
            self.held[microbatch] = wanting, edges  # not the outputs themselves: they can go once they are sent
        return y

    def backward(self, microbatch: int, dy: Tensors | None = None) -> Any:
        """The gradient of the input, given `dy`, the gradient of the output (None on the last stage: the loss).

        The gradients of the weights are added to their `.grad`. The first stage's input needs no gradient: there the
        answer is None. Of several inputs, the answer is a tuple with a gradient for each that requires grad, and `dy`
        is one with a gradient for each output that does.
        """
        start = self.clock.now()
        xs, edges, grads = self._ready(microbatch, dy)
        if edges:  # a wholly frozen stage has none
            torch.autograd.backward(edges, grads)
        self.clock.note(B(self.index, microbatch), start)
        return _one_or_several([taken(x) for x in xs])

    def backward_input(self, microbatch: int, dy: Tensors | None = None) -> Any:
        """The first half of `backward`: the gradient of the input. `backward_weight` must follow, at any time."""
        start = self.clock.now()
        xs, edges, grads = self._ready(microbatch, dy)
        found, self.left[microbatch] = backward_input(edges, grads, xs)
        self.clock.note(I(self.index, microbatch), start)
        return _one_or_several(found)

    def backward_weight(self, microbatch: int) -> None:
        """The second half of `backward`: the gradients of the weights are added to their `.grad`."""
        start = self.clock.now()
        self.left.pop(microbatch)()
        self.clock.note(W(self.index, microbatch), start)

    def _weighted(self, loss_fn: Loss, y: Any, microbatch: int) -> torch.Tensor:
        share = self.shares[microbatch]
        # Where no target counts there is no mean, and loss_fn might give NaN.
        loss: Any = loss_fn(y, self.targets[microbatch]) if share else torch.zeros((), device=self.device)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(f"loss_fn must give one number, the microbatch's mean loss, as a tensor; got {got}")
        self.losses[microbatch] = loss.detach()
        return (loss * share.numerator if share.numerator > 1 else loss) / share.denominator

    def _learns(self, xs: Sequence[Any]) -> bool:
        """Is there anything that wants a gradient from here?"""
        parameters = any(weight.requires_grad for weight in self.module.parameters())
        return parameters or any(isinstance(x, torch.Tensor) and x.requires_grad for x in xs)

    def _ready(self, microbatch: int, dy: Tensors | None) -> tuple[list[torch.Tensor], list[GradientEdge], list[Any]]:
        xs, edges = self.held.pop(microbatch)
        return xs, edges, [None] * len(edges) if dy is None else list(as_tuple(dy))[: len(edges)]


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The tensors that go into a stage or come out of it: one, or several.

    Raises:
        PipelineError: it is something else.
    """
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(each, torch.Tensor) for each in value):
        return tuple(value)
    got = type(value).__name__
    if isinstance(value, (tuple, list)):
        got += f" of {', '.join(type(each).__name__ for each in value)}"
    raise PipelineError(f"between stages go a tensor or a tuple of tensors; got {got}")


def _one_or_several(values: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    return tuple(values) if len(values) > 1 else values[0] if values else None
