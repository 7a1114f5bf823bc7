"""Charts of the memory that one rank's device uses in the course of a step, under one or more schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppedu.sim import Timeline
from ppedu.view.look import MARK, ink_on, paler, shade

if TYPE_CHECKING:  # matplotlib is imported only when a chart is drawn
    from matplotlib.axes import Axes

FILLS = ("#c3bad8", "#8f7fb8", "#5d4a8f")  # of the timelines, in turn
STATE = "#d4d4d4"
ON_FILL = "#16302a"  # text on these


def draw_memory(*timelines: Timeline, rank: int = 0, state: float = 0, limit: float | None = None) -> Axes:
    """Draw the memory of a rank over time as areas, and return the Axes.

    Args:
        timelines: at most three, the largest first; simulated with costs whose activations are in GB.
        state: in GB, what the device holds all the time: weights, gradients and the optimizer's averages.
        limit: in GB; memory over it is red.

    Raises:
        SettingError: a timeline does not have this rank.
    """
    from matplotlib import pyplot

    _, ax = pyplot.subplots(figsize=(11, 3.6), layout="constrained")
    end = max(float(timeline.end) for timeline in timelines)
    for timeline, color in zip(timelines, FILLS, strict=False):
        curve = [*timeline.memory(rank), (end, 0)]
        times = [time for time, _ in curve]
        top = [state + float(held) for _, held in curve]
        most, name = max(top), timeline.schedule.name
        ax.fill_between(times, top, state, step="post", color=color, linewidth=0)
        if limit is not None:
            over = [max(limit, each) for each in top]
            ax.fill_between(times, over, limit, step="post", color=MARK, linewidth=0)
        peaks = [place for place, each in enumerate(top) if each == most]
        middle = (times[peaks[0]] + times[peaks[-1] + 1]) / 2
        text = ax.annotate(f"{name}: {most:.1f} GB", (middle, most), (0, 5), textcoords="offset points", ha="center")
        text.set(weight="bold", parse_math=False)
        if timeline is not timelines[0]:
            text.set(color=ON_FILL)  # it lies on a larger area
    ax.fill_between((0, end), state, color=STATE, linewidth=0)
    if state:
        words = f"weights, gradients, Adam: {state:.1f} GB"
        ax.text(end / 2, state / 2, words, ha="center", va="center", color=ON_FILL)
    if limit is not None:
        ax.axhline(limit, color=MARK, linewidth=1.5)
        words = f"{limit:g} GB: all that a GPU has"
        ax.annotate(words, (end, limit), (0, 5), textcoords="offset points", ha="right", color=MARK)
    ax.set(xlabel="seconds", ylabel="GB", xlim=(0, end), ylim=(0, 1.12 * ax.get_ylim()[1]))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def draw_phases(*timelines: Timeline, ends: Mapping[str, float], rank: int = 0) -> None:
    """Draw a rank's actions and the activations it holds as they grow: a row per timeline, a column per phase.

    Args:
        ends: the end of each phase of the last timeline by its name, in order. A column shows all until then, earlier
            phases in paler colors.

    Raises:
        SettingError: a timeline does not have this rank.
    """
    from matplotlib import pyplot

    shape = len(timelines), len(ends)
    _, axes = pyplot.subplots(
        *shape, figsize=(11, 1.9 * len(timelines)), layout="constrained", sharex=True, sharey=True
    )
    for row, timeline in zip(axes.reshape(shape), timelines, strict=True):
        curve, before = timeline.memory(rank), 0.0
        for ax, (phase, now) in zip(row, ends.items(), strict=True):
            times = sorted({before, *(time for time, _ in curve if time < now)})
            held = []
            for time in times:
                _, latest = max((at, each) for at, each in curve if at <= time)
                held.append(latest)
            times, held = [*times, now], [*held, held[-1]]
            ax.fill_between(times, held, step="post", color=FILLS[0], linewidth=0)
            ax.fill_between(times, held, step="post", where=[t >= before for t in times], color=FILLS[1], linewidth=0)
            for action, start, end in timeline.spans(rank):
                if end <= now:
                    fill = shade(action.op, action.microbatch, 0, 1)
                    fill = fill if start >= before else paler(fill)
                    ax.barh(-1, end - start, left=start, height=1.3, color=fill, edgecolor="white", linewidth=0.5)
                    middle = (start + end) / 2, -1.05
                    ax.text(*middle, action.microbatch, ha="center", va="center", fontsize=6, color=ink_on(fill))
            when = phase if timeline is timelines[-1] else "meanwhile"
            ax.set_title(f"{timeline.schedule.name}, {when}", fontsize=10, loc="left")
            ax.set_title(f"most held: {max(held):g}", fontsize=9, loc="right")
            ax.spines[["top", "right"]].set_visible(False)
            before = now
    axes.flat[0].set(ylabel="held")
    peaks = {float(timeline.peak_activations[rank]) for timeline in timelines}
    axes.flat[0].set(xlim=(0, now), ylim=(-1.8, None), yticks=sorted({0, *peaks}))
