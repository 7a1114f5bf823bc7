"""The orders that the pipeline loops of Megatron-LM run, recorded without processes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from types import NoneType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ppedu.core import TOWARDS, Action, Op, SettingError
from ppedu.core.validate import require_count, require_instance


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
    """Return what each rank of a pipeline loop of Megatron-LM's does, in order; see `ppedu.engine.record.record`.

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
        raise SettingError(
            "pipe must be DualPipe, DualPipeV, or a forward_backward_pipelining_… function of Megatron-LM's; "
            f"got {loop!r}"
        )
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
    orders = []
    for number in range(ranks):
        rank = _Rank(number, ranks, chunks)
        try:
            rank.run(loop, names, settings, microbatches)
            orders.append(tuple(map(Action.parse, rank.texts())))
        except Exception as error:
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            given = ", ".join(f"{name}={value}" for name, value in (sizes | settings).items())
            raise SettingError(f"{loop.__name__}({given}) cannot be recorded; on rank {number}: {why}") from error
    return tuple(orders)


class _Message:
    """A message that is posted, and its handle. `action` is its name, which a receive gets when its tensor is used.

    Args:
        sent: The tensor that is sent; it must stay as it is until the rank has waited for it.
    """

    def __init__(self, order: list[Any], peer: int, action: Action | None = None, sent: Tensor | None = None):
        self.order, self.peer, self.action, self.waited = order, peer, action, False
        self.sent, self.value = sent, None if sent is None else sent.item()

    def wait(self) -> None:
        if self.waited:
            return
        self.waited = True
        self.order.append(self)
        if self.sent is not None and self.sent.item() != self.value:
            raise RuntimeError(f"it frees or overwrites the tensor of {self} before it waits for it")

    def __str__(self) -> str:
        return str(self.action)


class _Rank:
    """A rank. `order`: actions that compute, lists of messages posted together, and messages that are waited for."""

    def __init__(self, rank: int, ranks: int, chunks: int):
        self.rank, self.ranks, self.chunks = rank, ranks, chunks
        self.order: list[Action | list[_Message] | _Message] = []
        self.tensors: dict[float, Action | _Message] = {}  # from the value of a tensor to how it is sent or came

    def run(self, loop: Callable[..., Any], names: dict[str, Any], settings: dict[str, Any], microbatches: int) -> None:
        """Run the loop, with the functions of this rank in place of those of `torch.distributed` that it calls."""
        config = sys.modules[names["P2PCommunicator"].__module__].ModelParallelConfig(
            pipeline_model_parallel_size=self.ranks,
            virtual_pipeline_model_parallel_size=self.chunks,
            pipeline_dtype=torch.float32,
            batch_p2p_sync=False,  # it waits for a GPU
            deallocate_pipeline_outputs=True,  # as in Megatron's training; the loop then waits for sends earlier
            **settings,
        )
        config.hidden_size = 1
        pipeline = SimpleNamespace(rank=lambda: self.rank, size=lambda: self.ranks)
        groups = names["ProcessGroupCollection"]()
        groups.tp = groups.cp = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        functions = {
            "is_initialized": lambda: True,
            "get_backend": lambda group: "nccl",
            "get_global_rank": lambda group, rank: rank,
            "isend": self.isend,
            "irecv": self.irecv,
            "P2POp": partial,  # of a call of isend or irecv
            "batch_isend_irecv": self.batch,
        }
        before, device = {name: vars(dist)[name] for name in functions}, torch.cuda.current_device
        try:
            vars(dist).update(functions)
            torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
            with _OnCpu(), torch.device("cpu"), torch.inference_mode(False):
                loop(
                    forward_step_func=lambda data, stage: (stage(next(data)), lambda output: (output.sum(), {})),
                    data_iterator=[iter(range(microbatches)) for _ in range(self.chunks)],
                    model=[_Stage(self, chunk * self.ranks + self.rank, config) for chunk in range(self.chunks)],
                    num_microbatches=microbatches,
                    seq_length=1,
                    micro_batch_size=1,
                    p2p_communicator=names["P2PCommunicator"](pipeline, config),
                    pg_collection=groups,
                )
        finally:
            vars(dist).update(before)
            torch.cuda.current_device = device

    def isend(self, tensor: Tensor, dst: int, group: Any = None) -> _Message:
        action = self.tensors.get(tensor.item())
        if not isinstance(action, Action):
            raise RuntimeError("it sends a tensor that no forward or backward of this rank has returned")
        message = _Message(self.order, dst, action, tensor)
        self.order.append([message])
        return message

    def irecv(self, tensor: Tensor, src: int, group: Any = None) -> _Message:
        message = _Message(self.order, src)
        self.mark(tensor, message)
        self.order.append([message])
        return message

    def batch(self, calls: list[Callable[[], _Message]]) -> list[_Message]:
        start, messages = len(self.order), [call() for call in calls]
        self.order[start:] = [messages]
        return messages

    def mark(self, tensor: Tensor, what: Action | _Message) -> Tensor:
        """Give a tensor the value by which it is recognized later, in copies too."""
        value = len(self.tensors) + 2.0  # the gradient of a loss is 1 or smaller
        self.tensors[value] = what
        tensor.detach().fill_(value)
        if tensor.item() != value:
            raise RuntimeError(
                f"its tensors of {tensor.dtype} cannot hold the number {value:.0f}; let it receive float32"
            )
        return tensor.detach()

    def use(self, tensor: Tensor, action: Action) -> None:
        """Name the message that a tensor came with."""
        message = self.tensors.get(tensor.item())
        if not isinstance(message, _Message) or message.action:
            raise RuntimeError(f"what it uses as {action} is {'not received' if message is None else message}")
        message.action = action

    def texts(self) -> list[str]:
        for message in [message for entry in self.order if isinstance(entry, list) for message in entry]:
            if message.action is None:
                raise RuntimeError(f"it receives a tensor from rank {message.peer} that no forward or backward uses")
            if message.peer != (self.rank + TOWARDS[message.action.op]) % self.ranks:
                raise RuntimeError(f"it posts {message.action} with rank {message.peer}")
            message.wait()  # at the end, if the loop never does
        texts, at = [], 0
        while at < len(self.order):
            entry, at = self.order[at], at + 1
            if isinstance(entry, list):
                text = ";".join(map(str, entry))
                texts.append(f"({text})BATCH_P2P" if len(entry) > 1 else text)
                if len(entry) > 1 and all(each in entry for each in self.order[at : at + len(entry)]):
                    at += len(entry)  # a batch that is waited for at once
            elif isinstance(entry, _Message):
                texts.append(re.sub("(?=SEND|RECV)", "WAIT_", str(entry)))
            else:
                texts.append(str(entry))
        return texts


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
        if self.stage < self.on.ranks * self.on.chunks - 1:
            self.on.use(gradient, Action(self.stage, Op.RECV_B, microbatch))
        self.on.order.append(Action(self.stage, Op.B, microbatch))
        return self.on.mark(torch.empty_like(gradient), Action(self.stage, Op.SEND_B, microbatch))


class _OnCpu(TorchFunctionMode):
    """Makes tensors here that a loop wants on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))
