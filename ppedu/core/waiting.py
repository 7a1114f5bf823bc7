"""Ranks that wait: what this process is waiting for, published for hang reports, and cycles of waiting ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TypeVar

Waiting = TypeVar("Waiting")


class Wait(NamedTuple):
    """A wait for other ranks.

    Args:
        doing: The action that waits, such as "recv(src=1)".
        kind: "receive", "send" or "both" for a message exchanged with the global rank `peer`; "all" for a call that
            every rank must make.
    """

    doing: str
    kind: str
    peer: int | None = None


# Describes the wait in progress; None while this process does not wait. A hang report calls it, from another thread.
current: Callable[[], Wait] | None = None


class published:
    """A context manager around code that waits: publishes a function that describes the wait, in case of a hang.

    The function is only called by a hang report, so a wait that ends well costs two assignments.
    """

    def __init__(self, describe: Callable[[], Wait]):
        self._describe = describe

    def __enter__(self) -> None:
        global current
        self._outer, current = current, self._describe

    def __exit__(self, *_: object) -> None:
        global current
        current = self._outer


def cycles(waits_for: Mapping[Waiting, Collection[Waiting]]) -> Iterator[list[Waiting]]:
    """Yield the cycles of ranks in which each rank waits for the next, and the last for the first.

    If each rank waits for a single one, every cycle is found; otherwise at least one, if there is any. This is a
    depth-first search, which visits each rank once.

    Args:
        waits_for: For each waiting rank, the ranks it waits for.
    """
    visited: set[Waiting] = set()
    for start in waits_for:
        if start in visited:
            continue
        visited.add(start)
        # The ranks from `start` to the current one, each with the peers still to follow.
        path: dict[Waiting, Iterator[Waiting]] = {start: iter(waits_for[start])}
        while path:
            current_rank = next(reversed(path))  # its iterator goes on where it stopped
            for peer in path[current_rank]:
                if peer in path:
                    ranks = list(path)
                    yield ranks[ranks.index(peer) :]
                elif peer in waits_for and peer not in visited:
                    visited.add(peer)
                    path[peer] = iter(waits_for[peer])
                    break
            else:
                path.popitem()
