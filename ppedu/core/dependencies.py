"""What an action requires and produces, and a global order in which every rank can make progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppedu.core.actions import COMMUNICATION, RECEIVE, SEND, Action
from ppedu.core.placement import TOWARDS, Placement

if TYPE_CHECKING:
    from ppedu.core.schedule import Schedule


# What an action leaves behind for others. ("F", 2, 0): the activation that stage 2 made of microbatch 0.
# ("B", 2, 0): the gradient of stage 2's input, whether a full backward made it or its first half, I.
# ("SEND_F", 2, 0), ("RECV_F", 3, 0): that activation is on its way, and has come to stage 3's rank.
# ("POST_F", 3, 0): stage 3's rank is ready to receive it.
Result = tuple[str, int, int]

# `orders[rank][index]` runs; it has waited for some results and gives some: (rank, index, waited for, given).
Step = tuple[int, int, tuple[Result, ...], tuple[Result, ...]]


@dataclass(frozen=True)
class Replay:
    """All the steps that can be taken, each after those it needs. `blocked[rank]` is (index, what is missing)."""

    steps: list[Step]
    blocked: dict[int, tuple[int, Result]]


def requires(action: Action, placement: Placement, lowered: bool = False) -> tuple[Result, ...]:
    """The results that an action waits for.

    A forward needs the activation of the stage before; a backward its own forward and the gradient of the
    stage after; a weight backward its own input backward; an overlapped pair what both of its parts need.
    In a lowered schedule a result of another rank must have been received, and before that sent.
    """
    stage, op, microbatch, parts = action
    if parts:
        first, second = parts
        return requires(first, placement, lowered) + requires(second, placement, lowered)
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


def produces(action: Action) -> tuple[Result, ...]:
    """The results that are there once an action has ended."""
    stage, op, microbatch, parts = action
    if parts:
        first, second = parts
        return produces(first) + produces(second)
    if op == "F":
        return (("F", stage, microbatch),)
    if op in ("B", "I"):
        return (("B", stage, microbatch),)
    if op in COMMUNICATION:
        return ((op.value, stage, microbatch),)
    return ()


def posts(action: Action) -> Result:
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
        wanted, given = requires(action, placement, lowered), produces(action)
        fresh: tuple[Result, ...] = ()
        if rendezvous and action.op in SEND:
            wanted += (posts(action),)
        elif rendezvous and action.op in RECEIVE:
            fresh = (posts(action),)
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
