"""Which published schedule are these orders?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ppedu.core import PipelineError, Schedule
from ppedu.zoo.registry import build, options_of, published


@lru_cache(maxsize=64)
def recognize(schedule: Schedule) -> Schedule:
    """Return the published schedule with the same orders and placement, or else `schedule` itself.

    Of several with the same orders, such as gpipe and 1f1b with one microbatch, the first in the list of schedules.
    Its name includes options that are not the defaults: "interleaved, chunks=4".
    """
    orders = schedule.forwards.orders if schedule.forward_only else schedule.orders
    for name, options in _candidates(schedule):
        try:
            found = build(
                name, published()[name], schedule.ranks, schedule.microbatches // schedule.slices, dict(options)
            )
        except PipelineError:  # not for these sizes
            continue
        found = found.forwards if schedule.forward_only else found
        same_places = replace(found.placement, name="any") == replace(schedule.placement, name="any")
        if same_places and found.orders == orders:
            defaults = {key: parameter.default for key, parameter in options_of(name).items()}
            shown = "".join(f", {key}={value}" for key, value in options.items() if value != defaults[key])
            return replace(found, name=f"{name}{shown}")
    return schedule


def _candidates(schedule: Schedule) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names of published schedules, each with options that fit the number of stages, defaults first."""
    for name, entry in published().items():
        options = options_of(name)
        if "chunks" not in options and entry.chunks != schedule.chunks:
            continue
        base: dict[str, Any] = {key: getattr(schedule, key) for key in ("chunks", "slices") if key in options}
        yield name, base
        for key, parameter in options.items():
            if isinstance(parameter.default, bool):
                yield name, {**base, key: not parameter.default}
        if "group" in options:
            yield from ((name, {**base, "group": size}) for size in range(1, schedule.microbatches + 1))
        if "memory" in options:
            yield from ((name, {**base, "memory": halves / 2}) for halves in range(2, 2 * schedule.ranks + 1))
