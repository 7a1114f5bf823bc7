"""A rank on which other people's code runs: its computations, messages and waits, in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppedu.core import Action, Placement, Schedule, SettingError
from ppedu.core.placement import other_end

WANTED = (
    "DualPipe, DualPipeV, a schedule class of torch.distributed.pipelining, "
    "or a forward_backward_pipelining_… function of Megatron-LM's"
)


def refused(code: Any, settings: Mapping[str, Any], rank: int, error: BaseException) -> SettingError:
    """Return the error for code that fails on a rank with these settings, for its own reason."""
    while error.__cause__:
        error = error.__cause__
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    return SettingError(f"{code.__name__}({given}) cannot be recorded; on rank {rank}: {why}")


def recorded(
    code: Any,
    placement: Placement,
    microbatches: int,
    orders: Sequence[tuple[Action, ...]],
    forward_only: bool = False,
) -> Schedule:
    """Return the schedule of these orders; raise SettingError if there is nothing in them."""
    if not any(orders):
        raise SettingError(f"{code.__name__} ends without computing anything, so there is nothing to record")
    return Schedule(f"recorded {code.__name__}", placement, microbatches, tuple(orders), forward_only)


@contextmanager
def replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put functions in place of those of `torch.distributed`, for as long as the context is open."""
    before = {name: vars(dist)[name] for name in functions}
    try:
        vars(dist).update(functions)
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        vars(dist).update(before)


class PostedMessage:
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


class P2PCall:
    """A call of isend or irecv that is yet to be made, in place of a `P2POp`."""

    def __init__(
        self,
        op: Callable[..., PostedMessage],
        tensor: Tensor,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ):
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        self.peer = self.group_peer = group_peer if peer is None else peer


class RecordedRank:
    """A rank. `order`: actions that compute, lists of messages posted together, and messages that are waited for.

    Its methods stand for functions of torch.distributed. A rank of the group has the same number in the world.
    """

    def __init__(self, rank: int, placement: Placement):
        self.rank, self.placement = rank, placement
        self.order: list[Action | list[PostedMessage] | PostedMessage] = []
        self.tensors: dict[float, Action | PostedMessage] = {}  # from the value of a tensor to how it is sent or came
        self.functions: dict[str, Callable[..., Any]] = {
            "is_initialized": lambda: True,
            "get_global_rank": lambda group, rank: rank,
            "isend": self.isend,
            "irecv": self.irecv,
            "P2POp": P2PCall,
            "batch_isend_irecv": self.batch,
        }

    def isend(
        self, tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None
    ) -> PostedMessage:
        action = self.tensors.get(tensor.item())
        if not isinstance(action, Action):
            raise RuntimeError("it sends a tensor that no forward or backward of this rank has returned")
        return self._post(PostedMessage(self.order, group_dst if dst is None else dst, action, tensor))

    def irecv(
        self, tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None
    ) -> PostedMessage:
        message = PostedMessage(self.order, group_src if src is None else src)
        self.mark(tensor, message)
        return self._post(message)

    def _post(self, message: PostedMessage) -> PostedMessage:
        self.order.append([message])
        return message

    def batch(self, calls: Sequence[P2PCall]) -> list[PostedMessage]:
        start, messages = len(self.order), [call.op(call.tensor, call.peer) for call in calls]
        self.order[start:] = [messages]
        return messages

    def mark(self, tensor: Tensor, what: Action | PostedMessage) -> Tensor:
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
        """Name the message that a tensor came with. A stage of the same rank may have made it instead."""
        found = self.tensors.get(tensor.item())
        if isinstance(found, PostedMessage) and not found.action:
            found.action = action
        elif found != other_end(action):
            raise RuntimeError(f"what it uses as {action} is {'not received' if found is None else found}")

    def actions(self) -> tuple[Action, ...]:
        """Return all that the rank has done, in order.

        Raises:
            RuntimeError: It posts a message that is not used, or with another rank than the holder of the stage.
        """
        for message in [message for entry in self.order if isinstance(entry, list) for message in entry]:
            if message.action is None:
                raise RuntimeError(f"it receives a tensor from rank {message.peer} that no forward or backward uses")
            if message.peer != self.placement.rank(other_end(message.action).stage):
                raise RuntimeError(f"it posts {message.action} with rank {message.peer}")
            message.wait()  # at the end, if the code never does
        return tuple(map(Action.parse, self._texts()))

    def _texts(self) -> Iterator[str]:
        at = 0
        while at < len(self.order):
            entry, at = self.order[at], at + 1
            if isinstance(entry, list):
                text = ";".join(map(str, entry))
                yield f"({text})BATCH_P2P" if len(entry) > 1 else text
                if len(entry) > 1 and all(each in entry for each in self.order[at : at + len(entry)]):
                    at += len(entry)  # a batch that is waited for at once
            elif isinstance(entry, PostedMessage):
                yield re.sub("(?=SEND|RECV)", "WAIT_", str(entry))
            else:
                yield str(entry)
