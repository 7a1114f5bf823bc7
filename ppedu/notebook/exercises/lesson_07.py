"""Lesson 7: losses whose gradients add up to the batch's, one norm for all stages, tied weights that stay equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import hypot
from typing import TYPE_CHECKING, Any

from ppedu.core.errors import SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.notebook.exercises.common import Exercise, call, mistake, own_line, require_function

if TYPE_CHECKING:  # the other lessons do without torch
    from torch import Tensor

# Tokens in each microbatch; the lesson's own case first.
COUNTS = [(6, 2), (4, 4, 4), (5,), (1, 2, 3, 10)]

# What people let a microbatch's loss count, from its tokens and those of all microbatches, and what that is instead.
OTHER_WEIGHTS: list[tuple[Callable[[int, Sequence[int]], float], str]] = [
    (
        lambda count, counts: 1,
        "They are as they were. The gradients of all microbatches are added up, so they come out too large, and AdamW "
        "does not show it",
    ),
    (
        lambda count, counts: 1 / len(counts),
        "That is the mean of the microbatches' means. In it a token counts the more, the fewer its microbatch has",
    ),
    (
        lambda count, counts: count,
        "That is the sum over all tokens. The mean is as many times smaller as there are tokens in the batch",
    ),
    (
        lambda count, counts: 1 / sum(counts),
        "To divide by all tokens is right for a sum over tokens. Each loss is a mean; make a sum of it first",
    ),
    (
        lambda count, counts: 1 / count,
        "Each loss is a mean, so it has been divided by its own tokens already. What is its part of all tokens?",
    ),
    (
        lambda count, counts: count * len(counts) / sum(counts),
        "The proportions are right, but together they count as many times as there are microbatches, not once",
    ),
    (
        lambda count, counts: count / sum(counts) / len(counts),
        "The proportions are right, and the parts of all tokens add up to 1 already: there is no 1/m to come",
    ),
]


def _not_the_mean(function: Any) -> str | None:
    require_function(function, "losses", "counts")
    said = [_weights(function, counts) for counts in COUNTS]
    for counts, weights in zip(COUNTS, said, strict=True):
        right = [count / sum(counts) for count in counts]
        if _same(weights, right):
            continue
        fault = f"{_with(counts)}, the losses count {_each(right)} in the batch's mean; yours count {_each(weights)}"
        for other, why in OTHER_WEIGHTS:
            if all(_same(yours, [other(n, each) for n in each]) for yours, each in zip(said, COUNTS, strict=True)):
                return f"{fault}. {why}"
        return fault
    return None


def _weights(function: Any, counts: Sequence[int]) -> list[float]:
    """How much each microbatch's loss counts in what the learner's function makes of it.

    Raises:
        SettingError: it does not make losses to call backward() on, one of each microbatch's.
    """
    import torch

    leaves = [torch.tensor(2.0 + m, dtype=torch.float64, requires_grad=True) for m in range(len(counts))]
    losses = [leaf * 1 for leaf in leaves]  # with a history, as losses have
    given = call(function, _with(counts), losses, list(counts))
    if not isinstance(given, (list, tuple)) or len(given) != len(counts):
        forgotten = "; is there a return?" if given is None else ""
        raise SettingError(
            f"{_with(counts)}, give a list of as many losses: every microbatch has a backward of its own. "
            f"Your function gives {given!r}{forgotten}"
        )
    weights = []
    for m, loss in enumerate(given):
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise SettingError(
                f"what your function gives for microbatch {m} has no history, so backward() finds no weights; "
                "use the loss itself, without item() or detach()"
            )
        if loss.numel() != 1:
            raise SettingError(
                f"what your function gives for microbatch {m} has {plural(loss.numel(), 'number')}; backward() takes "
                "a loss, which is one"
            )
        with own_line(function, _with(counts)):
            found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        parts = [0.0 if gradient is None else gradient.item() for gradient in found]
        for other, part in enumerate(parts):
            if part and other != m:
                raise SettingError(
                    f"what your function gives for microbatch {m} is made of microbatch {other}'s loss, too. In 1F1B "
                    "the first microbatches go backward before the last have gone forward; only the counts are known"
                )
        weights.append(parts[m])
    return weights


def _with(counts: Sequence[int]) -> str:
    return f"with {plural(len(counts), 'microbatch')} of {_each(counts)} tokens"


# The norms of the stages' gradients, and the most that the norm of all may be; the lesson's own case first.
NORMS = [((2, 4, 5, 6), 3), ((0.2, 0.4, 0.4), 1), ((3,), 1.5), ((0.9, 0.9), 1)]

# What people multiply the stages' gradients by, from their norms and the most there may be, and what that is instead.
OTHER_FACTORS: list[tuple[Callable[[Sequence[float], float], Sequence[float]], str]] = [
    (
        lambda norms, most: [1] * len(norms),
        "They are as they were; change them in place, with mul_(). (clip_grad_norm_ takes weights and scales their "
        ".grad; these are the gradients themselves)",
    ),
    (
        lambda norms, most: [min(1, most / norm) for norm in norms],
        "Each stage goes by its own norm: large gradients shrink and small ones do not, and all of them together "
        "point in another direction than in one process",
    ),
    (
        lambda norms, most: [min(1, most / sum(norms))] * len(norms),
        "You add up the norms. But as with the sides of a right triangle, it is their squares that add up",
    ),
    (
        lambda norms, most: [min(1, most / hypot(*norms) ** 2)] * len(norms),
        "The sum of the squares is right; the norm is its root",
    ),
    (
        lambda norms, most: [min(1, most / max(norms))] * len(norms),
        "You take the largest norm for the norm of all, but the other stages add to it",
    ),
    (
        lambda norms, most: [most / hypot(*norms)] * len(norms),
        "Clipping never makes gradients larger; where the norm is small enough, leave them as they are",
    ),
]


def _not_one_norm(function: Any) -> str | None:
    require_function(function, "stages", "most")
    said = [_factors(function, *case) for case in NORMS]
    for (norms, most), factors in zip(NORMS, said, strict=True):
        norm = hypot(*norms)
        right = [min(1, most / norm)] * len(norms)
        if _same(factors, right):
            continue
        fault = (
            f"{_whose(norms)}, the norm of all is {pretty(norm)}. It may be {pretty(most)}, so the gradients are to be "
            f"multiplied by {pretty(right[0])}; yours are by {_each(factors)}"
        )
        return fault + mistake(said, NORMS, OTHER_FACTORS, _same)
    return None


def _factors(function: Any, norms: Sequence[float], most: float) -> list[float]:
    """Return what the learner's function multiplies the gradients of each stage by, in place.

    Raises:
        SettingError: it does not multiply all gradients of a stage by the same number.
    """
    import torch

    parts = torch.tensor([0.6, 0.0], dtype=torch.float64), torch.tensor([[0.48], [-0.64]], dtype=torch.float64)
    stages = [[part * norm for part in parts] for norm in norms]
    shapes = _shapes(stages)
    call(function, _whose(norms), stages, most)
    if _shapes(stages) != shapes:
        raise SettingError(
            f"{_whose(norms)}, the stages no longer hold the gradients that they held; scale them in place, with mul_()"
        )
    factors = []
    for number, (norm, stage) in enumerate(zip(norms, stages, strict=True)):
        old, new = _row([part * norm for part in parts]), _row(stage)
        factor = (new @ old / (old @ old)).item()
        if not torch.allclose(new, old * factor):
            raise SettingError(
                f"{_whose(norms)}, the gradients of stage {number} point in another direction than before; multiply "
                "all of them by the same number"
            )
        factors.append(factor)
    return factors


def _shapes(stages: Sequence[Any]) -> list[list[Any]]:
    """The shapes of each stage's gradients."""
    return [[getattr(gradient, "shape", None) for gradient in stage] for stage in stages if isinstance(stage, list)]


def _row(gradients: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat([gradient.flatten() for gradient in gradients])


def _whose(norms: Sequence[float]) -> str:
    return f"with {plural(len(norms), 'stage')} whose gradients have the norm{'s'[: len(norms) - 1]} {_each(norms)}"


CHANGED = (
    "The second line adds what the first one has changed: += changes the tensor itself, and another name for it, as in "
    "t = embedding.grad, is no copy. Keep the sum, and then give it to both"
)

# How many times the embedding's gradient and the head's are in what the embedding has in the end, and in what the head
# has, and what is wrong with that.
OTHER_SUMS = {
    ((1, 0), (0, 1)): "Each copy goes its own way, and they drift apart",
    ((1, 1), (1, 2)): CHANGED,
    ((2, 1), (1, 1)): CHANGED,
    ((1, 1), (0, 1)): "Only the embedding has the sum, and the copies drift apart",
    ((1, 0), (1, 1)): "Only the head has the sum, and the copies drift apart",
    ((0, 1), (1, 0)): "They have changed places, and the copies drift apart",
    ((0.5, 0.5), (0.5, 0.5)): (
        "That is the mean. The copies stay equal, but in one process the weight is used twice, and backward adds up "
        "what comes from each use"
    ),
}


def _not_added_up(function: Any) -> str | None:
    import torch

    require_function(function, "embedding", "head")
    start, *gradients = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = {name: torch.nn.Parameter(start.clone()) for name in ("embedding", "head")}
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        weight.grad = gradient.clone()
    call(function, "after the backwards", *weights.values())
    both = torch.stack([gradient.flatten() for gradient in gradients], 1)
    parts = []
    for name, weight in weights.items():
        if not torch.equal(weight, start):
            return f"the {name}'s numbers have changed. To change weights is for the optimizer to do; change its .grad"
        if weight.grad is None:
            return f"the {name}'s .grad is None in the end"
        found = weight.grad.to_dense().reshape(-1, 1)
        times = torch.linalg.lstsq(both, found.nan_to_num()).solution
        if not torch.allclose(both @ times, found):
            return f"the {name}'s .grad is not made of the two gradients, where their sum is wanted"
        parts.append(tuple(round(each, 6) + 0.0 for each in times[:, 0].tolist()))  # never a -0.0
    if parts == [(1, 1), (1, 1)]:
        return None
    why = OTHER_SUMS.get((parts[0], parts[1]), "Both are to have the sum, each gradient once")
    (own, other), (others, its_own) = parts
    return (
        f"in the end the embedding has {pretty(own)} times its own gradient and {pretty(other)} times the head's, and "
        f"the head has {pretty(its_own)} times its own and {pretty(others)} times the embedding's. {why}"
    )


def _each(values: Sequence[float]) -> str:
    """As people list them: 1, 2 and 3."""
    *first, last = map(pretty, values)
    return f"{', '.join(first)} and {last}" if first else last


def _same(values: Sequence[float], others: Sequence[float]) -> bool:
    return all(abs(one - other) < 1e-5 for one, other in zip(values, others, strict=True))


EXERCISES = {
    "07.1": Exercise(
        _not_the_mean,
        "Each loss counts as its part of all tokens, so the gradients add up to that of the batch's mean. Where all "
        "microbatches have as many tokens, that part is 1/m.",
    ),
    "07.2": Exercise(
        _not_one_norm,
        "One factor for all stages; all that a rank needs to know of the others is one number from each.",
    ),
    "07.3": Exercise(
        _not_added_up,
        "Both copies take the same step, and it is the one that the weight would take in one process.",
    ),
}
