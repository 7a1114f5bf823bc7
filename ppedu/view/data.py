"""What the browser needs to draw a timeline: numbers and sentences, in columns. Needs the standard library alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ppedu.core.actions import COMPUTE
from ppedu.core.dependencies import Result, produces, requires
from ppedu.core.errors import SettingError
from ppedu.core.garbage import without_gc
from ppedu.core.numeric import plural, pretty
from ppedu.core.timeline import Span, Timeline
from ppedu.view.palette import COLORS, DARKER, LIGHTER, MEMORY, NAMES

LOOK = {"colors": COLORS, "names": NAMES, "memory": MEMORY, "lighter": LIGHTER, "darker": DARKER}

Data = dict[str, Any]


@without_gc
def panel(
    timeline: Timeline,
    *,
    title: str | None = None,
    cap: Any = None,
    marks: Iterable[tuple[int, int]] = (),
    until: Any = 0,
    readable: tuple[int, str] | None = None,
) -> Data:
    """One timeline. Times count from its start, in the unit that people read, or in the one that is given.

    boxes: columns, an entry for each action; the parts of an overlapped pair are entries of their own, with `part` 1
        and 2. `step` is the action's position in its rank's order.
    needs: for each box, the boxes that made what it needs.
    gaps: rank, start, end and the reason of each time in which a rank does nothing.
    cap: the most activations that a rank may hold, drawn as a line.
    marks: the actions to be marked, as a rank and a position in its order.
    until: the axis reaches to this time at least.
    readable: as `Timeline.readable` has it; timelines on one axis have one unit.
    """
    drawn = _in_floats(timeline)
    schedule, (factor, unit), zero = timeline.schedule, readable or timeline.readable, drawn.start
    placement = schedule.placement
    copies, split = placement.copies, placement.split

    def clock(time: Any) -> float:
        return round((time - zero) * factor, 9)

    entries: list[tuple[Any, ...]] = []
    maker: dict[Result, int] = {}
    wanted: list[tuple[Result, ...]] = []
    first: dict[tuple[int, int], int] = {}  # of a rank's compute spans, as the critical path counts them
    marked = set(marks)
    chunks = [[holders[:stage].count(rank) for stage, rank in enumerate(holders)] for holders in placement.holders]
    for rank, row in enumerate(drawn.rows):
        count = 0
        for step, (action, start, end) in enumerate(row):
            if not action.computes:
                continue
            first[rank, count] = len(wanted)
            count += 1
            left, right, mark = clock(start), clock(end), int((rank, step) in marked)
            for part, single in enumerate(action.singles, 1):
                stage, op, m, _ = single
                if op not in COMPUTE:
                    continue
                for result in produces(single):
                    maker[result] = len(wanted)
                wanted.append(requires(single, placement))
                copy = int(copies > 1 and m >= split)  # as Placement.copy has it, without a call
                chunk = chunks[copy][stage]
                entry = (rank, left, right, op, stage, m, chunk, copy, part if action.parts else 0, step, mark)
                entries.append(entry)
    held = [timeline.memory(rank) for rank in range(schedule.ranks)]
    return {
        "title": title or f"{schedule.name}, {schedule.size}",
        "source": timeline.source,
        "summary": timeline.summary(),
        "unit": unit,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "copies": placement.copies,
        "microbatches": schedule.microbatches,
        "makespan": clock(drawn.end),
        "numbers": [
            ["makespan", pretty(timeline.makespan, timeline.costs.unit)],
            ["bubble", f"{timeline.bubble:.1%}"],
            ["peak memory", pretty(max(timeline.peak_activations))],
        ],
        "boxes": dict(
            zip(_COLUMNS, map(list, zip(*entries, strict=True)) if entries else [[]] * len(_COLUMNS), strict=True)
        ),
        "needs": [[maker[need] for need in each if need in maker] for each in wanted],
        "gaps": [
            [rank, clock(start), clock(end), why]
            for rank, start, end, why in drawn.gaps()
            if clock(end) > clock(start)  # and not for what rounding leaves of floats
        ],
        "memory": [[[clock(float(time)) for time, _ in steps], [float(value) for _, value in steps]] for steps in held],
        "peaks": [pretty(peak) for peak in timeline.peak_activations],
        "until": float(until * factor),
        "cap": None if cap is None else float(cap),
        "path": [first[place] for place in drawn.reasons.critical_path(drawn.costs.latency)],
    }


def require_outline(outline: Any, ranks: int) -> None:
    """Raise SettingError unless `outline` is None or a timeline of `ranks` ranks."""
    if outline is None or (isinstance(outline, Timeline) and outline.schedule.ranks == ranks):
        return
    wanted = f"a timeline of {plural(ranks, 'rank')}, such as simulate(schedule)"
    raise SettingError(f"outline must be {wanted}; got {outline!r}")


def _in_floats(timeline: Timeline) -> Timeline:
    """The same; fractions would be exact, and slow. What was equal stays equal."""
    if not any(isinstance(span.end, Fraction) for row in timeline.rows for span in row):
        return timeline
    rows = tuple(tuple(Span(action, float(start), float(end)) for action, start, end in row) for row in timeline.rows)
    return replace(timeline, rows=rows, costs=replace(timeline.costs, latency=float(timeline.costs.latency)))


_COLUMNS = ("rank", "start", "end", "op", "stage", "microbatch", "chunk", "copy", "part", "step", "mark")
