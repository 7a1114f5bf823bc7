"""Schedules and timelines as text: the lockstep table and the text timeline."""

from __future__ import annotations

from itertools import chain
from textwrap import fill
from typing import Any

from ppedu.core.lower import align
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_count


def table(schedule: Schedule) -> str:
    """Return the lockstep grid of `align` as text: a line for each step, a column for each rank, a dot for idle.

    If ranks get stuck, a last line marks the action at which each one does with ✗. The problems of an illegal schedule
    follow, in lines of at most 100 characters.

    Raises:
        SettingError: `schedule` is not a Schedule, or it is lowered.
    """
    grid = align(schedule)
    rows = [["step", *(f"rank {rank}" for rank in range(schedule.ranks))]]
    rows += [
        [str(step), *(str(action or "·") for action in column)] for step, column in enumerate(zip(*grid, strict=True))
    ]
    if blocked := schedule.replay.blocked:
        stuck = {rank: f"✗ {schedule.orders[rank][index]}" for rank, (index, _) in blocked.items()}
        rows.append([str(len(rows) - 1), *(stuck.get(rank, "·") for rank in range(schedule.ranks))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(chain(lines, (fill(str(problem), 100, break_on_hyphens=False) for problem in schedule.problems)))


def draw(timeline: Timeline, width: int = 128) -> str:
    """See `Timeline.text`."""
    width = require_count("width", width)
    ranks, makespan = timeline.schedule.ranks, timeline.makespan
    margin = len(f"rank {ranks - 1} ") + 2
    rows = [[span for span in row if timeline.occupies_rank(span.action)] for row in timeline.rows]
    durations = (span.end - span.start for row in rows for span in row)
    unit = min((each for each in durations if float(each) > 0), default=1)
    columns = 1 + timeline.schedule.chunks + len(str(timeline.schedule.microbatches - 1))
    chunk = timeline.schedule.placement.chunk
    if float(makespan / unit) * columns > width - margin:
        columns = 1
    unit = max(unit / columns, float(makespan) / max(1, width - margin)) or 1

    def column(time: Any) -> int:
        return int(float((time - timeline.start) / unit) + 0.5)

    lines = [timeline.summary()]
    for rank, row in enumerate(rows):
        cells = [" "] * column(timeline.end)
        for action, start, end in row:
            first, last = column(start), column(end)
            if first == last:
                continue
            label = "".join(f"{op}{m}{chr(39) * chunk(stage, m)}" for stage, op, m, _ in action.singles)
            if columns > 1:
                cells[first:last] = f"{label:─<{last - first - 1}}"[: last - first - 1] + " "
            else:
                cells[first:last] = label[0] * (last - first)
        lines.append(f"{f'rank {rank}':<{margin - 2}}│{''.join(cells)}│")
    return "\n".join(lines)
