"""Dependencies: the results that actions require and produce, and a global order in which every rank can progress.

Checking, lowering, simulating and running all follow `requires` and `produces`, so that they cannot disagree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppedu.core.actions import COMMUNICATION, RECEIVE, SEND, SHARDING, Action, Op
from ppedu.core.placement import TOWARDS, Placement

# The result of an action: its kind, stage and microbatch.
# ("F", 2, 0): the activation that stage 2 computed for microbatch 0.
# ("B", 2, 0): the gradient of stage 2's input, computed by a full backward or by its first half, I.
# ("SEND_F", 2, 0), ("RECV_F", 3, 0): that activation has been sent, and has arrived at stage 3's rank.
# ("POST_F", 3, 0): stage 3's rank has posted the receive.
Result = tuple[str, int, int]


def requires(action: Action, placement: Placement, lowered: bool = False) -> tuple[Result, ...]:
    """Return the results that an action waits for.

    A forward requires the activation of the stage before; a backward its own forward and the gradient of the stage
    after; a weight backward its own input backward; an overlapped pair what its parts require. In a lowered schedule
    a result of another rank must have been received, and before that sent.
    """
    stage, op, microbatch, parts = action
    if parts:
        first, second = parts
        return requires(first, placement, lowered) + requires(second, placement, lowered)
    if op == "F":
        if not 0 < stage < placement.stages:  # the first stage, or one that does not exist
            return ()
        if lowered and "RECV_F" in placement.links[placement.copy(microbatch)][stage]:
            return (("RECV_F", stage, microbatch),)
        return (("F", stage - 1, microbatch),)
    if op in ("B", "I"):
        own = ("F", stage, microbatch)
        if not 0 <= stage < placement.stages - 1:  # the last stage, or one that does not exist
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
    """Return the results that exist once an action has ended."""
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


def posting(receive: Action) -> Result:
    """Return the result that a receive produces by being posted. Only sends that are not buffered wait for it."""
    return f"POST_{receive.op[-1]}", receive.stage, receive.microbatch


# The kinds of numbered actions. All but I and W are kinds of results, too.
COMPUTED = ("F", "B", "I", "W")
KINDS = (*COMPUTED, "SEND_F", "RECV_F", "SEND_B", "RECV_B")


class Block(NamedTuple):
    """The actions that differ only in their microbatch: one op in one stage of one copy of the model.

    sample: One of these actions.
    rank: The rank that must run them; -1 if no rank must.
    parts, requires, produces: The distances from the number of an action to the numbers of its parts, of the results
        it requires, and of the results it produces.
    remote: For each entry of `requires`, whether another rank produces that result.
    """

    sample: Action
    rank: int = -1
    parts: tuple[int, ...] = (0,)
    requires: tuple[int, ...] = ()
    remote: tuple[bool, ...] = ()
    produces: tuple[int, ...] = ()


NOTHING = Action(0, Op.UNSHARD)  # takes no time and has no results


class Numbered:
    """A schedule's orders with a number for each action, so that flat lists can replace dictionaries of actions.

    The number of an action is `block * microbatches + microbatch`. Everything but the microbatch is a property of the
    block. A result has the number of the action that produces it, of B if both B and I do. An overlapped pair has its
    own number.

    blocks: `blocks[number // microbatches]` is the block of an action.
    orders: `orders[rank]` is the list of the numbers of that rank's actions.
    sharding: The number of all sharding actions, which require and produce nothing.
    nonexistent: The number of all actions with a stage or a microbatch that does not exist. It requires itself, so no
        rank gets past such an action.
    total: The upper bound of the numbers.
    """

    def __init__(self, orders: Sequence[Sequence[Action]], placement: Placement, microbatches: int, lowered: bool):
        self.placement, self.microbatches, self.lowered = placement, microbatches, lowered
        copies, stages = range(placement.copies), range(placement.stages)
        kinds = KINDS if lowered else COMPUTED
        first_of = [copy * min(placement.split, microbatches - 1) for copy in copies]  # a microbatch of each copy
        self.blocks = [
            self._block(Action(stage, Op(kind), first_of[copy]))
            for kind in kinds
            for copy in copies
            for stage in stages
        ]
        self.sharding, self.nonexistent = len(self.blocks) * microbatches, (len(self.blocks) + 1) * microbatches
        self.blocks += [Block(NOTHING), Block(NOTHING, requires=(0,), remote=(False,))]
        self._starts = [
            {kind: [self.number(kind, stage, first_of[copy]) - first_of[copy] for stage in stages] for kind in kinds}
            for copy in copies
        ]
        self._pairs: dict[tuple[int, int, int], int] = {}
        self.orders = [self._numbers(order) for order in orders]
        self.total = len(self.blocks) * microbatches

    def number(self, kind: str, stage: int, microbatch: int) -> int:
        """Return the number of a result, or of an action that is not a pair. Its stage and microbatch must exist."""
        placement = self.placement
        row = KINDS.index(kind) * placement.copies + placement.copy(microbatch)
        return (row * placement.stages + stage) * self.microbatches + microbatch

    def result(self, number: int) -> Result:
        """Return the result that has this number."""
        block, microbatch = divmod(number, self.microbatches)
        return self.blocks[block].sample.op.value, self.blocks[block].sample.stage, microbatch

    def _block(self, sample: Action) -> Block:
        stage, op, microbatch, _ = sample
        placement = self.placement
        rank = placement.rank(stage, microbatch)
        needed = op in COMPUTED or op in placement.links[placement.copy(microbatch)][stage]
        own = self.number(op, stage, microbatch)
        inputs = [each for each in requires(sample, placement, self.lowered) if 0 <= each[1] < placement.stages]
        return Block(
            sample,
            rank if needed else -1,
            requires=tuple(self.number(*result) - own for result in inputs),
            remote=tuple(placement.rank(stage, microbatch) != rank for _, stage, _ in inputs),
            produces=tuple(self.number(*result) - own for result in produces(sample)),
        )

    def _numbers(self, order: Iterable[Action]) -> list[int]:
        """Return the number of each action."""
        starts, microbatches, stages = self._starts, self.microbatches, self.placement.stages
        second_copy_from = self.placement.split if len(starts) > 1 else microbatches
        numbers = []
        for action in order:
            stage, op, microbatch, parts = action
            if parts:
                numbers.append(self._pair(action))
            elif 0 <= microbatch < microbatches and 0 <= stage < stages:
                numbers.append(starts[microbatch >= second_copy_from][op][stage] + microbatch)
            else:
                numbers.append(self.sharding if op in SHARDING else self.nonexistent)
        return numbers

    def _pair(self, action: Action) -> int:
        """Return the number of an overlapped pair.

        Two pairs belong to the same block if their first parts do, their second parts do, and the microbatches of the
        parts are equally far apart.
        """
        numbers = first, second = self._numbers(action.parts)
        block, microbatch = divmod(first, self.microbatches)
        key = block, second // self.microbatches, second - first
        own = self._pairs.setdefault(key, len(self.blocks)) * self.microbatches + microbatch
        if self._pairs[key] == len(self.blocks):
            parts = [(number - own, self.blocks[number // self.microbatches]) for number in numbers]
            self.blocks.append(
                Block(
                    NOTHING if self.nonexistent in numbers else action,
                    parts=tuple(distance for distance, _ in parts),
                    requires=tuple(distance + each for distance, part in parts for each in part.requires),
                    remote=tuple(each for _, part in parts for each in part.remote),
                    produces=tuple(distance + each for distance, part in parts for each in part.produces),
                )
            )
        return own


@dataclass(frozen=True)
class Replay:
    """A global order in which every rank runs as many of its actions as it can.

    turns: The ranks in the order in which they run their next action.
    blocked: For each rank that cannot finish, the index at which it waits and a missing result that it waits for.
    """

    turns: list[int]
    blocked: dict[int, tuple[int, Result]]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The rank of each turn and the index of the action that it runs."""
        done: dict[int, int] = {}
        steps = []
        for rank in self.turns:
            index = done.get(rank, 0)
            steps.append((rank, index))
            done[rank] = index + 1
        return steps


def replay(numbered: Numbered, known: Collection[int] | None = None, rendezvous: bool = False) -> Replay:
    """Let the ranks take turns, one action each, and return the order in which the actions ran.

    A rank whose next action lacks a result pauses until another rank produces it. A rank that pauses forever is
    reported in `Replay.blocked`.

    known: The ranks to replay, by default all. The other ranks are assumed to have produced everything.
    rendezvous: A send waits until its peer has reached the receive. A receive waits for its message either way.
    """
    orders, blocks, size = numbered.orders, numbered.blocks, numbered.microbatches
    required = [block.requires for block in blocks]
    produced = [block.produces for block in blocks]
    posted: list[tuple[int, ...]] = [()] * len(blocks)  # results that exist once the rank reaches the action
    if rendezvous:  # a posted receive has the number of the receive plus `total`
        for index, block in enumerate(blocks):
            stage, op, microbatch, _ = block.sample
            if op in RECEIVE:
                posted[index] = (numbered.total,)
            elif op in SEND and block.rank >= 0:
                receive = numbered.number(f"RECV_{op[-1]}", stage + TOWARDS[op], microbatch)
                required[index] += (numbered.total + receive - numbered.number(op, stage, microbatch),)
    ranks = range(len(orders)) if known is None else known
    exists = _produced_elsewhere(numbered, ranks)
    turns: list[int] = []
    waiting: dict[int, list[int]] = {}  # from a missing result to the ranks that wait for it
    blocked: dict[int, int] = {}  # from a waiting rank to the missing result
    position = [0] * len(orders)
    awake = deque(rank for rank in ranks if orders[rank])
    while awake:
        rank = awake.popleft()
        number = orders[rank][position[rank]]
        block_index = number // size
        fresh = posted[block_index]
        for distance in required[block_index]:
            if not exists[number + distance]:
                blocked[rank] = number + distance
                waiting.setdefault(number + distance, []).append(rank)
                break
        else:
            turns.append(rank)
            fresh += produced[block_index]
            position[rank] += 1
            if position[rank] < len(orders[rank]):
                awake.append(rank)
        for distance in fresh:
            exists[number + distance] = True
            if number + distance in waiting:
                for sleeper in waiting.pop(number + distance):
                    del blocked[sleeper]
                    awake.append(sleeper)
    return Replay(turns, {rank: (position[rank], _missing(numbered, result)) for rank, result in blocked.items()})


def _produced_elsewhere(numbered: Numbered, known: Collection[int]) -> bytearray:
    """Return for each number whether its result exists from the start, because a rank that is not known produces it."""
    size, total = numbered.microbatches, numbered.total
    exists = bytearray(2 * total)
    if len(known) < numbered.placement.ranks:
        for index, block in enumerate(numbered.blocks[: numbered.sharding // size]):
            stage, op, microbatch, _ = block.sample
            if numbered.placement.rank(stage, microbatch) not in known:
                start = index * size + (total if op in RECEIVE else 0)
                exists[start : start + size] = bytes([True]) * size
    return exists


def _missing(numbered: Numbered, number: int) -> Result:
    """Return the result, or the posted receive, that has this number."""
    if number < numbered.total:
        return numbered.result(number)
    kind, stage, microbatch = numbered.result(number - numbered.total)
    return posting(Action(stage, Op(kind), microbatch))
