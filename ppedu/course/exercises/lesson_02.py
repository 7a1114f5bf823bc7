"""Lesson 2: the hand-off between the two halves of a model, and the stage in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from ppedu.core.numeric import pretty
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import Exercise, missing_return, own_line, require_function, too_large

if TYPE_CHECKING:  # the package must import without torch
    from torch import Tensor
    from torch.nn import Module


@dataclass
class Observed:
    """The tensors that passed through the two halves while the learner's function ran."""

    sent: list[Tensor] = field(default_factory=list)  # outputs of the first half
    received: list[Tensor] = field(default_factory=list)  # inputs of the second half
    tracked: bool = False  # did the received activation require grad when the second half ran?
    gradients: list[Tensor] = field(default_factory=list)  # that reached the first half's output
    loss: Any = None  # the function's return value
    error: RuntimeError | None = None  # raised by autograd


@dataclass
class Reference:
    """The uncut model after a backward: its halves with their `.grad`, the activation's gradient, and the loss."""

    first: Module
    second: Module
    gradient: Tensor
    loss: Tensor


def _cases() -> Iterator[tuple[str, Module, Module, list[tuple[Tensor, Tensor]], Any]]:
    """Yield each case: its description, the two halves, the microbatches (inputs, targets), the loss function."""
    import torch
    from torch.nn import Linear, Sequential, Tanh
    from torch.nn.functional import l1_loss, mse_loss

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = Sequential(Linear(64, 32, bias=False), Tanh()), Linear(32, 1, bias=False)
        x, target = torch.randn(16, 64), torch.randn(16, 1)
        deep = [Sequential(Linear(6, 6), Tanh(), Linear(6, 6)).double() for _ in range(2)]
        inputs, targets = torch.randn(2, 2, 4, 6, dtype=torch.float64)
    yield "", first, second, [(x, target)], mse_loss
    two = list(zip(inputs, targets, strict=True))
    yield "with deeper halves, a different loss and two microbatches in turn,", deep[0], deep[1], two, l1_loss


def _not_a_hand_off(function: Any) -> str | None:
    require_function(function, "first", "second", "x", "target", "loss_fn")
    for case, first, second, microbatches, loss_fn in _cases():
        whole = deepcopy(first), deepcopy(second)
        for x, target in microbatches:
            right = _uncut(*whole, x, target, loss_fn)
            with own_line(function, case):
                seen = _watched(function, first, second, x, target, loss_fn)
            fault = (
                _not_cut(seen)
                or _not_through_the_second(second, right)
                or _not_back_to_the_first(seen, right)
                or _unlike_the_uncut("first", first, right.first)
            )
            if seen.error and (fault is None or not (seen.sent or seen.received)):
                with own_line(function, case):
                    raise seen.error
            fault = fault or _not_the_loss(seen.loss, right.loss)
            if fault:
                return f"{case} {fault}".lstrip()
    return None


def _uncut(first: Module, second: Module, x: Tensor, target: Tensor, loss_fn: Any) -> Reference:
    activation = first(x)
    activation.retain_grad()
    loss = loss_fn(second(activation), target)
    loss.backward()
    return Reference(first, second, activation.grad, loss.detach())


def _watched(function: Any, first: Module, second: Module, x: Tensor, target: Tensor, loss_fn: Any) -> Observed:
    """Run the learner's function, and record the tensors that pass through the halves.

    An error from autograd is recorded as well, because the tensors explain the mistake better than its message.

    Raises:
        Exception: any other error of the learner's function.
    """
    seen = Observed()

    def after_first(module: Module, inputs: Any, output: Tensor) -> None:
        seen.sent.append(output)
        if output.requires_grad:
            output.register_hook(seen.gradients.append)

    def before_second(module: Module, inputs: Any) -> None:
        seen.received.append(inputs[0])
        seen.tracked = inputs[0].requires_grad

    hooks = first.register_forward_hook(after_first), second.register_forward_pre_hook(before_second)
    try:
        seen.loss = function(first, second, x, target, loss_fn)
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # such as RecursionError
            raise
        seen.error = error
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _not_cut(seen: Observed) -> str | None:
    """Explain what is wrong with the activation on the way down; return None if it is right."""
    import torch

    if not (seen.sent or seen.received):
        return (
            f"your function runs neither half and returns {seen.loss!r}; run first(x), hand a copy of its output to "
            "second, and return the loss"
        )
    for half, runs in (("first", seen.sent), ("second", seen.received)):
        if len(runs) != 1:
            return f"the {half} half {f'runs {len(runs)} times' if runs else 'never runs'}; run each half once"
    (sent,), (received,) = seen.sent, seen.received
    if sent.grad_fn is None:
        return (
            "the output of the first half has no history, so no gradient can come back through it. Run it outside "
            "no_grad(), and keep its output along with the copy; detach_() changes it in place"
        )
    if received.grad_fn is not None:
        return (
            f"the second half's input still has its history, {received.grad_fn.name()}, so loss.backward() continues "
            "into the first half. Between two processes only the numbers travel: hand over a detached copy"
        )
    if not torch.equal(received, sent):
        return "the second half does not receive the output of the first half"
    if not seen.tracked:
        return (
            "the received activation does not require grad when the second half runs, so its .grad stays None, and "
            "there is nothing to send back"
        )
    return None


def _not_through_the_second(second: Module, right: Reference) -> str | None:
    if _none(second):
        return "the second half's weights have no gradients; loss.backward() computes them"
    return _unlike_the_uncut("second", second, right.second)


def _not_back_to_the_first(seen: Observed, right: Reference) -> str | None:
    """Explain what is wrong with the gradient that reached the first half's output; return None if it is right."""
    import torch

    if not seen.gradients:
        return _why_no_gradient(seen, right)
    gradient = torch.stack(seen.gradients).sum(0)
    if torch.equal(gradient, right.gradient):
        return None
    if torch.equal(gradient, seen.sent[0]):
        return "the first half gets the activation itself instead of the activation's gradient"
    if torch.allclose(gradient, gradient.flatten()[0]):
        return (
            "the first half gets the same gradient everywhere, as with sum() or mean(). It needs to know how the loss "
            "changes with each number that it sent: that is the gradient of the received activation"
        )
    times = _times(gradient, right.gradient)
    if times:
        return f"the first half gets {times} times the gradient of the received activation; send it back as it is"
    return "the first half gets a tensor other than the gradient of the received activation"


def _why_no_gradient(seen: Observed, right: Reference) -> str | None:
    """Explain why no gradient reached the first half's output."""
    (sent,), (received,) = seen.sent, seen.received
    message = str(seen.error)
    if "implicitly created" in message:
        return (
            "backward() is called on an activation without a gradient, or with None. Only a loss, a single number, "
            "can do without one; pass it the gradient of the received activation"
        )
    if "does not require grad" in message:
        return "backward() is called on a copy without history; call it on the output of first(x)"
    if "Mismatch in shape" in message:
        return (
            f"the gradient passed to backward() does not have the shape of the activation, {tuple(sent.shape)}: it "
            "belongs to a different tensor. Send back the gradient of the received activation"
        )
    if seen.error:
        return None
    if received.grad is not None and _times(received.grad, right.gradient) == "2":
        return (
            "backward() is called on the received copy. That copy has no history, so its gradient is only added to "
            "itself; call it on the output of first(x)"
        )
    return (
        "the first half's weights have no gradients. The received activation now has one: use it to start a backward "
        "from the output of first(x)"
    )


def _unlike_the_uncut(name: str, half: Module, uncut: Module) -> str | None:
    from torch import equal

    fault = f"the {name} half's gradients differ from those of the uncut model"
    if _none(half):
        return f"{fault}: some are missing"
    mine, others = (_gradients(each) for each in (half, uncut))
    if equal(mine, others):
        return None
    times = _times(mine, others)
    if times:
        return f"{fault}: they are {times} times as large. Use the loss as loss_fn returns it"
    return f"{fault}. Take the loss from loss_fn, and let backward() add to the existing .grad"


def _gradients(half: Module) -> Tensor:
    """Return the gradients of all weights, concatenated."""
    import torch

    return torch.cat([weight.grad.flatten() for weight in half.parameters() if weight.grad is not None])


def _none(half: Module) -> bool:
    return any(weight.grad is None for weight in half.parameters())


def _times(one: Tensor, other: Tensor) -> str | None:
    """Return the factor by which `one` is a multiple of `other`, formatted; None if it is not a multiple."""
    import torch

    if one.shape != other.shape:
        return None
    factor = (one * other).sum() / (other * other).sum()
    return pretty(round(factor.item(), 4)) if torch.allclose(one, factor * other, rtol=1e-4) else None


def _not_the_loss(returned: Any, loss: Tensor) -> str | None:
    from torch import is_tensor

    value = returned.item() if is_tensor(returned) and returned.numel() == 1 else returned
    if not isinstance(value, Real) or too_large(value):
        missing = missing_return(returned)
        return f"the gradients are right, but your function returns {returned!r} in place of the loss{missing}"
    if value != loss.item():
        return f"the gradients are right, but your function returns {pretty(value)}; the loss is {pretty(loss.item())}"
    return None


class Deadlock(Exception):
    """The learner's stage waits for a gradient before it has sent its output."""


@dataclass
class Neighbors:
    """The ranks before and after a middle stage.

    gradient: what the next rank sends back.
    sent: the tensors that it has received.
    runs: the inputs with which the stage ran.
    """

    gradient: Tensor
    sent: list[Tensor] = field(default_factory=list)
    runs: list[Tensor] = field(default_factory=list)

    def send_forward(self, tensor: Tensor) -> None:
        self.sent.append(tensor.detach().clone())

    def recv_backward(self) -> Tensor:
        if not self.sent:
            raise Deadlock
        return self.gradient.clone()


def _not_a_middle_stage(function: Any) -> str | None:
    import torch
    from torch.nn import Linear, Sequential, Tanh

    require_function(function, "stage", "activation", "send_forward", "recv_backward")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stage = Sequential(Linear(6, 4), Tanh()).double()
        inputs, gradients = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    uncut = deepcopy(stage)
    for case, activation, gradient in zip(("", "with a second microbatch"), inputs, gradients, strict=True):
        right = activation.clone().requires_grad_()
        output = uncut(right)
        output.backward(gradient)
        around = Neighbors(gradient)
        hook = stage.register_forward_pre_hook(lambda _, given, runs=around.runs: runs.append(given[0]))
        try:
            with own_line(function, case):
                returned = _middle(function, stage, activation.clone(), around)
        finally:
            hook.remove()
        fault = (
            returned
            if isinstance(returned, str)
            else _not_sent(around, output) or _wrong_in_the_middle(stage, uncut, returned, right, gradient)
        )
        if fault:
            return f"{case} {fault}".lstrip()
    return None


def _middle(function: Any, stage: Module, activation: Tensor, around: Neighbors) -> Any:
    """Run the learner's function; return its result, or what is wrong if it stops early."""
    try:
        returned = function(stage, activation, around.send_forward, around.recv_backward)
    except Deadlock:
        return (
            "your stage waits for a gradient before it has sent its output. The next rank has nothing to compute that "
            "gradient from, so both wait forever: a deadlock"
        )
    except RuntimeError as error:
        if "implicitly created" not in str(error):
            raise
        return (
            "backward() is called on an activation without a gradient, or with None. Only a loss, a single number, "
            "can do without one"
        )
    return returned if not isinstance(returned, str) else None


def _not_sent(around: Neighbors, output: Tensor) -> str | None:
    from torch import equal

    if len(around.runs) != 1:
        return f"the stage {f'runs {len(around.runs)} times' if around.runs else 'never runs'}; run it once"
    if not around.sent:
        return "the next rank never receives anything; send it the stage's output"
    if len(around.sent) > 1:
        return f"the next rank receives {len(around.sent)} tensors; send it one, the stage's output"
    if around.sent[0].shape != output.shape or not equal(around.sent[0], output):
        return "the next rank receives a tensor other than the stage's output"
    return None


def _wrong_in_the_middle(stage: Module, uncut: Module, returned: Any, right: Tensor, gradient: Tensor) -> str | None:
    from torch import equal, is_tensor

    if _none(stage):
        return "the stage's weights have no gradients: no backward ran from the stage's output"
    mine, others = (_gradients(each) for each in (stage, uncut))
    if not equal(mine, others):
        times = _times(mine, others)
        fault = "the gradients of the stage's weights differ from those of the uncut model"
        if times:
            return f"{fault}: they are {times} times as large. Run one backward, from the stage's output"
        return f"{fault}. Start the backward from the gradient that came back, and let it add to the existing .grad"
    if returned is None:
        return (
            "the weights have their gradients, but your function returns None. If you return activation.grad, it is "
            "None because the activation was not a leaf that requires grad when the stage ran"
        )
    if not is_tensor(returned):
        return f"your function returns {returned!r}; return the tensor that goes back to the previous rank"
    if returned.shape == gradient.shape and equal(returned, gradient):
        return (
            "you return the gradient of your own output. The previous rank sent you your input, so it needs the "
            "gradient of that"
        )
    if right.grad is None or returned.shape != right.shape or not equal(returned, right.grad):
        return "the weights have their gradients, but you return a tensor other than the gradient of the activation"
    return None


EXERCISES = {
    "02.1": Exercise(
        _not_a_hand_off,
        "All gradients equal those of the uncut model, bit for bit.",
        hints=(
            "For the second half, the activation is an input like any other. Of the three tools, which one makes "
            "backward keep a gradient for it?",
            "When loss.backward() is done, received.grad is what the first half lacks. Which tensor on rank 0 did it "
            "belong to, before the cut?",
            "Make received a leaf: sent.detach().requires_grad_(). Then start a backward from sent.",
        ),
    ),
    "02.2": Exercise(
        _not_a_middle_stage,
        "This stage could stand anywhere in a pipeline: it needs to know nothing about the ranks before and after it.",
        hints=(
            "A middle stage is the second half toward the previous rank, and the first half toward the next one. You "
            "have written both.",
            "In order: make the activation a leaf, run the stage, send, receive, run the backward from the stage's "
            "output, and return the leaf's gradient.",
        ),
    ),
    "02.3": parts.exercise(
        "02.3",
        "This is every message that a pipeline needs. Rank 1 is the middle stage of exercise 02.2, now in a process "
        "of its own.",
        hints=(
            "`receive` needs a tensor to receive into: `torch.empty(shape)`. Then `dist.recv(tensor, peer)` waits and"
            " fills it.",
            "`forward` and `backward` are the two halves of your stage in the middle: what came before its "
            "`send_forward`, and what came after its `recv_backward`.",
            "A loss needs no gradient to start from. `y.backward(None)` is the same as `y.backward()`, so one line is"
            " enough for every rank.",
        ),
    ),
}
