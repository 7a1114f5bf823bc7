"""Activations on the host: what autograd saves for a backward goes there after the forward, and comes back in time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ppedu.engine.stages.split_backward import as_saved
from ppedu.engine.stages.watch import storages


class Kept:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # a graph that saves its own output would never be freed


class HostMemory:
    """The activations of a stage's microbatches that go to the host and back.

    On a GPU, copies run on a stream of their own, in pinned memory. On a CPU, the host is other memory of the process.

    Attributes:
        saved: all that autograd has saved, and still needs, for these microbatches.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.saved: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._kept: dict[int, list[Kept]] = {}  # by microbatch, what moves
        self._inputs: dict[int, list[tuple[torch.Tensor, Kept]]] = {}  # and the inputs, which graphs hold, too
        self._away: set[int] = set()
        self._loaded: dict[int, torch.cuda.Event] = {}

    @property
    def away(self) -> list[torch.Tensor]:
        """The tensors that are on the host now."""
        return [each.tensor for microbatch in self._away for each in self._kept[microbatch]]

    @contextmanager
    def keeping(self, microbatch: int, received: Sequence[Any], own: Any) -> Iterator[None]:
        """Note what autograd saves within this context, and the inputs of a microbatch, but not the memory of `own`."""
        known, kept = storages(own).keys(), self._kept.setdefault(microbatch, [])

        def moves(tensor: torch.Tensor) -> bool:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            plain = plain and not tensor.is_conj() and not tensor.is_neg() and tensor.device == self._device
            return plain and tensor.untyped_storage().data_ptr() not in known

        def save(tensor: torch.Tensor) -> Kept:
            each = Kept(tensor)
            self.saved.add(each)
            if moves(tensor):
                kept.append(each)
            return each

        inputs = [(x, Kept(x)) for x in received if isinstance(x, torch.Tensor) and moves(x)]
        self._inputs[microbatch] = inputs
        kept += [each for _, each in inputs]
        with saved_tensors_hooks(save, as_saved):
            yield

    def offload(self, microbatch: int) -> None:
        """Copy a microbatch's activations to the host, and free them."""
        self._move(microbatch, torch.device("cpu"))
        self._away.add(microbatch)

    def load(self, microbatch: int) -> None:
        """Copy them back."""
        self._move(microbatch, self._device)
        self._away.remove(microbatch)
        self._kept.pop(microbatch).clear()  # the graph holds the list: autograd keeps the hook that appended to it
        del self._inputs[microbatch]
        if self._device.type == "cuda":
            self._loaded[microbatch] = torch.cuda.current_stream(self._device).record_event()

    def wait(self, microbatch: int) -> None:
        """Let what follows wait until a microbatch's activations are back."""
        if microbatch in self._loaded:
            torch.cuda.current_stream(self._device).wait_event(self._loaded.pop(microbatch))

    def _move(self, microbatch: int, to: torch.device) -> None:
        """Move the memory behind a microbatch's tensors; those that share it do so afterwards, too."""
        moved: dict[int, torch.UntypedStorage] = {}
        for each in self._kept[microbatch]:
            old = each.tensor
            place = old.untyped_storage().data_ptr()
            if place not in moved:
                moved[place] = self._copy(old.untyped_storage(), to)
            empty = torch.empty(0, dtype=old.dtype, device=to)
            each.tensor = empty.set_(moved[place], old.storage_offset(), old.shape, old.stride())
        for x, each in self._inputs[microbatch]:
            x.data = each.tensor

    def _copy(self, storage: torch.UntypedStorage, to: torch.device) -> torch.UntypedStorage:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        pinned = self._device.type == "cuda" and to.type == "cpu"
        target = torch.empty(source.shape, dtype=torch.uint8, device=to, pin_memory=pinned)
        target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":  # the allocator waits for both streams before it uses the GPU's memory again
            if pinned:
                source.record_stream(torch.cuda.current_stream(self._device))
            else:
                target.record_stream(torch.cuda.default_stream(self._device))
        return target.untyped_storage()


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run copies beside the computations that follow: on a GPU, on its stream for copies, after what came before."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies, one for both directions: they are in order, as in arXiv 2503.01328, section 4.2."""
    return torch.cuda.Stream(device)
