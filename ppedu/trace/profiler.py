"""Traces of torch.profiler (Kineto): one JSON file per rank, with a range for each action.

torch's pipeline runtime and this package's engine mark an action as "PP:2F0". `ScheduleGPipe` marks "Forward 0" and
"Backward 0"; see `Run.load` for ranges of other names. Such a range begins before the rank waits for a message, and on
a GPU it covers the launches and not the work. So an action's time is, on a GPU, that of the kernels launched within its
range (they carry the launch's correlation id, which all kernels of a CUDA graph share), without NCCL's; on a CPU, from
the first operator within the range to the end of the last, without sends and receives. An action that launches nothing,
as the first stage's I in torch, takes no time before the next kernel.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple, TypeGuard

from ppedu.core import Action, ParseError
from ppedu.core.files import named
from ppedu.core.numeric import plural
from ppedu.trace.events import Progress, entries
from ppedu.trace.names import USUAL, LookUp, look_up
from ppedu.trace.places import CURE, Source, TracePlace, find_places
from ppedu.trace.records import Record

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


def read(
    paths: Sequence[str | os.PathLike[str]],
    places: Sequence[TracePlace | None],
    names: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> tuple[list[Record], list[str]]:
    """Return the records of the traces of all ranks, and remarks on what was left out.

    Args:
        paths: The files.
        places: The place of each file's rank, if the caller knows it.
        names: Ranges of other names; see `Run.load`.
        progress: Called now and then with the part that has been read, from 0 to 1.

    Raises:
        PipelineError: A file cannot be read.
        ParseError: A file is damaged or has no ranges of actions, or it is unknown of which rank it is.
        SettingError: `names` is not a dict of regular expressions and actions.
    """
    find = look_up(names, USUAL)
    left_out: Counter[tuple[str, str]] = Counter()
    sources = []
    for index, (path, given) in enumerate(zip(paths, places, strict=True)):

        def part(read: float, before: int = index) -> None:
            if progress:
                progress((before + read) / len(paths))

        file = _File(path, find, part)
        file.require_actions()
        left_out += file.left_out
        sources.append(Source(file.path, file.about, file.base, file.records(), given))
    base = min(source.base for source in sources)
    records: list[Record] = []
    for source, ranks in zip(sources, find_places(sources), strict=True):
        shift = source.base - base
        for place, mine in zip(ranks, source.records.values(), strict=True):
            if place.stage is None and any(record.lacks_stage for record in mine):
                raise ParseError(
                    f"{str(source.path)!r} does not say which of its process groups is the pipeline, and its ranges do "
                    f"not name a stage; {CURE}"
                )
            for step, _, _, action, name, start, end in mine:
                record = Record(step, place.replica, place.rank, action, name, start + shift, end + shift)
                records.append(record.on_stage(place.stage))
    return records, [f"left out: {each}" for each in _in_words(left_out)]


class _File:
    """The parts of a trace file that matter here. Times are in seconds on the clock of the machine.

    Attributes:
        about: The trace's "distributedInfo".
        base: What its times count from.
        ranges: Those of actions, in the order of time.
        others: Other ranges.
        left_out: What could not be understood, in words (a noun, and the rest), and how many of it.
    """

    def __init__(self, path: str | os.PathLike[str], find: LookUp, progress: Progress | None):
        self.path, self.find = named(path), find
        self.about: Mapping[str, Any] = {}
        self.base = 0.0
        self.ranges: list[tuple[Range, Action]] = []
        self.steps: defaultdict[Any, list[Range]] = defaultdict(list)  # by process
        self.others: list[Range] = []
        self.left_out: Counter[tuple[str, str]] = Counter()
        # By thread: each operator's start and end, and whether it belongs to a backward.
        self.operators: defaultdict[Thread, list[tuple[float, float, bool]]] = defaultdict(list)
        self.launches: list[tuple[float, int]] = []  # their times and correlation ids
        # By correlation id. All kernels of a CUDA graph have that of its launch: from the first start to the last end.
        self.kernels: dict[int, tuple[float, float]] = {}
        self.messages: dict[int, tuple[float, float]] = {}  # the same for NCCL's kernels
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

    def _note(self, event: dict[str, Any]) -> None:
        name, category = event.get("name"), event.get("cat", "")
        ts, dur, arguments = event.get("ts"), event.get("dur", 0), event.get("args")
        thread = event.get("pid"), event.get("tid")
        has_ids = all(isinstance(each, int | float | str | None) for each in thread)
        if not isinstance(name, str) or not _is_time(ts) or not _is_time(dur) or dur < 0 or not has_ids:
            self.left_out["event", " without a name, a usable time or a thread"] += 1
            return
        start, end = ts / 1e6, (ts + dur) / 1e6
        kind = category.lower() if isinstance(category, str) else ""
        if kind == "kernel" or kind.endswith(("runtime", "driver")):  # of CUDA, XPU, …
            correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
            if not isinstance(correlation, int):
                return
            if kind == "kernel":
                kernels = self.messages if MESSAGES(name) else self.kernels
                first, last = kernels.get(correlation, (start, end))
                kernels[correlation] = min(first, start), max(last, end)
            else:
                self.launches.append((start, correlation))
        elif kind != "gpu_user_annotation":
            self._note_on_host(Range(name, thread, start, end), kind)

    def _note_on_host(self, span: Range, kind: str) -> None:
        known, action = self.find(span.name)
        if action:
            self.ranges.append((span, action))
        elif known:
            self.left_out["range", f" {span.name!r}"] += 1
        elif STEP(span.name):
            self.steps[span.thread[0]].append(span)
        elif MESSAGES(span.name):
            pass
        elif kind == "cpu_op":
            self.operators[span.thread].append((span.start, span.end, span.name.startswith(BACKWARD)))
        elif kind == "user_annotation":
            self.others.append(span)

    def _sort(self) -> None:
        self.ranges.sort(key=lambda each: (each[0].start, -each[0].end))
        for steps in self.steps.values():
            steps.sort(key=lambda each: each.start)
        self.launches.sort(key=itemgetter(0))
        for operators in self.operators.values():
            operators.sort(key=itemgetter(0))
        self._note_idle_device()

    def _note_idle_device(self) -> None:
        """Find, for each launch, when the device was done with the launches before, and when it begins with the rest.

        If three launches' kernels run from 1 to 2, 3 to 5, and 6 to 8, `until` is -inf 2 5 8 and `since` is 1 3 6 inf:
        the entries 1 lie between the first launch and the second one. NCCL's kernels count in `until` alone.
        """
        begun, ended = [], []
        for _, correlation in self.launches:
            begin, end = self.kernels.get(correlation, (inf, -inf))
            _, end_of_message = self.messages.get(correlation, (inf, -inf))
            begun.append(begin)
            ended.append(max(end, end_of_message))
        self.until = [*accumulate(ended, max, initial=-inf)]
        self.since = [*accumulate(reversed(begun), min, initial=inf)][::-1]

    def require_actions(self) -> None:
        """Raise ParseError unless the file has ranges of actions whose times it tells."""
        if self.ranges:
            processes = {span.thread[0] for span, _ in self.ranges}
            if len(processes) > 1 and self.kernels:
                raise ParseError(
                    f"{str(self.path)!r} holds {len(processes)} processes, and does not say which kernel is whose; "
                    "give a file for each rank"
                )
            if self.kernels and not any(each in self.kernels for _, each in self.launches):
                raise ParseError(
                    f"{str(self.path)!r} does not say what launched its kernels; profile the CPU's activities, too"
                )
            return
        if not (self.others or self.operators or self.kernels or self.left_out):
            raise ParseError(
                f'{str(self.path)!r} holds no events; a trace is a JSON object with a list "traceEvents", as '
                "torch.profiler's export_chrome_trace and Timeline.save write it"
            )
        names = sorted({other.name for other in self.others})[:SHOWN]
        shown = f"; its ranges are {', '.join(map(repr, names))}" if names else ""
        wrong = "".join(f"; it has {each}" for each in _in_words(self.left_out))
        raise ParseError(
            f"{str(self.path)!r} has no range of a pipeline's action, such as 'PP:2F0'{shown}{wrong}. If some ranges "
            "are the forwards and backwards, say which: Run.load(…, names={'forward_step': 'F', 'backward_step': 'B'})"
            ". torch's Schedule1F1B does not mark any. Run the same order with torch's _PipelineScheduleRuntime, whose "
            "_load_csv reads what pp.export.to_torch writes, or with ppedu.run.Pipeline"
        )

    def records(self) -> dict[Any, list[Record]]:
        """Return, by process, the records of its rank, still without its place; the process that begins first is first.

        Only "ProfilerStep#…" numbers steps.
        """
        found: dict[Any, list[Record]] = {span.thread[0]: [] for span, _ in self.ranges}
        # By process: the ranges of actions that are not within another, which are parts of pairs.
        outer: dict[Any, list[Range]] = {process: [] for process in found}
        for span, action in self.ranges:
            process = span.thread[0]
            if outer[process] and span.end <= outer[process][-1].end:
                continue
            outer[process].append(span)
            if action.computes:
                found[process].append(self._record(span, action))
        order = sorted(found, key=lambda process: found[process][0].start if found[process] else inf)
        for span in self.others:
            process = span.thread[0]
            if process not in found:
                continue
            ranges = outer[process]
            before = bisect_right(ranges, span.start, key=lambda each: each.start) - 1
            is_within_action = before >= 0 and span.end <= ranges[before].end
            if not is_within_action:
                record = self._record(span, None)
                if record.end > record.start:  # else, it took the host's time only
                    found[process].append(record)
        return {process: found[process] for process in order}

    def _record(self, span: Range, action: Action | None) -> Record:
        start, end = self._on_device(span, action) if self.kernels else self._on_host(span, action)
        return Record(self._step_at(span), None, 0, action, span.name, start, end)

    def _step_at(self, span: Range) -> int | None:
        """Return the number of the step in which a range begins; None if it begins in none."""
        steps = self.steps[span.thread[0]]
        index = bisect_right(steps, span.start, key=lambda each: each.start) - 1
        if index < 0 or span.start > steps[index].end:
            return None
        match = STEP(steps[index].name)
        return int(match[1]) if match else None

    def _on_device(self, span: Range, action: Action | None) -> tuple[float, float]:
        """Return when the device computed what was launched within a range: its start and its end.

        Args:
            action: None outside the pipeline.
        """
        first, last = bisect_left(self.launches, (span.start,)), bisect_left(self.launches, (span.end, inf))
        ran = []
        for _, correlation in self.launches[first:last]:
            if correlation in self.kernels:
                ran.append(self.kernels[correlation])
            if action is None and correlation in self.messages:
                ran.append(self.messages[correlation])
        if ran:
            return min(start for start, _ in ran), max(end for _, end in ran)
        until, since = self.until[first], self.since[last]
        if action or until == -inf:  # it may have waited for a message, as the next kernel did
            at = until if since == inf else since
            return at, at
        return max(until, span.start), max(until, span.end)

    def _on_host(self, span: Range, action: Action | None) -> tuple[float, float]:
        """Return when the host computed within a range: its start and its end.

        Args:
            action: None outside the pipeline.
        """
        if not self.operators:
            return span.start, span.end
        mine = self.operators.get(span.thread, [])
        inside = mine[bisect_left(mine, (span.start,)) : bisect_left(mine, (span.end, inf))]
        if not inside:  # it has only waited
            return (span.end if action else span.start), span.end
        begin, end = inside[0][0], max(end for _, end, _ in inside)
        if action and action.parts:
            # torch runs the parts of a pair one after the other, and may wait for the message of the second in between.
            # The wait is left out: it ends with the first operator of a backward that follows one of a forward.
            for index in range(1, len(inside)):
                (_, _, was_backward), (resumed, _, is_backward) = inside[index - 1], inside[index]
                if is_backward and not was_backward:
                    begin += resumed - max(end for _, end, _ in inside[:index])
                    break
        end = min(end, span.end)
        return min(begin, end), end


def _in_words(left_out: Counter[tuple[str, str]]) -> list[str]:
    return [f"{plural(count, what)}{rest}" for (what, rest), count in left_out.most_common(SHOWN)]


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < LATEST  # false for NaN
