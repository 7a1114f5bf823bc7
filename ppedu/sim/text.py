"""Timelines as text."""

from __future__ import annotations

from typing import Any

from ppedu.core import Schedule, ScheduleError
from ppedu.core.validate import require_count
from ppedu.sim.simulation import simulate
from ppedu.sim.timeline import Timeline


def draw_schedule(schedule: Schedule) -> str:
    """See `Schedule.__str__`."""
    try:
        return draw(simulate(schedule))
    except ScheduleError as error:
        return str(error)


def draw(timeline: Timeline, width: int = 128) -> str:
    """See `Timeline.text`."""
    width = require_count("width", width)
    ranks, makespan = timeline.schedule.ranks, timeline.makespan
    margin = len(f"rank {ranks - 1} ") + 2
    rows = [[span for span in row if timeline.occupies_rank(span.action)] for row in timeline.rows]
    durations = (span.end - span.start for row in rows for span in row)
    shortest = min((each for each in durations if float(each) > 0), default=1)
    # The columns of the shortest action: a letter, its microbatch, a ' for each chunk but the first, and a space.
    columns = 1 + timeline.schedule.chunks + len(str(timeline.schedule.microbatches - 1))
    if float(makespan / shortest) * columns > width - margin:
        columns = 1
    unit = max(shortest / columns, float(makespan) / max(1, width - margin)) or 1  # the time of a column
    chunk = timeline.schedule.placement.chunk

    def column(time: Any) -> int:
        return int(float((time - timeline.start) / unit) + 0.5)

    lines = [timeline.summary()]
    for rank, row in enumerate(rows):
        cells = [" "] * column(timeline.end)
        for action, start, end in row:
            first, last = column(start), column(end)
            if first == last:
                continue
            label = ""
            for stage, op, m, _ in action.singles:
                label += f"{op}{m}" + "'" * chunk(stage, m)
            if columns > 1:
                space = last - first - 1
                cells[first:last] = label[:space].ljust(space, "─") + " "
            else:
                cells[first:last] = label[0] * (last - first)
        name = f"rank {rank}".ljust(margin - 2)
        lines.append(f"{name}│{''.join(cells)}│")
    return "\n".join(lines)
