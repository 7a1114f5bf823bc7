"""Timelines in matplotlib: time runs right, rank 0 is on top, and idle time is the background."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from numbers import Real
from typing import Any

from ppedu.core import Op, SettingError
from ppedu.core.numeric import pretty
from ppedu.core.validate import require_instance
from ppedu.sim import Timeline
from ppedu.view.label import label
from ppedu.view.look import BARE_LANES, COLORS, LANES, MARK, MEMORY, PATH, ROW, paler, shade
from ppedu.view.model import Panel, Stack, require_lanes

try:
    from matplotlib import pyplot, rc_context, rcParams
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import ScaledTranslation

    from ppedu.view.boxes import SMALLEST, Boxes
    from ppedu.view.theme import saved_colors, still_colors
except ImportError as error:
    raise SettingError(f"pictures need {error.name}, which is not installed; pip install 'ppedu[plot]'") from error

LANE_NAME = 12  # characters
MARGINS, GAP = 0.9, 0.6  # inches above and below the rows of all panels, and between those of two
# Names, titles and units are the user's: a $ in one of them is a dollar sign and does not start a formula.
PLAIN: dict[str, Any] = {"parse_math": False}


def plot(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    outline: Timeline | None = None,
    lanes: bool = False,
    critical_path: bool = False,
    memory: float | bool = True,
    title: str | None = None,
    legend: bool = True,
    marks: Collection[tuple[int, int]] = (),
    until: float = 0,
) -> Axes:
    """Draw a timeline and return its Axes.

    Args:
        ax: Where to draw; a new figure by default.
        outline: Another timeline with the same number of ranks, drawn as outlines above this one's boxes: the
            simulation of a measured run.
        lanes: Whether `outline` has a lane of its own, below this timeline's, in which its actions are named, too. Both
            count from their own start, and the numbers of both are shown.
        critical_path: Whether the actions on the critical path have an edge of its color; with lanes, in both.
        memory: Whether a strip under each rank shows its activations, with the scale at its left and the peak at its
            right. All ranks share one scale, on which the highest peak fills the strip. Pass a number to let that
            number fill the strip instead, so that pictures can be compared.
        title: Text in place of the schedule's name and size. Makespan, bubble and peak activations are always shown
            beside it, and "emulated" after it if the times were emulated.
        legend: Whether to draw a legend below the timeline. In a figure of several timelines, one is enough.
        marks: Actions to mark with a red edge, each as a rank and a position in its order.
        until: A time that the axis must reach.

    Raises:
        SettingError: an option has the wrong type, `outline` has another number of ranks, or `lanes` lacks an outline.
    """
    require_instance("title", title or "", str, "text")
    require_instance("memory", memory or 0, Real, "True, False or the number that fills the strip")
    require_instance("until", until, Real, "a time")
    require_instance("marks", marks, Collection, "a collection of ranks and positions, such as {(0, 3)}")
    require_instance("critical_path", critical_path, bool, "True or False")
    require_instance("ax", ax, (Axes, type(None)), "one matplotlib Axes, such as axes[0] of several")
    panel = Panel(timeline, title, outline, marks=marks, until=until)
    stack = Stack([panel], lanes=require_lanes(lanes, outline))
    if ax is None:
        _, ax = pyplot.subplots(figsize=(11, _height(panel, stack) + MARGINS), layout="constrained")
    if memory is True:
        most: float | None = stack.most
    else:
        most = memory or None
    _draw(panel, ax, stack, most, critical_path)
    if legend:
        _legend(ax, stack, bool(memory), critical_path)
    return ax


def _draw(panel: Panel, ax: Axes, stack: Stack, most: float | None, critical_path: bool = False) -> None:
    """Draw a panel of a stack, without its legend.

    Args:
        most: The number of activations at the top of a memory strip; None for no strips.
    """
    pair = panel.pair if stack.lanes else None
    strips = most is not None
    if pair:
        upper, lower = LANES if strips else BARE_LANES
    else:
        upper = lower = ROW if strips else {**ROW, "bottom": ROW["floor"]}
    _axes(ax, panel, stack.end, (upper["top"] + lower["bottom"]) / 2)

    outline = Panel(panel.outline) if panel.outline else None
    boxes = Boxes(ax, panel, (upper["lane" if outline and not pair else "top"], upper["bottom"]))
    inks = boxes.fill()
    lanes = [boxes]
    if outline and pair:
        below = Boxes(ax, outline, (lower["top"], lower["bottom"]))
        lanes.append(below)
        below.number(below.fill(pale=True))
        _name_lanes(ax, lanes, pair.names)
    elif outline:
        Boxes(ax, outline, (upper["top"], upper["lane"] - 0.03)).outline()
    boxes.mark()
    boxes.number(inks)
    if critical_path:
        for each in lanes:
            each.critical_path()
    if most is not None:
        _memory(ax, panel, stack.end, most, upper)
    if pair:
        _head(ax, pair.heading, pair.lines)
    else:
        numbers = [] if stack.bare else [f"{name} {number}" for name, number in panel.numbers.items()]
        _head(ax, panel.heading, [numbers])


def _axes(ax: Axes, panel: Panel, end: float, middle: float) -> None:
    """Set the axes of a panel.

    Args:
        end: A time that the time axis must reach.
        middle: Where a rank's row has its label, from 0 to 1.
    """
    ranks, unit = panel.timeline.schedule.ranks, panel.timeline.costs.unit
    ax.set(ylim=(ranks, 0), yticks=[rank + middle for rank in range(ranks)])
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
            each.set_xlabel(counted, fontsize=9, loc="right", **PLAIN)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _head(ax: Axes, heading: str, lines: Sequence[Sequence[str]]) -> None:
    """Write the heading and, at the right, lines of numbers."""
    below = "\n" * (len(lines) - 1)  # so that the heading is in the first line
    ax.set_title(label(heading) + below, loc="left", fontsize=11, weight="bold", **PLAIN)
    ax.set_title("\n".join(label("    ".join(line)) for line in lines), loc="right", fontsize=10, **PLAIN)


def _name_lanes(ax: Axes, lanes: Sequence[Boxes], names: Sequence[str]) -> None:
    """Write the name of each lane beside it, draw a line where its timeline ends, and write the makespan there."""
    ink = rcParams["text.color"]
    ranks = list(range(lanes[0].panel.timeline.schedule.ranks))
    shown = [name if len(name) <= LANE_NAME else f"{name[: LANE_NAME - 1]}…" for name in map(label, names)]
    size = min(7.5, 0.9 * lanes[0].high * (lanes[0].ends[1] - lanes[0].ends[0]))
    for lane, name in zip(lanes, shown, strict=True):
        (top, bottom), end = lane.ends, float(lane.panel.timeline.makespan)
        ax.vlines([end] * len(ranks), [r + top for r in ranks], [r + bottom for r in ranks], ink, linewidth=1.2)
        if size < SMALLEST:
            continue
        makespan = pretty(lane.panel.timeline.makespan, lane.panel.timeline.costs.unit)
        ax.text(end, (top + bottom) / 2, f"  {makespan}", fontsize=size, va="center", color=ink, **PLAIN)
        beside: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "center", "color": ink}
        for rank in ranks:
            ax.text(0, rank + (top + bottom) / 2, f"{name}  ", fontsize=size, **beside, **PLAIN)
    if size >= SMALLEST:
        ax.tick_params(axis="y", pad=6 + 0.58 * size * max(map(len, shown)))


def _legend(ax: Axes, stack: Stack, memory: bool, critical_path: bool = False) -> None:
    """Draw the legend of a stack below the left corner of `ax`.

    Args:
        memory: Whether memory strips are drawn.
    """
    ink = rcParams["text.color"]
    tones: dict[str, Any] = {op: tuple(Patch(color=fill) for fill in fills) for op, fills in stack.fills.items()}
    swatches: dict[str, Any] = {
        **tones,
        "chunk": Patch(color=shade(Op.F, 0, 1, 2)),
        "copy": Patch(facecolor=COLORS[Op.F], edgecolor="black", linewidth=1.2),
        "memory": Patch(color=MEMORY),
        "outline": Patch(
            facecolor=paler(shade(Op.F, 0, 0, 1)) if stack.lanes else "none", edgecolor=COLORS[Op.F], linewidth=1.2
        ),
        "cap": Line2D([], [], color=ink, linewidth=0.8),
        "mark": Patch(facecolor="none", edgecolor=MARK, linewidth=1.8),
        "path": Patch(facecolor="none", edgecolor=PATH, linewidth=1.8),
    }
    words = stack.legend | ({"path": "critical path"} if critical_path else {})
    entries = {key: label(each) for key, each in words.items() if memory or key not in ("memory", "cap")}
    many = len(entries) > 5  # so they are closer together, and below the name of the axis
    legend = ax.legend(
        [swatches[key] for key in entries],
        entries.values(),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + ScaledTranslation(-0.07, -0.37 if many else -0.28, ax.figure.dpi_scale_trans),
        borderaxespad=0,
        ncols=len(entries),
        columnspacing=0.8 if many else 2,
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

    The background is white unless the learner has set another color. The text in an SVG can be searched and copied.
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

    It has no background and gray text, because pages are light or dark. The margins are fixed, because measuring them
    takes several times as long as drawing.
    """
    with rc_context(still_colors()):
        return _drawn(stack, fixed=True, format="png", dpi=110)


def _drawn(stack: Stack, fixed: bool, **options: Any) -> bytes:
    """Draw the panels under each other, on one time axis and with one legend, and return the bytes of an image file.

    Args:
        fixed: Whether the margins are fixed; otherwise they are measured.
        options: As for `Figure.savefig`.
    """
    heights = [_height(panel, stack) for panel in stack.panels]
    high = sum(heights) + MARGINS + GAP * (len(heights) - 1)
    figure = Figure(figsize=(11, high), layout=None if fixed else "constrained")  # pyplot would keep its figures
    axes = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)[:, 0]
    axes[-1].update_datalim([(0, 0), (stack.end, 0)])  # the size of numbers depends on the axis's final width
    for ax, panel in zip(axes, stack.panels, strict=True):
        ax.tick_params(axis="x", labelbottom=True)
        _draw(panel, ax, stack, None if stack.bare else stack.most)
    _legend(axes[-1], stack, memory=not stack.bare)
    if fixed:
        hspace = GAP * len(heights) / sum(heights)
        left, above = (0.11, 0.5) if stack.lanes else (0.065, 0.3)
        figure.subplots_adjust(left, 0.6 / high, 0.935, 1 - above / high, hspace=hspace)
    drawn = BytesIO()
    figure.savefig(drawn, **options)
    return drawn.getvalue()


def _height(panel: Panel, stack: Stack) -> float:
    """Return the height of a panel's rows in inches; of very many ranks, that of a page."""
    ranks, row = panel.timeline.schedule.ranks, min(0.5, stack.tall / 96)
    if stack.lanes and panel.outline:
        return min(11.0, ranks * max(0.3, 1.5 * row))
    return min(8.0, ranks * row)


def _memory(ax: Axes, panel: Panel, end: float, most: float, row: Mapping[str, float]) -> None:
    """Fill each rank's memory strip up to the activations that it holds; `most` takes the strip's full height."""
    peaks, unit = panel.timeline.peak_activations, (row["floor"] - row["strip"]) / (most or 1)
    tall = ax.bbox.height / ax.figure.dpi / len(peaks)  # of a row, in inches
    ink = rcParams["text.color"]
    beside: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "color": ink}
    ax.hlines([rank + row["strip"] for rank in range(len(peaks))], 0, end, color=ink, linewidth=0.5, alpha=0.35)
    for rank, (times, held) in enumerate(panel.memory):
        # After its last change, a rank holds the same to the end, as in a job that hangs.
        times, held = [*times, float(panel.timeline.makespan)], [*held, held[-1]]
        floor = rank + row["floor"]
        tops = [floor - unit * min(most or 1, each) for each in held]
        ax.fill_between(times, tops, floor, step="post", color=MEMORY, linewidth=0)
        if panel.cap is not None:
            limit, over = floor - unit * float(panel.cap), max(held) > panel.cap
            if over:
                ax.fill_between(times, [min(top, limit) for top in tops], limit, step="post", color=MARK, linewidth=0)
            ax.hlines(limit, 0, end, color=MARK if over else ink, linewidth=1)
        if len(peaks) <= 16:
            ax.text(1, floor, f" peak {pretty(peaks[rank])}", fontsize=8, va="bottom", **beside)
        if tall > 0.31:  # the axis of the strip
            for y, number in ((rank + row["strip"], pretty(most)), (floor, "0")):
                ax.text(0, y, f"{number} ", fontsize=6.5, ha="right", va="center", **beside)
