"""Tables of operations as CSV: one line for each thing that a rank did.

    step,replica,stage,operation,microbatch,start,duration
    0,0,0,F,0,0.000,0.068
    0,0,0,B,0,0.899,0.138

The first line names the columns. Their order does not matter, and other columns are ignored:

    step        or iteration; without it, one begins where an operation occurs again
    replica     or dp_rank, dp: which of several pipelines that share the batch; without it, there is one
    stage       or pp_rank: the stage; if there is a column for the chunk, the place in the pipeline instead; without
                it, ranks hold one each, in the order in which they begin
    rank        or worker: tells the ranks apart, if a rank runs several stages; without it, each stage has its own
    pid         the same
    chunk       or mc, model_chunk: the chunk on the rank; stage s of chunk c is stage s + c · ranks of the model
    operation   or op, optype, action, name: see below
    microbatch  or mb_id; without it, they count from 0 in each step
    start       or start_ts, ts: seconds; or "start (ns)" or start_ns, and likewise us and ms
    duration    or dur, likewise; or end, end_ts

An operation is F, B, I, W or R; one of the words below; a whole action such as 2F0 or (2F1;1B0)OVERLAP_F_B, which needs
neither stage nor microbatch; or one of the `names` of `Run.load`. Sends and receives are left out, because the order
says which action waits for which. All other operations are kept as time outside the pipeline.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ppedu.core import Action, ParseError
from ppedu.core.files import named, opened
from ppedu.core.numeric import plural
from ppedu.trace.names import USUAL, LookUp, look_up
from ppedu.trace.records import MOST, UNKNOWN, Record, Worker

COLUMNS = {
    "step": ("step", "iteration"),
    "replica": ("replica", "dp_rank", "dp"),
    "stage": ("stage", "pp_rank"),
    "rank": ("rank", "worker"),
    "pid": ("pid",),
    "chunk": ("chunk", "mc", "model_chunk"),
    "operation": ("operation", "op", "optype", "action", "name"),
    "microbatch": ("microbatch", "mb_id"),
    "start": ("start", "start_ts", "ts"),
    "duration": ("duration", "dur"),
    "end": ("end", "end_ts"),
}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}  # two letters for µ
UNIT = re.compile(r"(?P<name>.*?)(?: ?\((?P<unit>\w+)\)|_(?P<suffix>[mun]s))?").fullmatch
OPERATIONS = USUAL | {
    r"(?i:f|forward|forward[-_]compute|fwd)": "F",
    r"(?i:b|backward|backward[-_]compute|bwd)": "B",
    r"(?i:i|backward[-_]input|input[-_]backward|dgrad)": "I",
    r"(?i:w|backward[-_]weight|weight[-_]backward|wgrad)": "W",
    r"(?i:r|recompute)": "R",
    r"(?i:(?:(?:forward|backward)[-_])?(?:send|recv))": "0SEND_F0",  # stands for any message
    r"([0-9(].*)": r"\1",  # a whole action
}
FEW = 0.01  # of the lines may be damaged, or a single one, such as the last one that a run wrote

Cells = Mapping[str, str]  # by column, the text of a line's cell, which may be empty


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's name is that of a table."""
    return named(path).name.lower().removesuffix(".gz").endswith((".csv", ".parquet", ".tsv"))


def read(path: str | os.PathLike[str], names: Mapping[str, str] | None = None) -> tuple[list[Record], list[str]]:
    """Return the records of a table, and remarks on lines that were left out.

    Args:
        path: The table.
        names: Operations of other names; see `Run.load`.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: A column is missing, or several lines cannot be understood; the error names the first one.
        SettingError: `names` is not a dict of regular expressions and actions.
    """
    find = look_up(names, OPERATIONS)
    lines = _lines(path)
    columns, units = _columns(lines[0] if lines else [], str(path))
    rows = [_cells(line, columns) for line in lines[1:]]
    ranks = _ranks(rows)
    records: list[Record] = []
    wrong: list[str] = []
    for number, (line, cells) in enumerate(zip(lines[1:], rows, strict=True), 2):
        try:
            if any(line) and (record := _record(cells, units, find, ranks)):
                records.append(record)
        except ValueError as error:
            wrong.append(f"{str(path)!r}, line {number}: {','.join(line)!r} is not an operation: {error}")
    if len(wrong) > max(1, FEW * len(rows)):
        raise ParseError(f"{wrong[0]} (and {plural(len(wrong) - 1, 'more line')} like it)")
    return _on_stages(records), [f"left out: {each}" for each in wrong]


def _lines(path: str | os.PathLike[str]) -> list[list[str]]:
    """Return the cells of each line of a file, the head included."""
    where = named(path)
    if where.name.lower().endswith(".parquet"):
        raise ParseError(
            f"{str(path)!r} is a Parquet file; turn it into CSV with pandas: "
            f"pandas.read_parquet({str(path)!r}).to_csv({where.stem + '.csv'!r}, index=False)"
        )
    with opened(where) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ParseError(f"cannot read {str(path)!r}: {error}; give a table of operations as CSV") from error


def _cells(line: Sequence[str], columns: Mapping[str, int]) -> Cells:
    """Return the cells of a line by column; "" for those that a short line lacks."""
    return {column: line[at].strip() if at < len(line) else "" for column, at in columns.items()}


def _columns(head: Iterable[str], path: str) -> tuple[dict[str, int], dict[str, float]]:
    """Return the position of each known column, and its unit in seconds, which is that of a time."""
    found: dict[str, tuple[int, float]] = {}
    for index, title in enumerate(head):
        match = UNIT(title.strip().lower())
        unit = match and (match["unit"] or match["suffix"])
        if match and (unit is None or unit in UNITS):
            found.setdefault(match["name"], (index, UNITS[unit or "s"]))
    known: dict[str, tuple[int, float]] = {}
    for column, names in COLUMNS.items():
        for name in names:
            if name in found:
                known.setdefault(column, found[name])  # the first of several names
    lost = [column for column in ("operation", "start") if column not in known]
    if not known.keys() & {"duration", "end"}:
        lost.append("duration")
    if lost:
        first = ", ".join(found)
        shown = repr(first[:80] + "…" * (len(first) > 80)) if first else "empty"
        raise ParseError(
            f"{path!r} has no column {' or '.join(map(repr, lost))}; its first line is {shown}, "
            "and a table of operations needs at least step, stage, operation, microbatch, start and duration"
        )
    positions = {column: at for column, (at, _) in known.items()}
    units = {column: unit for column, (_, unit) in known.items()}
    return positions, units


def _ranks(rows: Iterable[Cells]) -> int:
    """Return the number of ranks in a pipeline, by the places of stages in it, which matter if there are chunks."""
    most = 0
    for cells in rows:
        if "chunk" in cells:
            with suppress(ValueError):
                most = max(most, _whole(cells, "stage"))
    return 1 + most


def _record(cells: Cells, units: Mapping[str, float], find: LookUp, ranks: int) -> Record | None:
    """Return the operation of a line; None for a message.

    Args:
        ranks: The number of ranks in the pipeline, if there are chunks.

    Raises:
        ValueError: It cannot be understood.
    """
    operation = cells["operation"]
    _, action = find(operation)
    if action:
        if not action.computes:
            return None
        action = _numbered(action, cells, ranks)
    start = _seconds(cells, "start", units)
    end = start + _seconds(cells, "duration", units) if "duration" in cells else _seconds(cells, "end", units)
    if end < start:
        raise ValueError(f"it ends at {end} and starts at {start}")
    column = next((column for column in ("rank", "pid", "stage") if cells.get(column)), None)
    if column:
        rank = _whole(cells, column)
    elif action:
        rank = action.singles[0].stage
    else:
        rank = UNKNOWN
    if rank == UNKNOWN:
        raise ValueError("it has neither a rank nor a stage")
    step = _whole(cells, "step") if cells.get("step") or (action and "step" in cells) else None
    replica = _whole(cells, "replica") if cells.get("replica") else None
    return Record(step, replica, rank, action, operation, start, end)


def _numbered(action: Action, cells: Cells, ranks: int) -> Action:
    """Return an action with the stage and the microbatch of its line, as far as its name does not say them."""
    stage, op, microbatch, parts = action
    if stage == UNKNOWN and cells.get("chunk") and "stage" not in cells:
        raise ValueError("it has a chunk, and not the place of its rank in the pipeline; add the column stage")
    if stage == UNKNOWN and "stage" in cells:
        chunk = _whole(cells, "chunk") if cells.get("chunk", "") not in ("", "-1") else 0
        stage = _whole(cells, "stage") + ranks * chunk
    if microbatch == UNKNOWN and "microbatch" in cells:
        microbatch = _whole(cells, "microbatch")
    return Action(stage, op, microbatch, parts)


def _whole(cells: Cells, column: str) -> int:
    if not (text := cells.get(column)):
        raise ValueError(f"it has no {column}")
    number = float(text)
    if not number.is_integer() or not 0 <= number < MOST:
        raise ValueError(f"{column} {text} is not a whole number from 0 to {MOST - 1}")
    return int(number)


def _seconds(cells: Cells, column: str, units: Mapping[str, float]) -> float:
    seconds = float(cells[column]) * units[column]
    if not math.isfinite(seconds):
        raise ValueError(f"{column} {cells[column]} is not a time")
    return seconds


def _on_stages(records: Sequence[Record]) -> list[Record]:
    """Return the records with a stage: without that column, a worker's place in the order in which they begin."""
    lacking = sorted((record for record in records if record.lacks_stage), key=lambda record: record.start)
    counted: Counter[int] = Counter()  # by replica
    places: dict[Worker, int] = {}
    for worker in dict.fromkeys(record.worker for record in lacking):
        places[worker] = counted[worker[0]]
        counted[worker[0]] += 1
    return [record.on_stage(places.get(record.worker)) for record in records]
