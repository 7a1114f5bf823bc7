"""The steps of each pipeline, assembled from the records of its trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median

from ppedu.core import Action, F, Op, ParseError, Placement, Schedule, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.core.placement import PLACEMENTS
from ppedu.sim import Costs, Span, Timeline
from ppedu.trace.numbering import CUT, numbered
from ppedu.trace.recognize import recognize
from ppedu.trace.records import Key, Other, Record, Recorded, Worker

SMALL = 0.1  # of a rank's usual action: by as much, two of its actions may overlap; the second is then trimmed
ROUNDING = 2e-6  # seconds, of times that a table or a trace counts in microseconds; not worth a remark
FEW = 0.02  # of the time that a rank computes in a step: what may be trimmed in all


def assemble(records: Iterable[Record], remarks: Iterable[str], source: str) -> tuple[dict[Key, Recorded], list[str]]:
    """Return the steps of a trace, and remarks on what was trimmed or left out.

    Args:
        records: The lines of the trace, in any order.
        remarks: Those of its reader.
        source: The name of the trace, for errors.

    Raises:
        ParseError: The trace has no step that is whole, and in which a rank does one thing at a time.
    """
    every, unlike = numbered(_with_halves([*records]))
    if not every:
        raise ParseError("; ".join([f"{source} has no forwards and backwards", *remarks]))
    pipelines = _pipelines(every)
    places = {each: (replica, rank) for replica, workers in pipelines.items() for rank, each in enumerate(workers)}
    forward_only = all(single.op == Op.F for record in every for single in record.singles)
    steps: dict[Key, list[list[Record]]] = {}  # by rank
    for record in every:
        replica, rank = places[record.worker]
        if record.step is not None and record.step != CUT:
            key = record.step, replica
            if key not in steps:
                steps[key] = [[] for _ in pipelines[replica]]
            steps[key][rank].append(record)
    rows_of = _Rows(every)
    whole: dict[Key, Recorded] = {}
    faults: list[str] = []
    for (step, replica), ranks in sorted(steps.items()):
        try:
            rows = tuple(rows_of.row(rank, mine) for rank, mine in enumerate(ranks))
            schedule = _schedule(rows, forward_only)
        except ValueError as error:
            where = f" of replica {replica}" if len(pipelines) > 1 else ""
            faults.append(f"step {step}{where}: {error}")
            continue
        others: list[Other] = []
        for rank, mine in enumerate(ranks):
            others += _others(rank, mine, rows[rank])
        whole[step, replica] = Recorded(Timeline(schedule, rows, Costs(unit="s"), "measured"), tuple(others))
    found = [*remarks, *unlike, *rows_of.remarks()]
    if not whole:
        shown = "; ".join([*faults[:1], *found])
        raise ParseError(f"{source} holds no whole step; {shown}. Give the traces of all ranks")
    if faults:
        found.append(f"left out: {plural(len(faults), 'incomplete step')} ({faults[0]})")
    return whole, found


def _others(rank: int, records: Iterable[Record], row: Sequence[Span]) -> Iterator[Other]:
    """Yield what a rank did outside the pipeline: not ranges around most of its actions, such as a whole epoch."""
    for record in records:
        if record.action is None:
            inside = [span for span in row if record.start <= span.start and span.end <= record.end]
            if len(inside) <= len(row) / 2:
                yield Other(rank, record.name, record.start, record.end)


def recognized(timeline: Timeline) -> Timeline:
    """Return a timeline with its compute actions alone, and its schedule recognized."""
    rows = tuple(tuple(span for span in row if span.action.computes) for row in timeline.rows)
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = recognize(replace(timeline.schedule, name="measured", orders=orders))
    return replace(timeline, schedule=schedule, rows=rows)


def _with_halves(records: list[Record]) -> list[Record]:
    """Return the records; where B and W are the halves of a backward, as in the Zero Bubble papers, with I for B.

    That is so on stages that run W, if each of these runs B, and no stage runs I.
    """
    ran = {(single.op, single.stage) for record in records for single in record.singles}
    halved = {stage for op, stage in ran if op == Op.W}
    if any(op == Op.I for op, _ in ran) or any((Op.B, stage) not in ran for stage in halved):
        return records
    found = []
    for record in records:
        if record.action and record.action.op == Op.B and record.action.stage in halved:
            record = record._replace(action=record.action._replace(op=Op.I))
        found.append(record)
    return found


def _pipelines(records: Sequence[Record]) -> dict[int, list[Worker]]:
    """Return the workers of each replica, rank 0 first.

    If the trace does not say who belongs to which replica, workers that run the same actions are sorted by number; the
    first of each kind are replica 0. If workers 0 and 1 run stage 0, and workers 2 and 3 run stage 1, replica 0 has the
    workers 0 and 2, and replica 1 has the workers 1 and 3.
    """
    ran: defaultdict[Worker, set[Action]] = defaultdict(set)
    for record in records:
        ran[record.worker].update(record.singles)
    first = {worker: _first_stage(ran[worker]) for worker in sorted(ran)}
    known = {record.worker: record.replica for record in records if record.action and record.replica is not None}
    alike: Counter[tuple[int, bool]] = Counter()  # by first stage, how many workers came before
    pipelines: defaultdict[int, list[Worker]] = defaultdict(list)
    for worker, stage in first.items():
        replica = known.get(worker, alike[stage])
        pipelines[replica].append(worker)
        alike[stage] += 1
    return {replica: sorted(pipelines[replica], key=first.__getitem__) for replica in sorted(pipelines)}


def _first_stage(actions: set[Action]) -> tuple[int, bool]:
    """Return the first stage that a worker runs for its first microbatch.

    In a pipeline with one copy of the model, ranks are numbered by it, from 0; with two, this is the first copy.
    """
    first = min(action.microbatch for action in actions)
    return min(action.stage for action in actions if action.microbatch == first), first > 0


class _Rows:
    """Puts the actions of each worker in order, and counts what it corrects.

    A rank does one thing at a time, but its clock and that of its GPU may disagree by a little. Whether an overlap is
    small is judged by the worker's usual action; many small ones are concurrency, too.
    """

    def __init__(self, records: Iterable[Record]):
        times: defaultdict[Worker, list[float]] = defaultdict(list)
        for record in records:
            if record.action:
                times[record.worker].append(record.end - record.start)
        self._usual = {worker: median(each) for worker, each in times.items()}
        self._overlaps: list[float] = []
        self._repeated = 0

    def row(self, rank: int, records: Sequence[Record]) -> tuple[Span, ...]:
        """Return the spans of a rank in a step.

        Raises:
            ValueError: The rank does two things at once, or one twice.
        """
        spans = [Span(record.action, record.start, record.end) for record in records if record.action]
        row = sorted(dict.fromkeys(spans), key=lambda span: (span.start, span.end))
        self._repeated += len(spans) - len(row)
        if not row:
            return ()
        usual, busy = self._usual[records[0].worker], sum(span.end - span.start for span in row)
        trimmed: list[float] = []
        for index in range(1, len(row)):
            before, after = row[index - 1], row[index]
            overlap = before.end - after.start
            if overlap <= 0:
                continue
            row[index] = after._replace(start=before.end, end=max(after.end, before.end))
            if overlap > ROUNDING:
                trimmed.append(overlap)
            if overlap > max(ROUNDING, SMALL * usual) or sum(trimmed) > FEW * busy:
                raise ValueError(
                    f"on rank {rank}, {after.action} begins at {after.start:.8g} s, before {before.action} ends at "
                    f"{before.end:.8g} s: {pretty(overlap, 's')} at once, where its usual action takes "
                    f"{pretty(usual, 's')}; a rank runs one action at a time, or a pair: (0F1;3B0)OVERLAP_F_B"
                )
        counted = Counter(single for span in row for single in span.action.singles)
        ((action, times),) = counted.most_common(1)
        if times > 1:
            raise ValueError(f"rank {rank} runs {action} twice; are these the traces of one job?")
        self._overlaps += trimmed
        return tuple(row)

    def remarks(self) -> Iterator[str]:
        """Yield a remark on each kind of correction."""
        if self._overlaps:
            most = pretty(max(self._overlaps), "s")
            yield f"trimmed: {plural(len(self._overlaps), 'overlap')} of at most {most} between actions of a rank"
        if self._repeated:
            yield f"left out: {plural(self._repeated, 'repeated line')}"


def _schedule(rows: Sequence[Sequence[Span]], forward_only: bool) -> Schedule:
    """Return the schedule that the rows follow, named after the published one that it is.

    Args:
        rows: The spans of each rank.
        forward_only: The run has no backwards at all, so that a step without them is not one that was cut off.

    Raises:
        ValueError: An action is missing.
    """
    if idle := [rank for rank, row in enumerate(rows) if not row]:
        raise ValueError(f"rank {idle[0]} has no actions")
    singles = [(rank, single) for rank, row in enumerate(rows) for span in row for single in span.action.singles]
    stages = 1 + max(single.stage for _, single in singles)
    microbatches = 1 + max(single.microbatch for _, single in singles)
    forwards = {(single.stage, single.microbatch): rank for rank, single in singles if single.op == Op.F}
    if len(forwards) < stages * microbatches:  # many more than there are if a number is wrong
        stage, m = next((s, m) for s in range(stages) for m in range(microbatches) if (s, m) not in forwards)
        missing = plural(stages * microbatches - len(forwards), "forward")
        hint = "; microbatches count from 0" if min((m for _, m in forwards), default=0) == 1 else ""
        raise ValueError(f"{F(stage, m)} is never run ({missing} missing){hint}")
    again = {single.stage: rank for rank, single in singles if single.op == Op.R}
    placement = _placement(len(rows), stages, microbatches, forwards, again)
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = Schedule("measured", placement, microbatches, orders, forward_only)
    if lost := [problem for problem in schedule.problems if problem.kind == "missing"]:
        raise ValueError(f"{lost[0].message} ({plural(len(lost), 'action')} missing)")
    return recognize(schedule)


def _placement(
    ranks: int, stages: int, microbatches: int, forwards: Mapping[tuple[int, int], int], again: Mapping[int, int]
) -> Placement:
    """Return which rank holds which stage.

    Args:
        forwards: By stage and microbatch, the rank that ran the forward.
        again: By stage, the rank that ran it again, for the backward.
    """
    # With two copies of the model, the first microbatch passes one of them, and the last microbatch the other.
    first = tuple(forwards[stage, 0] for stage in range(stages))
    last = tuple(forwards[stage, microbatches - 1] for stage in range(stages))
    holders = (first,) if first == last else (first, last)
    homes = (tuple(again.get(stage, first[stage]) for stage in range(stages)),) if first == last else holders
    for name in PLACEMENTS:
        with suppress(SettingError):  # not for this number of chunks
            placement = Placement.make(name, ranks, stages // ranks, microbatches)
            if (placement.holders, placement.homes) == (holders, homes):
                return placement
    split = next((m for m in range(microbatches) if forwards[0, m] != first[0]), 0)
    return Placement("custom", ranks, holders, split, backwards=homes[0] if first == last else ())
