"""Schedules as CSV: one line per rank, one action per cell."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from ppedu.core.actions import COMMUNICATION, SHARDING, Action
from ppedu.core.errors import ParseError, PipelineError
from ppedu.core.files import named
from ppedu.core.numeric import plural
from ppedu.core.placement import Placement
from ppedu.core.validate import require_count, require_instance

Orders = tuple[tuple[Action, ...], ...]


def csv_text(rows: Iterable[Iterable[Action | None]]) -> str:
    """Return rows of actions as CSV text, with an empty cell for None."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def read(
    path: str | os.PathLike[str], placement: str | Placement, microbatches: int | None
) -> tuple[Placement, int, Orders]:
    """Return the placement, the number of microbatches and the orders of a CSV file. See `Schedule.from_csv`."""
    require_instance("placement", placement, str | Placement, "a name, such as 'loop' or 'v', or a Placement")
    where = named(path)
    try:
        rows = list(csv.reader(io.StringIO(where.read_text(encoding="utf-8-sig"), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PipelineError(f"cannot read {str(where)!r}: {error}") from error
    while rows and not rows[-1]:
        del rows[-1]  # trailing blank lines
    parse = cache(Action.parse)
    orders = tuple(tuple(_actions(row, line, where, parse)) for line, row in enumerate(rows, 1))
    number = sum(map(len, orders))
    different = set().union(*orders)
    singles = {single for action in different for single in action.singles}
    if not any(single.op not in SHARDING for single in singles):
        raise ParseError(f"{str(where)!r} holds no actions; expected a line per rank, with cells such as 0F0")
    stages = 1 + max(single.stage for single in singles)
    found = 1 + max(single.microbatch for single in singles)
    forwards = stages * found
    # Not a schedule, or a typo such as 1000F0, which names a thousand stages: nearly all actions are missing (too few)
    # or repeated (too many), and `check` would list them for minutes. Up to 500 missing forwards, that list is short,
    # and says more than this error.
    too_few = number < (forwards - 500) / 50
    too_many = number > 1000 * (1 + forwards)
    if too_few or too_many:
        raise ParseError(
            f"{str(where)!r} names {plural(stages, 'stage')} and {plural(found, 'microbatch')}, "
            f"but has {plural(number, 'action')}; look for a typo in the largest stage or microbatch"
        )
    if microbatches is not None and require_count("microbatches", microbatches, least=0) != found:
        raise ParseError(f"{str(where)!r} has microbatches 0 to {found - 1}, which is {found}, not {microbatches}")
    size = f"{str(where)!r} has {len(orders)} ranks (lines) and {stages} stages"
    if isinstance(placement, str):
        if stages % len(orders):
            raise ParseError(f"{size}; every rank must hold the same number of stages")
        placement = Placement.make(placement, len(orders), stages // len(orders), found)
    elif (placement.ranks, placement.stages) != (len(orders), stages):
        raise ParseError(f"{size}; the placement has {placement.ranks} and {placement.stages}: give one that fits")
    return placement, found, orders


def _actions(row: list[str], line: int, path: Path, parse: Callable[[str], Action]) -> Iterable[Action]:
    """Return the actions of a line, without its empty cells."""
    actions, empty = [], False
    for column, cell in enumerate(row, 1):
        if "WAIT_" in cell:  # from 2.15 on, torch writes when it waits for messages; that changes no result
            continue
        if not cell or cell.isspace():
            empty = True
            continue
        try:
            actions.append(parse(cell))
        except ParseError as error:
            raise ParseError(f"{str(path)!r}, line {line}, cell {column}: {error}") from None
    if empty and any(action.op in COMMUNICATION for action in actions):
        raise ParseError(f"{str(path)!r}, line {line}: a schedule with communication has no empty cells; delete them")
    return actions
