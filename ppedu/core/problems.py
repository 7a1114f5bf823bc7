"""What is wrong with a schedule, each problem in one sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ppedu.core.actions import COMMUNICATION, COMPUTE, RECEIVE, SEND, SHARDING, Action, Op
from ppedu.core.dependencies import Replay, Result, posts, produces, requires
from ppedu.core.placement import TOWARDS
from ppedu.core.waiting import rings

if TYPE_CHECKING:
    from ppedu.core.schedule import Schedule


Placed = dict[Action, tuple[int, int]]  # the rank and position at which an action stands first
Maker = dict[Result, Action]
# From which rank to which: what is sent, or received, in that order, as (F or B, the sender's stage, microbatch).
Messages = dict[tuple[int, int], list[tuple[str, int, int]]]


class Problem(NamedTuple):
    """One thing that is wrong. `index` is the position in the rank's order, None where nothing stands.

    kind: "range" (no such stage or microbatch), "rank" (not this rank's stage), "missing", "duplicate",
    "order" (before what it needs, on the same rank), "deadlock" (ranks waiting for each other in a ring),
    "message" (received in another order than sent, or needless), "sharding" (weights not gathered, or twice).
    """

    rank: int
    index: int | None  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    action: Action
    kind: str
    message: str

    def __str__(self) -> str:
        return self.message


MOST_PROBLEMS = 100_000  # more would take minutes to list and help no reader


def find_problems(schedule: Schedule, known: Collection[int], replayed: Replay) -> Iterator[Problem]:
    """Yield the problems, those of single actions first, up to MOST_PROBLEMS. Internal; call `check`."""
    return islice(_problems(schedule, known, replayed), MOST_PROBLEMS)


def _problems(schedule: Schedule, known: Collection[int], replayed: Replay) -> Iterator[Problem]:
    placement = schedule.placement
    placed: Placed = {}
    sent: Messages = {}
    received: Messages = {}
    holders, links, copies, split = placement.holders, placement.links, placement.copies, placement.split
    stages, microbatches = placement.stages, schedule.microbatches
    for rank in known:
        for index, action in enumerate(schedule.orders[rank]):
            here = rank, index
            for single in action.parts or (action,):
                stage, op, m, _ = single
                copy = copies > 1 and m >= split  # as Placement.copy has it, without 100,000 calls
                fresh = placed.setdefault(single, here) is here
                in_place = 0 <= stage < stages and 0 <= m < microbatches and holders[copy][stage] == rank
                if in_place and fresh and op in COMPUTE:
                    continue
                if in_place and fresh and op in links[copy][stage]:
                    log = sent if op in SEND else received
                    sender = stage if op in SEND else stage + TOWARDS[op]
                    log.setdefault(placement.route(single), []).append((op[-1], sender, m))
                    continue
                for kind, why in _misplaced(schedule, rank, single, None if fresh else placed[single]):
                    yield Problem(rank, index, single, kind, f"rank {rank}, position {index}: {single}{why}")
        yield from _sharding(schedule, rank)
    yield from _incomplete(schedule, known, placed)
    yield from _out_of_order(sent, received, placed)
    if replayed.blocked:
        maker = {result: single for single in placed for result in produces(single)}
        maker |= {posts(single): single for single in placed if single.op in RECEIVE}
        yield from _too_early(schedule, known, placed, maker)
        yield from _deadlocks(schedule, replayed.blocked, placed, maker)


def _misplaced(
    schedule: Schedule, rank: int, single: Action, first: tuple[int, int] | None
) -> Iterator[tuple[str, str]]:
    """What is wrong with an action where it stands, as the problem's kind and the end of its sentence."""
    placement = schedule.placement
    stage, op, microbatch, _ = single
    if not 0 <= stage < schedule.stages:
        yield "range", f": there is no stage {stage}; the stages are 0 to {schedule.stages - 1}"
    elif op in SHARDING:
        if stage not in placement.stages_of(rank):
            yield "rank", f": stage {stage} is held by rank {placement.rank(stage)}"
    elif not 0 <= microbatch < schedule.microbatches:
        yield "range", f": there is no microbatch {microbatch}; they are 0 to {schedule.microbatches - 1}"
    elif placement.rank(stage, microbatch) != rank:
        yield "rank", f": stage {stage} is held by rank {placement.rank(stage, microbatch)}"
    elif op in COMMUNICATION and not 0 <= stage + TOWARDS[op] < schedule.stages:
        which = "last" if stage else "first"
        yield "range", f": stage {stage} is the {which}; there is none to {'send to' if op in SEND else 'receive from'}"
    elif op in COMMUNICATION and op not in placement.links[placement.copy(microbatch)][stage]:
        yield "message", f": rank {rank} itself holds stage {stage + TOWARDS[op]}; nothing has to be sent"
    elif first is not None:
        yield "duplicate", f" has already been run (rank {first[0]}, position {first[1]})"


def _incomplete(schedule: Schedule, known: Collection[int], placed: Placed) -> Iterator[Problem]:
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            # An action equals the tuple of its fields, and there are many to look up.
            forward, full, first, second = [(stage, op, microbatch, ()) in placed for op in "FBIW"]
            if forward and full != first and first == second and not schedule.lowered:
                continue  # the usual case, and all is there
            rank = schedule.placement.rank(stage, microbatch)
            if rank not in known:
                continue
            missing = [] if forward else ["F"]
            if not full and not first and not second:
                missing += ["B"]
            elif not full:
                missing += [op for op, found in (("I", first), ("W", second)) if not found]
            elif first or second:
                whole = Action(stage, Op.B, microbatch)
                half = Action(stage, Op.I if first else Op.W, microbatch)
                at, index = placed[whole]
                why = f"{whole} is a full backward, and half of it, {half}, is run too"
                yield Problem(at, index, whole, "duplicate", f"rank {at}, position {index}: {why}")
            if schedule.lowered:
                links = schedule.placement.links[schedule.placement.copy(microbatch)][stage]
                missing += [op for op in links if (stage, op, microbatch, ()) not in placed]
            for op in missing:
                action = Action(stage, Op(op), microbatch)
                yield Problem(rank, None, action, "missing", f"rank {rank}: {action} is never run")


def _out_of_order(sent: Messages, received: Messages, placed: Placed) -> Iterator[Problem]:
    """Receives that get another message than they name: what one rank sends another arrives in the order sent."""
    for (source, rank), wanted in received.items():
        arriving = sent.get((source, rank), [])
        if arriving == wanted:
            continue
        both = set(arriving) & set(wanted)  # others are reported as missing
        wanted, arriving = ([message for message in log if message in both] for log in (wanted, arriving))
        for number, (expected, got) in enumerate(zip(wanted, arriving, strict=True)):
            if expected != got:
                kind, stage, microbatch = expected
                recv = Action(stage - TOWARDS[Op(f"RECV_{kind}")], Op(f"RECV_{kind}"), microbatch)
                send = Action(got[1], Op(f"SEND_{got[0]}"), got[2])
                index, at = placed[recv][1], placed[send][1]
                why = (
                    f"would get what {send} sends: messages from rank {source} arrive in the order sent, and that one "
                    f"is number {number + 1} (rank {source}, position {at})"
                )
                yield Problem(rank, index, recv, "message", f"rank {rank}, position {index}: {recv} {why}")


def _sharding(schedule: Schedule, rank: int) -> Iterator[Problem]:
    """Weights are gathered before they are computed with, not twice, and gradients summed after the last backward."""
    order = schedule.orders[rank]
    if SHARDING.isdisjoint(action.op for action in order):
        return
    gathers = any(action.op in (Op.UNSHARD, Op.RESHARD) for action in order)  # else gradients alone are summed
    last = {single.stage: i for i, action in enumerate(order) for single in action.singles if single.op in COMPUTE}
    gathered: set[int] = set()
    summed: set[int] = set()
    for index, action in enumerate(order):
        stage, op = action.stage, action.op
        sharded = [part.stage for part in action.singles if part.op in COMPUTE and part.stage not in gathered]
        if gathers and sharded:
            why = f"computes with sharded weights; {sharded[0]}UNSHARD must come first"
        elif op == Op.UNSHARD and stage in gathered:
            why = "is needless: the weights are gathered already"
        elif op == Op.RESHARD and stage not in gathered:
            why = "is needless: the weights are sharded already"
        elif op == Op.REDUCE_GRAD and last.get(stage, -1) > index:
            why = f"is too early: {order[last[stage]]} comes after it, at position {last[stage]}"
        elif op == Op.REDUCE_GRAD and stage in summed:
            why = "is needless: the gradients are summed already"
        else:
            why = ""
        if why:
            yield Problem(rank, index, action, "sharding", f"rank {rank}, position {index}: {action} {why}")
        if op == Op.UNSHARD:
            gathered.add(stage)
        elif op == Op.RESHARD:
            gathered.discard(stage)
        elif op == Op.REDUCE_GRAD:
            summed.add(stage)


def _too_early(schedule: Schedule, known: Collection[int], placed: Placed, maker: Maker) -> Iterator[Problem]:
    for rank in known:
        for index, action in enumerate(schedule.orders[rank]):
            for need in requires(action, schedule.placement, schedule.lowered):
                if need in maker:
                    source, at = placed[maker[need]]
                    if source == rank and at >= index:
                        where = f"only comes at position {at}" if at > index else "runs at the same time"
                        yield Problem(
                            rank,
                            index,
                            action,
                            "order",
                            f"rank {rank}, position {index}: {action} needs {maker[need]}, which {where}",
                        )


def _deadlocks(
    schedule: Schedule, blocked: dict[int, tuple[int, Result]], placed: Placed, maker: Maker
) -> Iterator[Problem]:
    waits_for = {
        rank: [placed[maker[missing]][0]] for rank, (_, missing) in sorted(blocked.items()) if missing in maker
    }
    for ring in rings(waits_for):
        if len(ring) > 1:  # a rank that waits for itself is an "order" problem
            links = []
            for member, peer in zip(ring, ring[1:] + ring[:1], strict=True):
                index, missing = blocked[member]
                links.append(
                    f"rank {member} waits at position {index} ({schedule.orders[member][index]}) "
                    f"for {maker[missing]} of rank {peer}"
                )
            index, _ = blocked[ring[0]]
            yield Problem(ring[0], index, schedule.orders[ring[0]][index], "deadlock", "deadlock: " + ", ".join(links))
