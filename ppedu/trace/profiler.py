"""Traces of torch.profiler (Kineto): one JSON file per rank, with a range for each action.

torch's pipeline runtime and this package's engine mark an action as "PP:2F0". `ScheduleGPipe` marks "Forward 0" and
"Backward 0". Such a range begins before the rank waits for a message, and on a GPU it covers the launches and not the
work. So an action's time is, on a GPU, that of the kernels launched within its range (they carry the launch's
correlation id), without NCCL's; on a CPU, from the first operator within the range to the end of the last, without
sends and receives.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ppedu.core.actions import OVERLAP, Action, Op
from ppedu.core.errors import ParseError
from ppedu.core.files import named
from ppedu.trace.events import Progress, entries
from ppedu.trace.records import Record

PREFIX = "PP:"
GPIPE = re.compile(r"(Forward|Backward) ([0-9]+)").fullmatch
STEP = re.compile(r"ProfilerStep#([0-9]+)").fullmatch
MESSAGES = re.compile(r"gloo:|nccl|c10d::|record_param_comms", re.IGNORECASE).match
BACKWARD = "autograd::engine::evaluate_function"
RANK = re.compile(r"(?:^|[^0-9A-Za-z])(?:rank)?[_-]?([0-9]+)(?=[^0-9A-Za-z]|$)", re.IGNORECASE)
SHOWN = 5  # names of ranges in an error


class Range(NamedTuple):
    name: str
    thread: Any
    start: float
    end: float


class File:
    """The parts of a rank's trace that matter here. Times are in seconds on the clock of the rank's machine."""

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None):
        self.path = named(path)
        self.rank: int | None = None
        self.base = 0  # nanoseconds
        self.ranges: list[Range] = []
        self.steps: list[Range] = []
        self.others: list[Range] = []
        # By thread: the operators' starts, ends, and whether they belong to a backward.
        self.operators: defaultdict[Any, tuple[array[float], array[float], array[int]]] = defaultdict(
            lambda: (array("d"), array("d"), array("b"))
        )
        self.launches: tuple[array[float], array[int]] = array("d"), array("q")  # their times and correlation ids
        self.kernels: dict[int, tuple[float, float]] = {}
        for key, value in entries(path, progress):
            if key == "traceEvents":
                if isinstance(value, dict) and value.get("ph") == "X":
                    self._note(value)
            elif key == "distributedInfo" and isinstance(value, dict):
                self.rank = value.get("rank")
            elif key == "baseTimeNanoseconds":
                self.base = int(value)
        self._sort()

    def _note(self, event: dict[str, Any]) -> None:
        try:
            name, category = str(event["name"]), event.get("cat", "")
            start = float(event["ts"]) / 1e6
            end = start + float(event.get("dur", 0)) / 1e6
        except (KeyError, TypeError, ValueError) as error:
            raise ParseError(f"{str(self.path)!r} holds an event without a name or a time: {event}") from error
        thread = event.get("tid")
        if category == "cpu_op":
            if not MESSAGES(name):
                starts, ends, backward = self.operators[thread]
                starts.append(start)
                ends.append(end)
                backward.append(name.startswith(BACKWARD))
        elif category == "kernel":
            if not MESSAGES(name):
                self.kernels[event.get("args", {}).get("correlation", -1)] = start, end
        elif category in ("cuda_runtime", "cuda_driver"):
            self.launches[0].append(start)
            self.launches[1].append(event.get("args", {}).get("correlation", -1))
        elif name.startswith(PREFIX) or GPIPE(name):
            if category != "gpu_user_annotation":
                self.ranges.append(Range(name, thread, start, end))
        elif STEP(name):
            if category != "gpu_user_annotation":
                self.steps.append(Range(name, thread, start, end))
        elif category == "user_annotation" and not MESSAGES(name):
            self.others.append(Range(name, thread, start, end))

    def _sort(self) -> None:
        for thread, (starts, ends, backward) in self.operators.items():
            order = sorted(range(len(starts)), key=starts.__getitem__)
            self.operators[thread] = (
                array("d", (starts[i] for i in order)),
                array("d", (ends[i] for i in order)),
                array("b", (backward[i] for i in order)),
            )
        times, ids = self.launches
        order = sorted(range(len(times)), key=times.__getitem__)
        self.launches = array("d", (times[i] for i in order)), array("q", (ids[i] for i in order))
        self.ranges.sort(key=lambda each: (each.start, -each.end))
        self.steps.sort(key=lambda each: each.start)

    def time(self, span: Range, pair: bool) -> tuple[float, float]:
        """Return when the rank computed within a range. pair: it is an overlapped pair."""
        if self.kernels:
            times, ids = self.launches
            first, last = bisect_left(times, span.start), bisect_right(times, span.end)
            ran = [self.kernels[each] for each in ids[first:last] if each in self.kernels]
            return (min(start for start, _ in ran), max(end for _, end in ran)) if ran else (span.end, span.end)
        if not self.operators:
            return span.start, span.end
        starts, ends, backward = self.operators[span.thread]
        first, last = bisect_left(starts, span.start), bisect_right(starts, span.end)
        if first == last:  # it has only waited
            return span.end, span.end
        begin, end = starts[first], max(ends[first:last])
        if pair:  # torch runs its parts one after the other, and may wait for the message of the second in between
            turn = next(
                (index for index in range(first + 1, last) if backward[index] and not backward[index - 1]), last
            )
            if turn < last:
                begin += starts[turn] - max(ends[first:turn])
        return begin, min(end, span.end)


def read(paths: Sequence[str | os.PathLike[str]], progress: Progress | None = None) -> list[Record]:
    """Return the records of the traces of all ranks.

    Raises:
        PipelineError: A file cannot be read.
        ParseError: A file is damaged, has no ranges of actions, or does not say whose it is; or the ranks have run
            unlike numbers of steps.
    """
    files = []
    for index, path in enumerate(paths):
        part = _part(progress, index, len(paths))
        files.append(File(path, part))
    return records(files)


def records(files: Sequence[File]) -> list[Record]:
    """Return the records of the files of all ranks; see `read`."""
    base = min(file.base for file in files)
    found: list[Record] = []
    counted: dict[int, str] = {}
    for index, file in enumerate(files):
        _require_ranges(file)
        worker = _worker(file, index, len(files))
        if worker in counted:
            raise ParseError(
                f"{str(file.path)!r} and {counted[worker]!r} are both of rank {worker}; give one file of each rank, "
                "from the same cycle of the profiler"
            )
        counted[worker] = str(file.path)
        shift = (file.base - base) / 1e9
        found += (_shifted(record, shift) for record in _records(file, worker, len(files)))
    steps = {worker: len({record.step for record in found if record.worker == worker}) for worker in counted}
    if len(set(steps.values())) > 1 and not all(file.steps for file in files):
        told = ", ".join(f"{count} on rank {worker}" for worker, count in sorted(steps.items()))
        raise ParseError(
            f"the ranks have run unlike numbers of steps: {told}; profile the same steps on all ranks, or call "
            "profiler.step() after each, so that the traces number them"
        )
    return found


def _records(file: File, worker: int, ranks: int) -> Iterator[Record]:
    """Yield the records of a rank. A step begins at "ProfilerStep#…", or else where an action occurs again."""
    seen: set[Action] = set()
    step, begins = 0, []
    inside: list[Range] = []  # ranges of actions that are not within another
    for span in file.ranges:
        if inside and span.end <= inside[-1].end:
            continue  # a part of a pair
        action = _action(span.name, file, worker)
        inside.append(span)
        if not action.computes:
            continue
        if not seen.isdisjoint(action.singles):
            seen.clear()
            step += 1
        if not seen:
            begins.append(span.start)
        seen.update(action.singles)
        label = _label(file, span.start, step)
        yield Record(label, None, worker, action, span.name, *file.time(span, action.op in OVERLAP))
    starts = [span.start for span in inside]
    for span in file.others:
        before = bisect_right(starts, span.start) - 1
        if before >= 0 and span.end <= inside[before].end:
            continue  # within an action
        number = max(0, bisect_right(begins, span.start) - 1)
        yield Record(_label(file, span.start, number), None, worker, None, span.name, *file.time(span, False))


def _label(file: File, time: float, step: int) -> int:
    """Return the number of the profiler's step at a time; `step` if the profiler does not number them."""
    index = bisect_right(file.steps, time, key=lambda each: each.start) - 1
    match = STEP(file.steps[index].name) if index >= 0 and time <= file.steps[index].end else None
    return int(match[1]) if match else step


def _action(name: str, file: File, worker: int) -> Action:
    """Return the action that a range is named after."""
    if match := GPIPE(name):  # of a schedule with one stage on each rank
        return Action(worker, Op.F if match[1] == "Forward" else Op.B, int(match[2]))
    try:
        return Action.parse(name.removeprefix(PREFIX))
    except ParseError as error:
        raise ParseError(f"{str(file.path)!r} has a range {name!r}: {error}") from None


def _require_ranges(file: File) -> None:
    if file.ranges:
        return
    if not (file.others or file.operators or file.kernels):
        raise ParseError(
            f'{str(file.path)!r} holds no events; a trace is a JSON object with a list "traceEvents", as '
            "torch.profiler's export_chrome_trace and Timeline.save write it"
        )
    names = sorted({other.name for other in file.others})[:SHOWN]
    shown = f"; its ranges are {', '.join(map(repr, names))}" if names else ""
    raise ParseError(
        f"{str(file.path)!r} has no range of a pipeline's action, such as 'PP:2F0'{shown}. torch's Schedule1F1B "
        "does not mark any. Run the same order with torch's _PipelineScheduleRuntime, whose _load_csv reads what "
        "pp.export.to_torch writes, or with ppedu.run.Pipeline"
    )


def _worker(file: File, index: int, files: int) -> int:
    """Return the rank of a file: as the profiler wrote it, or as the file's name says."""
    if isinstance(file.rank, int):
        return file.rank
    if files == 1:
        return 0
    numbers = RANK.findall(file.path.name)
    if len(numbers) != 1:
        raise ParseError(
            f"{str(file.path)!r} does not say of which rank it is; initialize torch.distributed before the profiler "
            'starts, or name the file after its rank, such as "trace.rank2.json"'
        )
    return int(numbers[0])


def _shifted(record: Record, shift: float) -> Record:
    return record._replace(start=record.start + shift, end=record.end + shift) if shift else record


def _part(progress: Progress | None, index: int, files: int) -> Progress | None:
    """Return the progress of one file of several."""
    return progress and (lambda part: progress((index + part) / files))
