"""Links to the playground: what it shows, as the fragment of an address."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import Any

from ppedu.core import ParseError, PipelineError, Placement, SettingError
from ppedu.sim import Timeline, simulate
from ppedu.view.explore import changed, explore, in_code
from ppedu.view.why import PLAYGROUND

LARGEST = 1 << 20  # bytes that a link can hold


def link(timeline: Timeline, base: str | None = None) -> str:
    """Return the address of the playground with a timeline; see `Timeline.link`."""
    schedule, costs = timeline.schedule, timeline.costs
    given = changed(costs)
    if any(map(callable, given.values())):
        raise SettingError("a link cannot hold costs that are functions; take costs.tabulated(stages, microbatches)")
    address = PLAYGROUND if base is None else base.partition("#")[0]
    settings = _settings(timeline, given)
    if settings is not None:
        return f"{address}#{encode('explore', settings)}"
    place = schedule.placement
    known = replace(place, barriers=0) == _made(place, schedule.microbatches)
    written = place.name if known else str(list(place.holders[0]))
    if not place.alone and written != place.name:
        raise SettingError("a link cannot hold a placement of one's own with a stage on two ranks")
    inputs = {"text": schedule.to_csv(), "placement": written, "costs": in_code(given)}
    inputs |= {"slices": str(schedule.slices)} if schedule.slices > 1 else {}
    inputs |= {"forwards": "alone"} if schedule.forward_only else {}
    return f"{address}#{encode('write', inputs)}"


def _settings(timeline: Timeline, given: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the settings of `explore` that show the same timeline; None if no settings do.

    Args:
        given: The costs that differ from the defaults.
    """
    schedule = timeline.schedule
    has_sliders = given.keys() <= {"forward", "backward", "latency"}
    if not has_sliders or not all(isinstance(value, Real) for value in given.values()):
        return None
    whole = schedule.microbatches // schedule.slices
    numbers = {"ranks": schedule.ranks, "microbatches": whole, "chunks": schedule.chunks, **given}
    numbers |= {"slices": schedule.slices} if schedule.slices > 1 else {}
    inputs: dict[str, Any] = {}
    for name, value in numbers.items():
        inputs[name] = str(value if isinstance(value, int) else float(value))
    with suppress(PipelineError):
        if explore(schedule.name, **inputs).timeline.rows == simulate(schedule, timeline.costs).rows:
            return {"schedule": schedule.name, **inputs}
    return None


def _made(place: Placement, microbatches: int) -> Placement | None:
    """Return the placement with the same name and size, if there is one."""
    with suppress(PipelineError):
        return Placement.make(place.name, place.ranks, place.chunks, microbatches)
    return None


def encode(view: str, inputs: Mapping[str, str]) -> str:
    """Return a view of the playground with its inputs as the fragment of an address."""
    text = json.dumps([view, inputs], separators=(",", ":"), ensure_ascii=False)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(text.encode()) + packer.flush()
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(fragment: str) -> tuple[str, dict[str, str]]:
    """Return the view and its inputs in the fragment of an address, with or without its #.

    Raises:
        ParseError: The playground did not write it, or a part of it is missing.
    """
    text = fragment.removeprefix("#")
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj(-15)
        view, inputs = json.loads(unpacker.decompress(packed, LARGEST))
        if not unpacker.eof or unpacker.unconsumed_tail:
            raise ValueError
        if not isinstance(view, str) or not all(isinstance(each, str) for item in inputs.items() for each in item):
            raise ValueError
    except (binascii.Error, zlib.error, ValueError, TypeError, AttributeError, RecursionError):
        raise ParseError("the link is damaged; copy it again, to its last character") from None
    return view, dict(inputs)
