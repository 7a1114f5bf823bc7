"""Problems of a schedule, each described in one sentence. Internal; call `ppedu.core.checking.check`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from ppedu.core.actions import COMMUNICATION, COMPUTE, RECEIVE, SEND, SHARDING, SHARED, WAIT_OF, WAITS, Action, Op
from ppedu.core.dependencies import Replay, Result, awaited, posting, produces, requires, waited_for, why_slices_wait
from ppedu.core.errors import Problem
from ppedu.core.placement import FORWARDS, TOWARDS, other_end
from ppedu.core.waiting import cycles

if TYPE_CHECKING:
    from ppedu.core.schedule import Schedule

NO_SHARED = " is for a shared head, which schedules without backwards or with a stage on two ranks cannot have"
NO_UPDATE = " is an update, which schedules without backwards or with a stage on two ranks cannot have"
NO_BACKWARD = " is for a backward, in a forward-only schedule"
NO_COPY = " is a copy to or from the host, but the backward is on another rank than the forward, and runs it again"
MOST_PROBLEMS = 100_000  # more would take minutes to list and help no reader


def find_problems(schedule: Schedule, replayed: Replay) -> Iterator[Problem]:
    """Yield at most MOST_PROBLEMS problems of a schedule and its replay: first those of single actions."""
    return islice(_Inspection(schedule, replayed).problems(), MOST_PROBLEMS)


class _Inspection:
    """The search for problems.

    Most schedules are legal, and some are large, so the search works on numbers (see `Numbered`). Actions are looked
    up only to describe a problem. Batches are taken apart; `given` has them, and `at` an index in it.
    """

    def __init__(self, given: Schedule, replayed: Replay):
        schedule = given.one_by_one
        self.given, self.positions = given, [given.positions(rank) for rank in range(given.ranks)]
        self.schedule, self.placement, self.numbered = schedule, schedule.placement, schedule.numbered
        self.blocked = replayed.blocked
        self.seen = bytearray(self.numbered.total)  # by number: whether an order contains the action
        self.misplaced: set[tuple[int, int]] = set()  # the (rank, index) of each action that its rank must not run
        self.summed: set[tuple[int, int]] = set()  # each rank and stage that has a REDUCE_GRAD

    @cached_property
    def places(self) -> dict[Action, tuple[int, int]]:
        """The (rank, index) at which each action first occurs. The two parts of a pair are entered, not the pair."""
        places: dict[Action, tuple[int, int]] = {}
        for rank, order in enumerate(self.schedule.orders):
            for index, action in enumerate(order):
                for single in action.singles:
                    places.setdefault(single, (rank, index))
        return places

    @cached_property
    def producers(self) -> dict[Result, Action]:
        """The action that produces each result."""
        singles = sorted(self.places, key=lambda single: single.op in WAITS)  # a WAIT replaces its message
        producers = {result: single for single in singles for result in produces(single)}
        return producers | {posting(single): single for single in self.places if single.op in RECEIVE}

    def at(self, rank: int, index: int) -> int:
        """Return the position of an action, or of its batch, in the order that was given."""
        return self.positions[rank][index]

    def problems(self) -> Iterator[Problem]:
        for rank in range(self.schedule.ranks):
            yield from self._misplaced(rank)
            if self.given.waits and (some := waited_for(self.given.orders[rank])):
                yield from self._waits(rank, some)
            yield from self._sharding(rank)
        yield from self._missing()
        yield from self._restored()
        yield from self._updated()
        yield from self._never_summed()
        if self.placement.barriers:
            yield from self._shared()
        if self.schedule.lowered:
            yield from self._received_out_of_order()
        if self.blocked:
            yield from self._too_early()
            yield from self._deadlocks()

    def _problem(self, rank: int, index: int, kind: str, why: str, action: Action | None = None) -> Problem:
        """Return a problem of the action at an index, or of `action` if it is one of two parts.

        Args:
            why: The end of the message, after the action.
        """
        action, position = action or self.schedule.orders[rank][index], self.at(rank, index)
        return Problem(rank, position, action, kind, f"rank {rank}, position {position}: {action}{why}")

    def _misplaced(self, rank: int) -> Iterator[Problem]:
        """Yield actions that do not exist, belong to another rank, are needless, or are repeated."""
        blocks, size, seen = self.numbered.blocks, self.numbered.microbatches, self.seen
        order = self.numbered.orders[rank]
        met = [(kind * size, blocks[kind]) for kind in {entry // size for entry in order}]
        rows = [first + block.singles[0] for first, block in met if block.rank == rank and not block.sample.parts]
        whole = len({*order}) == len(order) == size * len(met) == size * len(rows)  # all actions of each block, once
        if whole and not any(seen.count(True, row, row + size) for row in rows):
            for row in rows:
                seen[row : row + size] = bytes([True]) * size
            return
        for index, entry in enumerate(order):
            block = blocks[entry // size]
            for part, distance in enumerate(block.singles):
                single = entry + distance
                # Sharding actions always come here, because their blocks have the rank -1; most turn out to be right.
                if block.rank != rank or seen[single]:
                    action = self.schedule.orders[rank][index].singles[part]
                    if action.op in WAITS and self.given.orders[rank][self.at(rank, index)].parts:
                        continue  # that of a batch, whose message is reported
                    for kind, why in self._why_misplaced(rank, action, bool(seen[single])):
                        if block.rank != rank:
                            self.misplaced.add((rank, index))
                        yield self._problem(rank, index, kind, why, action)
                seen[single] = True

    def _why_misplaced(self, rank: int, action: Action, again: bool) -> Iterator[tuple[str, str]]:
        """Yield the kind of problem that an action on `rank` has, and its message without the action, if it has one.

        Args:
            again: Whether the same action was already seen, on any rank.
        """
        placement, stages, microbatches = self.placement, self.schedule.stages, self.schedule.microbatches
        stage, op, microbatch, _ = awaited(action) if action.op in WAITS else action
        if not 0 <= stage < stages:
            yield "range", f": there is no stage {stage}; the stages are 0 to {stages - 1}"
        elif op in SHARDING:
            if stage not in placement.stages_of(rank):
                yield "rank", f": stage {stage} is held by rank {placement.rank(stage)}"
        elif not 0 <= microbatch < microbatches:
            known = f"they are 0 to {microbatches - 1}" if microbatches > 1 else "the only one is 0"
            yield "range", f": there is no microbatch {microbatch}; {known}"
        elif (holder := placement.rank(stage, microbatch, op)) != rank:
            part = ("" if op in FORWARDS else "the backward of ") * placement.apart(stage)
            yield "rank", f": {part}stage {stage} is held by rank {holder}"
        elif op in SHARED and stage not in placement.shards:
            shards = ", ".join(map(str, placement.shards))
            yield "range", f": a rank's part of a shared head goes by the rank's first stage; these are {shards}"
        elif op in COMMUNICATION and not 0 <= stage + TOWARDS[op] < stages:
            end = "last" if stage else "first"
            peer = "send to" if op in SEND else "receive from"
            yield "range", f": stage {stage} is the {end}; it has no stage to {peer}"
        elif op in COMMUNICATION and op not in placement.links[placement.copy(microbatch)][stage]:
            yield "message", f": rank {rank} itself holds stage {stage + TOWARDS[op]}; nothing has to be sent"
        elif again:
            first_rank, index = self.places[action]
            yield "duplicate", f" has already been run (rank {first_rank}, position {self.at(first_rank, index)})"

    def _waits(self, rank: int, some: frozenset[Action]) -> Iterator[Problem]:
        """Yield messages without a wait where others of their batch have one: nothing tells when they are done.

        Args:
            some: The messages for which the order has a WAIT.
        """
        for action in self.given.orders[rank]:
            if action.op is Op.BATCH_P2P and not some.isdisjoint(action.parts):
                for message in action.parts:
                    if message not in some:
                        wait = message._replace(op=WAIT_OF[message.op])
                        why = f"rank {rank}: {wait} is never run, and other messages of its batch have theirs"
                        yield Problem(rank, None, wait, "missing", why)

    def _sharding(self, rank: int) -> Iterator[Problem]:
        """Yield uses of sharded weights, and sharding actions that are needless or too early."""
        if SHARDING.isdisjoint(self.schedule._ops):
            return
        order, numbered = self.schedule.orders[rank], self.numbered
        blocks = [entry // numbered.microbatches for entry in numbered.orders[rank]]
        stages = {}  # by block: the stages that its actions compute with
        for block in set(blocks):
            singles = numbered.blocks[block].sample.singles
            stages[block] = [single.stage for single in singles if single.op in COMPUTE]
        last_use = {}  # by stage: the index of its last action
        for index, block in enumerate(blocks):
            for stage in stages[block]:
                last_use[stage] = index
        sharded_weights = any(action.op in (Op.UNSHARD, Op.RESHARD) for action in order)
        gathered = set() if sharded_weights else set(last_use)
        reduced: set[int] = set()
        for index, (action, block) in enumerate(zip(order, blocks, strict=True)):
            stage, op, why = action.stage, action.op, ""
            if op == Op.UNSHARD:
                if stage in gathered:
                    why = "is needless: the weights are gathered already"
                gathered.add(stage)
            elif op == Op.RESHARD:
                if stage not in gathered:
                    why = "is needless: the weights are sharded already"
                gathered.discard(stage)
            elif op == Op.REDUCE_GRAD:
                last = last_use.get(stage, -1)
                if last > index:
                    why = f"is too early: {order[last]} comes after it, at position {self.at(rank, last)}"
                elif stage in reduced:
                    why = "is needless: the gradients are summed already"
                reduced.add(stage)
                self.summed.add((rank, stage))
            elif not gathered.issuperset(stages[block]):
                first = next(stage for stage in stages[block] if stage not in gathered)
                why = f"computes with sharded weights; {first}UNSHARD must come first"
            if why:
                yield self._problem(rank, index, "sharding", f" {why}")

    def _never_summed(self) -> Iterator[Problem]:
        """Yield stages without a REDUCE_GRAD, unless no stage has one: then the engine sums them all."""
        if not self.summed or self.schedule.forward_only:
            return
        ends = (0, self.schedule.microbatches - 1)  # of two copies, each runs one of these
        for stage in range(self.schedule.stages):
            for rank in sorted({self.placement.rank(stage, microbatch, "B") for microbatch in ends}):
                if (rank, stage) not in self.summed:
                    why = f"rank {rank}: {stage}REDUCE_GRAD is never run, and other stages have theirs"
                    yield Problem(rank, None, Action(stage, Op.REDUCE_GRAD), "missing", why)

    def _missing(self) -> Iterator[Problem]:
        """Yield actions that are never run, backwards that are run both whole and in halves, and needless backwards."""
        split = self.numbered.split
        by_copy = range(split), range(split, self.schedule.microbatches)  # the second is empty if there is one copy
        for stage in range(self.schedule.stages):
            for copy, microbatches in enumerate(by_copy):
                if not microbatches:
                    continue
                others = self.placement.links[copy][stage] if self.schedule.lowered else ()
                if self.schedule.forward_only:
                    others = tuple(op for op in others if op in (Op.SEND_F, Op.RECV_F))
                elif self.placement.barriers and stage in self.placement.shards:
                    others = (*others, Op.S, Op.T)
                elif self.placement.apart(stage):
                    others = (Op.R, *others)
                if not self._is_complete(stage, microbatches, others):
                    for microbatch in microbatches:
                        yield from self._missing_of(stage, microbatch, others)

    def _is_complete(self, stage: int, microbatches: range, others: Collection[Op]) -> bool:
        """Return whether a stage runs F, B (or both halves) and the ops in `others` once for each microbatch."""
        every = len(microbatches)

        def count(op: str) -> int:
            start = self.numbered.number(op, stage, microbatches.start)
            return self.seen.count(True, start, start + every)  # a byte for each microbatch

        whole, halves, neither = (every, 0, 0), (0, every, every), (0, 0, 0)
        allowed = [neither] if self.schedule.forward_only else [whole, halves]
        return (count("B"), count("I"), count("W")) in allowed and all(count(op) == every for op in ("F", *others))

    def _missing_of(self, stage: int, microbatch: int, others: Collection[Op]) -> Iterator[Problem]:
        """Yield the missing or surplus actions of a microbatch in a stage."""

        def runs(op: str) -> bool:
            return bool(self.seen[self.numbered.number(op, stage, microbatch)])

        if self.schedule.forward_only:
            for op in (Op.B, Op.I, Op.W):
                if runs(op):
                    surplus = Action(stage, op, microbatch)
                    at, index = self.places[surplus]
                    yield self._problem(at, index, "range", " is a backward in a forward-only schedule", surplus)
        halves = [op for op in (Op.I, Op.W) if runs(op)]
        if halves and runs("B"):
            whole, half = Action(stage, Op.B, microbatch), Action(stage, halves[0], microbatch)
            at, index = self.places[whole]
            why = f" is a full backward, and half of it, {half}, is run too"
            yield self._problem(at, index, "duplicate", why, whole)
        backward: tuple[str, ...] = ("B",)
        if self.schedule.forward_only:
            backward = ()
        elif halves and not runs("B"):
            backward = ("I", "W")
        for required in ("F", *backward, *others):
            if not runs(required):
                rank, action = self.placement.rank(stage, microbatch, required), Action(stage, Op(required), microbatch)
                yield Problem(rank, None, action, "missing", f"rank {rank}: {action} is never run")

    def _restored(self) -> Iterator[Problem]:
        """Yield forwards that run again, and copies, for no backward, and an O or an L without the other one."""
        for op, other in {Op.R: Op.R, Op.O: Op.L, Op.L: Op.O}.items():
            for stage, microbatch in sorted(self.schedule.words[op]):
                action, wanted = Action(stage, op, microbatch), Action(stage, other, microbatch)
                rank, index = self.places[action]
                no_copy = NO_COPY if op is not Op.R and self.placement.apart(stage) else ""
                if why := NO_BACKWARD if self.schedule.forward_only else no_copy:
                    yield self._problem(rank, index, "range", why, action)
                elif wanted not in self.places:
                    yield Problem(rank, None, wanted, "missing", f"rank {rank}: {wanted} is never run, and {action} is")

    def _updated(self) -> Iterator[Problem]:
        """Yield updates before or after their gradients, and stages whose last gradients get no update."""
        updated, end = self.schedule.updated, self.schedule.microbatches
        unused = {stage: 0 for stage in range(self.schedule.stages) if updated}  # by stage: the first without an update
        for rank, index in sorted(self.places[Action(s, Op.U, m)] for s, m in updated if s in unused and 0 <= m < end):
            stage, _, microbatch, _ = self.schedule.orders[rank][index]
            if self.schedule.forward_only or not self.placement.alone:
                yield self._problem(rank, index, "range", NO_UPDATE)
            if microbatch < unused[stage]:
                yield self._problem(rank, index, "order", f" must come before {stage}U{unused[stage] - 1} or nowhere")
            for m in range(unused[stage], microbatch + 1):
                for late in (Action(stage, op, m) for op in (Op.B, Op.W)[m == microbatch :]):  # it requires its own B
                    if self.places.get(late, (rank, -1)) > (rank, index):
                        why = f" steps with the gradient of {late}, which only comes later; put it behind {late}"
                        yield self._problem(rank, index, "order", why)
            unused[stage] = max(microbatch + 1, unused[stage])
        for stage, m in unused.items():
            if m < end and not self.schedule.forward_only and self.placement.alone:
                rank, last = self.placement.rank(stage), Action(stage, Op.U, end - 1)
                why = f"rank {rank}: {last} is never run: no update uses the gradients from microbatch {m} on"
                yield Problem(rank, None, last, "missing", why)

    def _shared(self) -> Iterator[Problem]:
        """Yield S and T that no head can have, or whose sums over all ranks meet in another order than on rank 0."""
        sums = [Op.S, Op.T][: self.placement.barriers]  # the ops that end with a sum
        first: dict[tuple[Op, int], int] = {}  # by op and microbatch: the index on rank 0
        for rank, order in enumerate(self.schedule.orders):
            own: dict[tuple[Op, int], int] = {}
            for index, (_, op, microbatch, _) in enumerate(order):
                if op in SHARED and (self.schedule.forward_only or not self.placement.alone):
                    yield self._problem(rank, index, "range", NO_SHARED)
                elif op in sums and (rank, index) not in self.misplaced:
                    own.setdefault((op, microbatch), index)
            first = own if rank == 0 else first
            pairs = zip((each for each in own if each in first), (each for each in first if each in own), strict=True)
            for index, at in [(own[mine], first[other]) for mine, other in pairs if mine != other][:1]:
                why = f" would meet {self.schedule.orders[0][at]} of rank 0 (position {self.at(0, at)})"
                yield self._problem(rank, index, "message", f"{why}: all ranks come to their sums in the same order")

    def _received_out_of_order(self) -> Iterator[Problem]:
        """Yield receives that would get another message than they name: messages arrive in the order sent.

        If stage 0 sends 0SEND_F0 and then 0SEND_F1, and stage 1 receives 1RECV_F1 and then 1RECV_F0, both receives get
        the other one's message.
        """
        numbered, size = self.numbered, self.numbered.microbatches
        # For each (sender, receiver), the messages in the order in which each side runs them: a log of the sender, and
        # one of the receiver. Both name a message by the number of its SEND, so that they can be compared; the value is
        # the index of the SEND or RECV in its order. If rank 0 runs 0SEND_F0 (number a) at 1 and 0SEND_F1 (b) at 3, and
        # rank 1 runs 1RECV_F1 at 0 and 1RECV_F0 at 2, then sent[0, 1] is {a: 1, b: 3}, and received[0, 1] {b: 0, a: 2}.
        sent: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        received: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        # By block of messages: its log, and the distance from an entry to the number of the SEND.
        log_of_block: dict[int, tuple[dict[int, int], int]] = {}
        for number, block in enumerate(numbered.blocks):
            if block.sample.op in COMMUNICATION and block.rank >= 0:
                is_send = block.sample.op in SEND
                log = (sent if is_send else received)[self.placement.route(block.sample)]
                stage, op, microbatch, _ = block.sample if is_send else other_end(block.sample)
                distance = numbered.number(op, stage, microbatch) - (number * size + block.sample.microbatch)
                log_of_block[number] = log, distance
        for rank, order in enumerate(numbered.orders):
            for index, entry in enumerate(order):
                if entry // size in log_of_block and (rank, index) not in self.misplaced:
                    log, distance = log_of_block[entry // size]
                    log.setdefault(entry + distance, index)  # repeated messages count once
        for (source, rank), receives in received.items():
            sends = sent[source, rank]
            # Messages that only one side has are reported as missing.
            wanted = [message for message in receives if message in sends]
            arriving = [message for message in sends if message in receives]
            for count, (expected, got) in enumerate(zip(wanted, arriving, strict=True), 1):
                if expected != got:
                    why = (
                        f" would get what {numbered.action(got)} sends: messages arrive in the order sent, and that "
                        f"one is message {count} from rank {source} (position {self.at(source, sends[got])})"
                    )
                    receive = other_end(numbered.action(expected))
                    yield self._problem(rank, receives[expected], "message", why, receive)

    def _too_early(self) -> Iterator[Problem]:
        """Yield actions that come before one of their dependencies on the same rank."""
        for rank, order in enumerate(self.schedule.orders):
            for index, action in enumerate(order):
                for result in requires(action, self.placement, self.schedule.lowered, self.schedule.restored):
                    producer = self.producers.get(result)
                    source, at = self.places[producer] if producer else (-1, -1)
                    if source == rank and at >= index:
                        where = f"only comes at position {self.at(rank, at)}" if at > index else "runs at the same time"
                        why = why_slices_wait(action, result)
                        yield self._problem(rank, index, "order", f" needs {producer}, which {where}{why}")

    def _deadlocks(self) -> Iterator[Problem]:
        """Yield cycles of ranks in which each waits for the next."""
        producers: dict[int, Action] = {}  # by waiting rank: the action for whose result it waits
        waits_for: dict[int, list[int]] = {}
        for rank, (_, missing) in sorted(self.blocked.items()):
            if missing in self.producers:
                producers[rank] = self.producers[missing]
                peer, _ = self.places[producers[rank]]
                waits_for[rank] = [peer]
        for cycle in (each for each in cycles(waits_for) if len(each) > 1):  # a cycle of one is an "order" problem
            places = tuple((member, self.at(member, self.blocked[member][0])) for member in cycle)
            waits = [
                f"rank {member} waits at position {index} ({self.given.orders[member][index]}) "
                f"for {producers[member]} of rank {peer}"
                for (member, index), peer in zip(places, cycle[1:] + cycle[:1], strict=True)
            ]
            action = self.given.orders[places[0][0]][places[0][1]]
            yield Problem(*places[0], action, "deadlock", "deadlock: " + ", ".join(waits), places)
