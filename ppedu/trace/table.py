"""Tables of operations as CSV: one line for each thing that a rank did.

    step,replica,stage,operation,microbatch,start,duration
    0,0,0,F,0,0.000,0.068
    0,0,0,B,0,0.899,0.138

The first line names the columns. Their order does not matter, and other columns are ignored:

    step        or iteration
    replica     or dp_rank, dp: which of several pipelines that share the batch; without it, there is one
    stage       or pp_rank: the stage; if there is a column for the chunk, the place in the pipeline instead
    rank        or worker: tells the ranks apart, if a rank runs several stages; without it, each stage has its own
    chunk       or mc, model_chunk: the chunk on the rank; stage s of chunk c is stage s + c · ranks of the model
    operation   or op, optype, action: see below
    microbatch  or mb_id
    start       or start_ts, ts: seconds
    duration    or dur: seconds; or end, end_ts

An operation is F, B, I or W; one of the words below; or a whole action such as 2F0 or (2F1;1B0)OVERLAP_F_B, which needs
neither stage nor microbatch. Sends and receives are left out, because the order says which action waits for which. All
other operations are kept as time outside the pipeline.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ppedu.core.actions import Action, Op
from ppedu.core.errors import ParseError, PipelineError
from ppedu.core.files import named
from ppedu.trace.records import Record

COLUMNS = {
    "step": ("step", "iteration"),
    "replica": ("replica", "dp_rank", "dp"),
    "stage": ("stage", "pp_rank"),
    "rank": ("rank", "worker"),
    "chunk": ("chunk", "mc", "model_chunk"),
    "operation": ("operation", "op", "optype", "action"),
    "microbatch": ("microbatch", "mb_id"),
    "start": ("start", "start_ts", "ts"),
    "duration": ("duration", "dur"),
    "end": ("end", "end_ts"),
}
WORDS = {
    Op.F: ("f", "forward", "forward-compute", "fwd"),
    Op.B: ("b", "backward", "backward-compute", "bwd"),
    Op.I: ("i", "backward-input", "input-backward", "dgrad"),
    Op.W: ("w", "backward-weight", "weight-backward", "wgrad"),
}
OPS = {word: op for op, words in WORDS.items() for word in words}
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv", "send", "recv")


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's name is that of a table."""
    return named(path).name.lower().removesuffix(".gz").endswith((".csv", ".parquet", ".tsv"))


def read(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a table.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: A column is missing, or a line cannot be understood; the error names it.
    """
    where = named(path)
    if where.name.lower().endswith(".parquet"):
        raise ParseError(
            f"{str(path)!r} is a Parquet file; turn it into CSV with pandas: "
            f"pandas.read_parquet({str(path)!r}).to_csv({where.stem + '.csv'!r}, index=False)"
        )
    try:
        content = where.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error}; give a table of operations as CSV") from error
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    lines = csv.reader(io.StringIO(text), delimiter=delimiter)
    columns = _columns(next(lines, []), str(path))
    rows = [(number, line) for number, line in enumerate(lines, 2) if any(line)]
    return list(_records(columns, rows, str(path)))


def _columns(head: Iterable[str], path: str) -> dict[str, int]:
    """Return the index of each known column."""
    places = {name.strip().lower(): index for index, name in enumerate(head)}
    columns = {
        column: next(places[name] for name in names if name in places)
        for column, names in COLUMNS.items()
        if not places.keys().isdisjoint(names)
    }
    needed = ["step", "operation", "start"]
    lost = [column for column in needed if column not in columns]
    if not columns.keys() & {"duration", "end"}:
        lost.append("duration")
    if lost:
        first = ", ".join(places)
        shown = repr(first[:80] + "…" * (len(first) > 80)) if first else "empty"
        raise ParseError(
            f"{path!r} has no column {' or '.join(map(repr, lost))}; its first line is {shown}, "
            "and a table of operations needs at least step, stage, operation, microbatch, start and duration"
        )
    return columns


def _records(columns: Mapping[str, int], rows: list[tuple[int, list[str]]], path: str) -> Iterator[Record]:
    def cell(line: list[str], column: str) -> str:
        return line[columns[column]].strip() if column in columns and columns[column] < len(line) else ""

    def whole(line: list[str], column: str) -> int:
        return int(float(cell(line, column)))

    ranks = 1
    if "chunk" in columns and "stage" in columns:
        ranks += max((whole(line, "stage") for _, line in rows if cell(line, "stage")), default=0)
    for number, line in rows:
        try:
            operation = cell(line, "operation")
            action = _action(operation, line, cell, whole, ranks)
            if action == MESSAGE:
                continue
            start = float(cell(line, "start"))
            end = start + float(cell(line, "duration")) if "duration" in columns else float(cell(line, "end"))
            if not 0 <= end - start < float("inf"):
                raise ValueError(f"it ends at {end} and starts at {start}")
            replica = whole(line, "replica") if cell(line, "replica") else 0
            column = "rank" if cell(line, "rank") else "stage"
            worker = whole(line, column) if cell(line, column) else _stage_of(action)
            yield Record(whole(line, "step"), replica, replica << 32 | worker, action, operation, start, end)
        except (ValueError, OverflowError) as error:
            raise ParseError(f"{path!r}, line {number}: {','.join(line)!r} is not an operation: {error}") from error


MESSAGE = Action(0, Op.SEND_F)


def _action(operation: str, line: list[str], cell: Any, whole: Any, ranks: int) -> Action | None:
    """Return the action of a line, `MESSAGE` for a send or receive, and None for time outside the pipeline."""
    word = operation.lower().replace("_", "-")
    if word in MESSAGES:
        return MESSAGE
    if word in OPS:
        if not cell(line, "stage") or not cell(line, "microbatch"):
            raise ValueError("it has no stage or no microbatch")
        stage = whole(line, "stage") + ranks * (max(0, whole(line, "chunk")) if cell(line, "chunk") else 0)
        return Action(stage, OPS[word], whole(line, "microbatch"))
    try:
        action = Action.parse(operation.removeprefix("PP:"))
    except ParseError:
        return None
    return action if action.computes else MESSAGE


def _stage_of(action: Action | None) -> int:
    if action is None:
        raise ValueError("it has neither a rank nor a stage")
    return action.singles[0].stage


def write(records: Iterable[Record]) -> str:
    """Return records as the text of a table."""
    lines = ["step,replica,rank,operation,start,duration"]
    for step, replica, worker, action, name, start, end in records:
        operation = str(action) if action else name
        quoted = f'"{operation}"' if "," in operation else operation
        lines.append(f"{step},{replica or 0},{worker & 0xFFFFFFFF},{quoted},{start:.6f},{end - start:.6f}")
    return "\n".join([*lines, ""])
