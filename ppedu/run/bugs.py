"""The bug museum: training steps as people write them, each wrong in one thing. To be read beside `loops`.

    print(MUSEUM)                               # a table: what you see, what finds it, what to do
    print(MUSEUM["both send first"])            # one exhibit, with its program
    MUSEUM["both send first"].wrong(stage, inputs, targets, shape)    # on each rank; `right` takes the same

Most are steps, and take what those of `loops` take; the ranks are the whole world. The others are schedules, which take
what those of `ppedu.zoo` take, one that makes the layers of a stage, and two of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core.actions import Action
from ppedu.core.errors import SettingError
from ppedu.core.export import to_torch
from ppedu.core.tables import in_html, in_text
from ppedu.run.comm import PipelineGroup, communicate
from ppedu.run.loops import Microbatches, gpipe_step, one_f_one_b_step
from ppedu.run.pipeline import Pipeline
from ppedu.run.stage import Loss, Stage
from ppedu.zoo import schedule
from ppedu.zoo.one_f_one_b import one_f_one_b

Program = Callable[..., Any]


@dataclass(frozen=True, repr=False)
class Bug:
    """An exhibit. Printed, it is its program, with what you see of it, what finds it and what to do.

    title: what is wrong. source: where it was seen; "" for what people write again and again.
    wrong: the program; right: one without the bug, which takes the same arguments.
    """

    title: str
    symptom: str
    detector: str
    cure: str
    source: str
    wrong: Program
    right: Program

    @property
    def name(self) -> str:
        return self.wrong.__name__.replace("_", " ")

    def __repr__(self) -> str:
        source = inspect.getsource(self.wrong)
        told = {"You see": self.symptom, "Found by": self.detector, "Cure": self.cure, "Seen in": self.source}
        lines = [f"{word}: {text}" for word, text in told.items() if text]
        return "\n".join([*lines, "", source[source.index("def ") :].rstrip()])


class Museum(dict[str, Bug]):
    """The exhibits by name. Printed, or at the end of a notebook's cell, they are a table."""

    def __getitem__(self, name: str) -> Bug:
        if not isinstance(name, str) or name not in self:
            raise SettingError(f"there is no exhibit {name!r}; there is: {', '.join(self)}")
        return super().__getitem__(name)

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(row) for row in in_text(self._rows(), 27))

    def _repr_html_(self) -> str:
        return in_html([escape(cell) for cell in row] for row in self._rows())

    def _rows(self) -> list[Sequence[str]]:
        bugs = ((bug.name, bug.symptom, bug.detector, bug.cure) for bug in self.values())
        return [("bug", "you see", "found by", "cure"), *bugs]


MUSEUM = Museum()


def exhibit(
    right: Program, *, symptom: str, detector: str, cure: str, source: str = ""
) -> Callable[[Program], Program]:
    """Put a wrong program into the museum. What is wrong with it, its docstring says."""

    def put(wrong: Program) -> Program:
        bug = Bug(inspect.getdoc(wrong) or "", symptom, detector, cure, source, wrong, right)
        MUSEUM[bug.name] = bug
        return wrong

    return put


# Parts that are right


def forwards(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """The first half of `gpipe_step`."""
    stage.begin(inputs, targets)
    for m in range(len(inputs)):
        x = communicate("recv_forward", shapes=shape)
        communicate("send_forward", stage.forward(m, x))


def backwards(stage: Stage, order: Sequence[int], shape: Sequence[int]) -> None:
    """The second half of `gpipe_step`, of these microbatches."""
    for m in order:
        dy = communicate("recv_backward", shapes=shape)
        communicate("send_backward", stage.backward(m, dy))


def engine_step(
    stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int], **settings: Any
) -> Pipeline:
    """`gpipe_step` by the engine, which counts samples and knows of norms and of tied weights."""
    group = PipelineGroup.world()
    pipeline = Pipeline(schedule("gpipe", group.size, len(inputs)), {group.rank: stage}, **settings)
    pipeline.step(list(inputs), list(targets))
    return pipeline


# Ranks that hang


@exhibit(
    one_f_one_b_step,
    symptom="all ranks wait for ever; elsewhere than with gloo perhaps only once the tensors are large",
    detector="who waits for whom, as %%torchrun tells it at a timeout: all send, none receives",
    cure="send and receive at once: bidirectional_communicate",
)
def both_send_first(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """1F1B as one thinks of it: a rank sends its activation down while the next one sends a gradient up."""
    rank, ranks, microbatches = dist.get_rank(), dist.get_world_size(), len(inputs)
    warmup = min(ranks - rank - 1, microbatches)
    stage.begin(inputs, targets)
    for m in range(warmup):
        x = communicate("recv_forward", shapes=shape)
        communicate("send_forward", stage.forward(m, x))

    for m in range(warmup, microbatches):
        x = communicate("recv_forward", shapes=shape)
        communicate("send_forward", stage.forward(m, x))
        dy = communicate("recv_backward", shapes=shape)
        communicate("send_backward", stage.backward(m - warmup, dy))

    backwards(stage, range(microbatches - warmup, microbatches), shape)


def as_another(other: int, rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """What 1F1B has another rank do, done by this one."""
    return (action._replace(stage=rank) for action in one_f_one_b(other, ranks, microbatches))


@exhibit(
    one_f_one_b,
    symptom="ranks wait for ever",
    detector="pp.check, before anything is started",
    cure="the first rank has the longest warm-up: min(ranks - rank - 1, microbatches)",
)
def warmup_reversed(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """A 1F1B in which the last rank has the longest warm-up: it wants more than the first has begun."""
    return as_another(ranks - 1 - rank, rank, ranks, microbatches)


@exhibit(
    one_f_one_b,
    symptom="all is right, and slow: 36 in place of 22 with 4 ranks, 8 microbatches and F = B = 1",
    detector="the makespan, simulated (pp.simulate) or measured, beside that of 1F1B",
    cure="a warm-up of min(ranks - rank - 1, microbatches), and not one less",
)
def warmup_short_by_one(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Each rank begins its turns one forward too early, and waits in each of them."""
    return as_another(min(rank + 1, ranks - 1), rank, ranks, microbatches)


# Messages that are taken for others, and memory that is


@exhibit(
    gpipe_step,
    symptom="gradients are nonsense on all ranks but the last; the loss is right",
    detector="gradients beside one process; in a schedule pp.check, which compares the order of sends and of receives",
    cure="between two ranks, receive in the order in which the other sends",
)
def newest_first_on_the_last(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """The last rank sends its gradients in another order than the others receive them. A message has no name on it."""
    forwards(stage, inputs, targets, shape)
    order = range(len(inputs))
    backwards(stage, order[::-1] if dist.get_rank() == dist.get_world_size() - 1 else order, shape)


@exhibit(
    gpipe_step,
    symptom="gradients are off, but for the first rank's, by much; no error from autograd, and the loss is right",
    detector="gradients beside one process",
    cure="a new tensor for each message, as long as its backward is still to come",
)
def one_buffer_for_all(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """All activations are received into the same memory, but autograd needs each again in its backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffer = torch.empty(tuple(shape))
    stage.begin(inputs, targets)
    for m in range(len(inputs)):
        if rank > 0:
            dist.recv(buffer, rank - 1)
        y = stage.forward(m, buffer.detach().requires_grad_() if rank > 0 else None)
        if rank < ranks - 1:
            dist.send(y.detach(), rank + 1)
    backwards(stage, range(len(inputs)), shape)


@exhibit(
    gpipe_step,
    symptom="now and then wrong values arrive: those of a later microbatch, where the receiver is late",
    detector="Pipeline(debug=True), which looks again at what was sent once it has arrived",
    cure="leave a tensor alone from isend() until its wait() has returned",
)
def written_after_isend(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """One memory for all that is sent: the next activation is written while the last one is on its way."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffer = torch.empty(tuple(shape))
    sends: list[Any] = []
    stage.begin(inputs, targets)
    for m in range(len(inputs)):
        x = torch.empty(tuple(shape))
        if rank > 0:
            dist.recv(x, rank - 1)
        y = stage.forward(m, x.requires_grad_() if rank > 0 else None)
        if rank < ranks - 1:
            buffer.copy_(y.detach())
            sends.append(dist.isend(buffer, rank + 1))
    for each in sends:
        each.wait()
    backwards(stage, range(len(inputs)), shape)


# Gradients that are not the batch's


@exhibit(
    gpipe_step,
    symptom="gradients m times too large; the loss falls as it should, as AdamW and clipping hide the factor",
    detector="gradients beside one process",
    cure="divide each microbatch's loss by m before its backward",
)
def loss_not_divided(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Each microbatch's loss is its mean, and backward adds up the gradients of all of them."""
    stage.begin(inputs, targets, shares=[Fraction(1) for _ in inputs])  # each counts in full
    for m in range(len(inputs)):
        x = communicate("recv_forward", shapes=shape)
        communicate("send_forward", stage.forward(m, x))
    backwards(stage, range(len(inputs)), shape)


@exhibit(
    engine_step,
    symptom="loss and gradients a little off, by no constant factor",
    detector="gradients beside one process, with a batch that does not divide evenly",
    cure="a microbatch's loss counts as its part of the batch's samples, or tokens; Pipeline counts them",
    source="huggingface.co/blog/gradient_accumulation",
)
def mean_of_means(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Each loss counts 1/m, though the last microbatch is smaller: its samples count too much."""
    stage.begin(inputs, targets)  # equal parts
    for m, samples in enumerate(inputs):
        own = len(samples), *shape[1:]
        x = communicate("recv_forward", shapes=own)
        communicate("send_forward", stage.forward(m, x))
        dy = communicate("recv_backward", shapes=own)
        communicate("send_backward", stage.backward(m, dy))


@exhibit(
    gpipe_step,
    symptom="training learns from a fraction of the data, and the loss of a step is noisier",
    detector="the losses of the microbatches: they are all the same; gradients beside one process",
    cure="one iterator for the whole epoch: next(batches), not next(iter(loader))",
)
def the_first_again_and_again(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """iter() starts anew each time, so every microbatch is the first one."""
    xs = [next(iter(inputs)) for _ in inputs]
    ys = [next(iter(targets)) for _ in targets]
    gpipe_step(stage, xs, ys, shape)


@exhibit(
    gpipe_step,
    symptom="gradients lack a microbatch's part, and its activations are never freed; the loss is right",
    detector="pp.check, of the schedule or of what a step has run (`measured`)",
    cure="each forward has its backward: count them",
    source="a printed 1F1B table, in which every rank runs all its forwards first",
)
def backward_lost(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """The backward of microbatch 1 is never run."""
    forwards(stage, inputs, targets, shape)
    backwards(stage, [0, *range(2, len(inputs))], shape)


# What belongs to the whole model

MOST = 0.01  # that the norm of the gradients may be


@exhibit(
    lambda *step: engine_step(*step).clip_grad_norm(MOST),
    symptom="the step points in another direction; the norm of each stage looks well",
    detector="gradients after clipping, beside one process",
    cure="add up the squares over all ranks, and clip by the root of that: Pipeline.clip_grad_norm",
    source="github.com/pytorch/torchtitan/issues/596",
)
def norm_of_its_own(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Each rank clips by the norm of its own stage: what it has of the model is all that torch sees."""
    gpipe_step(stage, inputs, targets, shape)
    nn.utils.clip_grad_norm_(stage.module.parameters(), MOST)


def _tied_step(*step: Any) -> None:
    engine_step(*step, tied=[((0, "weight"), (dist.get_world_size() - 1, "weight"))])


@exhibit(
    _tied_step,
    symptom="from the first step on the two copies of the weight drift apart",
    detector="are the copies equal after a step? Pipeline(tied=…) asks before its first; gradients beside one process",
    cure="give both the sum of their gradients: Pipeline(tied=…)",
)
def copies_drift_apart(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """The first rank and the last each hold a copy of a tied weight, which gets the gradient of its own use alone."""
    gpipe_step(stage, inputs, targets, shape)


def replicas_step(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Every rank is a pipeline of one stage, and all ranks are replicas: each has its own part of the batch."""
    alone = PipelineGroup(0, 1)
    pipeline = Pipeline(schedule("gpipe", 1, len(inputs)), {0: stage}, group=alone, replicas=dist.group.WORLD)
    pipeline.step(list(inputs), list(targets))


@exhibit(
    replicas_step,
    symptom="replicas drift apart: only the first microbatch's gradients are averaged over them; no error",
    detector="gradients beside one process; Pipeline refuses a module in such a wrapper",
    cure="give the plain module, and average once, after the last backward: Pipeline(replicas=group)",
)
def wrapped_in_ddp(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """DistributedDataParallel averages at the first backward after a forward, and the others belong to no forward."""
    wrapped = Stage(nn.parallel.DistributedDataParallel(stage.module), 0, stage.loss_fn)
    wrapped.begin(inputs, targets)
    for m in range(len(inputs)):
        wrapped.forward(m)
    for m in range(len(inputs)):
        wrapped.backward(m)


def _slice(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return [make() for _ in range(dist.get_world_size())][dist.get_rank()]


@exhibit(
    _slice,
    symptom="all stages start equal; training does learn, only not as the same model in one process",
    detector="weights beside one process, before the first step",
    cure="make the whole model from one seed, and keep a slice; GPT.stage makes just that",
)
def same_seed_everywhere(make: Callable[[], nn.Module]) -> nn.Module:
    """Each rank seeds alike, and then makes its own layers alone."""
    torch.manual_seed(0)
    return make()


# In torch's own runtime

MICROBATCHES = 3  # as few as it takes


def torchs_step(
    modules: Mapping[int, nn.Module], loss_fn: Loss, inputs: torch.Tensor, targets: torch.Tensor, **settings: Any
) -> Any:
    """ZB-V by torch. Rank r of p holds the stages r and 2p-1-r, so rank 0 has the first and the last.

    modules: of this rank, by stage. Returns torch's runtime.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = [PipelineStage(module, index, 2 * ranks, torch.device("cpu")) for index, module in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn, **settings)
    with TemporaryDirectory() as folder:
        to_torch(schedule("zb-v", ranks, MICROBATCHES), f"{folder}/zb-v.csv")
        runtime._load_csv(f"{folder}/zb-v.csv", format="compute_only")
    runtime.step(*[inputs] * (rank == 0), target=targets if rank == 0 else None)
    return runtime


def zb_v_step(modules: Mapping[int, nn.Module], loss_fn: Loss, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """The same by the engine."""
    Pipeline(schedule("zb-v", dist.get_world_size(), MICROBATCHES), modules, loss_fn).step(inputs, targets)


@exhibit(
    torchs_step,
    symptom="gradients of all stages are wrong; nothing hangs and nothing complains",
    detector="pp.check, of the orders that torch writes out with _dump_csv; gradients beside one process",
    cure="leave defer_pp_recv as it is, False",
    source="torch 2.13, github.com/pytorch/pytorch/pull/178815, ZB-V on 2 ranks",
)
def receives_put_off(
    modules: Mapping[int, nn.Module], loss_fn: Loss, inputs: torch.Tensor, targets: torch.Tensor
) -> Any:
    """Each receive waits until its message is needed, and so is in another order than the sends."""
    return torchs_step(modules, loss_fn, inputs, targets, defer_pp_recv=True)


@exhibit(
    zb_v_step,
    symptom="the stage after it gets no gradients, and never learns; the others' and the loss are right",
    detector="gradients beside one process: .grad is None",
    cure="a schedule with whole backwards, such as 1F1B; or Pipeline",
    source="torch 2.13, where backwards are split in two",
)
def first_stage_frozen(
    modules: Mapping[int, nn.Module], loss_fn: Loss, inputs: torch.Tensor, targets: torch.Tensor
) -> Any:
    """No weight of stage 0 wants a gradient. Torch then takes no gradient of the weights of stage 1."""
    return torchs_step(modules, loss_fn, inputs, targets)
