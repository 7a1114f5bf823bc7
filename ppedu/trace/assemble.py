"""The steps of each pipeline, assembled from the records of its trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ppedu.core import Action, F, Op, ParseError, Placement, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.sim import Costs, Span, Timeline
from ppedu.trace.numbering import CUT, numbered
from ppedu.trace.recognize import recognize
from ppedu.trace.records import Key, Other, Record, Recorded

SMALL = 0.1  # of a rank's usual action: by as much, two of its actions may overlap; the second is then trimmed
ROUNDING = 2e-6  # seconds, of times that a table or a trace counts in microseconds; not worth a remark
FEW = 0.02  # of the time that a rank computes in a step: what may be trimmed in all


def assemble(
    records: Iterable[Record], source: str, remarks: Iterable[str] = (), origin: str = "measured"
) -> tuple[dict[Key, Recorded], list[str]]:
    """Return the steps of a trace, and remarks on what was trimmed or left out.

    source: the name of the trace, for errors. remarks: those of its reader. origin: the source of the timelines.

    Raises:
        ParseError: the trace has no step that is whole, and in which a rank does one thing at a time.
    """
    every, unlike = numbered(_in_todays_letters(records))
    if not every:
        raise ParseError("; ".join([f"{source} has no forwards and backwards", *remarks]))
    pipelines = _pipelines(every)
    places = {each: (replica, rank) for replica, workers in pipelines.items() for rank, each in enumerate(workers)}
    orders = Orders(every)
    forward_only = all(single.op == Op.F for record in every if record.action for single in record.action.singles)
    by_place: defaultdict[Key, list[Record]] = defaultdict(list)
    for record in every:
        if record.step != CUT:
            by_place[record.step or 0, places[record.worker][0]].append(record)
    whole: dict[Key, Recorded] = {}
    faults: list[str] = []
    for key, mine in sorted(by_place.items()):
        step, replica = key
        try:
            rows = orders.rows(mine, pipelines[replica])
            schedule = _schedule(rows, forward_only)
        except ValueError as error:
            faults.append(f"step {step}{f' of replica {replica}' if len(pipelines) > 1 else ''}: {error}")
            continue
        others = tuple(
            Other(places[each.worker][1], each.name, each.start, each.end)
            for each in mine
            if each.action is None and not _holds_most(each, rows[places[each.worker][1]])
        )
        whole[key] = Recorded(Timeline(schedule, rows, Costs(unit="s"), origin), others)
    found = [*remarks, *unlike, *orders.remarks()]
    if not whole:
        told = "; ".join([*faults[:1], *found])
        raise ParseError(f"{source} holds no whole step; {told}. Give the traces of all ranks")
    if faults:
        found.append(f"left out: {plural(len(faults), 'incomplete step')} ({faults[0]})")
    return whole, found


def _holds_most(other: Record, row: Sequence[Span]) -> bool:
    """Return whether a range is around most of its rank's actions in a step, and so not time outside the pipeline."""
    return len([span for span in row if other.start <= span.start and span.end <= other.end]) > len(row) / 2


def recognized(timeline: Timeline) -> Timeline:
    """Return a timeline with its compute actions alone, and its schedule recognized."""
    rows = tuple(tuple(span for span in row if span.action.computes) for row in timeline.rows)
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = recognize(replace(timeline.schedule, name="measured", orders=orders))
    return replace(timeline, schedule=schedule, rows=rows)


def _in_todays_letters(records: Iterable[Record]) -> list[Record]:
    """Return the records; where B and W are the halves of a backward, as in the Zero Bubble papers, with I for B."""
    records = list(records)
    found = {(each.op, each.stage) for record in records if record.action for each in record.action.singles}
    halves = {stage for op, stage in found if op == Op.W}
    if any(op == Op.I for op, _ in found) or not halves or any((Op.B, stage) not in found for stage in halves):
        return records
    return [
        record._replace(action=record.action._replace(op=Op.I))
        if record.action and record.action.op == Op.B and record.action.stage in halves
        else record
        for record in records
    ]


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


class Orders:
    """Puts the actions of each worker in order, and counts what it corrects.

    A rank does one thing at a time, but its clock and that of its GPU may disagree by a little. Whether an overlap is
    small is judged by the worker's usual action; many small ones are concurrency, too.
    """

    def __init__(self, records: Iterable[Record]):
        lasts: defaultdict[int, list[float]] = defaultdict(list)
        for record in records:
            if record.action:
                lasts[record.worker].append(record.end - record.start)
        self._usual = {worker: median(times) for worker, times in lasts.items()}
        self._overlaps: list[float] = []
        self._repeated = 0

    def rows(self, records: Iterable[Record], workers: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
        """Return the spans of each worker in a step.

        Raises:
            ValueError: a rank does two things at once, or one twice.
        """
        rows: dict[int, list[Span]] = {worker: [] for worker in workers}
        for record in records:
            if record.action:
                rows[record.worker].append(Span(record.action, record.start, record.end))
        return tuple(tuple(self._row(rank, *each)) for rank, each in enumerate(rows.items()))

    def remarks(self) -> Iterator[str]:
        """Yield a remark on each kind of correction."""
        if self._overlaps:
            most = pretty(max(self._overlaps), "s")
            yield f"trimmed: {plural(len(self._overlaps), 'overlap')} of at most {most} between actions of a rank"
        if self._repeated:
            yield f"left out: {plural(self._repeated, 'repeated line')}"

    def _row(self, rank: int, worker: int, spans: Sequence[Span]) -> list[Span]:
        row = sorted(dict.fromkeys(spans), key=lambda span: (span.start, span.end))
        self._repeated += len(spans) - len(row)
        usual, busy = self._usual[worker], sum(span.end - span.start for span in row)
        trimmed: list[float] = []
        for index in range(1, len(row)):
            before, after = row[index - 1 : index + 1]
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
        if twice := next((action for action, times in counted.items() if times > 1), None):
            raise ValueError(f"rank {rank} runs {twice} twice; are these the traces of one job?")
        self._overlaps += trimmed
        return row


def _schedule(rows: Sequence[Sequence[Span]], forward_only: bool) -> Schedule:
    """Return the schedule that the rows follow, named after the published one that it is.

    forward_only: the run has no backwards at all, so that a step without them is not one that was cut off.

    Raises:
        ValueError: an action is missing.
    """
    singles = [(rank, single) for rank, row in enumerate(rows) for span in row for single in span.action.singles]
    if idle := [rank for rank, row in enumerate(rows) if not row]:
        raise ValueError(f"rank {idle[0]} has no actions")
    stages = 1 + max(single.stage for _, single in singles)
    microbatches = 1 + max(single.microbatch for _, single in singles)
    forwards = {(single.stage, single.microbatch) for _, single in singles if single.op == Op.F}
    if len(forwards) < stages * microbatches:  # many more than there are if a number is wrong
        stage, m = next((s, m) for s in range(stages) for m in range(microbatches) if (s, m) not in forwards)
        missing = plural(stages * microbatches - len(forwards), "forward")
        hint = "; microbatches count from 0" if min((m for _, m in forwards), default=0) == 1 else ""
        raise ValueError(f"{F(stage, m)} is never run ({missing} missing){hint}")
    orders = tuple(tuple(span.action for span in row) for row in rows)
    schedule = Schedule("measured", _placement(len(rows), singles), microbatches, orders, forward_only)
    if lost := [problem for problem in schedule.problems if problem.kind == "missing"]:
        raise ValueError(f"{lost[0].message} ({plural(len(lost), 'action')} missing)")
    return recognize(schedule)


def _placement(ranks: int, singles: Sequence[tuple[int, Action]]) -> Placement:
    """Return which rank holds which stage."""
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
                return placement
    split = next((m for m in range(microbatches) if held.get((0, m), first[0]) != first[0]), 0)
    return Placement("custom", ranks, (first, last) if first != last else (first,), split)
