"""A piece of the model on its rank: runs forwards and backwards, and keeps what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from ppedu.core.actions import B, F, I, W
from ppedu.core.errors import PipelineError
from ppedu.core.validate import require_instance
from ppedu.run.clock import Clock
from ppedu.run.split_backward import backward_input, pop_grad

Loss = Callable[..., torch.Tensor]
Tensors = torch.Tensor | Sequence[torch.Tensor]


class Stage:
    """One stage of a pipeline.

    module: takes a tensor, or several, and returns a tensor or a tuple of them. index: which stage this is, from 0.
    loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar. Given on the last stage only.
    """

    def __init__(self, module: nn.Module, index: int, loss_fn: Loss | None = None):
        require_instance("a stage's module", module, nn.Module, "a torch.nn.Module")
        self.module = module
        self.index = index
        self.loss_fn = loss_fn
        # A layer may write over its input, but autograd does not let it write over a leaf, which this input is.
        self._writes_over = any(getattr(part, "inplace", False) for part in module.modules())
        self.begin((), ())

    @property
    def device(self) -> torch.device:
        """Where the weights are; the CPU if there are none."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def begin(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        shares: Sequence[Fraction] = (),
        *,
        loss_kwargs: dict[str, Any] | None = None,
        outputs: bool = False,
        timed: bool = True,
    ) -> None:
        """Start a step on these microbatches, as many as there are targets.

        shares: what each microbatch's loss counts in the batch's; equal parts of 1 if not given. loss_kwargs: keywords
        for `loss_fn`. outputs: keep what the module returns for each microbatch. timed: let `clock` note each action;
        False where the caller does.
        """
        self.inputs, self.targets = inputs, targets
        self.shares = shares or [Fraction(1, len(inputs)) for _ in inputs]
        self.loss_kwargs = loss_kwargs or {}
        self.losses: dict[int, torch.Tensor] = {}  # each microbatch's own
        self.outputs: dict[int, Any] = {}
        self._keeps_outputs = outputs
        self._weighted: list[torch.Tensor] = []  # the losses, each times its share
        self.clock = Clock(self.device, timed)
        # In flight: the inputs that want a gradient, where the gradients of the outputs enter, and of further losses.
        self.held: dict[int, tuple[list[torch.Tensor], list[GradientEdge], list[GradientEdge]]] = {}
        self.left: dict[int, Callable[[], None]] = {}  # what backward_input has left for backward_weight

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the whole batch, as far as it has been computed; 0 where there is no loss_fn."""
        return sum(self._weighted, torch.zeros((), device=self.device))

    def forward(self, microbatch: int, x: Tensors | None = None, **keywords: Any) -> Any:
        """The output for `x`, what the stage before sent; on the first stage, which is sent None, for the input.

        On the last stage the output is the loss times the microbatch's share of the batch, so that the gradients of
        all microbatches add up to the gradient of the batch's loss.

        Raises:
            PipelineError: the module changes its input in place, or the loss is not one number.
        """
        given = self.inputs[microbatch] if x is None else as_tuple(x)
        xs = given if isinstance(given, tuple) else (given,)  # a first stage may be given what is no tensor
        start = self.clock.now()
        try:
            y = self.module(*([each.clone() for each in xs] if x is not None and self._writes_over else xs), **keywords)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise PipelineError(
                f"stage {self.index} changes its input in place, which another stage made; begin with x = x.clone()"
            ) from error
        if self._keeps_outputs:
            self.outputs[microbatch] = tree_map(_detached, y)
        if self.loss_fn and len(self.targets):
            # Where no target counts there is no mean, and loss_fn might give NaN.
            counts = self.shares[microbatch] > 0
            target = self.targets[microbatch]
            loss = self.loss_fn(y, target, **self.loss_kwargs) if counts else torch.zeros((), device=self.device)
            y = self._add(microbatch, loss)
        self.clock.note(F(self.index, microbatch), start)
        if torch.is_grad_enabled():
            wanting = [] if x is None else [each for each in xs if each.requires_grad]
            edges = [get_gradient_edge(each) for each in as_tuple(y) if each.requires_grad]
            self.held[microbatch] = wanting, edges, []  # not the outputs themselves: they can go once they are sent
        return y

    def add_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Add a loss of this stage's own, such as one that balances experts, to the microbatch's: after its forward.

        Raises:
            PipelineError: it is not one number, or the microbatch is not between its forward and its backward here.
        """
        weighted = self._add(microbatch, loss)
        if torch.is_grad_enabled() and weighted.requires_grad:
            if microbatch not in self.held:
                raise PipelineError(f"add a loss to microbatch {microbatch} after its forward and before its backward")
            self.held[microbatch][2].append(get_gradient_edge(weighted))

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
        return _one_or_several([pop_grad(x) for x in xs])

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

    def _add(self, microbatch: int, loss: Any) -> torch.Tensor:
        """Add one more loss to a microbatch's; returns it times the microbatch's share."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(
                f"a microbatch's loss must be one number, as a tensor; got {got}: return one from loss_fn, or from the "
                "last stage if there is no loss_fn"
            )
        share = self.shares[microbatch]
        weighted = (loss * share.numerator if share.numerator > 1 else loss) / share.denominator
        before = self.losses.get(microbatch)
        self.losses[microbatch] = loss.detach() if before is None else before + loss.detach()
        self._weighted.append(weighted.detach())
        return weighted

    def _ready(self, microbatch: int, dy: Tensors | None) -> tuple[list[torch.Tensor], list[GradientEdge], list[Any]]:
        """The inputs that want a gradient, and what a backward starts from: edges, each with its gradient."""
        xs, edges, losses = self.held.pop(microbatch)
        if not edges and not losses and self.shares[microbatch] and self._learns(xs):
            what = "the loss" if self.loss_fn else f"what stage {self.index} returns"
            raise PipelineError(
                f"{what} does not depend on the weights: something is detached, or a plain number, or not of a "
                "floating-point dtype; if that is meant, freeze the weights with requires_grad_(False)"
            )
        grads = [None] * len(edges) if dy is None else list(as_tuple(dy))[: len(edges)]
        return xs, edges + losses, grads + [None] * len(losses)

    def _learns(self, xs: Sequence[torch.Tensor]) -> bool:
        """Do weights of this stage, or of a stage before it, want a gradient?"""
        return bool(xs) or any(weight.requires_grad for weight in self.module.parameters())


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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
