"""The messages of a schedule: sent asynchronously, posted early, and waited for when their content is required.

Messages from one rank to another arrive in the order in which they were sent, so the schedule says which is which. The
first message of a kind is preceded by a header with its tensors' shapes and dtypes; from then on both ranks know them.
With `debug`, every message has a header, which also states what it is, and a checksum reveals tensors that are written
to before they have arrived. Every message has a header, too, where a stage's forward and backward are on two ranks: the
rank that gets a gradient may not have seen its activation.

A gradient is sent back for each tensor that wanted one in the first message of its kind. If a tensor did not, but is
computed where a gradient may be wanted for another microbatch (a model with images in some of them), later messages end
with one more tensor, which states for which tensors a gradient is wanted, too. Say a stage sends its outputs for text
and for images, and microbatch 0 has no images. Its message is (text, images), in which only the text wants a gradient;
that of microbatch 1 is (text, images, [True, True]).
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ppedu.core import SEND, Action, CommunicationError, Op, PipelineError, Placement, label
from ppedu.core.placement import other_end
from ppedu.core.waiting import Wait, published
from ppedu.engine.ranks import device
from ppedu.engine.ranks.comm import LAYOUT_SIZE, PipelineGroup, decode_layout, encode_layout, failure

MOST_TENSORS = 8  # in one message
MESSAGE_OPS = [Op.SEND_F, Op.SEND_B, Op.SEND_R]  # a header contains an op's index in this list
# Stage, op, microbatch and number of tensors; then for each tensor whether a gradient is wanted, and its layout.
HEADER_SIZE = 4 + MOST_TENSORS * (1 + LAYOUT_SIZE)


class Layout(NamedTuple):
    """The dtype and shape of a tensor in a message, and whether the sender wants a gradient for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    wants_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class Sent(NamedTuple):
    """A message in flight. Its tensors, the header included, must live unchanged until they have arrived."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]
    checksums: list[int]  # 0 for a header; empty without `debug`


class Posted(NamedTuple):
    """A posted receive, and the tensors that it fills: one for each layout and, if gradients vary, the wishes."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]
    layouts: list[Layout]


class Messages:
    """Sends and receives the messages of one rank.

    A call gives a message as its SEND or RECV action, with a `kind`: any value that is equal for microbatches of equal
    shapes. Messages of one kind between the same stages have equal layouts, which only the first message states.

    Raises:
        CommunicationError: by each method, if a message does not arrive within the timeout, the other rank is gone, or
            the layout is not the expected one; with `debug`, also for another message than the schedule says, and for a
            tensor that was written to after it was sent.
    """

    def __init__(self, placement: Placement, group: PipelineGroup, timeout: float, debug: bool):
        self.placement, self.group, self.device, self.debug = placement, group, group.device, debug
        self.timeout, self.channel = timedelta(seconds=timeout), group.channel
        self.trained_from = 0  # the first stage of the model with weights that are trained
        self.peer = cache(self._peer)
        self.forget_layouts()
        self.begin()

    def forget_layouts(self) -> None:
        """Let the next activation of each kind state its layouts again."""
        self._layouts: dict[tuple[Action, Hashable], list[Layout]] = {}  # by message and kind, where they never vary
        # By the stage that makes the activation, the copy of the model, and the kind.
        self.activation_layouts: dict[tuple[int, int, Hashable], list[Layout]] = {}
        self._varying: set[tuple[int, int, Hashable]] = set()  # those that state for what else a gradient is wanted

    def begin(self) -> None:
        """Start a step, without messages in flight."""
        self.sent: dict[Action, Sent] = {}
        self.pending: dict[Action, Posted] = {}
        # Messages that the device's queue waits for, and not yet the host: in this order, with the actions that require
        # them.
        self._awaited: list[tuple[device.Arrival, Action, Action | None]] = []
        # By the stage that makes an activation, and its microbatch, where a gradient may or may not be wanted:
        self._wanted: dict[tuple[int, int], list[Layout]] = {}  # the layouts, with the gradients that are sent back
        self._used: dict[tuple[int, int], list[bool]] = {}  # whether each of these gradients is used

    def connect(self, peers: Iterable[int]) -> None:
        """Send a number to each of these ranks, and receive one; each of them must call this.

        NCCL connects two ranks when they first send in a direction, and that has no time limit. So they do it here,
        where none of them has failed yet, pair by pair in an order that is the same on all ranks: (0, 1), (0, 2), …,
        (1, 2), ….
        """
        send, receive = self.channel.send, self.channel.recv
        for peer in sorted(peers):
            transfers = (send, receive) if self.group.rank < peer else (receive, send)
            for transfer in transfers:
                work = transfer([torch.zeros(1, device=self.device)], peer, 0)
                device.wait(work, self.device, self.timeout)

    def send(self, action: Action, tensors: Sequence[torch.Tensor], kind: Hashable) -> None:
        """Start to send the result of a forward, or the gradients of a backward's inputs that want one."""
        found = [_layout(tensor) for tensor in tensors]
        expected = self._expected(action, kind)
        agreed = self._agreed(action, kind, found, expected)
        varies = self._varies(action, kind)
        if action.op == Op.SEND_F and (varies or found != agreed):
            layouts = self._widened(action, agreed, [each.wants_grad for each in found])
            # A gradient will come back for each layout that wants one, also where this microbatch does not.
            used = [each.wants_grad for each, layout in zip(found, layouts, strict=True) if layout.wants_grad]
            self._used[action.stage, action.microbatch] = used
        outgoing = [tensor.detach().to(self.device).contiguous() for tensor in tensors]
        checksums = [0, *map(checksum, outgoing)] if self.debug else []
        if expected is None or self.debug or varies:
            self.settle()  # copying numbers to the device would let the host wait for its queue, without a time limit
        if expected is None or self.debug:
            outgoing.insert(0, self._header(action, found))
        elif varies:
            outgoing.append(torch.tensor([each.wants_grad for each in found], device=self.device))
        self.sent[action] = Sent(self._start(action, outgoing), outgoing, checksums)

    def can_be_early(self, action: Action, kind: Hashable) -> bool:
        """Say whether a receive can be posted before its place in the order.

        With gloo it should be: gloo sends data only after it has heard that the receive is posted, which takes as long
        as the latency of the link. NCCL runs what is posted in the order of posting, so an early receive would delay
        a send. And posting a message of unknown layout waits for its header.
        """
        return not device.is_queue(self.device) and not self.debug and self._expected(action, kind) is not None

    def receive(self, action: Action, kind: Hashable) -> None:
        """Post a receive; `wait` returns the tensors that arrive."""
        expected = self._expected(action, kind)
        wishes = []
        if expected is None or self.debug:
            stated = self._receive_header(action)
            layouts = self._agreed(action, kind, stated, expected)
            if self._varies(action, kind):
                layouts = self._widened(action, layouts, [each.wants_grad for each in stated])
        else:
            layouts = expected
            if self._varies(action, kind):
                wishes = [torch.empty(len(layouts), dtype=torch.bool, device=self.device)]
        buffers = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in layouts] + wishes
        self.pending[action] = Posted(self._start(action, buffers), buffers, layouts)

    def wait(self, action: Action, user: Action, home: torch.device) -> tuple[torch.Tensor, ...]:
        """Wait for a posted receive that `user` requires, and return its tensors, on the device `home`.

        A tensor whose sender wants a gradient is a leaf that requires grad. Gradients are those of the tensors that
        want one, whatever the other microbatches do.
        """
        if action not in self.pending:
            raise self._error(f"{user} waits for {action}, which is not posted or was received before; post it once")
        works, tensors, layouts = self.pending.pop(action)
        self._finish(works, action, user)
        varies = len(tensors) > len(layouts)
        if varies or self.debug:
            self.settle()
        if varies:
            *tensors, wishes = tensors
            layouts = self._widened(action, layouts, wishes.tolist())
        arrived = tuple(tensor.to(home) for tensor in tensors)
        for tensor, layout in zip(arrived, layouts, strict=True):
            tensor.requires_grad_(layout.wants_grad)
        if action.op != Op.RECV_B:
            return arrived
        used = self._used.get((action.stage, action.microbatch))
        return arrived if used is None else tuple(compress(arrived, used))

    def release(self, actions: Iterable[Action]) -> None:
        """Let go of the tensors of these sends, waiting until they have arrived."""
        for action in [each for each in actions if each in self.sent]:
            works, tensors, checksums = self.sent.pop(action)
            self._finish(works, action)
            if checksums:
                self.settle()
            for tensor, before in zip(tensors, checksums, strict=False):
                if before and checksum(tensor) != before:
                    raise self._error(
                        f"a tensor of {action} was written to after it was sent; "
                        "make a new tensor instead of changing it in place"
                    )

    def end(self) -> None:
        """Wait until everything sent has arrived; raise CommunicationError if a received message was never used."""
        self.release(list(self.sent))
        self.settle()
        for action in self.pending:
            raise self._error(f"the tensors of {action} were not used; remove it, or call step.receive() in a handler")

    def settle(self) -> None:
        """Let the host wait for what the device's queue waits for. The host can then read what has arrived."""
        for arrival, action, user in self._awaited:
            with self._waiting(action, user):
                arrival.wait(self.timeout)
        self._awaited = []

    def _expected(self, action: Action, kind: Hashable) -> list[Layout] | None:
        """Return the layouts of a message; None before the first activation of this kind has been sent or received.

        A gradient has the layout of its activation, and only activations that require grad have one. Where that varies,
        this is None before the activation of this microbatch has been sent or received.
        """
        if self.placement.backwards:
            return None
        known = self._layouts.get((action, kind))
        if known is not None:
            return known
        key = self._key(action, kind)
        forward, varies = action.op in (Op.SEND_F, Op.RECV_F), key in self._varying
        if varies and not forward:
            found = self._wanted.get((key[0], action.microbatch))
        else:
            found = self.activation_layouts.get(key)
        if found is None:
            return None
        layouts = found if forward else [each._replace(wants_grad=False) for each in found if each.wants_grad]
        if not varies:
            self._layouts[action, kind] = layouts
        return layouts

    def _varies(self, action: Action, kind: Hashable) -> bool:
        """Return whether an activation states for what else a gradient is wanted."""
        return bool(self._varying) and action.op in (Op.SEND_F, Op.RECV_F) and self._key(action, kind) in self._varying

    def _widened(self, action: Action, agreed: Sequence[Layout], wishes: Sequence[bool]) -> list[Layout]:
        """Return the layouts of an activation with gradients also for the tensors that want one in this microbatch."""
        pairs = zip(agreed, wishes, strict=True)
        layouts = [each._replace(wants_grad=each.wants_grad or wish) for each, wish in pairs]
        maker = action.stage - 1 if action.op == Op.RECV_F else action.stage
        self._wanted[maker, action.microbatch] = layouts
        return layouts

    def _key(self, action: Action, kind: Hashable) -> tuple[int, int, Hashable]:
        """Return the key in `activation_layouts` of the activation that a message contains, or is the gradient of."""
        maker = action.stage - 1 if action.op in (Op.RECV_F, Op.SEND_B) else action.stage
        return maker, self.placement.copy(action.microbatch), kind

    def _peer(self, action: Action) -> int:
        """Return the rank at the other end of a message."""
        source, target = self.placement.route(action)
        return target if action.op in SEND else source

    def _start(self, action: Action, tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start to send or to receive each of these tensors."""
        transfer, peer = self.channel.send if action.op in SEND else self.channel.recv, self.peer(action)
        try:
            return [transfer([tensor], peer, 0) for tensor in tensors]
        except RuntimeError as error:
            raise self._failed(action, error) from error

    def _finish(self, works: Sequence[dist.Work], action: Action, user: Action | None = None) -> None:
        """Wait for a message: on a device with a queue, the host does so in `settle`."""
        with self._waiting(action, user):
            if device.is_queue(self.device):
                self._awaited.append((device.Arrival(works, self.device), action, user))
            else:
                for work in works:
                    work.wait(self.timeout)

    @contextmanager
    def _waiting(self, action: Action, user: Action | None) -> Iterator[None]:
        try:
            with published(lambda: self._describe_wait(action, user)):
                yield
        except RuntimeError as error:
            raise self._failed(action, error, user) from error

    def _describe_wait(self, action: Action, user: Action | None) -> Wait:
        """Describe the wait for a message, on behalf of the action `user` that requires it, for a hang report."""
        peer = self.group.peer(self.peer(action))
        kind, way = ("send", "to") if action.op in SEND else ("receive", "from")
        subject = f"{user}, for {action}" if user else str(action)
        return Wait(f"{subject} {way} rank {peer}", kind, peer)

    def _failed(self, action: Action, error: RuntimeError, user: Action | None = None) -> CommunicationError:
        subject = f"{user} waits for {action}" if user else str(action)
        why = failure(error, self.peer(action), f"within {self.timeout.total_seconds():g} s")
        return self._error(f"{subject} ({label(action, self.placement)}): {why}")

    def _error(self, text: str) -> CommunicationError:
        return CommunicationError(f"rank {self.group.rank}: {text}")

    def _agreed(
        self, action: Action, kind: Hashable, found: list[Layout], expected: list[Layout] | None
    ) -> list[Layout]:
        """Return the layouts of the first message of a kind. Raise CommunicationError if those of a later one differ.

        Args:
            found: the layouts of this message.
            expected: see `_expected`.
        """
        if found == expected or self.placement.backwards:
            return found
        key = self._key(action, kind)
        if expected is None:
            self.activation_layouts[key] = found
            trains = torch.is_grad_enabled() and key[0] >= self.trained_from
            if trains and any(each.dtype.is_floating_point and not each.wants_grad for each in found):
                self._varying.add(key)
            return found
        if [each[:2] for each in found] != [each[:2] for each in expected]:
            raise self._error(
                f"{action} {'sends' if action.op in SEND else 'receives'} {_in_words(found)}, but the receiver expects "
                f"{_in_words(expected)}, as for earlier microbatches of this shape; if shapes depend on the data, use "
                "Batching(variable_shapes=True)"
            )
        unforeseen = any(each.wants_grad > other.wants_grad for each, other in zip(found, expected, strict=True))
        if unforeseen and not self._varies(action, kind):
            raise self._error(
                f"{action} sends {_in_words(found)} and wants a gradient, but no weights up to stage {key[0]} were "
                "trained when the pipeline was made; make a new Pipeline after (un)freezing weights"
            )
        return expected

    def _header(self, action: Action, layouts: Sequence[Layout]) -> torch.Tensor:
        if len(layouts) > MOST_TENSORS:
            most = f"a message can have {MOST_TENSORS}; return fewer from the stage"
            raise self._error(f"{action} has {len(layouts)} tensors, but {most}")
        header = [action.stage, MESSAGE_OPS.index(action.op), action.microbatch, len(layouts)]
        for dtype, shape, wants_grad in layouts:
            header += [wants_grad, *encode_layout(dtype, shape)]
        return torch.tensor(header + [0] * (HEADER_SIZE - len(header)), device=self.device)

    def _receive_header(self, action: Action) -> list[Layout]:
        """Return the layouts in the header of a message."""
        buffer = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self.device)
        self._finish(self._start(action, [buffer]), action)
        self.settle()
        header = buffer.tolist()
        stage, op, microbatch, count = header[:4]
        arrived, wanted = Action(stage, MESSAGE_OPS[op], microbatch), other_end(action)
        if arrived != wanted:
            raise self._error(f"{action} expects the message of {wanted}, but that of {arrived} arrived")
        layouts = []
        for number in range(count):
            start = 4 + number * (1 + LAYOUT_SIZE)
            wants_grad, *layout = header[start : start + 1 + LAYOUT_SIZE]
            layouts.append(Layout(*decode_layout(layout), bool(wants_grad)))
        return layouts


def checksum(tensor: torch.Tensor) -> int:
    """Return a number above 0 that depends on a tensor's bytes."""
    return zlib.crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()) + 1  # 0 stands for no checksum


def _layout(tensor: Any) -> Layout:
    """Return the layout of a tensor to send; raise PipelineError unless it is dense and on this rank alone."""
    if tensor.layout != torch.strided or hasattr(tensor, "to_local"):
        kind, cure = ("DTensor", "to_local()") if hasattr(tensor, "to_local") else ("sparse tensor", "to_dense()")
        raise PipelineError(f"a message can only have dense tensors of one rank; got a {kind}: send its {cure}")
    return Layout(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _in_words(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(str, layouts)) or "nothing"
