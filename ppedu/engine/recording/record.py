"""The orders that other people's code runs, recorded without processes."""

from __future__ import annotations

import sys
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ppedu.core import Action, Op, Placement, Schedule, SettingError, overlap
from ppedu.core.actions import batch
from ppedu.core.validate import require_count
from ppedu.engine.recording.megatron import megatron
from ppedu.engine.recording.posted import WANTED, recorded
from ppedu.engine.recording.runtime import is_torchs, runtime

KINDS = {"DualPipe": "bidirectional", "DualPipeV": "v"}  # from the name of a class to its placement


def record(pipe: Any, ranks: int, microbatches: int, **settings: Any) -> Schedule:
    """Return the schedule that a pipeline of DeepSeek's, Megatron-LM's or torch's runs, with its messages and waits.

        pp.run.record(dualpipe.DualPipe, ranks=8, microbatches=20)
        pp.run.record(schedules.forward_backward_pipelining_with_interleaving, ranks=4, microbatches=8, chunks=2)
        pp.run.record(ScheduleInterleaved1F1B, ranks=4, microbatches=8, chunks=2)

    Their code is called once for each rank, here. In place of computing and sending, it is written down what is asked
    for. A message is named by the forward or backward that made or uses its tensor; so if two ranks disagree about a
    message, `check` finds it. A loop of Megatron-LM's or torch's that frees or overwrites what it still sends is
    refused. No other thread of this process may use torch.distributed meanwhile.

    Args:
        pipe: A class: `DualPipe` or `DualPipeV` of github.com/deepseek-ai/DualPipe, or one derived from them. Its
            `step` decides in which order `_recv_forward`, `_forward_compute_chunk`, `_send_forward` and so on are
            called, and that order is recorded. Or a function of `megatron.core.pipeline_parallel.schedules`:
            `forward_backward_pipelining_with_interleaving`, or `…_without_interleaving`. Or a schedule class of
            torch.distributed.pipelining, such as `Schedule1F1B`, or one derived from them.
        ranks, microbatches: Sizes that it accepts; DualPipe calls the microbatches `num_chunks`.
        settings: Of Megatron-LM's loops: chunks, group (its `microbatch_group_size_per_vp_stage`, by default ranks),
            overlap (`overlap_p2p_comm`), overlap_all (`overlap_p2p_comm_warmup_flush`) and batch (`batch_p2p_comm`, by
            default true unless messages overlap). Of torch's schedules: chunks, the number of stages on a rank, by
            default 2 if there may be several; and what else the class takes, such as `defer_pp_recv`.

    Raises:
        SettingError: `pipe` is none of these, it cannot run with these sizes or settings, or a class of DeepSeek's
            replaces one of those methods.
        PipelineError: This release of torch is too old to record its schedules.
    """
    if not isinstance(pipe, type):
        orders = megatron(pipe, ranks, microbatches, **settings)
        placement = Placement.make("loop", ranks, settings.get("chunks", 1))
        return recorded(pipe, placement, microbatches, orders)
    if is_torchs(pipe):
        return runtime(pipe, ranks, microbatches, **settings)
    base = next((each for each in pipe.__mro__ if each.__name__ in KINDS), None)
    if base is None:
        raise SettingError(f"pipe must be {WANTED}; got {pipe!r}")
    if settings:
        raise SettingError(f"unknown setting {next(iter(settings))!r}; {pipe.__name__} takes none")
    own = [name for each in pipe.__mro__[: pipe.__mro__.index(base)] for name in vars(each) if name in vars(_Recorder)]
    if replaced := [name for name in own if name.startswith("_") and not name.startswith("__")]:
        raise SettingError(f"{pipe.__name__} has a {replaced[0]} of its own, which is not run: record replaces it")
    require_count("ranks", ranks)
    require_count("microbatches", microbatches)
    kind = KINDS[base.__name__]
    placement = Placement.make(kind, ranks, 2 if kind == "v" else 1, microbatches)
    comm = getattr(sys.modules[base.__module__], "comm", SimpleNamespace())
    before = vars(comm).copy()
    comm.TENSOR_SHAPES, comm.TENSOR_DTYPE = [(1,)], torch.float32  # `step` asks whether they are known
    try:
        orders = tuple(tuple(_order(pipe, placement, rank, microbatches)) for rank in range(ranks))
    finally:
        vars(comm).update(before)
    return recorded(pipe, placement, microbatches, orders)


def _order(pipe: type, placement: Placement, rank: int, microbatches: int) -> list[Action]:
    """Return what a rank's `step` does."""

    class Recorded(_Recorder, pipe):  # type: ignore[misc]
        pass

    made: Any = Recorded(placement, rank)
    try:
        with torch.enable_grad():
            made.step(num_chunks=microbatches, criterion=torch.sum)
    except Exception as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise SettingError(
            f"{pipe.__name__} cannot be recorded with {placement.ranks} ranks and {microbatches} microbatches; "
            f"on rank {rank}, its step ends in {why}"
        ) from error
    order: list[Action] = made.order
    return order


class _Recorder(nn.Module):
    """The attributes and methods that the `step` of a DualPipe uses, without tensors. `order`: what it asked for."""

    def __init__(self, placement: Placement, rank: int):
        nn.Module.__init__(self)  # not that of DualPipe, which wants modules and a GPU
        self.placement, self.rank, self.num_ranks = placement, rank, placement.ranks
        half = placement.ranks // 2
        self.is_first_rank, self.is_last_rank = rank == 0, rank == placement.ranks - 1
        self.is_in_second_half, self.is_middle_rank = rank >= half, rank in (half - 1, half)
        self.batch_dim, self.overlapped_forward_backward = 0, True
        self.order: list[Action] = []
        self._queued: list[Action] = []  # messages, until they are started together
        self._weights: deque[Action] = deque()  # that are postponed
        self._counts: Counter[tuple[Op, int]] = Counter()
        self._reset_states()

    def _reset_states(self) -> None:
        self.loss_chunks = [torch.zeros(())]
        self.comm_ops: list[Any] = []

    def _next(self, op: Op, phase: int) -> Action:
        """Return the next action of this kind in a phase: for DualPipe, a direction; for DualPipeV, a half of the V."""
        if self.placement.copies > 1:
            phase ^= self.is_in_second_half
            first, stage = phase * self.placement.split, self.num_ranks - 1 - self.rank if phase else self.rank
        else:
            first, stage = 0, 2 * self.num_ranks - 1 - self.rank if phase else self.rank
        self._counts[op, phase] += 1
        return Action(stage, op, first + self._counts[op, phase] - 1)

    def _message(self, op: Op, phase: int) -> None:
        action = self._next(op, phase)
        if op in self.placement.links[self.placement.copy(action.microbatch)][action.stage]:
            self._queued.append(action)

    def _recv_forward(self, phase: int) -> None:
        self._message(Op.RECV_F, phase)

    def _send_forward(self, phase: int) -> None:
        self._message(Op.SEND_F, phase)

    def _recv_backward(self, phase: int) -> None:
        self._message(Op.RECV_B, phase)

    def _send_backward(self, phase: int) -> None:
        self._message(Op.SEND_B, phase)

    def _commit_and_wait_comm(self) -> None:
        self.order += [batch(self._queued)] if self._queued else []
        self._queued.clear()

    def _forward_compute_chunk(self, phase: int) -> None:
        self.order.append(self._next(Op.F, phase))

    def _backward_compute_chunk(self, phase: int, enable_zb: bool = False) -> None:
        action = self._next(Op.B, phase)
        if enable_zb:
            self._weights.append(action._replace(op=Op.W))
            action = action._replace(op=Op.I)
        self.order.append(action)

    def _forward_backward_compute_chunk(self, phase0: int, phase1: int) -> None:
        self.order.append(overlap(self._next(Op.F, phase0), self._next(Op.B, phase1)))

    def _weight_chunk(self) -> None:
        self._commit_and_wait_comm()
        self.order.append(self._weights.popleft())
