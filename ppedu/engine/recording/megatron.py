"""The orders that the pipeline loops of Megatron-LM run, recorded without processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ppedu.core import Action, Op, Placement, SettingError
from ppedu.core.validate import require_count, require_instance
from ppedu.engine.recording.posted import WANTED, RecordedRank, refused, replaced


def megatron(
    loop: Callable[..., Any],
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    group: int | None = None,
    overlap: bool = False,
    overlap_all: bool = False,
    batch: bool | None = None,
    **unknown: Any,
) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank of a pipeline loop of Megatron-LM's does, in order; see `ppedu.engine.recording.record`.

    The loop is called once for each rank, here, and sends with its own `P2PCommunicator`. In place of computing and of
    posting messages, it is written down which forward, backward or message is asked for. A message that is sent is
    named by its tensor; one that is received, by the forward or backward that uses its tensor. So if two ranks disagree
    about a message, their names for it differ.

    Raises:
        SettingError: The loop is another function, or it fails.
    """
    if unknown:
        raise SettingError(
            f"unknown setting {next(iter(unknown))!r}; known: chunks, group, overlap, overlap_all, batch"
        )
    sizes = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    for name, value in sizes.items():
        require_count(name, value)
    names = getattr(unwrap(loop), "__globals__", {}) if callable(loop) else {}
    pipelining = getattr(loop, "__name__", "") != "forward_backward_no_pipelining"
    if not pipelining or not {"P2PCommunicator", "ProcessGroupCollection"} <= names.keys():
        raise SettingError(f"pipe must be {WANTED}; got {loop!r}")
    require_instance("overlap", overlap, bool, "True or False")
    require_instance("overlap_all", overlap_all, bool, "True or False")
    require_instance("batch", batch, (bool, NoneType), "True or False")
    require_count("group", ranks if group is None else group)
    settings = {
        "microbatch_group_size_per_vp_stage": ranks if group is None else group,
        "overlap_p2p_comm": overlap,
        "overlap_p2p_comm_warmup_flush": overlap_all,
        "batch_p2p_comm": not overlap if batch is None else batch,
    }
    orders, placement = [], Placement.make("loop", ranks, chunks)
    for number in range(ranks):
        rank = _Rank(number, placement)
        try:
            rank.run(loop, names, settings, microbatches)
            orders.append(rank.actions())
        except Exception as error:
            raise refused(loop, sizes | settings, number, error) from error
    return tuple(orders)


class _Rank(RecordedRank):
    """A rank on which one of Megatron-LM's loops runs."""

    def run(self, loop: Callable[..., Any], names: dict[str, Any], settings: dict[str, Any], microbatches: int) -> None:
        """Run the loop, with the functions of this rank in place of those of `torch.distributed` that it calls."""
        ranks, chunks = self.placement.ranks, self.placement.chunks
        config = sys.modules[names["P2PCommunicator"].__module__].ModelParallelConfig(
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=chunks,
            pipeline_dtype=torch.float32,
            batch_p2p_sync=False,  # it waits for a GPU
            deallocate_pipeline_outputs=True,  # as in Megatron's training; the loop then waits for sends earlier
            **settings,
        )
        config.hidden_size = 1
        pipeline = SimpleNamespace(rank=lambda: self.rank, size=lambda: ranks)
        groups = names["ProcessGroupCollection"]()
        groups.tp = groups.cp = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        device = torch.cuda.current_device
        try:
            torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
            with replaced(self.functions | {"get_backend": lambda group: "nccl"}), _OnCpu():
                loop(
                    forward_step_func=lambda data, stage: (stage(next(data)), lambda output: (output.sum(), {})),
                    data_iterator=[iter(range(microbatches)) for _ in range(chunks)],
                    model=[_Stage(self, stage, config) for stage in self.placement.stages_of(self.rank)],
                    num_microbatches=microbatches,
                    seq_length=1,
                    micro_batch_size=1,
                    p2p_communicator=names["P2PCommunicator"](pipeline, config),
                    pg_collection=groups,
                )
        finally:
            torch.cuda.current_device = device


class _Stage(nn.Module):
    """A stage that computes nothing, and writes down its forwards and backwards."""

    model_type = None

    def __init__(self, rank: _Rank, stage: int, config: Any):
        super().__init__()
        self.on, self.stage, self.config = rank, stage, config

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.received = tensors[0]

    def forward(self, microbatch: int) -> Tensor:
        if self.received is not None:
            self.on.use(self.received, Action(self.stage, Op.RECV_F, microbatch))
        self.on.order.append(Action(self.stage, Op.F, microbatch))
        given = torch.ones(1, 1, 1, dtype=torch.float32, requires_grad=True) if self.received is None else self.received
        output = given.clone()
        output.register_hook(partial(self.backward, microbatch))
        self.on.mark(output, Action(self.stage, Op.SEND_F, microbatch))
        return output

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor:
        """Return the gradient of the input."""
        if self.stage < self.on.placement.stages - 1:
            self.on.use(gradient, Action(self.stage, Op.RECV_B, microbatch))
        self.on.order.append(Action(self.stage, Op.B, microbatch))
        return self.on.mark(torch.empty_like(gradient), Action(self.stage, Op.SEND_B, microbatch))


class _OnCpu(TorchFunctionMode):
    """Makes tensors here that a loop wants on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))
