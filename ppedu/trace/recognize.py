"""Which published schedule are these orders?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ppedu.core import PipelineError, Schedule
from ppedu.zoo.registry import build, options_of, published

Orders = tuple[tuple[Any, ...], ...]


@lru_cache(maxsize=64)
def recognize(schedule: Schedule) -> Schedule:
    """Return the published schedule with the same orders and placement, or else `schedule` itself.

    Of several with the same orders, such as gpipe and 1f1b with one microbatch, the first in the list of schedules.
    Its name includes options that are not the defaults: "interleaved, chunks=4".
    """
    orders = schedule.forwards.orders if schedule.forward_only else schedule.orders
    for name, options in _candidates(schedule):
        entry = published()[name]
        try:
            found = build(name, entry, schedule.ranks, schedule.microbatches, dict(options))
        except PipelineError:  # not for these sizes
            continue
        if found.placement.holders != schedule.placement.holders or found.placement.split != schedule.placement.split:
            continue
        if (found.forwards if schedule.forward_only else found).orders == orders:
            shown = "".join(f", {key}={value}" for key, value in options.items() if value != _default(name, key))
            return replace(found.forwards if schedule.forward_only else found, name=f"{name}{shown}")
    return schedule


def _candidates(schedule: Schedule) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names of published schedules, each with options that fit the number of stages, defaults first."""
    for name, entry in published().items():
        options = options_of(name)
        if "chunks" in options:
            base = {"chunks": schedule.chunks}
        elif entry.chunks == schedule.chunks:
            base = {}
        else:
            continue
        yield name, base
        for key, parameter in options.items():
            if isinstance(parameter.default, bool):
                yield name, {**base, key: not parameter.default}
        if "group" in options:
            yield from ((name, {**base, "group": size}) for size in range(1, schedule.microbatches + 1))
        if "memory" in options:
            held = {2 * schedule.ranks}
            yield from ((name, {**base, "memory": most / 2}) for most in range(2, max(held) + 1))


def _default(name: str, key: str) -> Any:
    return options_of(name)[key].default
