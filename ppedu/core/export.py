"""Schedules in the formats of other programs: exactly, or refused with the reason. `Schedule.read` is the way back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import NamedTuple

from ppedu.core.actions import COMPUTE, OVERLAP, RECEIVE, Action, O, Op, R, U
from ppedu.core.checking import check
from ppedu.core.csv_format import DEEPSPEEDS, NODES
from ppedu.core.errors import ScheduleError, SettingError
from ppedu.core.grid import strip
from ppedu.core.lowering import lower
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule, require_schedule

ONLY_HERE = (Op.BATCH_P2P, Op.WAIT_RECV_F, Op.WAIT_RECV_B)
INSTRUCTIONS = {Op(op): name for name, op in DEEPSPEEDS.items()}
TYPES = {Op(op): name for name, op in NODES.items()}


class Node(NamedTuple):
    """A computation with the first fields of zero-bubble's nodes: `ScheduledNode(FuncType(node.type), *node[1:])`.

    `stage` is the rank, `layer_group_idx` our stage. The type "B" is our I, and "BW" our B.
    """

    type: str
    stage: int
    microbatch: int
    chunk: int
    seq_split_idx: int
    layer_group_idx: int


def to_torch(schedule: Schedule, path: str | os.PathLike[str] | None = None) -> str:
    """Return the CSV text that `_load_csv` of torch.distributed.pipelining's schedules reads.

    Torch loads a lowered schedule with format="compute_comms", any other with "compute_only". From PyTorch 2.15 on, a
    lowered one needs a WAIT_SEND for each send, or export the schedule that is not lowered. Torch does not know
    OVERLAP_B_F, which becomes its two actions in order. A lowered schedule for training without REDUCE_GRAD gets
    one for each stage, sharded or not, because that is where torch divides gradients by the number of microbatches.

    Args:
        path: Also write the text to this file.

    Raises:
        SettingError: `schedule` is not a Schedule, has no actions, R, U, S or T, batches of messages or waits for
            receives, or runs two copies of the model, which torch cannot.
        PipelineError: The file cannot be written.
    """
    _require_one_copy("to_torch", schedule, "torch's schedules")
    _require_plain(schedule, "torch's schedules")
    orders: list[list[Action]] = []
    for order in schedule.orders:
        known = (action.parts if action.op == Op.OVERLAP_B_F else [action] for action in order)
        orders.append([*chain.from_iterable(known)])
    if unknown := next((each for each in chain(*orders) if each.op in ONLY_HERE), None):
        raise SettingError(
            f"torch has no {unknown}; it posts each message alone, and waits for a receive where its result is used: "
            "export pp.strip(schedule), or pp.lower of that"
        )
    reduces = any(action.op == Op.REDUCE_GRAD for order in orders for action in order)
    if schedule.lowered and not reduces and not schedule.forward_only:
        for rank, actions in enumerate(orders):
            actions += [Action(stage, Op.REDUCE_GRAD) for stage in schedule.placement.stages_of(rank)]
    return replace(schedule, orders=tuple(map(tuple, orders))).to_csv(path)


def to_megatron(schedule: Schedule) -> str:
    """Return the orders in Megatron-LM's numbers, a line for each rank.

    2 is the forward of the rank's second chunk for its next microbatch, and -2 the backward.

    Raises:
        SettingError: `schedule` is not a Schedule, or the numbers cannot say it: it has pairs, halves of a backward or
            messages, its stages do not go round the ranks, or a chunk does not take its microbatches in order.
        ScheduleError: It is not legal.
    """
    _require("to_megatron", schedule, "Megatron-LM's numbers", {Op.F, Op.B}, ["loop"])
    lines: list[str] = []
    for order in schedule.orders:
        done: Counter[int] = Counter()  # by number
        numbers = []
        for action in order:
            number = (1 + action.stage // schedule.ranks) * (1 if action.op == Op.F else -1)
            _require_next(schedule, action, done[number], "Megatron-LM's numbers leave out the microbatch")
            done[number] += 1
            numbers.append(str(number))
        lines.append(" ".join(numbers) + "\n")
    return "".join(lines)


def to_zero_bubble(schedule: Schedule) -> list[list[Node]]:
    """Return the computations of each rank as nodes of zero-bubble, whose `run_schedule_passes` adds the messages.

    Raises:
        SettingError: `schedule` is not a Schedule, or zero-bubble cannot run it: it has pairs, messages, a microbatch
            whose backward is in halves at some stages only, or stages that go neither round the ranks nor down and up.
        ScheduleError: It is not legal.
    """
    _require("to_zero_bubble", schedule, "zero-bubble's nodes", COMPUTE - {Op.R, Op.U, Op.S, Op.T}, ["loop", "v"])
    backwards = {(action.microbatch, action.op) for order in schedule.orders for action in order}
    if mixed := [microbatch for microbatch, op in backwards if op == Op.B and (microbatch, Op.I) in backwards]:
        raise SettingError(
            f"{schedule!r} has whole backwards and halves for microbatch {min(mixed)}; zero-bubble has either at all "
            "stages — take a schedule with one kind, such as zb-h1"
        )
    chunks = [schedule.placement.chunk(stage) for stage in range(schedule.stages)]
    return [
        [Node(TYPES[op], rank, microbatch, chunks[stage], 0, stage) for stage, op, microbatch, _ in order]
        for rank, order in enumerate(schedule.orders)
    ]


def to_deepspeed(schedule: Schedule) -> str:
    """Return the instructions for DeepSpeed's PipelineEngine, a Python list for each rank on a line.

    A schedule without messages is lowered. A microbatch has the lowest free buffer until its gradient is sent. At the
    end of training, each rank sums its gradients (REDUCE_GRAD) and runs its optimizer.

    Raises:
        SettingError: `schedule` is not a Schedule, or the engine cannot run it: it has pairs, halves of a backward,
            sharded weights, several stages on a rank, or a loss or gradient overwritten before its backward.
        ScheduleError: It is not legal if sends wait for their receives.
    """
    require_schedule("to_deepspeed", schedule)
    if schedule.chunks > 1:
        raise SettingError(f"{schedule!r} has several stages on a rank; DeepSpeed has one — take one such as 1f1b")
    _require("to_deepspeed", schedule, "DeepSpeed's instructions", {*INSTRUCTIONS, Op.REDUCE_GRAD}, ["loop"])
    lowered = schedule if schedule.lowered else lower(strip(schedule), receive="late")
    if problems := check(lowered, transport="rendezvous"):
        raise ScheduleError(f"{schedule!r} hangs in DeepSpeed, where sends wait: {problems[0]}", problems)
    return "".join(f"[{', '.join(_instructions(lowered, rank))}]\n" for rank in range(lowered.ranks))


def _instructions(schedule: Schedule, rank: int) -> Iterator[str]:
    """Yield the instructions of a rank. Raise SettingError if DeepSpeed would take one microbatch for another."""
    first, last, training = rank == 0, rank == schedule.ranks - 1, not schedule.forward_only
    begins, ends = (Op.F, Op.B) if first else (Op.RECV_F, Op.SEND_B)
    if not training:
        ends = Op.F if last else Op.SEND_F
    # The engine keeps one loss, and receives everything into one buffer, out of which a backward takes its gradient.
    overwrites, held, what = ({Op.F}, Op.F, "loss") if last else (RECEIVE, Op.RECV_B, "gradient")
    buffers: dict[int, int] = {}  # by microbatch
    done: Counter[Op] = Counter()
    for action in (each for each in schedule.orders[rank] if each.op != Op.REDUCE_GRAD):
        op, microbatch = action.op, action.microbatch
        if op == begins or (op == Op.F and last):
            _require_next(schedule, action, done[op], "DeepSpeed counts the microbatches that it loads or receives")
        if training and op in overwrites and done[held] > done[Op.B]:
            raise SettingError(
                f"{schedule!r} has {action} before the backward whose {what} it overwrites in DeepSpeed's engine — "
                "take a schedule that uses each at once, such as 1f1b with late receives"
            )
        done[op] += 1
        if op == begins:
            buffers[microbatch] = next(each for each in count() if each not in buffers.values())
        if op == Op.F and (first or last):  # inputs or targets
            yield f"LoadMicroBatch(buffer_id={buffers[microbatch]})"
        yield f"{INSTRUCTIONS[op]}(buffer_id={buffers[microbatch]})"
        if op == ends:
            del buffers[microbatch]
    if training:
        yield from ("ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()")


def _require_one_copy(what: str, schedule: Schedule, form: str) -> None:
    """Raise SettingError unless `schedule` is a Schedule with actions and one copy of the model."""
    require_schedule(what, schedule)
    if schedule.placement.copies > 1:
        raise SettingError(
            f"{schedule!r} runs two copies of the model in opposite directions; in {form}, a stage is on one rank, "
            "whatever the microbatch — take a schedule with one copy, such as dualpipev for dualpipe"
        )
    if schedule.placement.backwards:
        raise SettingError(
            f"{schedule!r} has a stage's forward and backward on two ranks; in {form}, a stage is on one rank — take a "
            "schedule where it is, such as looped-bfs for roundpipe"
        )
    if schedule.slices > 1:
        raise SettingError(f"{schedule!r} cuts sequences into slices, which {form} cannot say — take slices=1")
    if not any(schedule.orders):
        raise SettingError(f"{schedule!r} has no actions; there is nothing to export")


def _require_plain(schedule: Schedule, form: str) -> None:
    """Raise SettingError if `schedule` has one of the actions R, O, L, U, S and T."""
    if schedule.recomputed:
        again = R(*min(schedule.recomputed))
        raise SettingError(
            f"{schedule!r} has {again}; in {form}, only a backward runs its forward again — take the schedule without "
            "R, such as 1f1b for mario, and recompute with torch.utils.checkpoint"
        )
    if schedule.offloaded:
        raise SettingError(
            f"{schedule!r} has {O(*min(schedule.offloaded))}; {form} have no copies to the host — take the schedule "
            "without O and L, such as gis for po-h"
        )
    if schedule.updated:
        raise SettingError(
            f"{schedule!r} has {U(*min(schedule.updated))}; in {form}, the optimizer steps once, after the end — take "
            "the schedule without U, such as 1f1b for pipedream"
        )
    if schedule.placement.barriers:
        raise SettingError(
            f"{schedule!r} has S and T; in {form}, one stage has the head — take the schedule without, such as 1f1b "
            "for 1f1b-vocab"
        )


def _require(what: str, schedule: Schedule, form: str, ops: Collection[Op], places: Sequence[str]) -> None:
    """Raise SettingError unless `form` has the ops and the placement of `schedule`; ScheduleError if it is illegal."""
    _require_one_copy(what, schedule, form)
    _require_plain(schedule, form)
    if other := next((action for action in chain(*schedule.orders) if action.op not in ops), None):
        if other.op in OVERLAP:
            reason = f"{form} have no pairs — take a schedule without, such as 1f1b for 1f1b-overlap"
        elif other.op in COMPUTE:
            reason = f"{form} have no halves of a backward — take a schedule without, such as 1f1b for zb-h1"
        else:
            reason = f"{what} does not take it — strip(schedule) has the computations alone"
        raise SettingError(f"{schedule!r} has {other}; {reason}")
    schedule.validate()
    named = {name: Placement.make(name, schedule.ranks, schedule.chunks) for name in places}
    if schedule.placement.holders not in [each.holders for each in named.values()]:
        where = f"the placement {schedule.placement.name!r}; {form} are for {' or '.join(map(repr, named))}"
        raise SettingError(f"{schedule!r} has {where} — take such a schedule, as interleaved is for hanayo")


def _require_next(schedule: Schedule, action: Action, microbatch: int, reason: str) -> None:
    """Raise SettingError unless an action is of `microbatch`, the next one."""
    if action.microbatch != microbatch:
        raise SettingError(
            f"{schedule!r} has {action} where microbatch {microbatch} is next; {reason} — take a schedule that has "
            "them in order, such as interleaved for looped-bfs"
        )
