"""A frontier as a chart: the best makespan for each memory, beside the published schedules."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ppedu.core.numeric import pretty
from ppedu.search.frontier import Frontier
from ppedu.view.interactive import Interactive
from ppedu.view.model import Data, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = "Blue: proven best; orange: best found; gray: published. Click a point for its timeline."
PUBLISHED, PROVEN, OPEN = "#8a8a8a", "#3b76b8", "#c2701c"


class Chart(Interactive):
    """The chart of a frontier, and the timeline of the schedule that was clicked last."""

    kind = "frontier"

    def __init__(self, frontier: Frontier):
        super().__init__()
        self.frontier = frontier
        self.chosen = 0

    def panels(self) -> list[Panel]:
        return [Panel(self.frontier.points[self.chosen][-1])]

    def handle(self, message: dict[str, Any]) -> None:
        """Show the timeline of a point."""
        match message:
            case {"point": int(point)} if 0 <= point < len(self.frontier.points):
                self.chosen = point
                self.refresh()

    def state(self) -> Data:
        frontier = self.frontier
        points = []
        for index, (name, memory, value, _) in enumerate(frontier.points):
            found = index < len(frontier.found)
            kind = f"{name if found else 'published'}{' chosen' if index == self.chosen else ''}"
            points.append(["" if found else name, float(memory), float(value), kind])
        return {**super().state(), "points": points, "axis": "makespan", "note": f"{self._note()}. {COLORS}"}

    def _note(self) -> str:
        frontier = self.frontier
        if self.chosen < len(frontier.found):
            return str(frontier.found[self.chosen])
        name, memory, value, _ = frontier.points[self.chosen]
        better = [each for each in frontier.found if max(each.timeline.peak_activations) <= memory]
        best = min((each.makespan for each in better), default=None)
        beside = "" if best is None else f"; the best in this memory takes {pretty(best)}"
        return f"{name}: {pretty(value)} in a memory of {pretty(memory)}{beside}"

    def text(self) -> str:
        return str(self.frontier)


def _label(ax: Axes, names: dict[tuple[float, float], str]) -> None:
    """Write names beside their points, where they cover no other name."""
    taken: list[tuple[float, float, float]] = []  # left, right and middle of points and names, on the page
    for point in names:
        left, middle = ax.transData.transform(point) * 72 / ax.figure.dpi
        taken.append((left - 3, left + 3, middle))
    for (x, y), name in sorted(names.items()):
        left, middle = ax.transData.transform((x, y)) * 72 / ax.figure.dpi
        width = 4.6 * len(name)
        for down in (0, 9, -9, 18, -18, 27):
            place = left + 5, left + 5 + width, middle - down
            if all(place[1] < a or b < place[0] or abs(place[2] - at) > 8 for a, b, at in taken):
                break
        taken.append(place)
        ax.annotate(name, (x, y), xytext=(5, -down), textcoords="offset points", fontsize=8, va="center")


def bundle(frontier: Frontier) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the MIME bundle with which a notebook displays a frontier."""
    return Chart(frontier)._repr_mimebundle_()


def plot(frontier: Frontier, ax: Axes | None = None) -> Axes:
    """Draw a frontier with matplotlib; see `Frontier.plot`."""
    from matplotlib import pyplot

    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 4), layout="constrained")
    own = frontier.points[: len(frontier.found)]
    found = [(status, float(memory), float(value)) for status, memory, value, _ in own]
    _, memories, values = zip(*found, strict=True)
    bounds = [float(each.bound) for each in frontier.found]
    ax.step(memories, bounds, where="post", color=PROVEN, linewidth=1, linestyle=":", label="no schedule is below")
    ax.step(memories, values, where="post", color=PROVEN, linewidth=1)
    for wanted, color, label in (("optimal", PROVEN, "proven best"), ("feasible", OPEN, "best found")):
        if chosen := [(memory, value) for status, memory, value in found if status == wanted]:
            ax.scatter(*zip(*chosen, strict=True), color=color, zorder=3, label=label)
    names: defaultdict[tuple[float, float], list[str]] = defaultdict(list)
    for name, memory, value, _ in frontier.points[len(frontier.found) :]:
        names[float(memory), float(value)].append(name)
    ax.scatter([x for x, _ in names], [y for _, y in names], color=PUBLISHED, s=16, zorder=2)
    _label(ax, {place: ", ".join(each) for place, each in names.items()})
    unit = frontier.found[0].instance.costs.unit
    ax.set_xlabel("peak activations of a rank")
    ax.set_ylabel(f"makespan ({unit})" if unit else "makespan")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax
