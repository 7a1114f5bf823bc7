"""A forward that runs again for its backward: all that it needs, on its own rank or sent on to that of the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ppedu.core import PipelineError
from ppedu.engine.ranks.device import random_state


class Again(NamedTuple):
    """The inputs and the circumstances of a forward, with which it runs as before.

    Args:
        xs: its inputs; `received` says whether from another stage, or they are the batch's.
        random: the state of the random number generators.
    """

    xs: Sequence[Any]
    keywords: Mapping[str, Any]
    received: bool
    random: Sequence[torch.Tensor]
    precision: torch.autocast

    @classmethod
    def of(
        cls,
        device: torch.device,
        xs: Sequence[Any],
        keywords: Mapping[str, Any],
        received: bool,
        random: Sequence[torch.Tensor] = (),
    ) -> Again:
        """Return it for a forward that begins now, or began with the state `random`."""
        kind = device.type
        precision = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return cls(xs, keywords, received, random or random_state(device), precision)

    @property
    def message(self) -> tuple[torch.Tensor, ...]:
        """The random state and, if it was received, the input: another rank has all else that the forward needs."""
        return (*self.random, *(self.xs if self.received else ()))


Tensors = Sequence[torch.Tensor]


def from_message(tensors: Tensors, device: torch.device) -> tuple[Tensors, Tensors]:
    """Return the random state and the input in an `Again.message`."""
    count = len(random_state(device))
    return [state.cpu() for state in tensors[:count]], tensors[count:]


def _refuse(nothing: None) -> torch.Tensor:
    raise PipelineError("a stage with recompute=True cannot run a backward within its forward; recompute parts of it")


# A forward that will be run again builds its graph, which tells what requires grad, but keeps no tensors for it.
SAVE_NOTHING = saved_tensors_hooks(lambda tensor: None, _refuse)
