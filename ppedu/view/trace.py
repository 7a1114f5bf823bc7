"""A timeline as a Chrome trace: ui.perfetto.dev and chrome://tracing open it, and it can be read back.

The format is the Trace Event Format's JSON object; what it has no word for stands under the key "ppedu".
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from ppedu.core.actions import Action
from ppedu.core.errors import ParseError, PipelineError
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import Costs
from ppedu.core.timeline import Span, Timeline

MICROSECONDS = 1_000_000  # the trace counts in these; a unit of simulated time becomes a second


def trace(timeline: Timeline) -> str:
    """The text of the trace file, times counted from the timeline's start."""
    schedule, costs = timeline.schedule, timeline.costs
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(schedule.ranks)
    ]
    for rank in range(schedule.ranks):
        for action, start, end in timeline.spans(rank):
            ts, dur = (float(time) * MICROSECONDS for time in (start - timeline.start, end - start))
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": action.op,
                    "pid": 0,
                    "tid": rank,
                    "ts": ts,
                    "dur": dur,
                }
            )
    weighs = costs.per_stage(costs.activation, schedule.stages, schedule.ranks)
    about = {
        "schedule": schedule.name,
        "placement": schedule.placement.name,
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "holders": schedule.placement.holders[0],
        "microbatches": schedule.microbatches,
        "activation": [float(weight) for weight in weighs],
        "weight_memory": float(costs.weight_memory),
        "unit": costs.unit,
        "source": timeline.source,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "ppedu": about})


def load(path: str | os.PathLike[str]) -> Timeline:
    """The timeline in a trace file that `trace` made; its times are floats, counted from its start.

    Raises:
        PipelineError: the file cannot be read.
        ParseError: the file is not such a trace.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error}") from error
    try:
        data = json.loads(text)
        about = data["ppedu"]
        rows: list[list[Span]] = [[] for _ in range(about["ranks"])]
        for event in data["traceEvents"]:
            if event["ph"] == "X":
                start, lasts, rank = event["ts"] / MICROSECONDS, event["dur"] / MICROSECONDS, event["tid"]
                if not (0 <= start < math.inf and 0 <= lasts < math.inf and rank >= 0):
                    raise ValueError(event)
                rows[rank].append(Span(Action.parse(event["name"]), start, start + lasts))
        if about["placement"] == "custom":
            placement = Placement.custom(about["holders"])
        else:
            placement = Placement.make(about["placement"], about["ranks"], about["chunks"], about["microbatches"])
        schedule = Schedule(
            about["schedule"],
            placement,
            about["microbatches"],
            tuple(tuple(span.action for span in row) for row in rows),
        )
        costs = Costs(activation=about["activation"], weight_memory=about["weight_memory"], unit=about["unit"])
        costs.per_stage(costs.activation, schedule.stages, schedule.ranks)
        return Timeline(schedule, tuple(map(tuple, rows)), costs, about["source"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ParseError(f"{str(path)!r} is not a timeline saved by ppedu: {error!r}") from error
