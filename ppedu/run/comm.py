"""The messages between neighbouring ranks: `communicate` one way, `bidirectional_communicate` both at once.

Each message is preceded by a short header that states its dtype and shape. A receiver that expects
something else raises an error where plain torch.distributed would hand over garbage.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ppedu.core.errors import CommunicationError, SettingError
from ppedu.core.validate import require_count, require_instance

# operation: does it send, does it receive, and is the neighbour the rank after (+1) or the one before (-1)?
ONE_WAY = {
    "recv_forward": (False, True, -1),
    "send_forward": (True, False, +1),
    "recv_backward": (False, True, +1),
    "send_backward": (True, False, -1),
}
BOTH_WAYS = {
    "send_fwd_recv_bwd": (True, True, +1),
    "send_bwd_recv_fwd": (True, True, -1),
}
ACTIVATIONS = ("recv_forward", "send_bwd_recv_fwd")  # what these receive requires grad

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip  # a header names a dtype by its place here
MOST_DIMENSIONS = 8
DESCRIPTION = 2 + MOST_DIMENSIONS  # whole numbers that state a tensor's dtype and shape
LATE = re.compile("[Tt]imed? ?out")  # in what torch says when a message does not come
LOST = re.compile("[Cc]onnection|[Bb]roken pipe|[Ss]ocket|[Rr]emote (process|worker)")  # … or its sender is gone


@dataclass(frozen=True)
class PipelineGroup:
    """The ranks of one pipeline, seen from one of them: `rank` of `size`, in the order of the stages.

    `process_group` is the torch process group they talk in, None for the default one. Where nothing is
    given to a function of this room, the group is the whole world in rank order: `PipelineGroup.world()`.

    Raises:
        SettingError: the rank is not one of the group's, or not this process's in its process group.
        CommunicationError: there are several ranks, but no process group has been set up.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        require_count("size", self.size)
        require_count("rank", self.rank, least=0)
        if self.rank >= self.size:
            raise SettingError(f"a group of {self.size} has the ranks 0 to {self.size - 1}; got {self.rank}")
        if self.size > 1 and not dist.is_initialized():
            raise CommunicationError(
                f"{self.size} ranks need a process group: call torch.distributed.init_process_group() first, "
                "in a program started by torchrun or %%torchrun"
            )
        if self.size > 1:
            own, most = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            if self.rank != own or self.size > most:
                raise SettingError(
                    f"this process is rank {own} of {most} in its process group; "
                    f"it cannot be rank {self.rank} of {self.size}"
                )

    @classmethod
    def world(cls) -> PipelineGroup:
        """All ranks of this program; a single one where it was not started on several."""
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @classmethod
    def of(cls, group: PipelineGroup | None) -> PipelineGroup:
        """Return `group`, or `world()` where none is given.

        Raises:
            SettingError: it is not a PipelineGroup.
        """
        if group is None:
            return cls.world()
        require_instance("group", group, PipelineGroup, "a PipelineGroup(rank, size, process_group)")
        return group

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def device(self) -> torch.device:
        """Where messages travel from and to: this rank's GPU under NCCL, the CPU otherwise."""
        if self.size > 1 and dist.get_backend(self.process_group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def channel(self) -> Any:
        """What sends and receives by ranks of the group; torch's isend and irecv call it, after many questions."""
        return self.process_group or dist.group.WORLD

    def peer(self, rank: int) -> int:
        """The global rank of this group's `rank`, which is what torch.distributed asks for."""
        return dist.get_global_rank(self.process_group, rank) if self.process_group else rank


def place() -> tuple[torch.device, str]:
    """The device of this rank and the backend for `init_process_group`, in a program that torchrun has started.

    NCCL wants a GPU for each rank of the machine, which becomes the current one; where there are fewer, ranks share
    them and messages go through gloo and the host's memory, which rank 0 says.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        return torch.device("cpu"), "gloo"
    local = int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    if ranks > gpus and local == 0:
        few = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        print(f"{ranks} ranks share {few}; their messages go through the host's memory", file=sys.stderr)
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    return device, "gloo" if ranks > gpus else "nccl"


def communicate(
    operation: str,
    tensor: torch.Tensor | None = None,
    shapes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: PipelineGroup | None = None,
) -> torch.Tensor | None:
    """Send `tensor` to a neighbour, or receive one from it, and return when that is done.

    operation: "recv_forward" (from the rank before), "send_forward" (to the rank after), "recv_backward"
        (from the rank after) or "send_backward" (to the rank before).
    tensor: what to send. shapes, dtype: what to receive; the dtype is torch's default one if not given.
    device: where to put what is received; by default where the group's messages arrive.

    Returns what was received. A received activation requires grad, so that a backward through it ends there
    and leaves its gradient in `.grad`. The first rank has nobody before it and the last nobody after it:
    there, nothing is sent or received, and the answer is None.

    Raises:
        SettingError: the operation is unknown, or what it needs is missing.
        CommunicationError: the message has another shape or dtype than was expected.
    """
    return _exchange(ONE_WAY, operation, tensor, shapes, dtype, device, group)


def bidirectional_communicate(
    operation: str,
    send_tensor: torch.Tensor | None,
    recv_shapes: Sequence[int] | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: PipelineGroup | None = None,
) -> torch.Tensor | None:
    """Send to a neighbour and receive from the same one, both at once, so that neither waits for the other.

    operation: "send_fwd_recv_bwd" (with the rank after) or "send_bwd_recv_fwd" (with the rank before).
    Everything else is as in `communicate`.
    """
    return _exchange(BOTH_WAYS, operation, send_tensor, recv_shapes, dtype, device, group)


def _exchange(
    operations: dict[str, tuple[bool, bool, int]],
    operation: str,
    tensor: torch.Tensor | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    group: PipelineGroup | None,
) -> torch.Tensor | None:
    if not isinstance(operation, str) or operation not in operations:
        raise SettingError(f"there is no operation {operation!r} here; there is: {', '.join(operations)}")
    sends, receives, step = operations[operation]
    group = PipelineGroup.of(group)
    neighbour = group.rank + step
    if not 0 <= neighbour < group.size:
        return None
    if sends and not isinstance(tensor, torch.Tensor):
        raise SettingError(f"{operation} on rank {group.rank} needs a tensor to send; got {tensor!r}")
    if receives and not _is_shape(shape):
        raise SettingError(f"{operation} on rank {group.rank} needs the shape of what it is to receive; got {shape!r}")

    outgoing = tensor.detach().to(group.device).contiguous() if sends and tensor is not None else None
    incoming = (
        torch.empty(tuple(shape), dtype=dtype or torch.get_default_dtype(), device=group.device)
        if receives and shape is not None
        else None
    )
    # Headers first, and all of them, so that a message that does not fit is refused before it is received.
    theirs = None if incoming is None else torch.empty(DESCRIPTION, dtype=torch.int64, device=group.device)
    ours = None if outgoing is None else describe(outgoing.dtype, outgoing.shape)
    where = f"{operation} on rank {group.rank}, {'from' if receives else 'to'} rank {neighbour}"
    _swap(None if ours is None else torch.tensor(ours, device=group.device), theirs, neighbour, group, where)
    if incoming is None or theirs is None:
        _swap(outgoing, None, neighbour, group, where)
        return None
    _check(theirs.tolist(), incoming, where)
    _swap(outgoing, incoming, neighbour, group, where)
    received = incoming.to(device) if device is not None else incoming
    return received.requires_grad_(operation in ACTIVATIONS and received.is_floating_point())


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence) and all(hasattr(size, "__index__") and size >= 0 for size in shape)


def _swap(
    outgoing: torch.Tensor | None, incoming: torch.Tensor | None, neighbour: int, group: PipelineGroup, where: str
) -> None:
    """Send and receive at the same time, each if there is something to."""
    peer = group.peer(neighbour)
    ops = [
        dist.P2POp(kind, buffer, peer, group.process_group)
        for kind, buffer in ((dist.isend, outgoing), (dist.irecv, incoming))
        if buffer is not None
    ]
    try:
        for request in dist.batch_isend_irecv(ops):
            request.wait()
    except RuntimeError as error:
        raise CommunicationError(f"{where}: {failure(error, neighbour)}") from error


def failure(error: RuntimeError, peer: int, within: str = "in time") -> str:
    """Why a message failed: rank `peer` is late, or it is gone, or what torch says."""
    if LATE.search(str(error)):
        return f"rank {peer} has not come to it {within}"
    if LOST.search(str(error)):
        return (
            f"the connection to rank {peer} is lost; that rank has failed or ended, and its own error says why "
            f"({reason(error)})"
        )
    return f"{type(error).__name__}: {error}"


def reason(error: Exception) -> str:
    """What torch says, in short: neither the place in its source nor what to look at next."""
    return re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).split(". ")[0]


def describe(dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """A tensor's dtype and shape as `DESCRIPTION` whole numbers; `described` reads them.

    Raises:
        SettingError: there is no way to say it.
    """
    if dtype not in DTYPES or len(shape) > MOST_DIMENSIONS:
        raise SettingError(f"cannot send a {len(shape)}-dimensional tensor of {dtype}")
    return [DTYPES.index(dtype), len(shape), *shape, *[0] * (MOST_DIMENSIONS - len(shape))]


def described(words: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, dimensions, *shape = words
    return DTYPES[dtype], tuple(shape[:dimensions])


def _check(header: list[int], expected: torch.Tensor, where: str) -> None:
    got = described(header)
    if got != (expected.dtype, tuple(expected.shape)):
        raise CommunicationError(
            f"{where}: expected {expected.dtype} of shape {tuple(expected.shape)}, but {got[0]} of shape {got[1]} came"
        )
