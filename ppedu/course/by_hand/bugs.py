"""The bug museum: training steps with one typical mistake each. Read them beside `loops`.

    print(MUSEUM)                               # a table: what you see, what finds the bug, how to fix it
    print(MUSEUM["both send first"])            # one exhibit, with its program
    MUSEUM["both send first"].wrong(stage, inputs, targets, shape)    # on every rank; `right` takes the same arguments

Most exhibits are steps with the arguments of those in `loops`, on all ranks of the program. Some are generators of a
schedule as in `ppedu.zoo`, one makes the layers of a stage, and two run torch's own pipeline runtime.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core import Action, B, F, SettingError
from ppedu.core.tables import LINE, in_html, in_text
from ppedu.course.by_hand.loops import Microbatches, gpipe_step, one_f_one_b_step
from ppedu.engine.batch import Batching
from ppedu.engine.pipeline import Pipeline
from ppedu.engine.ranks.comm import PipelineGroup, communicate
from ppedu.engine.stages.stage import Loss, Stage
from ppedu.engine.torchs import to_torch
from ppedu.zoo import schedule
from ppedu.zoo.one_f_one_b import one_f_one_b

Program = Callable[..., Any]


@dataclass(frozen=True, repr=False)
class Bug:
    """An exhibit. Its repr is the symptom, then the program, then the detector and the cure.

    Args:
        wrong: The program with the bug; its docstring says what the mistake is.
        right: A correct program that takes the same arguments.
        symptom, detector, cure: What you see, what finds the bug, and how to fix it.
        source: Where the bug was found; "" for a common mistake.
    """

    wrong: Program
    right: Program
    symptom: str
    detector: str
    cure: str
    source: str = ""

    def __repr__(self) -> str:
        program = inspect.getsource(self.wrong)
        facts = {"Found by": self.detector, "Cure": self.cure, "Seen in": self.source}
        lines = [f"{name}: {text}" for name, text in facts.items() if text]
        return "\n".join([f"You see: {self.symptom}", "", program[program.index("def ") :].rstrip(), "", *lines])


class Museum(dict[str, Bug]):
    """A dictionary of the exhibits: bugs of pipeline programs, by name. In a notebook it is shown as a table."""

    def __getitem__(self, name: str) -> Bug:
        if not isinstance(name, str) or name not in self:
            raise SettingError(f"unknown exhibit {name!r}; available: {', '.join(self)}")
        return super().__getitem__(name)

    def exhibit(self, right: Program, **texts: str) -> Callable[[Program], Program]:
        """Add the decorated program as a `Bug` with these texts. `right` is its correct counterpart."""

        def add(wrong: Program) -> Program:
            self[wrong.__name__.replace("_", " ")] = Bug(wrong, right, **texts)
            return wrong

        return add

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(row) for row in in_text(self._rows(), 27, LINE))

    def _repr_html_(self) -> str:
        return in_html([escape(cell) for cell in row] for row in self._rows())

    def _rows(self) -> list[Sequence[str]]:
        bugs = ((name, bug.symptom, bug.detector, bug.cure) for name, bug in self.items())
        return [("bug", "you see", "found by", "cure"), *bugs]


MUSEUM = Museum()

# Correct parts that the exhibits use


def forwards(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int], **settings: Any) -> None:
    """Run the first half of `gpipe_step`: all forwards, with settings of `stage.begin`."""
    stage.begin(inputs, targets, **settings)
    for m in range(len(inputs)):
        x = communicate("recv_forward", shapes=shape)
        communicate("send_forward", stage.forward(m, x))


def backwards(stage: Stage, order: Sequence[int], shape: Sequence[int]) -> None:
    """Run the second half of `gpipe_step`: the backwards of the microbatches in `order`."""
    for m in order:
        dy = communicate("recv_backward", shapes=shape)
        communicate("send_backward", stage.backward(m, dy))


def engine_step(*step: Any, group: PipelineGroup | None = None, **settings: Any) -> Pipeline:
    """Run a step with the arguments of `gpipe_step` on the engine, with settings of `Pipeline`; return the pipeline."""
    stage, inputs, targets, _ = step
    group = PipelineGroup.of(group)
    pipeline = Pipeline(schedule("gpipe", group.size, len(inputs)), {group.rank: stage}, group=group, **settings)
    pipeline.step(list(inputs), list(targets))
    return pipeline


# Ranks that hang


@MUSEUM.exhibit(
    one_f_one_b_step,
    symptom="all ranks hang; with a backend that buffers small messages, only once the tensors are large",
    detector="the ranks that wait for each other, which %%torchrun prints at its timeout: all of them send",
    cure="send and receive at the same time: bidirectional_communicate",
)
def both_send_first(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """1F1B written the obvious way: a rank sends an activation down while the next rank sends a gradient up."""
    rank, ranks, microbatches = dist.get_rank(), dist.get_world_size(), len(inputs)
    warmup = min(ranks - rank - 1, microbatches)
    stage.begin(inputs, targets)
    for m in range(microbatches):
        x = communicate("recv_forward", shapes=shape)
        communicate("send_forward", stage.forward(m, x))
        if m >= warmup:
            dy = communicate("recv_backward", shapes=shape)
            communicate("send_backward", stage.backward(m - warmup, dy))
    backwards(stage, range(microbatches - warmup, microbatches), shape)


def alternate(rank: int, warmup: int, microbatches: int) -> Iterator[Action]:
    """Yield `warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    for m in range(microbatches + warmup):
        if m < microbatches:
            yield F(rank, m)
        if m >= warmup:
            yield B(rank, m - warmup)


@MUSEUM.exhibit(
    one_f_one_b,
    symptom="the ranks hang",
    detector="pp.check, before anything is started",
    cure="the first rank has the longest warm-up: min(ranks - rank - 1, microbatches)",
)
def warmup_reversed(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with the longest warm-up on the last rank, which waits for forwards that the first has not started."""
    return alternate(rank, min(rank, microbatches), microbatches)


@MUSEUM.exhibit(
    one_f_one_b,
    symptom="correct, but slow: it takes 36 instead of 22 with 4 ranks, 8 microbatches and F = B = 1",
    detector="the makespan, simulated (pp.simulate) or measured, compared with that of 1F1B",
    cure="a warm-up of min(ranks - rank - 1, microbatches) forwards, not one fewer",
)
def warmup_short_by_one(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with one forward too few in the warm-up, so that each rank waits in every turn of the steady state."""
    return alternate(rank, min(max(0, ranks - rank - 2), microbatches), microbatches)


# Messages that are confused, and memory that is overwritten


@MUSEUM.exhibit(
    gpipe_step,
    symptom="nonsensical gradients on all ranks but the last; the loss is correct",
    detector="gradients compared with one process; for a schedule pp.check, which compares the orders of messages",
    cure="between two ranks, receive in the order in which the peer sends",
)
def gradients_newest_first(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """The last rank sends gradients in another order than its peer receives them. Messages carry no names."""
    forwards(stage, inputs, targets, shape)
    last = dist.get_rank() == dist.get_world_size() - 1
    backwards(stage, range(len(inputs))[:: -1 if last else 1], shape)


@MUSEUM.exhibit(
    gpipe_step,
    symptom="gradients far off on all ranks but the first, without an autograd error; the loss is correct",
    detector="gradients compared with one process",
    cure="receive into a new tensor; the old one can be reused once its backward has run",
)
def one_receive_buffer(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """All activations are received into the same memory, but autograd needs each of them again in its backward."""
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


@MUSEUM.exhibit(
    gpipe_step,
    symptom="wrong values now and then: if the receiver is late, it gets those of a later microbatch",
    detector="Pipeline(debug=True), which compares a tensor's checksums before it is sent and after it has arrived",
    cure="do not change a tensor between its isend() and the return of wait()",
)
def written_after_isend(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """One buffer for all sends: the next activation overwrites the one that is still in flight."""
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


@MUSEUM.exhibit(
    gpipe_step,
    symptom="gradients m times too large; the loss still falls, because AdamW and clipping hide the factor",
    detector="gradients compared with one process",
    cure="divide each microbatch's loss by m before its backward",
)
def loss_not_divided(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Each microbatch's loss is its own mean, and backward adds up the gradients of all microbatches."""
    each_counts_in_full = [Fraction(1) for _ in inputs]
    forwards(stage, inputs, targets, shape, loss_weights=each_counts_in_full)
    backwards(stage, range(len(inputs)), shape)


@MUSEUM.exhibit(
    engine_step,
    symptom="loss and gradients slightly off, by no constant factor",
    detector="gradients compared with one process, for a batch that does not divide evenly",
    cure="weight each microbatch's loss by its share of the batch's samples or tokens; Pipeline counts them",
    source="huggingface.co/blog/gradient_accumulation",
)
def mean_of_means(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Each loss counts 1/m although the last microbatch is smaller, so its samples count too much."""
    engine_step(stage, inputs, targets, shape, batching=Batching(count=lambda each: 1))


@MUSEUM.exhibit(
    gpipe_step,
    symptom="training uses a fraction of the data, and the loss is noisier from step to step",
    detector="the losses of the microbatches, which are all the same; gradients compared with one process",
    cure="one iterator for the whole epoch: next(batches), not next(iter(loader))",
)
def first_microbatch_repeated(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Each iter() starts again from the beginning, so every microbatch is the first one."""
    xs = [next(iter(inputs)) for _ in inputs]
    ys = [next(iter(targets)) for _ in targets]
    gpipe_step(stage, xs, ys, shape)


@MUSEUM.exhibit(
    gpipe_step,
    symptom="gradients lack one microbatch, whose activations are never freed; the loss is correct",
    detector="pp.check, on the schedule or on the order that a step has run (`measured`)",
    cure="run a backward for every forward: count them",
    source="a printed 1F1B table, in which every rank runs all its forwards first",
)
def backward_missing(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """The backward of microbatch 1 never runs."""
    forwards(stage, inputs, targets, shape)
    backwards(stage, [0, *range(2, len(inputs))], shape)


# Weights, gradients and norms of the whole model

MAX_NORM = 0.01


@MUSEUM.exhibit(
    lambda *step: engine_step(*step).clip_grad_norm(MAX_NORM),
    symptom="the step points in another direction, although the norm of each stage looks fine",
    detector="gradients after clipping, compared with one process",
    cure="add up the squares over all ranks, and clip by the root of the sum: Pipeline.clip_grad_norm",
    source="github.com/pytorch/torchtitan/issues/596",
)
def norm_per_stage(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """Each rank clips by the norm of its own stage, the only part of the model that it holds."""
    gpipe_step(stage, inputs, targets, shape)
    nn.utils.clip_grad_norm_(stage.module.parameters(), MAX_NORM)


@MUSEUM.exhibit(
    lambda *step: engine_step(*step, tied=[((0, "weight"), (dist.get_world_size() - 1, "weight"))]),
    symptom="the two copies of a tied weight drift apart from the first step on",
    detector="comparing the copies after a step, as Pipeline(tied=…) does before its first; gradients, too",
    cure="give both copies the sum of their gradients: Pipeline(tied=…)",
)
def tied_copies_drift_apart(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """The first and the last rank each hold a copy of a tied weight, and each copy gets only its own gradient."""
    gpipe_step(stage, inputs, targets, shape)


ALONE = (0, 1)  # rank 0 of a pipeline of one stage; all ranks are replicas, each with its own part of the batch


@MUSEUM.exhibit(
    lambda *step: engine_step(*step, group=PipelineGroup(*ALONE), replicas=dist.group.WORLD),
    symptom="replicas drift apart without an error: only the first microbatch's gradients are averaged",
    detector="gradients compared with one process; Pipeline refuses a wrapped module",
    cure="pass the plain module, and average once, after the last backward: Pipeline(replicas=group)",
)
def wrapped_in_ddp(stage: Stage, inputs: Microbatches, targets: Microbatches, shape: Sequence[int]) -> None:
    """DistributedDataParallel averages in the first backward after a forward, and not in the ones that follow."""
    wrapped = Stage(nn.parallel.DistributedDataParallel(stage.module), 0, stage.loss_fn)
    gpipe_step(wrapped, inputs, targets, shape, PipelineGroup(*ALONE))


def slice_of_whole(make: Callable[[], nn.Module]) -> nn.Module:
    """Make the layers of all ranks from one seed, and return those of this rank."""
    torch.manual_seed(0)
    return [make() for _ in range(dist.get_world_size())][dist.get_rank()]


@MUSEUM.exhibit(
    slice_of_whole,
    symptom="all stages start equal; the model trains, but not like the same model in one process",
    detector="weights compared with one process, before the first step",
    cure="make the whole model from one seed and keep a slice; GPT.stage makes just that slice",
)
def same_seed_everywhere(make: Callable[[], nn.Module]) -> nn.Module:
    """Each rank sets the same seed and then makes only its own layers."""
    torch.manual_seed(0)
    return make()


# In torch's own runtime

MICROBATCHES = 3  # the fewest with which both bugs show


def torchs_step(
    modules: Mapping[int, nn.Module], loss_fn: Loss, inputs: torch.Tensor, targets: torch.Tensor, **settings: Any
) -> Any:
    """Run ZB-V on torch's pipeline runtime, and return the runtime.

    Args:
        modules: This rank's stages by number. Rank r of p holds the stages r and 2p-1-r, so rank 0 has the first and
            the last.
        inputs, targets: The whole batch, (samples, …), on rank 0; not used on the other ranks.
        settings: Of the runtime.
    """
    runtime = to_torch(schedule("zb-v", dist.get_world_size(), MICROBATCHES), modules, loss_fn, **settings)
    first = dist.get_rank() == 0  # which has the stages that read inputs and targets
    runtime.step(*[inputs] * first, target=targets if first else None)
    return runtime


def zb_v_step(modules: Mapping[int, nn.Module], loss_fn: Loss, *batch: torch.Tensor) -> None:
    Pipeline(schedule("zb-v", dist.get_world_size(), MICROBATCHES), modules, loss_fn).step(*batch)


@MUSEUM.exhibit(
    torchs_step,
    symptom="wrong gradients in all stages, without a hang or an error",
    detector="pp.check, on the orders that torch writes with _dump_csv; gradients compared with one process",
    cure="leave defer_pp_recv at its default, False",
    source="torch 2.13, github.com/pytorch/pytorch/pull/178815, ZB-V on 2 ranks",
)
def receives_deferred(*step: Any) -> Any:
    """torch delays each receive until its message is needed. Then receives come in another order than sends."""
    return torchs_step(*step, defer_pp_recv=True)


@MUSEUM.exhibit(
    zb_v_step,
    symptom="stage 1 gets no gradients and never learns; the other stages and the loss are correct",
    detector="gradients compared with one process: .grad is None",
    cure="a schedule with full backwards, such as 1F1B; or Pipeline",
    source="torch 2.13, schedules with a split backward",
)
def first_stage_frozen(*step: Any) -> Any:
    """No weight of stage 0 requires grad. torch then computes no gradients for the weights of stage 1, either."""
    return torchs_step(*step)
