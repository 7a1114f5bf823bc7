"""An interpreter for schedules: what is drawn is what runs.

A `Pipeline` lowers the schedule, looks up each action's op in one table and does it, on the rank that it is for.
Any legal schedule will do: several stages on a rank, two copies of the model, a backward in two halves.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.profiler import record_function

from ppedu.core.actions import COMMUNICATION, RECEIVE, Action, F, Op
from ppedu.core.check import check
from ppedu.core.dependencies import Result, produces, requires
from ppedu.core.errors import CommunicationError, PipelineError, SettingError
from ppedu.core.lower import lower, strip
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.timeline import Span, Timeline
from ppedu.core.validate import require_instance, require_rank
from ppedu.run import clock, gradients
from ppedu.run.batch import Batch, Dims, joined
from ppedu.run.comm import PipelineGroup, reason
from ppedu.run.gradients import Shared, Tie, Twins
from ppedu.run.messages import Messages, other_end, wait
from ppedu.run.sharded import Shards, is_sharded, kept
from ppedu.run.stage import Loss, Stage, as_tuple

Handler = Callable[[Action, "Step"], None]
Rows = tuple[torch.Tensor, list[Any]]  # rows of numbers, and what to wait for until they are there
MOST_SECONDS = 10**6  # that a rank may wait for another
GATHERED = 1  # tells what all ranks tell each other from a schedule's messages, where there are tags (not in NCCL)


def local_stages(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages that `rank` holds, of both copies where there are two.

    Raises:
        SettingError: there is no such rank.
    """
    require_schedule("local_stages", schedule)
    return schedule.placement.stages_of(require_rank(rank, schedule.ranks))


class Pipeline:
    """A schedule, with the stages of this rank, ready to run. All ranks make one, and call it alike.

    schedule: compute actions alone, or lowered by `pp.lower`.
    stages: by number, the module of each stage that this rank holds; see `local_stages`. A stage takes what the
        stage before returns, a tensor or several, and every keyword given to `step`.
    loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar. Without it, the last stage returns the loss.
    reduction: "mean" where a microbatch's loss is the mean over its targets, "sum" where it is their sum. The batch's
        loss and gradients are then the mean over the batch, over all `replicas`, or the sum: those of one process.
    group: the ranks of the pipeline; by default the whole world.
    replicas: a process group of ranks that hold the same stages in pipelines beside this one. Gradients and losses
        are averaged over it, once a step, when a stage's last backward is done. Stages that torch's fully_shard has
        sharded over it, all of them and each as a whole, have their gradients averaged by that, at REDUCE_GRAD.
        Give plain modules: DistributedDataParallel would average after the wrong backward, and is refused.
        Replicas, and the two copies of a stage in a schedule such as dualpipe, must start equal. At the end of a step
        their floating-point buffers, such as those of BatchNorm, are averaged; other buffers must agree.
    tied: pairs of weights that are one in the model, each named by its stage and its name there, such as
        [((0, "embedding.token.weight"), (3, "head.linear.weight"))]. Both get the sum of their gradients.
    dims, target_dim, output_dim, count: how a batch is cut and put together again; see `Batch.cut`.
    autocast: run forwards in mixed precision, such as torch.bfloat16.
    seed: makes random numbers in a forward, such as dropout's, depend on it, the step, the stage and the microbatch
        alone, and so neither on the schedule nor on the ranks.
    timeout: seconds that a rank waits for another. debug: say in each message what it is, and look for tensors that
        are written to after they have been sent.

    Raises:
        ScheduleError: the schedule is not legal.
        SettingError: the stages or the group do not fit it.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module | Stage],
        loss_fn: Loss | None = None,
        group: PipelineGroup | None = None,
        *,
        reduction: str = "mean",
        replicas: dist.ProcessGroup | None = None,
        tied: Sequence[Tie] = (),
        dims: Mapping[int | str, Dims] | None = None,
        target_dim: Dims = 0,
        output_dim: Dims = 0,
        count: Callable[[Any], int] | None = None,
        autocast: torch.dtype | None = None,
        seed: int | None = None,
        timeout: float = 60.0,
        debug: bool = False,
    ):
        require_schedule("Pipeline", schedule)
        schedule.validate()
        _require_settings(loss_fn, reduction, replicas, dims, target_dim, output_dim, count, autocast, timeout)
        _require_ties(tied)
        self.group = PipelineGroup.of(group)
        if self.group.size != schedule.ranks:
            raise SettingError(f"{schedule!r} needs {schedule.ranks} ranks; there are {self.group.size}")
        if schedule.lowered and (problems := check(schedule, rendezvous=True)):
            raise SettingError(f"{schedule!r} would run only where nobody waits to send: {problems[0]}")
        self.schedule = replace(schedule, orders=strip(schedule.orders))
        self.patience = timedelta(seconds=timeout)
        self.stages = _stages(stages, local_stages(schedule, self.group.rank), self.group.rank)
        self.last = self.stages.get(schedule.stages - 1)
        if self.last:
            self.last.loss_fn = loss_fn or self.last.loss_fn or _own_loss
        self.device = next(iter(self.stages.values())).device
        self.replicas = replicas
        modules = {index: stage.module for index, stage in self.stages.items()}
        self.sharded = is_sharded(self._gather(torch.tensor(kept(modules)), "make a Pipeline").tolist())
        self.shards = Shards(modules, self.group.rank)
        lowered = schedule if schedule.lowered else lower(schedule, fsdp=self.sharded)
        self.shards.require(lowered, replicas)
        self.program = Program(lowered, self.group.rank)
        self._ties = list(tied)
        self.shared: list[Shared] = []
        self.tied: list[Shared] = []  # part of `shared`
        self.twins: list[Twins] = []
        self._find_shared()
        self.reduction = reduction
        self.cutting: dict[str, Any] = {"dims": dims, "target_dim": target_dim, "count": count}
        self.output_dim, self.autocast, self.seed = output_dim, autocast, seed
        self.messages = Messages(schedule.placement, self.group, timeout, debug)
        self.handlers: dict[Op, Handler] = dict(DEFAULTS)
        self.steps = 0
        self.loss, self.losses = torch.zeros(()), torch.zeros(schedule.microbatches)  # of the last step
        self._measured: tuple[Schedule, torch.Tensor] | None = None  # each action's start and end, a row a rank
        self._agreed: list[int] = []
        self.offset: float | None = None  # of rank 0's clock
        self._broken = ""

    @cached_property
    def side(self) -> torch.cuda.Stream:
        """The GPU's second stream, for overlapped pairs."""
        return torch.cuda.Stream(self.device)

    @cached_property
    def forwards(self) -> Program:
        """The schedule's forwards alone."""
        singles = ((single for action in order for single in action.singles) for order in self.schedule.orders)
        orders = tuple(tuple(single for single in order if single.op == Op.F) for order in singles)
        return Program(lower(replace(self.schedule, orders=orders), fsdp=self.sharded), self.group.rank)

    def on(self, op: Op, handler: Handler) -> None:
        """Let `handler(action, step)` do every action of `op`; in it, `step.default(action)` does what was done before.

        See `Step` for what a handler works with.

        Raises:
            SettingError: there is no such op.
        """
        if not isinstance(op, str) or op not in DEFAULTS:
            raise SettingError(f"there is no op {op!r}; there is: {', '.join(DEFAULTS)}")
        self.handlers[Op(op)] = handler

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        outputs: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> Any:
        """Run the schedule on a batch: gradients are added to `.grad`, the batch's loss is returned, on every rank.

        inputs: for the first stage; targets: for the loss; keywords: for every stage. They are cut into microbatches as
        `Batch.cut` says: tensors, and tuples and dicts of tensors, along their samples, while a list is cut already.
        Ranks that do not hold the first stage may leave out the inputs, ranks without the last stage the targets.
        loss_kwargs: keywords for `loss_fn`, the same for each microbatch.
        outputs: return (loss, outputs) instead, the outputs as `forward` returns them.

        Raises:
            SettingError: the batch cannot be cut into the schedule's microbatches.
            CommunicationError: another rank has failed, was given something else, or does not answer in time.
            PipelineError: a stage has failed, or a loss is not a finite number.
        """
        step = self._run("step", inputs, targets, keywords, outputs, loss_kwargs)
        return (self.loss, self._joined(step)) if outputs else self.loss

    def eval(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        outputs: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> Any:
        """The batch's loss, without gradients and with the modules in evaluation mode; otherwise as `step`."""
        step = self._run("eval", inputs, targets, keywords, outputs, loss_kwargs)
        return (self.loss, self._joined(step)) if outputs else self.loss

    def forward(self, inputs: Any = None, **keywords: Any) -> Any:
        """What the model returns for a batch, as in `eval`, joined along `output_dim`; None without the last stage.

        Tuples and dicts are joined tensor by tensor; for anything else there is a list with an entry for each
        microbatch. Where two ranks hold the last stage, each returns the outputs of its own microbatches.
        """
        return self._joined(self._run("forward", inputs, None, keywords, outputs=True))

    @property
    def timeline(self) -> Timeline:
        """The last step of all ranks, measured, in seconds.

        Raises:
            PipelineError: there has been none.
        """
        if self._measured is None:
            raise PipelineError("nothing has been measured yet; run a step first")
        schedule, times = self._measured
        rows = [
            [Span(*each) for each in zip(order, row[::2], row[1::2], strict=False)]
            for order, row in zip(schedule.orders, times.tolist(), strict=True)
        ]
        return clock.timeline(schedule, rows)

    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = False) -> float:
        """Scale all gradients down to a norm of at most `max_norm` over all stages; return the norm before.

        As torch.nn.utils.clip_grad_norm_ on one process: every weight of the model counts once, also one that several
        ranks hold or that is `tied` to another. All ranks must call it.

        Raises:
            SettingError: `max_norm` is not a number above 0.
            PipelineError: with `error_if_nonfinite`, the norm is infinite or NaN; on all ranks. Without it, gradients
                are scaled by that norm, as torch does, and the next step reports a loss that is not finite.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise SettingError(f"max_norm must be a number above 0; got {max_norm!r}")
        self._find_shared()
        modules = nn.ModuleList(stage.module for stage in self.stages.values())  # a weight in two stages counts once
        found = self._gather(gradients.norm(self.shared, modules)[None], "clip_grad_norm").norm()
        if error_if_nonfinite and not found.isfinite():
            raise PipelineError(
                f"the norm of the gradients over all stages is {found.item()}, so they cannot be clipped; look at the "
                "learning rate, and for what divides by zero"
            )
        clip_grads_with_norm_(modules.parameters(), max_norm, found)
        return found.item()

    def _joined(self, step: Step) -> Any:
        outputs = step.outputs
        return joined([outputs[m] for m in sorted(outputs)], self.output_dim) if outputs else None

    def _run(
        self,
        what: str,
        inputs: Any,
        targets: Any,
        keywords: Mapping[str, Any],
        outputs: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Step:
        if self._broken:
            raise PipelineError(f"this pipeline has stopped within a step, start the ranks again: {self._broken}")
        training = what == "step"
        program = self.program if training else self.forwards
        if loss_kwargs is not None:
            require_instance("loss_kwargs", loss_kwargs, dict, "a dict of keywords for loss_fn")
        batch = Batch.cut(inputs, targets, keywords, self.schedule.microbatches, **self.cutting)
        self._require(what, batch)
        self._find_shared()
        if self.offset is None:
            self._meet(what)
        kinds, sizes = self._agree(what, batch)
        targets = () if what == "forward" else batch.targets or [None] * self.schedule.microbatches
        for stage in self.stages.values():
            is_last = stage is self.last
            with self._about_to(f"start the {what}"):
                shares = self._shares(sizes, batch.counts, is_last) if targets else []
            stage.begin(
                batch.inputs, targets, shares, loss_kwargs=loss_kwargs, outputs=outputs and is_last, timed=False
            )
        step = Step(self, batch, kinds, training)
        longest = max(map(len, program.schedule.orders))
        coming = self._expect(1 + self.schedule.microbatches + 2 * longest, torch.float64, f"start the {what}")
        try:
            with _modes(self.stages.values(), training), torch.set_grad_enabled(training):
                step.run(program)
                step.finish()
                self._conclude(step, program, coming)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            self._kept = step, coming  # what is on its way must not be freed
            if isinstance(error, RuntimeError) and not isinstance(error, PipelineError):
                self._broken = f"rank {self.group.rank}: others that share its gradients have not come: {reason(error)}"
                raise CommunicationError(self._broken) from error
            raise
        self.steps += training
        if what != "forward":
            self._require_finite()
        return step

    def _shares(self, sizes: Sequence[int], counts: Sequence[int], is_last: bool) -> list[Fraction]:
        """What each microbatch's loss counts in the loss of the batch.

        Replicas' losses and gradients are averaged afterwards, so where the replicas' batches are to be added up, or
        weigh unequally, the shares make up for that.
        """
        replicas = 1 if self.replicas is None else dist.get_world_size(self.replicas)
        if self.reduction == "sum":
            return [Fraction(replicas)] * self.schedule.microbatches
        weights = counts if is_last and counts else sizes if all(sizes) else [1] * self.schedule.microbatches
        whole = sum(weights)
        if is_last and self.replicas is not None:
            whole = int(gradients.total(torch.tensor(whole), self.replicas, self.patience))
            return [Fraction(weight * replicas, whole) for weight in weights]
        return [Fraction(weight, whole) for weight in weights]

    def _find_shared(self) -> None:
        """Look for what is shared; done for each step, as the caller may have put in other weights."""
        modules = {index: stage.module for index, stage in self.stages.items()}
        placement = self.schedule.placement
        self.tied = gradients.tied(placement, modules, self._ties, self.group.rank)
        self.shared = gradients.copied(placement, modules, self.group.rank) + self.tied
        self.twins = gradients.twins(placement, modules, self.group, self.replicas, self.patience)

    def _require(self, what: str, batch: Batch) -> None:
        rank = self.group.rank
        if what == "step" and torch.is_inference_mode_enabled():
            raise SettingError("a step within torch.inference_mode() would leave no gradients; use eval there")
        if 0 in self.stages and not batch.inputs:
            raise SettingError(f"rank {rank} holds the first stage, so {what} needs the inputs there")
        if self.last and what != "forward" and not batch.targets and self.last.loss_fn is not _own_loss:
            raise SettingError(f"rank {rank} holds the last stage, so {what} needs the targets there")

    def _meet(self, what: str) -> None:
        """Once: make sure that all ranks have the same schedule, and equal copies of weights; compare their clocks."""
        settings = {
            "schedule": self.program.fingerprint,
            "debug": self.messages.debug,
            "seed": self.seed,
            "autocast": self.autocast,
            "tied": self._ties,
            "reduction": self.reduction,
        }
        own = [clock.machine(), *(zlib.crc32(repr(value).encode()) for value in settings.values())]
        rows = self._gather(torch.tensor(own), f"start the {what}").tolist()
        for rank, row in enumerate(rows):
            for name, theirs, first in zip(settings, row[1:], rows[0][1:], strict=True):
                if theirs != first:
                    raise CommunicationError(f"rank {rank} has another {name} than rank 0; give all ranks the same")
        with self._about_to(f"start the {what}"):
            wrong = gradients.differences(self.twins, self.tied, self.group, self.patience)
        found = self._gather(torch.tensor([len(wrong)]), f"start the {what}").flatten().tolist()
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise SettingError(f"{wrong[0]}{more}; build both from one seed, or load both from one file")
        for rank, number in enumerate(found):
            if number:
                raise SettingError(
                    f"rank {rank} holds what should be the same on another rank, and is not; see its error"
                )
        self.offset = clock.offset(self.group, [row[0] for row in rows])

    def _agree(self, what: str, batch: Batch) -> tuple[list[int], list[int]]:
        """The kind and the size of each microbatch, once it is sure that all ranks are about to do the same.

        Ranks that all have the inputs need not ask again before a step like the last one.
        """
        calls, microbatches = ["step", "eval", "forward"], self.schedule.microbatches
        own = [calls.index(what), *batch.kinds(microbatches), *batch.sizes]
        if own == self._agreed and not self.messages.debug:
            return own[1 : 1 + microbatches], own[1 + microbatches :]
        unlike = ", with another batch or after another call than the last" if self._agreed else ""
        rows = self._gather(torch.tensor(own), f"start the {what}{unlike}").tolist()
        for rank, (call, *_) in enumerate(rows):
            if call != rows[0][0]:
                raise CommunicationError(
                    f"rank 0 calls {calls[rows[0][0]]}, rank {rank} {calls[call]}; call the same on all"
                )
        kinds = []
        columns = list(zip(*rows, strict=True))[1:]
        for m, column in enumerate(columns[:microbatches]):
            known = {kind: rank for rank, kind in reversed(list(enumerate(column))) if kind}
            if len(known) > 1:
                one, other = list(known.values())[:2]
                raise CommunicationError(
                    f"microbatch {m} of the inputs has another shape or dtype on rank {other} than on rank {one}; "
                    "give all ranks the same batch, or leave it out where it is not needed"
                )
            kinds.append(next(iter(known)))
        self._agreed = own if all(map(all, (row[1 : 1 + microbatches] for row in rows))) else []
        return kinds, [max(column) for column in columns[microbatches:]]

    def _gather(self, own: torch.Tensor, doing: str, coming: Rows | None = None) -> torch.Tensor:
        """Everybody's row of numbers, shape (ranks, length). `coming`: what `_expect` has given for it before."""
        if self.group.size == 1:
            return own[None]
        own = own.to(self.group.device)
        rows, arriving = coming or self._expect(len(own), own.dtype, doing)
        with self._about_to(doing):
            for work in self._gathering(own, rows, arriving):
                wait(work, own.device, self.patience)
        return rows.cpu()

    @contextmanager
    def _about_to(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._broken = (
                f"rank {self.group.rank} was about to {doing}, but not every rank has come to it "
                f"within {self.patience.total_seconds():g} s, or one has failed: {reason(error)}"
            )
            raise CommunicationError(self._broken) from error

    def _expect(self, length: int, dtype: torch.dtype, doing: str) -> Rows:
        """Be ready for rows of numbers; who is so before they come is not asked."""
        device, channel = self.group.device, self.group.channel
        rows = torch.empty(self.group.size, length, dtype=dtype, device=device)
        senders = {} if device.type == "cuda" else {0: rows} if self.group.rank else dict(list(enumerate(rows))[1:])
        with self._about_to(doing):
            return rows, [channel.recv([part], rank, GATHERED) for rank, part in senders.items()]

    def _gathering(self, own: torch.Tensor, rows: torch.Tensor, arriving: list[Any]) -> Iterator[Any]:
        """What has to be waited for, one after the other, until `rows` is there."""
        send = self.group.channel.send
        if own.is_cuda:
            yield dist.all_gather(list(rows), own, self.group.process_group, async_op=True)
        elif self.group.rank > 0:  # gloo's all_gather, a ring, takes three times as long as going by way of rank 0
            sent = send([own], 0, GATHERED)
            yield from [*arriving, sent]
        else:
            rows[0] = own
            yield from arriving
            yield from [send([rows], rank, GATHERED) for rank in range(1, self.group.size)]

    def _conclude(self, step: Step, program: Program, coming: Rows) -> None:
        """Tell all ranks the losses, and what was done when."""
        microbatches = self.schedule.microbatches
        numbers = [0.0] * (1 + microbatches)
        for stage in self.stages.values():
            if stage.losses:
                numbers[0] += stage.loss.item()
            for m, loss in stage.losses.items():
                numbers[1 + m] += loss.item()
        numbers += [time + self.offset for _, *times in step.clock.spans() for time in times]
        numbers += [0.0] * (coming[0].shape[1] - len(numbers))
        rows = self._gather(torch.tensor(numbers, dtype=torch.float64), "end the step", coming)
        sums = rows[:, : 1 + microbatches].sum(0).float()
        self.loss, self.losses = sums[0], sums[1:]
        if self.replicas is not None:
            self.loss = gradients.total(self.loss, self.replicas, self.patience) / dist.get_world_size(self.replicas)
        if step.training:
            self._measured = program.schedule, rows[:, 1 + microbatches :]

    def _require_finite(self) -> None:
        for m, loss in enumerate(self.losses.tolist()):
            if not math.isfinite(loss):
                last = Action(self.schedule.stages - 1, Op.F, m)
                raise PipelineError(
                    f"rank {self.schedule.placement.rank(*last[::2])}: {last} gave a loss of {loss}; "
                    f"look at microbatch {m}, at the learning rate, and for what divides by zero"
                )
        if not math.isfinite(self.loss):
            raise PipelineError(f"a pipeline beside this one has a loss of {self.loss.item()}; its error says where")


class Program:
    """A lowered schedule, with all that one rank can know before it starts.

    schedule: its computing actions alone. actions: those of the rank, each with the receives that it waits for and the
    stages whose gradients are complete after it. arrived: by receive, the sends of this rank for which its sender was
    ready before. fingerprint: the same on ranks with the same schedule.
    """

    def __init__(self, lowered: Schedule, rank: int):
        self.schedule = replace(lowered, orders=strip(lowered.orders))
        self.fingerprint = zlib.crc32(lowered.to_csv().encode())
        order = lowered.order(rank)
        # What is last to add to the weights' gradients of each stage.
        last = {one.stage: i for i, action in enumerate(order) for one in action.singles if one.op in (Op.B, Op.W)}
        self.actions = []
        for index, action in enumerate(order):
            wanted = requires(action, lowered.placement, lowered=True) if action.computes else ()
            awaited = [Action(stage, Op(kind), m) for kind, stage, m in wanted if kind in RECEIVE]
            self.actions.append((action, awaited, [stage for stage, place in last.items() if place == index]))
        self.order = order
        self.arrived: dict[Action, list[Action]] = {}
        for peer, theirs in enumerate(lowered.orders):
            ready: list[Action] = []
            for action in theirs:
                if peer != rank and action.op in COMMUNICATION and rank in lowered.placement.route(action):
                    if action.op in RECEIVE:
                        ready.append(other_end(action))
                    else:
                        self.arrived[other_end(action)], ready = ready, []

    def around(self, index: int) -> str:
        """The neighbours of an action in its rank's order, such as "(in the order: … 1F1 1B0 [1F2] 1B1 1F3 …)"."""
        first, behind = max(0, index - 2), index + 3
        shown = [f"[{each}]" if place == index else str(each) for place, each in enumerate(self.order)][first:behind]
        return f"(in the order: {'… ' if first else ''}{' '.join(shown)}{' …' if behind < len(self.order) else ''})"


class Step:
    """One step in progress, on one rank; a handler works with it.

    `default` runs the built-in behaviour. Otherwise `receive` what an action needs from another stage, and `give` what
    it has made. A handler decides when to wait for messages: `receive` and `wait` do. The measured time of its action
    starts when the last message that it waits for has arrived. `add_loss` adds a loss of this stage's own.
    `stages` are this rank's, `batch` is what all ranks were given.
    """

    def __init__(self, pipeline: Pipeline, batch: Batch, kinds: Sequence[int], training: bool):
        self.pipeline, self.stages, self.batch = pipeline, pipeline.stages, batch
        self.placement, self.messages = pipeline.schedule.placement, pipeline.messages
        self.training = training
        self.kinds = [(kind, training) for kind in kinds]  # no gradients are wanted in an evaluation
        self.clock = clock.Clock(pipeline.device)
        self._started: Any = None  # when the current action did, by the clock
        self._given: dict[Result, tuple[torch.Tensor, ...]] = {}
        self._named = torch.autograd._profiler_enabled()  # record_function takes 10 µs all the same
        self._reductions: list[Callable[[], None]] = []
        self._streams: dict[Action, torch.cuda.Stream] = {}
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []
        for weight in (each for one in pipeline.shared for each in one.weights + one.others):
            if training and weight.grad is not None:  # from earlier steps: all its holders have the sum of that already
                self._earlier.append((weight, weight.grad))
                weight.grad = None
        self.messages.begin()

    @property
    def outputs(self) -> dict[int, Any]:
        """What the last stage has returned for each microbatch, where it is on this rank and outputs are wanted."""
        return self.pipeline.last.outputs if self.pipeline.last else {}

    def run(self, program: Program) -> None:
        """Do everything in `program`."""
        self._arrived = program.arrived
        replaced = {op for op, handler in self.pipeline.handlers.items() if handler is not DEFAULTS[op]}
        for index, (action, awaited, complete) in enumerate(program.actions):
            try:
                if action.computes:
                    if replaced.isdisjoint([each.op for each in (action, *action.parts)]):
                        for message in awaited:
                            self._take(message, action)
                    if self.pipeline.sharded:
                        self.pipeline.shards.wait(action)
                    self._started = self.clock.now()
                    self.do(action)
                    self.clock.note(action, self._started)
                else:
                    self.do(action)
            except CommunicationError as error:
                raise CommunicationError(f"{error} {program.around(index)}") from error.__cause__
            except Exception as error:
                why = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
                where = program.around(index)
                raise PipelineError(f"rank {self.pipeline.group.rank}: {action} failed: {why} {where}") from error
            for stage in complete:
                self._reduce(stage)

    def do(self, action: Action) -> None:
        """Run an action's handler, as "PP:2F0" in a trace of torch's profiler."""
        handler = self.pipeline.handlers[action.op]
        if not self._named:
            handler(action, self)
            return
        with record_function(f"PP:{action}"):
            handler(action, self)

    def default(self, action: Action) -> None:
        """Run the built-in behaviour of an action."""
        DEFAULTS[action.op](action, self)

    def wait(self, action: Action) -> None:
        """Return when the messages that an action needs, or both parts of a pair, have arrived.

        Raises:
            CommunicationError: one has not been posted, or does not come in time, or its sender is gone.
        """
        for need in requires(action, self.placement, lowered=True):
            if need[0] in RECEIVE and need not in self._given:
                kind, stage, m = need
                self._take(Action(stage, Op(kind), m), action)
                self._started = self.clock.now()

    def receive(self, action: Action) -> tuple[torch.Tensor, ...] | None:
        """What a forward or backward gets from another stage; None for the first stage's F and the last stage's B.

        Waits for it where it comes from another rank. Each can be received once.
        """
        own = ("F", action.stage, action.microbatch)
        wanted = [need for need in requires(action, self.placement, lowered=True) if need != own]
        if not wanted:
            return None
        if wanted[0] not in self._given:
            self.wait(action)
        values = self._result(wanted[0])
        if self.pipeline.device.type == "cuda":  # in a pair, this may be another stream than the tensors were made on
            for value in values:
                value.record_stream(torch.cuda.current_stream(self.pipeline.device))
        if wanted[0][0] == "F":  # from a stage on this rank, whose graph ends here
            return tuple(y.detach().requires_grad_(y.requires_grad) for y in values)
        return values

    def add_loss(self, action: Action, loss: torch.Tensor) -> None:
        """Add a loss of this stage's own to that of the action's microbatch; call it after the stage's forward.

        It counts in the batch's loss, and in the gradients of this stage and those before it, as much as the microbatch
        has samples in the batch; with reduction="sum" in full.

        Raises:
            PipelineError: it is not one number, or the microbatch's forward has not run, or its backward has.
        """
        self.stages[action.stage].add_loss(action.microbatch, loss)

    def give(self, action: Action, values: Any) -> None:
        """Hand on what a forward (activations) or backward (gradients) has made, a tensor, a tuple or None."""
        for result in produces(action):
            self._given[result] = () if values is None else as_tuple(values)

    def forward(self, action: Action) -> None:
        stage, m = self.stages[action.stage], action.microbatch
        x = self.receive(action)
        with self._precision(stage), self._randomness(action):
            y = stage.forward(m, x, **self.batch.keywords[m])
        if action.stage < self.placement.stages - 1:
            self.give(action, y)

    def backward(self, action: Action) -> None:
        dy = self.receive(action)
        half = action.op == Op.I
        run = self.stages[action.stage].backward_input if half else self.stages[action.stage].backward
        dx = run(action.microbatch, dy)
        if action.stage > 0:
            self.give(action, dx)

    def backward_weight(self, action: Action) -> None:
        self.stages[action.stage].backward_weight(action.microbatch)
        self.pipeline.shards.end_backward(action.stage)

    def overlapped(self, action: Action) -> None:
        """Both parts: one after the other on the CPU, at the same time on a GPU, which has streams of its own for them.

        A backward runs on the stream that its forward ran on, so the forward takes another one.
        """
        if self.pipeline.device.type != "cuda":
            for part in action.parts:
                self.do(part)
            return
        self.wait(action)  # on the main stream, which what has been sent is freed on
        main = torch.cuda.current_stream(self.pipeline.device)
        forward, backward = sorted(action.parts, key=lambda part: part.op != Op.F)
        theirs = self._streams.pop(F(backward.stage, backward.microbatch), main)
        own = self.pipeline.side if theirs == main else main
        self._streams[forward] = own
        self.pipeline.side.wait_stream(main)
        for part in action.parts:
            with torch.cuda.stream(own if part == forward else theirs):
                self.do(part)
        main.wait_stream(self.pipeline.side)

    def send(self, action: Action) -> None:
        values = self._result((action.op[-1], action.stage, action.microbatch))
        self.messages.send(action, values, self.kinds[action.microbatch])

    def post(self, action: Action) -> None:
        self.messages.receive(action, self.kinds[action.microbatch])

    def finish(self) -> None:
        """Return when all messages have arrived and all gradients are whole."""
        self.messages.end()
        self.pipeline.shards.end()
        for finish in self._reductions:
            finish()
        if torch.is_grad_enabled():
            gradients.add_up(self.pipeline.shared, self.pipeline.group, self.pipeline.patience)
            gradients.average_buffers(self.pipeline.twins)
        for weight, grad in self._earlier:
            weight.grad = grad if weight.grad is None else grad.add_(weight.grad)

    def _result(self, result: Result) -> tuple[torch.Tensor, ...]:
        if result not in self._given:
            kind, stage, m = result
            raise PipelineError(
                f"there is no result of {stage}{kind}{m}: its handler must call step.give(), and each result can be "
                "received once"
            )
        return self._given.pop(result)

    def _take(self, message: Action, user: Action) -> None:
        """Wait for what `user` needs from another rank."""
        result = message.op.value, message.stage, message.microbatch
        self._given[result] = self.messages.wait(message, user, self.pipeline.device)
        self.messages.arrived(self._arrived[message])

    def _reduce(self, stage: int) -> None:
        if self.pipeline.replicas is not None and not self.pipeline.sharded:
            weights = [weight for weight in self.stages[stage].module.parameters() if weight.requires_grad]
            self._reductions.append(gradients.start_mean(weights, self.pipeline.replicas, self.pipeline.patience))

    def _precision(self, stage: Stage) -> AbstractContextManager[Any]:
        dtype = self.pipeline.autocast
        return torch.autocast(stage.device.type, dtype) if dtype else nullcontext()

    def _randomness(self, action: Action) -> AbstractContextManager[Any]:
        if self.pipeline.seed is None:
            return nullcontext()
        place = (self.pipeline.seed, self.pipeline.steps, action.stage, action.microbatch)
        return _seeded(zlib.crc32(repr(place).encode()), self.pipeline.device)


DEFAULTS: dict[Op, Handler] = {
    Op.F: lambda action, step: step.forward(action),
    Op.B: lambda action, step: step.backward(action),
    Op.I: lambda action, step: step.backward(action),
    Op.W: lambda action, step: step.backward_weight(action),
    Op.OVERLAP_F_B: lambda action, step: step.overlapped(action),
    Op.OVERLAP_B_F: lambda action, step: step.overlapped(action),
    Op.SEND_F: lambda action, step: step.send(action),
    Op.SEND_B: lambda action, step: step.send(action),
    Op.RECV_F: lambda action, step: step.post(action),
    Op.RECV_B: lambda action, step: step.post(action),
    Op.UNSHARD: lambda action, step: step.pipeline.shards.unshard(action.stage),
    Op.RESHARD: lambda action, step: step.pipeline.shards.reshard(action.stage),
    Op.REDUCE_GRAD: lambda action, step: step.pipeline.shards.reduce_grad(action),
}


def _own_loss(output: Any, target: Any) -> Any:
    """The loss where the last stage computes it."""
    return output


def _require_settings(
    loss_fn: Any,
    reduction: Any,
    replicas: Any,
    dims: Any,
    target_dim: Any,
    output_dim: Any,
    count: Any,
    autocast: Any,
    timeout: Any,
) -> None:
    nested = (int, Mapping, tuple, list, type(None))
    fits = {
        "loss_fn": (loss_fn is None or callable(loss_fn), "a function of an output and a target", loss_fn),
        "reduction": (isinstance(reduction, str) and reduction in ("mean", "sum"), "'mean' or 'sum'", reduction),
        "replicas": (replicas is None or isinstance(replicas, dist.ProcessGroup), "a process group", replicas),
        "dims": (dims is None or isinstance(dims, Mapping), "a dict, such as {0: 1} or {'mask': None}", dims),
        "target_dim": (isinstance(target_dim, nested), "a dimension, such as 1, or None", target_dim),
        "output_dim": (isinstance(output_dim, nested), "a dimension, such as 1", output_dim),
        "count": (count is None or callable(count), "a function of a microbatch's targets", count),
        "autocast": (
            autocast is None or isinstance(autocast, torch.dtype),
            "a dtype, such as torch.bfloat16",
            autocast,
        ),
        "timeout": (
            isinstance(timeout, (int, float)) and 0 < timeout <= MOST_SECONDS,
            f"a number of seconds above 0, at most {MOST_SECONDS}",
            timeout,
        ),
    }
    for name, (well, wanted, got) in fits.items():
        if not well:
            raise SettingError(f"{name} must be {wanted}; got {got!r}")


def _require_ties(ties: Any) -> None:
    def is_end(end: Any) -> bool:
        return isinstance(end, (tuple, list)) and [type(part) for part in end] == [int, str]

    well = isinstance(ties, (tuple, list)) and all(
        isinstance(tie, (tuple, list)) and len(tie) == 2 and all(map(is_end, tie)) for tie in ties
    )
    if not well:
        raise SettingError(
            "tied must be pairs of weights, such as [((0, 'embedding.weight'), (3, 'head.weight'))], each named by its "
            f"stage and its name there; got {ties!r}"
        )


def _stages(given: Mapping[int, nn.Module | Stage], wanted: Sequence[int], rank: int) -> dict[int, Stage]:
    """The stages as given, each as a Stage."""
    if not isinstance(given, Mapping) or set(given) != set(wanted):
        told = ", ".join(map(str, given)) if isinstance(given, Mapping) else repr(given)
        raise SettingError(
            f"rank {rank} holds the stages {', '.join(map(str, wanted))}; got {told or 'none'}: "
            "give a module for each, such as {0: module}, see pp.run.local_stages"
        )
    made = {}
    for index in wanted:
        stage = given[index]
        if not isinstance(stage, (Stage, nn.Module)):
            raise SettingError(f"stage {index} must be a torch module; got {type(stage).__name__}")
        made[index] = stage if isinstance(stage, Stage) else Stage(stage, index)
    return made


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from `seed` on, and then on from where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _modes(stages: Iterable[Stage], training: bool) -> Iterator[None]:
    """In an evaluation, all modules in evaluation mode, and then back in the mode that each was in."""
    before = {} if training else {part: part.training for stage in stages for part in stage.module.modules()}
    for part in before:
        part.training = False
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
