"""The stages and the settings that all steps of a rank have in common, and the agreement on them with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from types import NoneType

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core import Op, PipelineError, Schedule, SettingError, check, lower, require_schedule, strip, without_waits
from ppedu.core.validate import require_instance
from ppedu.engine import clock
from ppedu.engine.batch import Batching
from ppedu.engine.control import Control
from ppedu.engine.gradients import GradientSync
from ppedu.engine.interpreter import Handler
from ppedu.engine.names import Names, Tie
from ppedu.engine.post_validation import PostValidation, Validation
from ppedu.engine.program import Program
from ppedu.engine.ranks import device
from ppedu.engine.ranks.comm import PipelineGroup
from ppedu.engine.ranks.messages import Messages
from ppedu.engine.ranks.versions import allow_two_streams
from ppedu.engine.results import Results
from ppedu.engine.sharded import Shards, is_sharded, storage
from ppedu.engine.stages.head import find_head
from ppedu.engine.stages.local import as_stages, find_loss, require_past
from ppedu.engine.stages.stage import Loss, Stage
from ppedu.engine.updates import Optimizers, find_updates

MOST_SECONDS = 10**6  # of a timeout
CLOCK_STEPS = 50  # after which the clocks of several machines are compared again


class Context:
    """A schedule and this rank's stages, checked; the arguments are those of `Pipeline`."""

    # From the first call on, in which the ranks agree:
    program: Program  # this rank's
    shards: Shards  # its sharded stages
    sharded: bool  # whether the pipeline's stages are

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
        optimizer: PostValidation | Optimizers | None = None,
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
        group = PipelineGroup.of(group)
        self.stages = as_stages(schedule, stages, group)
        given = without_waits(schedule)
        if given.lowered and (problems := check(given, transport="rendezvous")):
            raise SettingError(
                f"{schedule!r} runs on a backend that buffers sends (gloo), but not where a send waits for its receive "
                f"(NCCL): {problems[0]}; give Pipeline(pp.strip(schedule), …), which places messages of its own"
            )
        self.schedule, self._given = strip(schedule), given
        if schedule.slices > 1:
            require_past(self.stages)
        self.last = self.stages.get(schedule.stages - 1)
        self.loss_fn = find_loss(loss_fn, self.stages, schedule.stages - 1)
        self.device = device.home([stage.module for stage in self.stages.values()], group.device)
        self.group = group.on(self.device)
        device.begin(self.device)
        for stage in self.stages.values():
            stage.device = device.home([stage.module], self.device)
        self.batching, self.autocast, self.seed = batching, autocast, seed
        self.messages = Messages(schedule.placement, self.group, timeout, debug)
        limit = timedelta(seconds=timeout)
        self.control = Control(self.group, limit, replicas)
        self.names = Names(schedule.placement, self.stages, tied, group.rank)
        self.gradients = GradientSync(self.names, self.group, replicas, limit, self.device)
        self.updates = find_updates(schedule, self.stages, optimizer)
        if self.updates and (replicas or tied):
            raise SettingError(f"{schedule!r} updates weights within a step; leave out replicas and tied")
        if not self.updates:
            require_instance("optimizer", optimizer, (PostValidation, NoneType), "a PostValidation(optimizer)")
        self.head = find_head(schedule, self.stages, self.group, limit)
        if self.head and (loss_fn or isinstance(optimizer, PostValidation)):
            raise SettingError(
                "a shared head computes the cross-entropy itself, without PostValidation; leave out both"
            )
        self.validation: Validation | None = None
        if isinstance(optimizer, PostValidation):
            self.validation = Validation(optimizer, self.control, self.gradients)
        self.handlers: dict[Op, Handler] = {}  # those that replace a method of Step
        self.steps = 0
        self.loss, self.losses = torch.zeros(()), torch.zeros(schedule.microbatches)  # of the last step
        self.results: Results | None = None  # of the last step
        self.clocks = clock.RankClocks()
        self._agreed = False  # with the other ranks, which the first call does
        self._warned = False

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that forwards run on this rank: those of the stages, and the loss if it is one."""
        return [*self.gradients.modules.values(), *([self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [])]

    @cached_property
    def forwards(self) -> Program:
        """This rank's program for an evaluation: the schedule's forwards, without backwards."""
        return self.program if self.schedule.forward_only else self._compile(self.schedule.forwards)

    def _compile(self, schedule: Schedule) -> Program:
        """Return this rank's program of a schedule, which is lowered unless the user has done so."""
        if schedule.lowered:
            return Program(schedule, self.group.rank, ahead=0)  # its receives stay where they are
        # To post the receive of a message whose header states its shape, a rank must wait for the header. Early
        # is better on a GPU, too: the order of messages in its queues is the same, and they can only start sooner.
        receive = "late" if self.batching.variable_shapes or schedule.placement.backwards else "early"
        return Program(lower(schedule, receive, self.sharded), self.group.rank)

    @cached_property
    def side_stream(self) -> torch.cuda.Stream:
        """The GPU's second stream, for overlapped pairs."""
        allow_two_streams()
        return torch.cuda.Stream(self.device)

    def get_ready(self, call: str) -> None:
        """Do what ranks do together before a call, whether or not this rank can make it."""
        if self.control.failure:
            raise PipelineError(
                f"this pipeline cannot be used after an error within a step ({self.control.failure}); restart the ranks"
            )
        if not self._agreed:
            self._agree(f"start {call}")
            self._agreed = True
        elif self.steps % CLOCK_STEPS == 0:
            self.clocks.compare(self.control, f"start {call}")

    def _agree(self, purpose: str) -> None:
        """Compile the schedule, and compare weights, settings and clocks with the other ranks.

        Raises:
            PipelineError: the ranks have different settings, or different values for weights that they share. On every
                rank.
        """
        modules = self.gradients.modules
        first = min((index for index, stage in self.stages.items() if stage.trained), default=self.schedule.stages)
        self.control.meet(purpose)
        own = torch.tensor([clock.machine(), first, *storage(modules)])
        rows = self.control.exchange(own, purpose).tolist()
        self.messages.trained_from = min(row[1] for row in rows)
        self.sharded = is_sharded([row[2:] for row in rows])
        self.shards = Shards(modules, self.group.rank)
        self.program = self._compile(self._given if self._given.lowered else self.schedule)
        if device.is_queue(self.group.device):
            with self.control.required_for(purpose):
                self.messages.connect(self.program.peers)
        settings = {
            "schedule": self.program.fingerprint,
            "debug": self.messages.debug,
            "seed": self.seed,
            "autocast": self.autocast,
            "variable_shapes": self.batching.variable_shapes,
            "max_norm": self.validation and self.validation.options.max_norm,
            "tied": self.names.ties,
            "reduction": self.batching.reduction,
            "slices": self.batching.slices,
        }
        self.control.require_same(settings, purpose)
        problems = self.shards.problems(self.program.lowered, self.gradients.replicas)
        if self.sharded and self.schedule.placement.backwards:
            problems = ["the forward and the backward of a stage are on two ranks, and its weights cannot be sharded"]
        if self.sharded and self.validation:
            problems.append("PostValidation cannot restore sharded weights; step the optimizer yourself")
        if self.sharded and self.updates:
            problems.append("sharded weights have no versions; take a schedule without U")
        self.control.require_none(problems, purpose)
        with self.control.required_for(purpose):
            differences = self.gradients.initial_differences(partial(self.control.exchange, purpose=purpose))
        self.control.require_none(differences, purpose)
        self.clocks.machines = [row[0] for row in rows]
        self.clocks.compare(self.control, purpose)
