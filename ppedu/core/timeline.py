"""Timeline: when each rank did what. A simulated run and a measured one are the same class.

Whatever draws, saves or measures one does the same for the other, and they can be laid over each other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ppedu.core import display
from ppedu.core.actions import Action
from ppedu.core.errors import SettingError
from ppedu.core.numeric import Number, Ticks, plain, pretty, ratio
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.validate import require_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ppedu.core.costs import Costs
    from ppedu.core.why import Reasons


class Span(NamedTuple):
    """An action and the time it ran, from `start` to `end`."""

    action: Action
    start: Any
    end: Any


class Gap(NamedTuple):
    """Time in which a rank does nothing, from `start` to `end`, and why, in a sentence."""

    rank: int
    start: Any
    end: Any
    why: str


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of every rank, in order.

    `rows[rank]` holds the rank's spans, `costs` what an activation weighs and the unit of the times, `source`
    how the times came about: "simulated", "measured", or "emulated" (see `pp.run.emulate`).
    """

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]
    costs: Costs
    source: str = "simulated"

    def __post_init__(self) -> None:
        require_schedule("a timeline", self.schedule)
        try:
            rows = tuple(map(tuple, self.rows))
        except TypeError:  # not rows of anything
            rows = ()
        if len(rows) != self.schedule.ranks or not {*map(type, chain(*rows))} <= {Span}:
            raise SettingError(
                f"a timeline of {self.schedule!r} has a row of Spans for each of its ranks; got {self.rows!r}"
            )
        vars(self).update(rows=rows)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """What `rank` did, first to last.

        Raises:
            SettingError: there is no such rank.
        """
        return self.rows[require_rank(rank, self.schedule.ranks)]

    @cached_property
    def start(self) -> Any:
        """Start of the first action, over all ranks."""
        return min((row[0].start for row in self.rows if row), default=0)

    @cached_property
    def end(self) -> Any:
        """End of the last action, over all ranks."""
        return max((span.end for row in self.rows for span in row), default=0)

    @property
    def makespan(self) -> Any:
        """End of the last action less the start of the first, over all ranks."""
        return plain(self.end - self.start)

    @property
    def span(self) -> Any:
        """The longest time from a rank's own first start to its own last end: the Zero Bubble papers' "cost"."""
        rows = [[span for span in row if span.action.computes] for row in self.rows]  # a receive is posted early
        return plain(max((row[-1].end - row[0].start for row in rows if row), default=0))

    @cached_property
    def busy(self) -> tuple[Any, ...]:
        """Time each rank spends in actions."""
        return tuple(plain(sum(span.end - span.start for span in row)) for row in self.rows)

    @property
    def idle(self) -> tuple[Any, ...]:
        """Time each rank spends in none: the makespan less its busy time."""
        return tuple(plain(self.makespan - busy) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time: 1 - busy / (ranks · makespan)."""
        time = self.schedule.ranks * self.makespan
        return float(max(0, 1 - ratio(sum(self.busy), time))) if time else 0.0

    @property
    def overhead(self) -> float:
        """How much longer the run takes than its ideal: makespan / ideal - 1; ideal is the busiest rank's busy time.

        Where all ranks are equally busy it is idle time over busy time, which Megatron calls the bubble: (p-1)/m for
        1F1B (arXiv 2104.04473, §2.2). Where they are not, it leaves out that the others wait for the busiest rank.
        """
        ideal = max(self.busy)
        return float(ratio(self.makespan, ideal) - 1) if ideal else 0.0

    @cached_property
    def peak_activations(self) -> tuple[Any, ...]:
        """The most memory that each rank's activations take at any time, in units of `costs.activation`."""
        changes = (self._memory_changes(rank)[1] for rank in range(self.schedule.ranks))
        peaks = [max(accumulate(each, initial=0)) for each in changes]
        return tuple(map(plain, self._weights[1].numbers(peaks)))

    @cached_property
    def reasons(self) -> Reasons:
        """The spans of compute actions, and which of them each one has waited for."""
        from ppedu.core.why import Reasons

        return Reasons(self)

    def critical_path(self) -> list[tuple[int, Span]]:
        """The actions that the makespan hangs on, first to last, each with its rank.

        It ends with the action that ends last; before each stands what it has waited for longest. Make one of
        them faster and the whole may be faster.
        """
        from ppedu.core.why import critical_path

        return critical_path(self)

    def why_idle(self, rank: int, time: Any) -> str:
        """Why `rank` does nothing at `time`, counted from the timeline's start, in a sentence.

            rank 2 waits 3–5: 2B0 needs 3B0 from rank 3

        Raises:
            SettingError: there is no such rank, or `time` is not a number of at least 0.
        """
        from ppedu.core.why import why_idle

        return why_idle(self, require_rank(rank, self.schedule.ranks), time)

    def gaps(self) -> list[Gap]:
        """All the times in which a rank does nothing, rank after rank, each with its reason as `why_idle` says it."""
        from ppedu.core.why import gaps

        return list(gaps(self))

    def causes(self) -> dict[str, float]:
        """Return the causes of the bubble and their shares of all ranks' time, which add up to the bubble.

        "communication": what would go without latency (of a measured run: whatever simulating it with its own costs
            does not explain).
        "imbalance": what would go as well if every stage took the mean time. Below 0 where uneven stages help.
        "ordering": what a faster order of the same actions saves that needs no more memory on any rank. It is a lower
            bound: the order is the best that list scheduling found (see `ppedu.core.reorder`), not the best there is.
        "warm-up and cooldown": what is left. Ranks wait for their first microbatch and for the last gradients, and in
            between for gradients whose activations fill the memory that the next forward needs.

        Raises:
            ScheduleError: the timeline's schedule is not legal.
        """
        from ppedu.core.why import causes

        return causes(self)

    def memory(self, rank: int) -> list[tuple[Any, Any]]:
        """The memory of a rank's activations, as steps: from each time on, that value.

        F takes its activation at its start, B gives it back at its end; I gives back 1 - weight_memory of it,
        W the rest.

        Raises:
            SettingError: there is no such rank.
        """
        times, changes = self._memory_changes(require_rank(rank, self.schedule.ranks))
        held = self._weights[1].numbers(accumulate(changes, initial=0))
        return list(zip([self.start, *times], map(plain, held), strict=True))

    @cached_property
    def _weights(self) -> tuple[dict[str, list[Any]], Ticks]:
        """How much memory an op takes in each stage, below 0 where it gives it back, in ticks."""
        weights = self.costs.per_stage(self.costs.activation, self.schedule.stages, self.schedule.ranks)
        kept = self.costs.weight_memory
        shares: dict[str, Number] = {"F": 1, "B": -1, "I": kept - 1, "W": -kept}
        changes = {op: [weight * share for weight in weights] for op, share in shares.items()}
        ticks = Ticks(chain(*changes.values()))
        return {op: [ticks.count(change) for change in each] for op, each in changes.items()}, ticks

    def _memory_changes(self, rank: int) -> tuple[list[Any], list[Any]]:
        """The times at which the memory of a rank's activations changes, and by how many ticks."""
        weights, _ = self._weights
        times, changes = [], []
        # A rank does one thing at a time, so its spans are in the order of time already.
        for action, start, end in self.rows[rank]:
            parts = reversed(action.parts) if action.op == "OVERLAP_B_F" else action.parts or (action,)  # forward first
            for stage, op, _, _ in parts:
                change = weights[op][stage] if op in weights else 0
                if change:
                    times.append(start if change > 0 else end)
                    changes.append(change)
        return times, changes

    def text(self, width: int = 128) -> str:
        """Return the timeline in characters: a line for each rank, idle time left blank, at most `width` wide.

        Where there is room, each action carries its microbatch and a long one is drawn long; where there
        is not, letters stand for actions; where there is not even that, one letter stands for several.
        F0' is the forward of microbatch 0 in a rank's second chunk.

        Raises:
            SettingError: `width` is not a whole number of at least 1.
        """
        from ppedu.core.text import draw

        return draw(self, width)

    @cached_property
    def readable(self) -> tuple[int, str]:
        """What to multiply times with for people, and the unit they then have: (1000, "ms") below a second."""
        return (1000, "ms") if self.costs.unit == "s" and self.makespan < 1 else (1, self.costs.unit)

    def summary(self) -> str:
        """Return one line: the schedule, its size, makespan, bubble and peak of activations.

        Where the times were not simulated it starts with their source: "measured 1f1b, 4 ranks, …".
        """
        schedule, peaks = self.schedule, self.peak_activations
        source = "" if self.source == "simulated" else f"{self.source} "
        return (
            f"{source}{schedule.name}, {schedule.size}: "
            f"makespan {pretty(self.makespan, self.costs.unit)}, bubble {self.bubble:.1%}, "
            f"peak activations {pretty(max(peaks))}"
        )

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the timeline with matplotlib; see `ppedu.view.plot.plot` for the options."""
        return display.plot(self, ax, **options)

    def show(self, outline: Timeline | None = None) -> Any:
        """The timeline to be touched: end a notebook's cell with it. Without a kernel its picture is left.

        outline: another timeline of as many ranks, drawn over this one as outlines: a simulation over a measured run.

        Raises:
            SettingError: `outline` is no timeline of as many ranks.
        """
        return display.show(self, outline)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return display.bundle(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a file; its ending decides what is written.

        .json: a trace that ui.perfetto.dev and chrome://tracing open, and `Timeline.load` reads. With
            `ppedu.view.save([measured, simulated], path)` one file holds several.
        .html: a page with the picture, the numbers and the orders, which needs no network.
        .svg .png .pdf: the picture that `plot` draws.

        Raises:
            SettingError: the ending is none of these.
            PipelineError: the file cannot be written.
        """
        display.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """The timeline that `save` wrote to a .json file.

        Raises:
            PipelineError: the file cannot be read, or holds something else.
        """
        return display.load(path)

    def __repr__(self) -> str:
        return f"<Timeline: {self.summary()}>"

    def __str__(self) -> str:
        return self.text()
