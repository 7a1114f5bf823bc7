"""The differences between a CPU and a GPU, in one place.

A GPU has a queue. It works through what the host has put there, a *stream*, while the host goes on. So a call returns
before its result exists, and the host waits for the GPU only where it reads a result. The same holds for messages of
NCCL: `work.wait()` lets the queue wait, and the host goes on. Whatever the host does after such a call (look at its
clock, count the seconds of a timeout) must wait for a mark in the queue first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LONGEST_PAUSE = 1e-3  # seconds between two looks at a mark


@cache
def is_queue(device: torch.device) -> bool:
    """Return whether the device has a queue."""
    return device.type == "cuda"


def begin(device: torch.device) -> None:
    """Let the thread in which autograd uses a GPU begin; torch warns if a matrix product is the first thing it does."""
    if is_queue(device):
        with torch.inference_mode(False):
            torch.zeros((), device=device, requires_grad=True).exp().backward()


def mark(device: torch.device) -> Any:
    """Put a mark in the device's queue, at its current end, and return it: an event, which will contain a time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything, if it has a queue."""
    if is_queue(device):
        torch.cuda.synchronize(device)


def wait(work: dist.Work, device: torch.device, timeout: timedelta | None = None) -> None:
    """Wait until tensors on `device` have been sent or received, so that the host can read them.

    Args:
        timeout: None for that of the process group, or none at all with a queue.

    Raises:
        RuntimeError: the timeout has passed, or the peer is gone.
    """
    if is_queue(device):
        Arrival([work], device).wait(timeout)
    elif timeout is None:
        work.wait()
    else:
        work.wait(timeout)


class Arrival:
    """Messages that a device's queue waits for, so that what comes next in the queue can use them.

    `wait` lets the host wait for them, too. It keeps no tensors alive.
    """

    def __init__(self, works: Sequence[dist.Work], device: torch.device):
        self._before = mark(device)
        for work in works:
            work.wait()
        self._after = mark(device)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the messages have arrived. The time that the device needs to get there does not count."""
        _reach(self._before)
        if not _reach(self._after, timeout):
            raise RuntimeError(f"timed out after {timeout}: the queue of this rank's GPU still waits for a message")


def _reach(place: Any, timeout: timedelta | None = None) -> bool:
    """Wait until a queue has passed a mark; return False if the timeout passes before."""
    end = None if timeout is None else time.monotonic() + timeout.total_seconds()
    pause = 1e-5
    while not place.query():
        if end is not None and time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def host_clock(device: torch.device, tries: int = 5) -> Callable[[Any], float]:
    """Return a function from a mark to the time at which the queue passed it, in seconds of the host's clock.

    It waits until the device has done everything. A mark then passes between two looks at the host's clock; of several
    tries, the one with the shortest time between them counts, as the host may be slow to wake up.
    """
    synchronize(device)
    found = []
    for _ in range(tries):
        before, place = time.monotonic(), mark(device)
        place.synchronize()
        after = time.monotonic()
        found.append((after - before, (before + after) / 2, place))
    _, now, last = min(found, key=lambda each: each[0])
    return lambda place: now - float(place.elapsed_time(last)) / 1000


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of all random number generators that computing on `device` may use."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(device: torch.device, state: Sequence[torch.Tensor]) -> None:
    """Go on from a `random_state`."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def own_random(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that gives back the state of the random number generators at its end."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def home(modules: Iterable[nn.Module], default: torch.device) -> torch.device:
    """Return the device of the modules' weights and buffers; `default` for modules without any.

    Where only some are on the CPU, such as a large embedding that moves its results itself, it is the other device.
    """
    tensors = chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
    devices = [each.device for each in tensors]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else default)
