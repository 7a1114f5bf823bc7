"""Links to the playground: what it shows, as the fragment of an address."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ppedu.core import ParseError, PipelineError, Placement, SettingError
from ppedu.core.numeric import plain
from ppedu.sim import Costs, Timeline, simulate
from ppedu.view.explore import explore

PLAYGROUND = "https://ppedu.github.io/ppedu/"
LARGEST = 1 << 20  # bytes that a link can hold


def link(timeline: Timeline, base: str | None = None) -> str:
    """Return the address of the playground with a timeline; see `Timeline.link`."""
    schedule, costs = timeline.schedule, timeline.costs
    given = {each.name: getattr(costs, each.name) for each in fields(costs)}
    changed = {name: value for name, value in given.items() if value != getattr(Costs(), name)}
    if callable(costs.forward) or any(map(callable, changed.values())):
        raise SettingError("a link cannot hold costs that are functions; take costs.tabulated(stages, microbatches)")
    address = PLAYGROUND if base is None else base.partition("#")[0]
    if changed.keys() <= {"forward", "backward", "latency"}:
        sizes = {"ranks": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
        with suppress(PipelineError):
            inputs: dict[str, Any] = {name: _number(each) for name, each in {**sizes, **changed}.items()}
            if explore(schedule.name, **inputs).timeline.rows == simulate(schedule, costs).rows:
                return f"{address}#{encode('explore', {'schedule': schedule.name, **inputs})}"
    place = schedule.placement
    written = place.name if place == _made(place, schedule.microbatches) else str(list(place.holders[0]))
    if place.copies > 1 and written != place.name:
        raise SettingError("a link cannot hold a placement of one's own with two copies of the model")
    inputs = {
        "text": schedule.to_csv(),
        "placement": written,
        "costs": ", ".join(f"{name}={_literal(value)}" for name, value in changed.items()),
    }
    return f"{address}#{encode('write', inputs)}"


def _made(place: Placement, microbatches: int) -> Placement | None:
    """Return the placement with the same name and size, if there is one."""
    with suppress(PipelineError):
        return Placement.make(place.name, place.ranks, place.chunks if place.copies == 1 else 1, microbatches)
    return None


def _number(value: Any) -> str:
    if isinstance(value, (Mapping, tuple)):
        raise SettingError("not a number")
    return str(plain(value) if isinstance(value, int) else float(value))


def _literal(value: Any) -> str:
    """Return the value of a field of Costs as a Python literal."""
    if isinstance(value, (str, bool, int)) or value is None:
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_literal(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(float(value))


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
