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

An operation is F, B, I or W; one of the words below; or a whole action such as 2F0 or (2F1;1B0)OVERLAP_F_B, which needs
neither stage nor microbatch; or what `Names` say. Sends and receives are left out, because the order says which action
waits for which. All other operations are kept as time outside the pipeline.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ppedu.core import Action, Op, ParseError
from ppedu.core.files import named, opened
from ppedu.core.numeric import plural
from ppedu.trace.names import UNKNOWN, Names
from ppedu.trace.records import MOST, Record, rank_of, worker_of

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
WORDS = {
    Op.F: ("f", "forward", "forward-compute", "fwd"),
    Op.B: ("b", "backward", "backward-compute", "bwd"),
    Op.I: ("i", "backward-input", "input-backward", "dgrad"),
    Op.W: ("w", "backward-weight", "weight-backward", "wgrad"),
}
OPS = {word: op for op, words in WORDS.items() for word in words}
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv", "send", "recv")
MESSAGE = Action(0, Op.SEND_F)
FEW = 0.01  # of the lines may be damaged, or a single one, such as the last one that a run wrote


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's name is that of a table."""
    return named(path).name.lower().removesuffix(".gz").endswith((".csv", ".parquet", ".tsv"))


def read(path: str | os.PathLike[str], names: Names) -> tuple[list[Record], list[str]]:
    """Return the records of a table, and remarks on lines that were left out.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: A column is missing, or several lines cannot be understood; the error names the first one.
    """
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
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ParseError(f"cannot read {str(path)!r}: {error}; give a table of operations as CSV") from error
    columns = _columns(lines[0] if lines else [], str(path))
    records: list[Record] = []
    wrong: list[str] = []
    rows = [_Row(columns, cells) for cells in lines[1:]]
    ranks = _ranks(rows) if {"chunk", "stage"} <= columns.keys() else 1
    for number, row in enumerate(rows, 2):
        try:
            if any(row.cells) and (record := row.record(names, ranks)):
                records.append(record)
        except ValueError as error:
            wrong.append(f"{str(path)!r}, line {number}: {','.join(row.cells)!r} is not an operation: {error}")
    if len(wrong) > max(1, FEW * len(rows)):
        raise ParseError(f"{wrong[0]} (and {plural(len(wrong) - 1, 'more line')} like it)")
    return _on_stages(records), [f"left out: {each}" for each in wrong]


class _Column(NamedTuple):
    at: int
    unit: float  # in seconds, of a time


class _Row(NamedTuple):
    """A line of a table."""

    columns: Mapping[str, _Column]
    cells: list[str]

    def text(self, column: str) -> str:
        """Return the text in a cell, or ""."""
        at = self.columns[column].at if column in self.columns else len(self.cells)
        return self.cells[at].strip() if at < len(self.cells) else ""

    def whole(self, column: str) -> int:
        if not (text := self.text(column)):
            raise ValueError(f"it has no {column}")
        number = float(text)
        if not number.is_integer() or not 0 <= number < MOST:
            raise ValueError(f"{column} {text} is not a whole number from 0 to {MOST - 1}")
        return int(number)

    def seconds(self, column: str) -> float:
        number = float(self.text(column)) * self.columns[column].unit
        if not math.isfinite(number):
            raise ValueError(f"{column} {self.text(column)} is not a time")
        return number

    def record(self, names: Names, ranks: int) -> Record | None:
        """Return the operation; None for a message. ranks: of the pipeline, if the table numbers the chunks of each.

        Raises:
            ValueError: it cannot be understood.
        """
        operation = self.text("operation")
        action = self._action(operation, names, ranks)
        if action and not action.computes:
            return None
        start = self.seconds("start")
        end = start + self.seconds("duration") if "duration" in self.columns else self.seconds("end")
        if end < start:
            raise ValueError(f"it ends at {end} and starts at {start}")
        named = [column for column in ("rank", "pid", "stage") if self.text(column)]
        rank = self.whole(named[0]) if named else action.singles[0].stage if action else UNKNOWN
        if rank == UNKNOWN:
            raise ValueError("it has neither a rank nor a stage")
        step = self.whole("step") if self.text("step") or (action and "step" in self.columns) else None
        replica = self.whole("replica") if self.text("replica") else None
        return Record(step, replica, worker_of(rank, replica), action, operation, start, end)

    def _action(self, operation: str, names: Names, ranks: int) -> Action | None:
        """Return the action of the line, and None for time outside the pipeline. MESSAGE stands for any message."""
        word = operation.lower().replace("_", "-")
        named, action = names(operation)
        if not named:
            action = Action(UNKNOWN, OPS[word], UNKNOWN) if word in OPS else MESSAGE if word in MESSAGES else None
            with suppress(ParseError):
                action = action or Action.parse(operation)
        if action is None:
            return None
        stage, op, microbatch, parts = action
        if stage == UNKNOWN and self.text("chunk") and "stage" not in self.columns:
            raise ValueError("it has a chunk, and not the place of its rank in the pipeline; add the column stage")
        if stage == UNKNOWN and "stage" in self.columns:
            stage = self.whole("stage") + ranks * (self.whole("chunk") if self.text("chunk") not in ("", "-1") else 0)
        if microbatch == UNKNOWN and "microbatch" in self.columns:
            microbatch = self.whole("microbatch")
        return Action(stage, op, microbatch, parts)


def _columns(head: Iterable[str], path: str) -> dict[str, _Column]:
    """Return where each known column is."""
    places: dict[str, _Column] = {}
    for index, title in enumerate(head):
        match = UNIT(title.strip().lower())
        unit = match and (match["unit"] or match["suffix"])
        if match and (unit is None or unit in UNITS):
            places.setdefault(match["name"], _Column(index, UNITS.get(unit or "s", 1.0)))
    columns = {
        column: next(places[name] for name in names if name in places)
        for column, names in COLUMNS.items()
        if not places.keys().isdisjoint(names)
    }
    lost = [column for column in ("operation", "start") if column not in columns]
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


def _ranks(rows: Iterable[_Row]) -> int:
    """Return the number of ranks in a pipeline, by the places that stages have in it."""
    most = 0
    for row in rows:
        with suppress(ValueError):
            most = max(most, row.whole("stage"))
    return 1 + most


def _on_stages(records: list[Record]) -> list[Record]:
    """Return the records with a stage: without that column, a worker's place in the order in which they begin."""
    begins: defaultdict[int | None, dict[int, float]] = defaultdict(dict)  # by replica and worker
    for record in records:
        if record.action and record.action.stage == UNKNOWN:
            mine = begins[record.replica]
            mine[record.worker] = min(record.start, mine.get(record.worker, record.start))
    places = {
        worker: stage for mine in begins.values() for stage, worker in enumerate(sorted(mine, key=mine.__getitem__))
    }
    return [
        record._replace(action=record.action._replace(stage=places[record.worker]))
        if record.action and record.action.stage == UNKNOWN
        else record
        for record in records
    ]


def write(records: Iterable[Record]) -> str:
    """Return records as the text of a table."""
    lines = ["step,replica,rank,operation,start,duration"]
    for step, replica, worker, action, name, start, end in records:
        operation = str(action) if action else name
        quoted = f'"{operation}"' if "," in operation else operation
        lines.append(f"{step},{replica or 0},{rank_of(worker)},{quoted},{start:.6f},{end - start:.6f}")
    return "\n".join([*lines, ""])
