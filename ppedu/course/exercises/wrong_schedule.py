"""Draw a learner's wrong schedule: what the feedback names is outlined, and the target is a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ppedu.core import PipelineError, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises.common import learner_schedule, with_sizes
from ppedu.sim import Costs, Timeline, simulate_partial
from ppedu.view.look import MARK, ROW

ACTION = re.compile(r"\b\d+[FBIW]\d+\b")
RANK = re.compile(r"\b[Rr]ank (\d+)")
WAIT = re.compile(r"\b[Rr]ank (\d+) waits ([\d.]+)–([\d.]+)")
Draw = Callable[[Any, str], None]  # of a learner's answer, and the sentence that explains what is wrong with it


class Outline(NamedTuple):
    """A part of a picture to outline: a box or gap of a rank, or its memory strip.

    missing: the action that should be there, but is not.
    """

    rank: int
    start: Any
    end: Any
    strip: bool = False
    missing: str = ""


def wrong_schedule(
    cases: Sequence[Sequence[int]],
    costs: Costs | None = None,
    best: Callable[..., Timeline] | None = None,
    room: Callable[..., int] | None = None,
    made: Callable[..., Schedule] = learner_schedule,
) -> Draw:
    """Return the `draw_wrong` of an exercise whose answer is the generator of a schedule.

    It draws the case in which the answer is wrong, and outlines what the sentence names: an action, a wait such as
    "rank 3 waits 9–10", or else memory above the limit, or the first wait in which the target has a rank work more.

    Args:
        cases: The arguments for which the answer is checked: ranks, microbatches and, if any, chunks.
        best: `best(*case)` returns the target, whose makespan is drawn as a line.
        room: `room(*case)` returns the activations that a rank may hold; by default, the peak of `best`.
        made: `made(answer, *case)` returns the learner's schedule.
    """

    def is_named(sentence: str, ranks: int, microbatches: int, *chunks: int) -> bool:
        return with_sizes(ranks, microbatches, *(plural(each, "chunk") for each in chunks)) in sentence

    def draw(answer: Any, wrong: str) -> None:
        case = next((case for case in cases if is_named(wrong, *case)), None)
        if case is None:
            return
        try:
            yours = simulate_partial(made(answer, *case), costs or Costs())
        except PipelineError:  # there is not a schedule that could be drawn
            return
        target = best(*case) if best else None
        limits = [room(*case)] * yours.schedule.ranks if room else target.peak_activations if target else None
        faults = list(_faults(wrong, yours, target, limits))
        if faults or any(yours.rows):
            _plot(yours, faults, target)

    return draw


def _faults(wrong: str, yours: Timeline, target: Timeline | None, limits: Sequence[Any] | None) -> Iterator[Outline]:
    """Find what to outline in the picture of a wrong schedule."""
    over = _over(yours, limits) if limits and not yours.schedule.problems else None
    if over:
        yield over
    if wait := WAIT.search(wrong):
        yield Outline(int(wait[1]), float(wait[2]), float(wait[3]))
    elif action := ACTION.search(wrong):
        yield _named(action[0], int(found[1]) if (found := RANK.search(wrong)) else None, yours)
    elif target and not over and (gap := _first_behind(yours, target)):
        yield gap


def _over(yours: Timeline, limits: Sequence[Any]) -> Outline | None:
    """Outline the first memory strip that exceeds its limit, from the first to the last time at which it does."""
    for rank, limit in enumerate(limits):
        curve = yours.memory(rank)
        above = [place for place, (_, held) in enumerate(curve) if held > limit]
        if above:
            ends = [time for time, _ in curve[1:]] + [yours.end]
            return Outline(rank, curve[above[0]][0], ends[above[-1]], strip=True)
    return None


def _named(name: str, rank: int | None, yours: Timeline) -> Outline:
    """Outline an action; one that is not in the timeline has a box after the last action of its rank."""
    for place, row in enumerate(yours.rows):
        for action, start, end in row:
            if str(action) == name and rank in (place, None):
                return Outline(place, start, end)
    rank = rank or 0
    free = max((span.end for span in yours.rows[rank]), default=0)
    return Outline(rank, free, free + 1, missing=name)


def _first_behind(yours: Timeline, target: Timeline) -> Outline | None:
    """Outline the first gap in which the target has the rank work more, from the start to the gap's end."""

    def worked(timeline: Timeline, rank: int, until: Any) -> Any:
        return sum(max(0, min(span.end, until) - span.start) for span in timeline.rows[rank])

    gaps = (gap for gap in yours.gaps() if worked(target, gap.rank, gap.end) > worked(yours, gap.rank, gap.end))
    first = min(gaps, key=lambda gap: gap.start, default=None)
    return first and Outline(first.rank, first.start, first.end)


def _plot(yours: Timeline, faults: Sequence[Outline], target: Timeline | None) -> None:
    from matplotlib.patches import Rectangle

    until = max([target.makespan if target else 0, *(float(fault.end) for fault in faults)])
    line = f"; dashed: to reach, {pretty(target.makespan)}" if target else ""
    ax = yours.plot(title=f"Yours, {yours.schedule.size}{line}", until=until)
    if target:
        ax.axvline(float(target.makespan), color="gray", linestyle="--", linewidth=1.2)
    for rank, start, end, strip, missing in faults:
        top, bottom = (ROW["strip"], ROW["floor"]) if strip else (ROW["top"], ROW["bottom"])
        corner, wide = (float(start), rank + top), float(end - start)
        style = "--" if missing else "-"
        box = Rectangle(corner, wide, bottom - top, fill=False, edgecolor=MARK, linewidth=2, linestyle=style, zorder=5)
        ax.add_patch(box)
        middle = float(start) + wide / 2, rank + (top + bottom) / 2
        ax.text(*middle, missing, color=MARK, size=9, ha="center", va="center_baseline")
