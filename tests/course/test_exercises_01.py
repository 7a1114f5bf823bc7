"""Lesson 1: the ranks for a budget, without and with activations, and the bytes over the cuts, against real modules."""

import pytest
import torch
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

from ppedu.course.exercises import lesson_01
from ppedu.course.project import Project
from ppedu.notebook import heron
from ppedu.run import GPT, GPTConfig
from ppedu.sim.partition import evenly

RIGHT = {}
WRONG = {}


def weights(model, ranks):
    held = [len(layers) * model.layer_weights for layers in evenly(model.layers, ranks)]
    held[0] += model.vocabulary * model.width
    held[-1] += model.vocabulary * model.width
    return held


def first(fits, bytes_each=16):
    """Return an answer: the fewest ranks for which `fits` is true, given the bytes on each rank and the budget."""

    def fewest(model, budget):
        counts = range(1, model.layers + 1)
        held = ([bytes_each * each for each in weights(model, ranks)] for ranks in counts)
        return next(ranks for ranks, each in zip(counts, held, strict=True) if fits(each, budget))

    return fewest


right = first(lambda held, budget: max(held) <= budget)


# Exercise 1: the fewest ranks for a budget


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_stage_in_mixed_precision_holds_the_bytes_that_the_check_expects(ranks):
    """Up to biases, norms and positions, which the project's count of weights leaves out."""
    config = GPTConfig(vocabulary=5000, context=16, layers=5, heads=2, width=128)
    expected = lesson_01._held(Project(layers=5, width=128, vocabulary=5000), ranks)
    for stage, bytes_expected in enumerate(expected):
        module = GPT.stage(config, stage, ranks).bfloat16()
        masters = [weight.detach().float().requires_grad_() for weight in module.parameters()]
        optimizer = torch.optim.Adam(masters)
        x = torch.zeros(1, 4, dtype=torch.int64) if stage == 0 else torch.zeros(1, 4, 128, dtype=torch.bfloat16)
        module(x).sum().backward()
        for master, weight in zip(masters, module.parameters(), strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        tensors = [each for weight in module.parameters() for each in (weight, weight.grad)] + masters
        tensors += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(bytes_expected, rel=0.02)


RIGHT["01.1"] = [right]


def power_of_two(model, budget):
    return next((ranks for ranks in (1, 2, 4, 8) if 16 * max(weights(model, ranks)) <= budget), 16)


WRONG["01.1"] = {
    "over the budget, rounded up": (
        lambda model, budget: -int(-16 * sum(weights(model, 1)) // budget),
        "120 GB the model does not fit on 8 ranks: rank 0 holds 8 layers and the embedding, 120.3 GB. That is the "
        "size of the whole model divided",
    ),
    "rounded down": (
        lambda model, budget: int(16 * sum(weights(model, 1)) // budget) or 1,
        "does not fit on 7 ranks: rank 0 holds 10 layers and the embedding, 146 GB",
    ),
    "the layers' total": (
        lambda model, budget: -int(-16 * model.layers * model.layer_weights // budget),
        "the size of all layers divided by the budget, as if they could be cut anywhere, and without the embedding",
    ),
    "forgets the 16": (
        first(lambda held, budget: max(held) <= budget, bytes_each=1),
        "each weight takes 16 bytes.",
    ),
    "forgets the 16, over the budget": (
        lambda model, budget: -int(-sum(weights(model, 1)) // budget),
        "does not fit on 1 rank: rank 0 holds 64 layers, the embedding and the head, 859 GB. That compares bytes with "
        "a number of weights",
    ),
    "weights alone": (
        first(lambda held, budget: max(held) <= budget, bytes_each=2),
        "That is 2 bytes per weight: the weights without gradients and Adam, or one GPU's share",
    ),
    "without Adam": (
        first(lambda held, budget: max(held) <= budget, bytes_each=4),
        "Adam needs another 12 bytes per weight.",
    ),
    "Adam alone": (first(lambda held, budget: max(held) <= budget, bytes_each=12), "need memory too."),
    "the emptiest": (
        first(lambda held, budget: min(held) <= budget),
        "enough for the rank that holds least; look at the fullest.",
    ),
    "the last": (first(lambda held, budget: held[-1] <= budget), "enough for the last rank; look at the fullest."),
    "layers alone": (
        lambda model, budget: next(
            ranks for ranks in range(1, 65) if 16 * -(-model.layers // ranks) * model.layer_weights <= budget
        ),
        "That counts the layers only; the first rank also holds the embedding",
    ),
    "less than the budget": (
        first(lambda held, budget: max(held) < budget),
        "it fits on 6 ranks, but 4 would be enough. A rank that uses its budget up to the last byte still fits.",
    ),
    "a power of two": (
        power_of_two,
        "it fits on 16 ranks, but 10 would be enough. The number of ranks does not have to be a power of two.",
    ),
    "one too many": (lambda model, budget: min(right(model, budget) + 1, model.layers), "but 10 would be enough."),
    "one rank": (lambda model, budget: 1, "on 1 rank: rank 0 holds 64 layers, the embedding and the head, 859 GB."),
    "the lesson's": (lambda model, budget: 10, "a budget of 640 GB it fits on 10 ranks, but 2 would be enough"),
    "not whole": (
        lambda model, budget: 16 * sum(weights(model, 1)) / budget,
        "your function returns 7.158 instead of a whole number from 1 to 64.",
    ),
    "none": (lambda model, budget: 0, "your function returns 0 instead of a whole number from 1 to 64"),
    "more than layers": (lambda model, budget: 65, "your function returns 65 instead of a whole number from 1 to 64"),
    "stages that there are not": (lambda model, budget: len(weights(model, 65)), "cannot be cut into 65 stages"),
    "a typing error": (lambda model, budget: modle, "your function fails at line"),  # noqa: F821
}


# Exercise 2: the bytes over the cuts


def measured(ranks, sequences, length, width, bytes_each):
    """Measure the bytes that the stages send in a forward, plus those of the gradients."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[bytes_each]
    config = GPTConfig(vocabulary=10, context=length, layers=ranks, heads=1, width=width)
    sent = []
    with torch.device("meta"):
        x = torch.zeros(sequences, length, dtype=torch.int64)
        for stage in range(ranks):
            x = GPT.stage(config, stage, ranks).to(dtype)(x)
            sent.append(x.nbytes)
    return 2 * sum(sent[:-1])


RIGHT["01.2"] = {"measured": measured, "a float": lambda p, s, t, w, b: 2.0 * (p - 1) * s * t * w * b}


WRONG["01.2"] = {
    "down": (
        lambda p, s, t, w, b: (p - 1) * s * t * w * b,
        "60,129,542,144 bytes cross the cuts; your formula gives 30,064,771,072. That is the way down.",
    ),
    "a cut per rank": (lambda p, s, t, w, b: 2 * p * s * t * w * b, "nothing crosses the ends of the pipeline."),
    "a message per rank": (lambda p, s, t, w, b: p * s * t * w * b, "the last one sends none."),
    "one cut": (lambda p, s, t, w, b: 2 * s * t * w * b, "That is what crosses one cut, both ways; count all cuts."),
    "one cut, down": (lambda p, s, t, w, b: s * t * w * b, "count all cuts, both ways."),
    "one activation": (lambda p, s, t, w, b: t * w * b, "one sequence, over one cut, on the way down only."),
    "one sequence and cut": (lambda p, s, t, w, b: 2 * t * w * b, "one sequence over one cut; count them all."),
    "one sequence": (lambda p, s, t, w, b: 2 * (p - 1) * t * w * b, "every sequence crosses every cut."),
    "numbers": (
        lambda p, s, t, w, b: 2 * (p - 1) * s * t * w,
        "counts the numbers that cross the cuts; multiply by the bytes of each.",
    ),
    "one token": (lambda p, s, t, w, b: 2 * (p - 1) * s * w * b, "That is one token of each sequence"),
    "tokens": (
        lambda p, s, t, w, b: 2 * (p - 1) * s * t * b,
        "That is one number per token. That holds only for the input; between two layers, each token is "
        "represented by `width` numbers.",
    ),
    "sent and received": (lambda p, s, t, w, b: 4 * (p - 1) * s * t * w * b, "That is twice too many."),
    "a GPU's share": (lambda p, s, t, w, b: (p - 1) * s * t * w * b / 4, "the share of one GPU; count the whole node."),
    "GB": (lambda p, s, t, w, b: 2 * (p - 1) * s * t * w * b / 1e9, "gives 60.13. Give it in bytes, not in GB."),
    "two bytes a number": (
        lambda p, s, t, w, b: 4 * (p - 1) * s * t * w,
        "your formula gives 100,663,296. A number takes bytes_each bytes, which is not always 2.",
    ),
    "the lesson's": (lambda p, s, t, w, b: 60129542144, "with 4 ranks, 1 sequence of 2048 tokens, width 4096 and 4"),
}


# Exercise 3: the fewest ranks with the activations of all microbatches


def training(kept=lambda model, microbatches: microbatches, each=16, least=max):
    """Return an answer: the fewest ranks on which a GPU holds the state and the activations of `kept` microbatches."""

    def fewest(model, microbatches):
        for ranks in range(1, model.layers + 1):
            layers = [len(piece) for piece in evenly(model.layers, ranks)]
            activations = [count * kept(model, microbatches) * model.layer_activation for count in layers]
            states = [each * count / model.node for count in weights(model, ranks)]
            if least(map(sum, zip(states, activations, strict=True))) <= model.memory:
                return ranks
        return model.layers

    return fewest


RIGHT["01.3"] = [training()]


def test_gpipe_needs_ten_nodes_where_the_weights_need_two():
    assert training()(heron, 32) == 10 and training(lambda model, _: 0)(heron, 32) == 2


def total_over_memory(model, microbatches):
    total = 16 * model.weights / model.node + model.layers * microbatches * model.layer_activation
    return min(model.layers, -int(-total // model.memory))


WRONG["01.3"] = {
    "no activations": (
        training(lambda model, _: 0),
        "with 64 layers of width 8192, 32 microbatches and nodes of 8 GPUs of 80 GB it does not fit on 2 ranks: rank 0 "
        "holds 32 layers and the embedding, with activations 345.7 GB on each GPU. That leaves out the activations.",
    ),
    "one microbatch": (training(lambda model, _: 1), "each rank keeps those of all microbatches."),
    "activations alone": (training(each=0), "That leaves out weights, gradients and Adam."),
    "without Adam": (training(each=2), "That counts the weights, but not their gradients and Adam."),
    "weights on each GPU": (training(each=128), "they share them."),
    "activations of one GPU": (
        training(lambda model, kept: kept / model.node),
        "`layer_activation` is already one GPU's share: do not divide it again, nor add it to a whole node's weights.",
    ),
    "the total": (total_over_memory, "does not fit on 9 ranks: rank 0 holds 8 layers and the embedding"),
    "the total's reason": (total_over_memory, "That divides the total by the memory"),
    "of all layers": (
        training(lambda model, kept: kept * model.layers),
        "it fits on 64 ranks, but 10 would be enough. That keeps the activations of all layers on each rank",
    ),
    "the emptiest": (training(least=min), "enough for the rank that holds least; look at the fullest."),
    "the lesson's": (lambda model, microbatches: 10, "with 64 layers of width 8192, 1 microbatch and"),
    "one rank": (lambda model, microbatches: 1, "on 1 rank: rank 0 holds 64 layers, the embedding and the head"),
    "none": (lambda model, microbatches: 0, "returns 0 instead of a whole number from 1 to 64."),
}
