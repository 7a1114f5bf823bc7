"""`Pipeline`, the engine: runs any legal schedule, with this rank's stages, on real processes.

    pipeline = Pipeline(schedule, {stage: module, …}, loss_fn)      # on every rank, with the stages that it holds
    loss = pipeline.step(inputs, targets)                           # gradients are in .grad
    pipeline.timeline                                               # the step as it was measured

A step is run by `interpreter`, which reads the schedule; `control` is what ranks agree on before and after it, and
`gradients` what they synchronize.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from ppedu.core.actions import Action, Op
from ppedu.core.check import check
from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.lower import lower, strip
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_instance, require_rank
from ppedu.run import clock
from ppedu.run.batch import Batch, Batching
from ppedu.run.comm import PipelineGroup
from ppedu.run.control import Control, Rows
from ppedu.run.gradients import GradientSync, Tie
from ppedu.run.interpreter import METHODS, Handler, Program, Step, evaluation_mode
from ppedu.run.messages import Messages
from ppedu.run.sharded import Shards, is_sharded, storage
from ppedu.run.stage import Loss, Stage

Keywords = dict[str, Any]  # the keyword arguments of a function
MOST_SECONDS = 10**6  # of a timeout


def local_stages(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the stages that `rank` holds, of both copies of the model if there are two.

    Raises:
        SettingError: there is no such rank.
    """
    require_schedule("local_stages", schedule)
    return schedule.placement.stages_of(require_rank(rank, schedule.ranks))


class Pipeline:
    """A schedule and this rank's stages, ready to run. Every rank makes one, and makes the same calls.

    schedule: compute actions only, or lowered by `pp.lower`.
    stages: the module of each stage that this rank holds, by number; see `local_stages`. A stage takes what the stage
        before it returns, a tensor or several, and every keyword given to `step`.
    loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar. Without it, the last stage returns the loss.
    group: the ranks of the pipeline; by default the whole world.
    replicas: a process group of the ranks that hold the same stages in other pipelines. Gradients and losses are
        averaged over it once a step, when a stage's last backward is done. Stages that torch's fully_shard has sharded
        over it (all stages, each as a whole) are reduced by that, at REDUCE_GRAD. Give plain modules: a wrapper such as
        DistributedDataParallel would average after the wrong backward, and the first call refuses it on every rank.
        Replicas, and the two copies of a stage in a schedule such as dualpipe, must start equal. At the end of a step
        their floating-point buffers, such as those of BatchNorm, are averaged; other buffers must agree.
    tied: pairs of weights that are one in the model, each named by its stage and its name there, such as
        [((0, "embedding.token.weight"), (3, "head.linear.weight"))]. Both get the sum of their gradients.
    batching: how batches are cut into microbatches, and how losses and outputs are put together; see `Batching`.
    autocast: a dtype for forwards in mixed precision, such as torch.bfloat16.
    seed: makes random numbers in a forward, such as dropout's, depend only on it, the step, the stage and the
        microbatch, and so neither on the schedule nor on the ranks.
    timeout: seconds that a rank waits for another.
    debug: state in each message what it is, and detect tensors that are written to after they were sent.

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
        replicas: dist.ProcessGroup | None = None,
        tied: Sequence[Tie] = (),
        batching: Batching = Batching(),  # noqa: B008 (it is immutable)
        autocast: torch.dtype | None = None,
        seed: int | None = None,
        timeout: float = 60.0,
        debug: bool = False,
    ):
        require_schedule("Pipeline", schedule)
        schedule.validate()
        require_instance("loss_fn", loss_fn, (Callable, NoneType), "a function of an output and a target")
        require_instance("replicas", replicas, (dist.ProcessGroup, NoneType), "a process group")
        require_instance("batching", batching, Batching, "a Batching, such as Batching(output_dim=1)")
        require_instance("autocast", autocast, (torch.dtype, NoneType), "a dtype, such as torch.bfloat16")
        if not isinstance(timeout, (int, float)) or not 0 < timeout <= MOST_SECONDS:
            raise SettingError(f"timeout must be a number of seconds above 0, at most {MOST_SECONDS}; got {timeout!r}")
        self.group = PipelineGroup.of(group)
        if self.group.size != schedule.ranks:
            raise SettingError(f"{schedule!r} needs {schedule.ranks} ranks; the group has {self.group.size}")
        if schedule.lowered and (problems := check(schedule, rendezvous=True)):
            raise SettingError(f"{schedule!r} would run only if every send were buffered: {problems[0]}")
        self.schedule = replace(schedule, orders=strip(schedule.orders))
        self.stages = _as_stages(stages, local_stages(schedule, self.group.rank), self.group.rank)
        self.last = self.stages.get(schedule.stages - 1)
        if self.last:
            self.last.loss_fn = loss_fn or self.last.loss_fn or _own_loss
        self.device = next(iter(self.stages.values())).device
        self.batching, self.autocast, self.seed = batching, autocast, seed
        self.messages = Messages(schedule.placement, self.group, timeout, debug)
        limit = timedelta(seconds=timeout)
        self.control = Control(self.group, limit)
        self.gradients = GradientSync(schedule.placement, self.stages, tied, self.group, replicas, limit)
        self.handlers: dict[Op, Handler] = {}  # those that replace a method of Step
        self.steps = 0
        self.loss, self.losses = torch.zeros(()), torch.zeros(schedule.microbatches)  # of the last step
        self.offset = 0.0  # seconds from this rank's clock to rank 0's
        self._lowered = schedule if schedule.lowered else None
        self._prepared = False
        self._measured: tuple[Schedule, torch.Tensor] | None = None  # each action's start and end, a row per rank

    @cached_property
    def side_stream(self) -> torch.cuda.Stream:
        """The GPU's second stream, for overlapped pairs."""
        return torch.cuda.Stream(self.device)

    @cached_property
    def forwards(self) -> Program:
        """This rank's program for an evaluation: the schedule's forwards, without backwards."""
        singles = ((single for action in order for single in action.singles) for order in self.schedule.orders)
        orders = tuple(tuple(single for single in order if single.op == Op.F) for order in singles)
        return Program(lower(replace(self.schedule, orders=orders), fsdp=self.sharded), self.group.rank)

    def on(self, op: Op, handler: Handler) -> None:
        """Run `handler(action, step)` for every action of `op`; `step.default(action)` runs the built-in behaviour.

        See `Step` for what a handler can use.

        Raises:
            SettingError: the op does not exist.
        """
        if not isinstance(op, str) or op not in METHODS:
            raise SettingError(f"unknown op {op!r}; the ops are: {', '.join(METHODS)}")
        self.handlers[Op(op)] = handler

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        outputs: bool = False,
        loss_kwargs: Keywords | None = None,
        **keywords: Any,
    ) -> Any:
        """Run the schedule on a batch: add the gradients to `.grad`, and return the batch's loss on every rank.

        inputs: for the first stage. targets: for the loss. keywords: for every stage. `Batch.cut` cuts them into
        microbatches: tensors, and tuples and dicts of tensors, along their samples; a list has one entry for each
        microbatch. Ranks without the first stage may omit the inputs, ranks without the last stage the targets.
        loss_kwargs: keywords for `loss_fn`, the same for each microbatch.
        outputs: return (loss, outputs) instead, with the outputs that `forward` returns.

        Raises:
            SettingError: the batch cannot be cut into the schedule's microbatches. On the first call, on every rank: a
                stage is wrapped or sharded in a way that cannot work, or copies of a weight differ.
            CommunicationError: another rank has failed, has been given a different batch, or exceeds the timeout.
            PipelineError: a stage has failed, or a loss is not finite.
        """
        return self._run("step", inputs, targets, keywords, outputs, loss_kwargs)

    def eval(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        outputs: bool = False,
        loss_kwargs: Keywords | None = None,
        **keywords: Any,
    ) -> Any:
        """Return the batch's loss, without gradients and with modules in evaluation mode; otherwise as `step`."""
        return self._run("eval", inputs, targets, keywords, outputs, loss_kwargs)

    def forward(self, inputs: Any = None, **keywords: Any) -> Any:
        """Return the model's outputs for a batch, as in `eval`; None on a rank without the last stage.

        Tensors are concatenated along `Batching.output_dim`, also inside tuples and dicts; anything else becomes a list
        with an entry for each microbatch. If two ranks hold the last stage, each returns the outputs of its own
        microbatches.
        """
        return self._run("forward", inputs, None, keywords, True, None)[1]

    @property
    def timeline(self) -> Timeline:
        """The last step of all ranks, measured, in seconds.

        Raises:
            PipelineError: there has been none.
        """
        if self._measured is None:
            raise PipelineError("nothing has been measured yet; run a step first")
        schedule, times = self._measured
        pairs = zip(schedule.orders, times.tolist(), strict=True)
        rows = [list(zip(order, row[::2], row[1::2], strict=False)) for order, row in pairs]
        return clock.timeline(schedule, rows)

    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = False) -> float:
        """Scale all gradients down to a norm of at most `max_norm` over all stages; return the norm before.

        Like torch.nn.utils.clip_grad_norm_ on one process: every weight of the model counts once, even if several
        ranks hold it or it is `tied` to another. Every rank must call this.

        Raises:
            SettingError: `max_norm` is not a number above 0.
            PipelineError: with `error_if_nonfinite`, the norm is infinite or NaN; on all ranks. Otherwise the gradients
                are scaled by that norm, as in torch, and the next step reports a loss that is not finite.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise SettingError(f"max_norm must be a number above 0; got {max_norm!r}")
        self._prepare("clip_grad_norm")
        self.gradients.find_shared()
        norm = self.control.exchange(self.gradients.norm()[None], "clip the gradients").norm()
        if error_if_nonfinite and not norm.isfinite():
            raise PipelineError(
                f"the norm of the gradients over all stages is {norm.item()}, so they cannot be clipped; check the "
                "learning rate, and look for a division by zero"
            )
        clip_grads_with_norm_(nn.ModuleList(self.gradients.modules.values()).parameters(), max_norm, norm)
        return float(norm)

    def _run(
        self, call: str, inputs: Any, targets: Any, keywords: Keywords, outputs: bool, loss_kwargs: Keywords | None
    ) -> Any:
        """Run a batch, and return its loss; with `outputs`, (loss, the model's outputs, or None on other ranks).

        call: "step", "eval" or "forward". The other arguments are those of `step`.
        """
        training, microbatches = call == "step", self.schedule.microbatches
        if loss_kwargs is not None:
            require_instance("loss_kwargs", loss_kwargs, dict, "a dict of keywords for loss_fn")
        batch = Batch.cut(inputs, targets, keywords, microbatches, self.batching)
        self._require_given(call, batch)
        self._prepare(call)
        self.gradients.find_shared()
        kinds, sizes = self.control.agree_on_batch(call, batch, microbatches, self.messages.debug)
        targets = () if call == "forward" else batch.targets or [None] * microbatches
        for stage in self.stages.values():
            is_last = stage is self.last
            counts = batch.counts if is_last and batch.counts else sizes if all(sizes) else [1] * microbatches
            with self.control.required_for(f"start {call}"):
                weights = self.gradients.loss_weights(counts, self.batching.reduction, is_last) if targets else []
            keep = outputs and is_last
            stage.begin(batch.inputs, targets, weights, loss_kwargs=loss_kwargs, outputs=keep, timed=False)
        program = self.program if training else self.forwards
        step = Step(self, program, batch, kinds, training)
        rows = self.control.post(1 + microbatches + 2 * program.longest, torch.float64, f"start {call}")
        try:
            with evaluation_mode(self.gradients.modules.values(), not training), torch.set_grad_enabled(training):
                step.run()
                with self.control.required_for("synchronize the gradients"):
                    step.finish()
                self._exchange_results(step, rows)
        except BaseException as error:
            self.control.failure = str(error) or type(error).__name__
            self._in_flight = step, rows  # the memory of messages in flight must not be freed
            raise
        self.steps += training
        if call != "forward":
            self._require_finite()
        found = self.last.outputs if self.last else {}  # by microbatch
        joined = self.batching.join([found[m] for m in sorted(found)]) if found else None
        return (self.loss, joined) if outputs else self.loss

    def _require_given(self, call: str, batch: Batch) -> None:
        if call == "step" and torch.is_inference_mode_enabled():
            raise SettingError("step cannot compute gradients within torch.inference_mode(); use eval there")
        if 0 in self.stages and not batch.inputs:
            raise SettingError(f"rank {self.group.rank} holds the first stage, so {call} needs the inputs there")
        if self.last and call != "forward" and not batch.targets and self.last.loss_fn is not _own_loss:
            raise SettingError(f"rank {self.group.rank} holds the last stage, so {call} needs the targets there")

    def _prepare(self, call: str) -> None:
        """Raise PipelineError after a failure; on the first call, get ready to run.

        That is: compile the schedule, compare the ranks' clocks, and raise an error on every rank unless all ranks have
        the same settings, and the same values for weights that they share. call: "step", for example, for errors.
        """
        if self.control.failure:
            raise PipelineError(
                f"this pipeline cannot be used after an error within a step ({self.control.failure}); restart the ranks"
            )
        if self._prepared:
            return
        modules, purpose = self.gradients.modules, f"start {call}"
        rows = self.control.exchange(torch.tensor([clock.machine(), *storage(modules)]), purpose).tolist()
        self.sharded = is_sharded([row[1:] for row in rows])
        self.shards: Shards = Shards(modules, self.group.rank)
        lowered = self._lowered or lower(self.schedule, fsdp=self.sharded)
        self.program = Program(lowered, self.group.rank)
        settings = {
            "schedule": self.program.fingerprint,
            "debug": self.messages.debug,
            "seed": self.seed,
            "autocast": self.autocast,
            "tied": self.gradients.ties,
            "reduction": self.batching.reduction,
        }
        self.control.require_same(settings, purpose)
        self.control.require_none(self.shards.problems(lowered, self.gradients.replicas), purpose)
        with self.control.required_for(purpose):
            differences = self.gradients.initial_differences()
        self.control.require_none(differences, purpose)
        self.offset = clock.offset(self.group, [row[0] for row in rows])
        self._prepared = True

    def _exchange_results(self, step: Step, rows: Rows) -> None:
        """Give every rank the losses, and the times of all actions."""
        microbatches = self.schedule.microbatches
        numbers = [0.0] * (1 + microbatches)
        for stage in self.stages.values():
            if stage.losses:
                numbers[0] += stage.loss.item()
            for m, loss in stage.losses.items():
                numbers[1 + m] += loss.item()
        numbers += [time + self.offset for _, start, end in step.clock.spans() for time in (start, end)]
        numbers += [0.0] * (rows.values.shape[1] - len(numbers))
        all_rows = self.control.exchange(torch.tensor(numbers, dtype=torch.float64), "end the step", rows)
        sums = all_rows[:, : 1 + microbatches].sum(0).float()
        with self.control.required_for("end the step"):
            self.loss = self.gradients.sum_over_replicas(sums[0]) / self.gradients.replica_count
        self.losses = sums[1:]
        if step.training:
            self._measured = step.program.schedule, all_rows[:, 1 + microbatches :]

    def _require_finite(self) -> None:
        for m, loss in enumerate(self.losses.tolist()):
            if not math.isfinite(loss):
                last = Action(self.schedule.stages - 1, Op.F, m)
                raise PipelineError(
                    f"rank {self.schedule.placement.rank(last.stage, m)}: {last} gave a loss of {loss}; "
                    f"check microbatch {m} and the learning rate, and look for a division by zero"
                )
        if not math.isfinite(self.loss):
            raise PipelineError(f"another replica has a loss of {self.loss.item()}; its own error says in which action")


def _own_loss(output: Any, target: Any) -> Any:
    """Return the output, which is the loss itself if the last stage computes it."""
    return output


def _as_stages(modules: Mapping[int, nn.Module | Stage], numbers: Sequence[int], rank: int) -> dict[int, Stage]:
    """Return the given modules, which must be those of the stages `numbers`, each as a Stage."""
    if not isinstance(modules, Mapping) or set(modules) != set(numbers):
        got = ", ".join(map(str, modules)) if isinstance(modules, Mapping) else repr(modules)
        raise SettingError(
            f"rank {rank} holds the stages {', '.join(map(str, numbers))}; got {got or 'none'}: "
            "give a module for each, such as {0: module}; see pp.run.local_stages"
        )
    found = {number: modules[number] for number in numbers}
    return {number: each if isinstance(each, Stage) else Stage(each, number) for number, each in found.items()}
