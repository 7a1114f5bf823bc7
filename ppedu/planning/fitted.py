"""The costs of a schedule's stages for a model, without a plan: for widgets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ppedu.core import Schedule
from ppedu.core.numeric import ratio
from ppedu.core.validate import require_instance
from ppedu.planning.machine import Machine
from ppedu.planning.partition import Cutting
from ppedu.planning.pieces import SIZES, TIMES, Pieces
from ppedu.planning.presets import machine_named
from ppedu.sim import Costs

QUICK = 200_000  # spent at most; see `Cutting.spent`


def fitted(schedule: Schedule, model: Any, machine: Machine | str | None = None) -> Costs:
    """Return the costs of a schedule's stages with the best partition found quickly; activations in GB.

    Args:
        machine: For the time of messages, which otherwise take none. Its memory does not limit the partition.

    Raises:
        SettingError: `model` is not measured and has no speed.
    """
    require_instance("model", model, Pieces, "pieces: Model.measured(…), or model.pieces(sequence=…) of a Model")
    machine = None if machine is None else machine_named(machine)
    pieces = _equal(model.timed(machine), schedule.slices)
    delay = machine.delays(schedule.ranks, pieces.message, pieces.unit, pieces.gpus) if machine else 0
    search = Cutting(schedule, pieces, math.inf, delay)
    search.start()
    search.improve(QUICK)
    costs: Any = search.costs(search.best)
    return replace(costs, activation=tuple(size / 1e9 for size in costs.activation))


def _equal(pieces: Pieces, count: int) -> Pieces:
    """Return the pieces of one of `count` slices that all take the same part of a microbatch's times and bytes."""
    if count == 1:
        return pieces
    names = (*TIMES, *SIZES)
    rows = [replace(each, **{name: ratio(getattr(each, name), count) for name in names}) for each in pieces.pieces]
    return replace(pieces, pieces=tuple(rows), message=ratio(pieces.message, count))
