"""Lesson 2: the hand-off between the two halves of a model, and the stage in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from ppedu.core import SettingError
from ppedu.core.numeric import pretty
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import Exercise, missing_return, multiple_of, own_line, require_function, too_large

if TYPE_CHECKING:  # the package must import without torch
    from torch import Tensor
    from torch.nn import Module

NO_START = (
    "backward() is called on an activation without a gradient, or with None. Only a loss, a single number, can do "
    "without one"
)


@dataclass
class Observed:
    """The tensors that passed through the two halves while the learner's function ran."""

    sent: list[Tensor] = field(default_factory=list)  # outputs of the first half
    received: list[Tensor] = field(default_factory=list)  # inputs of the second half
    tracked: bool = False  # did the received activation require grad when the second half ran?
    gradients: list[Tensor] = field(default_factory=list)  # that reached the first half's output
    loss: Any = None  # the function's return value
    error: RuntimeError | None = None  # raised by autograd


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
        whole = deepcopy((first, second))
        for x, target in microbatches:
            activation = whole[0](x)
            activation.retain_grad()
            loss = loss_fn(whole[1](activation), target)
            loss.backward()
            with own_line(function, case):
                seen = _watched(function, first, second, x, target, loss_fn)
            fault = (
                _not_cut(seen)
                or _unlike_the_uncut(
                    (second, whole[1]),
                    "the second half's gradients",
                    missing="the second half's weights have no gradients; loss.backward() computes them",
                )
                or _not_back_to_the_first(seen, activation.grad)
                or _unlike_the_uncut(
                    (first, whole[0]),
                    "the first half's gradients",
                    missing="the first half's gradients differ from those of the uncut model: some are missing",
                )
            )
            if seen.error and (fault is None or not (seen.sent or seen.received)):
                with own_line(function, case):
                    raise seen.error
            if fault := fault or _not_the_loss(seen.loss, loss.detach()):
                return f"{case} {fault}".lstrip()
    return None


def _watched(function: Any, first: Module, second: Module, *given: Any) -> Observed:
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

    try:
        with first.register_forward_hook(after_first), second.register_forward_pre_hook(before_second):
            seen.loss = function(first, second, *given)
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # such as RecursionError
            raise
        seen.error = error
    return seen


def _runs(runs: Sequence[Any]) -> str:
    return f"runs {len(runs)} times" if runs else "never runs"


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
            return f"the {half} half {_runs(runs)}; run each half once"
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


def _not_back_to_the_first(seen: Observed, right: Tensor) -> str | None:
    """Explain what is wrong with the gradient that reached the first half's output; return None if it is right."""
    import torch

    if not seen.gradients:
        return _why_no_gradient(seen, right)
    gradient = torch.stack(seen.gradients).sum(0)
    if torch.equal(gradient, right):
        return None
    if torch.equal(gradient, seen.sent[0]):
        return "the first half gets the activation itself instead of the activation's gradient"
    if torch.allclose(gradient, gradient.flatten()[0]):
        return (
            "the first half gets the same gradient everywhere, as with sum() or mean(). It needs to know how the loss "
            "changes with each number that it sent: that is the gradient of the received activation"
        )
    if times := multiple_of(gradient, right):
        return f"the first half gets {times} times the gradient of the received activation; send it back as it is"
    return "the first half gets a tensor other than the gradient of the received activation"


def _why_no_gradient(seen: Observed, right: Tensor) -> str | None:
    """Explain why no gradient reached the first half's output."""
    (sent,), (received,) = seen.sent, seen.received
    message = str(seen.error)
    if "implicitly created" in message:
        return f"{NO_START}; pass it the gradient of the received activation"
    if "does not require grad" in message:
        return "backward() is called on a copy without history; call it on the output of first(x)"
    if "Mismatch in shape" in message:
        return (
            f"the gradient passed to backward() does not have the shape of the activation, {tuple(sent.shape)}: it "
            "belongs to a different tensor. Send back the gradient of the received activation"
        )
    if seen.error:
        return None
    if received.grad is not None and multiple_of(received.grad, right) == "2":
        return (
            "backward() is called on the received copy. That copy has no history, so its gradient is only added to "
            "itself; call it on the output of first(x)"
        )
    return (
        "the first half's weights have no gradients. The received activation now has one: use it to start a backward "
        "from the output of first(x)"
    )


def _unlike_the_uncut(
    modules: tuple[Module, Module],
    gradients: str,
    missing: str,
    scaled: str = "Use the loss as loss_fn returns it",
    otherwise: str = "Take the loss from loss_fn, and let backward() add to the existing .grad",
) -> str | None:
    """Explain how a module's gradients differ from those of the uncut model; return None if they are equal.

    Args:
        modules: the learner's module, and that of the uncut model.
        gradients: whose gradients these are, as words for a sentence.
        missing: the fault if weights have no gradient.
        scaled: the advice if the gradients are a multiple of the right ones; otherwise: in all other cases.
    """
    from torch import equal

    mine, right = map(_gradients, modules)
    if mine is None or right is None:
        return missing
    if equal(mine, right):
        return None
    fault = f"{gradients} differ from those of the uncut model"
    times = multiple_of(mine, right)
    return f"{fault}: they are {times} times as large. {scaled}" if times else f"{fault}. {otherwise}"


def _gradients(module: Module) -> Tensor | None:
    """Return the gradients of all weights, concatenated; None if some are missing."""
    from torch import cat

    found = [weight.grad.flatten() for weight in module.parameters() if weight.grad is not None]
    return cat(found) if len(found) == len(list(module.parameters())) else None


def _not_the_loss(returned: Any, loss: Tensor) -> str | None:
    from torch import is_tensor

    value = returned.item() if is_tensor(returned) and returned.numel() == 1 else returned
    if not isinstance(value, Real) or too_large(value):
        missing = missing_return(returned)
        return f"the gradients are right, but your function returns {returned!r} in place of the loss{missing}"
    if value != loss.item():
        return f"the gradients are right, but your function returns {pretty(value)}; the loss is {pretty(loss.item())}"
    return None


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
        runs: list[Any] = []
        sent: list[Tensor] = []
        try:
            with (
                stage.register_forward_pre_hook(lambda *given, runs=runs: runs.append(given)),
                own_line(function, case),
            ):
                returned = _middle(function, stage, activation.clone(), sent, gradient)
        except SettingError as error:
            if not (fault := _why_it_stopped(error.__context__)):
                raise
        else:
            fault = (
                _not_sent(runs, sent, output)
                or _unlike_the_uncut(
                    (stage, uncut),
                    "the gradients of the stage's weights",
                    "the stage's weights have no gradients: no backward ran from the stage's output",
                    "Run one backward, from the stage's output",
                    "Start the backward from the gradient that came back, and let it add to the existing .grad",
                )
                or _not_the_input_gradient(returned, right.grad, gradient)
            )
        if fault:
            return f"{case} {fault}".lstrip()
    return None


class Deadlock(Exception):
    """The learner's stage waits for a gradient before it has sent its output."""


def _middle(function: Any, stage: Module, activation: Tensor, sent: list[Tensor], gradient: Tensor) -> Any:
    """Run the learner's function between two ranks, of which the next one receives `sent` and sends `gradient`."""

    def send_forward(tensor: Tensor) -> None:
        sent.append(tensor.detach().clone())

    def recv_backward() -> Tensor:
        if not sent:
            raise Deadlock
        return gradient.clone()

    return function(stage, activation, send_forward, recv_backward)


def _why_it_stopped(error: BaseException | None) -> str | None:
    """Explain an error of the learner's function that its message does not explain; None for any other."""
    if isinstance(error, Deadlock):
        return (
            "your stage waits for a gradient before it has sent its output. The next rank has nothing to compute that "
            "gradient from, so both wait forever: a deadlock"
        )
    return NO_START if "implicitly created" in str(error) else None


def _not_sent(runs: list[Any], sent: list[Tensor], output: Tensor) -> str | None:
    from torch import equal

    if len(runs) != 1:
        return f"the stage {_runs(runs)}; run it once"
    if not sent:
        return "the next rank never receives anything; send it the stage's output"
    if len(sent) > 1:
        return f"the next rank receives {len(sent)} tensors; send it one, the stage's output"
    if not equal(sent[0], output):
        return "the next rank receives a tensor other than the stage's output"
    return None


def _not_the_input_gradient(returned: Any, right: Tensor | None, gradient: Tensor) -> str | None:
    """Explain what is wrong with the tensor that the learner's stage sends back; return None if it is `right`.

    Args:
        gradient: what the next rank has sent.
    """
    from torch import equal, is_tensor

    if returned is None:
        return (
            "the weights have their gradients, but your function returns None. If you return activation.grad, it is "
            "None because the activation was not a leaf that requires grad when the stage ran"
        )
    if not is_tensor(returned):
        return f"your function returns {returned!r}; return the tensor that goes back to the previous rank"
    if equal(returned, gradient):
        return (
            "you return the gradient of your own output. The previous rank sent you your input, so it needs the "
            "gradient of that"
        )
    if right is None or not equal(returned, right):
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
