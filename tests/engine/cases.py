"""Cases for real ranks: short programs that run one after the other in one launch, since starting ranks takes time."""

import inspect
import json

from hypothesis import settings
from torch import nn

import ppedu as pp


def named(name, ranks, microbatches):
    """Return a registered schedule, one with R, or O and L, or one of the atlas: 'recompute zb-v', 'atlas v 5'."""
    if name.startswith(("recompute", "offload")):
        change, of = name.split()
        return getattr(pp, change)(pp.schedule(of, ranks, microbatches))
    if not name.startswith("atlas"):
        return pp.schedule(name, ranks, microbatches)
    _, place, memory = name.split()
    return pp.search.atlas(ranks, microbatches, int(memory), place).schedule


class Of(nn.Module):
    """A module with these parts, weights and modules, which computes `run(self, *inputs)`."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **keywords):
        return self.run(self, *inputs, **keywords)


STOPPED = "PipelineError: this pipeline cannot be used after an error within a step "
AGAIN = "0.82"  # the loss of a good step of a case's pipeline
OF, NAMED = inspect.getsource(Of), inspect.getsource(named)  # for programs

BEGIN = """
import copy, json, os, random, re, sys, time, traceback, warnings
from collections import Counter
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as fn
import ppedu as pp
from ppedu import Op
from ppedu.engine import clock
from ppedu.run import GPT, Batching, GPTConfig, LossScale, Memory, Pipeline, PipelineGroup, PostValidation, Stage
from ppedu.run import cut, local_stages, next_token_loss

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def layer(stage):
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
"""  # of programs that ranks run

ONE_PROCESS = """
class Joined:
    "A past as one process has it: keys and values of all slices, joined within autograd's graph."
    def __init__(self):
        self.length, self.kept = 0, {}

    def update(self, key, value, layer):
        self.kept.setdefault(layer, []).append((key, value))
        return [torch.cat(each, -2) for each in zip(*self.kept[layer])]

def one_process(schedule, modules, inputs, targets, loss_fn):
    "Return the loss; add each stage's gradients to `.grad`, in the order of the schedule, without a Pipeline."
    grads, losses, total, slices = {}, [], torch.zeros(()), schedule.slices
    for m, (sequence, labels) in enumerate(zip(inputs, targets, strict=True)):
        pasts, copies, loss = [Joined() for _ in modules], [], 0  # a copy of the weights for each slice's gradients
        for x, y in zip(*[whole.tensor_split(slices, 1) if slices > 1 else [whole] for whole in (sequence, labels)]):
            copies.append(copy.deepcopy(modules) if slices > 1 else modules)
            length = x.shape[1]
            for module, past in zip(copies[-1], pasts, strict=True):
                x = module(x, past=past) if slices > 1 else module(x)
                past.length += length
            losses.append(loss_fn(x, y) / (len(inputs) * slices))
            loss = loss + losses[-1]
        weights = [weight for each in copies for weight in nn.ModuleList(each).parameters()]
        found = iter(torch.autograd.grad(loss, weights))
        for number, each in enumerate(copies, m * slices):
            for stage, module in enumerate(each):
                grads[stage, number] = [next(found) for _ in module.parameters()]
    for one in (single for order in schedule.orders for action in order for single in action.singles):
        if one.op == "F" and one.stage == schedule.stages - 1:
            total += losses[one.microbatch].detach()
        if one.op in ("B", "W"):
            for weight, grad in zip(modules[one.stage].parameters(), grads[one.stage, one.microbatch], strict=True):
                weight.grad = grad if weight.grad is None else weight.grad + grad
    return total
"""

# Cases are run one after the other, each with fresh connections, by pipelines of 3 or 4 ranks side by side.
PRELUDE = (
    BEGIN
    + """
warnings.simplefilter("error")
size = int(sys.argv[1])
place, rank = divmod(dist.get_rank(), size)
own = range(place * size, place * size + size)
FULL = "full" in sys.argv[3:]

def some(*cases):
    "Return the last two cases of one claim; all in a full run."
    return cases if FULL else cases[-2:]

def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

X, Y = numbers(8, 4), numbers(4, 8).t()
SPOILT = X.clone()
SPOILT[4, 0] = torch.nan  # in microbatch 2

"""
    + OF
    + """
def fresh():
    return PipelineGroup(rank, size, dist.new_group(own, use_local_synchronization=True))

def two_replicas():
    "Divide four ranks into two pipelines; return this rank's place in its own, its number, its group and replicas."
    half, mine = divmod(rank, 2)
    group = PipelineGroup(mine, 2, dist.new_group([2 * half, 2 * half + 1], use_local_synchronization=True))
    return mine, half, group, dist.new_group([mine, 2 + mine], use_local_synchronization=True)

def make(schedule="1f1b", microbatches=4, change=None, **options):
    "Make a pipeline of small layers; `change` replaces modules, by stage."
    if isinstance(schedule, str):
        schedule = pp.schedule(schedule, size, microbatches)
    stages = {stage: (change or {}).get(stage) or layer(stage) for stage in local_stages(schedule, rank)}
    return Pipeline(schedule, stages, **{"loss_fn": fn.mse_loss, "group": fresh(), "timeout": 1.5} | options)

def interrupt():
    raise KeyboardInterrupt

def outcome(call):
    try:
        return call()
    except BaseException as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == "<string>"]
        return f"{type(error).__name__}: {error} (lines {lines})"

def parts(pieces):
    return [each if isinstance(each, tuple) else (each,) for each in pieces]

def reference(modules, inputs=X.split(2), targets=Y.split(2), loss_fn=fn.mse_loss, **keywords):
    "Return each microbatch's loss, computed on one process; leave the gradients of their mean in the modules."
    losses, total = [], sum(map(len, targets))
    for x, y in zip(parts(inputs), targets, strict=True):
        for module in modules:
            x = parts([module(*x, **keywords)])[0]
        losses.append(loss_fn(*x, y))
        (losses[-1] * len(y) / total).backward()
    return torch.stack(losses).detach()

def agree(pipeline, modules, losses=None, exact=True):
    "Assert that the gradients of a pipeline, its loss and its losses are those of one process."
    for index, stage in pipeline.stages.items():
        for ours, theirs in zip(stage.module.parameters(), modules[index].parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None, index
            elif exact:
                assert torch.equal(ours.grad, theirs.grad), index
            else:
                torch.testing.assert_close(ours.grad, theirs.grad)
    if losses is not None:
        assert torch.equal(pipeline.losses, losses) and torch.allclose(pipeline.loss, losses.mean())

for case, code in json.loads(sys.argv[2])[place]:
    names = dict(globals())
    start = time.monotonic()
    first = outcome(lambda: exec(code, names)) or "fine"
    took = time.monotonic() - start
    then = outcome(lambda: round(names["pipeline"].step(X, Y).item(), 4)) if first != "fine" and size == 3 else ""
    print(json.dumps([case, first, then, took]), flush=True)
    fresh()
dist.barrier()
"""
)


def run(ranks, size, side_by_side, cases):
    """Run the programs `cases`, by name, on pipelines of `size` ranks, with `side_by_side` pipelines at the same time.

    Return a list for each case, with an entry for each rank: the case's error, or "fine"; the loss or error of a step
    after it; and the seconds that the case took.
    """
    shares = [[(name, cases[name]) for name in list(cases)[place::side_by_side]] for place in range(side_by_side)]
    profile = "full" if settings().max_examples == 100 else "quick"
    output = ranks(PRELUDE, size * side_by_side, str(size), json.dumps(shares), profile, timeout=200)
    found: dict[str, list[tuple[str, str, float]]] = {}
    for text in output:
        for case, first, then, took in map(json.loads, text.splitlines()):
            found.setdefault(case, []).append((first, str(then), took))
    return found
