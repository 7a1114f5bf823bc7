"""Timelines as a Chrome trace: ui.perfetto.dev and chrome://tracing open it, and it can be read back.

The format is the Trace Event Format's JSON object. Each timeline is a process; each of its ranks has a track for what
it computes, one for its messages and sharding, and a counter of the activations that it holds. An arrow leads from each
result to the action on another rank that needs it. What the format has no word for stands under the key "ppedu".

A slice is named as torch.distributed.pipelining names it for torch.profiler, PP:2F0, and is of the same kind there:
"ph" is "X", "ts" and "dur" count microseconds. To see a run of torch beside one of ours, join the "traceEvents" of the
files; torch writes one for each rank. Two things must be changed in torch's: "ts" counts from a time long past, so take
the "ts" of the first PP slice of all ranks off each, down to 0; and no two files may have a "pid" in common.
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
from ppedu.core.dependencies import produces, requires
from ppedu.core.errors import ParseError, PipelineError
from ppedu.core.files import named
from ppedu.core.numeric import plural
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Span, Timeline
from ppedu.core.validate import require_size

MICROSECONDS = 1_000_000  # the trace counts in these; a unit of simulated time becomes a second
# Viewers count whole nanoseconds, and drop a slice that, so rounded, overlaps the next. An eighth of a microsecond is
# 125 of them, and exact as a float.
TICK = 0.125

PREFIX = "PP:"
PER_STAGE = ("forward", "backward", "input", "weight", "overlap", "activation")
TRACKS = ("", " communication")  # of each rank: what it computes, and the rest

Event = dict[str, Any]


def trace(*timelines: Timeline) -> str:
    """The text of the trace file; each timeline's times count from its start."""
    arrows = count()
    events: list[Event] = []
    for pid, timeline in enumerate(timelines, 1):
        events += _ranks(timeline, pid, f"{timeline.source} rank" if len(timelines) > 1 else "rank")
        events += _messages(timeline, pid, arrows)
    about = [_about(timeline) for timeline in timelines]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "ppedu": about})


def _ranks(timeline: Timeline, pid: int, label: str) -> Iterator[Event]:
    """What each rank does and holds."""
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
            ts, over = _microseconds(timeline, start), _microseconds(timeline, end)
            # What takes no time, as simulated messages do, is a mark on its track.
            shape = {"ph": "i", "s": "t"} if track and ts == over else {"ph": "X", "dur": over - ts}
            place = {"pid": pid, "tid": _tid(rank, track), "ts": ts}
            yield {"name": f"{PREFIX}{action}", "cat": action.op, **place, **shape}
        # Of several values at one time only the last: an activation given back as another is taken makes no dip.
        held = {_microseconds(timeline, time): float(value) for time, value in timeline.memory(rank)}
        counter = f"{label} {rank:0{len(str(len(timeline.rows) - 1))}} activations"  # viewers sort them by name
        for ts, value in held.items():
            yield {"ph": "C", "name": counter, "pid": pid, "ts": ts, "args": {"held": value}}


def _messages(timeline: Timeline, pid: int, arrows: Iterator[int]) -> Iterator[Event]:
    """An arrow from the end of each action to the start of the one on another rank that needs its result."""
    computed = [(rank, span) for rank, row in enumerate(timeline.rows) for span in row if span.action.computes]
    made = {result: at for at in computed for result in produces(at[1].action)}
    for rank, (action, start, _) in computed:
        for need in requires(action, timeline.schedule.placement):
            if need in made and made[need][0] != rank:
                source, maker = made[need]
                arrow = {"name": "message", "cat": "message", "id": next(arrows), "pid": pid}
                # An arrow begins in the slice that is there at its time; at a slice's end that is the next one.
                left, right = (_microseconds(timeline, time) for time in (maker.start, maker.end))
                yield {**arrow, "ph": "s", "tid": _tid(source), "ts": max(left, right - TICK)}
                yield {**arrow, "ph": "f", "bp": "e", "tid": _tid(rank), "ts": _microseconds(timeline, start)}


def _tid(rank: int, track: int = 0) -> int:
    """The number of a rank's track: 10 or 11 for rank 0. Viewers take 0 for the process itself."""
    return 10 * (rank + 1) + track


def _microseconds(timeline: Timeline, time: Any) -> float:
    return round(float(time - timeline.start) * MICROSECONDS / TICK) * TICK


def _about(timeline: Timeline) -> dict[str, object]:
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
    """Return the timeline in a trace file that `trace` made; its times are floats, counted from its start.

    Raises:
        PipelineError: the file cannot be read.
        ParseError: the file is not such a trace, or holds several timelines.
    """
    timelines = load_all(path)
    if len(timelines) != 1:
        held = plural(len(timelines), "timeline")
        raise ParseError(f"{str(path)!r} holds {held}; ppedu.view.load_all gives a list of them")
    return timelines[0]


def load_all(path: str | os.PathLike[str]) -> list[Timeline]:
    """Return the timelines in a trace file, in the order in which `trace` was given them; otherwise as `load`."""
    try:
        text = named(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error}") from error
    try:
        data = json.loads(text, parse_int=_whole)
        placements = [_placement(about) for about in data["ppedu"]]
        rows: list[list[list[Span]]] = [[[] for _ in range(placement.ranks)] for placement in placements]
        for event in data["traceEvents"]:
            if event["ph"] in ("X", "i"):
                start, lasts = event["ts"] / MICROSECONDS, event.get("dur", 0) / MICROSECONDS
                place, rank = event["pid"] - 1, event["tid"] // 10 - 1
                if not (0 <= start < math.inf and 0 <= lasts < math.inf and min(place, rank) >= 0):
                    raise ValueError(event)
                action = Action.parse(event["name"].removeprefix(PREFIX))
                rows[place][rank].append(Span(action, start, start + lasts))
        return list(map(_timeline, data["ppedu"], placements, rows))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ParseError(f"{str(path)!r} is not a timeline saved by ppedu: {error!r}") from error


def _whole(digits: str) -> int:
    """Return the number, unless it is too large to be computed with beside floats."""
    number = int(digits)
    float(number)  # raises OverflowError
    return number


def _placement(about: dict[str, Any]) -> Placement:
    """Return the placement of a saved timeline.

    Its stages must be as many as the file lists: a few digits in a file must not fill the memory.
    """
    require_size(about["ranks"], about["chunks"], about["microbatches"])
    if about["placement"] == "custom":
        return Placement.custom(about["holders"])
    stages = len(about["holders"])
    if about["ranks"] * about["chunks"] != stages:
        raise ParseError(f"{about['ranks']} ranks of {about['chunks']} chunks do not hold {stages} stages")
    return Placement.make(about["placement"], about["ranks"], about["chunks"], about["microbatches"])


def _timeline(about: dict[str, Any], placement: Placement, rows: list[list[Span]]) -> Timeline:
    """Return the timeline of these rows that `_about` described."""
    for name in ("schedule", "unit", "source"):
        if not isinstance(about[name], str):
            raise ParseError(f"{name} must be text; got {about[name]!r}")
    for single in (single for row in rows for span in row for single in span.action.singles):
        if single.stage >= placement.stages or single.microbatch >= about["microbatches"]:
            raise ParseError(
                f"{single} is not among {placement.stages} stages and {about['microbatches']} microbatches"
            )
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = Schedule(about["schedule"], placement, about["microbatches"], orders)
    costs = Costs(**{name: about[name] for name in (*PER_STAGE, "latency", "weight_memory", "unit")})
    costs.durations(schedule.stages, schedule.ranks)
    costs.per_stage(costs.activation, schedule.stages, schedule.ranks)
    return Timeline(schedule, tuple(map(tuple, rows)), costs, about["source"])
