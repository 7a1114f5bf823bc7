"""Reading a run: its files, which of the readers reads them, and what is done to all that they read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import median
from typing import Any

from ppedu.core import Op, ParseError, SettingError
from ppedu.core.files import named
from ppedu.core.numeric import pretty
from ppedu.sim import Timeline
from ppedu.trace import csv_table, profiler, saved
from ppedu.trace.assemble import ROUNDING, SMALL, assemble, recognized
from ppedu.trace.clocks import ClockShifts, align
from ppedu.trace.events import Progress
from ppedu.trace.places import TracePlace
from ppedu.trace.records import MOST, Key, Recorded

File = str | os.PathLike[str]
Paths = File | Iterable[File] | Mapping[int, File] | Mapping[tuple[int, int], File]


def load(
    paths: Paths, progress: Progress | None = None, names: Mapping[str, str] | None = None
) -> tuple[dict[Key, Recorded], list[str], dict[int, ClockShifts]]:
    """Return the steps of a trace, remarks, and how far clocks were off; see `Run.load`."""
    files, places = _files(paths)
    source = repr(str(files[0])) if len(files) == 1 else f"the trace {str(files[0])!r} and {len(files) - 1} more"
    remarks: list[str] = []
    if any(map(csv_table.is_table, files)):
        if len(files) > 1 or places[0]:
            raise SettingError(f"give one table of the whole run, or traces alone; got {', '.join(map(str, files))}")
        recorded, remarks = assemble(*csv_table.read(files[0], names), source)
    elif len(files) == 1 and saved.is_saved(files[0]):
        timelines = saved.load_all(files[0])
        run = [each for each in timelines if each.source != "simulated"] or timelines
        steps = chain.from_iterable(each.steps for each in run)
        recorded = {(step, 0): Recorded(recognized(each)) for step, each in enumerate(steps)}
    else:
        recorded, remarks = assemble(*profiler.read(files, places, names, progress), source)
    aligned: dict[Key, Recorded] = {}
    clocks: dict[int, ClockShifts] = {}
    for replica in sorted({replica for _, replica in recorded}):
        mine = {key: each for key, each in recorded.items() if key[1] == replica}
        timelines = [each.timeline for each in mine.values()]
        usual = median(span.end - span.start for each in timelines for row in each.rows for span in row)
        try:
            clocks[replica] = align(timelines, SMALL * usual)
        except ValueError as error:
            raise ParseError(f"{source} contradicts itself: {error}; are these the traces of one job?") from None
        aligned |= {key: each.shifted(clocks[replica].shifts) for key, each in mine.items()}
    remarks += _suspicions([each.timeline for each in aligned.values()], clocks.values())
    return aligned, remarks, clocks


def _files(paths: Any) -> tuple[list[File], list[TracePlace | None]]:
    """Return the files, each with its place if `paths` says it; raise SettingError for anything else."""
    files: list[Any] = []
    places: list[TracePlace | None] = []
    if isinstance(paths, Mapping):
        files, places = [*paths.values()], [*map(_place, paths)]
    elif isinstance(paths, str | os.PathLike):
        files = [paths]
    elif isinstance(paths, list | tuple | set | Iterator):
        files = [*paths]
    if not files or None in places or not all(isinstance(file, str | os.PathLike) for file in files):
        raise SettingError(
            "Run.load takes the name of a trace file or of a folder, a list of files, or a dict such as {0: 'a.json'} "
            f"or {{(replica, rank): 'a.json'}}; got {paths!r}"
        )
    if places:
        return files, places
    files = [file for path in files for file in _in_folder(path)]
    return files, [None] * len(files)


def _place(key: Any) -> TracePlace | None:
    """Return the place that the key of a dict of files stands for; None if it stands for none."""
    match key:
        case int() if 0 <= key < MOST:
            return TracePlace(key, None, key)
        case (int() as replica, int() as rank) if all(0 <= each < MOST for each in key):
            return TracePlace(rank, replica, rank)
    return None


def _in_folder(path: File) -> list[File]:
    """Return a file, or those in a folder: its traces, or else its tables. Raise SettingError if it has neither."""
    try:
        if not named(path).is_dir():
            return [path]
    except OSError:  # such as a name that is too long; reading the file reports it
        return [path]
    for kind in ("json", "csv"):
        if found := sorted(each for end in ("", ".gz") for each in named(path).rglob(f"*.{kind}{end}")):
            return [*found]
    raise SettingError(f"the folder {str(path)!r} has no files that end in .json, .csv, .json.gz or .csv.gz")


def _suspicions(timelines: Sequence[Timeline], clocks: Collection[ClockShifts]) -> Iterator[str]:
    """Yield a remark on clocks that disagree, and on a stage that may be missing.

    Without a stage after the last one, that one waits for its first backward in every step: for about a forward or
    longer, and far longer than ranks usually pause.
    """
    length = min(timeline.makespan for timeline in timelines)
    if (shift := max(abs(shift) for each in clocks for shift in each.shifts)) > length / 2:
        yield (
            f"clocks were shifted by up to {pretty(shift, 's')}, over half a step; have all ranks recorded the same "
            "steps?"
        )
    if (early := max(each.early for each in clocks)) > ROUNDING:
        yield f"messages arrive up to {pretty(early, 's')} before they were sent, however the clocks are shifted"
    waits: list[float] = []  # in each step, before the first backward of the last stage
    forwards: list[float] = []  # the times of that stage's forwards
    pauses: list[float] = []  # before each of that stage's actions
    for timeline in timelines:
        last = timeline.schedule.stages - 1
        first_wait = None
        for row in timeline.rows:
            for before, after in pairwise(row):
                pause = after.start - before.end
                for single in after.action.singles:
                    if single.stage != last:
                        continue
                    pauses.append(pause)
                    if single.op is Op.F:
                        forwards.append(after.end - after.start)
                    elif single.op in (Op.B, Op.I) and first_wait is None:
                        first_wait = pause
        waits.append(first_wait or 0.0)
    if forwards and min(waits) > max(0.75 * median(forwards), 3 * median(pauses)):
        yield (
            f"in every step, stage {last} waits at least {pretty(min(waits), 's')} before its first backward, as if it "
            "were not the last one; if ranks after it are missing, give the traces of all ranks"
        )
