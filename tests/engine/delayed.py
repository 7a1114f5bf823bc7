"""Training on one process with gradients that are late, by one update as in pipedream-2bw: docs/asynchronous.md.

`PYTHONPATH=. .venv/bin/python tests/engine/delayed.py` prints all losses from which the page's tables are made.
"""

import sys
from collections import deque
from functools import partial

import torch

from ppedu.course.training.data import Text
from ppedu.run import GPT, BasisRotation, GPTConfig, error_feedback, next_token_loss

KINDS = ("AdamW", "BasisRotation", "Muon")
WAYS = {"on time": 0, "late": 1, "late, corrected": 1, "3 late": 3, "7 late": 7}  # by how many updates
RATES = (0.0025, 0.005, 0.01, 0.02, 0.04)
SEEDS, STEPS = 3, 200

TEXT, HELD = Text(), Text()
TEXT.tokens, HELD.tokens = TEXT.tokens.tensor_split([len(TEXT.tokens) * 9 // 10])
CONFIG = GPTConfig(vocabulary=len(TEXT.characters), context=32, layers=2, width=32)


class Together:
    """Several optimizers as one, because torch.optim.Muon takes matrices only."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self):
        for each in self.optimizers:
            each.step()


def optimizer(kind, module, rate, way, steps=STEPS):
    """Return the optimizer of a GPT or of a stage: that of its kind for the matrices of blocks, AdamW for all else."""
    named = dict(module.named_parameters())
    matrices = [name for name, weight in named.items() if kind != "AdamW" and "layers" in name and weight.dim() == 2]
    made = [torch.optim.AdamW([named[name] for name in named if name not in matrices], rate, betas=(0.9, 0.95))]
    if matrices:
        make = BasisRotation if kind == "BasisRotation" else torch.optim.Muon
        more = {"betas": (0.9, 0.95)} if kind == "BasisRotation" else {"adjust_lr_fn": "match_rms_adamw"}
        made.append(make([named[name] for name in matrices], rate, **more))
    for each in made:
        each.param_groups[0]["weight_decay"] = 0.1
        falling = torch.optim.lr_scheduler.LambdaLR(each, partial(part_of_rate, steps))
        each.register_step_post_hook(lambda *_, falling=falling: falling.step())
        if way == "late, corrected":
            error_feedback(each)
    return Together(made)


def part_of_rate(steps, step):
    """Return by what a learning rate is multiplied, which rises for a tenth of the steps, and then falls to 0."""
    return min(10 * (step + 1) / steps, 1) * (1 - step / steps)


def batches(updates, microbatches, seed):
    """Return the inputs and the targets of all microbatches; an update has 8 sequences."""
    both = TEXT.batch(8 * updates, CONFIG.context, seed)
    return [each.chunk(updates * microbatches) for each in both]


def train(kind, rate, way, seed=0, updates=STEPS, microbatches=1):
    """Return a GPT after training. Late gradients are those of the weights as many updates ago."""
    model = GPT(CONFIG, seed=seed)
    weights = list(model.parameters())
    stepper = optimizer(kind, model, rate, way, updates)
    inputs, targets = batches(updates, microbatches, seed)
    versions = deque([[weight.data for weight in weights]], maxlen=1 + WAYS[way])
    for update in range(updates):
        put(weights, versions[0])
        for m in range(update * microbatches, (update + 1) * microbatches):
            (next_token_loss(model(inputs[m]), targets[m]) / microbatches).backward()
        versions.append([each.clone() for each in versions[-1]])
        put(weights, versions[-1])
        stepper.step()
        model.zero_grad()
    return model


def put(weights, tensors):
    """Give weights these tensors, without a change of either."""
    for weight, tensor in zip(weights, tensors, strict=True):
        weight.data = tensor


def losses(kind, rate, way, seeds=SEEDS):
    """Return, for each seed, the loss after training, on text that was not trained on."""
    inputs, targets = HELD.batch(256, CONFIG.context, seed=0)
    with torch.no_grad():
        models = [torch.enable_grad()(train)(kind, rate, way, seed) for seed in range(seeds)]
        return [next_token_loss(model(inputs), targets).item() for model in models]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind in sys.argv[1:] or KINDS:
        for way in WAYS:
            for rate in RATES:
                found = losses(kind, rate, way)
                print(f"{kind}, {way}, {rate}: {sum(found) / SEEDS:.3f} of", *map("{:.3f}".format, found), flush=True)
