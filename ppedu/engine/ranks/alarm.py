"""A rank that fails lets the other ranks know at once, although they are waiting for its messages.

A message of gloo can be neither polled nor given up. But a wait that exceeds its timeout closes all connections of its
rank, which ends the waits of the peers, who then fail in the same way. So a failure spreads in milliseconds, and costs
nothing before. The process group's store holds what closed connections cannot say: which rank failed first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ppedu.engine.ranks.comm import backend_for
from ppedu.engine.ranks.versions import store_of

T = TypeVar("T")
TAG = 2  # of messages that are never sent
FIRST = "ppedu/failed first"  # in the store: the rank that did
STORE_SECONDS = 1.0  # that the store may take for an answer; its host may be gone
GRACE_SECONDS = 2.0  # in which all ranks must have refused a call
meetings: Counter[tuple[str, str]] = Counter()  # by purpose and group; pipelines of one group count together


def sound(groups: Sequence[dist.ProcessGroup], name: str, own: bool) -> str:
    """End the waits of the other ranks, whose connections to this one close; return the rank that failed first.

    With NCCL, whose waits are in the GPU's queue, only note which rank that is.

    Args:
        groups: those of the pipeline and of its replicas; empty if this rank is alone.
        name: of this rank, in errors.
        own: the failure is this rank's own, not one of a message from or to another rank, which may have died.

    Returns:
        The name of the rank that failed first; "" if no rank has stated one.
    """
    suspect = name if own else ""
    first = _answer(STORE_SECONDS, partial(_first, groups, suspect)) or suspect
    for group in groups:
        if backend_for("cpu", group) == "gloo":
            _close_connections(group)
    return first


def meet(group: Any, ranks: int, purpose: str, timeout: timedelta) -> None:
    """Wait until the first `ranks` ranks of a group have called this for a purpose, each as often as this one.

    Raises:
        RuntimeError: the timeout has passed.
    """
    meetings[purpose, group.group_name] += 1
    keys = [f"ppedu/{purpose} {meetings[purpose, group.group_name]} of {rank}" for rank in range(ranks)]
    store = store_of(group)
    store.set(keys[group.rank()], "")
    end = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):  # its `wait` logs a timeout
        if time.monotonic() > end:
            raise RuntimeError("timed out")
        time.sleep(0.005)


def all_refuse(group: dist.ProcessGroup, ranks: int) -> bool:
    """Return whether the first `ranks` ranks of a group refuse a call, as this one does; wait, but not long."""

    def ask() -> bool:
        meet(group, ranks, "refusal", timedelta(seconds=GRACE_SECONDS))
        return True

    return _answer(GRACE_SECONDS + STORE_SECONDS, ask) or False


def _first(groups: Sequence[dist.ProcessGroup], name: str) -> str:
    """Return the rank that failed first: the one in the stores, or else `name`, which is then stored unless ""."""
    stores: list[Any] = [store_of(group) for group in groups]
    known = [store.get(FIRST) for store in stores if store.check([FIRST])]
    first = known[0].decode() if known else name
    if first:
        for store in stores:
            first = store.compare_set(FIRST, "", first).decode()  # the name that another rank has just stored, if any
    return first


def _answer(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return the result of `ask`; None if it fails or takes longer."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _close_connections(group: Any) -> None:
    """Let a wait exceed its timeout; with a peer whose connection is closed already, it would fail without effect."""
    for peer in range(group.size()):
        with suppress(RuntimeError):
            if peer != group.rank():
                group.recv([torch.empty(1)], peer, TAG).wait(timedelta(milliseconds=1))
