"""Lesson 1: how many ranks a model needs, without and with activations, and how many bytes cross the cuts."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises.common import Exercise, enumerated, equal, formulas, tried_on, unlike
from ppedu.course.project import GB, Project, heron
from ppedu.sim.partition import evenly

PER_WEIGHT = 16  # bytes, in mixed precision: weight 2, gradient 2, Adam 12


def _held(model: Project, ranks: int, kept: float = 0, gpus: int = 1, each: float = PER_WEIGHT) -> list[float]:
    """Return the bytes that each rank of a pipeline holds; with `gpus`, those on each of a rank's GPUs.

    Args:
        kept: the number of microbatches whose activations are kept.
        each: the bytes per weight.
    """
    layers = [len(piece) for piece in evenly(model.layers, ranks)]
    weights = [count * model.layer_weights for count in layers]
    weights[0] += model.vocabulary * model.width
    weights[-1] += model.vocabulary * model.width
    return [
        each * number / gpus + count * kept * model.layer_activation
        for number, count in zip(weights, layers, strict=True)
    ]


def _on_a_gpu(model: Project, ranks: int, kept: float, each: float = PER_WEIGHT) -> list[float]:
    return _held(model, ranks, kept, model.node, each)


def _first(model: Project, fits: Callable[[int], bool]) -> int:
    """Return the smallest number of ranks for which `fits(ranks)` is true."""
    return next((ranks for ranks in range(1, model.layers) if fits(ranks)), model.layers)


def _gb(number: float) -> str:
    return pretty(number / GB, "GB")


def _not_enough(
    case: str, ranks: Any, model: Project, held: Callable[[int], list[float]], limit: float, too_much: str
) -> str | None:
    """Explain why an answer is not the fewest ranks; return None if it is.

    Args:
        held: returns the bytes on each rank, for a number of ranks.
        limit: the bytes that a rank may hold.
        too_much: a sentence with {on}, the number of ranks, {who}, the fullest rank with its parts, and its bytes.
    """
    if ranks not in range(1, model.layers + 1):
        return f"{case} your function returns {pretty(ranks)} instead of a whole number from 1 to {model.layers}"
    on, bytes_ = plural(int(ranks), "rank"), held(int(ranks))
    most = max(bytes_)
    if most > limit:
        return f"{case} {too_much.format(on=on, who=_fullest(model, bytes_), bytes=_gb(most))}"
    enough = _first(model, lambda n: max(held(n)) <= limit)
    return f"{case} it fits on {on}, but {enough} would be enough" if ranks > enough else None


def _fullest(model: Project, held: list[float]) -> str:
    """Describe the rank that holds most: "rank 0 holds 7 layers and the embedding"."""
    fullest = held.index(max(held))
    parts = [plural(len(evenly(model.layers, len(held))[fullest]), "layer")]
    parts += ["the embedding"] * (fullest == 0) + ["the head"] * (fullest == len(held) - 1)
    return f"rank {fullest} holds {enumerated(parts)}"


LARGE = Project(layers=32, width=4096, vocabulary=50_257)
SMALL = Project(layers=11, width=768, vocabulary=50_257)
NARROW = Project(layers=23, width=64, vocabulary=100)

# Models and budgets in bytes, the lesson's own case first. The last two are edge cases: used up to the last byte, and
# one byte too few.
BUDGETS: list[tuple[Project, float]] = [
    *[(heron, 120e9), (heron, 640e9), (LARGE, 24e9), (LARGE, 120e9), (SMALL, 1e9), (NARROW, 1e6)],
    *[(SMALL, max(_held(SMALL, 4))), (SMALL, max(_held(SMALL, 4)) - 1)],
]


def _doubled(model: Project, budget: float) -> int:
    ranks = 1
    while 2 * ranks <= model.layers and max(_held(model, ranks)) > budget:
        ranks *= 2
    return ranks


# Common wrong answers for the fewest ranks: `first(model, fits)` tries n = 1, 2, 3, … ranks.
WRONG_COUNTS = formulas(
    "model, budget",
    {
        "ceil(sum(held(model, 1)) / budget)": "That is the size of the whole model divided by the budget, as if it "
        "could be cut anywhere. A rank holds whole layers, plus the embedding on the first rank and the head on the "
        "last: look at the fullest rank",
        "int(sum(held(model, 1)) // budget)": "That is the size of the whole model divided by the budget, rounded "
        "down; the remainder has to fit too",
        "ceil(16 * model.layers * model.layer_weights / budget)": "That is the size of all layers divided by the "
        "budget, as if they could be cut anywhere, and without the embedding and the head. Look at the fullest rank",
        "first(model, lambda n: max(held(model, n, each=1)) <= budget)": "That compares bytes with a number of "
        "weights; each weight takes 16 bytes",
        "first(model, lambda n: max(held(model, n, each=2)) <= budget)": "That is 2 bytes per weight: the weights "
        "without gradients and Adam, or one GPU's share of the 16 bytes. A rank is a whole node here",
        "first(model, lambda n: max(held(model, n, each=4)) <= budget)": "That is enough for the weights and "
        "gradients. Adam needs another 12 bytes per weight",
        "first(model, lambda n: max(held(model, n, each=12)) <= budget)": "That is enough for Adam. The weights and "
        "gradients need memory too",
        "first(model, lambda n: min(held(model, n)) <= budget)": "That is enough for the rank that holds least; look "
        "at the fullest",
        "first(model, lambda n: held(model, n)[-1] <= budget)": "That is enough for the last rank; look at the fullest",
        "first(model, lambda n: 16 * ceil(model.layers / n) * model.layer_weights <= budget)": "That counts the layers "
        "only; the first rank also holds the embedding, and the last one the head",
        "first(model, lambda n: max(held(model, n)) < budget)": "A rank that uses its budget up to the last byte still "
        "fits",
        "doubled(model, budget)": "The number of ranks does not have to be a power of two",
    },
    first=_first,
    held=_held,
    doubled=_doubled,
)


def _with_budget(model: Project, budget: float) -> str:
    return f"with {plural(model.layers, 'layer')} of width {model.width} and a budget of {_gb(budget)}"


def _not_the_fewest(case: str, ranks: Any, model: Project, budget: float) -> str | None:
    too_much = "the model does not fit on {on}: {who}, {bytes}"
    return _not_enough(case, ranks, model, lambda n: _held(model, n), budget, too_much)


# The lesson's own sizes first.
BATCH = ["ranks", "sequences", "length", "width", "bytes_each"]
BATCHES = [(8, 32, 8192, 8192, 2), (4, 1, 2048, 4096, 4), (2, 2, 64, 64, 4), (3, 3, 5, 7, 2), (1, 2, 3, 4, 2)]

# Common wrong answers for the bytes that cross the cuts.
WRONG_BYTES = formulas(
    "p, s, t, w, b",
    {
        "(p - 1) * s * t * w * b": "That is the way down. In the backward, equally many come back: the gradient of "
        "each number that was sent",
        "2 * p * s * t * w * b": "Count the cuts: between two ranks there is one, and nothing crosses the ends of the "
        "pipeline",
        "p * s * t * w * b": "That counts a message down for every rank; the last one sends none. And the gradients "
        "come back",
        "2 * s * t * w * b": "That is what crosses one cut, both ways; count all cuts",
        "s * t * w * b": "That is what goes down over one cut; count all cuts, both ways",
        "t * w * b": "That is one sequence, over one cut, on the way down only",
        "2 * t * w * b": "That is one sequence over one cut; count them all",
        "2 * (p - 1) * t * w * b": "That is one sequence; every sequence crosses every cut",
        "2 * (p - 1) * s * t * w": "That counts the numbers that cross the cuts; multiply by the bytes of each",
        "4 * (p - 1) * s * t * w": "A number takes bytes_each bytes, which is not always 2",
        "2 * (p - 1) * s * w * b": "That is one token of each sequence; every token has an activation",
        "2 * (p - 1) * s * t * b": "That is one number per token. That holds only for the input; between two layers, "
        "each token is represented by `width` numbers",
        "4 * (p - 1) * s * t * w * b": "That is twice too many. One rank sends the activation, the other its "
        "gradient; count each message once, not on both ranks",
        "2 * (p - 1) * s * t * w * b / 8": "That is the share of one GPU; count the whole node",
        "2 * (p - 1) * s * t * w * b / 1e9": "Give it in bytes, not in GB",
    },
)


def _with_batch(ranks: int, sequences: int, length: int, width: int, bytes_each: int) -> str:
    tokens = f"{plural(sequences, 'sequence')} of {plural(length, 'token')}"
    return f"with {plural(ranks, 'rank')}, {tokens}, width {width} and {bytes_each} bytes per number"


def _not_the_bytes(case: str, value: Any, ranks: int, *sizes: int) -> str | None:
    right = 2 * (ranks - 1) * prod(sizes)
    if equal(value, right):
        return None
    gives = f"{value:,}" if isinstance(value, int) else unlike(value, right)
    return f"{case} {right:,} bytes cross the cuts; your formula gives {gives}"


# Models and numbers of microbatches, the lesson's own case first.
TRAININGS = [(heron, 32), (heron, 1), (heron, 64), (Project(layers=80, memory=40 * GB, node=4), 8), (LARGE, 100)]


def _fitting(
    model: Project, kept: float, each: float = PER_WEIGHT, fullest: Callable[[list[float]], float] = max
) -> int:
    """Return the fewest ranks whose GPUs have memory for the activations of `kept` microbatches."""
    return _first(model, lambda n: fullest(_on_a_gpu(model, n, kept, each)) <= model.memory)


# Common wrong answers for the fewest ranks with activations; `fitting` is the right one if all microbatches are kept.
WRONG_TRAININGS = formulas(
    "model, kept",
    {
        "fitting(model, 0)": "That leaves out the activations",
        "fitting(model, 1)": "That keeps the activations of one microbatch; each rank keeps those of all microbatches",
        "fitting(model, kept, 0)": "That leaves out weights, gradients and Adam",
        "fitting(model, kept, 2)": "That counts the weights, but not their gradients and Adam",
        "fitting(model, kept, 16 * model.node)": "That puts all weights of a rank on each of its GPUs; they share them",
        "fitting(model, kept / model.node)": "That counts only a part of the activations. `layer_activation` is "
        "already one GPU's share: do not divide it again, nor add it to a whole node's weights. Add it to a GPU's "
        "share of the 16 bytes per weight, and compare the sum with `model.memory`",
        "fitting(model, kept, fullest=min)": "That is enough for the rank that holds least; look at the fullest",
        "min(model.layers, ceil(on_a_gpu(model, 1, kept)[0] / model.memory))": "That divides the total by the memory, "
        "as if the model could be cut anywhere; look at the fullest rank",
        "fitting(model, kept * model.layers)": "That keeps the activations of all layers on each rank; a rank keeps "
        "those of its own layers",
    },
    fitting=_fitting,
    on_a_gpu=_on_a_gpu,
)


def _with_nodes(model: Project, microbatches: int) -> str:
    layers = f"{plural(model.layers, 'layer')} of width {model.width}"
    gpus = f"nodes of {model.node} GPUs of {_gb(model.memory)}"
    return f"with {layers}, {plural(microbatches, 'microbatch')} and {gpus}"


def _not_the_fewest_with_activations(case: str, ranks: Any, model: Project, microbatches: int) -> str | None:
    too_much = "it does not fit on {on}: {who}, with activations {bytes} on each GPU"
    return _not_enough(case, ranks, model, lambda n: _on_a_gpu(model, n, microbatches), model.memory, too_much)


EXERCISES = {
    "01.1": Exercise(
        tried_on(BUDGETS, ["model", "budget"], _with_budget, _not_the_fewest, WRONG_COUNTS),
        "The fullest rank decides: with 120 GB for each, Heron needs 10 nodes.",
        hints=(
            "What has to be at most the budget: the sum over the ranks, or the largest of them?",
            "Each weight takes 16 bytes, so the fullest rank holds `16 * max(weights(model, ranks))` bytes.",
            "Try 1, 2, 3, … ranks in a loop, and return the first number for which the fullest rank fits.",
        ),
    ),
    "01.2": Exercise(
        tried_on(BATCHES, BATCH, _with_batch, _not_the_bytes, WRONG_BYTES),
        "One activation and one gradient for each cut and sequence, however many layers a stage has.",
        hints=(
            "Draw three ranks in a row, and count the cuts. What crosses each of them, forward and backward?",
            "One activation has `sequences * length * width` numbers of `bytes_each` bytes. Its gradient is as large.",
        ),
    ),
    "01.3": Exercise(
        tried_on(TRAININGS, ["model", "microbatches"], _with_nodes, _not_the_fewest_with_activations, WRONG_TRAININGS),
        "Heron needs 10 nodes, mostly for activations. (That 01.1 gave 10, too, is chance.) Lesson 5 keeps far fewer.",
        hints=(
            "Write down the bytes on one GPU of each rank, and compare the largest with `model.memory`.",
            "On a rank with `count` layers, each GPU keeps `count * microbatches * model.layer_activation` bytes of "
            "activations, and 1/`model.node` of the rank's 16 bytes per weight.",
        ),
    ),
}
