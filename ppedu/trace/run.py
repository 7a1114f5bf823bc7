"""Run: a training run that was measured, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from ppedu.core import Schedule, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.core.validate import require_count
from ppedu.sim import Costs, Span, Timeline
from ppedu.trace.calibrate import Calibration, calibrate, settled, steps_in_words
from ppedu.trace.clocks import ClockShifts
from ppedu.trace.events import Progress
from ppedu.trace.load import Paths, load
from ppedu.trace.records import Key, Recorded
from ppedu.trace.replay import Measured, by_rank, travels

if TYPE_CHECKING:
    from ppedu.trace.autopsy import Autopsy
    from ppedu.trace.predict import Prediction


class Run:
    """A measured run: its steps, of one pipeline or of several replicas.

    Read one with `Run.load`. `only` chooses some of its steps or replicas, as another run.

    Args:
        recorded: The timeline of each step, by step and replica, with what its ranks did besides.
        remarks: Sentences on what was trimmed or left out while the trace was read, and on what looks wrong with it.
        clocks: By replica, how far the clocks of its ranks were off; see `ClockShifts`.
        warm_up: The steps in which the run was warming up, if they are known; found by their times if not.
    """

    def __init__(
        self,
        recorded: Mapping[Key, Recorded],
        remarks: Sequence[str] = (),
        clocks: Mapping[int, ClockShifts] = {},
        warm_up: Sequence[int] | None = None,
    ):
        self.recorded, self.remarks, self.clocks = dict(recorded), tuple(remarks), dict(clocks)
        self._warm_up = warm_up

    @classmethod
    def load(cls, paths: Paths, progress: Progress | None = None, names: Mapping[str, str] | None = None) -> Run:
        """Read a run from its trace. Incomplete steps and damaged or unknown lines are left out; `remarks` counts them.

        Args:
            paths: The JSON files that torch.profiler wrote, one for each rank, zipped or not, with a range for each
                action (see `ppedu.trace.profiler`), or one file of all ranks merged. Which rank a file is of is found
                from torch's notes in it or from its name, unless a dict says it: {rank: file} or
                {(replica, rank): file}. Or a file saved with `Timeline.save`, or with `ppedu.view.save`, of one or
                several steps; of measured and simulated timelines in one file, the measured ones count. Or a CSV table
                with a line for each operation (see `ppedu.trace.csv_table`). Or a folder with these files.
            progress: Called now and then with the part that has been read, from 0 to 1.
            names: The actions of ranges or operations with other names: regular expressions for whole names, each with
                an action that may contain groups and lack numbers, such as {"forward_step": "F", "dgrad ([0-9]+)":
                r"I\\1"}. Without a stage, it is the place of the rank in the pipeline; without a microbatch, they count
                from 0 in each step.

        Raises:
            PipelineError: A file cannot be read.
            ParseError: A file is damaged or not such a trace, or the trace is impossible: a rank is missing, or does
                two things at once in every step.
            SettingError: `paths` is not a file name or several, or `names` are not as above.
        """
        return cls(*load(paths, progress, names))

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

    @property
    def title(self) -> str:
        """The schedule and its size: "1f1b, 4 ranks, 8 microbatches, 2 replicas"."""
        replicas = f", {plural(len(self.replicas), 'replica')}" if len(self.replicas) > 1 else ""
        return f"{self.schedule.name}, {self.schedule.size}{replicas}"

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
        """The steps at the start that took clearly unlike times; of a part of a run, those that are so in the whole."""
        steps = sorted({step for step, _ in self.regular})
        if self._warm_up is not None:
            known = tuple(step for step in steps if step in self._warm_up)
            return known if len(known) < len(steps) else ()  # `only` may have chosen nothing but warm-up steps
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
            if times:
                _, step = times[(len(times) - 1) // 2]
        key = require_count("the step", step, least=0), require_count("the replica", replica, least=0)
        if key not in self.recorded:
            raise SettingError(
                f"there is no step {step} of replica {replica}; the run has {steps_in_words(self.steps)}, "
                f"and the replicas {', '.join(map(str, self.replicas))}"
            )
        return self.recorded[key].timeline

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
        return Run(kept, self.remarks, self.clocks, self.warm_up)

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
        schedule = timeline.schedule
        lasts, pauses = [], []
        for row in timeline.rows:
            lasts += [span.end - span.start for span in row]
            pauses += [0.0 if index == 0 else overhead for index in range(len(row))]
        starts = Measured(schedule, lasts, pauses, travels(schedule, self.costs().delay)).starts()
        actions = chain(*schedule.orders)
        spans = [Span(action, start, start + time) for action, start, time in zip(actions, starts, lasts, strict=True)]
        return replace(timeline, rows=tuple(map(tuple, by_rank(schedule, spans))), source="replayed")

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

        Args:
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
        length = pretty(median(each.timeline.makespan for each in self.recorded.values()), "s")
        return f"<Run: {self.title}, {plural(len(self.steps), 'step')} of {length}>"


def schedule_of(paths: Paths) -> Schedule:
    """Return the schedule of a run. See `Run.load`."""
    return Run.load(paths).schedule


def _numbers(name: str, values: Any) -> set[int]:
    """Return numbers of steps or replicas; raise SettingError for anything else."""
    if hasattr(values, "tolist"):  # from NumPy or torch
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise SettingError(f"{name} must be a list of numbers, such as [0, 1]; got {values!r}")
    return {require_count(f"the {name.removesuffix('s')}", value, least=0) for value in values}
