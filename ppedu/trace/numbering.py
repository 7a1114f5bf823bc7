"""Steps and microbatches, where a trace does not number them: found from the order of each worker's actions."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median

from ppedu.core import Action, F, Op
from ppedu.core.numeric import plural
from ppedu.trace.records import UNKNOWN, Record, Worker

Rows = dict[Worker, list[Record]]  # in the order of time
ENDS = {Op.B, Op.W}  # of a microbatch on a stage: a whole backward, or the later half
CUT = -1  # a step whose beginning was not recorded; the first whole one is 0
ALIKE = 0.001  # of a step: differences of clocks that vary by less are equal
ENOUGH = 4  # steps, for such a comparison
AGREE = 0.15  # of a step: clocks that differ by less may be assumed to be right


def numbered(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Return the records, all with a step and a microbatch, and remarks on what looks wrong with them.

    Where steps have no number, one begins with an action that has occurred before, and the steps of all workers are
    matched by their times. Microbatches without a number count from 0 in each step, for each op of a stage. What comes
    before the first whole step has the step CUT.
    """
    rows: Rows = defaultdict(list)
    for record in sorted(records, key=lambda each: (each.start, each.end)):
        rows[record.worker].append(record)
    rows = {worker: rows[worker] for worker in sorted(rows) if any(record.action for record in rows[worker])}
    remarks = []
    if _labels_hold_several(rows):
        remarks.append("a step that the trace numbers holds several steps of the pipeline, which count here")
        rows = {worker: [record._replace(step=None) for record in row] for worker, row in rows.items()}
    uncounted = any(record.lacks_microbatch for row in rows.values() for record in row)
    if uncounted:
        remarks.append("microbatches have no numbers, and were counted in the order in which they ran")
    unlabelled = [worker for worker, row in rows.items() if any(each.action and each.step is None for each in row)]
    rows = {worker: row if worker in unlabelled else _with_labels(row) for worker, row in rows.items()}
    if unlabelled and uncounted:
        rows = _in_windows(rows)
    elif unlabelled:
        rows |= _with_steps({worker: rows[worker] for worker in unlabelled})
        remarks += _match_steps(rows, unlabelled)
    return [record for row in rows.values() for record in _with_microbatches(row)], remarks


def _labels_hold_several(rows: Rows) -> bool:
    """Return whether most of the steps that the trace numbers hold all forwards of a worker twice or more often.

    With the forwards 0F0 0F1 0F0 0F1, a step of the trace holds two of the pipeline. If the trace does not number
    microbatches, we assume that a step of the pipeline has the most that a worker has in flight at once.
    """
    in_flight = max((_most_begun(row) for row in rows.values()), default=0)
    several = []
    for row in rows.values():
        ran: defaultdict[int, list[Action]] = defaultdict(list)  # by step
        for record in dict.fromkeys(row):
            if record.action and record.step is not None:
                ran[record.step] += [single for single in record.singles if single.op == Op.F]
        for forwards in ran.values():
            different = len(set(forwards))
            if any(each.microbatch == UNKNOWN for each in forwards):
                different *= in_flight if in_flight > 1 else len(forwards)
            several.append(len(forwards) >= 2 * different > 0)
    return sum(several) > len(several) / 2


def _change(record: Record) -> int:
    """Return how many more microbatches are in flight on a worker after an action."""
    return sum((each.op == Op.F) - (each.op in ENDS) for each in record.singles)


def _idle(row: Sequence[Record]) -> list[int]:
    """Return the indices of the actions that a worker begins while no microbatch is in flight.

    The trace may begin while some are in flight, so none is where the count is lowest. On a rank such as the first one
    of 1F1B, a step begins with each of these actions; on the last one, each microbatch does. For F F B B F F B B, the
    counts before the actions are 0 1 2 1 0 1 2 1, and the indices are 0 and 4; for F B F B they are 0 and 2.
    """
    in_flight = [*accumulate(map(_change, row), initial=0)]
    fewest = min(in_flight)
    return [index for index, record in enumerate(row) if record.action and in_flight[index] == fewest]


def _most_begun(row: Sequence[Record]) -> int:
    """Return the most microbatches of a stage that a worker begins until none is in flight."""
    most = 0
    for start, end in pairwise([*_idle(row), len(row)]):
        singles = [single for record in row[start:end] for single in record.singles]
        forwards = Counter(single.stage for single in singles if single.op == Op.F)
        most = max([most, *forwards.values()])
    return most


def _in_windows(rows: Rows) -> Rows:
    """Return the records with a number for each step: the time from one begin to the next on one of the ranks.

    That is one that runs whole steps, and whose steps the others follow the soonest: the first rank of the pipeline.
    """
    begun = {worker: _most_begun(row) for worker, row in rows.items()}
    most = max(begun.values())
    whole = [[row[index].start for index in _idle(row)] for worker, row in rows.items() if begun[worker] == most]

    def delay(begins: Sequence[float]) -> float:
        """Return the mean time from the last of these begins to a begin on any of the ranks."""
        delays = []
        for times in whole:
            for time in times:
                index = bisect_right(begins, time)
                if index > 0:
                    delays.append(time - begins[index - 1])
        return fmean(delays)

    begins = min((each for each in whole if each), key=delay, default=[])
    return {
        worker: [record._replace(step=bisect_right(begins, record.start) - 1) for record in row]
        for worker, row in rows.items()
    }


def _with_microbatches(row: Iterable[Record]) -> Iterator[Record]:
    """Yield the records with a number for each microbatch."""
    counted: Counter[tuple[int | None, int, Op]] = Counter()  # by step, stage and op
    for record in row:
        if record.action and record.lacks_microbatch:
            kind = record.step, record.action.stage, record.action.op
            record = record._replace(action=record.action._replace(microbatch=counted[kind]))
            counted[kind] += 1
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
    starts = {worker: _after_cut(row) for worker, row in rows.items()}
    if any(starts.values()):
        # The next microbatches may still be of the step that was cut. A whole step begins with the lowest one.
        starts = {worker: _lowest(row, starts[worker]) for worker, row in rows.items()}
    found: Rows = {}
    for worker, row in rows.items():
        start = starts[worker]
        seen: set[Action] = set()
        step = 0
        found[worker] = [record._replace(step=CUT) for record in row[:start]]
        for record in row[start:]:
            if not seen.isdisjoint(record.singles):
                seen.clear()
                step += 1
            seen.update(record.singles)
            found[worker].append(record._replace(step=step))
    return found


def _after_cut(row: Sequence[Record]) -> int:
    """Return the index after the last backward whose forward was not recorded, as the trace begins within a step."""
    ran: set[Action] = set()
    start = 0
    for index, record in enumerate(row):
        ran.update(record.singles)
        if any(each.op != Op.F and F(each.stage, each.microbatch) not in ran for each in record.singles):
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
        if not seen.isdisjoint(record.singles):
            break
        if record.action and not in_flight:
            found.append((record.singles[0].microbatch, index))
        in_flight += _change(record)
        seen.update(record.singles)
    return min(found, default=(0, start))[1]


def _match_steps(rows: Rows, unlabelled: Sequence[Worker]) -> Iterator[str]:
    """Give the steps of these workers the numbers of the steps that another worker ran at the same times.

    Yields a remark on each worker that has recorded fewer.
    """
    begins = {worker: _begins(row) for worker, row in rows.items()}
    model = max(rows, key=lambda worker: (worker not in unlabelled, len(begins[worker])))
    known = [*begins[model]]
    for worker in unlabelled:
        offset = _offset([*begins[worker].values()], [*begins[model].values()])
        # By the worker's own number of a step: if the model has the steps 5, 6 and 7, and the worker began 1 later, its
        # steps 0 and 1 are 6 and 7. Steps that the model lacks are not whole.
        numbers = dict(enumerate(known, -offset))
        rows[worker] = [record._replace(step=numbers.get(record.step or 0, CUT)) for record in rows[worker]]
        matched = numbers.keys() & begins[worker].keys()
        if len(matched) < len(known):
            replica, rank = worker
            where = f"rank {rank} of replica {replica}" if replica else f"rank {rank}"
            yield f"{where} recorded {len(matched)} of {plural(len(known), 'step')}"


def _offset(times: Sequence[float], known: Sequence[float]) -> int:
    """Return by how many steps a worker began to record later than the model (or earlier, if negative).

    Steps take unlike times, so where the right ones are matched, the differences are nearly equal.

    Args:
        times: When the worker's steps began.
        known: When the model's did, by a clock that may differ by a constant.
    """
    if not times:
        return 0
    # With these offsets and those in between, all steps of the shorter list are matched.
    least, greatest = sorted([0, len(known) - len(times)])
    apart, spread = {}, {}  # by offset, how far the clocks are apart, and how much that varies
    for offset in range(1 - len(times), len(known)):
        pairs = zip(times[max(0, -offset) :], known[max(0, offset) :], strict=False)
        differences = [mine - other for mine, other in pairs]
        if least <= offset <= greatest or len(differences) >= ENOUGH:
            apart[offset] = median(differences)
            spread[offset] = fmean(abs(each - apart[offset]) for each in differences)
    length = median(after - before for before, after in pairwise(known)) if len(known) > 1 else 0.0
    likely = [offset for offset in spread if spread[offset] <= 2 * min(spread.values()) + ALIKE * length]
    nearest = min(likely, key=lambda offset: abs(apart[offset]))
    if len(times) == len(known) and 0 in likely and abs(apart[nearest]) > AGREE * length:
        return 0  # the clocks do not agree, so they do not tell
    return nearest


def _begins(row: Iterable[Record]) -> dict[int, float]:
    """Return when a worker began each step."""
    begins: dict[int, float] = {}
    for record in row:
        if record.action and record.step != CUT:
            begins.setdefault(record.step or 0, record.start)
    return begins
