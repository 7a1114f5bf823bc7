"""Lesson 7: losses, norms and tied gradients are right however they are written; what is wrong is refused, and why."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ppedu.notebook.exercises import find_fault


def weigh(losses, counts):
    return [loss * count / sum(counts) for loss, count in zip(losses, counts, strict=True)]


def clip(stages, most):
    norm = sum(gradient.square().sum() for gradients in stages for gradient in gradients).sqrt()
    scale(stages, [min(1, most / norm)] * len(stages))


def scale(stages, factors):
    for gradients, factor in zip(stages, factors, strict=True):
        for gradient in gradients:
            gradient.mul_(factor)


def add_up(embedding, head):
    total = embedding.grad + head.grad
    embedding.grad, head.grad = total, total.clone()


@pytest.mark.parametrize(
    ("exercise", "answer", "praise"),
    [("07.1", weigh, "part of all tokens"), ("07.2", clip, "One factor for all"), ("07.3", add_up, "the same step")],
)
def test_the_right_answer_is_praised(told, exercise, answer, praise):
    said = told(exercise, answer)
    assert said.startswith("Right. ") and praise in said


# What is called right is what torch does in one process.


def test_weighed_losses_have_the_gradients_of_the_whole_batch():
    torch.manual_seed(0)
    model, x, target = nn.Linear(5, 7).double(), torch.randn(16, 5).double(), torch.randint(7, (16,))
    target[3:8] = -100
    cross_entropy(model(x), target).backward()
    whole = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    pieces = list(zip(x.chunk(4), target.chunk(4), strict=True))
    losses = [cross_entropy(model(some), wanted) for some, wanted in pieces]
    for loss in weigh(losses, [int((wanted >= 0).sum()) for _, wanted in pieces]):
        loss.backward()
    for weight, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def with_torch(stages, most):
    weights = []
    for gradients in stages:
        for gradient in gradients:
            weights.append(nn.Parameter(torch.zeros_like(gradient)))
            weights[-1].grad = gradient
    nn.utils.clip_grad_norm_(weights, most)


def test_torchs_own_clipping_of_all_weights_is_right():
    assert find_fault("07.2", with_torch) is None


def used_twice(embedding, head):
    """What autograd gives a weight that is used in both places."""
    weight = nn.Parameter(embedding.detach().clone())
    ((weight * embedding.grad).sum() + (weight * head.grad).sum()).backward()
    embedding.grad, head.grad = weight.grad, weight.grad.clone()


def test_what_autograd_gives_one_weight_used_twice_is_right():
    assert find_fault("07.3", used_twice) is None


# Other ways to write it


def in_place(losses, counts):
    for m, count in enumerate(counts):
        losses[m] *= count / sum(counts)
    return losses


def new_tensors(stages, most):
    norm = max(most, torch.cat([gradient.flatten() for gradients in stages for gradient in gradients]).norm())
    for gradients in stages:
        gradients[:] = [gradient * most / norm for gradient in gradients]


def one_after_the_other(embedding, head):
    embedding.grad += head.grad
    head.grad = embedding.grad


RIGHT = [
    ("07.1", in_place),
    ("07.1", lambda losses, counts: tuple(weigh(losses, torch.tensor(counts)))),
    ("07.1", lambda losses, counts: (torch.stack(losses) * torch.tensor(counts) / sum(counts)).unbind()),
    ("07.2", new_tensors),
    ("07.3", one_after_the_other),
]


@pytest.mark.parametrize(("exercise", "answer"), RIGHT)
def test_an_answer_is_right_however_it_is_written(exercise, answer):
    assert find_fault(exercise, answer) is None


def each(part):
    return lambda losses, counts: [loss * part(n, counts) for loss, n in zip(losses, counts, strict=True)]


WEIGHED = {
    "nothing": (
        lambda losses, counts: losses,
        "count 0.75 and 0.25 in the batch's mean; yours count 1 and 1. They are",
    ),
    "mean of means": (each(lambda n, ns: 1 / len(ns)), "That is the mean of the microbatches' means"),
    "sum": (each(lambda n, ns: n), "yours count 6 and 2. That is the sum over all tokens"),
    "by all tokens": (each(lambda n, ns: 1 / sum(ns)), "Each loss is a mean; make a sum of it first"),
    "by its tokens": (each(lambda n, ns: 1 / n), "divided by its own tokens already"),
    "by the mean count": (each(lambda n, ns: n * len(ns) / sum(ns)), "count as many times as there are microbatches"),
    "twice": (each(lambda n, ns: n / sum(ns) / len(ns)), "there is no 1/m to come"),
    "by the most": (each(lambda n, ns: n / max(ns)), "yours count 1 and 0.3333"),
    "right for two": (
        lambda losses, counts: weigh(losses, counts) if len(counts) == 2 else losses,
        "with 3 microbatches of 4, 4 and 4 tokens, the losses count 0.3333, 0.3333 and 0.3333 in the batch's mean",
    ),
    "one number": (lambda losses, counts: sum(weigh(losses, counts)), "give a list of as many losses"),
    "no return": (lambda losses, counts: None, "Your function gives None; is there a return?"),
    "too few": (lambda losses, counts: weigh(losses, counts)[1:], "give a list of as many losses"),
    "item": (lambda losses, counts: weigh([loss.item() for loss in losses], counts), "no history, so backward() finds"),
    "detach": (lambda losses, counts: weigh([loss.detach() for loss in losses], counts), "no history"),
    "sums": (
        lambda losses, counts: [sum(weigh(losses, counts))] * len(losses),
        "for microbatch 0 is made of microbatch 1's loss, too. In 1F1B the first microbatches go backward before",
    ),
    "nothing left": (each(lambda n, ns: 0), "yours count 0 and 0"),
    "of one": (lambda losses: losses, "give a function of losses and counts; yours takes"),
}


@pytest.mark.parametrize(("answer", "reason"), WEIGHED.values(), ids=WEIGHED)
def test_wrongly_weighed_losses_are_refused_with_the_reason(answer, reason):
    assert reason in find_fault("07.1", answer)


def by(factors):
    """Scaled by what `factors` gives for the norms of the stages and the most there may be."""

    def clipped(stages, most):
        norms = [torch.cat([gradient.flatten() for gradient in gradients]).norm() for gradients in stages]
        scale(stages, factors(torch.stack(norms), most))

    return clipped


def all_by(factor):
    return by(lambda norms, most: [factor(norms, most)] * len(norms))


def each_tensor(stages, most):
    for gradients in stages:
        for gradient in gradients:
            gradient.mul_(min(1, most / (gradient.norm() + 1e-6)))


def clamped(stages, most):
    for gradients in stages:
        for gradient in gradients:
            gradient.clamp_(-most / 4, most / 4)


CLIPPED = {
    "nothing": (lambda stages, most: None, "the norm of all is 9. It may be 3, so the gradients are to be multiplied"),
    "returned": (
        lambda stages, most: [[g / 3 for g in stage] for stage in stages],
        "change them in place, with mul_()",
    ),
    "torch's, of the gradients": (
        lambda stages, most: nn.utils.clip_grad_norm_([g for stage in stages for g in stage], most),
        "(clip_grad_norm_ takes weights and scales their .grad; these are the gradients themselves)",
    ),
    "own norm": (
        by(lambda norms, most: (most / norms).clamp(max=1)),
        "by 1, 0.75, 0.6 and 0.5. Each stage goes by its",
    ),
    "sum of norms": (all_by(lambda norms, most: min(1, most / norms.sum())), "it is their squares that add up"),
    "no root": (all_by(lambda norms, most: min(1, most / norms.square().sum())), "the norm is its root"),
    "largest": (all_by(lambda norms, most: min(1, most / norms.max())), "the other stages add to it"),
    "always": (
        all_by(lambda norms, most: most / norms.norm()),
        "with 3 stages whose gradients have the norms 0.2, 0.4 and 0.4, the norm of all is 0.6. It may be 1, so the "
        "gradients are to be multiplied by 1; yours are by 1.667, 1.667 and 1.667. Clipping never makes",
    ),
    "mean": (all_by(lambda norms, most: min(1, most / norms.mean())), "yours are by 0.7059, 0.7059, 0.7059 and 0.7059"),
    "each tensor": (each_tensor, "the gradients of stage 1 point in another direction than before"),
    "each number": (clamped, "point in another direction than before; multiply all of them by the same number"),
    "of one": (lambda stages: None, "give a function of stages and most; yours takes"),
}


@pytest.mark.parametrize(("answer", "reason"), CLIPPED.values(), ids=CLIPPED)
def test_wrong_clipping_is_refused_with_the_reason(answer, reason):
    assert reason in find_fault("07.2", answer)


def giving(one, other):
    """The copies get what these make of the embedding's gradient and the head's."""

    def given(embedding, head):
        gradients = embedding.grad, head.grad
        embedding.grad, head.grad = one(*gradients), other(*gradients)

    return given


def both_add(embedding, head):
    embedding.grad += head.grad
    head.grad += embedding.grad


def another_name(embedding, head):
    t = embedding.grad
    embedding.grad += head.grad
    head.grad += t


def head_first(embedding, head):
    both_add(head, embedding)


def weights_averaged(embedding, head):
    with torch.no_grad():
        embedding.copy_((embedding + head) / 2 + 1)


def forgotten(embedding, head):
    embedding.grad = embedding.grad + head.grad
    head.grad = None


ADDED = {
    "nothing": (
        lambda embedding, head: None,
        "and 0 times the head's, and the head has 1 times its own and 0 times the",
    ),
    "both add": (both_add, "has 2 times its own and 1 times the embedding's. The second line adds what the first one"),
    "another name": (another_name, "another name for it, as in t = embedding.grad, is no copy. Keep the sum"),
    "head first": (head_first, "The second line adds what the first one has changed"),
    "embedding alone": (giving(lambda e, h: e + h, lambda e, h: h), "Only the embedding has the sum"),
    "head alone": (giving(lambda e, h: e, lambda e, h: e + h), "Only the head has the sum"),
    "swapped": (giving(lambda e, h: h, lambda e, h: e), "They have changed places"),
    "mean": (giving(lambda e, h: (e + h) / 2, lambda e, h: (e + h) / 2), "That is the mean. The copies stay equal"),
    "difference": (
        giving(lambda e, h: e - h, lambda e, h: e - h),
        "has 1 times its own gradient and -1 times the head's",
    ),
    "product": (
        giving(lambda e, h: e * h, lambda e, h: e * h),
        "the embedding's .grad is not made of the two gradients",
    ),
    "forgotten": (forgotten, "the head's .grad is None in the end"),
    "the weights": (weights_averaged, "the embedding's numbers have changed. To change weights is for the optimizer"),
    "of a model": (lambda model: None, "give a function of embedding and head; yours takes"),
}


@pytest.mark.parametrize(("answer", "reason"), ADDED.values(), ids=ADDED)
def test_wrongly_added_gradients_are_refused_with_the_reason(answer, reason):
    assert reason in find_fault("07.3", answer)


@pytest.mark.parametrize(
    ("exercise", "case"),
    [("07.1", "with 2 microbatches of 6 and 2 tokens"), ("07.2", "the norms 2, 4, 5 and 6"), ("07.3", "the backwards")],
)
def test_an_error_in_the_learners_own_code_is_told_with_its_line(exercise, case):
    def broken(one, other):
        return one.gard

    fault = find_fault(exercise, broken)
    assert f"{case} your function fails at line {broken.__code__.co_firstlineno + 1}, `return one.gard`: Attri" in fault


LEFT_BEHIND = {
    "a loss for each token": (
        "07.1",
        lambda losses, counts: [loss * torch.ones(2) for loss in losses],
        "has 2 numbers",
    ),
    "losses gone backward": (
        "07.1",
        lambda losses, counts: [loss.backward() or loss for loss in losses],
        "RuntimeError",
    ),
    "no stages": ("07.2", lambda stages, most: stages.clear(), "no longer hold the gradients that they held"),
    "no gradients": ("07.2", lambda stages, most: stages[0].clear(), "no longer hold the gradients that they held"),
    "another shape": ("07.2", lambda stages, most: stages[0][0].resize_(1), "no longer hold"),
    "no stage's": ("07.2", lambda stages, most: stages.__setitem__(0, "stage 0"), "no longer hold"),
    "nan": ("07.3", lambda *both: [weight.grad.mul_(torch.nan) for weight in both], "not made of the two gradients"),
    "sparse": (
        "07.3",
        lambda *both: [setattr(each, "grad", each.grad.to_sparse()) for each in both],
        "1 times its own",
    ),
}


@pytest.mark.parametrize(("exercise", "answer", "reason"), LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_what_an_answer_leaves_behind_is_judged_in_a_sentence(exercise, answer, reason):
    assert reason in find_fault(exercise, answer)
