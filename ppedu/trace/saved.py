"""Timelines in the trace files that `Timeline.save` writes."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from ppedu.core import Action, ParseError, PipelineError, Placement, Schedule
from ppedu.core.files import opened
from ppedu.core.numeric import plural
from ppedu.core.validate import require_count, require_instance, require_size
from ppedu.sim import Costs, Span, Timeline
from ppedu.sim.per_link import PerLink
from ppedu.sim.steps import with_steps

About = dict[str, Any]

MICROSECONDS = 1_000_000  # per second; a unit of simulated time without a name counts as a second
PREFIX = "PP:"
END = 1 << 20  # bytes at the end of a file, which hold its key "ppedu"


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Return whether a file looks like one that `Timeline.save` wrote.

    Raises:
        PipelineError: The file cannot be read.
    """
    end = b""
    with opened(path) as file:
        while part := file.read(END):
            end = end[-END:] + part
    return b'"ppedu": [' in end


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
        with opened(path) as file:
            text = file.read().decode("utf-8")
    except UnicodeDecodeError as error:
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


def _placement(about: About) -> Placement:
    """Return the placement of a saved timeline.

    The sizes in the file are checked before anything is built, or a file with huge sizes would exhaust the memory.
    """
    require_size(about["ranks"], about["chunks"], about["microbatches"])
    slices = require_count("slices", about.get("slices", 1))  # files of version 0.1.0 do not state it
    if about["placement"] == "custom":
        return replace(Placement.custom(about["holders"], about.get("backwards", ())), slices=slices)
    stages = len(about["holders"])
    if about["ranks"] * about["chunks"] != stages:
        raise ParseError(f"{about['ranks']} ranks of {about['chunks']} chunks cannot hold {stages} stages")
    return Placement.make(about["placement"], about["ranks"], about["chunks"], about["microbatches"] // slices, slices)


def _timeline(about: About, placement: Placement, rows: list[list[Span]]) -> Timeline:
    """Return the timeline with these rows. `about` is the timeline's entry in the file, as `_about` made it."""
    require_instance("source", about["source"], str, "text")
    for single in chain.from_iterable(span.action.singles for row in rows for span in row):
        if single.stage >= placement.stages or single.microbatch >= about["microbatches"]:
            raise ParseError(f"{single} is outside {placement.stages} stages and {about['microbatches']} microbatches")
    orders = tuple(tuple(span.action for span in row) for row in rows)
    forward_only = about.get("forward_only", False)  # files of version 0.1.0 do not state it
    schedule = Schedule(about["schedule"], placement, about["microbatches"], orders, forward_only)
    saved = {each.name: about[each.name] for each in fields(Costs) if each.name in about}  # version 0.1.0 saved fewer
    for name in ("latency", "transfer"):
        if isinstance(saved.get(name), list):
            saved[name] = {(source, target): time for source, target, time in saved[name]}
    costs = Costs(**saved)
    costs.durations(schedule.stages, schedule.ranks, schedule.microbatches)
    costs.memory_changes(schedule)
    timeline = Timeline(schedule, tuple(map(tuple, rows)), costs, about["source"])
    if costs.transport != "buffered":
        schedule.validate()  # without it, a message may never have been sent
    if isinstance(costs.latency, PerLink) or isinstance(costs.transfer, PerLink):
        timeline.gaps()  # raises if a link that a message uses has no time
    steps = require_count("steps", about.get("steps", 1))
    return with_steps(timeline, steps) if steps > 1 else timeline
