"""Lesson 7: weighted losses, one norm, tied gradients, a diagnosis: right answers accepted, wrong ones explained."""

import pytest
import torch
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401
from torch import nn
from torch.nn.functional import cross_entropy

from ppedu.course.exercises import find_fault

RIGHT = {}
WRONG = {}


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


def diagnose(off, microbatches):
    if off["weights"] > 1e-4:
        return "same seed"
    if off["gradients"] < 1e-4:
        return "own norm" if off["after clipping"] > 1e-4 else "correct"
    if abs(off["gradients"] - (microbatches - 1)) < 1e-4:
        return "no 1/m"
    return "not added up" if off["copies at the end"] > 1e-4 else "mean of means"


RIGHT["07.4"] = [diagnose]

# The accepted answers agree with torch in one process.


def test_weighted_losses_give_the_gradients_of_the_whole_batch():
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


def used_twice(embedding, head):
    """Set both gradients to the one that autograd computes for a weight used in both places."""
    weight = nn.Parameter(embedding.detach().clone())
    ((weight * embedding.grad).sum() + (weight * head.grad).sum()).backward()
    embedding.grad, head.grad = weight.grad, weight.grad.clone()


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
    head.grad = embedding.grad.clone()


RIGHT["07.1"] = [
    weigh,
    in_place,
    lambda losses, counts: tuple(weigh(losses, torch.tensor(counts))),
    lambda losses, counts: (torch.stack(losses) * torch.tensor(counts) / sum(counts)).unbind(),
]
RIGHT["07.2"] = {"as in the lesson": clip, "torch's, over all weights": with_torch, "new tensors": new_tensors}
RIGHT["07.3"] = {"as in the lesson": add_up, "one weight, used twice": used_twice, "in turn": one_after_the_other}


def each(part):
    return lambda losses, counts: [loss * part(n, counts) for loss, n in zip(losses, counts, strict=True)]


WEIGHED = {
    "nothing": (
        lambda losses, counts: losses,
        "with 2 microbatches of 6 and 2 tokens, your losses have the weights 1 and 1. You leave the losses unchanged.",
    ),
    "mean of means": (each(lambda n, ns: 1 / len(ns)), "That is the mean of the microbatches' means"),
    "sum": (
        each(lambda n, ns: n),
        "weights 6 and 2. That is the sum over all tokens. For the mean, divide by the number of tokens in the",
    ),
    "by all tokens": (each(lambda n, ns: 1 / sum(ns)), "Each loss is a mean; turn it into a sum first"),
    "by its tokens": (
        each(lambda n, ns: 1 / n),
        "divided by its own number of tokens. What fraction of all tokens does it have?",
    ),
    "by the mean count": (
        each(lambda n, ns: n * len(ns) / sum(ns)),
        "The proportions are right, but the weights add up to the number of",
    ),
    "twice": (
        each(lambda n, ns: n / sum(ns) / len(ns)),
        "The proportions are right, but the fractions of all tokens already",
    ),
    "by the most": (each(lambda n, ns: n / max(ns)), "weights 1 and 0.3333. You divide by the largest count."),
    "right for two": (
        lambda losses, counts: weigh(losses, counts) if len(counts) == 2 else losses,
        "with 3 microbatches of 4, 4 and 4 tokens, your losses have the weights 1, 1 and 1. In the batch's mean, "
        "every token counts the same,",
    ),
    "one number": (lambda losses, counts: sum(weigh(losses, counts)), "return a list with one loss per microbatch:"),
    "no return": (lambda losses, counts: None, "Your function returns None; is a return missing?"),
    "too few": (lambda losses, counts: weigh(losses, counts)[1:], "return a list with one loss per microbatch:"),
    "item": (lambda losses, counts: weigh([loss.item() for loss in losses], counts), "no history, so backward() finds"),
    "detach": (lambda losses, counts: weigh([loss.detach() for loss in losses], counts), "no history"),
    "sums": (
        lambda losses, counts: [sum(weigh(losses, counts))] * len(losses),
        "for microbatch 0 also contains microbatch 1's loss. In 1F1B the first microbatches go backward "
        "before the last",
    ),
    "nothing left": (each(lambda n, ns: 0), "weights 0 and 0. They contribute nothing to the gradients"),
}


def test_wrong_weights_of_losses_are_rejected_with_the_reason():
    for answer, reason in WEIGHED.values():
        fault = find_fault("07.1", answer)
        assert reason in fault and "0.75 and" not in fault, "the right weights are for the learner to find"


def by(factors):
    """Return an answer that scales each stage by `factors(norms of the stages, limit)`."""

    def clipped(stages, most):
        norms = [torch.cat([gradient.flatten() for gradient in gradients]).norm() for gradients in stages]
        scale(stages, factors(torch.stack(norms), most))

    return clipped


def tensor_norms(stages, most):
    norm = sum(gradient.norm() for gradients in stages for gradient in gradients)
    for gradients in stages:
        for gradient in gradients:
            gradient.mul_(min(1, most / norm))


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


WRONG["07.2"] = {
    "nothing": (
        lambda stages, most: None,
        "the norm of all is 9. The limit is 3, so the gradients should be multiplied by 0.3333;",
    ),
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
        "by 1, 0.75, 0.6 and 0.5. Each stage is scaled by its own norm:",
    ),
    "sum of all tensors' norms": (tensor_norms, "You add up the norms of all tensors. As with the sides of"),
    "sum of norms": (
        all_by(lambda norms, most: min(1, most / norms.sum())),
        "all is 9. The limit is 3, so the gradients should be multiplied by 0.3333; you multiply them by "
        "0.1765, 0.1765, 0.1765 and 0.1765. You add up the norms. As with the sides of a right triangle, you "
        "have to add up their squares",
    ),
    "no root": (all_by(lambda norms, most: min(1, most / norms.square().sum())), "the norm is its square root"),
    "largest": (all_by(lambda norms, most: min(1, most / norms.max())), "the other stages add to it"),
    "always": (
        all_by(lambda norms, most: most / norms.norm()),
        "with 3 stages whose gradients have the norms 0.2, 0.4 and 0.4, the norm of all is 0.6. The limit is "
        "1, so the gradients should be multiplied by 1; you multiply them by 1.667, 1.667 and 1.667. "
        "Clipping never makes gradients larger;",
    ),
    "mean": (
        all_by(lambda norms, most: min(1, most / norms.mean())),
        "multiply them by 0.7059, 0.7059, 0.7059 and 0.7059. You use the mean of the norms.",
    ),
    "each tensor": (each_tensor, "the gradients of stage 1 point in a different direction than before; multiply all"),
    "each number": (clamped, "point in a different direction than before; multiply all of them by the same number"),
}


def giving(one, other):
    """Return an answer that sets the copies' gradients to `one` and `other` of the two original gradients."""

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


def the_same_tensor(embedding, head):
    embedding.grad += head.grad
    head.grad = embedding.grad


def a_view(embedding, head):
    total = embedding.grad + head.grad
    embedding.grad, head.grad = total, total.view_as(total)


def weights_averaged(embedding, head):
    with torch.no_grad():
        embedding.copy_((embedding + head) / 2 + 1)


def forgotten(embedding, head):
    embedding.grad = embedding.grad + head.grad
    head.grad = None


WRONG["07.3"] = {
    "nothing": (
        lambda embedding, head: None,
        "plus 0 times the head's, and the head has 1 times its own plus 0 times the embedding's. Each",
    ),
    "both add": (
        both_add,
        "has 2 times its own plus 1 times the embedding's. One gradient had already changed when it was added to "
        "the other.",
    ),
    "another name": (
        another_name,
        "the other. A second name for a tensor, as in t = embedding.grad, is not a copy of it",
    ),
    "head first": (head_first, "One gradient had already changed when it was added to the other."),
    "embedding alone": (giving(lambda e, h: e + h, lambda e, h: h), "Only the embedding has the sum"),
    "head alone": (giving(lambda e, h: e, lambda e, h: e + h), "Only the head has the sum"),
    "swapped": (giving(lambda e, h: h, lambda e, h: e), "The gradients are swapped, so the copies drift"),
    "mean": (giving(lambda e, h: (e + h) / 2, lambda e, h: (e + h) / 2), "That is the mean. The copies stay equal"),
    "difference": (
        giving(lambda e, h: e - h, lambda e, h: e - h),
        "has 1 times its own gradient plus -1 times the head's, and the",
    ),
    "product": (
        giving(lambda e, h: e * h, lambda e, h: e * h),
        "the embedding's .grad should be the sum of the two gradients, but is",
    ),
    "the same tensor": (
        the_same_tensor,
        "both have the right sum, but as one tensor under two names. The next function",
    ),
    "a view": (a_view, "would then scale it twice. Give each copy a tensor of its own, with clone()"),
    "forgotten": (forgotten, "the head's .grad is None at the end"),
    "the weights": (
        weights_averaged,
        "the embedding's values have changed. Changing weights is the optimizer's job; change",
    ),
}


WRONG["07.4"] = {
    "always correct": (
        lambda off, m: "correct",
        "with 4 microbatches, off by: weights 0, gradients 3, after clipping 2e-07, copies at the end 0, your function "
        "says 'correct'. It is 'no 1/m'; with 'correct', nothing is off by more than rounding: a few millionths.",
    ),
    "no rounding": (
        lambda off, m: diagnose(off, m) if any(number > 1e-4 for number in off.values()) else "mean of means",
        "It is 'correct'; with 'mean of means', the weights start right, the copies stay together, and the gradients",
    ),
    "compared with 0": (
        lambda off, m: "own norm" if off["gradients"] < 1e-4 and off["after clipping"] > 0 else diagnose(off, m),
        "says 'own norm'. It is 'correct'. 3e-07 is 0 up to rounding: compare with a small threshold, such as 1e-4.",
    ),
    "compared with m - 1": (
        lambda off, m: (
            "mean of means" if diagnose(off, m) == "no 1/m" and off["gradients"] != m - 1 else diagnose(off, m)
        ),
        "7.0000004 is 7 up to rounding: compare with a small threshold",
    ),
    "one m only": (
        lambda off, m: diagnose(off, 4),
        "with 8 microbatches, off by: weights 0, gradients 7, after clipping 1e-06, copies at the end 0, your function "
        "says 'mean of means'. It is 'no 1/m';",
    ),
    "hidden by clipping": (
        lambda off, m: (
            "mean of means" if diagnose(off, m) == "no 1/m" and off["after clipping"] > 1e-4 else diagnose(off, m)
        ),
        "with 32 microbatches, off by: weights 0, gradients 31, after clipping 31,",
    ),
    "copies first": (
        lambda off, m: "not added up" if off["copies at the end"] > 1e-4 else diagnose(off, m),
        "It is 'own norm'; with 'not added up', the gradients are off before clipping, and the copies drift apart.",
    ),
    "another name": (lambda off, m: "tied", "returns 'tied'; the names are 'correct', 'no 1/m', 'mean of means',"),
    "no return": (lambda off, m: None, "returns None; is a return missing?; the names are"),
}


@pytest.mark.parametrize(
    ("exercise", "case"),
    [("07.1", "with 2 microbatches of 6 and 2 tokens"), ("07.2", "the norms 2, 4, 5 and 6"), ("07.3", "the backwards")],
)
def test_an_error_in_the_learners_code_is_reported_with_its_line(exercise, case):
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
    "no stages": (
        "07.2",
        lambda stages, most: stages.clear(),
        "no longer hold the same gradients as before; scale them in",
    ),
    "no gradients": (
        "07.2",
        lambda stages, most: stages[0].clear(),
        "no longer hold the same gradients as before; scale them in",
    ),
    "another shape": ("07.2", lambda stages, most: stages[0][0].resize_(1), "no longer hold"),
    "no stage's": ("07.2", lambda stages, most: stages.__setitem__(0, "stage 0"), "no longer hold"),
    "nan": (
        "07.3",
        lambda *both: [weight.grad.mul_(torch.nan) for weight in both],
        "the sum of the two gradients, but is",
    ),
    "sparse": (
        "07.3",
        lambda *both: [setattr(each, "grad", each.grad.to_sparse()) for each in both],
        "1 times its own",
    ),
}


@pytest.mark.parametrize(("exercise", "answer", "reason"), LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_unusual_gradients_after_the_answer_are_judged_in_a_sentence(exercise, answer, reason):
    assert reason in find_fault(exercise, answer)
