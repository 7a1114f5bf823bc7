"""Costs from measured steps: times of each stage, latencies of each link, and what varies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, median
from typing import Any

from ppedu.core.numeric import pretty
from ppedu.core.tables import LINE, in_html, in_text
from ppedu.sim import Costs, Timeline
from ppedu.sim.fit import action_times, fit, inputs
from ppedu.sim.per_link import each_link

WARMER = 1.03  # a warm-up step takes this much longer than the others, or as much less
CLEARER = 0.6  # two medians leave at most this part of the deviation from one


@dataclass(frozen=True)
class Calibration:
    """The costs of a run, in seconds, and how sure they are.

    Attributes:
        costs: For each stage, the median time of its actions, plus `overhead`; for each link, its median latency.
        overhead: The usual time between two actions of a rank that waits for no message. Python and launches take it.
        spread: By name of a cost and stage, the times that a tenth of the actions fall below and exceed.
        warm_up: The steps at the run's start that took unlike times and were left out.
    """

    costs: Costs
    overhead: float
    spread: dict[str, list[tuple[float, float]]]
    warm_up: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join([*chain(*in_text(self._rows(), LINE, LINE)), *self._notes()])

    def _repr_html_(self) -> str:
        from html import escape

        return f"{in_html(self._rows())}<p>{'<br>'.join(map(escape, self._notes()))}</p>"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield "stage", *self.spread
        columns = []
        for name, ends in self.spread.items():
            medians = getattr(self.costs, name)
            columns.append([_in_milliseconds(*each) for each in zip(medians, ends, strict=True)])
        for stage, cells in enumerate(zip(*columns, strict=True)):
            yield str(stage), *cells

    def _notes(self) -> Iterator[str]:
        yield f"overhead per action: {pretty(self.overhead, 's')}"
        if self.warm_up:
            yield f"left out, as a slow start: {steps_in_words(self.warm_up)}"


def _in_milliseconds(middle: float, ends: tuple[float, float]) -> str:
    """Return a time and its spread, in seconds, as text: "68 ms (61–74)"."""
    low, high = ends
    return f"{pretty(1000 * middle)} ms ({pretty(1000 * low)}–{pretty(1000 * high)})"


def calibrate(timelines: Sequence[Timeline], warm_up: Sequence[int] = ()) -> Calibration:
    """Return the costs of measured steps of one schedule: those of `fit`, with the overhead in the times of actions."""
    found = fit(timelines)
    overhead = _overhead(timelines, found)
    spread: dict[str, list[tuple[float, float]]] = {}
    times: dict[str, Any] = {}
    for name, stages in action_times(timelines).items():
        spread[name] = []
        for of_stage in stages:
            ordered = sorted(of_stage or chain(*stages))  # a stage without such actions gets the times of all stages
            tenth = len(ordered) // 10
            low, high = ordered[tenth], ordered[-1 - tenth]
            spread[name].append((low + overhead, high + overhead))
        times[name] = tuple(time + overhead for time in getattr(found, name))
    if "backward" in times and "weight" in times and "input" not in times:  # I is what W leaves of B, if anything
        times["input"] = tuple(max(0.0, b - w) for b, w in zip(times["backward"], times["weight"], strict=True))
    latency = each_link(lambda time: max(0.0, time - overhead), found.latency)
    return Calibration(replace(found, **times, latency=latency), overhead, spread, tuple(warm_up))


def _overhead(timelines: Iterable[Timeline], costs: Costs) -> float:
    """Return the usual time between two actions of a rank that does not wait for a message in between.

    It is the mean without the longest tenth: such times add up in a step, and a few of them are pauses.
    """
    gaps = []
    for timeline in timelines:
        for rank, before, span, made in inputs(timeline):
            if before and all(end + costs.delay(sender, rank) <= before.end for sender, end in made):
                gaps.append(span.start - before.end)
    if not gaps:
        return 0.0
    gaps.sort()
    kept = len(gaps) - len(gaps) // 10
    return max(0.0, fmean(gaps[:kept]))


def settled(times: Sequence[float]) -> int:
    """Return how many steps at the start of a run are warm-up: up to a third, if they take clearly unlike times.

    The change-point is where two medians, before and after it, fit the times of all steps best.
    """

    def deviation(part: Sequence[float]) -> float:
        middle = median(part)
        return sum(abs(each - middle) for each in part)

    if len(times) < 2:
        return 0
    deviations = [(deviation(times[:k]) + deviation(times[k:]), k) for k in range(1, len(times))]
    left, k = min(deviations)
    is_early = k <= len(times) / 3
    is_clear = left <= CLEARER * deviation(times)
    if not (is_early and is_clear):
        return 0
    ratio = median(times[:k]) / median(times[k:])
    is_alike = 1 / WARMER <= ratio <= WARMER
    return 0 if is_alike else k


def steps_in_words(steps: Sequence[int]) -> str:
    """Return steps as text: "steps 0–3 and 7"."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(parts) > 1:
        parts = [", ".join(parts[:-1]), parts[-1]]
    return f"step{'s' if len(steps) > 1 else ''} {' and '.join(parts)}"
