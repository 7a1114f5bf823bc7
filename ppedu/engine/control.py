"""The agreement of a pipeline's ranks before a step, and the exchange of losses and times after it.

Each exchange is one row of numbers per rank. Rank 0 collects the rows and sends all of them to every rank: with gloo,
this takes a third of the time of its all_gather, which passes the rows around a ring.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ppedu.core import CommunicationError, PipelineError, SettingError
from ppedu.core.numeric import plural
from ppedu.core.waiting import Wait, published
from ppedu.engine.batch import Batch
from ppedu.engine.ranks import alarm, device
from ppedu.engine.ranks.comm import PipelineGroup, reason
from ppedu.engine.ranks.device import wait

CALLS = ["step", "eval", "forward"]  # a rank announces a call by its position here
REFUSED = -1  # announces that a rank cannot make a call
CONTROL_TAG = 1  # keeps these rows apart from a schedule's messages, which have tag 0; NCCL has no tags


class Rows(NamedTuple):
    """The rows of all ranks, shape (ranks, length), and the receives that will fill them."""

    values: torch.Tensor
    receives: list[Any]


class Control:
    """Keeps the ranks of one pipeline in agreement; every rank makes the same calls in the same order.

    A call raises CommunicationError if another rank has failed, or does not make it within the timeout.

    Args:
        replicas: the group of the ranks with the same stages, if several pipelines run side by side.

    Attributes:
        failure: why the pipeline can no longer be used; "" while it can.
    """

    def __init__(self, group: PipelineGroup, timeout: timedelta, replicas: dist.ProcessGroup | None = None):
        self.group, self.timeout = group, timeout
        self.failure = ""
        # Process groups, each with a number n: its ranks 0 to n - 1 make each call.
        self._own = [(group.channel, group.size)] if group.size > 1 else []
        beside = 1 if replicas is None else dist.get_world_size(replicas)
        self._replicas = [(replicas, beside)] if replicas is not None and beside > 1 else []
        self._name = f"global rank {dist.get_rank()}" if self._replicas else f"rank {group.rank}"
        self._posted: Rows | None = None  # last
        self._last_announcement: list[int] = []  # of this rank, where all ranks made the same and knew the inputs

    def meet(self, purpose: str) -> None:
        """Wait until every rank has called this, before NCCL connects them, which it does without a time limit."""
        if device.is_queue(self.group.device):
            for group, ranks in self._own + self._replicas:
                with self.required_for(purpose):
                    alarm.meet(group, ranks, "meeting", self.timeout)

    def exchange(self, row: torch.Tensor, purpose: str, posted: Rows | None = None) -> torch.Tensor:
        """Return the rows of all ranks, shape (ranks, length).

        Args:
            row: this rank's, of the same length and dtype on all ranks.
            purpose: completes "rank 0 cannot …" in an error.
            posted: the result of `post` for this exchange, if it was called.
        """
        if self.group.size == 1:
            return row[None]
        row = row.to(self.group.device)
        if device.is_queue(row.device):  # NCCL's all_gather needs no preparation
            return self.start(row, purpose, purpose)()
        values, receives = posted or self.post(len(row), row.dtype, purpose)
        with self.required_for(purpose):
            if self.group.rank > 0:
                works = [*receives, self.group.channel.send([row], 0, CONTROL_TAG)]
            else:
                values[0] = row
                for work in receives:
                    wait(work, row.device, self.timeout)
                works = [self.group.channel.send([values], rank, CONTROL_TAG) for rank in range(1, self.group.size)]
            for work in works:
                wait(work, row.device, self.timeout)
        return values

    def start(self, row: torch.Tensor, purpose: str, awaited_for: str) -> Callable[[], torch.Tensor]:
        """Start to exchange rows in the background; the returned function waits for those of all ranks.

        Args:
            purpose, awaited_for: complete "rank 0 cannot …" in an error, at the start and in the returned function.
        """
        row = row.to(self.group.device)
        values = row.new_empty(self.group.size, len(row))
        if self.group.size == 1:
            return lambda: row[None].cpu()
        with self.required_for(purpose):
            work = dist.all_gather(list(values), row, self.group.process_group, async_op=True)

        def finish() -> torch.Tensor:
            with self.required_for(awaited_for):
                wait(work, row.device, self.timeout)
            return values.cpu()

        return finish

    def post(self, length: int, dtype: torch.dtype, purpose: str) -> Rows:
        """Post the receives of a later `exchange`, so that its messages match without a handshake."""
        channel = self.group.channel
        values = torch.empty(self.group.size, length, dtype=dtype, device=self.group.device)
        if device.is_queue(values.device):
            return Rows(values, [])
        parts = {0: values}  # by sender: rank 0 sends all rows together
        if self.group.rank == 0:
            parts = {rank: values[rank] for rank in range(1, self.group.size)}
        with self.required_for(purpose):
            self._posted = Rows(values, [channel.recv([part], rank, CONTROL_TAG) for rank, part in parts.items()])
        return self._posted

    @contextmanager
    def required_for(self, purpose: str) -> Iterator[None]:
        """Report an error of torch.distributed as one of `purpose`, after which the pipeline cannot be used."""
        try:
            with published(lambda: Wait(f"“{purpose}”", "all")):
                yield
        except PipelineError:
            raise
        except RuntimeError as error:
            why = (
                f"rank {self.group.rank} cannot {purpose}: not every rank reached it within "
                f"{self.timeout.total_seconds():g} s, or one has failed ({reason(error)}); see that rank's own error"
            )
            raise CommunicationError(why + self.fail(why, own=False)) from error

    def fail(self, why: str, own: bool = True) -> str:
        """Let the pipeline be used no more, and the other ranks stop waiting for this one.

        Args:
            own: this rank has failed itself; it does not only wait for another that may have.

        Returns:
            The end of an error's text, which names the rank that failed first; "" if it is this one, or unknown.
        """
        if self.failure:
            return ""
        self.failure = why
        first = alarm.sound([group for group, _ in self._own + self._replicas], self._name, own)
        return "" if first in ("", self._name) else f"; {first} failed first, and its own error says why"

    @contextmanager
    def guarded(self, step: object = None) -> Iterator[None]:
        """After an error in this `step`, let the pipeline be used no more. One of messages says who failed first."""
        try:
            yield
        except BaseException as error:
            self._in_flight = step, self._posted  # the memory of messages in flight must not be freed
            communication = isinstance(error, CommunicationError)
            first = self.fail(str(error) or type(error).__name__, own=not communication)
            if first and communication:
                raise CommunicationError(f"{error}{first}") from error.__cause__
            raise

    def refuse(self, call: str, microbatches: int, debug: bool) -> None:
        """Let the other ranks know that this one cannot start a call; they raise an error, and then can be used again.

        If the call is like the last one, they may not ask, and have begun: the pipeline can be used again only if all
        ranks refuse the call.
        """
        groups = self._replicas
        if self._last_announcement and not debug:
            groups = self._own + groups
        else:
            zeros = [0] * (2 * microbatches)  # in place of kinds and sizes, see `agree_on_batch`
            self.exchange(torch.tensor([REFUSED, 0, *zeros]), f"start {call}")
        self._require_all_refuse(call, groups)

    def _require_all_refuse(self, call: str, groups: Sequence[tuple[dist.ProcessGroup, int]]) -> None:
        """Let the pipeline be used no more unless all ranks of these groups refuse the call as well."""
        if not all(alarm.all_refuse(*each) for each in groups):
            self.fail(f"rank {self.group.rank} cannot start {call}, which other ranks have started")

    def require_same(self, settings: Mapping[str, Any], purpose: str) -> None:
        """Raise CommunicationError on every rank unless all ranks have the same `settings`."""
        rows = self.exchange(torch.tensor([zlib.crc32(repr(value).encode()) for value in settings.values()]), purpose)
        for rank, row in enumerate(rows.tolist()):
            for name, value, first in zip(settings, row, rows[0].tolist(), strict=True):
                if value != first:
                    raise CommunicationError(f"rank {rank} has a different {name} than rank 0; give all ranks the same")

    def require_none(self, problems: Sequence[str], purpose: str) -> None:
        """Raise SettingError on every rank if any rank passes `problems`. All ranks must call this.

        A rank that has problems reports its own; the others name the rank that has some.

        Args:
            purpose: what the ranks were about to do, for the error of a timeout.
        """
        counts = self.exchange(torch.tensor([len(problems)]), purpose).flatten().tolist()
        if problems:
            more = f" (and {plural(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
            raise SettingError(f"{problems[0]}{more}")
        for rank, count in enumerate(counts):
            if count:
                raise SettingError(f"rank {rank} cannot {purpose}; its own error says why")

    def agree_on_batch(
        self, call: str, batch: Batch, microbatches: int, loss_scale: float, debug: bool
    ) -> tuple[list[int], list[int]]:
        """Return each microbatch's kind and size, once all ranks have announced the same call, batch and `loss_scale`.

        A kind stands for the shapes and dtypes of a microbatch's inputs; see `Batch.kinds`. If all ranks know the
        inputs, and this call is like the last one, nothing is exchanged, except with `debug`.

        Raises:
            SettingError: a rank has refused the call.
            CommunicationError: the ranks' calls, batches or scales differ.
        """
        (scale,) = struct.unpack("q", struct.pack("d", loss_scale))  # the bits of a float, as an integer
        kinds, sizes = batch.kinds(microbatches), list(batch.sizes)
        own = [CALLS.index(call), scale, *kinds, *sizes]
        if own == self._last_announcement and not debug:
            return kinds, sizes
        unlike = " (here, the call, the batch's shapes or loss_scale differ from the last ones)"
        changed = unlike if self._last_announcement else ""
        rows = self.exchange(torch.tensor(own), f"start {call}{changed}").tolist()
        for rank, (number, *_) in enumerate(rows):
            if number == REFUSED:
                self._require_all_refuse(call, self._replicas)
                raise SettingError(f"rank {rank} cannot start {call}; its own error says why")
        first_number, first_scale = rows[0][:2]
        for rank, (number, its_scale, *_) in enumerate(rows):
            if number != first_number:
                raise CommunicationError(
                    f"rank 0 calls {CALLS[first_number]}, but rank {rank} calls {CALLS[number]}; call the same on all"
                )
            if its_scale != first_scale:
                raise CommunicationError(f"rank {rank} has a different loss_scale than rank 0; give all ranks the same")
        columns = list(zip(*rows, strict=True))[2:]  # the ranks' kinds of each microbatch, then their sizes of each
        all_kinds, all_sizes = columns[:microbatches], columns[microbatches:]
        agreed = [_known_kind(m, column) for m, column in enumerate(all_kinds)]
        known_everywhere = all(all(column) for column in all_kinds)
        self._last_announcement = own if known_everywhere else []
        return agreed, [max(column) for column in all_sizes]


def _known_kind(microbatch: int, kinds: Sequence[int]) -> int:
    """Return the kind of a microbatch's inputs, the same on all ranks but those without the inputs, which say 0."""
    first_ranks: dict[int, int] = {}  # by kind, the lowest rank that has seen it
    for rank in reversed(range(len(kinds))):
        if kinds[rank]:
            first_ranks[kinds[rank]] = rank
    if len(first_ranks) > 1:
        one, other = list(first_ranks.values())[:2]
        raise CommunicationError(
            f"microbatch {microbatch} of the inputs has a different shape or dtype on rank {other} than on rank {one}; "
            "give all ranks the same batch, or leave it out where it is not needed"
        )
    return next(iter(first_ranks))
