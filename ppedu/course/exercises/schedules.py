"""Exercises whose answer is a schedule, and pictures of wrong ones.

In the picture, what the feedback names is outlined, and the target is a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from ppedu.core import Action, PipelineError, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises.common import Exercise, learner_schedule, not_legal, tried_on, with_sizes
from ppedu.sim import Costs, Timeline, simulate, simulate_partial
from ppedu.view.look import MARK, ROW

ACTION = re.compile(r"\b\d+[FBIWR]\d+\b")
RANK = re.compile(r"\b[Rr]ank (\d+)")
WAIT = re.compile(r"\b[Rr]ank (\d+) waits ([\d.]+)–([\d.]+)")
PARAMETERS = ["rank", "ranks", "microbatches"]


class Outline(NamedTuple):
    """A part of a picture to outline: a box or gap of a rank, or its memory strip.

    missing: the action that should be there, but is not.
    """

    rank: int
    start: Any
    end: Any
    strip: bool = False
    missing: str = ""


def warmup(order: Sequence[Action]) -> int:
    """Count the forwards before the first backward."""
    return next(place for place, action in enumerate(order) if action.op != "F")


def longest_wait(timeline: Timeline) -> str:
    """Describe the longest wait between two actions of a rank, as a sentence."""
    waits = [
        (after.start - before.end, rank, before.end)
        for rank, row in enumerate(timeline.rows)
        for before, after in pairwise(row)
    ]
    _, rank, time = max(waits, key=lambda wait: wait[0])
    return f"Look at the longest wait: {timeline.why_idle(rank, time)}"


def worse_than(best: Timeline, case: str, timeline: Timeline) -> str | None:
    """Explain that a legal schedule holds more than `best`, or takes longer; return None if it does neither."""
    held, allowed = max(timeline.peak_activations), max(best.peak_activations)
    if held > allowed:
        rank = timeline.peak_activations.index(held)
        forwards = plural(warmup(timeline.schedule.orders[rank]), "forward")
        return (
            f"{case} your schedule is legal, but rank {rank} holds {pretty(held)} microbatches at its peak, where "
            f"{pretty(allowed)} would do: it runs {forwards} before its first backward"
        )
    if timeline.makespan > best.makespan:
        return (
            f"{case} your schedule is legal, but takes {pretty(timeline.makespan)}, where {pretty(best.makespan)} "
            f"is possible. {longest_wait(timeline)}"
        )
    return None


def schedule_exercise(
    cases: Sequence[tuple[int, ...]],
    fault_of: Callable[..., str | None],
    praise: str | Callable[[Any], str],
    hints: tuple[str, ...],
    costs: Costs | None = None,
    best: Callable[..., Timeline] | None = None,
    room: Callable[..., int] | None = None,
    why_illegal: Callable[[Schedule, str], str] = lambda yours, fault: fault,
    nothing: str = "",
    score: Callable[[Any], dict[str, float | None]] | None = None,
    cut: str = "chunks",
) -> Exercise:
    """Return an exercise whose answer is the generator of a schedule.

    The schedule must be legal in all cases. A wrong one is drawn, and a right one for the first case.

    Args:
        cases: The arguments for which the answer is checked, after the rank: ranks, microbatches and, if any, `cut`.
        fault_of: `fault_of(case, timeline, *sizes)` explains what is wrong with a legal schedule; else None.
        costs: Those of the simulation.
        best, room: As in `wrong_schedule`.
        why_illegal: `why_illegal(yours, fault)` returns the explanation of a schedule that is not legal, from the
            checker's.
        nothing: Added to the explanation of a generator that yields nothing.
        cut: "chunks" or "slices".
    """

    def wrong(case: str, yours: Schedule, *sizes: int) -> str | None:
        if fault := not_legal(yours, case, nothing):
            return why_illegal(yours, fault)
        return fault_of(case, simulate(yours, costs), *sizes)

    def reward(generator: Any) -> Timeline:
        return simulate(learner_schedule(generator, *cases[0], cut=cut), costs)

    parameters = [*PARAMETERS, cut][: 1 + len(cases[0])]
    return Exercise(
        tried_on(cases, parameters, partial(with_sizes, cut=cut), wrong, answer_of=partial(built, cut=cut)),
        praise,
        reward,
        hints,
        wrong_schedule(cases, costs, best, room, cut),
        score,
    )


def built(generator: Any, _: str, *sizes: int, cut: str = "chunks") -> Schedule:
    """Build the learner's schedule; an `answer_of` for `tried_on`."""
    return learner_schedule(generator, *sizes, cut=cut)


def wrong_schedule(
    cases: Sequence[tuple[int, ...]],
    costs: Costs | None = None,
    best: Callable[..., Timeline] | None = None,
    room: Callable[..., int] | None = None,
    cut: str = "chunks",
) -> Callable[[Any, str], None]:
    """Return the `draw_wrong` of an exercise whose answer is the generator of a schedule.

    It draws the case in which the answer is wrong, and outlines what the sentence names: an action, a wait such as
    "rank 3 waits 9–10", or else memory above the limit, or the first wait in which the target has a rank work more.

    Args:
        best: `best(*case)` returns the target, whose makespan is drawn as a line.
        room: `room(*case)` returns the activations that a rank may hold; by default, the peak of `best`.
    """

    def draw(answer: Any, wrong: str) -> None:
        case = next((case for case in cases if with_sizes(*case, cut=cut) in wrong), None)
        if case is None:
            return
        try:
            yours = simulate_partial(learner_schedule(answer, *case, cut=cut), costs or Costs())
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
    line = f"; dashed: the mark, {pretty(target.makespan)}" if target else ""
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
