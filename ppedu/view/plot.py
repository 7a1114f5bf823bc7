"""The picture of a timeline, in matplotlib: time runs right, rank 0 on top, idle time is the background."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from io import BytesIO
from numbers import Real
from typing import Any, NamedTuple, cast

from matplotlib import pyplot, rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from ppedu.core.actions import COMPUTE, Op
from ppedu.core.errors import SettingError
from ppedu.core.numeric import pretty
from ppedu.core.timeline import Timeline
from ppedu.view.data import require_outline
from ppedu.view.label import label
from ppedu.view.palette import COLORS, DARKER, LIGHTER, MARK, MEMORY, NAMES

# Heights in a rank's row, which is 1 high: the boxes, and under them the memory strip.
TOP, BOTTOM, STRIP_TOP, STRIP_BOTTOM = 0.06, 0.66, 0.70, 0.94
LARGEST, SMALLEST = 9.0, 5.0  # points; a number that would be smaller is left out


class Box(NamedTuple):
    """An action on the page, in data coordinates."""

    left: float
    right: float
    top: float
    bottom: float
    op: Op
    microbatch: int
    depth: float  # 0 for a rank's first chunk, 1 for its last
    copy: int  # of the model: 1 for the second one of a bidirectional placement
    place: tuple[int, int] = (0, 0)  # the rank, and the position in its order

    @property
    def corners(self) -> list[tuple[float, float]]:
        left, right, top, bottom = self[:4]
        return [(left, top), (right, top), (right, bottom), (left, bottom)]


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
    """Draw `timeline` and return the Axes.

    ax: where to draw; a new figure by default.
    outline: another timeline with the same number of ranks, drawn over this one: a simulation over a measured run.
    memory: whether a strip under each rank shows its activations, with its peak at the right. All ranks have one scale,
        on which the highest peak fills the strip; a number fills it instead, so that pictures can be compared.
    legend: whether there is one below the picture; one is enough for several pictures in a figure.
    marks: actions to be marked with a red edge, each as a rank and a position in its order.
    until: the axis reaches at least this time.
    title: replaces the schedule's name and size. Makespan, bubble and peak memory are always shown beside it, and
        "emulated" after it where the timeline is.

    Raises:
        SettingError: an option is of the wrong type, or `outline` has another number of ranks.
    """
    schedule = timeline.schedule
    ranks = schedule.ranks
    require_outline(outline, ranks)
    if ax is not None and not isinstance(ax, Axes):
        raise SettingError(f"ax must be one matplotlib Axes, such as axes[0] of several; got {ax!r}")
    _require("title", title or "", str, "text")
    _require("memory", memory or 0, Real, "True, False or the number that fills the strip")
    _require("until", until, Real, "a time")
    _require("marks", marks, Collection, "a collection of ranks and positions, such as {(0, 3)}")
    if ax is None:
        _, ax = pyplot.subplots(figsize=(11, _height(ranks)), layout="constrained")
    bottom = BOTTOM if memory else STRIP_BOTTOM
    unit = timeline.costs.unit
    # Names, titles and units are the user's: a $ in one of them is a dollar sign, and not the start of a formula.
    words: dict[str, Any] = {"parse_math": False}
    end = max(until, *(float(each.makespan) for each in (timeline, outline) if each))
    ax.set(ylim=(ranks, 0), yticks=[rank + (TOP + bottom) / 2 for rank in range(ranks)])
    ax.set_yticklabels([f"rank {rank}" for rank in range(ranks)], fontsize=min(9.0, 280 / ranks))
    ax.update_datalim([(0, 0), (end, ranks)])
    ax.autoscale(axis="x", tight=True)  # and not set_xlim: the axis may be shared with another timeline
    milliseconds = unit == "s" and ax.get_xlim()[1] < 1
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(lambda time, _: f"{time * (1000 if milliseconds else 1):g}")
    ax.tick_params(length=0, labelsize=9, axis="x")
    ax.tick_params(length=0, axis="y")
    for each in ax.get_shared_x_axes().get_siblings(ax):
        # Those that share the axis share its unit, and where a figure leaves out the ticks' labels it needs none.
        if (each is ax or each.get_xlabel()) and each.xaxis.get_tick_params().get("labelbottom", True):
            counted = label(f"time, {'ms' if milliseconds else unit}" if unit else "time")
            each.set_xlabel(counted, fontsize=9, loc="right", **words)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)

    boxes = sorted(_boxes(timeline, bottom), key=lambda box: box.copy)  # no edge of the second copy is covered
    wide, high = _points(ax)
    gap = 0.8 if boxes and sum(box.right - box.left for box in boxes) / len(boxes) * wide > 5 else 0.2
    ink = rcParams["text.color"]
    edges = [ink if box.copy else ax.get_facecolor() for box in boxes]
    fills = [_shade(box) for box in boxes]
    corners = [box.corners for box in boxes]
    ax.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=edges, linewidths=gap), autolim=False)
    if outline:
        drawn = [box.corners for box in _boxes(outline, bottom)]
        ax.add_collection(PolyCollection(drawn, facecolors="none", edgecolors=ink, linewidths=0.9), autolim=False)
    if marks:
        marked = [box.corners for box in boxes if box.place in marks]
        ax.add_collection(PolyCollection(marked, facecolors="none", edgecolors=MARK, linewidths=1.8), autolim=False)
    _number(ax, boxes, wide, high)
    if memory:
        _memory(ax, timeline, float(max(timeline.peak_activations)) if memory is True else memory)

    if legend:
        _legend(ax, timeline, boxes, bool(memory), outline)
    name = title or f"{schedule.name}, {schedule.size}"
    if timeline.source == "emulated" or (timeline.source != "simulated" and not title):
        name += f", {timeline.source}"
    ax.set_title(label(name), loc="left", fontsize=11, weight="bold", **words)
    numbers = f"makespan {pretty(timeline.makespan, unit)}    bubble {timeline.bubble:.1%}"
    numbers += f"    peak memory {pretty(max(timeline.peak_activations))}"
    ax.set_title(label(numbers), loc="right", fontsize=10, **words)
    return ax


def _require(name: str, value: Any, kind: type, wanted: str) -> None:
    """Raise SettingError unless `value` is of this kind."""
    if not isinstance(value, kind):
        raise SettingError(f"{name} must be {wanted}; got {value!r}")


def _legend(ax: Axes, timeline: Timeline, boxes: list[Box], memory: bool, outline: Timeline | None) -> None:
    """Draw the legend of the colours and edges that are in the picture, below its left corner."""
    entries = [(Patch(color=COLORS[op]), NAMES[op]) for op in COLORS if any(box.op == op for box in boxes)]
    if timeline.schedule.chunks > 1:
        dark = _shade(Box(0, 0, 0, 0, Op.F, 0, depth=1, copy=0))
        entries.append((Patch(color=dark), "darker: later chunk"))
    if timeline.schedule.placement.copies > 1:
        entries.append((Patch(facecolor="none", edgecolor=rcParams["text.color"], linewidth=0.8), "second copy"))
    if memory:
        entries.append((Patch(color=MEMORY), "activations held"))
    if outline:
        edge = Patch(facecolor="none", edgecolor=rcParams["text.color"], linewidth=0.9)
        entries.append((edge, label(f"outlined: {outline.source}")))
    legend = ax.legend(
        *zip(*entries, strict=True),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + ScaledTranslation(-0.07, -0.28, ax.figure.dpi_scale_trans),
        borderaxespad=0,
        ncols=len(entries),
        frameon=False,
        fontsize=9,
        handlelength=1,
        handleheight=1,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


Panel = tuple[Timeline, dict[str, Any]]  # a timeline, and how it is to be plotted


def picture(panels: Sequence[Panel], kind: str) -> bytes:
    """Return the picture of timelines under each other as a file's bytes; `kind` is "svg", "png" or "pdf".

    The text of an SVG is text, which can be searched and copied, and the same picture is the same file.
    """
    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ppedu"}):
        (timeline, how), *more = panels
        figure = _stacked(panels) if more else cast(Figure, plot(timeline, **how).figure)
        try:
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(drawn, format=kind, bbox_inches="tight", dpi=200, metadata=metadata)
        finally:
            pyplot.close(figure)
    if kind == "svg":  # several blanks in a row count
        return drawn.getvalue().replace(b"<text ", b'<text xml:space="preserve" ')
    return drawn.getvalue()


def png(panels: Sequence[Panel]) -> bytes:
    """Return a picture as `picture` does, in less time and with less resolution, for a notebook.

    Its margins are given, not found: finding them takes several times as long as drawing.
    """
    drawn = BytesIO()
    figure = _stacked(panels)
    try:
        figure.savefig(drawn, format="png", dpi=110)
    finally:
        pyplot.close(figure)
    return drawn.getvalue()


def _stacked(panels: Sequence[Panel]) -> Figure:
    """Return a figure of timelines under each other on one time axis."""
    heights = [_height(timeline.schedule.ranks) for timeline, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(11, sum(heights)), height_ratios=heights, sharex=True, squeeze=False
    )
    longest = max(float(timeline.makespan) for timeline, _ in panels)
    try:
        axes[-1, 0].update_datalim([(0, 0), (longest, 0)])  # numbers are sized by the final width of the axis
        for ax, (timeline, how) in zip(axes[:, 0], panels, strict=True):
            ax.tick_params(axis="x", labelbottom=True)
            plot(timeline, ax, legend=ax is axes[-1, 0], **how)
    except BaseException:
        pyplot.close(figure)
        raise
    high = sum(heights)
    figure.subplots_adjust(0.065, 0.6 / high, 0.935, 1 - 0.3 / high, hspace=0.7 * len(panels) / (high - 1))
    return figure


def _height(ranks: int) -> float:
    return min(9.0, 1.1 + 0.5 * ranks)


def _boxes(timeline: Timeline, bottom: float) -> Iterable[Box]:
    """The compute actions; the parts of an overlapped pair share its height."""
    placement = timeline.schedule.placement
    deepest = max(1, placement.chunks - 1)
    for rank, row in enumerate(timeline.rows):
        for index, (action, start, end) in enumerate(row):
            left, right = (float(time - timeline.start) for time in (start, end))
            singles = [single for single in action.singles if single.op in COMPUTE]
            for place, single in enumerate(singles):
                top, below = (rank + TOP + (bottom - TOP) * edge / len(singles) for edge in (place, place + 1))
                stage, op, m, _ = single
                depth = placement.chunk(stage, m) / deepest
                yield Box(left, right, top, below, op, m, depth, placement.copy(m), (rank, index))


def _shade(box: Box) -> tuple[float, float, float]:
    lighter = box.microbatch % 2 * LIGHTER
    dark = (channel * (1 - DARKER * box.depth) for channel in to_rgb(COLORS[box.op]))
    red, green, blue = (channel + (1 - channel) * lighter for channel in dark)
    return red, green, blue


def _ink(box: Box) -> str:
    """What can be read on the box's shade."""
    red, green, blue = _shade(box)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.54 else "#16302a"


def _number(ax: Axes, boxes: list[Box], wide: float, high: float) -> None:
    """Write the microbatch into each box, at the size at which nine boxes in ten have room; or not at all."""
    if not boxes:
        return

    def room(box: Box) -> float:
        """The largest size, in points, at which the box's number fits."""
        across = (box.right - box.left) * wide / (0.62 * len(str(box.microbatch)) + 0.35)
        return min(LARGEST, across, (box.bottom - box.top) * high / 1.25)

    size = sorted(map(room, boxes))[len(boxes) // 10]
    if size < SMALLEST:
        return
    for box in boxes:
        if room(box) >= size:
            x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": size, "color": _ink(box)}
            ax.text(x, y, str(box.microbatch), clip_on=True, **style)


def _memory(ax: Axes, timeline: Timeline, full: float) -> None:
    """The steps of each rank's activations, filled; `full` takes all of the strip's height."""
    for rank in range(timeline.schedule.ranks):
        steps = timeline.memory(rank)
        floor = rank + STRIP_BOTTOM
        times = [float(time - timeline.start) for time, _ in steps]
        tops = [floor - (STRIP_BOTTOM - STRIP_TOP) * min(1, float(value) / (full or 1)) for _, value in steps]
        ax.fill_between(times, tops, floor, step="post", color=MEMORY, linewidth=0)
        if timeline.schedule.ranks <= 16:
            peak = f" peak {pretty(timeline.peak_activations[rank])}"
            ax.text(1, floor, peak, transform=ax.get_yaxis_transform(), fontsize=8, va="bottom", color="#6d5f8c")


def _points(ax: Axes) -> tuple[float, float]:
    """How many points on the page a unit of time and a rank's row take, about (the layout is not final)."""
    extent = ax.get_window_extent()
    per_point = ax.figure.dpi / 72
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    return extent.width / per_point / (right - left), extent.height / per_point / (bottom - top)
