"""Timeline: when each rank runs each action. A simulated and a measured run are the same class.

Whatever draws, saves or analyzes one works for the other, and one can be drawn over the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ppedu.core import COPIES, TRAFFIC, Action, Schedule, SettingError, hooks, require_schedule
from ppedu.core.numeric import plain, pretty, ratio
from ppedu.core.validate import require_number, require_rank
from ppedu.sim.held import versions
from ppedu.sim.rows import Row, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ppedu.sim.costs import Changes, Costs
    from ppedu.sim.why import Reasons


class Gap(NamedTuple):
    """A time in which a rank is idle, from `start` to `end`, and the reason in a sentence."""

    rank: int
    start: Any
    end: Any
    why: str


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of every rank, in order.

    Args:
        rows: `rows[rank]` holds the spans of that rank.
        costs: The size of an activation and the unit of the times, and for a simulation the costs it used.
        source: The origin of the times: "simulated", "measured", or "emulated" (see `pp.run.emulate`).
        parts: The timelines of the single steps, if there are several. The schedule then has a microbatch for each
            microbatch of each step; see `ppedu.sim.steps`.
    """

    schedule: Schedule
    rows: tuple[Sequence[Span], ...]
    costs: Costs
    source: str = "simulated"
    parts: tuple[Timeline, ...] = ()

    def __post_init__(self) -> None:
        require_schedule("a timeline", self.schedule)
        try:
            rows = tuple(row if isinstance(row, Row) else tuple(row) for row in self.rows)
        except TypeError:  # not rows of anything
            rows = ()
        types = set(map(type, chain(*(row for row in rows if not isinstance(row, Row)))))
        if len(rows) != self.schedule.ranks or not types <= {Span}:
            raise SettingError(
                f"a timeline of {self.schedule!r} has a row of Spans for each of its ranks; got {self.rows!r}"
            )
        vars(self).update(rows=rows)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of `rank`, first to last.

        Raises:
            SettingError: There is no such rank.
        """
        return tuple(self.rows[require_rank(rank, self.schedule.ranks)])

    @property
    def steps(self) -> tuple[Timeline, ...]:
        """The timeline of each training step, all on one clock."""
        return self.parts or (self,)

    @cached_property
    def start(self) -> Any:
        """The start of the first action, over all ranks."""
        starts = [row.start if isinstance(row, Row) else min(span.start for span in row) for row in self.rows if row]
        return min(starts, default=0)

    @cached_property
    def end(self) -> Any:
        """The end of the last action, over all ranks."""
        ends = [row.end if isinstance(row, Row) else max(span.end for span in row) for row in self.rows if row]
        return max(ends, default=0)

    @property
    def makespan(self) -> Any:
        """The end of the last action minus the start of the first, over all ranks."""
        return plain(self.end - self.start)

    @property
    def span(self) -> Any:
        """The longest time from a rank's own first start to its own last end: the Zero Bubble papers' "cost"."""
        rows = [[span for span in row if span.action.computes] for row in self.rows]  # a receive is posted early
        return plain(max((row[-1].end - row[0].start for row in rows if row), default=0))

    @cached_property
    def busy(self) -> tuple[Any, ...]:
        """The time that each rank spends in actions. Simulated messages and copies take place beside them."""

        def time(row: Sequence[Span]) -> Any:
            if isinstance(row, Row) and not self.schedule.lowered and not self.schedule.offloaded:
                return row.total
            return sum(end - start for action, start, end in row if self.occupies_rank(action))

        return tuple(plain(time(row)) for row in self.rows)

    def occupies_rank(self, action: Action) -> bool:
        """Return whether an action's time is its rank's: all of a measured run but copies, and no simulated message."""
        return action.op not in COPIES and (action.op not in TRAFFIC or self.source != "simulated")

    @property
    def idle(self) -> tuple[Any, ...]:
        """The time that each rank is idle: the makespan minus its busy time."""
        return tuple(plain(self.makespan - busy) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time: 1 - busy / (ranks · makespan)."""
        time = self.schedule.ranks * self.makespan
        return float(max(0, 1 - ratio(sum(self.busy), time))) if time else 0.0

    @property
    def overhead(self) -> float:
        """The makespan over its ideal, the busiest rank's busy time, minus 1.

        If all ranks are equally busy, this is idle time over busy time, which Megatron calls the bubble: (p-1)/m for
        1F1B (arXiv 2104.04473, §2.2). If not, it leaves out the time that the other ranks wait for the busiest one.
        """
        ideal = max(self.busy)
        return float(ratio(self.makespan, ideal) - 1) if ideal else 0.0

    @cached_property
    def peak_activations(self) -> tuple[Any, ...]:
        """The peak memory of each rank's activations, in the unit in which `costs.activation` is given."""
        peaks = []
        for row in self.rows:
            changes: Iterable[Any] = chain.from_iterable(self._memory_changes(row))
            if self.schedule.offloaded:
                changes = (change for _, change in self._changes_in_time(row))
            peaks.append(max(accumulate(changes, initial=0)))
        ticks = self.memory_changes.ticks
        return tuple(map(plain, ticks.numbers(peaks)))

    @cached_property
    def reasons(self) -> Reasons:
        """The compute spans, and the earlier spans that each one waited for."""
        return hooks.call("reasons", self)

    def critical_path(self) -> list[tuple[int, Span]]:
        """Return the critical path: the spans that determine the makespan, first to last, each with its rank.

        The last entry is the action that ends last. Each entry is preceded by the dependency that finished last. Making
        one of these actions faster may shorten the makespan.
        """
        return [(row % self.schedule.ranks, self.reasons[row, i]) for row, i in self.reasons.critical_path()]

    def why_idle(self, rank: int, time: Any) -> str:
        """Return why `rank` is idle at `time`, counted from the timeline's start, in a sentence.

            rank 2 waits 3–5: 2B0 needs 3B0 from rank 3

        Raises:
            SettingError: There is no such rank, or `time` is not a number of at least 0.
        """
        rank = require_rank(rank, self.schedule.ranks)
        require_number("time", time, lambda time: time >= 0, "a number of at least 0")
        return self.reasons.why_idle(rank, time)

    def gaps(self) -> list[Gap]:
        """Return the times in which ranks are idle, rank by rank, each with the sentence of `why_idle`."""
        return list(self.reasons.gaps())

    def causes(self) -> dict[str, float]:
        """Return the causes of the bubble, each with its share of all ranks' time. The shares add up to the bubble.

        "communication": The idle time that would vanish without latency; in a measured run, all idle time that a
            simulation with the run's own costs does not show.
        "variation": The idle time that would then vanish if a stage took the same time for every microbatch, their
            mean. Negative if it helps that they vary. Only if the costs vary by microbatch; otherwise it is not listed.
        "imbalance": The idle time that would then vanish if every stage took the mean time. Negative if uneven stages
            help.
        "ordering": The idle time that would then vanish with a faster order of the same actions that needs no more
            memory. A lower bound: list scheduling may miss better orders (see `ppedu.sim.reorder`).
        "warm-up and cooldown": The remaining idle time. Ranks wait for their first microbatch and for the last
            gradients, and in between for gradients whose activations fill the memory that the next forward needs.

        Raises:
            ScheduleError: The timeline's schedule is not legal.
        """
        return hooks.call("causes", self)

    def memory(self, rank: int) -> list[tuple[Any, Any]]:
        """Return the memory of a rank's activations as a step curve: a list of times, each with the value from then on.

        F allocates its activation at its start and B frees it at its end. I frees 1 - weight_memory of it, W the rest.
        In a forward-only schedule, F frees it at its own end. With `Costs(recompute=True)`, or an R in the order, F
        allocates the stage's input only, and R, B or I the rest, at its start. What F has allocated, O frees at its
        end, and L allocates again at its start.

        Raises:
            SettingError: There is no such rank.
        """
        row = self.spans(rank)
        changes = self._changes_in_time(row)
        times = [time for time, _ in changes]
        held = self.memory_changes.ticks.numbers(accumulate((change for _, change in changes), initial=0))
        return list(zip([self.start, *times], map(plain, held), strict=True))

    @cached_property
    def memory_changes(self) -> Changes:
        """The memory that actions allocate or free."""
        return self.costs.memory_changes(self.schedule)

    def _changes_in_time(self, row: Sequence[Span]) -> list[tuple[Any, Any]]:
        """Return the changes of the memory of a rank's activations in ticks, each with its time, in order."""
        found = zip(row, self._memory_changes(row), strict=True)
        changes = [(span.start if each > 0 else span.end, each) for span, changes in found for each in changes]
        # Copies end after actions that follow them in the order. What ends frees its memory for what starts.
        return sorted(changes, key=lambda each: (each[0], each[1] > 0)) if self.schedule.offloaded else changes

    def _memory_changes(self, row: Sequence[Span]) -> Iterator[list[Any]]:
        """Return, for each span of a row, the changes of the memory of a rank's activations in ticks."""
        table, _, period = self.memory_changes
        infers, recomputed = self.schedule.forward_only, self.schedule.recomputed
        varies = bool(recomputed) or period > 1  # by microbatch
        actions = row.actions if isinstance(row, Row) else [span.action for span in row]
        kinds = [parts or (stage, op, m if varies else 0) for stage, op, m, parts in actions]
        known: dict[tuple[Any, ...], list[Any]] = {}  # the changes that are not 0, by what determines them
        for kind, action in dict(zip(kinds, actions, strict=True)).items():
            keys = [(op, stage, m % period, (stage, m) in recomputed) for stage, op, m, _ in action.singles]
            found = [table[each] for each in keys if each in table]
            freed = [-(allocated if infers else freed) for allocated, freed in found]
            known[kind] = [change for change in (*(each for each, _ in found), *freed) if change]  # F before B
        return map(known.__getitem__, kinds)

    def text(self, width: int = 128) -> str:
        """Return the timeline as text: one line per rank, at most `width` characters wide, blank where it is idle.

        If there is space, each action has its microbatch and a width proportional to its time: F0' is the forward of
        microbatch 0 in the rank's second chunk. If not, an action is a letter, or several actions share one.

        Raises:
            SettingError: `width` is not a whole number of at least 1.
        """
        return hooks.call("draw", self, width)

    @cached_property
    def readable(self) -> tuple[int, str]:
        """The factor and the unit to display times with: (1000, "ms") if the makespan is below a second."""
        return (1000, "ms") if self.costs.unit == "s" and self.makespan < 1 else (1, self.costs.unit)

    def summary(self) -> str:
        """Return one line: the schedule, its size, makespan, bubble and peak activations.

        If the times were not simulated, it starts with their source: "measured 1f1b, 4 ranks, …". If weights are
        updated in between, it ends with their versions, which do not count as activations.
        """
        schedule, peaks = self.schedule, self.peak_activations
        source = "" if self.source == "simulated" else f"{self.source} "
        weights = f", {versions(schedule)}" if schedule.updated and not schedule.problems else ""
        return (
            f"{source}{schedule.name}, {schedule.size}: "
            f"makespan {pretty(self.makespan, self.costs.unit)}, bubble {self.bubble:.1%}, "
            f"peak activations {pretty(max(peaks), self.costs.memory_unit)}{weights}"
        )

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the timeline with matplotlib; see `ppedu.view.plot.plot` for the options."""
        return hooks.call("plot", self, ax, **options)

    def show(self, outline: Timeline | None = None, lanes: bool = False) -> Any:
        """Return an interactive widget for the end of a notebook cell. Without a kernel, a static picture remains.

        Args:
            outline: A timeline with the same number of ranks, drawn as outlines above this one's boxes: the simulation
                of a measured run.
            lanes: Whether `outline` has a lane of its own, below this timeline's, in which its actions can be read,
                too. A menu in the widget switches between the two. `show(…).save("x.html")` keeps what was chosen last.

        Raises:
            SettingError: `outline` is not a timeline with the same number of ranks, or `lanes` lacks one.
        """
        return hooks.call("show", self, outline, lanes)

    def link(self, base: str | None = None) -> str:
        """Return the address at which the playground, a page that needs no installation, shows this timeline.

        It holds the schedule and the costs. A measured timeline's times are not in it; the playground simulates.

        Args:
            base: The address of the playground; by default that of this project.

        Raises:
            SettingError: The costs are functions, or the placement is one's own with two copies of the model.
        """
        return hooks.call("link", self, base)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return hooks.call("display", self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a file in the format of its ending.

            .json               a trace for ui.perfetto.dev, chrome://tracing and `Timeline.load`
            .html               a page with the picture, the numbers and the orders, which needs no network
            .svg .png .pdf      the picture of `plot`
            .tex                a TikZ picture without memory, to include in a paper or to compile alone

        `ppedu.view.save([measured, simulated], path)` writes several timelines to one .json file.

        Raises:
            SettingError: The ending is unknown.
            PipelineError: The file cannot be written.
        """
        hooks.call("save", self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Return the timeline in a .json file that `save` wrote.

        Raises:
            PipelineError: The file cannot be read, or does not hold one timeline.
        """
        return hooks.call("load", path)

    def __repr__(self) -> str:
        return f"<Timeline: {self.summary()}>"

    def __str__(self) -> str:
        return self.text()
