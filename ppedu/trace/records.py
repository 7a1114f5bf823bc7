"""The records that readers of traces return, and the steps of each pipeline, which are made of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ppedu.core.actions import Action, Op
from ppedu.core.costs import Costs
from ppedu.core.errors import ParseError
from ppedu.core.numeric import plural
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Span, Timeline
from ppedu.trace.recognize import recognize

TOLERANCE = 1e-4  # seconds that two actions of a rank may overlap; the second then starts at the end of the first


class Record(NamedTuple):
    """One line of a trace: an action, or something else that the rank did in the step, such as its optimizer.

    worker: any number that tells the ranks of all replicas apart. replica: None if the trace does not say.
    start, end: in seconds.
    """

    step: int
    replica: int | None
    worker: int
    action: Action | None
    name: str
    start: float
    end: float


class Other(NamedTuple):
    """Something a rank did outside the pipeline: gradient reduction, the optimizer, garbage collection, …"""

    rank: int
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Recorded:
    """A step of one pipeline: its compute actions, and what its ranks did besides."""

    timeline: Timeline
    others: tuple[Other, ...] = ()

    @property
    def start(self) -> float:
        return min([float(self.timeline.start), *(other.start for other in self.others)])

    @property
    def end(self) -> float:
        return max([float(self.timeline.end), *(other.end for other in self.others)])


Key = tuple[int, int]  # a step and a replica


def assemble(records: Iterable[Record], source: str, origin: str = "measured") -> tuple[dict[Key, Recorded], list[str]]:
    """Return the steps of a trace, and a sentence on each that was left out because it is incomplete.

    source: the name of the trace, for errors. origin: the source of the timelines.

    Raises:
        ParseError: the trace holds no whole step, or a rank does two things at once.
    """
    by_step: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_step[record.step].append(record)
    if not any(record.action for each in by_step.values() for record in each):
        raise ParseError(f"{source} has no forwards and backwards")
    pipelines = _pipelines([record for each in by_step.values() for record in each])
    places = {worker: (replica, rank) for replica, workers in pipelines.items() for rank, worker in enumerate(workers)}
    whole: dict[Key, Recorded] = {}
    faults: list[str] = []
    for step, all_records in sorted(by_step.items()):
        for replica, workers in pipelines.items():
            mine = [record for record in all_records if places.get(record.worker, (None,))[0] == replica]
            rows = _rows(mine, workers, f"{source}, step {step}")
            others = tuple(
                Other(places[record.worker][1], record.name, record.start, record.end)
                for record in mine
                if record.action is None
            )
            schedule = _schedule(rows)
            lost = None if schedule is None else _lost(schedule)
            if schedule is None or lost:
                faults.append(f"step {step}{f' of replica {replica}' if len(pipelines) > 1 else ''}: {lost or 'empty'}")
            else:
                whole[step, replica] = Recorded(Timeline(schedule, rows, Costs(unit="s"), origin), others)
    if not whole:
        raise ParseError(f"{source} holds no whole step; {faults[0]}. Give the traces of all ranks")
    return whole, faults


def recognized(timeline: Timeline) -> Timeline:
    """Return a timeline with its compute actions alone, and its schedule recognized."""
    rows = tuple(tuple(span for span in row if span.action.computes) for row in timeline.rows)
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = recognize(replace(timeline.schedule, name="measured", orders=orders))
    return replace(timeline, schedule=schedule, rows=rows)


def _pipelines(records: Sequence[Record]) -> dict[int, list[int]]:
    """Return the workers of each replica, rank 0 first.

    If the trace does not say who belongs to which replica, workers that run the same actions are sorted by number; the
    first of each kind are replica 0.
    """
    ran: defaultdict[int, set[Action]] = defaultdict(set)
    told: dict[int, int] = {}
    for _, replica, worker, action, *_ in records:
        if action:
            ran[worker].update(action.singles)
            if replica is not None:
                told[worker] = replica
    pipelines: defaultdict[int, list[int]] = defaultdict(list)
    seen: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for worker in sorted(ran):
        stage = _first_stage(ran[worker])
        pipelines[told.get(worker, seen[stage])].append(worker)
        seen[stage] += 1
    return {
        replica: sorted(workers, key=lambda worker: (_first_stage(ran[worker]), worker))
        for replica, workers in sorted(pipelines.items())
    }


def _first_stage(actions: set[Action]) -> tuple[int, bool]:
    """Return the first stage that a worker runs for its first microbatch.

    In a pipeline with one copy of the model, ranks are numbered by it, from 0; with two, this is the first copy.
    """
    first = min(action.microbatch for action in actions)
    return min(action.stage for action in actions if action.microbatch == first), first > 0


def _rows(records: Sequence[Record], workers: Sequence[int], where: str) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of each rank in order. Raise ParseError if a rank does two things at once, or one twice."""
    rows = []
    for rank, worker in enumerate(workers):
        row = sorted(
            (
                Span(record.action, record.start, record.end)
                for record in records
                if record.worker == worker and record.action
            ),
            key=lambda span: (span.start, span.end),
        )
        for index, (before, after) in enumerate(pairwise(row), 1):
            if after.start < before.end - TOLERANCE:
                raise ParseError(
                    f"{where}: on rank {rank}, {after.action} begins at {after.start:.8g} s, before {before.action} "
                    f"ends at {before.end:.8g} s; a rank runs one action at a time"
                )
            row[index] = after._replace(start=max(after.start, before.end), end=max(after.end, before.end))
        counted = Counter(single for span in row for single in span.action.singles)
        if twice := next((action for action, times in counted.items() if times > 1), None):
            raise ParseError(f"{where}: rank {rank} runs {twice} twice; are these the traces of one job?")
        rows.append(tuple(row))
    return tuple(rows)


def _schedule(rows: Sequence[Sequence[Span]]) -> Schedule | None:
    """Return the schedule that the rows follow, named after the published one that it is; None if they are empty."""
    singles = [(rank, single) for rank, row in enumerate(rows) for span in row for single in span.action.singles]
    if not singles:
        return None
    placement, microbatches = _placement(len(rows), singles)
    orders = tuple(tuple(span.action for span in row) for row in rows)
    forward_only = all(single.op == Op.F for _, single in singles)
    return recognize(Schedule("measured", placement, microbatches, orders, forward_only))


def _placement(ranks: int, singles: Sequence[tuple[int, Action]]) -> tuple[Placement, int]:
    """Return which rank holds which stage, and the number of microbatches."""
    stages = 1 + max(single.stage for _, single in singles)
    microbatches = 1 + max(single.microbatch for _, single in singles)
    held: Mapping[tuple[int, int], int] = {
        (single.stage, single.microbatch): rank for rank, single in singles if single.op == Op.F
    }
    first = tuple(held.get((stage, 0), stage % ranks) for stage in range(stages))
    last = tuple(held.get((stage, microbatches - 1), first[stage]) for stage in range(stages))
    chunks = max(1, stages // ranks)
    for name in ("loop", "v", "bidirectional"):
        if (name == "bidirectional") == (first != last) and stages == ranks * chunks:
            if name == "bidirectional" and chunks > 1:
                continue
            placement = Placement.make(name, ranks, chunks, microbatches)
            if placement.holders == ((first, last) if first != last else (first,)):
                return placement, microbatches
    split = next((m for m in range(microbatches) if held.get((0, m), first[0]) != first[0]), 0)
    return Placement("custom", ranks, (first, last) if first != last else (first,), split), microbatches


def _lost(schedule: Schedule) -> str | None:
    """Return a sentence on the first action that a complete step would have and this one lacks."""
    lost = [problem for problem in schedule.problems if problem.kind == "missing"]
    return f"{lost[0].message} ({plural(len(lost), 'action')} missing)" if lost else None
