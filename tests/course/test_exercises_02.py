"""Lesson 2: any working hand-off or middle stage is accepted, and a wrong one is rejected with the reason."""

import subprocess
import sys

import pytest
import torch
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401
from torch.nn.functional import mse_loss

from ppedu.course.exercises import find_fault

RIGHT = {}
WRONG = {}


def written(
    hand_on=lambda sent: sent.detach().requires_grad_(),
    go_back=lambda sent, received: sent.backward(received.grad),
    loss_of=lambda loss: loss,
    answer=lambda loss: loss,
):
    """Return a hand-off that is composed of these steps."""

    def hand_off(first, second, x, target, loss_fn):
        sent = first(x)
        received = hand_on(sent)
        loss = loss_of(loss_fn(second(received), target))
        loss.backward()
        go_back(sent, received)
        return answer(loss)

    return hand_off


right = written()

RIGHT["02.1"] = {
    "as in the lesson": right,
    "copied": written(hand_on=lambda sent: sent.detach().clone().requires_grad_()),
    "through a list": written(lambda sent: torch.tensor(sent.tolist(), dtype=sent.dtype, requires_grad=True)),
    "by a surrogate": written(go_back=lambda sent, received: (sent * received.grad).sum().backward()),
    "a number": written(answer=lambda loss: loss.item()),
}


def test_a_reason_that_ends_with_code_in_brackets_gets_a_full_stop(told):
    copy = written(go_back=lambda sent, received: sent.detach().backward(received.grad))
    assert told("02.1", copy).endswith("call it on the output of first(x).")


def uncut(first, second, x, target, loss_fn):
    loss = loss_fn(second(first(x)), target)
    loss.backward()
    return loss


def without_loss_backward(first, second, x, target, loss_fn):
    return loss_fn(second(first(x).detach().requires_grad_()), target)


def too_late(first, second, x, target, loss_fn):
    sent = first(x)
    received = sent.detach()
    loss = loss_fn(second(received), target)
    received.requires_grad_()
    loss.backward()
    sent.backward(received.grad)
    return loss


def without_a_graph(first, second, x, target, loss_fn):
    with torch.no_grad():
        return right(first, second, x, target, loss_fn)


def copy_kept(first, second, x, target, loss_fn):
    return right(lambda x: first(x).detach(), second, x, target, loss_fn)


def forgets_before(first, second, x, target, loss_fn):
    first.zero_grad()
    return right(first, second, x, target, loss_fn)


def half_the_loss(first, second, x, target, loss_fn):
    return right(first, second, x, target, lambda y, t: loss_fn(y, t) / 2)


WRONG["02.1"] = {
    "not cut": (uncut, "second half's input still has its history, TanhBackward0"),
    "cut too late": (written(lambda sent: sent.clone(), lambda *both: None), "still has its history, CloneBackward0"),
    "requires no grad": (
        written(hand_on=lambda sent: sent.detach()),
        "does not require grad when the second half runs",
    ),
    "requires grad too late": (
        too_late,
        "does not require grad when the second half runs, so its .grad stays None, and there",
    ),
    "other numbers": (
        written(hand_on=lambda sent: torch.zeros_like(sent).requires_grad_()),
        "does not receive the output of the first half",
    ),
    "detached in place": (
        written(lambda sent: sent.detach_().requires_grad_()),
        "Run it outside no_grad(), and keep its output along with the copy;",
    ),
    "no_grad": (without_a_graph, "Run it outside no_grad(), and keep its output along with the copy;"),
    "no loss.backward()": (without_loss_backward, "second half's weights have no gradients; loss.backward() computes"),
    "half the loss": (
        half_the_loss,
        "second half's gradients differ from those of the uncut model: they are 0.5 times as large. Use",
    ),
    "never back": (written(go_back=lambda *both: None), "first half's weights have no gradients. The received"),
    "no gradient": (written(go_back=lambda sent, received: sent.backward()), "on an activation without a gradient"),
    "backward on the received": (
        written(go_back=lambda sent, received: received.backward(received.grad)),
        "called on the received copy. That copy has no history, so its",
    ),
    "backward on a copy": (
        written(go_back=lambda sent, received: sent.detach().backward(received.grad)),
        "called on a copy without history; call it on the output of first(x)",
    ),
    "only a copy kept": (copy_kept, "called on a copy without history"),
    "sum": (written(go_back=lambda sent, received: sent.sum().backward()), "the same gradient everywhere"),
    "mean": (written(go_back=lambda sent, received: sent.mean().backward()), "the same gradient everywhere"),
    "the activation": (
        written(go_back=lambda sent, received: sent.backward(received)),
        "gets the activation itself instead of the activation's gradient",
    ),
    "another shape": (
        written(go_back=lambda sent, received: sent.backward(received.grad[:, :1])),
        "does not have the shape of the activation, (16, 32): it belongs",
    ),
    "another tensor": (
        written(go_back=lambda sent, received: sent.backward(received.grad.flip(0))),
        "a tensor other than the gradient of the received activation",
    ),
    "mean over the samples": (
        written(go_back=lambda sent, received: sent.backward(received.grad / len(sent))),
        "gets 0.0625 times the gradient of the",
    ),
    "twice": (
        written(go_back=lambda sent, received: [sent.backward(received.grad, retain_graph=True) for _ in range(2)]),
        "gets 2 times the gradient of the",
    ),
    "zeroes .grad": (forgets_before, "two microbatches in turn, the first half's gradients differ from those of the"),
    "its own loss": (
        lambda first, second, x, target, loss_fn: right(first, second, x, target, mse_loss),
        "different loss and two microbatches in turn, the second half's gradients differ from those of the",
    ),
    "forgets return": (written(answer=lambda loss: None), "returns None in place of the loss; is a return missing?"),
    "another return": (written(answer=lambda loss: -loss), "the gradients are right, but your function returns -"),
    "does nothing": (lambda first, second, x, target, loss_fn: None, "runs neither half and returns None;"),
    "runs twice": (lambda *given: [right(*given), right(*given)][0], "the first half runs 2 times"),
}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("raise RuntimeError('something else')", "RuntimeError: something else"),
        ("raise NotImplementedError", "NotImplementedError"),
        ("recieved.grad", "NameError: name 'recieved' is not defined"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_unrelated_error_is_reported_with_its_line(error, reason, when):
    def broken(first, second, x, target, loss_fn):
        if when == "after":
            right(first, second, x, target, loss_fn)
        exec(error)

    line = broken.__code__.co_firstlineno + 3
    assert find_fault("02.1", broken) == f"your function fails at line {line}, `exec(error)`: {reason}"


def test_an_error_with_the_second_model_names_that_case():
    seen = []

    def broken(first, second, x, target, loss_fn):
        seen.append(x)
        return right(first, second, x, target, loss_fn) if len(seen) == 1 else 1 // 0

    reason = "with deeper halves, a different loss and two microbatches in turn, your function fails at line"
    assert find_fault("02.1", broken).startswith(reason)


# Exercise 2: the stage in the middle


def middle(
    leaf=lambda activation: activation.requires_grad_(),
    go_back=lambda y, dy: y.backward(dy),
    answer=lambda x, dy: x.grad,
    sends=lambda y: y,
):
    """Return a middle stage that is composed of these steps."""

    def write(stage, activation, send_forward, recv_backward):
        x = leaf(activation)
        y = stage(x)
        send_forward(sends(y))
        dy = recv_backward()
        go_back(y, dy)
        return answer(x, dy)

    return write


def too_early(stage, activation, send_forward, recv_backward):
    x = activation.requires_grad_()
    dy = recv_backward()
    y = stage(x)
    send_forward(y)
    y.backward(dy)
    return x.grad


def nothing_sent(stage, activation, send_forward, recv_backward):
    y = stage(activation.requires_grad_())
    y.backward(torch.ones_like(y))
    return activation.grad


def sent_twice(stage, activation, send_forward, recv_backward):
    send_forward(activation)
    return middle()(stage, activation, send_forward, recv_backward)


def run_twice(stage, activation, send_forward, recv_backward):
    stage(activation)
    return middle()(stage, activation, send_forward, recv_backward)


def with_zero_grad(stage, activation, send_forward, recv_backward):
    stage.zero_grad()
    return middle()(stage, activation, send_forward, recv_backward)


RIGHT["02.2"] = [
    middle(),
    middle(lambda a: a.detach().clone().requires_grad_()),
    middle(sends=lambda y: y.detach()),
]


WRONG["02.2"] = {
    "receives first": (too_early, "waits for a gradient before it has sent its output"),
    "sends nothing": (nothing_sent, "the next rank never receives anything"),
    "sends twice": (sent_twice, "the next rank receives 2 tensors"),
    "sends its input": (middle(sends=lambda y: y * 2), "a tensor other than the stage's output"),
    "runs twice": (run_twice, "the stage runs 2 times"),
    "never runs": (lambda stage, activation, send, receive: send(activation), "the stage never runs"),
    "no leaf": (middle(lambda a: a), "returns None. If you return activation.grad, it is None because"),
    "no backward": (middle(go_back=lambda y, dy: None), "the stage's weights have no gradients"),
    "without a gradient": (middle(go_back=lambda y, dy: y.backward()), "on an activation without a gradient, or with"),
    "of the sum": (middle(go_back=lambda y, dy: y.sum().backward()), "Start the backward from the gradient that came"),
    "twice": (
        middle(go_back=lambda y, dy: [y.backward(dy, retain_graph=True), y.backward(dy)]),
        "they are 2 times as large",
    ),
    "zeroes .grad": (with_zero_grad, "with a second microbatch the gradients of the stage's weights differ"),
    "returns dy": (middle(answer=lambda x, dy: dy), "you return the gradient of your own output"),
    "returns x": (middle(answer=lambda x, dy: x), "a tensor other than the gradient of the activation"),
    "returns a number": (middle(answer=lambda x, dy: 0), "your function returns 0; return the tensor"),
}


def test_a_typo_in_the_middle_stage_is_reported_with_its_line():
    broken = middle(answer=lambda x, dy: x.gard)
    assert ": AttributeError: 'Tensor' object has no attribute 'gard'" in find_fault("02.2", broken)


def test_the_graph_is_drawn_with_the_names_of_layers():
    from matplotlib import pyplot

    from ppedu.course.graph import draw_graph, draw_halves, draw_messages

    layer, x = torch.nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    _, ax = pyplot.subplots()
    draw_halves(ax, "cut", 2.5, 4, scissors=True)
    draw_graph(ax, mse_loss(layer(x).tanh(), x).grad_fn, {layer.weight: "weight"}, 4)
    draw_messages(ax, 2, 3)
    words = {text.get_text() for text in ax.texts}
    assert words - {""} == {"first half", "second half", "✂", "loss", "Tanh", "Linear", "weight"} | {
        "activation",
        "its gradient",
    }


def test_a_leaf_in_the_graph_is_dashed_until_it_has_a_gradient():
    from matplotlib import pyplot

    from ppedu.course.graph import draw_graph

    layer = torch.nn.Linear(2, 1, bias=False)
    loss, (_, axes) = layer(torch.ones(1, 2)).sum(), pyplot.subplots(1, 2)
    draw_graph(axes[0], loss.grad_fn, {layer.weight: "weight"}, 2)
    loss.backward()
    draw_graph(axes[1], loss.grad_fn, {layer.weight: "weight"}, 2)
    leaves = [text.get_bbox_patch() for ax in axes for text in ax.texts if text.get_text() == "weight"]
    assert [leaf.get_linestyle() for leaf in leaves] == ["--", "solid"]


def test_the_check_does_not_change_the_random_state():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    find_fault("02.1", right)
    assert torch.equal(torch.rand(3), expected)


def test_exercises_can_be_imported_without_torch():
    program = "import sys, ppedu.notebook; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
