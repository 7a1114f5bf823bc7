"""Lesson 1: how many ranks a model needs, and how many bytes cross a cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any

from ppedu.core.numeric import plural, pretty
from ppedu.core.partition import evenly
from ppedu.core.simulate import simulate
from ppedu.notebook.exercises.common import Exercise, Mistakes, ask, equal, explain_mistake, require_function, unlike
from ppedu.zoo import schedule

if TYPE_CHECKING:  # the package must import without torch
    from ppedu.run.gpt import GPTConfig

PER_WEIGHT = 16  # bytes: the weight, its gradient, and Adam's two averages, 4 bytes each


def _not_the_fewest(fewest: Any) -> str | None:
    require_function(fewest, "config", "budget")
    cases = _budgets()
    answers = [ask(fewest, _within(*case), *case) for case in cases]
    for ranks, case in zip(answers, cases, strict=True):
        if fault := _does_not_fit(ranks, *case):
            return fault + explain_mistake(answers, cases, WRONG_COUNTS)
    return None


def _budgets() -> list[tuple[GPTConfig, float]]:
    """Return models and budgets in bytes, the lesson's own case first.

    The last three are edge cases: used up to the last byte, exceeded only by the head, one byte to spare.
    """
    from ppedu.run.gpt import GPTConfig

    large = GPTConfig(vocabulary=50257, context=2048, layers=32, heads=32, width=4096)
    small = GPTConfig(vocabulary=50257, context=1024, layers=11, heads=12, width=768)
    narrow = GPTConfig(vocabulary=100, context=64, layers=23, width=64)
    short = GPTConfig(vocabulary=100, context=1, layers=8, width=64)
    rooms = [(large, 24e9), (large, 16e9), (large, 120e9), (small, 1e9), (narrow, 2e6)]
    return [*rooms, (small, max(_held(small, 4))), (short, _held(short, 4)[0]), (short, max(_held(short, 8)) + 1)]


def _within(config: GPTConfig, budget: float) -> str:
    return f"with {plural(config.layers, 'layer')} of width {config.width} and a budget of {_gb(budget)}"


def _gb(number: float) -> str:
    return pretty(number / 1e9, "GB")


@cache
def _parts(config: GPTConfig) -> tuple[int, int, int]:
    """Count the weights of the embedding, of one layer, and of the head."""
    import torch

    from ppedu.run.gpt import Block, Embedding, Head

    with torch.device("meta"):
        parts = Embedding(config), Block(config), Head(config)
    embedding, layer, head = (sum(weight.numel() for weight in part.parameters()) for part in parts)
    return embedding, layer, head


def _held(config: GPTConfig, ranks: int) -> list[int]:
    """Return the bytes that each rank of a pipeline holds, without activations."""
    embedding, layer, head = _parts(config)
    weights = [len(piece) * layer for piece in evenly(config.layers, ranks)]
    weights[0] += embedding
    weights[-1] += head
    return [PER_WEIGHT * number for number in weights]


def _first(config: GPTConfig, fits: Callable[[list[int]], bool]) -> int:
    """Return the smallest number of ranks for which `fits(bytes on each rank)` is true."""
    return next(ranks for ranks in range(1, config.layers + 1) if fits(_held(config, ranks)))


def _fewest(config: GPTConfig, budget: float) -> int:
    return _first(config, lambda held: max(held) <= budget)


def _does_not_fit(ranks: Any, config: GPTConfig, budget: float) -> str | None:
    case = _within(config, budget)
    if ranks not in range(1, config.layers + 1):
        return f"{case} your function returns {pretty(ranks)} instead of a whole number from 1 to {config.layers}"
    held = _held(config, int(ranks))
    if (most := max(held)) > budget:
        fullest = held.index(most)
        parts = [plural(len(evenly(config.layers, len(held))[fullest]), "layer")]
        parts += ["the embedding"] * (fullest == 0) + ["the head"] * (fullest == len(held) - 1)
        holds = f"{', '.join(parts[:-1])} and {parts[-1]}"  # the fullest is at an end
        on = plural(len(held), "rank")
        return f"{case} the model does not fit on {on}: rank {fullest} holds {holds}, {_gb(most)}"
    if ranks > (enough := _fewest(config, budget)):
        return f"{case} it fits on {len(held)} ranks, but {enough} would be enough"
    return None


def _in_bytes(each: int) -> Callable[[GPTConfig, float], int]:
    """Return the wrong answer that counts `each` bytes per weight."""
    return lambda config, budget: _fewest(config, budget * PER_WEIGHT / each)


def _doubled(config: GPTConfig, budget: float) -> int:
    ranks = 1
    while 2 * ranks <= config.layers and max(_held(config, ranks)) > budget:
        ranks *= 2
    return ranks


# Common wrong answers for the fewest ranks.
WRONG_COUNTS: Mistakes = [
    (
        lambda config, budget: ceil(sum(_held(config, 1)) / budget),
        "That is the size of the whole model divided by the budget, as if it could be cut anywhere. A rank holds whole "
        "layers, plus the embedding on the first rank and the head on the last: look at the fullest rank",
    ),
    (
        lambda config, budget: int(sum(_held(config, 1)) // budget),
        "That is the size of the whole model divided by the budget, rounded down; the remainder has to fit too",
    ),
    (_in_bytes(4), "That is enough for the weights. Their gradients and Adam's averages need memory too"),
    (_in_bytes(8), "That is enough for the weights and gradients. Adam keeps two more numbers per weight"),
    (
        lambda config, budget: _first(config, lambda held: min(held) <= budget),
        "That is enough for the rank that holds least; look at the fullest",
    ),
    (
        lambda config, budget: _first(config, lambda held: held[-1] <= budget),
        "That is enough for the last rank; look at the fullest",
    ),
    (
        lambda config, budget: _first(config, lambda held: held[0] <= budget),
        "That is enough for rank 0. It is usually the fullest, but the head may be larger than the embedding",
    ),
    (
        lambda config, budget: _first(config, lambda held: max(held) < budget),
        "A rank that uses its budget up to the last byte still fits",
    ),
    (_doubled, "The number of ranks does not have to be a power of two"),
]


def _not_the_bytes(formula: Any) -> str | None:
    require_function(formula, "sequences", "length", "width", "bytes_each")
    answers = [ask(formula, _microbatch(*sizes), *sizes) for sizes in MICROBATCHES]
    for value, sizes in zip(answers, MICROBATCHES, strict=True):
        right = _over_the_cut(*sizes)
        if not equal(value, right):
            fault = f"{_microbatch(*sizes)} {right:,} bytes cross the cut; your formula gives {_digits(value, right)}"
            return fault + explain_mistake(answers, MICROBATCHES, WRONG_BYTES)
    return None


# Sequences, their length, the width, and the bytes of a number; the lesson's own sizes first.
MICROBATCHES = [(4, 2048, 4096, 4), (1, 2048, 4096, 2), (2, 64, 64, 4), (3, 5, 7, 2)]


def _microbatch(sequences: int, length: int, width: int, bytes_each: int) -> str:
    tokens = f"{plural(sequences, 'sequence')} of {plural(length, 'token')}"
    return f"with a microbatch of {tokens}, width {width} and {bytes_each} bytes per number"


def _over_the_cut(sequences: int, length: int, width: int, bytes_each: int) -> int:
    return 2 * sequences * length * width * bytes_each


def _digits(value: Any, right: int) -> str:
    return f"{value:,}" if isinstance(value, int) else unlike(value, right)


# Common wrong answers for the bytes that cross a cut.
WRONG_BYTES: Mistakes = [
    (
        lambda s, t, w, b: s * t * w * b,
        "That is the way down. In the backward, equally many come back: the gradient of each number that was sent",
    ),
    (lambda s, t, w, b: t * w * b, "That is one sequence, on the way down only"),
    (lambda s, t, w, b: 2 * t * w * b, "That is one sequence, both ways; a microbatch may have several"),
    (lambda s, t, w, b: 2 * s * t * w, "That counts the numbers that cross the cut; multiply by the bytes of each"),
    (lambda s, t, w, b: 8 * s * t * w, "A number takes bytes_each bytes, which is not always 4"),
    (lambda s, t, w, b: s * t * w, "That counts the numbers that go down; count their bytes, and the gradients too"),
    (lambda s, t, w, b: 2 * s * w * b, "That is one token of each sequence; every token has an activation"),
    (
        lambda s, t, w, b: 2 * s * t * b,
        "That is one number per token. That holds only for the input; between two layers, each token is represented by "
        "`width` numbers",
    ),
    (
        lambda s, t, w, b: 4 * s * t * w * b,
        "That is twice too many. One rank sends the activation, the other its gradient; count each message once, not "
        "on both ranks",
    ),
    (lambda s, t, w, b: 2 * s * t * w * b / 1e9, "Give it in bytes, not in GB"),
]


EXERCISES = {
    "01.1": Exercise(
        _not_the_fewest,
        "The fullest rank decides. This is your pipeline with one microbatch: forward goes down, backward comes back "
        "up. In the empty space ranks wait; lesson 3 is about that.",
        lambda fewest: simulate(schedule("naive", int(fewest(*_budgets()[0])), 1)),
    ),
    "01.2": Exercise(
        _not_the_bytes, "One activation and one gradient, however many layers there are on either side of the cut."
    ),
}
