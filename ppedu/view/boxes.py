"""One timeline's boxes in matplotlib: fills, names, edges, and the critical path."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patheffects import Normal, Stroke

from ppedu.view.look import COLORS, MARK, PATH, ends_of, ink_on, paler, shade
from ppedu.view.model import Box, Panel

LARGEST, SMALLEST = 9.0, 5.0  # points; a text that would be smaller is left out
NAMED = 7.0  # points; a name that would be smaller is replaced by the microbatch alone

Ends = tuple[float, float]  # the top and bottom of the boxes within a rank's row, from 0 to 1


class Boxes:
    """The boxes of a panel's timeline between two heights of each rank's row. The time axis of `ax` must be set."""

    def __init__(self, ax: Axes, panel: Panel, ends: Ends):
        self.ax, self.panel, self.ends = ax, panel, ends
        self.boxes = sorted(panel.boxes, key=lambda box: box.copy)  # so that edges of the second copy stay visible
        extent, (left, right), (bottom, top) = ax.get_window_extent(), ax.get_xlim(), ax.get_ylim()
        per_point = ax.figure.dpi / 72
        # About how many points on the page a unit of time and a rank's row take, before the final layout.
        self.wide, self.high = extent.width / per_point / (right - left), extent.height / per_point / (bottom - top)
        mean = sum(box.end - box.start for box in self.boxes) / max(1, len(self.boxes))
        self.gap = 0.8 if mean * self.wide > 5 else 0.2  # points between neighbors

    def fill(self, *, pale: bool = False) -> list[str]:
        """Fill the boxes, with edges if the fills are pale, and return the color of text on each."""
        chunks = self.panel.timeline.schedule.chunks
        fills = [shade(box.op, box.microbatch, box.chunk, chunks) for box in self.boxes]
        if pale:
            edges, fills = fills, list(map(paler, fills))
            self._draw(self.boxes, 0.4, facecolors=fills, edgecolors=edges, linewidths=0.8)
        else:
            self._draw(self.boxes, facecolors=fills, linewidths=0)
        if copies := [box for box in self.boxes if box.copy]:  # inside the box, to be seen on light and on dark pages
            self._draw(copies, 0.9, facecolors="none", edgecolors="black", linewidths=0.9)
        return list(map(ink_on, fills))

    def outline(self) -> None:
        """Draw only the edges of the boxes."""
        edges = [COLORS[box.op] for box in self.boxes]
        self._draw(self.boxes, facecolors="none", edgecolors=edges, linewidths=0.9)

    def mark(self) -> None:
        """Draw the edges of marked boxes."""
        if marked := [box for box in self.boxes if box.mark]:
            self._draw(marked, 0.4, facecolors="none", edgecolors=MARK, linewidths=1.8)

    def critical_path(self) -> None:
        """Draw the edges of the boxes on the critical path, and lines between those of different ranks.

        White between an edge and its box separates their colors.
        """
        path = [self.panel.boxes[index] for index in self.panel.path]
        self._draw(path, 1.8, facecolors="none", edgecolors="white", linewidths=1)
        self._draw(path, 0.5, facecolors="none", edgecolors=PATH, linewidths=1.7)
        ranks = self.panel.timeline.schedule.ranks
        hops = [(one, other) for one, other in pairwise(path) if (one.rank - other.rank) % ranks]
        lines = [[(one.end, self._middle(one)), (other.start, self._middle(other))] for one, other in hops]
        white = [Stroke(linewidth=2.3, foreground="white"), Normal()]
        self.ax.add_collection(LineCollection(lines, colors=PATH, linewidths=1.5, path_effects=white), autolim=False)

    def number(self, inks: Iterable[str]) -> None:
        """Write into each box its name, such as 2B0, or only the microbatch where the name would be small, or nothing.

        Names have one size, and so have microbatches: that at which nine in ten fit.

        Args:
            inks: The color of each text.
        """
        names = [f"{box.stage}{box.op}{box.microbatch}" for box in self.boxes]
        letters = max(map(len, names), default=0)  # of boxes with one width, all are named, all are numbered, or none
        digits = max((len(str(box.microbatch)) for box in self.boxes), default=0)
        groups: dict[bool, list[tuple[Box, str, str, float]]] = {True: [], False: []}
        for box, name, ink in zip(self.boxes, names, inks, strict=True):
            size, text = self._size(box, letters), name
            named = size >= NAMED
            if not named:
                size, text = self._size(box, digits), str(box.microbatch)
            if size >= SMALLEST:
                groups[named].append((box, text, ink, size))
        style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "clip_on": True}
        for group in filter(None, groups.values()):
            common = sorted(size for *_, size in group)[len(group) // 10]
            for box, text, ink, size in group:
                x, y = (box.start + box.end) / 2, self._middle(box)
                self.ax.text(x, y, text, size=min(size, common), color=ink, **style)

    def _draw(self, subset: Iterable[Box], inside: float = 0, **style: Any) -> None:
        """Draw some of the boxes.

        Args:
            inside: The points from a box's edge to what is drawn.
        """
        corners = []
        for box in subset:
            margin = min((self.gap / 2 + inside) / self.wide, (box.end - box.start) / 5)
            left, right = box.start + margin, box.end - margin
            top, bottom = self._edges(box)
            upper, lower = top + inside / self.high, bottom - inside / self.high
            corners.append([(left, upper), (right, upper), (right, lower), (left, lower)])
        self.ax.add_collection(PolyCollection(corners, **style), autolim=False)

    def _edges(self, box: Box) -> tuple[float, float]:
        """Return the y coordinates of a box's top and bottom; see `ends_of`."""
        ranks, copies = self.panel.timeline.schedule.ranks, bool(self.panel.timeline.schedule.offloaded)
        upper, lower = ends_of(*self.ends, box.part, box.rank >= ranks, copies)
        return box.rank % ranks + upper, box.rank % ranks + lower

    def _middle(self, box: Box) -> float:
        return sum(self._edges(box)) / 2

    def _size(self, box: Box, letters: int) -> float:
        """Return the size in points at which a text of `letters` characters fits into a box."""
        upper, lower = self._edges(box)
        across = (box.end - box.start) * self.wide / (0.62 * letters + 0.35)
        return min(LARGEST, across, (lower - upper) * self.high / 1.25)
