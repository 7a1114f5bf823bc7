"""A piece of the model on its rank: runs forwards and backwards, and keeps the graphs of microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from ppedu.core import B, F, I, PipelineError, R, W
from ppedu.core.validate import require_instance
from ppedu.engine.clock import Recorder
from ppedu.engine.ranks.device import home, own_random, set_random_state
from ppedu.engine.ranks.versions import gradient_edge, tree_map_only
from ppedu.engine.stages.again import SAVE_NOTHING, Again, from_message
from ppedu.engine.stages.host import HostMemory
from ppedu.engine.stages.past import Past
from ppedu.engine.stages.split_backward import backward_input, pop_grad
from ppedu.engine.stages.watch import Watched, storages, watchable

Loss = Callable[..., torch.Tensor]
Tensors = torch.Tensor | Sequence[torch.Tensor]


class Held(NamedTuple):
    """A microbatch's graph between its forward and its backward.

    Args:
        inputs: those that require grad.
        outputs: the edges at which the gradients of the outputs enter the graph.
        losses: the edges at which a backward of additional losses begins.
        past: where earlier slices of the sequence enter the graph, if there are any.
    """

    inputs: list[torch.Tensor]
    outputs: list[GradientEdge]
    losses: list[GradientEdge]
    past: list[torch.Tensor]

    @property
    def edges(self) -> list[GradientEdge]:
        """All edges at which a backward starts."""
        return self.outputs + self.losses


class Stage:
    """One stage of a pipeline.

    Args:
        module: takes one or more tensors and returns a tensor or a tuple of tensors.
        index: the number of the stage, from 0.
        loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar. Only for the last stage.
        recompute: keep only the input of each microbatch, and run its forward again at the start of its backward, with
            the same random numbers (activation checkpointing, arXiv 1604.06174). Buffers such as BatchNorm's are
            updated twice.

    Raises:
        SettingError: `module` is not a torch.nn.Module.
    """

    def __init__(self, module: nn.Module, index: int, loss_fn: Loss | None = None, recompute: bool = False):
        require_instance(f"the module of stage {index}", module, nn.Module, "a torch.nn.Module")
        self.module, self.index, self.loss_fn, self.recompute = module, index, loss_fn, recompute
        # Such a module works on clones: a received input is a leaf, which autograd does not let it change, and that of
        # the first stage belongs to the caller.
        self._clones_input = any(getattr(part, "inplace", False) for part in module.modules())
        self._learns = self._cut_off = False  # whether an output has wanted a gradient, and another has not
        self.begin((), ())

    def begin(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_weights: Sequence[Fraction] = (),
        loss_kwargs: dict[str, Any] | None = None,
        loss_scale: float = 1,
        loss_fn: Loss | None = None,
        *,
        outputs: bool = False,
        timed: bool = True,
        slices: Sequence[int] | int = 1,
        recomputed: Collection[int] = (),
        offloaded: Collection[int] = (),
    ) -> None:
        """Start a step on these microbatches.

        Args:
            inputs, targets: one entry per microbatch. A stage other than the first or the last ignores them.
            loss_weights: by which each microbatch's loss is multiplied in the batch's loss; 1/m each by default.
            loss_kwargs: keyword arguments for `loss_fn`.
            loss_scale: by which each loss is multiplied for its backward, and so are all gradients.
            loss_fn: the loss of this step, instead of the stage's own.
            outputs: keep the module's output of every microbatch in `outputs`.
            timed: record the time of every action in `clock`, and call `require_learning` in every backward; False if
                the caller does both.
            slices: their number in each sequence, or the tokens of each. If there are several, microbatches are slices.
            recomputed: microbatches of which only the input is kept until `forward_again`, or else until the backward,
                as with `recompute` that of all.
            offloaded: microbatches whose activations go to the host and back, by `host.offload` and `host.load`.
        """
        self.inputs, self.targets, self.slices = inputs, targets, slices
        self.loss_weights = loss_weights or [Fraction(1, len(inputs)) for _ in inputs]
        self.loss_kwargs, self.loss_scale = loss_kwargs or {}, loss_scale
        self._loss_fn = loss_fn or self.loss_fn
        self.losses: dict[int, torch.Tensor] = {}  # by microbatch, unweighted
        self._weighted: list[torch.Tensor] = []  # all losses, each times its microbatch's weight
        self.outputs: dict[int, Any] = {}
        self._keeps_outputs, self._recomputed, self._offloaded = outputs, recomputed, offloaded
        self._alone = timed
        if timed:
            self.device = home([self.module], torch.device("cpu"))
        self.clock = Recorder(self.device, timed)
        self.host = HostMemory(self.device)
        self.held: dict[int, Held] = {}  # by microbatch in flight
        self.weight_halves: dict[int, Callable[[], None]] = {}  # from backward_input, for backward_weight
        self.pasts: dict[int, Past] = {}  # by sequence in flight: what its next slice attends to
        self.again: dict[int, Again] = {}  # of those to recompute, by microbatch: what its forward needs

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights that require grad."""
        return [weight for weight in self.module.parameters() if weight.requires_grad]

    @property
    def loss(self) -> torch.Tensor:
        """The batch's loss, summed over the forwards so far; 0 on a stage without `loss_fn`."""
        return sum(self._weighted, torch.zeros((), device=self.device))

    def forward(self, microbatch: int, x: Tensors | None = None, **keywords: Any) -> Any:
        """Return the stage's output for a microbatch; on the last stage, its loss times its weight.

        As the losses are weighted, the gradients of all microbatches add up to those of the batch.

        Args:
            x: the output of the stage before; None on the first stage, which reads `inputs`.
            keywords: keyword arguments for the module.

        Raises:
            PipelineError: the module changes its input or a keyword in place, or loss_fn its target or an output that
                is also the caller's; or the loss is not a scalar.
        """
        xs = _several(self.inputs[microbatch]) if x is None else as_tuple(x)
        received = x is not None
        again = None
        if self.slices != 1:
            keywords = {**keywords, "past": self._past(microbatch, xs)}
        start = self.clock.now()
        needed = self.recompute or microbatch in self._recomputed
        if needed and torch.is_grad_enabled():
            again = Again.of(self.device, xs, keywords, received)
        host: Any = nullcontext()
        if microbatch in self._offloaded and torch.is_grad_enabled():
            own = *self.module.parameters(), *self.module.buffers(), self.inputs, self.targets, keywords
            host = self.host.keeping(microbatch, xs if received else (), own)
        with host, SAVE_NOTHING if again else nullcontext():
            y = self._output(xs, keywords, received, needed)
            if self._keeps_outputs:
                self.outputs[microbatch] = watchable(tree_map_only(torch.Tensor, torch.Tensor.detach, y))
            if self._loss_fn and len(self.targets):
                y = self.record(microbatch, self._loss(microbatch, y))
        self.clock.note(F(self.index, microbatch), start)
        if again:
            self.again[microbatch] = again
            y = tree_map_only(torch.Tensor, lambda each: each.detach().requires_grad_(each.requires_grad), y)
        elif torch.is_grad_enabled():
            self._hold(microbatch, xs if received else (), y, keywords.get("past"))
        return y

    def add_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Add an additional loss of this stage, such as a load-balancing loss, to the loss of a microbatch.

        Raises:
            PipelineError: the loss is not a scalar, or the microbatch is not between its forward and its backward.
        """
        weighted = self.record(microbatch, loss)
        if torch.is_grad_enabled() and weighted.requires_grad:
            if microbatch in self.again:
                raise PipelineError(f"stage {self.index} recomputes, and then lacks the graph of an additional loss")
            if microbatch not in self.held:
                raise PipelineError(f"add a loss to microbatch {microbatch} after its forward and before its backward")
            self.held[microbatch].losses.append(gradient_edge(weighted))

    def forward_again(self, microbatch: int) -> None:
        """Run a forward again, with the same random numbers, before its backward asks for it."""
        start = self.clock.now()
        self.host.wait(microbatch)
        self._run_again(microbatch)
        self.clock.note(R(self.index, microbatch), start)

    def hand_on(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Return what the rank of the backward lacks to run a forward again, and keep nothing of it here."""
        return self.again.pop(microbatch).message

    def take_on(self, microbatch: int, message: Sequence[torch.Tensor], **keywords: Any) -> None:
        """Be ready to run a forward again that another rank ran, and that `hand_on` returned there."""
        random, received = from_message(message, self.device)
        xs = received if self.index else _several(self.inputs[microbatch])
        self.again[microbatch] = Again.of(self.device, xs, keywords, self.index > 0, random)

    def backward(self, microbatch: int, dy: Tensors | None = None) -> Any:
        """Add the gradients of the weights to their `.grad`, and return the gradient of the input.

        Args:
            dy: the gradient of the output, in its shape; a tuple if there are several outputs, with an entry for each
                that requires grad; None on the last stage.

        Returns:
            The gradient, in the shape of the input; a tuple if several inputs require grad, None on the first stage.

        Raises:
            PipelineError: dy has other than one gradient for each output that requires grad; or as `require_learning`.
        """
        start = self.clock.now()
        graph, grads = self._ready(microbatch, dy)
        if edges := graph.edges:  # empty if all weights are frozen
            torch.autograd.backward(edges, grads)
        self.clock.note(B(self.index, microbatch), start)
        return _one_or_several([pop_grad(x) for x in graph.inputs])

    def backward_input(self, microbatch: int, dy: Tensors | None = None) -> Any:
        """Run the first half of `backward`: return the gradient of the input. Later, `backward_weight` must follow."""
        start = self.clock.now()
        graph, grads = self._ready(microbatch, dy)
        found, self.weight_halves[microbatch] = backward_input(graph.edges, grads, graph.inputs + graph.past)
        self.clock.note(I(self.index, microbatch), start)
        return _one_or_several(found[: len(graph.inputs)])

    def backward_weight(self, microbatch: int) -> None:
        """Run the second half of `backward`: add the gradients of the weights to their `.grad`."""
        start = self.clock.now()
        self.weight_halves.pop(microbatch)()
        self.clock.note(W(self.index, microbatch), start)

    def require_learning(self) -> None:
        """Raise PipelineError if no output, of this step or an earlier one, has depended on weights or inputs."""
        if self._cut_off and not self._learns:
            output = "the loss" if self._loss_fn else f"the output of stage {self.index}"
            raise PipelineError(
                f"{output} does not depend on the weights: something is detached, a plain number, or not of a "
                "floating-point dtype; if this is intended, freeze the weights with requires_grad_(False)"
            )

    def _output(self, xs: Sequence[Any], keywords: Mapping[str, Any], received: bool, needed: bool) -> Any:
        """Return the module's output for inputs that were `received` or are the batch's. `needed`: to recompute."""
        if self._clones_input:
            xs = tree_map_only(torch.Tensor, torch.clone, xs)
        elif not received:
            xs = watchable(xs)
        # The tensors that must not be changed: not clones, nor received tensors, unless they are needed again.
        lent = () if self._clones_input or (received and not needed) else xs
        named = keywords if torch.is_grad_enabled() else {}  # in an evaluation, a keyword may be a cache to fill
        watched, watched_named = Watched(lent), {name: Watched(value) for name, value in named.items()}
        try:
            y = self.module(*xs, **keywords)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise self._changes_input("that tensor is needed for the gradient it sends back") from error
        if watched.changed:
            raise self._changes_input(
                "its forward runs again in the backward" if received else "that is part of the caller's batch"
            )
        for name, value in watched_named.items():
            if value.changed:
                raise PipelineError(
                    f"stage {self.index} changes its keyword {name!r} in place, but other stages and microbatches may "
                    "get the same tensor; change a clone() of it"
                )
        return y

    def _changes_input(self, why: str) -> PipelineError:
        return PipelineError(
            f"stage {self.index} changes its input in place, but {why}; begin the stage's forward with x = x.clone()"
        )

    def _loss(self, microbatch: int, y: Any) -> Any:
        """Return the loss of an output. Without a target that counts, a mean has no terms, and loss_fn may be NaN."""
        if not self._loss_fn or self.loss_weights[microbatch] == 0:
            return torch.zeros((), device=self.device)
        target, named = lent = watchable((self.targets[microbatch], self.loss_kwargs))
        watched, output = Watched(lent), Watched(y)
        loss = self._loss_fn(y, target, **named)
        if watched.changed:
            raise PipelineError(
                "loss_fn changes its target or a keyword in place, but these are the caller's; change a clone() instead"
            )
        if output.changed:  # allowed, unless its memory has another use
            weights = *self.module.parameters(), *self.module.buffers()
            given = self.inputs[microbatch : microbatch + 1]  # nothing on ranks without the inputs
            kept = given, self.outputs.get(microbatch), weights
            if storages(y).keys() & storages(kept):
                raise PipelineError(
                    "loss_fn changes the output in place, but that is also returned, a part of the caller's batch or a "
                    "weight; change a clone() instead"
                )
        return loss

    def _past(self, microbatch: int, xs: Sequence[Any]) -> Past:
        """Return what a slice attends to, and prepare that of the next slice."""
        own = next((x for x in xs if isinstance(x, torch.Tensor) and x.dim() > 1), None)
        if own is None:
            raise PipelineError(f"stage {self.index} gets no tensor of shape (batch, tokens, …), so it has no slices")
        lengths = self.slices if isinstance(self.slices, Sequence) else [own.shape[1]] * self.slices
        sequence, position = divmod(microbatch, len(lengths))
        past = self.pasts.pop(sequence) if position else Past({}, 0, sum(lengths))
        if position + 1 < len(lengths):
            self.pasts[sequence] = past.after(own.shape[1])
        return past

    def _hold(self, microbatch: int, received: Sequence[torch.Tensor], y: Any, past: Any) -> None:
        """Keep what a backward needs: edges, so that the outputs can be freed once they are sent."""
        edges = [gradient_edge(each) for each in as_tuple(y) if each.requires_grad]
        begins = [past.begin] if isinstance(past, Past) and past.begin is not None else []
        self.held[microbatch] = Held([each for each in received if each.requires_grad], edges, [], begins)

    def _run_again(self, microbatch: int) -> None:
        """Run a forward as before, for its graph: with the same random numbers and the same precision."""
        xs, keywords, received, random, precision = self.again.pop(microbatch)
        with own_random(self.device), torch.enable_grad(), precision:
            set_random_state(self.device, random)
            y = self._output(xs, keywords, received, needed=True)
            if self._loss_fn and len(self.targets):
                y = self._scale(self._weigh(microbatch, self._loss(microbatch, y)))
        self._hold(microbatch, xs if received else (), y, keywords.get("past"))

    def record(self, microbatch: int, loss: Any) -> torch.Tensor:
        """Record one more loss of a microbatch, and return it times the microbatch's weight and `loss_scale`."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(
                f"a microbatch's loss must be a tensor with one element; got {got}: return a scalar from loss_fn, or "
                "from the last stage if there is no loss_fn"
            )
        before = self.losses.get(microbatch)
        self.losses[microbatch] = loss.detach() if before is None else before + loss.detach()
        weighted = self._weigh(microbatch, loss)
        self._weighted.append(weighted.detach())
        return self._scale(weighted)

    def _weigh(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss times the microbatch's weight."""
        weight = self.loss_weights[microbatch]
        if weight.numerator > 1:
            loss = loss * weight.numerator
        return loss / weight.denominator

    def _scale(self, weighted: torch.Tensor) -> torch.Tensor:
        return weighted if self.loss_scale == 1 else weighted * self.loss_scale

    def _ready(self, microbatch: int, dy: Tensors | None) -> tuple[Held, list[Any]]:
        """Return a microbatch's graph, and for each of its edges a gradient; None for that of a loss."""
        self.host.wait(microbatch)
        if microbatch in self.again:
            self._run_again(microbatch)
        graph = self.held.pop(microbatch)
        if graph.edges:
            self._learns = True
        elif self.loss_weights[microbatch] > 0 and (graph.inputs or self.trained):
            self._cut_off = True
            if self._alone:
                self.require_learning()
        wanted = len(graph.outputs)
        grads = [None] * wanted if dy is None else list(as_tuple(dy))
        if len(grads) != wanted:
            raise PipelineError(
                f"stage {self.index} got {len(grads)} gradients for microbatch {microbatch}, whose outputs want "
                f"{wanted}; give one for each output that requires grad"
            )
        return graph, grads + [None] * len(graph.losses)


def _several(inputs: Any) -> tuple[Any, ...]:
    """Return a microbatch's inputs, which may not be tensors, as a tuple."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return what is passed between two stages as a tuple; raise PipelineError unless it is a tensor or several."""
    if isinstance(value, torch.Tensor):
        return (value,)
    several = isinstance(value, (tuple, list))
    if several and all(isinstance(each, torch.Tensor) for each in value):
        return tuple(value)
    parts = f" of {', '.join(type(each).__name__ for each in value)}" if several else ""
    raise PipelineError(f"pass a tensor or a tuple of tensors between stages; got {type(value).__name__}{parts}")


def _one_or_several(values: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    return tuple(values) if len(values) > 1 else next(iter(values), None)
