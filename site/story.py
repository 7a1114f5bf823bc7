"""The story above the playground: its pictures and numbers, all computed when the site is built."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

import ppedu as pp
from ppedu.core.numeric import pretty
from ppedu.planning.pieces import Pieces
from ppedu.planning.presets import MACHINES
from ppedu.sim import Timeline
from ppedu.view.link import encode
from ppedu.view.model import Panel, Stack

GPUS = 4
MOST = 16  # microbatches
BATCHES = range(1, MOST + 1)
TITLES = {"gpipe": "GPipe: all forwards first", "1f1b": "1F1B: one forward, one backward"}
TALL, LOW = 84, 38  # heights of a row, in pixels, of one timeline and of two
ROW = {"top": 0.03, "lane": 0.03, "bottom": 0.5, "strip": 0.54, "floor": 0.95}  # in it, much space for memory

# The model of the first step.
WEIGHTS, LAYERS = 16e9, 48
GIGABYTES = sum(Pieces.bytes_per_weight) * WEIGHTS / 1e9


def told() -> dict[str, Any]:
    """Return what the page's script needs: the states of its widgets, and numbers, by microbatches from 1 on."""
    runs = {name: [pp.simulate(pp.schedule(name, GPUS, m)) for m in BATCHES] for name in TITLES}
    pairs = list(zip(*runs.values(), strict=True))
    return {
        "layer": GIGABYTES / LAYERS,
        "memory": _memory(),
        "one": [_state(TALL, {"": first}) for first, _ in pairs],
        "two": [_state(LOW, dict(zip(TITLES.values(), pair, strict=True))) for pair in pairs],
        "bubble": [[each.bubble for each in pair] for pair in pairs],
        "peak": [[float(max(each.peak_activations)) for each in pair] for pair in pairs],
    }


def page(text: str) -> str:
    """Return the page with the numbers of the story in place of their names, such as %IDLE%."""
    share = GIGABYTES / LAYERS
    layers = (f'<i style="--at: {k}"{" class=over" * ((k + 1) * share > _memory())}></i>' for k in range(LAYERS))
    values = {
        "WEIGHTS": f"{WEIGHTS / 1e9:g} billion",
        "BYTES": f"{sum(Pieces.bytes_per_weight):g}",
        "TOTAL": pretty(GIGABYTES),
        "MEMORY": pretty(_memory()),
        "LAYERS": str(LAYERS),
        "SHARE": pretty(GIGABYTES / GPUS),
        "LINE": f"{_memory() / GIGABYTES:.2%}",
        "COLUMN": "".join(layers),
        "IDLE": f"{pp.simulate(pp.schedule('gpipe', GPUS, 1)).bubble:.0%}",
        "HELD": pretty(max(pp.simulate(pp.schedule("1f1b", GPUS, MOST)).peak_activations)),
        "EXPLORE": escape(encode("explore", {})),
        "PLAN": escape(encode("plan", {})),
    }
    return re.sub(r"%([A-Z]+)%", lambda found: values[found[1]], text)


def _memory() -> float:
    """Return the memory of one GPU, in GB."""
    found = MACHINES["h100"].memory
    assert found is not None
    return float(found) / 1e9


def _state(tall: int, timelines: dict[str, Timeline]) -> dict[str, Any]:
    """Return the state of a plain widget with timelines by title; memory only where there are several."""
    bare = len(timelines) == 1
    state = Stack([Panel(each, title=title) for title, each in timelines.items()], bare=bare).state()
    for panel, title in zip(state["panels"], timelines, strict=True):
        panel |= {"heading": title, "numbers": [], "axis": "time →", "row": "GPU", "tall": tall, "path": []}
        panel["peaks"] = [peak.text for peak in panel["peaks"]]
        panel["summary"] = _plain(panel["summary"])
        panel["gaps"] = [[*times, _plain(why)] for *times, why in panel["gaps"]]
    if not bare:
        state["look"] = state["look"] | {"row": ROW}
    return {"kind": "plain", **state}


def _plain(sentence: str) -> str:
    return re.sub(r"\brank(s?)\b", r"GPU\1", sentence)


def written() -> str:
    """Return what the page's script needs, as JSON."""
    return json.dumps(told(), separators=(",", ":"))
