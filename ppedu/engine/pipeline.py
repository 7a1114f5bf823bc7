"""`Pipeline`, the engine: runs any legal schedule, with this rank's stages, on real processes.

    pipeline = Pipeline(schedule, {stage: module, …}, loss_fn)      # on every rank, with the stages that it holds
    loss = pipeline.step(inputs, targets)                           # gradients are in .grad
    pipeline.timeline                                               # the step as it was measured

`context` checks the arguments, and the ranks agree. A step is run by `interpreter`, which reads the schedule; `control`
is what ranks agree on before and after it, and `gradients` what they synchronize.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import NoneType
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_

from ppedu.core import Op, PipelineError, SettingError
from ppedu.core.validate import require_instance, require_number
from ppedu.engine import results
from ppedu.engine.batch import Batch
from ppedu.engine.context import Context
from ppedu.engine.interpreter import METHODS, Handler, Step, evaluation_mode
from ppedu.engine.post_validation import Validation
from ppedu.engine.ranks import device
from ppedu.engine.results import Results
from ppedu.engine.stages.local import own_loss
from ppedu.engine.torchs import from_torch
from ppedu.sim import Timeline

Keywords = dict[str, Any]  # the keyword arguments of a function
StageKeywords = Mapping[int, Keywords]  # by stage
Given = tuple[Any, Any, Keywords, StageKeywords | None]  # inputs, targets, keywords, and those for single stages
UNEVEN = (
    "some microbatches have a larger part of padding (-100) than others, but each counts by its size, so that the mean "
    "over all other targets would come out wrong; give Batching(count=lambda y: int((y != -100).sum())), or "
    "Batching(count=torch.numel) if this is intended"
)


class Pipeline(Context):
    """A schedule and this rank's stages, ready to run. Every rank makes one, and makes the same calls.

    Args:
        schedule: compute actions only, or lowered by `pp.lower`.
        stages: the module of each stage that this rank holds, by number; see `local_stages`. They are on one device,
            which with NCCL is torch's current GPU. A stage takes what the stage before it returns, a tensor or several,
            and every keyword given to `step`. An output that no later stage uses gives its weights gradients of zero,
            where one process would leave `.grad` None. If the schedule cuts sequences into slices, a stage also takes
            the keyword `past`, the `Past` of its sequence. Processes that compute a stage together (tensor parallelism)
            are in a pipeline each, on the same rank of it.
        loss_fn: `loss_fn(output, target)` → the microbatch's loss, a scalar. Without it, the last stage returns the
            loss. A module may have buffers, but weights to train only if the last rank's stages have them, too.
        group: the ranks of the pipeline; by default the whole world.
        replicas: a process group of the ranks that hold the same stages in other pipelines. Gradients and losses are
            averaged over it once a step, when a stage's last backward is done. Stages that torch's fully_shard has
            sharded over it (all stages, each as a whole) are reduced by that, at REDUCE_GRAD. Give plain modules: a
            wrapper such as DistributedDataParallel would average after the wrong backward, and the first call refuses
            it on every rank. Replicas, and the two copies of a stage in a schedule such as dualpipe, must start equal.
            At the end of a step their floating-point buffers, such as those of BatchNorm, are averaged; other buffers
            must agree.
        tied: pairs of weights that are one in the model, each named by its stage and its name there, such as
            [((0, "embedding.token.weight"), (3, "head.linear.weight"))]. Both get the sum of their gradients, and so do
            all weights that pairs join in a chain. Stages of one rank may share a parameter without a tie, unless
            fully_shard has sharded them, which makes two parameters of it.
        batching: how batches are cut into microbatches, and how losses and outputs are put together; see `Batching`.
        autocast: a dtype for forwards in mixed precision, such as torch.bfloat16.
        seed: makes random numbers in a forward, such as dropout's, depend only on it, the step, the stage and the
            microbatch, and so neither on the schedule nor on the ranks. Steps are counted in `steps`, which you set
            when training resumes.
        optimizer: a `PostValidation`: the pipeline steps the optimizer, and ranks do not wait for each other at the end
            of a step. `step` then returns the loss of the step before, None at first; see `flush`. Give all ranks the
            inputs, or the beginning of a step waits for those that have them. If that loss is not finite, `step` raises
            an error instead of training its batch; call it again. Or, for a schedule with updates (U), such as
            pipedream: by stage of this rank, an optimizer with its weights to train. A U steps it with the parts of the
            batch's loss that are its microbatches', and clears the gradients; a backward has the weights of its
            forward, as `ppedu.versions` counts them. One call of `step` is many updates, and the pipeline is empty
            between two calls. Leave out replicas, ties, sharded weights and loss_scale. Buffers have no versions, and
            a loss that is not finite is found when the call ends.
        timeout: seconds that a rank waits for another. With NCCL, a rank looks for what is late at the end of a step.
        debug: state in each message what it is, and detect tensors that are written to after they were sent.

    Raises:
        ScheduleError: the schedule is not legal.
        SettingError: the stages or the group do not fit it.
    """

    @classmethod
    def from_torch(cls, runtime: Any, **options: Any) -> Pipeline:
        """Return a pipeline that trains as a schedule of torch.distributed.pipelining does, on the same modules.

            pipeline = Pipeline.from_torch(Schedule1F1B(stage, 8, loss_fn))
            loss = pipeline.step(inputs, targets)

        It has the order of computations, and places messages of its own. See `to_torch` for the way back.

        Args:
            runtime: made on every rank, such as Schedule1F1B(…) or ScheduleInterleavedZeroBubble(…).
            options: of Pipeline, such as seed=3; those that torch's schedule has, too, are replaced.

        Raises:
            SettingError: it is not such a schedule, or it cuts batches in a way that Pipeline cannot.
            ScheduleError: its order is not legal.
        """
        return cls(**(from_torch(runtime) | options))

    def on(self, op: Op, handler: Handler) -> None:
        """Run `handler(action, step)` for every action of `op`; `step.default(action)` runs the built-in behavior.

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
        loss_scale: float = 1.0,
        stage_kwargs: StageKeywords | None = None,
        **keywords: Any,
    ) -> Any:
        """Run the schedule on a batch: add the gradients to `.grad`, and return the batch's loss on every rank.

        `Batch.cut` cuts inputs, targets and keywords into microbatches: tensors, and tuples and dicts of tensors, along
        their samples; a list has one entry for each microbatch.

        Args:
            inputs: for the first stage. Ranks without it may omit them.
            targets: for the loss. Ranks without the last stage may omit them.
            keywords: for every stage.
            stage_kwargs: more keywords, for single stages: `stage_kwargs={3: {"mask": mask}}`.
            loss_kwargs: keywords for `loss_fn`, the same for each microbatch.
            loss_scale: multiplies the loss for the backwards, so that small gradients do not vanish in float16. At the
                end, gradients are divided by it; where they have overflowed, they are infinite or NaN. See `LossScale`.
            outputs: return (loss, outputs) instead, with the outputs that `forward` returns.

        Raises:
            SettingError: the batch cannot be cut into the schedule's microbatches. On the first call, on every rank: a
                stage is wrapped or sharded in a way that cannot work, or copies of a weight differ.
            CommunicationError: another rank has failed, has been given a different batch, or exceeds the timeout.
            PipelineError: a stage has failed, or a loss is not finite; with `PostValidation`, also the gradients' norm.
        """
        return self._run("step", (inputs, targets, keywords, stage_kwargs), outputs, loss_kwargs, loss_scale)

    def flush(self) -> torch.Tensor | None:
        """With `PostValidation`, wait until the last step is validated, and return its loss; None if it is already.

        Call it after the last step, and before the weights are used otherwise, such as for a checkpoint.

        Raises:
            PipelineError: the loss or the gradients' norm was not finite. The step has been taken back, and training
                can go on.
        """
        return self._settle()

    def _settle(self, call: str = "") -> torch.Tensor | None:
        """Validate the last step, and return its loss. call: see `_keep_validated`."""
        if self.validation is None or self.validation.pending is None:
            return None
        with self.control.guarded():
            self.validation.require_unchanged()
            found, _ = self.validation.settle()
        return self._keep_validated(found, call)

    def eval(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        outputs: bool = False,
        loss_kwargs: Keywords | None = None,
        stage_kwargs: StageKeywords | None = None,
        **keywords: Any,
    ) -> Any:
        """Return the batch's loss, without gradients and with modules in evaluation mode; otherwise as `step`."""
        return self._run("eval", (inputs, targets, keywords, stage_kwargs), outputs, loss_kwargs)

    def forward(self, inputs: Any = None, *, stage_kwargs: StageKeywords | None = None, **keywords: Any) -> Any:
        """Return the model's outputs for a batch, as in `eval`; None on a rank without the last stage.

        Tensors are concatenated along `Batching.output_dim`, also inside tuples and dicts; anything else becomes a list
        with an entry for each microbatch. If two ranks hold the last stage, each returns the outputs of its own
        microbatches.
        """
        return self._run("forward", (inputs, None, keywords, stage_kwargs), outputs=True)[1]

    @property
    def timeline(self) -> Timeline:
        """The last step of all ranks, measured, in seconds; on several machines, to within `clocks.error`.

        Raises:
            PipelineError: there has been none.
        """
        if self.results is None:
            raise PipelineError("nothing has been measured yet; run a step first")
        return self.results.timeline()

    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = False) -> float:
        """Scale all gradients down to a norm of at most `max_norm` over all stages; return the norm before.

        Like `torch.nn.utils.clip_grad_norm_` on one process: every weight of the model counts once, even if several
        ranks hold it or it is `tied` to another. Every rank must call this.

        Raises:
            SettingError: `max_norm` is not a number above 0.
            PipelineError: with `error_if_nonfinite`, the norm is infinite or NaN; on all ranks. Otherwise the gradients
                are scaled by that norm, as in torch, and the next step reports a loss that is not finite.
        """
        require_number("max_norm", max_norm, lambda norm: norm > 0, "a number above 0")
        if self.validation:
            raise SettingError("the pipeline steps the optimizer, and clips before; give PostValidation(max_norm=…)")
        self._get_ready("clip_grad_norm")
        self.names.require_agreed()
        self.gradients.find_shared()
        norm = self.control.exchange(self.gradients.norm()[None], "clip the gradients").norm()
        if error_if_nonfinite and not norm.isfinite():
            raise PipelineError(
                f"the norm of the gradients over all stages is {norm.item()}, so they cannot be clipped; check the "
                "learning rate, and look for a division by zero"
            )
        clip_grads_with_norm_(self.gradients.weights, max_norm, norm)
        return float(norm)

    def _run(
        self,
        call: str,
        given: Given,
        outputs: bool = False,
        loss_kwargs: Keywords | None = None,
        loss_scale: float = 1.0,
    ) -> Any:
        """Run a batch, and return its loss; with `outputs`, (loss, the model's outputs, or None on other ranks).

        The call is "step", "eval" or "forward"; the other arguments are those of `step`.
        """
        training, microbatches, slices = call == "step", self.schedule.microbatches, self.schedule.slices
        inputs, targets, keywords, stage_keywords = given
        try:
            require_instance("loss_kwargs", loss_kwargs, (dict, NoneType), "a dict of keywords for loss_fn")
            require_number("loss_scale", loss_scale, lambda scale: 0 < scale < math.inf, "a number above 0")
            if self.updates and loss_scale != 1:
                raise SettingError("a schedule with updates steps with gradients as they are; leave out loss_scale")
            batch = Batch.cut(inputs, targets, keywords, microbatches // slices, self.batching, stage_keywords)
            if slices > 1:
                batch = batch.sliced(slices, self.batching)
            self._require_given(call, batch)
            if training:
                self.names.require_agreed()
        except Exception:
            with suppress(PipelineError):  # this rank's own error says more
                self._get_ready(call)
                self.control.refuse(call, microbatches, self.messages.debug)
            raise
        self._get_ready(call)
        if training:
            self.gradients.find_shared()
        kinds, sizes = self.control.agree_on_batch(call, batch, microbatches, loss_scale, self.messages.debug)
        targets = () if call == "forward" else batch.targets or [None] * microbatches
        program = self.program if training else self.forwards
        with self.control.required_for(f"start {call}"):
            reduction = self.batching.reduction
            weights = self.gradients.loss_weights(batch.counts, sizes, reduction) if targets else {}

        def begin() -> Step:
            torch.clear_autocast_cache()  # in a context around this call, it has the weights of an earlier step
            for index, stage in self.stages.items():
                is_last = stage is self.last
                stage.begin(
                    batch.inputs,
                    targets,
                    weights.get(index, ()),
                    loss_kwargs,
                    loss_scale,
                    self.loss_fn if is_last and not self.head else None,
                    outputs=outputs and is_last,
                    timed=False,
                    slices=(self.batching.slices or slices) if slices > 1 else 1,
                    recomputed=program.of(Op.R, index),
                    offloaded=program.of(Op.O, index),
                )
            if self.head:
                self.head.begin(targets, weights[self.schedule.stages - 1], loss_scale)
            return Step(self, program, batch, kinds, self.steps, training)

        with evaluation_mode(self.modules, not training), torch.set_grad_enabled(training):
            if training and self.validation:
                loss = self._train_without_barrier(self.validation, begin, loss_scale)
            else:
                loss = self._run_with_barrier(call, begin(), loss_scale)
        if self.last and call != "forward" and not self._warned and self.batching.ignores_unevenly(batch.targets):
            self._warned = True
            warnings.warn(UNEVEN, stacklevel=3)
        if not outputs:
            return loss
        made = self.last.outputs if self.last else {}  # by microbatch
        return loss, self.batching.join([made[m] for m in sorted(made)], slices) if made else None

    def _run_with_barrier(self, call: str, step: Step, loss_scale: float) -> torch.Tensor:
        """Run a step, wait for the results of all ranks, and return its loss."""
        with self.control.guarded(step):
            posted = self.control.post(results.length(step.program), torch.float64, f"start {call}")
            self._run_to_end(step, loss_scale)
            rows = self.control.exchange(results.row(step, self.clocks.offset), "end the step", posted)
            with self.control.required_for("end the step"):
                found = results.read(rows, step.program.schedule, self.gradients.gather_replicas)
        self.steps += step.training
        self.loss, self.losses = found.loss, found.losses
        if step.training or self.schedule.forward_only:
            self.results = found
        if call != "forward":
            found.require_finite(self.batching.count is not None)
        return found.loss

    def _train_without_barrier(
        self, validation: Validation, begin: Callable[[], Step], loss_scale: float
    ) -> torch.Tensor | None:
        """Run a step, and validate the last one meanwhile; return the loss of the last one, if there is one.

        Run this step up to its cut, which is before the first backward, while the results of the last one arrive. If
        the last one was wrong, so were the weights that these instructions have used: begin again.
        """
        step, loss = begin(), None
        done = 0  # instructions of this step
        if validation.pending:
            random = device.random_state(self.device)
            with self.control.guarded(step):
                validation.require_unchanged()
                done = step.program.cut
                step.run(0, done)
                last, corrected = validation.settle()
                if corrected:
                    step.discard()
                    device.set_random_state(self.device, random)
            loss = self._keep_validated(last, call="step")
            if corrected:
                step, done = begin(), 0
        with self.control.guarded(step):
            self._run_to_end(step, loss_scale, done)
            validation.step(step, self.clocks.offset, self.modules)
        self.steps += 1
        return loss

    def _run_to_end(self, step: Step, loss_scale: float, done: int = 0) -> None:
        """Run a step's instructions, of which some may be `done`, and synchronize the gradients."""
        if step.training:
            self.gradients.begin(step.program.trained, loss_scale)
        step.run(done)
        with self.control.required_for("synchronize the gradients"):
            step.finish()

    def _keep_validated(self, found: Results, call: str = "") -> torch.Tensor:
        """Keep the results of a step that was validated later, and return its loss if that and the norm are finite.

        Args:
            call: the one that has validated it, and has done nothing else; "" for `flush`.
        """
        self.loss, self.losses, self.results = found.loss, found.losses, found
        try:
            found.require_finite(self.batching.count is not None)
        except PipelineError as error:
            last = f"that was step {self.steps - 1}, counted from 0; it has been taken back"
            again = f", and this call has done nothing: call {call} again with the same batch" if call else ""
            raise PipelineError(f"{error}; {last}, so the weights are as before it{again}") from None
        return found.loss

    def _require_given(self, call: str, batch: Batch) -> None:
        if call == "step" and self.schedule.forward_only:
            raise SettingError(f"{self.schedule!r} has no backwards; call eval or forward instead of step")
        if self.head and call != "step":
            raise SettingError(f"{self.schedule!r} shares its head, which only step can do; compute the rest yourself")
        if self.head and not batch.targets:
            raise SettingError("all ranks share the head, so step needs the targets on all of them")
        if call == "step" and torch.is_inference_mode_enabled():
            raise SettingError("step cannot compute gradients within torch.inference_mode(); use eval there")
        if unknown := set(batch.stage_keywords) - set(range(self.schedule.stages)):
            raise SettingError(
                f"stage_kwargs names stage {min(unknown)!r}; the stages are 0 to {self.schedule.stages - 1}"
            )
        if 0 in self.stages and not batch.inputs:
            raise SettingError(f"rank {self.group.rank} holds the first stage, so {call} needs the inputs there")
        if self.last and call != "forward" and not batch.targets and self.loss_fn is not own_loss:
            raise SettingError(f"rank {self.group.rank} holds the last stage, so {call} needs the targets there")

    def _get_ready(self, call: str) -> None:
        self.get_ready(call)
        if call in ("eval", "forward"):
            self._settle(call)
