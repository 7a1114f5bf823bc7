"""The orders that the schedules of torch.distributed.pipelining run, recorded without processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ppedu.core import Action, Op, Placement, Schedule, SettingError
from ppedu.core.validate import require_size
from ppedu.engine.ranks.versions import TORCHS_RECORDED, require, torchs_changes, torchs_copy, torchs_parts
from ppedu.engine.recording.posted import RecordedRank, recorded, refused, replaced

SINGLE, MULTI = "PipelineScheduleSingle", "PipelineScheduleMulti"  # torch's classes for one stage on a rank, or several
# Arguments that are given here, or that have no effect on the order.
OURS = {"stage", "stages", "n_microbatches", "loss_fn", "args_chunk_spec", "kwargs_chunk_spec", "output_merge_spec"}
STARRED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def is_torchs(pipe: type) -> bool:
    """Return whether a class is a schedule of torch.distributed.pipelining, or derived from one."""
    return _is_a(SINGLE, pipe) or _is_a(MULTI, pipe)


def runtime(pipe: type, ranks: int, microbatches: int, chunks: int | None = None, **settings: Any) -> Schedule:
    """Return what each rank does in a step of a schedule of torch's; see `ppedu.engine.recording.record`.

    For each rank, the schedule is made and its `step` called here, with torch's own stages. These compute nothing, and
    write down which forward, backward or message is asked for. Messages are named as in `megatron`.

    Raises:
        PipelineError: This release of torch is too old.
        SettingError: A setting is unknown, or the schedule fails.
    """
    single = _is_a(SINGLE, pipe)
    ranks, chunks, microbatches = require_size(ranks, (1 if single else 2) if chunks is None else chunks, microbatches)
    if single and chunks > 1:
        raise SettingError(f"{pipe.__name__} has one stage on each rank; got chunks={chunks}")
    parameters = inspect.signature(pipe).parameters.values()
    known = [each.name for each in parameters if each.name not in OURS and each.kind not in STARRED]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name in settings:
        if name in OURS or not (takes_any or name in known):
            raise SettingError(f"unknown setting {name!r} of {pipe.__name__}; known: {', '.join(['chunks', *known])}")
    make = partial(pipe, **settings, n_microbatches=microbatches, loss_fn=_loss)
    return _steps(pipe, make, Placement.make("loop", ranks, chunks), microbatches, settings)


def live(made: Any) -> Schedule:
    """Return what all ranks do in a step of a schedule of torch's that this rank has made.

    Raises:
        PipelineError: This release of torch is too old.
        SettingError: It is not such a schedule, it has a method of its own, which would run, or its step fails.
    """
    parts = torchs_parts(made)
    if changes := torchs_changes(made):
        raise SettingError(
            f"{type(made).__name__} has a {changes[0]} of its own, which would run now; call pp.run.record with a "
            "class that has it, and pp.verify with the result"
        )
    loss = parts["loss_fn"] and _loss
    make = partial(torchs_copy, made, n_microbatches=parts["microbatches"], loss_fn=loss)
    return _steps(type(made), make, _placement(parts["stages"]), parts["microbatches"], {}, forward_only=not loss)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def _is_a(name: str, pipe: type) -> bool:
    return any(each.__name__ == name for each in pipe.__mro__)


def _placement(stages: Sequence[Any]) -> Placement:
    """Return where the stages of all ranks are, which a rank's stages know once a schedule has them."""
    ranks = stages[0].stage_index_to_group_rank
    found = Placement.custom([ranks[stage] for stage in range(stages[0].num_stages)])
    named = (Placement.make(name, found.ranks, found.chunks) for name in ("loop", "v"))
    return next((each for each in named if each.holders == found.holders), found)


def _steps(
    pipe: type,
    make: Callable[..., Any],
    placement: Placement,
    microbatches: int,
    settings: Mapping[str, Any],
    forward_only: bool = False,
) -> Schedule:
    """Record a step on each rank. `make` returns the schedule for a rank's stages; `placement` may become another."""
    require(TORCHS_RECORDED)
    orders, number = [], 0
    given = {"ranks": placement.ranks, "microbatches": microbatches, "chunks": placement.chunks, **settings}
    try:
        placement = _placement(_Rank(0, placement).make(pipe, make)[1])
        for number in range(placement.ranks):
            rank = _Rank(number, placement)
            rank.step(pipe, make, microbatches, forward_only)
            orders.append(rank.actions())
    except Exception as error:
        raise refused(pipe, given, number, error) from error
    return recorded(pipe, placement, microbatches, orders, forward_only)


class _Rank(RecordedRank):
    """A rank on which a schedule of torch's runs."""

    def __init__(self, rank: int, placement: Placement):
        super().__init__(rank, placement)
        self.functions |= {
            "get_rank": lambda group=None: rank,
            "get_world_size": lambda group=None: placement.ranks,
            "send": self.send,
            "recv": self.recv,
        }

    def make(self, pipe: type, make: Callable[..., Any]) -> tuple[Any, list[Any]]:
        """Return the schedule and its stages, those of this rank."""
        with replaced(self.functions):
            stages = [_stage()(self, stage) for stage in self.placement.stages_of(self.rank)]
            return make(stages if _is_a(MULTI, pipe) else stages[0]), stages

    def step(self, pipe: type, make: Callable[..., Any], microbatches: int, forward_only: bool) -> None:
        made, stages = self.make(pipe, make)
        with replaced(self.functions):
            batch = torch.ones(microbatches, 1)
            first, last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
            made.step(*[batch] * first, target=batch if last and not forward_only else None)

    def send(self, tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> None:
        if tensor.is_floating_point():  # otherwise it says whether the shapes of messages are known
            self.isend(tensor, dst, group, tag, group_dst).wait()

    def recv(self, tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> None:
        if tensor.is_floating_point():
            self.irecv(tensor, src, group, tag, group_src).wait()
        else:
            tensor.fill_(1)  # the shapes are known


@cache
def _stage() -> Any:
    """Return the class of the stages, one derived from torch's; its module takes a second to load."""
    from torch.distributed.pipelining import PipelineStage

    class Recorded(PipelineStage):
        def __init__(self, on: RecordedRank, stage: int):
            shape, cpu = torch.empty(1, dtype=torch.float32, requires_grad=True), torch.device("cpu")
            group: Any = on  # anything that is not None, for which the default group would be taken
            super().__init__(nn.Identity(), stage, on.placement.stages, cpu, shape, shape, group=group)
            self.on, self.microbatch = on, 0

        def action(self, op: Op) -> Action:
            return Action(self.stage_index, op, self.microbatch)

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self.microbatch = fwd_chunk_id
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
            if not self.is_first:
                self.on.use(args[0], self.action(Op.RECV_F))
            self.on.order.append(self.action(Op.F))
            return self.on.mark(torch.empty(1, dtype=torch.float32), self.action(Op.SEND_F))

        def backward_one_chunk(
            self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            if not self.has_backward:
                return
            self.microbatch = bwd_chunk_id
            self.on.order.append(self.action(Op.B if full_backward else Op.I))
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

        def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
            if not self.has_backward:
                return
            self.microbatch = bwd_chunk_id
            self.on.order.append(self.action(Op.W))
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

        def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
            """Return the gradient of the input. The half of a backward for the weights, "weight", is given none."""
            for gradient in bwd_kwargs.get("output_grads") or ():
                self.on.use(gradient, self.action(Op.RECV_B))
            return (self.on.mark(torch.empty(1, dtype=torch.float32), self.action(Op.SEND_B)),), None

        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            self.on.order.append(Action(self.stage_index, Op.REDUCE_GRAD))

    return Recorded
