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
from ppedu.view.why import Told, Why, bubble, peak, why
from ppedu.zoo.registry import papers_in

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
    """Return what the page's script needs: the states of its widgets, and numbers, by GPUs or microbatches."""
    runs = {name: [pp.simulate(pp.schedule(name, GPUS, m)) for m in BATCHES] for name in TITLES}
    pairs = list(zip(*runs.values(), strict=True))
    return {
        "layer": GIGABYTES / LAYERS,
        "memory": _memory(),
        "one": [_state(TALL, {"": first}) for first, _ in pairs],
        "two": [_state(LOW, dict(zip(TITLES.values(), pair, strict=True))) for pair in pairs],
        "count": [
            [[_fit(gpus)] for gpus in range(1, GPUS + 1)],
            [[[_idle(first), " idle"]] for first, _ in pairs],
            [
                [[_held(first), " held by GPipe"], [_held(second), " held by 1F1B"], [_idle(second), " idle in both"]]
                for first, second in pairs
            ],
        ],
        "why": _numbers(),
    }


def page(text: str) -> str:
    """Return the page with the numbers of the story in place of their names, such as %IDLE%."""
    share = GIGABYTES / LAYERS
    layers = (f'<i style="--at: {k}"{" class=over" * ((k + 1) * share > _memory())}></i>' for k in range(LAYERS))
    values = {
        "MEMORY": pretty(_memory()),
        "LAYERS": str(LAYERS),
        "LINE": f"{_memory() / GIGABYTES:.2%}",
        "COLUMN": "".join(layers),
        "EXPLORE": escape(encode("explore", {})),
        "PLAN": escape(encode("plan", {})),
        **{name: f'<span data-why="{name}">{number.text}</span>' for name, number in _numbers().items()},
    }
    return re.sub(r"%([A-Za-z]+)%", lambda found: values[found[1]], text)


def _numbers() -> dict[str, Why]:
    """Return the numbers of the sentences, by their names in the page."""
    weight, gradient, optimizer = Pieces.bytes_per_weight
    chosen = f"Chosen for this story: {GPUS} GPUs have enough memory for the model, and {GPUS - 1} do not."
    kept = [
        f"{weight} for the weight and {gradient} for its gradient, in 16 bits.",
        f"{optimizer} for the optimizer: Adam has a copy of the weight and two averages of its gradients, in 32 bits.",
    ]
    return {
        "weights": why(f"{WEIGHTS / 1e9:g} billion", [chosen]),
        "bytes": Why(f"{sum(Pieces.bytes_per_weight):g}", kept, papers_in("arXiv 1910.02054")),
        "total": _size(1),
        "memory": _limit(),
        "layers": why(str(LAYERS), ["Chosen for this story: two, three or four GPUs get equal parts."]),
        "share": _size(GPUS),
        "idle": _idle(pp.simulate(pp.schedule("gpipe", GPUS, 1))),
        "held": _held(pp.simulate(pp.schedule("1f1b", GPUS, MOST))),
    }


def _fit(gpus: int) -> Told:
    return [_size(gpus), f" {'more than' if GIGABYTES / gpus > _memory() else 'fits into'} a GPU’s ", _limit()]


def _size(gpus: int) -> Why:
    """Return the size of a stage."""
    total = f"{pretty(GIGABYTES)} GB"
    words = [
        f"{WEIGHTS / 1e9:g} billion weights × {sum(Pieces.bytes_per_weight):g} bytes = {total}.",
        f"{LAYERS} layers / {gpus} GPUs = {LAYERS // gpus} layers on each: {total} / {gpus} = "
        f"{pretty(GIGABYTES / gpus)} GB.",
    ]
    return why(f"{GIGABYTES / gpus:.0f} GB", words[: 1 if gpus == 1 else 2])


def _limit() -> Why:
    return why(f"{pretty(_memory())} GB", ["The memory of an NVIDIA H100."])


def _idle(timeline: Timeline) -> Why:
    return _with_gpus(bubble(timeline, f"{round(100 * timeline.bubble, 1):g}%"))


def _held(timeline: Timeline) -> Why:
    return _with_gpus(peak(timeline))


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
        panel["peaks"] = [*map(_with_gpus, panel["peaks"])]
        panel["summary"] = _plain(panel["summary"])
        panel["gaps"] = [[*times, _plain(reason)] for *times, reason in panel["gaps"]]
    if not bare:
        state["look"] = state["look"] | {"row": ROW}
    return {"kind": "plain", **state}


def _plain(sentence: str) -> str:
    return re.sub(r"\b[Rr]ank(s?)\b", r"GPU\1", sentence)


def _with_gpus(number: Why) -> Why:
    return number._replace(words=[*map(_plain, number.words)])


def written() -> str:
    """Return what the page's script needs, as JSON."""
    return json.dumps(told(), separators=(",", ":"))
