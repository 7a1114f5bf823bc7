"""Dependencies: the results that actions require and produce, and a global order in which every rank can progress.

Checking, lowering, simulating and running all follow `requires` and `produces`, so that they cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppedu.core.actions import COMMUNICATION, COMPUTE, COPIES, RECEIVE, SEND, SHARDING, SHARED, WAITS, Action, Op
from ppedu.core.placement import TOWARDS, Placement, other_end

# The result of an action: its kind, stage and microbatch.
# ("F", 2, 0): the activation that stage 2 computed for microbatch 0.
# ("B", 2, 0): the gradient of stage 2's input, computed by a full backward or by its first half, I.
# ("SEND_F", 2, 0), ("RECV_F", 3, 0): that activation has been sent, and has arrived at stage 3's rank.
# ("POST_F", 3, 0): stage 3's rank has posted the receive. Likewise SEND_R, RECV_R and POST_R for the input of an R.
#
# A message may have a WAIT in its order. Then the SEND or RECV only posts it, and the rank goes on; the WAIT ends when
# the message is done. A SEND without one ends when it is done, and a RECV when its message has arrived.
#
# ("R", 2, 0), ("O", 2, 0), ("L", 2, 0): the activations have been computed again, are on the host, are back from there.
Result = tuple[str, int, int]
AFTER = {"W": "B", "U": "B", "O": "F", "L": "O"}  # what requires one result alone, of its own stage and microbatch


def requires(
    action: Action, placement: Placement, lowered: bool = False, restored: Collection[Result] = ()
) -> tuple[Result, ...]:
    """Return the results that an action waits for.

    A forward requires the activation of the stage before; a backward its own forward and the gradient of the stage
    after; a weight backward its own input backward; a forward that runs again its first run; an update the
    last backward that it steps with; an overlapped pair what its parts require. In a lowered schedule a result of
    another rank must have been received, and before that sent. A wait requires its message to be posted.
    A copy to the host requires its forward, and the copy back the one to the host. Activations that are not kept until
    their backward are `restored`: it requires the results of R and L that are among these, and an R that of L.
    The forward of a slice also requires that of the slice before, to whose keys and values it attends; its backward
    that of the slice after, which adds to the gradients of these.
    A backward on another rank than its forward requires the R there instead, and that R the stage's input, which the
    rank of the forward sends once that is done.
    If all ranks share the head, S requires the last stage's forward, T all S, and the last stage's backward all S or T.
    """
    stage, op, microbatch, parts = action
    if parts:
        first, second = parts
        return requires(first, placement, lowered, restored) + requires(second, placement, lowered, restored)
    if op == "F":
        own: tuple[Result, ...] = (("F", stage, microbatch - 1),) if microbatch % placement.slices else ()
        if not 0 < stage < placement.stages:  # the first stage, or one that does not exist
            return own
        if lowered and "RECV_F" in placement.links[placement.copy(microbatch)][stage]:
            return (*own, ("RECV_F", stage, microbatch))
        return (*own, ("F", stage - 1, microbatch))
    if op in ("B", "I"):
        if placement.backwards and 0 <= stage < placement.stages and placement.apart(stage):
            own = (("R", stage, microbatch),)
        else:
            own = (("F", stage, microbatch), *_restored("RL", stage, microbatch, restored))
        if (microbatch + 1) % placement.slices:
            own = (*own, ("B", stage, microbatch + 1))
        if placement.barriers and stage == placement.stages - 1:
            return (*own, *(("ST"[placement.barriers - 1], shard, microbatch) for shard in placement.shards))
        if not 0 <= stage < placement.stages - 1:  # the last stage, or one that does not exist
            return own
        if lowered and "RECV_B" in placement.links[placement.copy(microbatch)][stage]:
            return (*own, ("RECV_B", stage, microbatch))
        return (*own, ("B", stage + 1, microbatch))
    if op in AFTER:
        return ((AFTER[op], stage, microbatch),)
    if op == "R":
        if lowered and 0 <= stage < placement.stages and placement.apart(stage):
            return (("RECV_R", stage, microbatch),)
        return (("F", stage, microbatch), *_restored("L", stage, microbatch, restored))
    if op == "S":
        return (("F", placement.stages - 1, microbatch),)
    if op == "T":
        return tuple(("S", shard, microbatch) for shard in placement.shards)
    if op in SEND:
        return (("F" if op == "SEND_R" else op[-1], stage, microbatch),)
    if op in RECEIVE:
        return ((f"SEND_{op[-1]}", stage + TOWARDS[op], microbatch),)
    if op in WAITS:
        message = awaited(action)
        if message.op in SEND:
            return ((message.op.value, stage, microbatch),)
        return (posting(message), *requires(message, placement))
    return ()


def _restored(kinds: str, stage: int, microbatch: int, restored: Collection[Result]) -> Iterator[Result]:
    """Yield the results of these kinds that are among the restored ones."""
    if restored:
        yield from (result for kind in kinds if (result := (kind, stage, microbatch)) in restored)


def why_slices_wait(action: Action, result: Result) -> str:
    """Return why an action requires a result, if it is that of another slice of the same sequence."""
    for stage, op, microbatch, _ in action.singles:
        if op == Op.F and result == ("F", stage, microbatch - 1):
            return ": a slice attends to those before it"
        if op in (Op.B, Op.I) and result == ("B", stage, microbatch + 1):
            return ": later slices add to the gradients of earlier ones"
    return ""


def produces(action: Action) -> tuple[Result, ...]:
    """Return the results that exist once an action has ended."""
    stage, op, microbatch, parts = action
    if parts:
        first, second = parts
        return produces(first) + produces(second)
    if op in ("F", "R", "O", "L", "S", "T"):
        return ((op.value, stage, microbatch),)
    if op in ("B", "I"):
        return (("B", stage, microbatch),)
    if op in COMMUNICATION or WAITS.get(op) in RECEIVE:
        return ((WAITS.get(op, op).value, stage, microbatch),)
    return ()


def awaited(wait: Action) -> Action:
    """Return the message that a WAIT waits for: 2RECV_F0 for 2WAIT_RECV_F0."""
    return Action(wait.stage, WAITS[wait.op], wait.microbatch)


def posting(receive: Action) -> Result:
    """Return the result that a receive produces by being posted. Waits, and sends that are not buffered, need it."""
    return f"POST_{receive.op[-1]}", receive.stage, receive.microbatch


# The kinds of results, and the other actions, in the order of their numbers.
MESSAGES = "SEND_F", "RECV_F", "SEND_B", "RECV_B", "SEND_R", "RECV_R"
KINDS = (*"FBIWROLUST", *MESSAGES, "POST_F", "POST_B", "POST_R", *WAITS)
NOTHING = Action(0, Op.UNSHARD)  # takes no time and has no results
NEVER: Result = ("NEVER", -1, -1)  # required by actions that do not exist


class Numbered:
    """A schedule's orders as whole numbers, so that flat lists replace dictionaries of results, which are slow.

    A *number* stands for a result or a single action. Those of one kind and stage are in a row: with 2 stages and 8
    microbatches, ("F", 0, 0), ("F", 0, 1), … are 0 to 7, those of stage 1 are 8 to 15, and ("B", 0, 0), … are 16 to 23.
    A single action has the number whose kind is its op: 1F3 has 11, like the result ("F", 1, 3), which it produces.

    An *entry* stands for an action in the orders, also for a pair, which has no number. It is the action's block times
    the number of microbatches, plus its microbatch. A block is all actions that differ in their microbatch alone, and
    blocks are counted in the order in which they are met. If 1F0, 1F1, … are block 5, 1F3 has the entry 5 · 8 + 3.

    An action's results and inputs are equally far from its entry for all actions of a block, so a block holds
    distances. 1F3 (entry 43) produces the result 11: distance -32. It requires the result 3, ("F", 0, 3): distance -40.

    Attributes:
        orders: `orders[rank]` is the list of the entries of that rank's actions.
        blocks: `blocks[entry // microbatches]` is the block of an action.
        never: The number of every result and action that does not exist. No action produces it.
        total: The length of a list that is indexed by number.
        split: The first microbatch of the second copy of the model; `microbatches` if there is one copy.
        lowered, waits: Whether the orders include messages, and waits for them.
        restored: The results of R and L in the orders. The actions of their microbatches have blocks of their own.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        placement: Placement,
        microbatches: int,
        lowered: bool,
        waits: bool = False,
        restored: frozenset[Result] = frozenset(),
    ):
        self.restored = restored
        self.placement, self.microbatches, self.lowered, self.waits = placement, microbatches, lowered, waits
        kinds = len(KINDS) - (0 if waits else len(WAITS))  # those of waits are the last
        self.never = kinds * placement.stages * microbatches
        self.total = self.never + 1
        self.split = min(placement.split, microbatches) if placement.copies > 1 else microbatches
        self.blocks: list[ActionBlock] = []
        self._indexes: dict[Hashable, int] = {}  # of the blocks
        self.orders = [self._simple(order) or [*self._entries(order)] for order in orders]

    def number(self, kind: str, stage: int, microbatch: int) -> int:
        """Return the number of a result or of a single action; `never` if it does not exist."""
        if kind in KINDS and 0 <= stage < self.placement.stages and 0 <= microbatch < self.microbatches:
            return (KINDS.index(kind) * self.placement.stages + stage) * self.microbatches + microbatch
        return self.never

    def result(self, number: int) -> Result:
        """Return the result that has this number."""
        if number == self.never:
            return NEVER
        row, microbatch = divmod(number, self.microbatches)
        kind, stage = divmod(row, self.placement.stages)
        return KINDS[kind], stage, microbatch

    def action(self, number: int) -> Action:
        """Return the single action that has this number."""
        kind, stage, microbatch = self.result(number)
        return Action(stage, Op(kind), microbatch)

    def _simple(self, order: Sequence[Action]) -> list[int]:
        """Return the entries of an order as `_entries` does, but faster; none where keys are more than stage and op."""
        if not order or self.waits or self.restored or self.placement.slices > 1 or self.placement.copies > 1:
            return []
        stages, ops, microbatches, parts = zip(*order, strict=True)
        exist = {*stages} <= {*range(self.placement.stages)} and {*microbatches} <= {*range(self.microbatches)}
        if any(parts) or not exist:
            return []
        first = {  # by op and stage; some of these blocks may stay empty
            op: {stage: next(self._entries([Action(stage, op, 0)])) for stage in dict.fromkeys(stages)}
            for op in dict.fromkeys(ops)
        }
        return [first[op][stage] + m for stage, op, m in zip(stages, ops, microbatches, strict=True)]

    def _entries(self, order: Sequence[Action]) -> Iterator[int]:
        """Yield the entry of each action of an order."""
        indexes, split, microbatches, stages = self._indexes, self.split, self.microbatches, self.placement.stages
        last = self.placement.slices - 1
        waits, restored = waited_for(order) if self.waits else frozenset(), self.restored
        key: Hashable  # equal for the actions of a block
        for action in order:
            stage, op, microbatch, parts = action
            if parts:
                # Pairs share a block if their first parts do, their second parts do, and both are equally many
                # microbatches apart. The entry of a pair has the microbatch of its first part.
                first_entry, second_entry = self._entries(parts)
                first_block, microbatch = divmod(first_entry, microbatches)
                second_block, second_microbatch = divmod(second_entry, microbatches)
                key = first_block, second_block, second_microbatch - microbatch
            elif 0 <= microbatch < microbatches and 0 <= stage < stages:
                key = stage, op, microbatch >= split
                if last:  # the first slice of a microbatch and its last one require less than the others
                    place = microbatch % (last + 1)
                    key = (*key, place == 0, place == last)
                if waits and action in waits:  # a message that is only posted
                    key = (*key, "posted")
                if restored:
                    key = (*key, ("R", stage, microbatch) in restored, ("L", stage, microbatch) in restored)
            else:  # sharding, or an action that does not exist
                key, microbatch = action, 0
            if key not in indexes:
                indexes[key] = len(self.blocks)
                entry = indexes[key] * microbatches + microbatch
                self.blocks.append(self._block(action, entry, action in waits))
            yield indexes[key] * microbatches + microbatch

    def _block(self, action: Action, entry: int, posted: bool) -> ActionBlock:
        """Return the block of an action with this entry.

        Args:
            posted: Whether a wait for this message is in the order.
        """
        placement = self.placement

        def distances(results: Iterable[Result]) -> tuple[int, ...]:
            return tuple(self.number(*result) - entry for result in results)

        singles = distances((op, stage, microbatch) for stage, op, microbatch, _ in action.singles)
        if action.op in SHARDING:
            return ActionBlock(NOTHING, -1, singles)
        never = self.never - entry
        if never in singles:  # the action does not exist, and no rank gets past it
            return ActionBlock(NOTHING, -1, singles, (never,), (None,))
        holders = {placement.rank(single.stage, single.microbatch, single.op) for single in action.singles}
        runner = min(holders)  # the only one, unless the stages of a pair are on two ranks
        needless = any(  # a message between two stages of one rank, or beyond the first or last stage, or no shard
            stage not in placement.shards
            if op in SHARED
            else op not in COMPUTE | COPIES
            and WAITS.get(op, op) not in placement.links[placement.copy(microbatch)][stage]
            for stage, op, microbatch, _ in action.singles
        )
        wanted, results = requires(action, placement, self.lowered, self.restored), produces(action)
        enters: tuple[Result, ...] = ()  # results that exist once a rank has reached it
        meets: tuple[Result, ...] = ()  # what it also requires where sends wait for their receives
        message = awaited(action) if action.op in WAITS else action
        if action.op in RECEIVE:
            enters = (posting(action),)
            if posted:
                wanted, results = (), enters
        elif message.op in SEND and not posted and not needless:
            meets = (posting(other_end(message)),)
        inputs = [each for each in wanted if self.number(*each) != self.never]
        sources = [placement.rank(stage, microbatch, kind) for kind, stage, microbatch in inputs]
        return ActionBlock(
            sample=action,
            rank=-1 if needless or len(holders) > 1 else runner,
            singles=singles,
            requires=distances(inputs),
            links=tuple(None if source in holders else (source, runner) for source in sources),
            produces=distances(results),
            enters=distances(enters),
            meets=distances(meets),
        )


class ActionBlock(NamedTuple):
    """The actions of a schedule that differ only in their microbatch, such as 1F0, 1F1, …

    Attributes:
        sample: One of these actions; `NOTHING` for sharding and for actions that do not exist.
        rank: The rank that must run them; -1 if no rank must.
        singles: The distances from an action's entry to its own number, or to those of the two parts of a pair.
        requires, produces: The distances from an action's entry to the results that it requires and produces.
        links: For each of `requires`, the rank that produces the result and the rank that runs the action; None if
            they are the same.
        enters: The distances to the results that exist as soon as a rank has reached it.
        meets: The distances to what an action also requires where sends wait for their receives.
    """

    sample: Action
    rank: int
    singles: tuple[int, ...]
    requires: tuple[int, ...] = ()
    links: tuple[tuple[int, int] | None, ...] = ()
    produces: tuple[int, ...] = ()
    enters: tuple[int, ...] = ()
    meets: tuple[int, ...] = ()


def waited_for(order: Iterable[Action]) -> frozenset[Action]:
    """Return the messages for which an order has a WAIT."""
    return frozenset(awaited(action) for action in order if action.op in WAITS)


@dataclass(frozen=True)
class Replay:
    """A global order in which every rank runs as many of its actions as it can.

    Attributes:
        turns: The ranks in the order in which they run their next action.
        entries: These actions, as entries of `Numbered`.
        blocked: For each rank that cannot finish, the index at which it waits and a missing result that it waits for.
    """

    turns: list[int]
    entries: list[int]
    blocked: dict[int, tuple[int, Result]]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The rank of each turn and the index of the action that it runs."""
        reached: defaultdict[int, int] = defaultdict(int)  # by rank, the index of its next action
        steps = []
        for rank in self.turns:
            steps.append((rank, reached[rank]))
            reached[rank] += 1
        return steps


def replay(numbered: Numbered, rendezvous: bool = False) -> Replay:
    """Let the ranks take turns, one action each, and return the order in which the actions ran.

    A rank whose next action lacks a result pauses until another rank produces it. A rank that pauses forever is
    reported in `Replay.blocked`.

    Args:
        rendezvous: A send, or the wait for it, ends when its peer has reached the receive. A receive waits for its
            message either way.
    """
    orders, size = numbered.orders, numbered.microbatches
    # By block: what an action requires, what exists once it has run, and what exists once its rank is at it.
    rules: list[tuple[tuple[int, ...], ...]] = [(block.requires, block.produces, ()) for block in numbered.blocks]
    if rendezvous:
        rules = [(each.requires + each.meets, each.enters + each.produces, each.enters) for each in numbered.blocks]
    exists = bytearray(numbered.total)  # by number: whether a result exists
    turns: list[int] = []
    entries: list[int] = []
    waiting: dict[int, list[int]] = {}  # from a missing result to the ranks that wait for it
    blocked: dict[int, int] = {}  # from a waiting rank to the missing result
    later = [*map(iter, orders)]
    coming = [next(order, -1) for order in later]  # by rank: the entry of its next action, or -1
    awake = [rank for rank, entry in enumerate(coming) if entry >= 0]  # grows, and the loop goes on until its end
    for rank in awake:
        entry = coming[rank]
        needs, results, early = rules[entry // size]
        for distance in needs:
            if not exists[entry + distance]:
                blocked[rank] = entry + distance
                waiting.setdefault(entry + distance, []).append(rank)
                results = early  # the rank is here, so its receive is posted
                break
        else:  # nothing is missing, so the action runs
            turns.append(rank)
            entries.append(entry)
            coming[rank] = following = next(later[rank], -1)
            if following >= 0:
                awake.append(rank)
        for distance in results:
            number = entry + distance
            exists[number] = True
            if number in waiting:
                for sleeper in waiting.pop(number):
                    del blocked[sleeper]
                    awake.append(sleeper)
    stuck = {rank: (turns.count(rank), numbered.result(missing)) for rank, missing in blocked.items()}
    return Replay(turns, entries, stuck)
