"""Run: a training run that was measured, step by step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from ppedu.core.actions import Op
from ppedu.core.costs import Costs
from ppedu.core.errors import ParseError, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Span, Timeline
from ppedu.core.validate import require_count
from ppedu.trace import profiler, saved, table
from ppedu.trace.calibrate import Calibration, calibrate, settled, steps_in_words
from ppedu.trace.clocks import Clocks, align
from ppedu.trace.events import Progress
from ppedu.trace.records import Key, Recorded, assemble, recognized
from ppedu.trace.replay import Measured, travels

if TYPE_CHECKING:
    from ppedu.trace.autopsy import Autopsy
    from ppedu.trace.predict import Prediction


class Run:
    """A measured run: its steps, of one pipeline or of several replicas.

    Read one with `Run.load`. `only` chooses some of its steps or replicas, as another run.

    faults: a sentence on each step that is incomplete in the trace and was left out.
    clocks: by replica, how far the clocks of its ranks were off; see `Clocks`.
    """

    def __init__(self, recorded: Mapping[Key, Recorded], faults: Sequence[str] = (), clocks: Mapping[int, Clocks] = {}):
        self.recorded, self.faults, self.clocks = dict(recorded), tuple(faults), dict(clocks)

    @classmethod
    def load(
        cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], progress: Progress | None = None
    ) -> Run:
        """Read a run from its trace.

        paths: One of
            - the JSON files that torch.profiler wrote, one for each rank, zipped or not, with a range for each action
              (see `ppedu.trace.profiler`);
            - a file saved with `Timeline.save`, or with `ppedu.view.save`, of one or several steps; of measured and
              simulated timelines in one file, the measured ones count;
            - a CSV table with a line for each operation (see `ppedu.trace.table`).
        progress: Called now and then with the part that has been read, from 0 to 1.

        Raises:
            PipelineError: A file cannot be read.
            ParseError: A file is damaged or not such a trace, or the trace is impossible: a rank is missing, or does
                two things at once.
            SettingError: `paths` is not a file name or several.
        """
        given = [paths] if isinstance(paths, str | os.PathLike) else paths
        names = list(given) if isinstance(given, list | tuple | set | Iterator | dict) else []
        if not names or not all(isinstance(name, str | os.PathLike) for name in names):
            raise SettingError(f"Run.load takes the name of a trace file, or a list of several; got {paths!r}")
        tables = [name for name in names if table.is_table(name)]
        if tables and len(names) > 1:
            raise SettingError(f"give one table of the whole run, or traces alone; got {', '.join(map(str, names))}")
        source = repr(str(names[0])) if len(names) == 1 else f"the trace {str(names[0])!r} and {len(names) - 1} more"
        faults: list[str] = []
        if tables:
            recorded, faults = assemble(table.read(names[0]), source)
        elif len(names) == 1 and saved.is_saved(names[0]):
            timelines = saved.load_all(names[0])
            run = [each for each in timelines if each.source != "simulated"] or timelines
            steps = chain.from_iterable(each.steps for each in run)
            recorded = {(step, 0): Recorded(recognized(each)) for step, each in enumerate(steps)}
        else:
            recorded, faults = assemble(profiler.read(names, progress), source)
        _require_last_rank([each.timeline for each in recorded.values()], source)
        return cls(*_aligned(recorded, faults, source))

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps."""
        return tuple(sorted({step for step, _ in self.recorded}))

    @property
    def replicas(self) -> tuple[int, ...]:
        """The numbers of the replicas: pipelines that each train on a part of the batch."""
        return tuple(sorted({replica for _, replica in self.recorded}))

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the run, or of most of its steps: a published one, or one called "measured"."""
        counted = Counter(each.timeline.schedule for each in self.recorded.values())
        return counted.most_common(1)[0][0]

    @cached_property
    def regular(self) -> dict[Key, Recorded]:
        """The steps that follow `schedule`."""
        return {key: each for key, each in self.recorded.items() if each.timeline.schedule == self.schedule}

    @cached_property
    def steady(self) -> dict[Key, Recorded]:
        """The steps that follow `schedule`, without those in which the run was warming up."""
        left_out = set(self.warm_up)
        return {key: each for key, each in self.regular.items() if key[0] not in left_out}

    @cached_property
    def warm_up(self) -> tuple[int, ...]:
        """The steps at the start that took clearly unlike times."""
        steps = sorted({step for step, _ in self.regular})
        times = [max(each.timeline.makespan for key, each in self.regular.items() if key[0] == step) for step in steps]
        return tuple(steps[: settled(times)])

    def timeline(self, step: int | None = None, replica: int | None = None) -> Timeline:
        """Return the measured timeline of a step: by default, of a typical one (the median) and the first replica.

        Raises:
            SettingError: There is no such step or replica.
        """
        replica = self.replicas[0] if replica is None else replica
        if step is None:
            times = sorted((each.timeline.makespan, key[0]) for key, each in self.steady.items() if key[1] == replica)
            step = times[(len(times) - 1) // 2][1] if times else None
        chosen = self.recorded.get((_number("step", step), _number("replica", replica)))
        if chosen is None:
            raise SettingError(
                f"there is no step {step} of replica {replica}; the run has {steps_in_words(self.steps)}, "
                f"and the replicas {', '.join(map(str, self.replicas))}"
            )
        return chosen.timeline

    def only(self, steps: Iterable[int] | None = None, replicas: Iterable[int] | None = None) -> Run:
        """Return some of the steps and replicas as a run of their own.

        Raises:
            SettingError: Nothing is left, or they are not collections of numbers.
        """
        chosen = self.steps if steps is None else _numbers("steps", steps)
        few = self.replicas if replicas is None else _numbers("replicas", replicas)
        kept = {key: each for key, each in self.recorded.items() if key[0] in chosen and key[1] in few}
        if not kept:
            raise SettingError(
                f"the run has no such steps; it has {steps_in_words(self.steps)} of "
                f"{plural(len(self.replicas), 'replica')}"
            )
        return Run(kept, self.faults, self.clocks)

    @cached_property
    def calibration(self) -> Calibration:
        """The run's costs with their spread; see `Calibration`."""
        self.schedule.validate()
        return calibrate([each.timeline for each in self.steady.values()], self.warm_up)

    def costs(self) -> Costs:
        """Return the run's costs in seconds, to simulate with: `Costs` with a time for each stage and link.

        Steps in which the run was warming up are left out. `calibration` tells which these were, and how far times
        vary. `only(replicas=[1]).costs()` are those of one replica.

        Raises:
            ScheduleError: The order in which the run ran is not legal.
        """
        return self.calibration.costs

    def replay(self, step: int | None = None, replica: int | None = None) -> Timeline:
        """Return the simulation of a step in which each action takes the time that it took.

        Messages take the usual time of their link, and the time between two actions is the usual one. What it lacks of
        the measured time, late messages and pauses have cost.
        """
        timeline, overhead = self.timeline(step, replica), self.calibration.overhead
        lasts = [[span.end - span.start for span in row] for row in timeline.rows]
        pauses = [[0.0, *(overhead for _ in row[1:])] for row in timeline.rows]
        replayed = Measured(timeline.schedule, lasts, pauses, travels(timeline.schedule, self.costs().delay))
        rows = tuple(
            tuple(
                Span(span.action, start, start + span.end - span.start) for span, start in zip(row, starts, strict=True)
            )
            for row, starts in zip(timeline.rows, replayed.starts(), strict=True)
        )
        return replace(timeline, rows=rows, source="replayed")

    def measured(self, timeline: Timeline) -> Measured:
        """Return the durations, pauses and messages of one of the run's timelines."""
        overhead, costs = self.calibration.overhead, self.costs()
        return Measured.of(timeline, lambda sender, receiver: costs.delay(sender, receiver) + overhead)

    def autopsy(self) -> Autopsy:
        """Return why the run's steps take as long as they do; see `Autopsy`.

        Raises:
            ScheduleError: The order in which the run ran is not legal.
        """
        from ppedu.trace.autopsy import Autopsy

        return Autopsy(self)

    def predict(
        self,
        schedule: Schedule | str,
        costs: Costs | None = None,
        layers: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Prediction:
        """Return how long a step would take with another schedule, with a 90 % interval; see `Prediction`.

        schedule: Another order, number of microbatches or number of stages; on as many ranks. A name stands for the
            schedule of that name with the run's ranks and microbatches.
        costs: Costs to use instead of `costs()`, of the run's stages or of the schedule's, such as
            `dataclasses.replace(run.costs(), weight=…)` for a weight gradient that the run does not show.
        layers: The layers in each stage of the run, and those in each stage of `schedule`.

        Raises:
            SettingError: The schedule has another number of ranks, or `costs` or `layers` do not fit.
            ScheduleError: The schedule, or the order in which the run ran, is not legal.
        """
        from ppedu.trace.predict import predict

        return predict(self, schedule, costs, layers)

    def __repr__(self) -> str:
        schedule = self.schedule
        replicas = f", {plural(len(self.replicas), 'replica')}" if len(self.replicas) > 1 else ""
        length = pretty(median(each.timeline.makespan for each in self.recorded.values()), "s")
        return f"<Run: {schedule.name}, {schedule.size}{replicas}, {plural(len(self.steps), 'step')} of {length}>"


def _number(name: str, value: Any) -> int:
    return require_count(f"the {name}", value, least=0)


def _numbers(name: str, values: Any) -> set[int]:
    """Return numbers of steps or replicas; raise SettingError for anything else."""
    if hasattr(values, "tolist"):  # from NumPy or torch
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise SettingError(f"{name} must be a list of numbers, such as [0, 1]; got {values!r}")
    return {_number(name.removesuffix("s"), value) for value in values}


def _require_last_rank(timelines: Iterable[Timeline], source: str) -> None:
    """Raise ParseError if the last stage waits long for its first backward, as if a stage after it were missing."""
    waits, forwards = [], []
    for timeline in timelines:
        last = timeline.schedule.stages - 1
        spans = [
            (single.op, before.end, after.start, after.end)
            for row in timeline.rows
            for before, after in pairwise(row)
            for single in after.action.singles
            if single.stage == last
        ]
        forwards += [end - start for op, _, start, end in spans if op is Op.F]
        first = min(((start, start - free) for op, free, start, _ in spans if op in (Op.B, Op.I)), default=(0, 0))
        waits.append(first[1])
    if forwards and median(waits) > median(forwards):
        wait, forward = (pretty(median(each), "s") for each in (waits, forwards))
        raise ParseError(
            f"in {source}, the last stage waits {wait} before its first backward, longer than a forward ({forward}), "
            "although it needs nothing else; are the ranks after it missing? Give the traces of all ranks"
        )


def _aligned(
    recorded: dict[Key, Recorded], faults: list[str], source: str
) -> tuple[dict[Key, Recorded], list[str], dict[int, Clocks]]:
    """Return the same steps with the clocks of the ranks aligned, as far as messages tell."""
    clocks: dict[int, Clocks] = {}
    found: dict[Key, Recorded] = {}
    for replica in sorted({replica for _, replica in recorded}):
        mine = {key: each for key, each in recorded.items() if key[1] == replica}
        try:
            clocks[replica] = align([each.timeline for each in mine.values()])
        except ValueError as error:
            raise ParseError(f"{source} contradicts itself: {error}; are these the traces of one job?") from None
        found.update((key, _shifted(each, clocks[replica].shifts)) for key, each in mine.items())
    return found, faults, clocks


def _shifted(recorded: Recorded, shifts: Sequence[float]) -> Recorded:
    if not any(shifts):
        return recorded
    rows = tuple(
        tuple(Span(action, start + shift, end + shift) for action, start, end in row)
        for row, shift in zip(recorded.timeline.rows, shifts, strict=True)
    )
    others = tuple(
        other._replace(start=other.start + shifts[other.rank], end=other.end + shifts[other.rank])
        for other in recorded.others
    )
    return Recorded(replace(recorded.timeline, rows=rows), others)
