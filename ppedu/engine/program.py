"""One rank's part of a lowered schedule, with all that can be known about it before a step."""

from __future__ import annotations

import zlib
from functools import cache, cached_property
from typing import NamedTuple

from ppedu.core import COMMUNICATION, RECEIVE, SEND, Action, Op, Result, Schedule, produces, requires, strip
from ppedu.core.placement import other_end

AHEAD = 2  # computing actions, by which a receive is posted early where that is possible
FORWARD = {Op.F, Op.SEND_F, Op.RECV_F}


class Instruction(NamedTuple):
    """One action of a rank's order, with all that is known about it before a step.

    Args:
        ops: its own and its parts'.
        receives: the messages that a computing action waits for, as their RECV actions.
        ahead: the RECV actions that may be posted before a computing action, ahead of their places in the order.
        completes: the stages whose gradients are complete after it.
    """

    action: Action
    computes: bool
    ops: frozenset[Op]
    receives: tuple[Action, ...]
    ahead: tuple[Action, ...]
    completes: tuple[int, ...]


class Program:
    """A lowered schedule as one rank runs it.

    Args:
        ahead: receives may be posted this many computing actions before their places in the order.

    Attributes:
        schedule: its computing actions only.
        instructions: the rank's order.
        trained: the stages with backwards on the rank.
        fingerprint: equal on ranks with the same schedule.
        delivered: by RECV action, the sends of this rank that have arrived before it. Its sender had received them.
    """

    def __init__(self, lowered: Schedule, rank: int, ahead: int = AHEAD):
        self.schedule = strip(lowered)
        self.lowered, self.rank = lowered, rank
        self.fingerprint = zlib.crc32(lowered.to_csv().encode())
        self.placement = lowered.placement
        self.order = lowered.order(rank)
        self.longest = max(map(len, self.schedule.orders))  # computing actions of the busiest rank
        # As properties of an action alone, these are computed once, and not once a step.
        self.receives = cache(self._receives)
        self.source = cache(self._source)
        last: dict[int, int] = {}  # by stage, the position of its last backward or T
        for position, action in enumerate(self.order):
            for single in action.singles:
                if single.op in (Op.B, Op.W, Op.T):
                    last[single.stage] = position
        self.trained = frozenset(last)
        self.instructions = [
            Instruction(
                action,
                action.computes,
                frozenset(each.op for each in (action, *action.parts)),
                self.receives(action) if action.computes else (),
                self._receives_ahead(index, ahead) if action.computes else (),
                tuple(stage for stage, position in last.items() if position == index),
            )
            for index, action in enumerate(self.order)
        ]
        self.delivered = self._deliveries()

    def of(self, op: Op, stage: int) -> frozenset[int]:
        """Return the microbatches with an R, an O or an L in a stage."""
        return frozenset(m for s, m in self.lowered.words[op] if s == stage)

    @property
    def peers(self) -> set[int]:
        """The ranks to which this rank sends, or from which it receives."""
        pairs = (self.placement.route(each) for each in self.order if each.op in COMMUNICATION)
        return {rank for pair in pairs for rank in pair} - {self.rank}

    @cached_property
    def _cuts(self) -> list[int]:
        return _cuts(self.lowered)

    @property
    def cut(self) -> int:
        """This many instructions run before any rank's first backward, and depend on none.

        Say rank 0 begins with 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0, and rank 1 with 1RECV_F0 1F0 1B0 1RECV_F1. The cuts
        are 4 and 2, and `unread` on rank 1 is 1RECV_F1.
        """
        return self._cuts[self.rank]

    @cached_property
    def unread(self) -> list[Action]:
        """The RECV actions behind this rank's cut whose messages other ranks send before theirs, in that order."""
        early = set(self.order[: self.cut])
        found = []
        for order, cut in zip(self.lowered.orders, self._cuts, strict=True):
            for action in order[:cut]:
                if action.op in SEND and self.placement.route(action)[1] == self.rank:
                    receive = other_end(action)
                    if receive not in early:
                        found.append(receive)
        return found

    def around(self, index: int) -> str:
        """Return an action's neighbors in the order, such as "(in the order: … 1F1 1B0 [1F2] 1B1 1F3 …)"."""
        before, after = self.order[max(0, index - 2) : index], self.order[index + 1 : index + 3]
        shown = [*map(str, before), f"[{self.order[index]}]", *map(str, after)]
        start = "… " if index > 2 else ""
        end = " …" if index + 3 < len(self.order) else ""
        return f"(in the order: {start}{' '.join(shown)}{end})"

    def _deliveries(self) -> dict[Action, list[Action]]:
        """Return `delivered`, which the orders of the other ranks tell.

        If a peer runs 1RECV_F0, 1RECV_F1 and 1SEND_B0 in this order, then 0SEND_F0 and 0SEND_F1 of this rank have
        arrived by the time at which its 0RECV_B0 is complete.
        """
        found = {}
        for peer, order in enumerate(self.lowered.orders):
            if peer == self.rank:
                continue
            received: list[Action] = []  # by the peer, since it last sent to this rank
            for action in order:
                if action.op not in COMMUNICATION or self.rank not in self.placement.route(action):
                    continue
                if action.op in RECEIVE:
                    received.append(other_end(action))
                else:
                    found[other_end(action)] = received
                    received = []
        return found

    def _receives(self, action: Action) -> tuple[Action, ...]:
        wanted = requires(action, self.placement, lowered=True)
        return tuple(Action(stage, Op(kind), m) for kind, stage, m in wanted if kind in RECEIVE)

    def _source(self, action: Action) -> Result | None:
        """Return the result of another stage that an F, B or I starts from; None for the model's first F and last B."""
        for kind, stage, m in requires(action, self.placement, lowered=True):
            if stage != action.stage or kind not in ("F", "B", "R"):  # not its own forward, nor another slice here
                return kind, stage, m
        return None

    def _receives_ahead(self, index: int, ahead: int) -> tuple[Action, ...]:
        """Return the RECV actions after `index`, up to the `ahead`-th computing action from there."""
        found = []
        while ahead > 0 and index + 1 < len(self.order):
            index += 1
            action = self.order[index]
            if action.op in RECEIVE:
                found.append(action)
            elif action.computes:
                ahead -= 1
        return tuple(found)


def _cuts(lowered: Schedule) -> list[int]:
    """Return for each rank how many of its actions run before any rank's first backward, and depend on none."""
    known: set[Result] = set()  # of the actions before the cuts
    cuts = [0] * lowered.ranks
    moved = True
    while moved:  # until no rank can run another forward
        moved = False
        for rank, order in enumerate(lowered.orders):
            while cuts[rank] < len(order):
                action = order[cuts[rank]]
                forward = all(each.op in FORWARD for each in action.singles)
                if not forward or not known.issuperset(requires(action, lowered.placement, lowered=True)):
                    break
                known.update(produces(action))
                cuts[rank] += 1
                moved = True
    return cuts
