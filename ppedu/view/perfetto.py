"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open and `ppedu.trace.saved` reads.

The format is the JSON object of the Trace Event Format. Each timeline is a process. Each of its ranks has a track for
compute actions, a track for messages and sharding, and a counter of the activations that it holds. Where each peer has
a stream, messages with different peers overlap, and each peer has a track. An arrow leads from each result to the
action on another rank that requires it. The key "ppedu" holds what the format cannot express.

Slices have the name and form that torch.distributed.pipelining gives them in torch.profiler: the name is PP:2F0, "ph"
is "X", and "ts" and "dur" count microseconds. To see a run of torch beside one of ppedu's, join the "traceEvents" of
the files; torch writes a file per rank. Two changes to torch's events are required. Their "ts" counts from a distant
moment, so subtract the smallest "ts" of all PP slices and set what is then negative to 0. And each file needs "pid"s of
its own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

from ppedu.core import COMMUNICATION, Action, produces
from ppedu.sim import Timeline
from ppedu.sim.per_link import PerLink
from ppedu.trace.saved import MICROSECONDS, PREFIX
from ppedu.view.model import Data, Panel

# Viewers round to whole nanoseconds, and drop a slice that then overlaps the next one. Multiples of an eighth of a
# microsecond are whole nanoseconds, and exact as floats.
TICK = 0.125
MOST_PEERS = 8  # of a rank that have a track of their own


def chrome_trace(*timelines: Timeline) -> str:
    """Return timelines as the text of a trace file. The times of each timeline count from its start."""
    arrows = count()
    events: list[Data] = []
    for pid, timeline in enumerate(timelines, 1):
        events += _ranks(timeline, pid, f"{timeline.source} rank" if len(timelines) > 1 else "rank")
        events += _messages(Panel(timeline), pid, arrows)
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "ppedu": list(map(_about, timelines))}, default=float
    )


def _ranks(timeline: Timeline, pid: int, label: str) -> Iterator[Data]:
    """Yield the trace events of each rank: its tracks, its actions and the activations that it holds.

    Args:
        pid: The number of the timeline in the file.
        label: The name of a rank's tracks, before the rank's number.
    """
    name = f"{timeline.source} {timeline.schedule.name}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for rank, row in enumerate(timeline.rows):
        actions = [span.action for span in row if not span.action.computes]
        every_peer = dict.fromkeys(_peer(timeline, rank, action) for action in actions)  # each once, in order
        peers = [*every_peer][:MOST_PEERS] or [None]  # track 0 is for compute actions, and 1 for the first of the peers
        tracks = ["", *(" communication" if peer is None else f" communication {peer}" for peer in peers)]
        for track, what in enumerate(tracks):
            thread = {"ph": "M", "pid": pid, "tid": _tid(rank, track)}
            yield {**thread, "name": "thread_name", "args": {"name": f"{label} {rank}{what}"}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": _tid(rank, track)}}
        for action, start, end in row:
            peer = _peer(timeline, rank, action)
            if action.computes:
                track = 0
            elif peer in peers:
                track = 1 + peers.index(peer)
            else:
                track = 1
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


def _peer(timeline: Timeline, rank: int, action: Action) -> str | None:
    """Return the peer of a message whose track is for messages with this peer only; they may overlap others'."""
    transport = timeline.costs.transport
    if timeline.source != "simulated" or transport not in ("pair", "direction") or action.op not in COMMUNICATION:
        return None
    sender, receiver = timeline.schedule.placement.route(action)
    if transport == "direction":
        return f"to {receiver}" if sender == rank else f"from {sender}"
    return f"with {receiver if sender == rank else sender}"


def sources(panel: Panel) -> list[list[int]]:
    """Return, for each box of a panel, the indices of the boxes whose results it requires."""
    made: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)  # by result: its boxes by microbatch
    for index, box in enumerate(panel.boxes):
        for kind, stage, _ in produces(Action(box.stage, box.op, 0)):
            made[kind, stage][box.microbatch] = index
    found, slices = [], panel.timeline.schedule.slices
    for box in panel.boxes:
        numbers = [(made[kind, stage], box.microbatch + step) for kind, stage, step in panel.needs[box.stage, box.op]]
        same = [each for each in numbers if each[1] // slices == box.microbatch // slices]  # of one sequence
        found.append([indices[m] for indices, m in same if m in indices])
    return found


def _messages(panel: Panel, pid: int, arrows: Iterator[int]) -> Iterator[Data]:
    """Yield an arrow from the end of each action to the start of the one on another rank that requires its result."""
    ranks = panel.timeline.schedule.ranks
    for box, found in zip(panel.boxes, sources(panel), strict=True):
        for source in (panel.boxes[index] for index in found):
            if (source.rank - box.rank) % ranks:
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
    """Return the schedule's name and size, the costs and the source: the part of a timeline that events lack.

    Fractions among the costs are written as floats. Whole numbers stay whole, so that sums of them do.
    """
    schedule, placement = timeline.schedule, timeline.schedule.placement
    costs = vars(timeline.costs.tabulated(schedule.stages, schedule.microbatches))
    links = {name: cost.items() for name, cost in costs.items() if isinstance(cost, PerLink)}
    return {
        "schedule": schedule.name,
        "placement": placement.name,
        "ranks": placement.ranks,
        "chunks": placement.chunks,
        "holders": placement.holders[0],
        "microbatches": schedule.microbatches,
        "slices": schedule.slices,
        "forward_only": schedule.forward_only,
        "steps": len(timeline.steps),
        "source": timeline.source,
        **costs,
        **({"backwards": placement.backwards} if placement.backwards else {}),
        **{name: [[*link, time] for link, time in times] for name, times in links.items()},
    }
