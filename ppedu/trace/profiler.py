"""Traces of torch.profiler (Kineto): one JSON file per rank, with a range for each action.

torch's pipeline runtime and this package's engine mark an action as "PP:2F0". `ScheduleGPipe` marks "Forward 0" and
"Backward 0"; see `Names` for ranges of other names. Such a range begins before the rank waits for a message, and on a
GPU it covers the launches and not the work. So an action's time is, on a GPU, that of the kernels launched within its
range (they carry the launch's correlation id, which all kernels of a CUDA graph share), without NCCL's; on a CPU, from
the first operator within the range to the end of the last, without sends and receives. An action that launches nothing,
as the first stage's I in torch, takes no time before the next kernel.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

from ppedu.core import Action, ParseError
from ppedu.core.files import named
from ppedu.core.numeric import plural
from ppedu.trace.events import Progress, entries
from ppedu.trace.names import UNKNOWN, Names
from ppedu.trace.places import CURE, Source, TracePlace, find_places
from ppedu.trace.records import Record, worker_of

STEP = re.compile(r"ProfilerStep#([0-9]{1,9})").fullmatch
MESSAGES = re.compile(r"gloo:|nccl|c10d::|record_param_comms", re.IGNORECASE).match
BACKWARD = "autograd::engine::evaluate_function"
SHOWN = 5  # names of ranges in an error
LATEST = 1e19  # nanoseconds or microseconds since 1970; a later time is damaged

Thread = tuple[Any, Any]  # the ids of a process and of its thread


class Range(NamedTuple):
    name: str
    thread: Thread
    start: float
    end: float


class File:
    """The parts of a trace that matter here. Times are in seconds on the clock of the machine.

    about: the trace's "distributedInfo". ranges: those of actions. others: other ranges. left_out: what could not be
    understood, in words (a noun, and the rest), and how many of it.
    """

    def __init__(self, path: str | os.PathLike[str], names: Names, progress: Progress | None = None):
        self.path, self.names = named(path), names
        self.about: Mapping[str, Any] = {}
        self.base = 0.0  # seconds
        self.ranges: list[tuple[Range, Action]] = []
        self.steps: defaultdict[Any, list[Range]] = defaultdict(list)  # by process
        self.others: list[Range] = []
        self.left_out: Counter[tuple[str, str]] = Counter()
        # By thread: the operators' starts, ends, and whether they belong to a backward.
        self.operators: defaultdict[Thread, tuple[array[float], array[float], array[int]]] = defaultdict(
            lambda: (array("d"), array("d"), array("b"))
        )
        self.launches: tuple[array[float], array[int]] = array("d"), array("q")  # their times and correlation ids
        # By correlation id. All kernels of a CUDA graph have that of its launch: from the first start to the last end.
        self.kernels: dict[int, tuple[float, float]] = {}
        self.messages: dict[int, tuple[float, float]] = {}  # the same for NCCL's kernels
        # By launch: when all kernels launched before it have ended; when those launched from it on begin, but NCCL's.
        self.until, self.since = array("d"), array("d")
        for key, value in entries(path, progress):
            if key == "traceEvents":
                if isinstance(value, dict) and value.get("ph") == "X":
                    self._note(value)
                elif isinstance(value, dict) and value.get("ph") == "B":
                    self.left_out["event", ' with "ph": "B", whose end is another event'] += 1
            elif key == "distributedInfo" and isinstance(value, dict):
                self.about = value
            elif key == "baseTimeNanoseconds":
                if _is_time(value):
                    self.base = value / 1e9
                else:
                    self.left_out["time base", f" {value!r}"] += 1
        self._sort()

    @property
    def processes(self) -> list[Any]:
        """The ids of the processes that ran actions, in the order in which they began to compute."""
        begins: dict[Any, float] = {}
        for span, action in self.ranges:
            begins.setdefault(span.thread[0], self.time(span, action)[0])
        return sorted(begins, key=lambda process: begins[process])

    def step(self, span: Range) -> int | None:
        """Return the number of the profiler's step in which a range begins, or None."""
        steps = self.steps[span.thread[0]]
        index = bisect_right(steps, span.start, key=lambda each: each.start) - 1
        match = STEP(steps[index].name) if index >= 0 and span.start <= steps[index].end else None
        return int(match[1]) if match else None

    def _note(self, event: dict[str, Any]) -> None:
        name, category = event.get("name"), event.get("cat", "")
        ts, dur, arguments = event.get("ts"), event.get("dur", 0), event.get("args")
        thread = event.get("pid"), event.get("tid")
        if not isinstance(name, str) or not _is_time(ts) or not _is_time(dur) or dur < 0 or not _are_ids(thread):
            self.left_out["event", " without a name, a usable time or a thread"] += 1
            return
        start, end = ts / 1e6, (ts + dur) / 1e6
        kind = category.lower() if isinstance(category, str) else ""
        if kind == "kernel" or kind.endswith(("runtime", "driver")):  # of CUDA, XPU, …
            correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
            if not isinstance(correlation, int) or abs(correlation) >= 1 << 63:
                return
            if kind == "kernel":
                kernels = self.messages if MESSAGES(name) else self.kernels
                first, last = kernels.get(correlation, (start, end))
                kernels[correlation] = min(first, start), max(last, end)
            else:
                self.launches[0].append(start)
                self.launches[1].append(correlation)
        elif kind != "gpu_user_annotation":
            self._note_on_host(Range(name, thread, start, end), kind)

    def _note_on_host(self, span: Range, kind: str) -> None:
        named, action = self.names(span.name)
        if action:
            self.ranges.append((span, action))
        elif named:
            self.left_out["range", f" {span.name!r}"] += 1
        elif STEP(span.name):
            self.steps[span.thread[0]].append(span)
        elif MESSAGES(span.name):
            pass
        elif kind == "cpu_op":
            starts, ends, backward = self.operators[span.thread]
            starts.append(span.start)
            ends.append(span.end)
            backward.append(span.name.startswith(BACKWARD))
        elif kind == "user_annotation":
            self.others.append(span)

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
        nothing = LATEST, -LATEST
        work = [(self.kernels.get(each, nothing), self.messages.get(each, nothing)) for each in self.launches[1]]
        ended = (max(kernels[1], messages[1]) for kernels, messages in work)
        begun = (kernels[0] for kernels, _ in reversed(work))
        self.until = array("d", accumulate(ended, max, initial=-LATEST))
        self.since = array("d", accumulate(begun, min, initial=LATEST))[::-1]
        self.ranges.sort(key=lambda each: (each[0].start, -each[0].end))
        for steps in self.steps.values():
            steps.sort(key=lambda each: each.start)

    def time(self, span: Range, action: Action | None) -> tuple[float, float]:
        """Return when the rank computed within a range. action: None for time outside the pipeline."""
        if self.kernels:
            times, ids = self.launches
            first, last = bisect_left(times, span.start), bisect_right(times, span.end)
            known = (self.kernels,) if action else (self.kernels, self.messages)
            if ran := [kernels[each] for each in ids[first:last] for kernels in known if each in kernels]:
                return min(start for start, _ in ran), max(end for _, end in ran)
            until, since = self.until[first], self.since[last]
            if action or until == -LATEST:  # it may have waited for a message, as the next kernel did
                at = until if since == LATEST else since
                return at, at
            return max(until, span.start), max(until, span.end)
        if not self.operators:
            return span.start, span.end
        starts, ends, backward = self.operators.get(span.thread, ((), (), ()))
        first, last = bisect_left(starts, span.start), bisect_right(starts, span.end)
        if first == last:  # it has only waited
            return (span.end if action else span.start), span.end
        begin, end = starts[first], max(ends[first:last])
        if action and action.parts:
            # torch runs the parts of a pair one after the other, and may wait for the message of the second in between.
            turn = next(
                (index for index in range(first + 1, last) if backward[index] and not backward[index - 1]), last
            )
            if turn < last:
                begin += starts[turn] - max(ends[first:turn])
        end = min(end, span.end)
        return min(begin, end), end


def read(
    paths: Sequence[tuple[TracePlace | None, str | os.PathLike[str]]], names: Names, progress: Progress | None = None
) -> tuple[list[Record], list[str]]:
    """Return the records of the traces of all ranks, and remarks on what was left out.

    paths: Each with the place of its rank, if the caller knows it.

    Raises:
        PipelineError: A file cannot be read.
        ParseError: A file is damaged or has no ranges of actions, or it is unknown of which rank it is.
    """
    files = []
    for index, (_, path) in enumerate(paths):
        files.append(File(path, names, _part(progress, index, len(paths))))
        _require_actions(files[-1])
    sources = [
        Source(file.path, file.about, file.processes, given) for file, (given, _) in zip(files, paths, strict=True)
    ]
    base = min(file.base for file in files)
    records: list[Record] = []
    for file, source, places in zip(files, sources, find_places(sources), strict=True):
        for process, place in zip(source.processes, places, strict=True):
            records += _records(file, process, place, file.base - base)
    left_out = sum((file.left_out for file in files), Counter())
    return records, [f"left out: {each}" for each in _in_words(left_out)]


def _records(file: File, process: Any, place: TracePlace, shift: float) -> Iterator[Record]:
    """Yield the records of a rank, whose steps only "ProfilerStep#…" numbers. shift: added to the file's times."""
    worker = worker_of(place.rank, place.replica)
    inside: list[Range] = []  # ranges of actions that are not within another

    def record(span: Range, action: Action | None) -> Record:
        start, end = file.time(span, action)
        return Record(file.step(span), place.replica, worker, action, span.name, start + shift, end + shift)

    for span, action in file.ranges:
        if span.thread[0] != process or (inside and span.end <= inside[-1].end):
            continue  # another rank's, or a part of a pair
        inside.append(span)
        if action.computes:
            yield record(span, _on_stage(action, place, file))
    starts = [span.start for span in inside]
    for span in file.others:
        before = bisect_right(starts, span.start) - 1
        if span.thread[0] == process and not (before >= 0 and span.end <= inside[before].end):
            found = record(span, None)
            if found.end > found.start:  # else, it took the host's time only
                yield found


def _on_stage(action: Action, place: TracePlace, file: File) -> Action:
    """Return an action with its stage, which some names do not say: it is then the rank's place in its pipeline."""
    if action.stage != UNKNOWN:
        return action
    if place.stage is None:
        raise ParseError(
            f"{str(file.path)!r} does not say which of its process groups is the pipeline, and its ranges do not name "
            f"a stage; {CURE}"
        )
    return action._replace(stage=place.stage)


def _require_actions(file: File) -> None:
    """Raise ParseError unless a file has ranges of actions whose times it tells."""
    if file.ranges:
        if len(file.processes) > 1 and file.kernels:
            raise ParseError(
                f"{str(file.path)!r} holds {len(file.processes)} processes, and does not say which kernel is whose; "
                "give a file for each rank"
            )
        if file.kernels and not any(each in file.kernels for each in file.launches[1]):
            raise ParseError(
                f"{str(file.path)!r} does not say what launched its kernels; profile the CPU's activities, too"
            )
        return
    if not (file.others or file.operators or file.kernels or file.left_out):
        raise ParseError(
            f'{str(file.path)!r} holds no events; a trace is a JSON object with a list "traceEvents", as '
            "torch.profiler's export_chrome_trace and Timeline.save write it"
        )
    names = sorted({other.name for other in file.others})[:SHOWN]
    shown = f"; its ranges are {', '.join(map(repr, names))}" if names else ""
    wrong = "".join(f"; it has {each}" for each in _in_words(file.left_out))
    raise ParseError(
        f"{str(file.path)!r} has no range of a pipeline's action, such as 'PP:2F0'{shown}{wrong}. If some ranges are "
        "the forwards and backwards, say which: Run.load(…, names={'forward_step': 'F', 'backward_step': 'B'}). "
        "torch's Schedule1F1B does not mark any. Run the same order with torch's _PipelineScheduleRuntime, whose "
        "_load_csv reads what pp.export.to_torch writes, or with ppedu.run.Pipeline"
    )


def _in_words(left_out: Counter[tuple[str, str]]) -> list[str]:
    return [f"{plural(count, what)}{rest}" for (what, rest), count in left_out.most_common(SHOWN)]


def _part(progress: Progress | None, index: int, files: int) -> Progress | None:
    """Return the progress of one file of several."""
    return progress and (lambda part: progress((index + part) / files))


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < LATEST  # false for NaN


def _are_ids(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float | str | None) for value in values)
