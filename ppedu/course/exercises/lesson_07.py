"""Lesson 7: weighted losses, one norm over all stages, tied weights that stay equal, and a diagnosis of all bugs."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import Any

from ppedu.core import SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import (
    Exercise,
    call,
    enumerated,
    formulas,
    missing_return,
    own_line,
    require_function,
    tried_on,
)

# The number of tokens in each microbatch; the lesson's own case first.
COUNTS = [((6, 2),), ((4, 4, 4),), ((5,),), ((1, 2, 3, 10),)]

# Common wrong weights of the microbatches' losses, computed from their numbers of tokens.
WRONG_WEIGHTS = formulas(
    "counts",
    {
        "[1 for n in counts]": "You leave the losses unchanged. The gradients of all microbatches are added up, so "
        "their sum is too large, and AdamW does not show it",
        "[1 / len(counts) for n in counts]": "That is the mean of the microbatches' means. In it, a token counts more "
        "if its microbatch has fewer tokens",
        "counts": "That is the sum over all tokens. For the mean, divide by the number of tokens in the batch",
        "[1 / sum(counts) for n in counts]": "Dividing by all tokens is right for a sum over tokens. Each loss is a "
        "mean; turn it into a sum first",
        "[1 / n for n in counts]": "Each loss is a mean, so it is already divided by its own number of tokens. What "
        "fraction of all tokens does it have?",
        "[n * len(counts) / sum(counts) for n in counts]": "The proportions are right, but the weights add up to the "
        "number of microbatches instead of 1",
        "[n / sum(counts) / len(counts) for n in counts]": "The proportions are right, but the fractions of all tokens "
        "already add up to 1: leave out the 1/m",
        "[n / max(counts) for n in counts]": "You divide by the largest count. For the mean over the batch, divide by "
        "the number of tokens in the batch",
        "[0 for n in counts]": "They contribute nothing to the gradients",
    },
)


def _not_the_mean(case: str, weights: list[float], counts: Sequence[int]) -> str | None:
    if _same(weights, [count / sum(counts) for count in counts]):
        return None
    return f"{case}, your losses have the weights {_each(weights)}"


def _weights(function: Any, case: str, counts: Sequence[int]) -> list[float]:
    """Return the weight of each microbatch's loss in the losses that the learner's function returns.

    Raises:
        SettingError: it does not return one loss per microbatch, each computed from that microbatch's loss alone.
    """
    import torch

    leaves = [torch.tensor(2.0 + m, dtype=torch.float64, requires_grad=True) for m in range(len(counts))]
    losses = [leaf * 1 for leaf in leaves]  # with a history, as losses have
    returned = call(function, case, losses, list(counts))
    if not isinstance(returned, (list, tuple)) or len(returned) != len(counts):
        raise SettingError(
            f"{case}, return a list with one loss per microbatch: each gets its own backward. "
            f"Your function returns {returned!r}{missing_return(returned)}"
        )
    weights = []
    for m, loss in enumerate(returned):
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise SettingError(
                f"the loss that your function returns for microbatch {m} has no history, so backward() finds no "
                "weights; use the given loss itself, without item() or detach()"
            )
        if loss.numel() != 1:
            raise SettingError(
                f"the loss that your function returns for microbatch {m} has {plural(loss.numel(), 'number')}; "
                "backward() needs a single number"
            )
        with own_line(function, case):
            found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        parts = [0.0 if gradient is None else gradient.item() for gradient in found]
        for other, part in enumerate(parts):
            if part and other != m:
                raise SettingError(
                    f"the loss that your function returns for microbatch {m} also contains microbatch {other}'s loss. "
                    "In 1F1B the first microbatches go backward before the last have gone forward; by then only the "
                    "counts are known"
                )
        weights.append(parts[m])
    return weights


def _with(counts: Sequence[int]) -> str:
    return f"with {plural(len(counts), 'microbatch')} of {_each(counts)} tokens"


# The norm of each stage's gradients, and the limit for the norm of all; the lesson's own case first.
NORMS = [((2, 4, 5, 6), 3), ((0.2, 0.4, 0.4), 1), ((3,), 1.5), ((0.9, 0.9), 1)]

# Common wrong factors for the stages' gradients, computed from their norms and the limit.
WRONG_FACTORS = formulas(
    "norms, most",
    {
        "[1 for norm in norms]": "The gradients are unchanged; change them in place, with mul_(). (clip_grad_norm_ "
        "takes weights and scales their .grad; these are the gradients themselves)",
        "[min(1, most / norm) for norm in norms]": "Each stage is scaled by its own norm: large gradients shrink and "
        "small ones do not, so all of them together point in a different direction than in one process",
        "[min(1, most / sum(norms)) for _ in norms]": "You add up the norms. As with the sides of a right triangle, "
        "you have to add up their squares",
        # 1.4 is the sum of the norms of the two tensors of a stage
        "[min(1, most / (1.4 * sum(norms))) for _ in norms]": "You add up the norms of all tensors. As with the sides "
        "of a right triangle, you have to add up their squares",
        "[min(1, most / hypot(*norms) ** 2) for _ in norms]": "The sum of the squares is right; the norm is its square "
        "root",
        "[min(1, most / max(norms)) for _ in norms]": "You use the largest norm as the norm of all stages, but the "
        "other stages add to it",
        "[min(1, most * len(norms) / sum(norms)) for _ in norms]": "You use the mean of the norms. As with the sides "
        "of a right triangle, you have to add up their squares",
        "[most / hypot(*norms) for _ in norms]": "Clipping never makes gradients larger; if the norm is small enough, "
        "leave them unchanged",
    },
)


def _not_one_norm(case: str, factors: list[float], norms: Sequence[float], most: float) -> str | None:
    norm = hypot(*norms)
    right = min(1, most / norm)
    if _same(factors, [right] * len(norms)):
        return None
    return (
        f"{case}, the norm of all is {pretty(norm)}. The limit is {pretty(most)}, so the gradients should be "
        f"multiplied by {pretty(right)}; you multiply them by {_each(factors)}"
    )


def _factors(function: Any, case: str, norms: Sequence[float], most: float) -> list[float]:
    """Return the factor by which the learner's function multiplies each stage's gradients in place.

    Raises:
        SettingError: it does not multiply all gradients of a stage by the same number.
    """
    import torch

    parts = torch.tensor([0.6, 0.0], dtype=torch.float64), torch.tensor([[0.48], [-0.64]], dtype=torch.float64)
    stages = [[part * norm for part in parts] for norm in norms]
    shapes = _shapes(stages)
    call(function, case, stages, most)
    if _shapes(stages) != shapes:
        raise SettingError(
            f"{case}, the stages no longer hold the same gradients as before; scale them in place, with mul_()"
        )
    factors = []
    for number, (norm, stage) in enumerate(zip(norms, stages, strict=True)):
        old, new = (torch.cat([each.flatten() for each in tensors]) for tensors in (parts, stage))
        factor = (new @ old).item() / norm  # the norm of the parts is 1
        if not torch.allclose(new, old * norm * factor):
            raise SettingError(
                f"{case}, the gradients of stage {number} point in a different direction than before; multiply all of "
                "them by the same number"
            )
        factors.append(factor)
    return factors


def _shapes(stages: Sequence[Any]) -> list[list[Any]]:
    return [[getattr(gradient, "shape", None) for gradient in stage] for stage in stages if isinstance(stage, list)]


def _whose(norms: Sequence[float], _: float) -> str:
    return f"with {plural(len(norms), 'stage')} whose gradients have the norm{'s'[: len(norms) - 1]} {_each(norms)}"


CHANGED = (
    "One gradient had already changed when it was added to the other. A second name for a tensor, as in "
    "t = embedding.grad, is not a copy of it"
)

# Common wrong results: how often the final gradient of the embedding, and then that of the head, contains the original
# gradients of (embedding, head).
WRONG_SUMS = {
    ((1, 0), (0, 1)): "Each copy keeps its own gradient, so the copies drift apart",
    ((1, 1), (1, 2)): CHANGED,
    ((2, 1), (1, 1)): CHANGED,
    ((1, 1), (0, 1)): "Only the embedding has the sum, so the copies drift apart",
    ((1, 0), (1, 1)): "Only the head has the sum, so the copies drift apart",
    ((0, 1), (1, 0)): "The gradients are swapped, so the copies drift apart",
    ((0.5, 0.5), (0.5, 0.5)): (
        "That is the mean. The copies stay equal, but in one process the weight is used twice, and backward adds up "
        "the gradients of both uses"
    ),
}


SHARED = (
    "both have the right sum, but as one tensor under two names. The next function that changes gradients in place, "
    "such as your clip of exercise 07.2, would then scale it twice. Give each copy a tensor of its own, with clone()"
)


def _not_added_up(function: Any) -> str | None:
    import torch

    require_function(function, "embedding", "head")
    start, *gradients = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = {name: torch.nn.Parameter(start.clone()) for name in ("embedding", "head")}
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        weight.grad = gradient.clone()
    call(function, "after the backwards", *weights.values())
    both = torch.stack([gradient.flatten() for gradient in gradients], 1)
    parts, storages = [], set()
    for name, weight in weights.items():
        if not torch.equal(weight, start):
            return f"the {name}'s values have changed. Changing weights is the optimizer's job; change only the .grad"
        if weight.grad is None:
            return f"the {name}'s .grad is None at the end"
        storages.add(
            weight.grad.untyped_storage().data_ptr() if weight.grad.layout == torch.strided else id(weight.grad)
        )
        found = weight.grad.to_dense().reshape(-1, 1)
        times = torch.linalg.lstsq(both, found.nan_to_num()).solution
        if not torch.allclose(both @ times, found):
            return f"the {name}'s .grad should be the sum of the two gradients, but is not a combination of them at all"
        parts.append(tuple(round(each, 6) + 0.0 for each in times[:, 0].tolist()))  # never a -0.0
    if parts == [(1, 1), (1, 1)]:
        return SHARED if len(storages) == 1 else None
    why = WRONG_SUMS.get((parts[0], parts[1]), "Both should have the sum, which contains each gradient once")
    (own, other), (others, its_own) = parts
    return (
        f"at the end the embedding has {pretty(own)} times its own gradient plus {pretty(other)} times the head's, and "
        f"the head has {pretty(its_own)} times its own plus {pretty(others)} times the embedding's. {why}"
    )


def _each(values: Sequence[float]) -> str:
    return enumerated(map(pretty, values))


def _same(values: Sequence[float], others: Sequence[float]) -> bool:
    return all(abs(one - other) < 1e-5 for one, other in zip(values, others, strict=True))


# How far a pipeline is off, with its number of microbatches and the name of its bug; the lesson's own run comes first.
OFF = "weights", "gradients", "after clipping", "copies at the end"
PATIENTS: list[tuple[tuple[float, ...], int, str]] = [
    ((0, 3e-7, 3e-7, 0), 4, "correct"),
    ((0, 3.0, 2e-7, 0), 4, "no 1/m"),
    ((0, 0.165, 0.167, 0), 4, "mean of means"),
    ((0, 3e-7, 3.29, 0.034), 4, "own norm"),
    ((0, 0.718, 0.717, 2.129), 4, "not added up"),
    ((1.099, 1.444, 1.712, 0), 4, "same seed"),
    ((0, 1e-6, 2e-6, 1e-6), 32, "correct"),
    ((0, 7.0000004, 1e-6, 0), 8, "no 1/m"),
    ((0, 31.000001, 31.000001, 0), 32, "no 1/m"),
    ((0, 0.004, 0.004, 0), 16, "mean of means"),
    ((0, 1.3, 0.9, 0), 8, "mean of means"),
    ((0, 2e-7, 0.002, 0.0004), 8, "own norm"),
    ((0, 0.02, 0.02, 0.15), 8, "not added up"),
    ((0.3, 0.8, 0.7, 0), 8, "same seed"),
]
SYMPTOMS = {
    "correct": "nothing is off by more than rounding: a few millionths",
    "no 1/m": "the gradients are off by m - 1 exactly, because all of them are m times too large",
    "mean of means": "the weights start right, the copies stay together, and the gradients are off by no common factor",
    "own norm": "the gradients are right before clipping",
    "not added up": "the gradients are off before clipping, and the copies drift apart",
    "same seed": "the weights are off before the first step",
}


def _not_the_diagnosis(function: Any) -> str | None:
    require_function(function, "off", "microbatches")
    for numbers, microbatches, name in PATIENTS:
        off = dict(zip(OFF, numbers, strict=True))
        shown = ", ".join(f"{column} {number:.2g}" for column, number in off.items())
        case = f"with {plural(microbatches, 'microbatch')}, off by: {shown},"
        answer = call(function, case, off, microbatches)
        if not isinstance(answer, str) or answer not in SYMPTOMS:
            names = ", ".join(map(repr, SYMPTOMS))
            return f"{case} your function returns {answer!r}{missing_return(answer)}; the names are {names}"
        if answer != name:
            fault = f"{case} your function says {answer!r}. It is {name!r}"
            exact = {column: round(number, 4) for column, number in off.items()}
            if exact != off and call(function, case, exact, microbatches) == name:
                near = next(column for column in OFF if exact[column] != off[column])
                return (
                    f"{fault}. {off[near]:.9g} is {exact[near]:g} up to rounding: compare with a small threshold, such "
                    "as 1e-4"
                )
            return f"{fault}; with {answer!r}, {SYMPTOMS[answer]}"
    return None


EXERCISES = {
    "07.1": Exercise(
        tried_on(
            COUNTS,
            ["losses", "counts"],
            _with,
            _not_the_mean,
            WRONG_WEIGHTS,
            _weights,
            _same,
            otherwise=". In the batch's mean, every token counts the same, and all weights add up to 1",
        ),
        "Each loss is weighted by its fraction of all tokens, so the gradients add up to that of the batch's mean. If "
        "all microbatches have the same number of tokens, that fraction is 1/m.",
        hints=(
            "Backward adds up gradients, so the returned losses should add up to the mean over all tokens. The mean is "
            "the sum over all tokens, divided by their number.",
            "A microbatch's sum is its mean times its tokens: `losses[m] * counts[m]`. What is left to divide by?",
        ),
    ),
    "07.2": Exercise(
        tried_on(NORMS, ["stages", "most"], _whose, _not_one_norm, WRONG_FACTORS, _factors, _same),
        "One factor for all stages. A rank needs just one number from each of the other ranks.",
        hints=(
            "Compute the norm before the loop over the stages, from the gradients of all of them.",
            "Add up `gradient.square().sum()` over all gradients of all stages, and take the root once, at the end.",
        ),
    ),
    "07.3": Exercise(
        _not_added_up,
        "Both copies take the same step, which is the step that the weight would take in one process.",
        hints=(
            "`a += b` changes `a` itself. What does the second line then add?",
            "Compute the sum into a new tensor first: `total = embedding.grad + head.grad`. Then give it to both, each "
            "with a copy of its own.",
        ),
    ),
    "07.4": Exercise(
        _not_the_diagnosis,
        "Five bugs, and no two leave the same traces. A check like this one takes seconds, before a run takes weeks.",
        hints=(
            "Go from left to right. If the weights are off already, nothing after that matters. What does it mean if "
            "the gradients are right, but not after clipping?",
            "Two bugs make the gradients wrong in direction; one of them also drives the copies apart. And a common "
            "factor of m is a difference of m - 1.",
        ),
    ),
    "07.5": parts.exercise(
        "07.5",
        "One number per rank goes through the all-reduce, however large the model is.",
        hints=(
            "Each microbatch adds its gradients to `.grad`. By how much must each loss be divided, so that the sum is"
            " a mean?",
            "A norm is the root of a sum of squares. A rank knows the sum of its own squares; "
            "`dist.all_reduce(tensor)` replaces a tensor by the sum over all ranks.",
            "Scale by `min(1, most / norm)`, on every rank by the same factor.",
        ),
    ),
}
