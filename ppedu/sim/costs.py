"""Costs: the time that each action takes, and the memory of the activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from numbers import Rational
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from ppedu.core import Op, Schedule, SettingError, hooks
from ppedu.core.numeric import Number, Ticks, by_microbatch, flat, plain, ratio
from ppedu.core.streams import STREAMED
from ppedu.core.validate import require_instance, require_number, require_one_of
from ppedu.sim.lengths import shares_of
from ppedu.sim.per_link import LinkCost, PerLink, of_link, of_links

if TYPE_CHECKING:
    from ppedu.sim.timeline import Timeline

Size = Number | Sequence[Number]  # of a share, or of each stage
Table = Size | Sequence[Number | Sequence[Number]]  # or of each microbatch in a stage
Cost = Table | Callable[[int, int], Number]

HEAD = ("head", "head_backward")
TIMES = ("forward", "backward", "input", "weight", "overlap", "overlap_input", "update", "offload", *HEAD)
GIVEN = ("forward", "update", *HEAD)  # times whose default is a number


class Changes(NamedTuple):
    """The memory that actions allocate at their start and free at their end, in ticks.

    Attributes:
        table: From an op, a stage, a slice, and whether that has an R in the order, to a pair of memories.
        ticks: Their unit.
        period: How many slices have memories of their own: one, those of a sequence if their lengths differ, or all if
            the sizes of microbatches do. Microbatch m has those of slice m % period.
    """

    table: dict[tuple[Op, int, int, bool], tuple[Any, Any]]
    ticks: Ticks
    period: int


# The costs, each with the levels of sequences that it may have: 2 by stage and microbatch, 1 by stage.
DEPTHS = {**dict.fromkeys(TIMES, 2), "activation": 2, "stage_input": 2, "weight_memory": 1}
DEPTHS |= dict.fromkeys(("latency", "transfer"), 0)

LARGEST = 1e100  # the largest cost: sums of millions, and their ratios, still fit a float


@dataclass(frozen=True)
class Costs:
    """The time of each action, in any unit of time, and the size of an activation, in any unit of memory.

    A number is the cost of one rank's *share* of the model (1/ranks of it). A stage costs `ranks/stages` of it, so that
    schedules with different numbers of stages are compared on the same model. A sequence (a list, a tuple, an array or
    a tensor; stored as a tuple) gives the cost of each stage instead. Of either, a slice takes its part. For the time
    of an action, and for `activation` and `stage_input`, an entry may again be a sequence, of the costs of each
    microbatch, or of each slice if there are several: [[1, 1, 3], [1, 1, 3]] for 2 stages and 3 microbatches. For a
    time, a function `f(stage, microbatch)` gives the same; a timeline holds it as a table. Integers and Fractions give
    exact times, floats give floats.

    Args:
        forward, backward: The times of F and B. `backward` defaults to twice `forward`, or to `input + weight` if both
            are given.
        input, weight: The times of I and W, the halves of a split backward. `weight` defaults to `backward / 2`,
            `input` to `backward - weight`.
        overlap: The time of an overlapped pair, by default the sum of its parts; with a sequence, the mean of the
            entries of its two stages.
        latency: The time from the end of an action to the start of one on another rank that depends on it. It keeps
            neither rank busy. A dict {(0, 1): 0.5, …} or a matrix, `latency[from_rank][to_rank]`, gives it for each
            link.
        activation: The memory that a forward takes for one microbatch, until its backward.
        weight_memory: The part of `activation`, 0 to 1, that a split backward keeps until W. I frees the rest. A number
            is that of every stage.
        recompute: Activations are dropped after F and computed again at the start of B or I, which takes F longer
            (activation checkpointing of whole stages, arXiv 1604.06174). Until then, a microbatch only holds
            `stage_input`. One that has an R in the order is recomputed there, whatever this says.
        stage_input: The memory of a stage's input for one microbatch, in the unit of `activation`. A number is that of
            every stage, large or small.
        unit, memory_unit: The units of the times and of `activation`, for display, such as "s" and "GB".
        attention: If sequences are cut into slices, the part of F and of B, 0 to 1, that is attention. A slice attends
            to all slices before it and, on average, to half of itself. The other work, W too, goes by the lengths.
        lengths: The lengths of the slices of each sequence, in tokens or relative to each other, such as (6, 4, 3, 3).
            By default, all slices are equally long.
        transfer: The time for which a message occupies its link, as a number, a dict or a matrix, like `latency`, which
            comes on top of it.
        transport: What blocks what, as in `check`. "buffered": Messages do not wait for each other. "pair": A rank has
            one communication stream for each peer, as with `isend` and `irecv`. "rank": It has one for all, as with
            `batch_isend_irecv`. "direction": It has two for each peer, one for each direction, as with a communicator
            for each. A stream carries its messages one by one, or batch by batch, in the order in which the rank
            reaches them, and a message needs the streams of both ranks. So a receive that is posted early blocks the
            messages after it. Only for lowered schedules.
        update: The time of U.
        offload: The time of an O, and of an L, by default that of F. They run on the rank's copy engine, one by one.
        head, head_backward: The times of S and T, where all ranks share the head; a number is that of every rank, and
            a sequence has that of a rank at its first stage. If there is one barrier, S takes longer, and T less.
        overlap_input: The time of a pair with an I, like `overlap`, which is the default.

    Raises:
        SettingError: A cost is negative, too large or not a number, half a backward takes longer than all of it, or
            costs to be pickled contain a function that cannot be.
    """

    forward: Cost = 1
    backward: Cost | None = None
    input: Cost | None = None
    weight: Cost | None = None
    overlap: Cost | None = None
    latency: LinkCost = 0
    weight_memory: Size = 1
    activation: Table = 1
    recompute: bool = False
    stage_input: Table = 0
    unit: str = ""
    memory_unit: str = ""
    transfer: LinkCost = 0
    transport: str = "buffered"
    attention: Number = 0
    lengths: Sequence[Number] = ()
    update: Cost = 0
    offload: Cost | None = None
    head: Cost = 1
    head_backward: Cost = 1
    overlap_input: Cost | None = None

    def __post_init__(self) -> None:
        for name, example in (("unit", "s"), ("memory_unit", "GB")):
            require_instance(name, getattr(self, name), str, f'text, such as "{example}"')
        require_one_of("transport", self.transport, ("buffered", *STREAMED))
        require_instance("recompute", self.recompute, bool, "True or False")
        for name, depth in DEPTHS.items():
            cost = _python(getattr(self, name))
            if cost is None and name in TIMES and name not in GIVEN:
                continue  # it has a default
            if name in ("latency", "transfer"):
                cost = of_links(name, cost)
            numbers: Iterable[Any] = ()
            if callable(cost) and name in TIMES:
                _require_function(name, cost)
            elif isinstance(cost, PerLink):
                numbers = cost.values()
            else:
                numbers = _numbers(cost, depth)
            for number in numbers:
                _require_cost(name, number)
            object.__setattr__(self, name, cost)  # frozen
        require_number("attention", self.attention, lambda part: 0 <= part <= 1, "a part of the time, 0 to 1")
        lengths = _python(self.lengths)
        require_instance("lengths", lengths, tuple, "the lengths of a sequence's slices, such as (6, 4, 3, 3)")
        for length in lengths:
            require_number("a slice's length", length, lambda length: 0 < length <= LARGEST, "a number above 0")
        object.__setattr__(self, "lengths", lengths)
        if max(flat([self.weight_memory])) > 1:
            raise SettingError(f"weight_memory is a part of the activation, 0 to 1; got {self.weight_memory!r}")
        if not any(isinstance(cost, tuple) or callable(cost) for cost in map(vars(self).get, DEPTHS)):
            self.durations(stages=1, ranks=1)  # raises SettingError if half a backward takes longer than all of it

    def __getstate__(self) -> dict[str, Any]:
        import pickle  # slow to import

        for name, cost in vars(self).items():
            if callable(cost):
                try:
                    pickle.dumps(cost)
                except Exception as error:
                    raise SettingError(
                        f"{name} is a function that cannot be pickled, {cost!r}; define it with def at the top of a "
                        "module, or use the costs of simulate(schedule, costs), which are a table"
                    ) from error
        return vars(self)

    @classmethod
    def fit(cls, timeline: Timeline) -> Costs:
        """Return the costs of a run: for each stage, the median times of its F (and R), B, I, W and overlapped pairs.

        A stage that never runs one of these gets the median over the other stages. The times of a microbatch's slices
        are added; `attention` and `lengths`, by which they differ, are taken from the timeline's costs.

        The latency of a link is the median time of the messages on it for which a rank was waiting: from the end of the
        action that made one to the start of the one that requires it, if the rank was idle in between. A link without
        such messages gets the median over the other links. If all links have the same latency, it is one number.

        Raises:
            SettingError: `timeline` is not a Timeline.
        """
        return hooks.call("fit", [timeline])

    def delay(self, sender: int, receiver: int) -> Any:
        """Return the time of a message from one rank to another: transfer and latency; 0 from a rank to itself.

        If links are occupied, it counts from the start of the transfer.

        Raises:
            SettingError: The latency or the transfer is a dict or a matrix without this link.
        """
        messages = {"transfer": self.transfer, "latency": self.latency}
        return sum(of_link(name, cost, sender, receiver) for name, cost in messages.items())

    def tabulated(self, stages: int, microbatches: int) -> Costs:
        """Return these costs with functions as tables. Raise SettingError unless they return numbers of at least 0."""
        functions = {name: cost for name, cost in vars(self).items() if callable(cost)}
        if not functions:
            return self

        tables: dict[str, Any] = {}
        for name, function in functions.items():
            tables[name] = [[0] * microbatches for _ in range(stages)]
            for stage, row in enumerate(tables[name]):
                for m in range(microbatches):
                    row[m] = _python(function(stage, m))
                    _require_cost(f"{name}({stage}, {m})", row[m])
        return replace(self, **tables)

    def per_stage(
        self, cost: Any, stages: int, ranks: int, microbatches: int | None = None, slices: int = 1
    ) -> list[Any]:
        """Return `cost` for each stage: the number of a share scaled to a stage, or the entries of a sequence.

        Functions must be tabulated.

        Args:
            microbatches: Allows entries that are tuples with a number for each microbatch.
            slices: Numbers are of whole sequences, and a slice takes its part. Tuples have numbers of slices already.

        Raises:
            SettingError: The sequence does not have one entry for each stage, or an entry not one for each microbatch.
        """
        varies = isinstance(cost, tuple) and any(isinstance(entry, tuple) for entry in cost)
        if callable(cost) or (varies and microbatches is None):
            raise SettingError("costs that vary by microbatch cannot be used here; give one number for each stage")
        if not isinstance(cost, Sequence):
            share = Fraction(ranks, stages)
            one = plain(Fraction(cost) * share) if isinstance(cost, Rational) else cost * float(share)
            return [ratio(one, slices)] * stages
        if len(cost) != stages:
            raise SettingError(
                f"{len(cost)} costs for {stages} stages; give {stages}, one for each stage, "
                "or a single number, for a rank's share of the model"
            )
        for stage, entry in enumerate(cost):
            if isinstance(entry, tuple) and len(entry) != microbatches:
                raise SettingError(
                    f"{len(entry)} costs of stage {stage} for {microbatches} microbatches; give {microbatches}, one "
                    "for each microbatch, or a single number for the stage"
                )
        if slices == 1:
            return list(cost)
        return [entry if isinstance(entry, tuple) else ratio(entry, slices) for entry in cost]

    def durations(
        self, stages: int, ranks: int, microbatches: int | None = None, slices: int = 1
    ) -> dict[Op, list[Any]]:
        """Return the times of F, B, I, W, R, U, O, L, S and T in each stage; arguments and errors as for `per_stage`.

        Those of slices are means; `attention` and `lengths` are left to the clock.

        Raises:
            SettingError: Also if I or W takes longer than B.
        """

        def by_stage(cost: Cost) -> list[Any]:
            return self.per_stage(cost, stages, ranks, microbatches, slices)

        def in_each(function: Callable[..., Any], *times: list[Any]) -> list[Any]:
            """Return the result of a function of the times in each stage."""
            return [by_microbatch(function, *stage) for stage in zip(*times, strict=True)]

        f = by_stage(self.forward)
        i = None if self.input is None else by_stage(self.input)
        w = None if self.weight is None else by_stage(self.weight)
        if self.backward is not None:
            b = by_stage(self.backward)
        elif i and w:
            b = in_each(add, i, w)
        else:
            b = in_each(lambda forward: 2 * forward, f)
        if not w:
            w = in_each(sub, b, i) if i else in_each(lambda backward: ratio(backward, 2), b)
        if not i:
            i = in_each(sub, b, w)
        if min(flat(i + w)) < 0:
            raise SettingError(
                "half of a split backward takes longer than the full backward; give both input and weight"
            )
        if self.recompute:
            b = in_each(add, b, f)
            i = in_each(add, i, f)
        u = self.per_stage(self.update, stages, ranks, microbatches)  # whole, whatever the slices
        o = f if self.offload is None else by_stage(self.offload)
        s, t = (self.per_stage(cost, stages, stages, microbatches, slices) for cost in (self.head, self.head_backward))
        halves = {Op.B: b, Op.I: i, Op.W: w}
        return {Op.F: f, **halves, Op.R: f, Op.U: u, Op.O: o, Op.L: o, Op.S: s, Op.T: t}

    def memory_changes(self, schedule: Schedule) -> Changes:
        """Return the memory that actions allocate at their start and free at their end.

        An activation of 10, with a weight_memory of 0.4: F allocates 10, B frees 10, I frees 6 and W 4. If the forward
        is recomputed from an input of 1, F allocates 1, and R, B or I the other 9. O frees what F has allocated, and L
        allocates it again. If the backward is on another rank, F allocates nothing, and R all 10.
        """
        stages, slices = schedule.stages, schedule.slices
        activations = self.per_stage(self.activation, stages, schedule.ranks, schedule.microbatches, slices)
        inputs = self.per_stage(self.stage_input, stages, stages, schedule.microbatches, slices)
        parts = self.per_stage(self.weight_memory, stages, stages)
        of_mean = [slices * share.tokens for share in shares_of(self.lengths, slices)]  # 1 on average
        period = slices if self.lengths else 1
        if any(isinstance(size, tuple) for size in activations + inputs):
            period = schedule.microbatches

        def sizes(size: Any) -> Sequence[Any]:
            """Return the size of each slice: a table has it, and a mean goes by the tokens."""
            return size if isinstance(size, tuple) else [size * of_mean[m % slices] for m in range(period)]

        table: dict[tuple[Op, int, int, bool], tuple[Any, Any]] = {}
        for again in (False, True) if schedule.recomputed else (False,):
            for stage, part in enumerate(parts):
                stays = not schedule.placement.apart(stage)
                for position, (whole, held) in enumerate(
                    zip(sizes(activations[stage]), sizes(inputs[stage]), strict=True)
                ):
                    missing = whole - held * stays if again or self.recompute else 0  # after F
                    left = 0 if again else missing  # before B or I
                    of_slice = {
                        Op.F: (whole - missing, 0),
                        Op.R: (missing, 0),
                        Op.B: (left, whole),
                        Op.I: (left, whole * (1 - part)),
                        Op.W: (0, whole * part),
                        Op.O: (0, whole - missing),
                        Op.L: (whole - missing, 0),
                        **dict.fromkeys((Op.U, Op.S, Op.T), (0, 0)),
                    }
                    table |= {(op, stage, position, again): change for op, change in of_slice.items()}
        ticks = Ticks(chain(*table.values()))
        counted = {key: (ticks.count(taken), ticks.count(freed)) for key, (taken, freed) in table.items()}
        return Changes(counted, ticks, period)


def require_costs(costs: Costs | None) -> Costs:
    """Return `costs`, or the default costs for None. Raise SettingError if it is anything else."""
    costs = Costs() if costs is None else costs
    require_instance("costs", costs, Costs, "Costs, such as Costs(forward=1, backward=2)")
    return costs


def _python(value: Any) -> Any:
    """Return a number as a Python number; an array, a tensor or a sequence as a tuple of Python numbers."""
    if type(value) in (int, float):
        return value
    if hasattr(value, "tolist"):  # from NumPy or torch, which are not imported here
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(map(_python, value))
    return value


def _require_function(name: str, value: Any) -> None:
    """Raise SettingError unless `value` can be called with a stage and a microbatch."""
    from inspect import signature  # slow to import

    try:
        if not isinstance(value, type):
            signature(value).bind(0, 0)
            return
    except ValueError:  # some built-in functions have no signature
        return
    except TypeError:
        pass
    such_as = "a number, a list, or a function of two numbers, f(stage, microbatch)"
    raise SettingError(f"{name} must be {such_as}; got {value!r}")


def _numbers(cost: Any, depth: int) -> Iterator[Any]:
    """Yield the numbers in tuples of at most `depth` levels, and anything else that is in their place."""
    if depth and isinstance(cost, tuple) and cost:
        yield from chain.from_iterable(_numbers(each, depth - 1) for each in cost)
    else:
        yield cost


def _require_cost(name: str, number: Any) -> None:
    """Raise SettingError unless `number` is a number from 0 to LARGEST."""
    if type(number) in (int, float) and 0 <= number <= LARGEST:  # the usual case, without slow questions
        return
    require_number(name, number, lambda number: 0 <= number < math.inf, "a number of at least 0")
    if number > LARGEST:
        raise SettingError(f"{name} must be at most {LARGEST:g}, or sums would overflow; give it in a larger unit")
