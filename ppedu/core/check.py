"""Is a schedule legal? If not: everything that is wrong with it, each in one sentence.

Two questions, kept apart. What does an action need (`needs`)? And can the ranks, each in its own order,
get through to the end if every action waits for what it needs (`replay`)? The simulation asks the same
two questions, so that what is drawn and what is checked cannot differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ppedu.core.actions import COMMUNICATION, COMPUTE, RECEIVE, SEND, SHARDING, Action, Op
from ppedu.core.errors import SettingError, require_rank, require_schedule
from ppedu.core.placement import TOWARDS, Placement

if TYPE_CHECKING:
    from ppedu.core.schedule import Schedule

# What an action leaves behind for others. ("F", 2, 0): the activation that stage 2 made of microbatch 0.
# ("B", 2, 0): the gradient of stage 2's input, whether a full backward made it or its first half, I.
# ("SEND_F", 2, 0), ("RECV_F", 3, 0): that activation is on its way, and has come to stage 3's rank.
# ("POST_F", 3, 0): stage 3's rank is ready to receive it.
Result = tuple[str, int, int]

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


# `orders[rank][index]` runs; it has waited for some results and gives some: (rank, index, waited for, given).
Step = tuple[int, int, tuple[Result, ...], tuple[Result, ...]]


@dataclass(frozen=True)
class Replay:
    """All the steps that can be taken, each after those it needs. `blocked[rank]` is (index, what is missing)."""

    steps: list[Step]
    blocked: dict[int, tuple[int, Result]]


def needs(action: Action, placement: Placement, lowered: bool = False) -> tuple[Result, ...]:
    """The results that an action waits for.

    A forward needs the activation of the stage before; a backward its own forward and the gradient of the
    stage after; a weight backward its own input backward; an overlapped pair what both of its parts need.
    In a lowered schedule a result of another rank must have been received, and before that sent.
    """
    stage, op, microbatch, parts = action
    if parts:
        first, second = parts
        return needs(first, placement, lowered) + needs(second, placement, lowered)
    if op == "F":
        if not 0 < stage < placement.stages:  # the first, or one that is not there
            return ()
        if lowered and "RECV_F" in placement.links[placement.copy(microbatch)][stage]:
            return (("RECV_F", stage, microbatch),)
        return (("F", stage - 1, microbatch),)
    if op in ("B", "I"):
        own = ("F", stage, microbatch)
        if not 0 <= stage < placement.stages - 1:  # the last, or one that is not there
            return (own,)
        if lowered and "RECV_B" in placement.links[placement.copy(microbatch)][stage]:
            return (own, ("RECV_B", stage, microbatch))
        return (own, ("B", stage + 1, microbatch))
    if op == "W":
        return (("B", stage, microbatch),)
    if op in SEND:
        return ((op[-1], stage, microbatch),)
    if op in RECEIVE:
        return ((f"SEND_{op[-1]}", stage + TOWARDS[op], microbatch),)
    return ()


def gives(action: Action) -> tuple[Result, ...]:
    """The results that are there once an action has ended."""
    stage, op, microbatch, parts = action
    if parts:
        first, second = parts
        return gives(first) + gives(second)
    if op == "F":
        return (("F", stage, microbatch),)
    if op in ("B", "I"):
        return (("B", stage, microbatch),)
    if op in COMMUNICATION:
        return ((op.value, stage, microbatch),)
    return ()


def _meets(action: Action) -> Result:
    """What a SEND waits for, and a RECV gives at once, where a message is handed over only when both are there."""
    stage, op, microbatch, _ = action
    return f"POST_{op[-1]}", stage + (TOWARDS[op] if op in SEND else 0), microbatch


def replay(schedule: Schedule, known: Collection[int] | None = None, rendezvous: bool = False) -> Replay:
    """Let the ranks take turns, an action each; one that must wait is woken when what it waits for is there.

    Ranks that are not `known` are taken to have done all that anybody waits for. A receive waits for its
    message; with `rendezvous` a send waits, too, until the other rank is at the receive.
    """
    placement, lowered = schedule.placement, schedule.lowered
    known = range(schedule.ranks) if known is None else known
    there = _given_by_others(schedule, known)
    steps: list[Step] = []
    waiting: dict[Result, list[int]] = {}
    blocked: dict[int, tuple[int, Result]] = {}
    position = [0] * schedule.ranks
    awake = deque(rank for rank in known if schedule.orders[rank])
    while awake:
        rank = awake.popleft()
        index = position[rank]
        action = schedule.orders[rank][index]
        wanted, given = needs(action, placement, lowered), gives(action)
        fresh: tuple[Result, ...] = ()
        if rendezvous and action.op in SEND:
            wanted += (_meets(action),)
        elif rendezvous and action.op in RECEIVE:
            fresh = (_meets(action),)
        for need in wanted:
            if need not in there:
                blocked[rank] = index, need
                waiting.setdefault(need, []).append(rank)
                break
        else:
            steps.append((rank, index, wanted, given))
            fresh += given
            position[rank] += 1
            if position[rank] < len(schedule.orders[rank]):
                awake.append(rank)
        for result in fresh:
            there.add(result)
            if result in waiting:
                for sleeper in waiting.pop(result):
                    del blocked[sleeper]
                    awake.append(sleeper)
    return Replay(steps, blocked)


def _given_by_others(schedule: Schedule, known: Collection[int]) -> set[Result]:
    if len(known) == schedule.ranks:
        return set()
    return {
        (kind, stage, microbatch)
        for stage in range(schedule.stages)
        for microbatch in range(schedule.microbatches)
        if schedule.placement.rank(stage, microbatch) not in known
        for kind in ("F", "B", "SEND_F", "SEND_B", "POST_F", "POST_B")
    }


def check(schedule: Schedule, *, ranks: Collection[int] | None = None, rendezvous: bool = False) -> list[Problem]:
    """Everything that is wrong with a schedule; an empty list when it is legal.

    Legal: every stage runs each microbatch's forward once and its backward once (B, or I and W), on the
    rank that holds the stage, after what it needs; and no ranks wait for each other in a ring. Of a lowered
    schedule also: what another rank needs is sent and received, once, and each rank receives from each other
    in the order in which that one sends; sharded weights are gathered before they are computed with.

    ranks: judge the orders of these ranks only; the others are taken to do whatever anybody waits for.
    rendezvous: a send waits until the other rank has come to the receive. Otherwise it is buffered: it is
        over at once. Receives wait for their message in both.

    Raises:
        SettingError: it is not a schedule, `ranks` are not a collection, or one of them does not exist.
    """
    require_schedule("check", schedule)
    if ranks is None and not rendezvous:
        return list(schedule.problems)
    try:
        known = list(range(schedule.ranks) if ranks is None else ranks)
    except TypeError:
        raise SettingError(f"ranks are several, such as [0, 1]; got {ranks!r}") from None
    known = sorted({require_rank(rank, schedule.ranks) for rank in known})
    return list(find_problems(schedule, known, replay(schedule, known, rendezvous)))


def misplaced(schedule: Schedule) -> str | None:
    """Return a sentence that names the placement with which the same orders are legal, None if there is none."""
    ranks, placement = schedule.ranks, schedule.placement
    chunks, odd = divmod(schedule.stages, ranks)
    if not odd and any(problem.kind == "rank" for problem in schedule.problems):
        for name in ("loop", "v", *["bidirectional"] * (chunks == 1)):
            other = replace(schedule, placement=Placement.make(name, ranks, chunks, schedule.microbatches))
            if not other.problems:
                return (
                    f"{schedule!r} is not legal with the placement {placement.name!r}, but with {name!r} the same "
                    f"orders are; choose that placement (on the command line: --placement {name})"
                )
    return None


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
        maker = {result: single for single in placed for result in gives(single)}
        maker |= {_meets(single): single for single in placed if single.op in RECEIVE}
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
            for need in needs(action, schedule.placement, schedule.lowered):
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
    waits_for = {rank: placed[maker[missing]][0] for rank, (_, missing) in blocked.items() if missing in maker}
    seen: set[int] = set()
    for start in sorted(waits_for):
        path: list[int] = []
        rank = start
        while rank in waits_for and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for[rank]
        # A ring ends where it began; a rank that waits for itself is an "order" problem.
        ring = path[path.index(rank) :] if rank in path else []
        if len(ring) > 1:
            links = []
            for member in ring:
                index, missing = blocked[member]
                links.append(
                    f"rank {member} waits at position {index} ({schedule.orders[member][index]}) "
                    f"for {maker[missing]} of rank {waits_for[member]}"
                )
            index, _ = blocked[ring[0]]
            yield Problem(ring[0], index, schedule.orders[ring[0]][index], "deadlock", "deadlock: " + ", ".join(links))
