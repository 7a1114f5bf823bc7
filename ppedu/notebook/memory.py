"""A chart of the memory that one rank's device uses in the course of a step, under one or more schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppedu.core.timeline import Timeline
from ppedu.view.look import MARK

if TYPE_CHECKING:  # matplotlib is imported only when a chart is drawn
    from matplotlib.axes import Axes

FILLS = ("#c3bad8", "#8f7fb8", "#5d4a8f")  # of the timelines, in turn
STATE = "#d4d4d4"


def draw_memory(*timelines: Timeline, rank: int = 0, state: float = 0, limit: float | None = None) -> Axes:
    """Draw the memory of a rank over time as areas, and return the Axes.

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
        times, held = zip(*timeline.memory(rank), (end, 0), strict=True)
        top = [state + float(each) for each in held]
        most, name = max(top), timeline.schedule.name
        ax.fill_between(times, top, state, step="post", color=color, linewidth=0)
        if limit is not None:
            over = [max(limit, each) for each in top]
            ax.fill_between(times, over, limit, step="post", color=MARK, linewidth=0)
        last = max(place for place, each in enumerate(top) if each == most)
        middle = (times[top.index(most)] + times[last + 1]) / 2
        text = ax.annotate(f"{name}: {most:.1f} GB", (middle, most), (0, 5), textcoords="offset points", ha="center")
        text.set(weight="bold", parse_math=False)
    ax.fill_between((0, end), state, color=STATE, linewidth=0)
    if state:
        ax.text(
            end / 2, state / 2, f"weights, gradients, Adam: {state:.1f} GB", ha="center", va="center", color="#16302a"
        )
    if limit is not None:
        ax.axhline(limit, color=MARK, linewidth=1.5)
        ax.annotate(
            f"{limit:g} GB: all that a GPU has", (end, limit), (0, 5), textcoords="offset points", ha="right"
        ).set(color=MARK)
    ax.set(xlabel="seconds", ylabel="GB", xlim=(0, end), ylim=(0, 1.12 * ax.get_ylim()[1]))
    ax.spines[["top", "right"]].set_visible(False)
    return ax
