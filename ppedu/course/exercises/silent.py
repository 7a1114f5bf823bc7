"""A small pipeline in one process, with bugs of the museum planted in it, and its distance from the whole model.

The ranks take turns: all forwards of one rank, then those of the next one, and the backwards from the last rank to the
first. Between two ranks, activations and gradients are copied, as if they had been sent. The museum has the same
bugs as programs for real processes.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

WORDS, WIDTH, SAMPLES, PIECES = 12, 8, 16, 4  # PIECES: microbatches
MAX_NORM = 0.1
STEPS = 20


class Trained(NamedTuple):
    """The result of `train`.

    Args:
        losses: The loss of each step.
        off: By rank, how far its gradients of the first step are off, before and after clipping: the norm of the
            difference from the whole model's gradients, over the norm of these.
    """

    losses: list[float]
    off: list[tuple[float, float]]


@cache
def train(ranks: int, bug: str = "", where: Any = None) -> Trained:
    """Train a small model on `ranks` ranks with a bug of `pp.run.MUSEUM`, such as "loss not divided".

    The first rank has an embedding, and the last a copy of it as its head.

    Args:
        where: The rank with "one receive buffer", or the two ranks with "gradients newest first".
    """
    random, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # several take longer for tensors of this size
    stages: list[Any] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(ranks)]
    stages[0].insert(0, nn.Linear(WORDS, WIDTH, bias=False))
    inputs, targets = torch.randn(SAMPLES, WORDS), torch.randint(WORDS, (SAMPLES,))
    torch.random.set_rng_state(random)
    whole: Any = nn.Sequential(*deepcopy(stages))
    embedding = stages[0][0].weight
    head: Any = nn.Parameter(embedding.detach().clone())
    held: list[list[Any]] = [[*stage.parameters()] for stage in stages]
    held[-1].append(head)
    every = [weight for weights in held for weight in weights]
    optimizer = torch.optim.AdamW(every, lr=1e-2)

    losses: list[float] = []
    off: list[tuple[float, float]] = []
    for step in range(STEPS):
        losses.append(_run(stages, head, inputs, targets, bug, where))
        if bug != "tied copies drift apart":
            embedding.grad, head.grad = (embedding.grad + head.grad for _ in range(2))
        before = [[weight.grad.clone() for weight in weights] for weights in held]
        if bug == "norm per stage":
            for weights in held:
                clip_grad_norm_(weights, MAX_NORM)
        else:  # of the two copies of a weight, one counts
            norm = get_total_norm([weight.grad for weight in every if weight is not head])
            clip_grads_with_norm_(every, MAX_NORM, norm)
        if step == 0:
            cross_entropy(whole(inputs) @ whole[0][0].weight, targets).backward()
            same = [[weight.grad for weight in stage.parameters()] for stage in whole]
            same[-1].append(whole[0][0].weight.grad)
            apart = [_apart(*each) for each in zip(before, same, strict=True)]
            clip_grad_norm_(whole.parameters(), MAX_NORM)
            after = [[weight.grad for weight in weights] for weights in held]
            off = [*zip(apart, [_apart(*each) for each in zip(after, same, strict=True)], strict=True)]
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return Trained(losses, off)


def _run(stages: Any, head: Tensor, inputs: Tensor, targets: Tensor, bug: str, where: Any) -> float:
    """Run the forwards and backwards of all microbatches, and return the loss."""
    received, sent = [], []
    ys = list(inputs.chunk(PIECES))
    for rank, stage in enumerate(stages):
        xs = [y.detach().clone().requires_grad_() for y in ys]
        ys = [stage(x) for x in xs]
        if bug == "one receive buffer" and rank == where:
            for x in xs:  # all were received into one tensor; through `data`, autograd does not notice
                x.data.copy_(xs[-1].data)
        received.append(xs)
        sent.append(ys)
    last = [y.detach().requires_grad_() for y in ys]
    losses = [cross_entropy(y @ head, target) for y, target in zip(last, targets.chunk(PIECES), strict=True)]
    for loss in losses:
        (loss if bug == "loss not divided" else loss / PIECES).backward()
    gradients = [y.grad for y in last]
    for rank in reversed(range(len(stages))):
        if bug == "gradients newest first" and where == (rank, rank + 1):
            gradients.reverse()
        for y, gradient in zip(sent[rank], gradients, strict=True):
            y.backward(gradient)
        gradients = [x.grad for x in received[rank]]
    return float(sum(loss.detach() for loss in losses) / PIECES)


def _apart(ours: list[Any], theirs: list[Any]) -> float:
    one, other = (torch.cat([each.flatten() for each in column]) for column in (ours, theirs))
    return float((one - other).norm() / other.norm())
