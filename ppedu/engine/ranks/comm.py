"""Messages between neighboring ranks: `communicate` in one direction, `bidirectional_communicate` in both at once.

Each message is preceded by a short header that states its dtype and shape. If the receiver expects something else, it
raises an error, where plain torch.distributed would return garbage.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ppedu.core import CommunicationError, SettingError
from ppedu.core.validate import require_count, require_instance
from ppedu.core.waiting import Wait, published

# operation: what this rank does, and with which peer: the rank after this one (+1) or before it (-1)
ONE_WAY = {
    "recv_forward": ("receive", -1),
    "send_forward": ("send", +1),
    "recv_backward": ("receive", +1),
    "send_backward": ("send", -1),
}
BOTH_WAYS = {"send_fwd_recv_bwd": ("both", +1), "send_bwd_recv_fwd": ("both", -1)}
ACTIVATIONS = ("recv_forward", "send_bwd_recv_fwd")  # these receive activations, which require grad

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip  # a header contains a dtype's index in this list
MOST_DIMENSIONS = 8
LAYOUT_SIZE = 2 + MOST_DIMENSIONS  # integers that state a tensor's dtype and shape
LATE = re.compile("[Tt]imed? ?out")  # in the error that torch raises when a message does not arrive in time
LOST = re.compile("[Cc]onnection|[Bb]roken pipe|[Ss]ocket|[Rr]emote (process|worker)")  # … and when the peer has died


@dataclass(frozen=True)
class PipelineGroup:
    """This process's place in a pipeline: `rank` of `size` ranks, numbered in the order of the stages.

    Functions that take a `group` use `PipelineGroup.world()` by default: all ranks of the program, in order.

    Args:
        process_group: the torch process group through which these ranks communicate; None for the default group.
        device: where messages must lie: by default this rank's current GPU if the group sends from GPUs (NCCL), else
            the CPU. gloo sends from GPUs through the host's memory anyway.

    Raises:
        SettingError: `rank` is not below `size`, or is not this process's rank in its process group.
        CommunicationError: there are several ranks, but no process group has been initialized.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None
    device: torch.device = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        require_count("size", self.size)
        require_count("rank", self.rank, least=0)
        if self.rank >= self.size:
            raise SettingError(f"rank must be from 0 to {self.size - 1} in a group of {self.size}; got {self.rank}")
        if self.size > 1:
            if not dist.is_initialized():
                raise CommunicationError(
                    f"{self.size} ranks need a process group: call torch.distributed.init_process_group() first, "
                    "in a program started by torchrun or %%torchrun"
                )
            own, most = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            if self.rank != own or self.size > most:
                raise SettingError(
                    f"this process is rank {own} of {most} in its process group; "
                    f"it cannot be rank {self.rank} of {self.size}; give that rank, and at most that size"
                )
        if not self.device:
            gpu = self.size > 1 and _sends_from("cuda", self.process_group)
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
            object.__setattr__(self, "device", device)

    @classmethod
    def world(cls) -> PipelineGroup:
        """Return the group of all ranks of this program; of one rank if it was not started by a launcher."""
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @classmethod
    def of(cls, group: PipelineGroup | None) -> PipelineGroup:
        """Return `group`, or `world()` if it is None.

        Raises:
            SettingError: `group` is not a PipelineGroup.
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

    def on(self, device: torch.device) -> PipelineGroup:
        """Return this group with the messages of stages on `device`: there if the group sends from it, else on the CPU.

        Raises:
            SettingError: the group sends from GPUs only, or from another one.
        """
        if self.size == 1:
            return self
        here = f"rank {self.rank} has its stages on {device}"
        if not _sends_from(device.type, self.process_group):
            if _sends_from("cpu", self.process_group):
                return replace(self, device=torch.device("cpu"))
            raise SettingError(
                f"{here}, but its process group sends from GPUs only; move them with .to({str(self.device)!r}), or "
                'connect the ranks with init_process_group("cpu:gloo,cuda:nccl")'
            )
        if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
            raise SettingError(
                f"{here}, but torch's current device there is cuda:{current}, from which NCCL would send; call "
                f"torch.cuda.set_device({device.index}) before init_process_group, as ppedu.run.place does"
            )
        return replace(self, device=device)

    @property
    def channel(self) -> Any:
        """The torch process group, whose own send and recv skip the argument checks of dist.isend and dist.irecv."""
        return self.process_group or dist.group.WORLD

    def peer(self, rank: int) -> int:
        """Return the global rank of the group's `rank`, as torch.distributed expects it."""
        return dist.get_global_rank(self.process_group, rank) if self.process_group else rank


def backend_for(kind: str, process_group: dist.ProcessGroup | None) -> str:
    """Return the backend with which a process group sends tensors on devices of this kind, "cpu" or "cuda"; or "".

    `dist.get_backend` does not tell: a group can have one for each kind, such as "cpu:gloo,cuda:nccl".
    """
    backends = dict(each.split(":") for each in dist.get_backend_config(process_group).split(","))
    return backends.get(kind, "")


def _sends_from(kind: str, process_group: dist.ProcessGroup | None) -> bool:
    """Return whether a process group sends from devices of this kind. gloo copies from GPUs to the host first."""
    backend = backend_for(kind, process_group)
    if kind == "cuda" and backend == "gloo":
        return False
    return backend != ""


def place() -> tuple[torch.device, str]:
    """Return this rank's device and the backend for `init_process_group`, in a program started by torchrun.

    With a GPU for each rank of the machine, the backend is NCCL. With fewer GPUs, the ranks share them, and gloo sends
    messages through the host's memory; the machine's first rank then prints a warning to stderr. The device becomes
    torch's current one. Without GPUs, it is the CPU.

    Let each rank see all GPUs of its machine; with a `CUDA_VISIBLE_DEVICES` of its own, it seems to share one with all.
    Do not also pass `device_id` to `init_process_group`: NCCL then has one queue for all messages of a rank, where a
    message to one neighbor waits for those to the other.
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
    """Send a tensor to a neighboring rank or receive one from it; return once that is done.

    Args:
        operation: "recv_forward" (from the rank before), "send_forward" (to the rank after), "recv_backward" (from the
            rank after) or "send_backward" (to the rank before).
        tensor: the tensor to send.
        shapes, dtype: of the tensor to receive; the dtype is torch's default dtype if not given.
        device: for the received tensor; by default `group.device`.

    Returns:
        The received tensor. An activation requires grad: it is a leaf, in whose `.grad` a backward leaves the
        gradient. None for a send, and for the neighbor that the first and the last rank do not have.

    Raises:
        SettingError: the operation is unknown, or it lacks the tensor or the shape that it needs.
        CommunicationError: the received message has another shape or dtype than expected, or the peer is gone.
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
    """Send to a neighboring rank and receive from it at the same time, so that neither rank waits for the other.

    Args:
        operation: "send_fwd_recv_bwd" (with the rank after) or "send_bwd_recv_fwd" (with the rank before).

    The other arguments, the result and the errors are those of `communicate`.
    """
    return _exchange(BOTH_WAYS, operation, send_tensor, recv_shapes, dtype, device, group)


def _exchange(
    operations: dict[str, tuple[str, int]],
    operation: str,
    tensor: torch.Tensor | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    given_group: PipelineGroup | None,
) -> torch.Tensor | None:
    if not isinstance(operation, str) or operation not in operations:
        raise SettingError(f"unknown operation {operation!r}; available: {', '.join(operations)}")
    kind, step = operations[operation]
    group = PipelineGroup.of(given_group)
    peer = group.rank + step
    if not 0 <= peer < group.size:
        return None
    here, global_peer = f"{operation} on rank {group.rank}", group.peer(peer)
    where = f"{here}, {'to' if kind == 'send' else 'from'} rank {peer}"
    outgoing = own_layout = incoming = layout = None
    if kind != "receive":
        if not isinstance(tensor, torch.Tensor):
            raise SettingError(f"{here} needs a tensor to send; got {tensor!r}")
        outgoing = tensor.detach().to(group.device).contiguous()
        own_layout = torch.tensor(encode_layout(outgoing.dtype, outgoing.shape), device=group.device)
    if kind != "send":
        if not isinstance(shape, Sequence) or not all(hasattr(size, "__index__") and size >= 0 for size in shape):
            raise SettingError(f"{here} needs the shape of the tensor to receive, such as (4, 64); got {shape!r}")
        incoming = torch.empty(tuple(shape), dtype=dtype or torch.get_default_dtype(), device=group.device)
        layout = torch.empty(LAYOUT_SIZE, dtype=torch.int64, device=group.device)

    def swap(sent: torch.Tensor | None, received: torch.Tensor | None) -> None:
        try:
            with published(lambda: Wait(f"{operation} with rank {global_peer}", kind, global_peer)):
                for request in start_swap(sent, received, peer, group):
                    request.wait()
        except RuntimeError as error:
            raise CommunicationError(f"{where}: {failure(error, peer)}") from error

    # The layouts go first, so that a message of the wrong shape is refused before it is received.
    swap(own_layout, layout)
    if incoming is not None and layout is not None:
        expected, found = (incoming.dtype, tuple(incoming.shape)), decode_layout(layout.tolist())
        if found != expected:
            raise CommunicationError(
                f"{where}: expected {expected[0]} of shape {expected[1]}, but {found[0]} of shape {found[1]} came; "
                "receive with the sender's shape and dtype"
            )
    swap(outgoing, incoming)
    if incoming is None:
        return None
    received = incoming if device is None else incoming.to(device)
    return received.requires_grad_(operation in ACTIVATIONS and received.is_floating_point())


def start_swap(
    outgoing: torch.Tensor | None, incoming: torch.Tensor | None, peer: int, group: PipelineGroup
) -> list[dist.Work]:
    """Start to send `outgoing` to rank `peer` of the group and to receive `incoming` from it; skip either if None.

    Returns:
        The requests to wait for.

    Raises:
        RuntimeError: the peer is gone.
    """
    swap = [(dist.isend, outgoing), (dist.irecv, incoming)]
    return dist.batch_isend_irecv(
        [dist.P2POp(start, part, group.peer(peer), group.process_group) for start, part in swap if part is not None]
    )


def failure(error: RuntimeError, peer: int, within: str = "in time") -> str:
    """Explain in words why a message failed: rank `peer` is late, or gone, or else torch's own error."""
    if LATE.search(str(error)):
        return f"rank {peer} did not answer {within}"
    if LOST.search(str(error)):
        return (
            f"the connection to rank {peer} is lost; that rank has failed or ended, so look for its own error "
            f"({reason(error)})"
        )
    return f"{type(error).__name__}: {error}"


def reason(error: Exception) -> str:
    """Return the first sentence of torch's error message, without the source location in front of it."""
    return re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).split(". ")[0]


def encode_layout(dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """Return a tensor's dtype and shape as `LAYOUT_SIZE` integers, for `decode_layout`.

    Raises:
        SettingError: the dtype is not one of `DTYPES`, or there are more than `MOST_DIMENSIONS` dimensions.
    """
    if dtype not in DTYPES or len(shape) > MOST_DIMENSIONS:
        raise SettingError(
            f"cannot send a {len(shape)}-dimensional tensor of {dtype}; a message has at most {MOST_DIMENSIONS} "
            "dimensions and a real or integer dtype, such as torch.float32"
            + ("; send torch.view_as_real(x), and receive torch.view_as_complex(x)" if dtype.is_complex else "")
        )
    return [DTYPES.index(dtype), len(shape), *shape, *[0] * (MOST_DIMENSIONS - len(shape))]


def decode_layout(numbers: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape that `encode_layout` wrote."""
    dtype, dimensions, *shape = numbers
    return DTYPES[dtype], tuple(shape[:dimensions])


def side_by_side(group: PipelineGroup, replicas: int) -> tuple[PipelineGroup, dist.ProcessGroup | None]:
    """Divide a group into `replicas` pipelines of consecutive ranks.

    Returns:
        This rank's pipeline, and the process group of the ranks with the same stages in all replicas (None if there is
        one replica).
    """
    if replicas == 1:
        return group, None
    size = group.size // replicas
    replica, rank = divmod(group.rank, size)
    pipeline = [group.peer(replica * size + each) for each in range(size)]
    same_stages = [group.peer(each * size + rank) for each in range(replicas)]
    # Only the members take part in creating each group, because ranks outside `group` do not call this.
    groups = [dist.new_group(ranks, use_local_synchronization=True) for ranks in (pipeline, same_stages)]
    return PipelineGroup(rank, size, groups[0]), groups[1]
