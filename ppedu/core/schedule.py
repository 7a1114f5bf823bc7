"""Schedule: one order of actions per rank.

Times are not part of it; `simulate` or a real run provides them. Nor are messages between ranks; `lower` adds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

from ppedu.core import hooks
from ppedu.core.actions import COMPUTE, COPIES, OVERLAP, SHARED, TRAFFIC, WAIT_OF, WAITS, Action, Op, are_well_formed
from ppedu.core.csv_format import csv_text, is_layout, is_trace, parse, recognized, text_of
from ppedu.core.dependencies import Numbered, Replay, Result, replay, waited_for
from ppedu.core.errors import ParseError, Problem, ScheduleError, SettingError
from ppedu.core.files import named, write_text
from ppedu.core.garbage import without_gc
from ppedu.core.numeric import plural
from ppedu.core.placement import PLACEMENTS, Placement, fields_alone
from ppedu.core.problems import find_problems
from ppedu.core.validate import UNWRITABLE, require_count, require_instance, require_name, require_rank, require_size


@dataclass(frozen=True, repr=False)
class Schedule:
    """An immutable pipeline schedule: for each rank, the actions that it runs, in order.

    Args:
        placement: The map from stages to ranks.
        orders: `orders[rank]` is the tuple of a rank's actions. Orders may be given as lists, and actions as text such
            as "2F0".
        forward_only: Whether the schedule is for inference and has forwards alone, as `forwards` makes them.

    Raises:
        SettingError: An order contains something that is not an action, there is not one order for each rank, or
            another field has the wrong type or is too large.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    def __post_init__(self) -> None:
        require_name("a schedule's name", self.name)
        require_instance("forward_only", self.forward_only, bool, "True or False")
        if not isinstance(self.placement, Placement):
            raise SettingError(f"a schedule has a placement, such as Placement.make('loop', 4); got {self.placement!r}")
        microbatches = require_count("microbatches", self.microbatches)
        require_size(self.ranks, self.chunks, microbatches)
        if microbatches % self.slices:
            raise SettingError(f"microbatches have {self.slices} slices each; got {microbatches} slices in all")
        rows = _as_tuple("orders must be a sequence of actions for each rank", self.orders)
        if len(rows) != self.ranks:
            raise SettingError(f"a schedule for {self.ranks} ranks needs {self.ranks} orders; got {len(rows)}")
        orders = tuple(_order(rank, row) for rank, row in enumerate(rows))
        vars(self).update(microbatches=microbatches, orders=orders)  # frozen, so they cannot be assigned
        if self.placement.barriers or not SHARED.isdisjoint(self._ops):
            vars(self).update(placement=self.placement.with_barriers(orders))

    __getstate__ = fields_alone

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # computed once, because an order may have a million actions
        return hash((self.name, self.placement, self.microbatches, self.orders, self.forward_only))

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def chunks(self) -> int:
        """The number of stages that a rank holds of each copy of the model."""
        return self.placement.chunks

    @property
    def slices(self) -> int:
        """The slices into which each microbatch's sequence is cut. If there are several, `microbatches` counts them."""
        return self.placement.slices

    @property
    def size(self) -> str:
        """The size as human-readable text: "4 ranks, 2 chunks, 8 microbatches"; "forward only" follows if it is so."""
        chunks = [plural(self.chunks, "chunk")] if self.chunks > 1 else []
        batch = plural(self.microbatches // self.slices, "microbatch")
        batch += f" of {self.slices} slices" if self.slices > 1 else ""
        return ", ".join([plural(self.ranks, "rank"), *chunks, batch, *["forward only"] * self.forward_only])

    def order(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of `rank`, in order.

        Raises:
            SettingError: There is no such rank.
        """
        return self.orders[require_rank(rank, self.ranks)]

    @property
    def forwards(self) -> Schedule:
        """The forwards of this schedule in their order, without messages, as a forward-only schedule."""
        singles = (chain.from_iterable(action.singles for action in order) for order in self.orders)
        orders = tuple(tuple(single for single in each if single.op == Op.F) for each in singles)
        return replace(self, orders=orders, forward_only=True)

    @cached_property
    def lowered(self) -> bool:
        """Whether the orders include messages between ranks."""
        return not TRAFFIC.isdisjoint(self._ops)

    @cached_property
    def _ops(self) -> frozenset[Op]:
        """The ops of all actions. Loops in C find them, because an order may have a million actions."""
        return frozenset().union(*(map(attrgetter("op"), order) for order in self.orders))

    @cached_property
    def words(self) -> dict[Op, frozenset[tuple[int, int]]]:
        """The stages and microbatches with an R, an O, an L and a U in the orders."""
        ops = Op.R, Op.O, Op.L, Op.U
        found = () if self._ops.isdisjoint(ops) else [each for each in chain(*self.orders) if each.op in ops]
        return {op: frozenset((stage, m) for stage, known, m, _ in found if known is op) for op in ops}

    @property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose forward runs again, as an R in the orders."""
        return self.words[Op.R]

    @property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose activations go to the host, as an O in the orders."""
        return self.words[Op.O]

    @property
    def updated(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches with a U in the orders; see `ppedu.versions`."""
        return self.words[Op.U]

    @cached_property
    def restored(self) -> frozenset[Result]:
        """The results of R and L in the orders, which backwards require; see `requires`."""
        return frozenset((op.value, *place) for op in (Op.R, Op.L) for place in self.words[op])

    @property
    def plain(self) -> bool:
        """Whether any program can run the schedule: its sequences are whole, and it has no R, O, L, U, S or T."""
        return self.slices == 1 and not any(self.words.values()) and not self.placement.barriers

    @property
    def waits(self) -> bool:
        """Whether the orders include waits for messages that were posted before."""
        return not WAITS.keys().isdisjoint(self._ops)

    @cached_property
    def one_by_one(self) -> Schedule:
        """The schedule in which single messages replace each batch. Without batches, it is this schedule itself.

        Posting does not wait, so messages that are posted one after the other, and then waited for, are a batch in all
        but the communication stream that carries them; see `Streams`. A batch without a WAIT gets them all:
        (0SEND_F1;0RECV_B0)BATCH_P2P becomes 0SEND_F1 0RECV_B0 0WAIT_SEND_F1 0WAIT_RECV_B0.
        """
        if Op.BATCH_P2P not in self._ops:
            return self
        return replace(self, orders=tuple(tuple(action for _, action in _one_by_one(order)) for order in self.orders))

    def positions(self, rank: int) -> Sequence[int]:
        """Return, for each action of a rank in `one_by_one`, its index or that of its batch in this schedule."""
        if self.one_by_one is self:
            return range(len(self.orders[rank]))
        return [index for index, _ in _one_by_one(self.orders[rank])]

    @cached_property
    @without_gc()
    def numbered(self) -> Numbered:
        """The orders of `one_by_one` with a whole number for each action."""
        whole = self.one_by_one
        return Numbered(whole.orders, self.placement, self.microbatches, self.lowered, whole.waits, self.restored)

    @cached_property
    @without_gc()
    def replay(self) -> Replay:
        """A global order in which every rank runs as many of its actions as it can; see `Replay`."""
        return replay(self.numbered)

    @cached_property
    @without_gc()
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong with this schedule, up to 100,000 problems; empty if it is legal."""
        return tuple(find_problems(self, self.replay))

    def validate(self) -> None:
        """Raise ScheduleError unless the schedule is legal.

        The message lists the first problems, or suggests a placement without any. The error's `problems` are complete.
        """
        if self.problems:
            shown = "\n".join(f"  {problem}" for problem in self.problems[:5])
            more = f"\n  … and {plural(len(self.problems) - 5, 'more problem')}" if len(self.problems) > 5 else ""
            message = suggest_placement(self) or f"{self!r} is not legal:\n{shown}{more}"
            raise ScheduleError(message, self.problems)

    def __repr__(self) -> str:
        only = ", forward_only=True" if self.forward_only else ""
        size = f"ranks={self.ranks}, stages={self.stages}, microbatches={self.microbatches}"
        return f"Schedule({self.name!r}, {size}{only})"

    def __str__(self) -> str:
        """Return the text timeline of a simulation; for an illegal schedule, the problems."""
        return hooks.call("draw schedule", self)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return hooks.call("display", self)

    def table(self) -> str:
        """Return the lockstep table: a line for each slot, a column for each rank, ✗ at an action that gets stuck.

        Raises:
            SettingError: The schedule is lowered.
        """
        return hooks.call("table", self)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the orders as CSV text in the format of torch.distributed.pipelining, one line per rank.

        Args:
            path: Also write the text to this file.

        Raises:
            PipelineError: The file cannot be written.
        """
        text = csv_text(self.orders)
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_csv(
        cls,
        path: str | os.PathLike[str],
        placement: str | Placement = "loop",
        microbatches: int | None = None,
        name: str | None = None,
        forward_only: bool = False,
    ) -> Schedule:
        """Return the schedule in a CSV file with one line per rank and one action per cell.

        In a file without communication, empty cells are idle steps. They are dropped, because orders have no times;
        `align` finds them again.

        Args:
            microbatches: The number of microbatches that the file must contain. By default it is inferred: the largest
                microbatch plus 1.
            forward_only: The file is a schedule for inference, without backwards.

        Raises:
            ParseError: A cell is not an action, or the file does not match the placement or `microbatches`.
            SettingError: The placement, the name or `microbatches` is invalid.
            PipelineError: The file cannot be read.
        """
        where = named(path)
        placement, found, orders = parse(text_of(where), repr(str(where)), placement, microbatches)
        if name is None:
            name = UNWRITABLE.sub("�", where.stem)
        return cls(name, placement, found, orders, forward_only)

    @classmethod
    def read(
        cls,
        source: Any,
        placement: str | Placement | None = None,
        microbatches: int | None = None,
        name: str | None = None,
        forward_only: bool = False,
        ranks: int | None = None,
    ) -> Schedule:
        """Return a schedule as others write it, recognized by its content.

            pp.Schedule.read(torch_schedule)  # or torch_schedule.pipeline_order, or what print shows of it
            pp.Schedule.read("1 1 -1 -1\\n1 -1 1 -1")  # Megatron-LM's orders, a line for each rank
            pp.Schedule.read("traces/")  # the schedule of a run, which `pp.Run.load` reads whole
            pp.Schedule.read("Ettt|tttt|tttt|tttL", ranks=4, microbatches=8)  # a layout of Megatron-LM's

        Args:
            source: A schedule of torch.distributed.pipelining, with its messages if it has any; its orders, a list of
                actions or None for each rank; torch's print of them; Megatron-LM's orders, in which 2 is a forward of a
                rank's second chunk for the next microbatch, and -2 its backward; DeepSpeed's schedules, a list with one
                for each rank, or the instructions of each rank on a line; zero-bubble's nodes, a list for each rank; a
                schedule of HyperParallel, or its `exec_order`; a line of actions for each rank, with commas or spaces,
                in which F0-2 is short for 1F0 1F1 1F2 on rank 1; the path of a file with one of these; that of a trace
                as `Run.load` reads it, a .json file, zipped or not, or a folder; or a layout for Megatron-LM's
                `--pipeline-model-parallel-layout`, of which the schedule is the one that Megatron-LM runs with it, 1f1b
                or interleaved.
            placement: By default the first of "loop", "v", "bidirectional" and "round" with each stage on its rank.
            microbatches, forward_only: As in `from_csv`.
            name: By default that of a trace's or a layout's schedule, otherwise "read".
            ranks: For a layout, which needs it, and `microbatches`. With it, any text is read as a layout.

        Raises:
            ParseError: An action is unknown, or the orders do not match the placement or `microbatches`.
            SettingError: The source is none of these, or an argument is invalid, or not for a trace.
            PipelineError: The file cannot be read.
        """
        if is_layout(source) or (ranks is not None and isinstance(source, str)):
            if placement is not None or forward_only:
                raise SettingError("a layout is a loop, for training; leave out placement and forward_only")
            run: Schedule = hooks.call("schedule of a layout", source, ranks, microbatches)
            return run if name is None else replace(run, name=name)
        if ranks is not None:
            raise SettingError("ranks is for a layout of Megatron-LM's; other sources have an order for each rank")
        if is_trace(source):
            if placement is not None or microbatches is not None or forward_only:
                raise SettingError(
                    f"the trace {str(source)!r} has its own placement and microbatches; leave these arguments out"
                )
            measured: Schedule = hooks.call("schedule of a trace", source)
            return measured if name is None else replace(measured, name=name)
        text, where = recognized(source)
        place, found, orders = parse(text, where, placement or "loop", microbatches)
        schedule = cls("read" if name is None else name, place, found, orders, forward_only)
        return schedule if placement else _with_fitting_placement(schedule) or schedule


def _one_by_one(order: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    """Yield the actions of an order, and the messages of its batches with their waits, each with its index."""
    waits = waited_for(order)
    for index, action in enumerate(order):
        for single in action.singles if action.op is Op.BATCH_P2P else (action,):
            yield index, single
        if action.op is Op.BATCH_P2P and waits.isdisjoint(action.parts):
            for message in action.parts:
                yield index, message._replace(op=WAIT_OF[message.op])


def _as_tuple(rule: str, values: Any) -> tuple[Any, ...]:
    """Return a sequence or an iterator as a tuple; raise SettingError with `rule` for other values."""
    if not isinstance(values, Sequence | Iterator) or isinstance(values, str | bytes | Action):
        raise SettingError(f"{rule}, such as [[pp.F(0, 0), pp.B(0, 0)], …]; got {values!r}")
    return tuple(values)


def _order(rank: int, actions: Any) -> tuple[Action, ...]:
    """Return the order of a rank as a tuple of well-formed actions."""
    order = _as_tuple(f"the order of rank {rank} must be a sequence of actions", actions)
    if are_well_formed(order):
        return order
    well_formed = []
    for index, value in enumerate(order):
        try:
            well_formed.append(Action.of(value))
        except ParseError as error:
            raise SettingError(f"rank {rank}, position {index}: {error}") from None
    return tuple(well_formed)


def require_schedule(what: str, value: Any) -> None:
    """Raise SettingError unless `value` is a Schedule."""
    if not isinstance(value, Schedule):
        raise SettingError(f"{what} takes a schedule, such as schedule('1f1b', ranks=4, microbatches=8); got {value!r}")


def require_compute(what: str, schedule: Any) -> None:
    """Raise SettingError unless `schedule` is a Schedule that is not lowered."""
    require_schedule(what, schedule)
    if not schedule._ops <= COMPUTE | COPIES | OVERLAP:
        raise SettingError(f"{schedule!r} is lowered already; {what} takes a schedule with compute actions only")


def suggest_placement(schedule: Schedule) -> str | None:
    """Return a sentence that suggests a placement with which the same orders are legal; None if there is not one."""
    other = _with_fitting_placement(schedule)
    if not other or other.problems:
        return None
    name = other.placement.name
    return (
        f"{schedule!r} is not legal with the placement {schedule.placement.name!r}, but with {name!r} the same orders "
        f"are; choose that placement (on the command line: --placement {name})"
    )


def _with_fitting_placement(schedule: Schedule) -> Schedule | None:
    """Return the same orders with a placement whose stages are on their ranks, if they are not with their own."""
    chunks, odd = divmod(schedule.stages, schedule.ranks)
    if odd or not any(problem.kind == "rank" for problem in schedule.problems):
        return None
    for name in PLACEMENTS:
        whole = schedule.microbatches // schedule.slices
        other = replace(schedule, placement=Placement.make(name, schedule.ranks, chunks, whole, schedule.slices))
        if not any(problem.kind == "rank" for problem in other.problems):
            return other
    return None
