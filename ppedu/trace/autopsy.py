"""Why the steps of a run take as long as they do: the bubble, taken apart into causes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from statistics import fmean, median
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ppedu.core import SettingError, hooks
from ppedu.core.files import named
from ppedu.core.numeric import plural, pretty
from ppedu.core.tables import LINE, in_html, in_text
from ppedu.sim import simulate
from ppedu.sim.costs import TIMES
from ppedu.sim.reorder import reorder
from ppedu.trace.calibrate import steps_in_words
from ppedu.trace.findings import find
from ppedu.trace.records import Recorded
from ppedu.trace.replay import Measured, by_rank, kind_of, usual_travels
from ppedu.trace.stragglers import Step, find_stragglers

if TYPE_CHECKING:
    from ppedu.trace.run import Run

# In the order in which they are taken away. The last two remain when nothing is wrong with the machines.
CAUSES = {
    "tail": "time outside the pipeline: gradient reduction, optimizer, data",
    "pauses": "ranks that pause between actions, and messages that are later than usual",
    "messages": "the usual time of messages",
    "slow worker": "ranks that are slower than the same rank of other replicas, or than in other steps",
    "variation": "microbatches of one step that take unlike times",
    "imbalance": "stages that take unlike times",
    "order": "an order that another one of the same actions beats in the same memory",
    "warm-up and cooldown": "ranks that wait for their first microbatch and for the last gradients",
}
REPLAYED = ("pauses", "messages", "slow worker", "variation", "imbalance")  # can be left out of a replay


class Autopsy:
    """The bubble of a run, taken apart into its causes. It prints as a table with the findings.

    A step lasts from the first thing that any rank does in it to the last, optimizer included. Its causes are taken
    away one after the other, in the order of `CAUSES`: each time the step is replayed, and what all ranks idle less is
    the share of that cause.

    Attributes:
        step: The median time of a step in seconds.
        bubble: The idle part of all ranks' time.
        causes: By name of a cause, its part of all ranks' time. They sum to the bubble. One that happens to fill gaps
            that another leaves may be negative.
        saved: By name of a cause, the part of a step that would be saved without this one alone.
        stragglers: The ranks that are slower than the same rank of other replicas, slowest first; see `Straggler`.
        findings: What to do, most valuable first; see `Finding`.
    """

    def __init__(self, run: Run):
        self.run = run
        costs, overhead = run.costs(), run.calibration.overhead
        timelines = [each.timeline for each in run.steady.values()]
        usual = usual_travels(timelines, lambda sender, receiver: costs.delay(sender, receiver) + overhead)
        steps: defaultdict[int, dict[int, Measured]] = defaultdict(dict)
        recorded: defaultdict[int, list[Recorded]] = defaultdict(list)
        for (step, replica), each in run.steady.items():
            steps[step][replica] = Measured.of(each.timeline, usual)
            recorded[step].append(each)
        self.steps: Mapping[int, Step] = steps
        # A step lasts as long as its longest replica: from the first thing that a rank does to the last.
        self.lengths = {step: max(each.end - each.start for each in mine) for step, mine in recorded.items()}
        self.step = median(self.lengths.values())
        self.stragglers = find_stragglers(self.steps)
        self.causes = self._causes()
        self.bubble = sum(self.causes.values())
        self.saved = self._saved()
        self.findings = find(self)

    @property
    def measured(self) -> list[Measured]:
        """The steps of all replicas."""
        return [each for replicas in self.steps.values() for each in replicas.values()]

    @property
    def pipeline(self) -> float:
        """The part of the steps that lies within the pipeline."""
        return sum(map(_makespan, self.steps.values())) / sum(self.lengths.values())

    def _causes(self) -> dict[str, float]:
        """Return each cause's part of all ranks' time.

        If the ranks idle for 10 ms of a step, for 8 ms within the pipeline, and for 5 ms there without pauses, then the
        tail has cost 2 ms and pauses 3 ms. The remaining 5 ms are for the causes that follow.
        """
        idle = dict.fromkeys(CAUSES, 0.0)  # by cause, how much less the ranks idle without it
        for step, replicas in self.steps.items():
            before = self.lengths[step] - _busy(replicas)
            after = _makespan(replicas) - _busy(replicas)
            idle["tail"] += before - after
            for cause in REPLAYED:
                before = after
                replicas = self._without(cause, step, replicas)  # and without the causes before
                after = _makespan(replicas) - _busy(replicas)
                idle[cause] += before - after
            reordered = self._order * _makespan(replicas)
            idle["order"] += reordered
            idle["warm-up and cooldown"] += after - reordered
        return {cause: time / sum(self.lengths.values()) for cause, time in idle.items()}

    def _saved(self) -> dict[str, float]:
        saved = {"tail": 1 - self.pipeline, "order": self._order * self.pipeline}
        for cause in REPLAYED:
            less = 0.0
            for step, replicas in self.steps.items():
                less += _makespan(replicas) - _makespan(self._without(cause, step, replicas))
            saved[cause] = less / sum(self.lengths.values())
        return saved

    @cached_property
    def _order(self) -> float:
        """The part of a pipeline of even stages that another order of its actions saves in the same memory."""
        costs = self.run.costs()
        even: dict[str, Any] = {}
        for name in TIMES:
            times = getattr(costs, name)
            if isinstance(times, tuple):  # one for each stage
                even[name] = (fmean(times),) * len(times)
        timeline = simulate(self.run.schedule, replace(costs, latency=0, **even))
        return float(1 - reorder(timeline).makespan / timeline.makespan)

    def _without(self, cause: str, step: int, replicas: Step) -> Step:
        """Return a step without a cause."""
        return {replica: self._removed(cause, step, replica, each) for replica, each in replicas.items()}

    def _removed(self, cause: str, step: int, replica: int, measured: Measured) -> Measured:
        nothing = [0.0] * len(measured.lasts)
        if cause == "pauses":
            return measured._replace(pauses=nothing)
        if cause == "messages":
            return measured._replace(travels=nothing)
        if cause == "slow worker":
            slow = {each.rank: each.factors.get(step, 1.0) for each in self.stragglers if each.replica == replica}
            lasts: list[float] = []
            for rank, row in enumerate(by_rank(measured.schedule, measured.lasts)):
                lasts += [time / slow.get(rank, 1.0) for time in row]
            return measured._replace(lasts=lasts)
        usual = measured.usual()
        if cause == "variation":
            return measured._replace(lasts=[usual[kind_of(action)] for action, _ in measured.timed])
        # Without imbalance, every stage takes the mean time: a stage that takes half of it now is twice as slow then.
        of_ops: defaultdict[Any, list[float]] = defaultdict(list)  # by ops, the usual times of the stages
        for (ops, *_), time in usual.items():
            of_ops[ops].append(time)
        factors = {}
        for kind, time in usual.items():
            ops, *_ = kind
            factors[kind] = fmean(of_ops[ops]) / (time or 1.0)
        return measured._replace(lasts=[time * factors[kind_of(action)] for action, time in measured.timed])

    def _head(self) -> Iterator[str]:
        run = self.run
        yield f"{run.title}: {plural(len(self.steps), 'step')} of {pretty(self.step, 's')}, bubble {self.bubble:.1%}"
        if run.warm_up:
            yield f"left out, as a slow start: {steps_in_words(run.warm_up)}"
        if unlike := len(run.recorded) - len(run.regular):
            yield f"left out, because they ran another order: {plural(unlike, 'step')}"
        yield from run.remarks
        shifts = [abs(shift) for clocks in run.clocks.values() for shift in clocks.shifts]
        if any(shifts):
            yield f"clocks were corrected by up to {pretty(max(shifts), 's')}: no message arrives before it is sent"

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield "cause", "share of all ranks' time", "saved without it"
        for cause, share in sorted(self.causes.items(), key=lambda each: -each[1]):
            saved = f"{_percent(self.saved[cause])} of a step" if cause in self.saved else "–"
            yield cause, _percent(share), saved

    def __str__(self) -> str:
        table = [line for lines in in_text(self._rows(), 80, LINE) for line in lines]
        findings = [
            line
            for number, finding in enumerate(self.findings, 1)
            for line in wrap(str(finding), LINE, initial_indent=f"{number}. ", subsequent_indent="   ")
        ]
        head = [part for line in self._head() for part in wrap(line, LINE, subsequent_indent="   ")]
        return "\n".join([*head, "", *table, "", *(findings or ["Nothing would save much."])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        head = "<br>".join(map(escape, self._head()))
        table = in_html([[escape(cell) for cell in row] for row in self._rows()])
        findings = "".join(f"<li>{escape(str(finding))}</li>" for finding in self.findings)
        return f"<p>{head}</p>{table}<ol>{findings}</ol>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the autopsy and a typical step to a file that ends in .html. It needs no network.

        Raises:
            SettingError: The ending is another one.
            PipelineError: The file cannot be written.
        """
        if named(path).suffix.lower() != ".html":
            raise SettingError(f"cannot save an autopsy as {str(path)!r}; end it in .html")
        hooks.call("save report", self._repr_html_(), self.run.timeline().show(self.run.replay()), path)


def _percent(part: float) -> str:
    return f"{0.0 if abs(part) < 0.0005 else part:.1%}"


def _makespan(replicas: Step) -> float:
    return max(each.makespan() for each in replicas.values())


def _busy(replicas: Step) -> float:
    """Return the mean time that a rank computes."""
    return fmean(fmean(each.busy()) for each in replicas.values())
