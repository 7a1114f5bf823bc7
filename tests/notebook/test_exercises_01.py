"""Lesson 1: the ranks for a budget and the bytes over a cut, compared with real modules."""

from functools import cache

import matplotlib
import pytest
import torch

from ppedu.notebook import check_answer
from ppedu.notebook.exercises import lesson_01
from ppedu.run import GPT, GPTConfig

SMALL = GPTConfig(vocabulary=50, context=16, layers=5, heads=2, width=8)


@cache
def weights(config, ranks):
    """Count the weights of the stages as they are built."""
    with torch.device("meta"):
        stages = [GPT.stage(config, stage, ranks) for stage in range(ranks)]
    return [sum(weight.numel() for weight in stage.parameters()) for stage in stages]


def first(fits, bytes_each=16):
    """Return an answer: the fewest ranks for which `fits` is true, given the bytes on each rank and the budget."""

    def fewest(config, budget):
        counts = range(1, config.layers + 1)
        return next(ranks for ranks in counts if fits([bytes_each * each for each in weights(config, ranks)], budget))

    return fewest


right = first(lambda held, budget: max(held) <= budget)


# Exercise 1: the fewest ranks for a budget


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_trained_stage_holds_the_bytes_that_the_check_expects(ranks):
    held = []
    for stage in range(ranks):
        module = GPT.stage(SMALL, stage, ranks)
        optimizer = torch.optim.Adam(module.parameters())
        x = torch.zeros(1, 4, dtype=torch.int64) if stage == 0 else torch.zeros(1, 4, SMALL.width)
        module(x).sum().backward()
        optimizer.step()
        tensors = [each for weight in module.parameters() for each in (weight, weight.grad)]
        tensors += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        held.append(sum(tensor.nbytes for tensor in tensors))
    assert lesson_01._held(SMALL, ranks) == held


def test_the_fewest_ranks_are_accepted_and_their_pipeline_is_drawn(capsys):
    from matplotlib import pyplot

    matplotlib.use("Agg")
    check_answer("01.1", right)
    assert capsys.readouterr().out.startswith("Right. The fullest rank decides.")
    assert [label.get_text() for label in pyplot.gca().get_yticklabels()] == [f"rank {rank}" for rank in range(6)]
    pyplot.close("all")


def too_many(config, budget):
    return min(right(config, budget) + 1, config.layers)


def power_of_two(config, budget):
    return next(ranks for ranks in (1, 2, 4, 8, 16) if 16 * max(weights(config, ranks)) <= budget)


WRONG_RANKS = {
    "over the budget, rounded up": (
        lambda config, budget: -int(-16 * weights(config, 1)[0] // budget),
        "24 GB the model does not fit on 5 ranks: rank 0 holds 7 layers and the embedding, 25.98 GB. That is "
        "the size of the whole model divided",
    ),
    "rounded down": (
        lambda config, budget: int(16 * weights(config, 1)[0] // budget) or 1,
        "does not fit on 4 ranks: rank 0 holds 8 layers and the embedding, 29.2 GB",
    ),
    "weights alone": (
        first(lambda held, budget: max(held) <= budget, bytes_each=4),
        "does not fit on 2 ranks: rank 0 holds 16 layers and the embedding, 54.98 GB. That is enough for the weights.",
    ),
    "without Adam": (
        first(lambda held, budget: max(held) <= budget, bytes_each=8),
        "Adam keeps two more numbers per weight.",
    ),
    "the emptiest": (
        first(lambda held, budget: min(held) <= budget),
        "enough for the rank that holds least; look at the fullest.",
    ),
    "the last": (first(lambda held, budget: held[-1] <= budget), "enough for the last rank; look at the fullest."),
    "rank 0": (
        first(lambda held, budget: held[0] <= budget),
        "on 4 ranks: rank 3 holds 2 layers and the head, 0.001704 GB. That is enough for rank 0. It is usually",
    ),
    "always fewer than layers": (
        lambda config, budget: min(right(config, budget), config.layers - 1),
        "a budget of 0.0009042 GB the model does not fit on 7 ranks: rank 0 holds 2 layers and the embedding",
    ),
    "less than the budget": (
        first(lambda held, budget: max(held) < budget),
        "a budget of 0.9704 GB it fits on 6 ranks, but 4 would be enough. A rank that uses its budget up to "
        "the last byte still fits.",
    ),
    "a power of two": (
        power_of_two,
        "it fits on 8 ranks, but 6 would be enough. The number of ranks does not have to be a power of two.",
    ),
    "one too many": (too_many, "it fits on 7 ranks, but 6 would be enough."),
    "one rank": (lambda config, budget: 1, "on 1 rank: rank 0 holds 32 layers, the embedding and the head, 109.8 GB."),
    "the lesson's": (lambda config, budget: 6, "a budget of 16 GB the model does not fit on 6 ranks"),
    "not whole": (
        lambda config, budget: 16 * weights(config, 1)[0] / budget,
        "your function returns 4.576 instead of a whole number from 1 to 32.",
    ),
    "none": (lambda config, budget: 0, "your function returns 0 instead of a whole number from 1 to 32"),
    "more than layers": (lambda config, budget: 64, "your function returns 64 instead of a whole number from 1 to 32"),
    "stages that there are not": (lambda config, budget: len(weights(config, 33)), "cannot be cut into 33 stages"),
    "forgets return": (lambda config, budget: None, "returns None instead of a number; is a return missing?"),
    "a number": (6, "give a function of config and budget, not 6."),
}


@pytest.mark.parametrize(("fewest", "reason"), WRONG_RANKS.values(), ids=WRONG_RANKS)
def test_a_wrong_number_of_ranks_is_explained(refused, fewest, reason):
    refused("01.1", fewest, reason)


# Exercise 2: the bytes over a cut


def measured(sequences, length, width, bytes_each):
    """Measure the bytes that stage 0 sends, plus those of the gradient."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[bytes_each]
    config = GPTConfig(vocabulary=10, context=length, layers=2, heads=1, width=width)
    with torch.device("meta"):
        above, below = (GPT.stage(config, stage, 2).to(dtype) for stage in (0, 1))
        sent = above(torch.zeros(sequences, length, dtype=torch.int64)).detach().requires_grad_()
    below(sent).sum().backward()
    return sent.nbytes + sent.grad.nbytes


@pytest.mark.parametrize("formula", [measured, lambda s, t, w, b: 2.0 * s * t * w * b], ids=["measured", "a float"])
def test_any_equivalent_count_of_bytes_is_accepted(told, formula):
    assert told("01.2", formula).startswith("Right. One activation and one gradient")


WRONG_BYTES = {
    "down": (lambda s, t, w, b: s * t * w * b, "268,435,456 bytes cross the cut; your formula gives 134,217,728. That"),
    "one sequence": (lambda s, t, w, b: t * w * b, "That is one sequence, on the way down only."),
    "one sequence, both ways": (lambda s, t, w, b: 2 * t * w * b, "a microbatch may have several."),
    "numbers": (
        lambda s, t, w, b: 2 * s * t * w,
        "counts the numbers that cross the cut; multiply by the bytes of each.",
    ),
    "numbers, down": (
        lambda s, t, w, b: s * t * w,
        "counts the numbers that go down; count their bytes, and the gradients too.",
    ),
    "one token": (lambda s, t, w, b: 2 * s * w * b, "That is one token of each sequence"),
    "tokens": (
        lambda s, t, w, b: 2 * s * t * b,
        "That is one number per token. That holds only for the input; between two layers, each token is "
        "represented by `width` numbers.",
    ),
    "sent and received": (
        lambda s, t, w, b: 4 * s * t * w * b,
        "That is twice too many. One rank sends the activation, the other its",
    ),
    "GB": (lambda s, t, w, b: 2 * s * t * w * b / 1e9, "gives 0.2684. Give it in bytes, not in GB."),
    "four bytes a number": (
        lambda s, t, w, b: 8 * s * t * w,
        "of 1 sequence of 2048 tokens, width 4096 and 2 bytes per number 33,554,432 bytes cross the cut; "
        "your formula gives 67,108,864. A number takes bytes_each bytes, which is not always 4.",
    ),
    "the lesson's": (lambda s, t, w, b: 268435456, "33,554,432 bytes cross the cut; your formula gives 268,435,456."),
    "of a message": (
        lambda sent: sent.nbytes,
        "give a function of sequences, length, width and bytes_each; yours takes sent.",
    ),
}


def test_a_wrong_count_of_bytes_is_explained(refused):
    for formula, reason in WRONG_BYTES.values():
        refused("01.2", formula, reason)
