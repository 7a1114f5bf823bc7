"""Schedule: one order of actions per rank. That is all a pipeline schedule is.

Times are not part of it; they come out of the simulation (or of a real run). Neither are the messages
between ranks; they come out of lowering.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ppedu.core.actions import COMMUNICATION, Action, is_well_formed
from ppedu.core.bulk import in_bulk
from ppedu.core.check import Problem, Replay, find_problems, misplaced, replay
from ppedu.core.errors import (
    UNWRITABLE,
    ParseError,
    PipelineError,
    ScheduleError,
    SettingError,
    require_count,
    require_name,
    require_rank,
    require_size,
)
from ppedu.core.placement import Placement, fields_alone
from ppedu.core.timeline import several


@dataclass(frozen=True, repr=False)
class Schedule:
    """What every rank does, in order.

    `orders[rank]` is a tuple of `Action`; `placement` says which rank holds which stage. Lists, and texts such as
    "2F0", are accepted and copied into tuples of actions, so that a schedule never changes. Two schedules are equal
    when all of their fields are.

    Raises:
        SettingError: something in the orders is not an action, there is not one order for each rank, or another field
            is of the wrong type or too large.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        require_name("a schedule's name", self.name)
        if not isinstance(self.placement, Placement):
            raise SettingError(f"a schedule has a placement, such as Placement.make('loop', 4); got {self.placement!r}")
        microbatches = require_count("microbatches", self.microbatches)
        require_size(self.ranks, self.chunks, microbatches)
        rows = _entries("orders must be a sequence of actions for each rank", self.orders)
        if len(rows) != self.ranks:
            raise SettingError(f"a schedule for {self.ranks} ranks needs {self.ranks} orders; got {len(rows)}")
        vars(self).update(microbatches=microbatches, orders=tuple(map(_order, range(self.ranks), rows)))

    __getstate__ = fields_alone

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def chunks(self) -> int:
        """Stages held by one rank."""
        return self.placement.chunks

    @property
    def size(self) -> str:
        """For people: 4 ranks, 2 chunks, 8 microbatches."""
        chunks = [several(self.chunks, "chunk")] if self.chunks > 1 else []
        return ", ".join([several(self.ranks, "rank"), *chunks, several(self.microbatches, "microbatch")])

    def order(self, rank: int) -> tuple[Action, ...]:
        """What `rank` does.

        Raises:
            SettingError: there is no such rank.
        """
        return self.orders[require_rank(rank, self.ranks)]

    @cached_property
    def lowered(self) -> bool:
        """Do the ranks send and receive, or is it for compute actions alone?"""
        return any(action.op in COMMUNICATION for order in self.orders for action in order)

    @cached_property
    @in_bulk
    def replay(self) -> Replay:
        """The order in which the ranks, taken together, can get through their actions."""
        return replay(self)

    @cached_property
    @in_bulk
    def problems(self) -> tuple[Problem, ...]:
        """Everything that makes this schedule illegal, up to 100,000 problems; empty when it is legal."""
        return tuple(find_problems(self, range(self.ranks), self.replay))

    def validate(self) -> None:
        """Raise ScheduleError unless the schedule is legal.

        The message lists the first problems, or names the placement with which there are none; the error's
        `problems` are all of them.
        """
        if self.problems:
            shown = "\n".join(f"  {problem}" for problem in self.problems[:5])
            more = f"\n  … and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
            message = misplaced(self) or f"{self!r} is not legal:\n{shown}{more}"
            raise ScheduleError(message, self.problems)

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, ranks={self.ranks}, stages={self.stages}, microbatches={self.microbatches})"

    def __str__(self) -> str:
        """A text timeline, drawn from the simulation; of an illegal schedule, what is wrong with it."""
        from ppedu.core.simulate import simulate

        try:
            return simulate(self).text()
        except ScheduleError as error:
            return str(error)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        from ppedu.view.shown import bundle

        return bundle(self)

    def table(self) -> str:
        """The schedule in lockstep, a line for each step and a column for each rank; where it goes wrong has a ✗.

        Raises:
            SettingError: the schedule is lowered.
        """
        from ppedu.core.lower import table

        return table(self)

    def to_csv(self, path: str | os.PathLike[str] | None = None, idle: bool = False) -> str:
        """Return the orders as CSV text, a line for each rank, as torch.distributed.pipelining reads them.

        path: the text is also written there.
        idle: write the lockstep grid of `align`, in which a column is a step and a cell is empty where the rank is
            idle. `from_csv` reads the same orders from either form.

        Raises:
            SettingError: idle steps were asked for, and the schedule is lowered.
            ScheduleError: idle steps were asked for, and the ranks would wait forever.
            PipelineError: the file cannot be written.
        """
        rows: Iterable[Iterable[Action | None]] = self.orders
        if idle:
            from ppedu.core.lower import align

            rows = align(self)
            if self.replay.blocked:
                self.validate()
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        if path is not None:
            write_text(path, out.getvalue())
        return out.getvalue()

    @classmethod
    def from_csv(
        cls,
        path: str | os.PathLike[str],
        placement: str | Placement = "loop",
        microbatches: int | None = None,
        name: str | None = None,
    ) -> Schedule:
        """Return the schedule in a CSV file: a line for each rank, an action in each cell.

        In a file without communication an empty cell is an idle step. It is dropped, as orders have no times:
        `to_csv(idle=True)` and `align` compute where the ranks are idle. The file does not say how many
        microbatches were meant: the largest number found decides, and `microbatches` checks it.

        Raises:
            ParseError: a cell is not an action, or the file does not fit the placement or `microbatches`.
            SettingError: there is no such placement, or the name or `microbatches` cannot be one.
            PipelineError: the file cannot be read.
        """
        if not isinstance(placement, str | Placement):
            raise SettingError(f"a placement is a name, such as 'loop' or 'v', or a Placement; got {placement!r}")
        where = named(path)
        try:
            rows = list(csv.reader(io.StringIO(where.read_text(encoding="utf-8-sig"), newline="")))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise PipelineError(f"cannot read {str(where)!r}: {error}") from error
        while rows and not rows[-1]:
            del rows[-1]  # blank lines at the end
        parse = cache(Action.parse)
        orders = tuple(tuple(_cells(row, line, where, parse)) for line, row in enumerate(rows, 1))
        number = sum(map(len, orders))
        singles = {single for action in set().union(*orders) for single in action.singles}
        if not singles:
            raise ParseError(f"{str(where)!r} holds no actions")
        stages = 1 + max(single.stage for single in singles)
        found = 1 + max(single.microbatch for single in singles)
        if not 2 * stages * found - 1000 <= 100 * number <= 100_000 * (1 + stages * found):
            # A typo, or another file: most of it is missing, or there many times, and would take minutes to list.
            raise ParseError(
                f"{str(where)!r} names {several(stages, 'stage')} and {several(found, 'microbatch')}, "
                f"but has {several(number, 'action')}"
            )
        if isinstance(placement, str) and stages % len(orders):
            raise ParseError(
                f"{str(where)!r} has {len(orders)} ranks (lines) and {stages} stages; "
                "every rank must hold the same number of stages"
            )
        if isinstance(placement, Placement) and (placement.ranks, placement.stages) != (len(orders), stages):
            raise ParseError(
                f"{str(where)!r} has {len(orders)} ranks (lines) and {stages} stages; "
                f"the placement has {placement.ranks} and {placement.stages}"
            )
        if microbatches is not None and require_count("microbatches", microbatches, least=0) != found:
            raise ParseError(f"{str(where)!r} has microbatches 0 to {found - 1}, which is {found}, not {microbatches}")
        if isinstance(placement, str):
            placement = Placement.make(placement, len(orders), stages // len(orders), found)
        return cls(UNWRITABLE.sub("�", where.stem) if name is None else name, placement, found, orders)


def _entries(rule: str, values: Any) -> tuple[Any, ...]:
    """Return the entries of a sequence, or of an iterator, as a tuple."""
    if not isinstance(values, Sequence | Iterator) or isinstance(values, str | bytes | Action):
        raise SettingError(f"{rule}, such as [[pp.F(0, 0), pp.B(0, 0)], …]; got {values!r}")
    return tuple(values)


def _order(rank: int, actions: Any) -> tuple[Action, ...]:
    """Return one rank's order as a tuple of well-formed actions."""
    order = _entries(f"the order of rank {rank} must be a sequence of actions", actions)
    if all(map(is_well_formed, order)):
        return order
    well_formed = []
    for index, value in enumerate(order):
        try:
            well_formed.append(Action.of(value))
        except ParseError as error:
            raise SettingError(f"rank {rank}, position {index}: {error}") from None
    return tuple(well_formed)


def _cells(row: list[str], line: int, path: Path, parse: Callable[[str], Action]) -> Iterable[Action]:
    actions = []
    for column, cell in enumerate(row, 1):
        if cell and not cell.isspace():
            try:
                actions.append(parse(cell))
            except ParseError as error:
                raise ParseError(f"{str(path)!r}, line {line}, cell {column}: {error}") from None
    if len(actions) < len(row) and any(a.op in COMMUNICATION for a in actions):
        raise ParseError(f"{str(path)!r}, line {line}: a schedule with communication has no empty cells")
    return actions


def named(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a Path.

    Raises:
        SettingError: it cannot name a file.
    """
    try:
        where = Path(path)
        if b"\0" not in os.fsencode(where):  # which raises ValueError for half of a surrogate pair
            return where
        raise ValueError
    except (TypeError, ValueError):
        raise SettingError(f"a file is named by text or by a Path; got {path!r}") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`.

    Raises:
        PipelineError: the file cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`.

    Raises:
        PipelineError: the file cannot be written.
    """
    try:
        named(path).write_bytes(content)
    except OSError as error:
        raise _cannot_write(path, error.strerror) from error


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise PipelineError if a file cannot be written at `path`, as far as is known without writing it."""
    where = named(path)
    try:
        if where.is_dir():
            raise _cannot_write(path, "it is a folder")
        if not where.parent.is_dir():
            raise _cannot_write(path, f"there is no folder {str(where.parent)!r}")
        if not os.access(where if where.exists() else where.parent, os.W_OK):
            raise _cannot_write(path, "permission denied")
    except OSError as error:  # a name that is too long, for one
        raise _cannot_write(path, error.strerror) from error


def _cannot_write(path: str | os.PathLike[str], why: str | None) -> PipelineError:
    return PipelineError(f"cannot write {str(path)!r}: {why}; name a file in a folder that you may write to")
