"""A timeline as every front end draws it. Matplotlib, pages, widgets and traces read their boxes here.

Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ppedu.core import Action, Op, SettingError, requires
from ppedu.core.garbage import without_gc
from ppedu.core.numeric import plural, pretty
from ppedu.core.validate import require_instance
from ppedu.sim import Timeline
from ppedu.sim.per_link import each_link
from ppedu.sim.rows import computing, copying, floats
from ppedu.view.label import encodable, packed
from ppedu.view.look import BARE_ROW, COLORS, LOOK, NAMES, shade
from ppedu.view.why import Why, bubble, makespan, peak, peaks

Data = dict[str, Any]  # what `json.dumps` can write
BARE: Data = {"numbers": [], "peaks": [], "memory": None}  # what a picture without these leaves out
MOST_PEAKS = 32  # ranks; the rows of more are too low for words beside them


class Box(NamedTuple):
    """A compute action, one half of an overlapped pair, or a copy. Times count from the timeline's start."""

    rank: int  # of a copy to the host or back, ranks + rank
    start: float
    end: float
    op: Op
    stage: int
    microbatch: int
    chunk: int  # 0 for the first stage that the rank holds
    copy: int  # 1 for the second copy of the model in a bidirectional placement
    part: int  # 1 or 2 for a half of an overlapped pair, otherwise 0
    mark: int  # 1 where the action is marked


class Pair(NamedTuple):
    """The words in a picture of a timeline and its outline in two lanes, the timeline first.

    Attributes:
        names: What tells the lanes apart.
        lines: For each lane, its name, and makespan, bubble and peak activations as text.
    """

    heading: str
    names: tuple[str, str]
    lines: tuple[list[str], list[str]]


@dataclass(frozen=True)
class Panel:
    """One timeline and how it is drawn.

    Args:
        title: Replaces the schedule's name and size.
        outline: A timeline with the same number of ranks, drawn as outlines above this one's boxes, or in a lane below.
        cap: The most activations that a rank may hold, drawn as a line in the memory strips.
        marks: Actions to mark, each as a rank and a position in its order.
        until: A time that the axis must reach.
    """

    timeline: Timeline
    title: str | None = None
    outline: Timeline | None = None
    cap: Any = None
    marks: Collection[tuple[int, int]] = ()
    until: Any = 0

    def __post_init__(self) -> None:
        ranks, outline = self.timeline.schedule.ranks, self.outline
        if outline is not None and (not isinstance(outline, Timeline) or outline.schedule.ranks != ranks):
            wanted = f"a timeline of {plural(ranks, 'rank')}, such as simulate(schedule)"
            raise SettingError(f"outline must be {wanted}; got {outline!r}")

    @cached_property
    def heading(self) -> str:
        """The title, followed by the source of the times if they were not simulated.

        The heading of a panel with a `title` omits the source "measured", but never "emulated".
        """
        schedule, source = self.timeline.schedule, self.timeline.source
        named = self.title or f"{schedule.name}, {schedule.size}"
        shows_source = source == "emulated" or (source != "simulated" and not self.title)
        return f"{named}, {source}" if shows_source else named

    @cached_property
    def numbers(self) -> dict[str, str]:
        """Makespan, bubble and peak activations by name, as text with units."""
        timeline = self.timeline
        return {
            "makespan": pretty(timeline.makespan, timeline.costs.unit),
            "bubble": f"{timeline.bubble:.1%}",
            "peak activations": pretty(max(timeline.peak_activations), timeline.costs.memory_unit),
        }

    @cached_property
    def pair(self) -> Pair | None:
        """The names and numbers of two lanes, or None without an outline."""
        if not self.outline:
            return None
        one, other = self.timeline, self.outline
        if one.source != other.source:
            names = one.source, other.source
        elif one.schedule.name != other.schedule.name:
            names = one.schedule.name, other.schedule.name
        else:
            names = "filled", "outlined"
        schedules = dict.fromkeys((one.schedule.name, other.schedule.name))  # once if they are equal
        heading = self.title or f"{' above '.join(schedules)}, {one.schedule.size}"
        longer = float(other.makespan / one.makespan - 1) if one.makespan else 0.0
        apart = f", {abs(longer):.1%} {'longer' if longer > 0 else 'shorter'}" if abs(longer) >= 0.0005 else ""
        upper = [names[0], *self._numbers_in_words]
        lower = [names[1] + apart, *Panel(other)._numbers_in_words]
        return Pair(heading, names, (upper, lower))

    @property
    def _numbers_in_words(self) -> list[str]:
        """The `numbers` with their names: ["makespan 33", "bubble 27.3%", …]."""
        return [f"{name} {number}" for name, number in self.numbers.items()]

    @cached_property
    def reasons(self) -> list[Why]:
        """The `numbers` with their names, and the reasons for them."""
        time, share, held = self._numbers_in_words
        return [makespan(self._floats, time), bubble(self.timeline, share), peak(self.timeline, held)]

    @cached_property
    @without_gc()
    def columns(self) -> dict[str, list[Any]]:
        """The fields of all boxes by name, as lists, because a large timeline has very many boxes."""
        placement, zero, marked = self.timeline.schedule.placement, self._floats.start, set(self.marks)
        chunks = [  # by copy of the model and stage, how many stages before it are on the same rank
            [homes[:stage].count(rank) for stage, rank in enumerate(homes)] for homes in placement.homes
        ]
        columns: dict[str, list[Any]] = {name: [] for name in Box._fields}
        lanes = (computing, copying) if self.timeline.schedule.offloaded else (computing,)
        for rank, found in enumerate(lane(row) for lane in lanes for row in self._floats.rows):
            actions, starts, ends, steps, halves = found
            if not actions:
                continue
            stages, ops, microbatches, _ = zip(*actions, strict=True)
            copies = [*map(placement.copy, microbatches)] if placement.copies > 1 else [0] * len(actions)
            fields = (
                [rank] * len(actions),
                [start - zero for start in starts] if zero else starts,
                [end - zero for end in ends] if zero else ends,
                ops,
                stages,
                microbatches,
                [chunks[copy][stage] for copy, stage in zip(copies, stages, strict=True)],
                copies,
                halves,
                [int((rank % placement.ranks, step) in marked) for step in steps] if marked else [0] * len(actions),
            )
            for column, field in zip(columns.values(), fields, strict=True):
                column += field
        return columns

    @cached_property
    @without_gc()
    def boxes(self) -> list[Box]:
        """The boxes of all compute actions, rank after rank, in the order in which they run, and then of all copies."""
        return list(map(Box._make, zip(*self.columns.values(), strict=True)))

    @cached_property
    def needs(self) -> dict[tuple[int, Op], list[tuple[str, int, int]]]:
        """The results that the boxes of a stage and an op require: their kinds and stages, and 0 for the microbatch.

        Of slices, -1 stands for the slice before, and 1 for the one after, if the sequence has it.
        """
        placement, kinds = self.timeline.schedule.placement, {kind for kind, *_ in self.timeline.schedule.restored}
        found: dict[tuple[int, Op], list[tuple[str, int, int]]] = {}
        for stage, op in dict.fromkeys(zip(self.columns["stage"], self.columns["op"], strict=True)):
            middle = 0 if op in (Op.B, Op.I) else placement.slices - 1  # has the neighbor that it may require
            results = requires(Action(stage, op, middle), placement, restored=[(k, stage, middle) for k in kinds])
            found[stage, op] = [(kind, other, m - middle) for kind, other, m in results]
        return found

    @cached_property
    def gaps(self) -> list[tuple[int, Any, Any, str]]:
        """The idle times, counted from the timeline's start: rank, start, end and the reason."""
        zero = self._floats.start
        return [(rank, start - zero, end - zero, why) for rank, start, end, why in self._floats.gaps()]

    @cached_property
    def path(self) -> list[int]:
        """The indices of the boxes on the critical path; an overlapped pair is represented by its first half."""
        drawn = self._floats
        first: list[list[int]] = [[] for _ in (*drawn.rows, *drawn.rows)]
        for index, (rank, part) in enumerate(zip(self.columns["rank"], self.columns["part"], strict=True)):
            if part < 2:
                first[rank].append(index)
        return [first[rank][place] for rank, place in drawn.reasons.critical_path()]

    @cached_property
    def memory(self) -> list[tuple[list[float], list[float]]]:
        """Each rank's memory as a step curve: times, and the activations held from each time on."""
        zero = self._floats.start
        curves = map(self.timeline.memory, range(self.timeline.schedule.ranks))
        return [([float(time) - zero for time, _ in curve], [float(held) for _, held in curve]) for curve in curves]

    @cached_property
    def _floats(self) -> Timeline:
        """The timeline with floats instead of fractions, which are slow. Equal times stay equal."""
        timeline = self.timeline
        rows = tuple(map(floats, timeline.rows))
        if all(row is before for row, before in zip(rows, timeline.rows, strict=True)):
            return timeline
        latency, transfer = (each_link(float, each) for each in (timeline.costs.latency, timeline.costs.transfer))
        return replace(timeline, rows=rows, costs=replace(timeline.costs, latency=latency, transfer=transfer))

    def _told(self, brief: bool) -> Sequence[str | Why]:
        """Return the `reasons`, or their texts alone."""
        return list(map(encodable, self._numbers_in_words)) if brief else self.reasons

    @property
    def _changes(self) -> Data:
        """The memory that boxes allocate at their start and free at their end, its unit, and how many slices differ.

        By stage, op and slice, such as 2B0, or 2B0R if its forward runs again.
        """
        schedule = self.timeline.schedule
        table, ticks, period = self.timeline.memory_changes
        pairs: dict[str, tuple[float, float]] = {}
        for (op, stage, position, again), (held, freed) in table.items():
            key = f"{stage}{op}{position}{'R' if again else ''}"
            pairs[key] = float(held), float(held if schedule.forward_only else freed)
        return {"changes": pairs, "one": ticks.per_one, "period": period}

    @without_gc()
    def state(self, factor: int, unit: str, brief: bool = False) -> Data:
        """Return the data that the browser draws.

        Args:
            unit: The unit of the times after multiplying by `factor`.
            brief: Whether it lacks all reasons, which take as long as the rest: those of numbers and gaps, and the
                critical path.
        """

        def clock(times: Iterable[Any]) -> list[Any]:
            return [round(time * factor, 9) for time in times]

        timeline, schedule = self.timeline, self.timeline.schedule
        columns = self.columns
        if factor != 1:
            columns = columns | {name: [time * factor for time in columns[name]] for name in ("start", "end")}
        chunks = range(schedule.chunks)
        gaps = ([rank, *clock((start, end)), why] for rank, start, end, why in (() if brief else self.gaps))
        most = timeline.peak_activations if schedule.ranks <= MOST_PEAKS else ()
        return {
            "heading": encodable(self.heading),
            "summary": timeline.summary(),
            "axis": encodable(f"time, {unit}" if unit else "time"),
            "unit": unit,
            "memory_unit": timeline.costs.memory_unit,
            "ranks": schedule.ranks,
            "copies": bool(schedule.offloaded),
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "slices": schedule.slices,
            "makespan": round((self._floats.end - self._floats.start) * factor, 9),
            "numbers": self._told(brief),
            "boxes": {name: "".join(each) if name == "op" else packed(each) for name, each in columns.items()},
            "needs": {f"{stage}{op}": results for (stage, op), results in self.needs.items()},
            "shades": {op: [[_bytes(shade(op, m, k, len(chunks))) for m in (0, 1)] for k in chunks] for op in COLORS},
            "gaps": [gap for gap in gaps if gap[2] > gap[1]],  # rounding may leave nothing of a gap between floats
            "memory": self._changes,
            "peaks": [f"peak {pretty(each)}" for each in most] if brief else [*peaks(self._floats, range(len(most)))],
            "until": float(self.until * factor),
            "cap": None if self.cap is None else float(self.cap),
            "path": [] if brief else self.path,
            "pair": self.pair
            and {
                "heading": encodable(self.pair.heading),
                "names": list(map(encodable, self.pair.names)),
                "lines": [
                    [encodable(name), *panel._told(brief)]
                    for (name, *_), panel in zip(self.pair.lines, (self, Panel(self.outline or timeline)), strict=True)
                ],
            },
            "outline": self.outline and Panel(self.outline).state(factor, unit, brief),
        }


def require_lanes(lanes: bool, outline: Timeline | None) -> bool:
    """Return `lanes`; raise SettingError if it is not a bool, or is True without an outline."""
    require_instance("lanes", lanes, bool, "True or False")
    if lanes and outline is None:
        raise SettingError("lanes=True shows two timelines; pass the other one, as in outline=simulate(schedule)")
    return lanes


@dataclass(frozen=True)
class Stack:
    """Panels under each other, on one time axis and with one scale for memory.

    Args:
        bare: Whether memory strips, makespan, bubble and peaks are left out.
        least: The number of activations that a memory strip has space for at least.
        lanes: Whether outlines have lanes of their own.
        brief: Whether the state lacks all reasons; see `Panel.state`.
    """

    panels: Sequence[Panel]
    bare: bool = False
    least: float = 0
    lanes: bool = False
    brief: bool = False

    @cached_property
    def timelines(self) -> list[Timeline]:
        """The timelines of all panels, and their outlines."""
        return [each for panel in self.panels for each in (panel.timeline, panel.outline) if each]

    @property
    def actions(self) -> int:
        """The number of all actions that are drawn."""
        return sum(len(row) for each in self.timelines for row in each.rows)

    @cached_property
    def end(self) -> float:
        """The last time on the axis."""
        return float(max([each.makespan for each in self.timelines] + [panel.until for panel in self.panels]))

    @cached_property
    def readable(self) -> tuple[int, str]:
        """The factor and the unit in which the longest timeline is easy to read."""
        return max(self.timelines, key=lambda each: each.makespan).readable

    @cached_property
    def tall(self) -> int:
        """The height of a rank's row in pixels: as long as they can be read, all panels fit on a laptop's screen."""
        ranks = [panel.timeline.schedule.ranks for panel in self.panels]
        fit_all = min(64, 352 // sum(ranks))
        fit_one = min(26, 480 // max(ranks))  # higher only if there are several panels
        return max(8, fit_all, fit_one)

    @cached_property
    def most(self) -> float:
        """The activations that fill a memory strip: the highest peak or cap, or `least`."""
        return float(max(self.least, *(max(each.cap or 0, *each.timeline.peak_activations) for each in self.panels)))

    @cached_property
    def fills(self) -> dict[Op, list[tuple[float, float, float]]]:
        """The colors of each op's boxes, for the legend: two shades of a single chunk, or one shade per chunk."""
        found: dict[Op, dict[tuple[float, float, float], None]] = {}  # dicts as sets that keep their order
        for panel in self.panels:
            chunks = panel.timeline.schedule.chunks
            kinds = [(0, 0), (1, 0)] if chunks == 1 else [(0, chunk) for chunk in range(chunks)]
            for op in set(panel.columns["op"]):
                found.setdefault(op, {}).update({shade(op, m, chunk, chunks): None for m, chunk in kinds})
        return {op: list(found[op]) for op in COLORS if op in found}

    @cached_property
    def legend(self) -> dict[str, str]:
        """The legend: a description of each color and line that occurs. Each key is also the name of a CSS class."""
        placements = [panel.timeline.schedule.placement for panel in self.panels]
        outlines = [panel.outline.source for panel in self.panels if panel.outline]
        held = [panel.pair.names[0] for panel in self.panels if panel.pair]
        unit = self.panels[0].timeline.costs.memory_unit
        scale = f", 0 to {pretty(self.most, unit)}" if self.most else ""
        # An entry that does not occur is False or empty, and is left out.
        words: dict[str, Any] = {
            **{op: op in self.fills and f"{op.value}: {NAMES[op]}" for op in COLORS},
            "chunk": any(each.chunks > 1 for each in placements) and "darker: later chunk",
            "copy": any(each.copies > 1 for each in placements) and "second stream",
            "memory": not self.bare and ": ".join([f"activations held{scale}", *held[:1]]),
            "outline": outlines and f"outlined: {outlines[0]}",
            "cap": any(panel.cap is not None for panel in self.panels) and "memory limit",
            "mark": any(panel.marks for panel in self.panels) and "differs",
        }
        return {key: each for key, each in words.items() if each}

    def state(self) -> Data:
        """Return the data that the browser draws, in the unit of time of `readable`."""
        factor, unit = self.readable
        return {
            "look": {**LOOK, "row": BARE_ROW} if self.bare else LOOK,
            "lanes": self.lanes,
            "end": round(self.end * factor, 9),
            "most": self.most,
            "legend": list(self.legend.items()),
            "fills": {op: [_bytes(fill) for fill in fills] for op, fills in self.fills.items()},
            "panels": [
                panel.state(factor, unit, self.brief) | {"tall": self.tall} | (BARE if self.bare else {})
                for panel in self.panels
            ],
        }


def _bytes(color: tuple[float, float, float]) -> list[float]:
    return [round(255 * channel, 2) for channel in color]
