"""Steps and microbatches, where a trace does not number them: found from the order of each worker's actions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ppedu.core.actions import Action, F, Op
from ppedu.core.numeric import plural
from ppedu.trace.names import UNKNOWN
from ppedu.trace.records import Record, in_words

Rows = dict[int, list[Record]]  # by worker, in the order of time
ENDS = {Op.B, Op.W}  # of a microbatch on a stage: a whole backward, or the later half
CUT = -1  # a step whose beginning was not recorded; the first whole one is 0


def numbered(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Return the records, all with a step and a microbatch, and remarks on steps that workers have not recorded.

    Microbatches without a number count from 0 in each step, for each op of a stage. Where steps have no number, one
    begins with an action that has occurred before, and the steps of all workers are matched by their times.
    """
    rows: Rows = defaultdict(list)
    for record in sorted(records, key=lambda each: (each.start, each.end)):
        rows[record.worker].append(record)
    microbatches = max(map(_microbatches, rows.values()), default=0)
    rows = {worker: list(_with_microbatches(rows[worker], microbatches)) for worker in sorted(rows)}
    unlabelled = [worker for worker, row in rows.items() if any(each.action and each.step is None for each in row)]
    rows = {worker: _with_labels(row) for worker, row in rows.items()}
    rows |= _with_steps({worker: rows[worker] for worker in unlabelled})
    remarks = list(_match_steps(rows, unlabelled)) if unlabelled else []
    return [record for row in rows.values() for record in row], remarks


def _microbatches(row: Sequence[Record]) -> int:
    """Return the most microbatches without a number that a worker runs until none is in flight.

    That is a whole step on a rank such as the first one of 1F1B; on the last one, it is a single microbatch.
    """
    begun: Counter[int] = Counter()  # by stage
    most = in_flight = 0
    for single in (single for record in row if record.action for single in record.action.singles):
        if single.microbatch == UNKNOWN:
            begun[single.stage] += single.op == Op.F
            in_flight += (single.op == Op.F) - (single.op in ENDS)
            most = max([most, *begun.values()])
            if in_flight <= 0:
                begun.clear()
                in_flight = 0
    return most


def _with_microbatches(row: Iterable[Record], microbatches: int) -> Iterator[Record]:
    """Yield the records with a number for each microbatch, below `microbatches` where steps have no number."""
    counted: Counter[tuple[int | None, int, Op]] = Counter()  # by step, stage and op
    for record in row:
        action = record.action
        if action and action.microbatch == UNKNOWN:
            kind = record.step, action.stage, action.op
            number = counted[kind] if record.step is not None else counted[kind] % max(1, microbatches)
            counted[kind] += 1
            record = record._replace(action=action._replace(microbatch=number))
        yield record


def _with_labels(row: Sequence[Record]) -> list[Record]:
    """Return the records, what is outside of all labelled steps with the number of the step before."""
    step = next((record.step for record in row if record.step is not None), 0)
    found = []
    for record in row:
        step = step if record.step is None else record.step
        found.append(record._replace(step=step))
    return found


def _with_steps(rows: Rows) -> Rows:
    """Return the records of these workers with a number for each step."""
    starts = {worker: _first_whole(row) for worker, row in rows.items()}
    if any(starts.values()):
        starts = {worker: _lowest(row, starts[worker]) for worker, row in rows.items()}
    found: Rows = {}
    for worker, row in rows.items():
        seen: set[Action] = set()
        step, start = 0, starts[worker]
        found[worker] = [record._replace(step=CUT) for record in row[:start]]
        for record in row[start:]:
            singles = record.action.singles if record.action else ()
            if not seen.isdisjoint(singles):
                seen.clear()
                step += 1
            seen.update(singles)
            found[worker].append(record._replace(step=step))
    return found


def _first_whole(row: Sequence[Record]) -> int:
    """Return the index after the last backward whose forward was not recorded, as the trace begins within a step."""
    ran: set[Action] = set()
    start = 0
    for index, record in enumerate(row):
        singles = record.action.singles if record.action else ()
        ran.update(singles)
        if any(each.op != Op.F and F(each.stage, each.microbatch) not in ran for each in singles):
            start = index + 1
            ran.clear()
    return start


def _lowest(row: Sequence[Record], start: int) -> int:
    """Return the index of the lowest microbatch that begins while none is in flight, among those after `start`.

    On some ranks, such as the last one of 1F1B, none is in flight after each microbatch, also within a step.
    """
    seen: set[Action] = set()
    in_flight = 0
    found: list[tuple[int, int]] = []
    for index, record in enumerate(row[start:], start):
        singles = record.action.singles if record.action else ()
        if not seen.isdisjoint(singles):
            break
        if singles and not in_flight:
            found.append((singles[0].microbatch, index))
        in_flight += sum((each.op == Op.F) - (each.op in ENDS) for each in singles)
        seen.update(singles)
    return min(found)[1] if found else start


def _match_steps(rows: Rows, unlabelled: Sequence[int]) -> Iterator[str]:
    """Give the steps of these workers the numbers of the steps that another worker ran at the same times.

    Yields a remark on each worker that has recorded fewer. A step whose beginning no worker has recorded is dropped.
    """
    begins = {worker: _begins(row) for worker, row in rows.items()}
    model = max(rows, key=lambda worker: (worker not in unlabelled, len(begins[worker])))
    steps, known = list(begins[model]), [*begins[model].values()]
    for worker in unlabelled:
        times = [*begins[worker].values()]
        missing = max(0, len(steps) - len(times)) if times else 0
        apart = [sum(abs(a - b) for a, b in zip(times, known[first:], strict=False)) for first in range(missing + 1)]
        offset = apart.index(min(apart))
        labels = [steps[offset - 1] if offset else None, *steps[offset:]]  # from that of CUT on
        labels += range(max(steps, default=-1) + 1, len(times) + len(steps) + 1)
        rows[worker] = [
            each._replace(step=label) for each in rows[worker] if (label := labels[(each.step or 0) - CUT]) is not None
        ]
        if missing:
            yield f"{in_words(worker)} recorded {len(times)} of {plural(len(steps), 'step')}"


def _begins(row: Iterable[Record]) -> dict[int, float]:
    """Return when a worker began each step."""
    begins: dict[int, float] = {}
    for record in row:
        if record.action and record.step != CUT:
            begins.setdefault(record.step or 0, record.start)
    return begins
