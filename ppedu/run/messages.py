"""The messages of a schedule: sent without waiting, received early, waited for when their content is needed.

What one rank sends another arrives in the order sent, so a message needs no name: the schedule says which it is.
The first of a kind is preceded by a header that states shapes and dtypes; from then on both sides know them. With
`debug` each has a header, which also says what the message is, and what has been sent is looked at again once it has
arrived: has somebody written to it in the meantime?
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ppedu.core.actions import SEND, Action, Op
from ppedu.core.errors import CommunicationError, PipelineError
from ppedu.core.lower import label
from ppedu.core.placement import TOWARDS, Placement
from ppedu.core.waiting import Wait, published
from ppedu.run.comm import LAYOUT_SIZE, PipelineGroup, decode_layout, encode_layout, failure

LOG = logging.getLogger("ppedu")
MOST_TENSORS = 8  # in one message
MESSAGES = [Op.SEND_F, Op.SEND_B]  # a header names a kind of message by its place here
WORDS = 4 + MOST_TENSORS * (1 + LAYOUT_SIZE)  # of a header


class Layout(NamedTuple):
    """What a tensor in a message looks like, and whether its gradient is wanted back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    wants_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class Sent(NamedTuple):
    """A message on its way. Its tensors must live, unchanged, until they have arrived."""

    work: list[dist.Work]
    tensors: list[torch.Tensor]
    sums: list[int]


class Coming(NamedTuple):
    """A message on its way here."""

    work: list[dist.Work]
    tensors: list[torch.Tensor]
    layouts: list[Layout]


class Messages:
    """Those of one rank's step.

    `layouts` of the activations are known from step to step, by the stage that makes them, its copy and a `kind`: what
    the microbatch looks like. A gradient looks like the activation it belongs to.
    """

    def __init__(self, placement: Placement, group: PipelineGroup, timeout: float, debug: bool):
        self.placement, self.group, self.device, self.debug = placement, group, group.device, debug
        self.patience, self.channel = timedelta(seconds=timeout), group.channel
        self.peers: dict[Action, int] = {}  # the rank at the other end
        self.layouts: dict[tuple[int, int, Hashable], list[Layout]] = {}
        self._looks: dict[tuple[Action, Hashable], list[Layout]] = {}  # the same, of each message
        self.begin()

    def begin(self) -> None:
        self._logs = LOG.isEnabledFor(logging.DEBUG)  # or the layouts would be put into words for nothing
        self.sent: dict[Action, Sent] = {}
        self.coming: dict[Action, Coming] = {}

    def send(self, action: Action, tensors: Sequence[torch.Tensor], kind: Hashable) -> None:
        """Start to send what a forward has given, or a backward: the gradients of the inputs that want one.

        Raises:
            CommunicationError: it does not look as the receiver expects.
            PipelineError: a tensor is sparse or a DTensor.
        """
        for tensor in tensors:
            if tensor.layout != torch.strided or hasattr(tensor, "to_local"):
                kind, cure = (
                    ("DTensor", "to_local()") if hasattr(tensor, "to_local") else ("sparse tensor", "to_dense()")
                )
                raise PipelineError(f"only dense tensors of one rank can be sent; got a {kind}: give its {cure}")
        found = [Layout(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
        expected = self._expected(action, kind)
        if expected is not None and found != expected:
            changed = [each.wants_grad for each in found] != [each.wants_grad for each in expected]
            raise CommunicationError(
                f"rank {self.group.rank}: {action} has {_told(found)} to send, where the receiver expects "
                f"{_told(expected)}, as for earlier microbatches of that shape"
                + "; whether it wants a gradient has changed, too: make a new Pipeline after (un)freezing"
                * changed
            )
        outgoing = [tensor.detach().to(self.device).contiguous() for tensor in tensors]
        sums = [0, *map(checksum, outgoing)] if self.debug else []  # a header has none
        if expected is None or self.debug:
            outgoing.insert(0, self._header(action, found))
        if expected is None:
            self.layouts[self._key(action, kind)] = found
        self._log("%s starts: %s", action, found)
        work = [self._start(self.channel.send, tensor, action) for tensor in outgoing]
        self.sent[action] = Sent(work, outgoing, sums)

    def receive(self, action: Action, kind: Hashable) -> None:
        """Start to receive; `wait` hands over what has come.

        Raises:
            CommunicationError: another message comes than the schedule says, or one that looks otherwise (debug).
        """
        expected = self._expected(action, kind)
        if expected is None or self.debug:
            header = torch.empty(WORDS, dtype=torch.int64, device=self.device)
            self._finish([self._start(self.channel.recv, header, action)], action)
            found = self._read(header.tolist(), action)
            if expected is None:
                expected = self.layouts[self._key(action, kind)] = found
            if found != expected:
                raise CommunicationError(
                    f"rank {self.group.rank}: {action} expects {_told(expected)}, but {_told(found)} comes"
                )
        buffers = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in expected]
        self._log("%s is posted: %s", action, expected)
        work = [self._start(self.channel.recv, buffer, action) for buffer in buffers]
        self.coming[action] = Coming(work, buffers, expected)

    def wait(self, action: Action, user: Action, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What a receive has brought, for `user`, which needs it. Activations require grad if their maker's do.

        Raises:
            CommunicationError: it has not come in time, or its sender is gone.
        """
        if action not in self.coming:
            raise CommunicationError(
                f"rank {self.group.rank}: {user} waits for {action}, which has not been started or was taken before"
            )
        coming = self.coming.pop(action)
        self._finish(coming.work, action, user)
        self._log("%s has arrived: %s", action, coming.layouts)
        arrived = [tensor.to(device) for tensor in coming.tensors]
        for tensor, layout in zip(arrived, coming.layouts, strict=True):
            tensor.requires_grad_(layout.wants_grad)
        return tuple(arrived)

    def arrived(self, actions: Sequence[Action]) -> None:
        """What these have sent may be freed: its receiver was ready for it.

        Raises:
            CommunicationError: as `end` does.
        """
        for action in actions:
            if action in self.sent:
                self._arrived(action)

    def end(self) -> None:
        """Return when everything sent has arrived.

        Raises:
            CommunicationError: something was not received in time, or was written to before it was (debug).
        """
        self.arrived(list(self.sent))
        for action in self.coming:
            raise CommunicationError(f"rank {self.group.rank}: nobody has used what {action} received")

    def _arrived(self, action: Action) -> None:
        sent = self.sent.pop(action)
        self._finish(sent.work, action)
        for tensor, before in zip(sent.tensors, sent.sums, strict=False):
            if before and checksum(tensor) != before:
                raise CommunicationError(
                    f"rank {self.group.rank}: what {action} sends was written to after it was sent; "
                    "make a new tensor instead of changing that one in place"
                )

    def _expected(self, action: Action, kind: Hashable) -> list[Layout] | None:
        """How the message looks, as far as known: that of an activation, or of the gradients wanted of it."""
        if (action, kind) not in self._looks:
            activation = self.layouts.get(self._key(action, kind))
            if activation is None:
                return None
            gradients = [each._replace(wants_grad=False) for each in activation if each.wants_grad]
            self._looks[action, kind] = activation if action.op in (Op.SEND_F, Op.RECV_F) else gradients
        return self._looks[action, kind]

    def _key(self, action: Action, kind: Hashable) -> tuple[int, int, Hashable]:
        maker = action.stage - (action.op in (Op.RECV_F, Op.SEND_B))
        return maker, self.placement.copy(action.microbatch), kind

    def _start(self, how: Callable[..., Any], tensor: torch.Tensor, action: Action) -> dist.Work:
        if action not in self.peers:
            self.peers[action] = self.placement.route(action)[action.op in SEND]
        try:
            work: dist.Work = how([tensor], self.peers[action], 0)
        except RuntimeError as error:
            raise self._failed(action, error) from error
        return work

    def _finish(self, work: Sequence[dist.Work], action: Action, user: Action | None = None) -> None:
        with published(lambda: self._describe_wait(action, user)):
            for each in work:
                try:
                    wait(each, self.device, self.patience)
                except RuntimeError as error:
                    raise self._failed(action, error, user) from error

    def _describe_wait(self, action: Action, user: Action | None) -> Wait:
        """Describe the wait for a message, on behalf of the action `user` that needs it, for a hang report."""
        sends = action.op in SEND
        peer = self.group.peer(self.placement.route(action)[sends])
        waits = f"{user}, for {action}" if user else str(action)
        return Wait(f"{waits} {'to' if sends else 'from'} rank {peer}", "send" if sends else "receive", peer)

    def _log(self, what: str, action: Action, layouts: Sequence[Layout]) -> None:
        if self._logs:
            LOG.debug(f"rank %d: {what}", self.group.rank, action, _told(layouts))

    def _failed(self, action: Action, error: RuntimeError, user: Action | None = None) -> CommunicationError:
        peer = self.placement.route(action)[action.op in SEND]
        what = f"{user} waits for {action}" if user else str(action)
        why = failure(error, peer, f"within {self.patience.total_seconds():g} s")
        return CommunicationError(f"rank {self.group.rank}: {what} ({label(action, self.placement)}): {why}")

    def _header(self, action: Action, layouts: Sequence[Layout]) -> torch.Tensor:
        if len(layouts) > MOST_TENSORS:
            raise CommunicationError(
                f"rank {self.group.rank}: {action} has {len(layouts)} tensors; at most {MOST_TENSORS}"
            )
        words = [action.stage, MESSAGES.index(action.op), action.microbatch, len(layouts)]
        for dtype, shape, wants_grad in layouts:
            words += [wants_grad, *encode_layout(dtype, shape)]
        return torch.tensor(words + [0] * (WORDS - len(words)), device=self.device)

    def _read(self, words: list[int], action: Action) -> list[Layout]:
        stage, message, microbatch, count = words[:4]
        came = Action(stage, MESSAGES[message], microbatch)
        wanted = other_end(action)
        if came != wanted:
            raise CommunicationError(
                f"rank {self.group.rank}: {action} wants what {wanted} sends, but what {came} sends came"
            )
        starts = [4 + (1 + LAYOUT_SIZE) * number for number in range(count)]
        return [Layout(*decode_layout(words[at + 1 : at + 1 + LAYOUT_SIZE]), bool(words[at])) for at in starts]


def wait(work: dist.Work, device: torch.device, patience: timedelta) -> None:
    """Return when what is on `device` has been sent or received.

    Raises:
        RuntimeError: the other ranks have not come to it in time, or are gone.
    """
    if device.type == "cuda":
        work.wait()  # a GPU's stream waits; NCCL has a watchdog of its own
    else:
        work.wait(patience)


def other_end(action: Action) -> Action:
    """The receive that belongs to a send, or the send to a receive."""
    op = Op(f"{'RECV' if action.op in SEND else 'SEND'}_{action.op[-1]}")
    return Action(action.stage + TOWARDS[action.op], op, action.microbatch)


def _told(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(str, layouts)) or "nothing"


def checksum(tensor: torch.Tensor) -> int:
    """A number above 0 that tells what a tensor holds from other things that it might."""
    return zlib.crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()) + 1  # 0 stands for none
