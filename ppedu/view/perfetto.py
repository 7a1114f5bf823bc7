"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open and `load` reads back.

The format is the JSON object of the Trace Event Format. Each timeline is a process. Each of its ranks has a track for
compute actions, a track for messages and sharding, and a counter of the activations that it holds. An arrow leads from
each result to the action on another rank that requires it. The key "ppedu" holds what the format cannot express.

Slices have the name and form that torch.distributed.pipelining gives them in torch.profiler: the name is PP:2F0, "ph"
is "X", and "ts" and "dur" count microseconds. To see a run of torch beside one of ppedu's, join the "traceEvents" of
the files; torch writes a file per rank. Two changes to torch's events are required. Their "ts" counts from a distant
moment, so subtract the smallest "ts" of all PP slices and set what is then negative to 0. And each file needs "pid"s of
its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

from ppedu.core.actions import Action
from ppedu.core.costs import Costs
from ppedu.core.errors import ParseError, PipelineError
from ppedu.core.files import named
from ppedu.core.numeric import plural
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Span, Timeline
from ppedu.core.validate import require_instance, require_size
from ppedu.view.model import Data, Panel

MICROSECONDS = 1_000_000  # per second; a unit of simulated time without a name counts as a second
# Viewers round to whole nanoseconds, and drop a slice that then overlaps the next one. Multiples of an eighth of a
# microsecond are whole nanoseconds, and exact as floats.
TICK = 0.125

PREFIX = "PP:"
PER_STAGE = ("forward", "backward", "input", "weight", "overlap", "activation")
TRACKS = ("", " communication")  # of each rank: compute actions, and everything else


def chrome_trace(*timelines: Timeline) -> str:
    """Return timelines as the text of a trace file. The times of each timeline count from its start."""
    arrows = count()
    events: list[Data] = []
    for pid, timeline in enumerate(timelines, 1):
        events += _ranks(timeline, pid, f"{timeline.source} rank" if len(timelines) > 1 else "rank")
        events += _messages(Panel(timeline), pid, arrows)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "ppedu": list(map(_about, timelines))})


def _ranks(timeline: Timeline, pid: int, label: str) -> Iterator[Data]:
    """Yield the trace events of each rank: its tracks, its actions and the activations that it holds.

    pid: the number of the timeline in the file. label: the name of a rank's tracks, before the rank's number.
    """
    name = f"{timeline.source} {timeline.schedule.name}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for rank, row in enumerate(timeline.rows):
        for track, what in enumerate(TRACKS):
            thread = {"ph": "M", "pid": pid, "tid": _tid(rank, track)}
            yield {**thread, "name": "thread_name", "args": {"name": f"{label} {rank}{what}"}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": _tid(rank, track)}}
        for action, start, end in row:
            track = 0 if action.computes else 1
            ts, over = _microseconds(start - timeline.start), _microseconds(end - timeline.start)
            # An action that takes no time, such as a simulated message, is a mark on its track.
            shape = {"ph": "i", "s": "t"} if track and ts == over else {"ph": "X", "dur": over - ts}
            place = {"pid": pid, "tid": _tid(rank, track), "ts": ts}
            yield {"name": f"{PREFIX}{action}", "cat": action.op, **place, **shape}
        # Only the last of several values at one time: releasing one activation and storing another is not a dip.
        held = {_microseconds(time - timeline.start): float(value) for time, value in timeline.memory(rank)}
        counter = f"{label} {rank:0{len(str(len(timeline.rows) - 1))}} activations"  # viewers sort counters by name
        for ts, value in held.items():
            yield {"ph": "C", "name": counter, "pid": pid, "ts": ts, "args": {"held": value}}


def _messages(panel: Panel, pid: int, arrows: Iterator[int]) -> Iterator[Data]:
    """Yield an arrow from the end of each action to the start of the one on another rank that requires its result."""
    for box, sources in zip(panel.boxes, panel.sources, strict=True):
        for source in (panel.boxes[index] for index in sources):
            if source.rank != box.rank:
                arrow = {"name": "message", "cat": "message", "id": next(arrows), "pid": pid}
                # An arrow is attached to the slice that contains its time, so it must begin before its slice ends.
                begin = max(_microseconds(source.start), _microseconds(source.end) - TICK)
                yield {**arrow, "ph": "s", "tid": _tid(source.rank), "ts": begin}
                yield {**arrow, "ph": "f", "bp": "e", "tid": _tid(box.rank), "ts": _microseconds(box.start)}


def _tid(rank: int, track: int = 0) -> int:
    """Return the number of a rank's track: 10 and 11 for rank 0, 20 and 21 for rank 1. To viewers, 0 is the process."""
    return 10 * (rank + 1) + track


def _microseconds(time: Any) -> float:
    """Return a time given in seconds as microseconds, rounded to a multiple of TICK."""
    return round(float(time) * MICROSECONDS / TICK) * TICK


def _about(timeline: Timeline) -> Data:
    """Return the schedule's name and size, the costs and the source: the part of a timeline that events lack."""
    schedule, costs = timeline.schedule, timeline.costs

    def floats(cost: Any) -> list[float] | None:
        return None if cost is None else [*map(float, costs.per_stage(cost, schedule.stages, schedule.ranks))]

    return {
        "schedule": schedule.name,
        "placement": schedule.placement.name,
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "holders": schedule.placement.holders[0],
        "microbatches": schedule.microbatches,
        **{name: floats(getattr(costs, name)) for name in PER_STAGE},
        "latency": float(costs.latency),
        "weight_memory": float(costs.weight_memory),
        "unit": costs.unit,
        "source": timeline.source,
    }


def load(path: str | os.PathLike[str]) -> Timeline:
    """Return the timeline in a trace file of `chrome_trace`. Its times are floats, counted from its start.

    Raises:
        PipelineError: the file cannot be read.
        ParseError: the file is not a trace of ppedu's, or holds several timelines.
    """
    timelines = load_all(path)
    if len(timelines) != 1:
        held = plural(len(timelines), "timeline")
        raise ParseError(f"{str(path)!r} holds {held}; ppedu.view.load_all returns all of them")
    return timelines[0]


def load_all(path: str | os.PathLike[str]) -> list[Timeline]:
    """Return all timelines in a trace file, in the order in which they were saved. Raises what `load` raises."""
    try:
        text = named(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error}; give a file saved with Timeline.save") from error
    try:
        data = json.loads(text, parse_int=_whole)
        placements = [_placement(about) for about in data["ppedu"]]
        rows: list[list[list[Span]]] = [[[] for _ in range(placement.ranks)] for placement in placements]
        for event in data["traceEvents"]:
            if event["ph"] in ("X", "i"):
                start, lasts = event["ts"] / MICROSECONDS, event.get("dur", 0) / MICROSECONDS
                place, rank = event["pid"] - 1, event["tid"] // 10 - 1
                if not (0 <= start < math.inf and 0 <= lasts < math.inf and min(place, rank) >= 0):
                    raise ValueError(f"an event with an impossible rank or time: {event}")
                action = Action.parse(event["name"].removeprefix(PREFIX))
                rows[place][rank].append(Span(action, start, start + lasts))
        return list(map(_timeline, data["ppedu"], placements, rows))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        advice = "save it with Timeline.save"
        raise ParseError(f"{str(path)!r} is not a timeline saved by ppedu: {error!r}; {advice}") from error


def _whole(digits: str) -> int:
    """Return digits as an int. Raise OverflowError if the number is too large for a float."""
    number = int(digits)
    float(number)  # raises OverflowError
    return number


def _placement(about: Data) -> Placement:
    """Return the placement of a saved timeline.

    The sizes in the file are checked before anything is built, or a file with huge sizes would exhaust the memory.
    """
    require_size(about["ranks"], about["chunks"], about["microbatches"])
    if about["placement"] == "custom":
        return Placement.custom(about["holders"])
    stages = len(about["holders"])
    if about["ranks"] * about["chunks"] != stages:
        raise ParseError(f"{about['ranks']} ranks of {about['chunks']} chunks cannot hold {stages} stages")
    return Placement.make(about["placement"], about["ranks"], about["chunks"], about["microbatches"])


def _timeline(about: Data, placement: Placement, rows: list[list[Span]]) -> Timeline:
    """Return the timeline with these rows. `about` is the timeline's entry in the file, as `_about` made it."""
    require_instance("source", about["source"], str, "text")
    for single in (single for row in rows for span in row for single in span.action.singles):
        if single.stage >= placement.stages or single.microbatch >= about["microbatches"]:
            raise ParseError(f"{single} is outside {placement.stages} stages and {about['microbatches']} microbatches")
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = Schedule(about["schedule"], placement, about["microbatches"], orders)
    costs = Costs(**{name: about[name] for name in (*PER_STAGE, "latency", "weight_memory", "unit")})
    costs.durations(schedule.stages, schedule.ranks)
    costs.per_stage(costs.activation, schedule.stages, schedule.ranks)
    return Timeline(schedule, tuple(map(tuple, rows)), costs, about["source"])
