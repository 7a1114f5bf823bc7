"""A frontier as a chart: the best makespan for each memory, beside the published schedules."""

from __future__ import annotations

from typing import Any

from ppedu.core.numeric import pretty
from ppedu.search.frontier import Frontier
from ppedu.view.interactive import Interactive
from ppedu.view.model import Data, Panel
from ppedu.view.why import PROOFS, Told, makespan, peak, why

COLORS = "Blue: proven best; orange: best found; gray: published. Click a point for its timeline."


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
        return {**super().state(), "points": points, "axis": "makespan", "note": [*self._note(), f". {COLORS}"]}

    def _note(self) -> Told:
        """Return what is known of the chosen schedule."""
        frontier = self.frontier
        name, memory, _, timeline = frontier.points[self.chosen]
        held = peak(timeline, pretty(memory))
        if self.chosen < len(frontier.found):
            found = frontier.found[self.chosen]
            held = held._replace(words=["The limit that the search was given for each rank.", *held.words])
            least = f"No schedule is shorter than {pretty(found.bound, timeline.costs.unit)}."
            proven = why(found.state, [least, *(PROOFS[each] for each in found.proofs)])
            return [f"{found.instance}, memory ", held, ": makespan ", makespan(timeline), ", ", proven]
        told: Told = [f"{name}: ", makespan(timeline), " in a memory of ", held]
        better = [each.timeline for each in frontier.found if max(each.timeline.peak_activations) <= memory]
        best = min(better, key=lambda each: each.makespan, default=None)
        return told if best is None else [*told, "; the best in this memory takes ", makespan(best)]

    def text(self) -> str:
        return str(self.frontier)


def bundle(frontier: Frontier) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the MIME bundle with which a notebook displays a frontier."""
    return Chart(frontier)._repr_mimebundle_()
