"""Timelines in matplotlib: time runs right, rank 0 is on top, and idle time is the background."""

from __future__ import annotations

from collections.abc import Collection
from io import BytesIO
from numbers import Real
from typing import Any

from ppedu.core.actions import Op
from ppedu.core.errors import SettingError
from ppedu.core.numeric import pretty
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_instance
from ppedu.view.label import label
from ppedu.view.look import COLORS, MARK, MEMORY, ROW, ink_on, shade
from ppedu.view.model import Box, Panel, Stack

try:
    from matplotlib import pyplot, rc_context, rcParams
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import ScaledTranslation

    from ppedu.view.theme import saved_colors, still_colors
except ImportError as error:
    raise SettingError(f"pictures need {error.name}, which is not installed; pip install 'ppedu[plot]'") from error

LARGEST, SMALLEST = 9.0, 5.0  # points; a text that would be smaller is left out
NAMED = 7.0  # points; names that would be smaller are replaced by the microbatch alone


def plot(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    outline: Timeline | None = None,
    memory: float | bool = True,
    title: str | None = None,
    legend: bool = True,
    marks: Collection[tuple[int, int]] = (),
    until: float = 0,
) -> Axes:
    """Draw a timeline and return its Axes.

    ax: where to draw; a new figure by default.
    outline: another timeline with the same number of ranks, drawn as outlines above this one's boxes: the simulation
        of a measured run.
    memory: whether a strip under each rank shows its activations, with the scale at its left and the peak at its
        right. All ranks share one scale, on which the highest peak fills the strip. Pass a number to let that number
        fill the strip instead, so that pictures can be compared.
    title: replaces the schedule's name and size. Makespan, bubble and peak memory are always shown beside it, and
        "emulated" after it if the times were emulated.
    legend: whether to draw a legend below the timeline. In a figure of several timelines, one is enough.
    marks: actions to mark with a red edge, each as a rank and a position in its order.
    until: a time that the axis must reach.

    Raises:
        SettingError: an option has the wrong type, or `outline` has another number of ranks.
    """
    require_instance("title", title or "", str, "text")
    require_instance("memory", memory or 0, Real, "True, False or the number that fills the strip")
    require_instance("until", until, Real, "a time")
    require_instance("marks", marks, Collection, "a collection of ranks and positions, such as {(0, 3)}")
    require_instance("ax", ax, (Axes, type(None)), "one matplotlib Axes, such as axes[0] of several")
    stack = Stack([Panel(timeline, title, outline, marks=marks, until=until)])
    if ax is None:
        _, ax = pyplot.subplots(figsize=(11, _height(stack.panels[0])), layout="constrained")
    most = None if not memory else stack.most if memory is True else memory
    _draw(stack.panels[0], ax, stack.end, most)
    if legend:
        _legend(ax, stack, bool(memory))
    return ax


def _draw(panel: Panel, ax: Axes, end: float, most: float | None, bare: bool = False) -> None:
    """Draw a panel without its legend.

    end: the time axis reaches at least to this time.
    most: the number of activations at the top of a memory strip; None for no strips.
    bare: whether makespan, bubble and peak memory are left out.
    """
    ranks, unit = panel.timeline.schedule.ranks, panel.timeline.costs.unit
    bottom = ROW["floor"] if most is None else ROW["bottom"]
    # Names, titles and units are the user's: a $ in one of them is a dollar sign and does not start a formula.
    plain: dict[str, Any] = {"parse_math": False}
    ax.set(ylim=(ranks, 0), yticks=[rank + (ROW["top"] + bottom) / 2 for rank in range(ranks)])
    ax.tick_params(length=0, labelsize=9)
    ax.set_yticklabels([f"rank {rank}" for rank in range(ranks)], fontsize=min(9.0, 280 / ranks))
    ax.update_datalim([(0, 0), (end, ranks)])
    ax.autoscale(axis="x", tight=True)  # set_xlim would ignore the other timelines on a shared axis
    milliseconds = unit == "s" and ax.get_xlim()[1] < 1
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(lambda time, _: f"{time * (1000 if milliseconds else 1):g}")
    for each in ax.get_shared_x_axes().get_siblings(ax):
        # Timelines on one axis share its unit. An axis whose tick labels the figure leaves out needs none.
        if (each is ax or each.get_xlabel()) and each.xaxis.get_tick_params().get("labelbottom", True):
            counted = label(f"time, {'ms' if milliseconds else unit}" if unit else "time")
            each.set_xlabel(counted, fontsize=9, loc="right", **plain)
    ax.spines[["top", "right", "left"]].set_visible(False)

    boxes = sorted(panel.boxes, key=lambda box: box.copy)  # so that the edges of the second copy stay visible
    wide, high = _points(ax)
    gap = 0.8 if boxes and sum(box.end - box.start for box in boxes) / len(boxes) * wide > 5 else 0.2
    chunks, top = panel.timeline.schedule.chunks, ROW["lane" if panel.outline else "top"]
    fills = [shade(box.op, box.microbatch, box.chunk, chunks) for box in boxes]

    def draw(subset: list[Box], ends: tuple[float, float], inside: float = 0, **style: Any) -> None:
        """Draw boxes between these heights within a row. `inside`: the points from a box's edge to what is drawn."""
        corners = []
        for box in subset:
            margin = min((gap / 2 + inside) / wide, (box.end - box.start) / 5)
            left, right = box.start + margin, box.end - margin
            upper, lower = (y + inside / high * way for y, way in zip(_edges(box, *ends), (1, -1), strict=True))
            corners.append([(left, upper), (right, upper), (right, lower), (left, lower)])
        ax.add_collection(PolyCollection(corners, **style), autolim=False)

    draw(boxes, (top, bottom), facecolors=fills, linewidths=0)
    if any(box.copy for box in boxes):  # inside the box, to be seen on light and on dark pages
        copies = [box for box in boxes if box.copy]
        draw(copies, (top, bottom), 0.9, facecolors="none", edgecolors="black", linewidths=0.9)
    if panel.outline:
        outlined = Panel(panel.outline).boxes
        edges = [COLORS[box.op] for box in outlined]
        draw(outlined, (ROW["top"], top - 0.03), facecolors="none", edgecolors=edges, linewidths=0.9)
    if panel.marks:
        marked = [box for box in boxes if box.mark]
        draw(marked, (top, bottom), 0.4, facecolors="none", edgecolors=MARK, linewidths=1.8)
    _number(ax, boxes, list(map(ink_on, fills)), (top, bottom), wide, high)
    if most is not None:
        _memory(ax, panel, end, most)
    ax.set_title(label(panel.heading), loc="left", fontsize=11, weight="bold", **plain)
    numbers = "" if bare else "    ".join(f"{name} {number}" for name, number in panel.numbers.items())
    ax.set_title(label(numbers), loc="right", fontsize=10, **plain)


def _legend(ax: Axes, stack: Stack, memory: bool) -> None:
    """Draw the legend of a stack below the left corner of `ax`. `memory`: whether memory strips are drawn."""
    ink = rcParams["text.color"]
    tones: dict[str, Any] = {op: tuple(Patch(color=fill) for fill in fills) for op, fills in stack.fills.items()}
    swatches: dict[str, Any] = {
        **tones,
        "chunk": Patch(color=shade(Op.F, 0, 1, 2)),
        "copy": Patch(facecolor=COLORS[Op.F], edgecolor="black", linewidth=1.2),
        "memory": Patch(color=MEMORY),
        "outline": Patch(facecolor="none", edgecolor=COLORS[Op.F], linewidth=1.2),
        "cap": Line2D([], [], color=ink, linewidth=0.8),
        "mark": Patch(facecolor="none", edgecolor=MARK, linewidth=1.8),
    }
    entries = {key: label(words) for key, words in stack.legend.items() if memory or key not in ("memory", "cap")}
    legend = ax.legend(
        [swatches[key] for key in entries],
        entries.values(),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + ScaledTranslation(-0.07, -0.28, ax.figure.dpi_scale_trans),
        borderaxespad=0,
        ncols=len(entries),
        frameon=False,
        fontsize=9,
        handlelength=max([1.0, *(0.7 * len(fills) for fills in tones.values())]),
        handleheight=1,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def picture(stack: Stack, kind: str) -> bytes:
    """Return a picture as the bytes of a file; `kind` is "svg", "png" or "pdf".

    The background is white unless the learner has set another colour. The text in an SVG can be searched and copied.
    Drawing the same timelines again gives the same bytes.
    """
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ppedu", **saved_colors()}):
        metadata = {"Date": None} if kind == "svg" else None
        fixed = len(stack.panels) > 1
        drawn = _drawn(stack, fixed, format=kind, bbox_inches="tight", dpi=200, metadata=metadata)
    if kind == "svg":  # the numbers are separated by several spaces, which XML would join
        return drawn.replace(b"<text ", b'<text xml:space="preserve" ')
    return drawn


def png(stack: Stack) -> bytes:
    """Return a PNG picture for a notebook, drawn faster than by `picture` and with a lower resolution.

    It has no background and grey text, because pages are light or dark. The margins are fixed, because measuring them
    takes several times as long as drawing.
    """
    with rc_context(still_colors()):
        return _drawn(stack, fixed=True, format="png", dpi=110)


def _drawn(stack: Stack, fixed: bool, **options: Any) -> bytes:
    """Draw the panels under each other, on one time axis and with one legend, and return the bytes of an image file.

    fixed: whether the margins are fixed; otherwise they are measured.
    options: as for `Figure.savefig`.
    """
    heights = [_height(panel) for panel in stack.panels]
    high = sum(heights)
    figure = Figure(figsize=(11, high), layout=None if fixed else "constrained")  # pyplot would keep its figures
    axes = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)[:, 0]
    axes[-1].update_datalim([(0, 0), (stack.end, 0)])  # the size of numbers depends on the axis's final width
    for ax, panel in zip(axes, stack.panels, strict=True):
        ax.tick_params(axis="x", labelbottom=True)
        _draw(panel, ax, stack.end, None if stack.bare else stack.most, stack.bare)
    _legend(axes[-1], stack, memory=not stack.bare)
    if fixed:
        hspace = 0.7 * len(heights) / (high - 1)
        figure.subplots_adjust(0.065, 0.6 / high, 0.935, 1 - 0.3 / high, hspace=hspace)
    drawn = BytesIO()
    figure.savefig(drawn, **options)
    return drawn.getvalue()


def _height(panel: Panel) -> float:
    """Return the height of a panel in inches."""
    return min(9.0, 1.1 + 0.5 * panel.timeline.schedule.ranks)


def _edges(box: Box, top: float, bottom: float) -> tuple[float, float]:
    """Return the y coordinates of a box's top and bottom; the halves of an overlapped pair share its height.

    top, bottom: the ends of the boxes within a rank's row, from 0 to 1.
    """
    half = (bottom - top) / 2
    upper = top + (half if box.part == 2 else 0)
    return box.rank + upper, box.rank + (top + half if box.part == 1 else bottom)


def _number(ax: Axes, boxes: list[Box], inks: list[str], ends: tuple[float, float], wide: float, high: float) -> None:
    """Write a name such as 2B0 into each box, or only the microbatch where names would be small, or nothing.

    The size is that at which nine boxes in ten have space for it.

    inks: the colour of each text. ends: the top and bottom of `_edges`.
    wide, high: points per unit of time and per rank's row.
    """
    names = [f"{box.stage}{box.op}{box.microbatch}" for box in boxes]
    texts = names if _size(boxes, names, ends, wide, high)[0] >= NAMED else [str(box.microbatch) for box in boxes]
    size, sizes = _size(boxes, texts, ends, wide, high)
    for box, text, ink, own in zip(boxes, texts, inks, sizes, strict=True):
        if min(own, size) >= SMALLEST:
            x, y = (box.start + box.end) / 2, sum(_edges(box, *ends)) / 2
            ax.text(x, y, text, ha="center", va="center_baseline", size=min(own, size), color=ink, clip_on=True)


def _size(
    boxes: list[Box], texts: list[str], ends: tuple[float, float], wide: float, high: float
) -> tuple[float, list[float]]:
    """Return the size at which nine of ten texts fit into their boxes, and the size at which each fits, in points."""
    sizes = []
    for box, text in zip(boxes, texts, strict=True):
        upper, lower = _edges(box, *ends)
        across = (box.end - box.start) * wide / (0.62 * len(text) + 0.35)
        sizes.append(min(LARGEST, across, (lower - upper) * high / 1.25))
    return (sorted(sizes)[len(sizes) // 10] if sizes else LARGEST), sizes


def _memory(ax: Axes, panel: Panel, end: float, most: float) -> None:
    """Fill each rank's memory strip up to the activations that it holds; `most` takes the strip's full height."""
    peaks, unit = panel.timeline.peak_activations, (ROW["floor"] - ROW["strip"]) / (most or 1)
    ink = rcParams["text.color"]
    beside: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "color": ink}
    ax.hlines([rank + ROW["strip"] for rank in range(len(peaks))], 0, end, color=ink, linewidth=0.5, alpha=0.35)
    for rank, (times, held) in enumerate(panel.memory):
        floor = rank + ROW["floor"]
        tops = [floor - unit * min(most or 1, each) for each in held]
        ax.fill_between(times, tops, floor, step="post", color=MEMORY, linewidth=0)
        if panel.cap is not None:
            limit, over = floor - unit * float(panel.cap), max(held) > panel.cap
            if over:
                ax.fill_between(times, [min(top, limit) for top in tops], limit, step="post", color=MARK, linewidth=0)
            ax.hlines(limit, 0, end, color=MARK if over else ink, linewidth=1)
        if len(peaks) <= 16:
            ax.text(1, floor, f" peak {pretty(peaks[rank])}", fontsize=8, va="bottom", **beside)
        if len(peaks) <= 8:  # the axis of the strip
            for y, number in ((rank + ROW["strip"], pretty(most)), (floor, "0")):
                ax.text(0, y, f"{number} ", fontsize=6.5, ha="right", va="center", **beside)


def _points(ax: Axes) -> tuple[float, float]:
    """Return about how many points on the page a unit of time and a rank's row take, before the final layout."""
    extent = ax.get_window_extent()
    per_point = ax.figure.dpi / 72
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    return extent.width / per_point / (right - left), extent.height / per_point / (bottom - top)
