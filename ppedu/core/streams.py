"""Messages that occupy their links: each communication stream carries one at a time, in the order they are posted.

A rank posts a message when it reaches the SEND or RECV in its order, and continues at once. It has one stream for each
peer ("pair": `isend` and `irecv`, with one communicator for each pair of ranks) or one for all of them ("rank":
`batch_isend_irecv` of one message each). A message starts once both ranks have posted it and it is the first in both
streams. So a receive that is posted early blocks what is posted after it.

The order of each stream is known from the schedule. So what gets stuck does not depend on times; `ppedu.sim.links` adds
them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from ppedu.core.actions import COMMUNICATION, SEND, Action, Op
from ppedu.core.errors import SettingError
from ppedu.core.placement import TOWARDS
from ppedu.core.problems import Problem
from ppedu.core.schedule import Schedule
from ppedu.core.waiting import cycles

Stream = tuple[int, int]  # of a rank, and to a peer; the rank itself if its stream serves all peers


def stream_of(links: str, rank: int, peer: int) -> Stream:
    """Return the stream in which a rank posts its messages to and from a peer."""
    return rank, peer if links == "pair" else rank


def require_links(schedule: Schedule, links: str) -> None:
    """Raise SettingError unless `links` is "pair" or "rank", and results that go to other ranks have messages."""
    if not isinstance(links, str) or links not in ("pair", "rank"):
        raise SettingError(f'links must be "pair" or "rank"; got {links!r}')
    if not schedule.lowered and any(any(block.links) for block in schedule.numbered.blocks):
        raise SettingError(
            f"links={links!r} is for schedules with messages, and {schedule.name} is not lowered; take lower(schedule)"
        )


class Ran(NamedTuple):
    """A rank has run the action at an index of its order, other than a message."""

    rank: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here


class Posted(NamedTuple):
    """A rank has posted a message: the SEND or the RECV at an index of its order."""

    message: int
    rank: int
    index: int  # type: ignore[assignment]


class Started(NamedTuple):
    """A message has started."""

    message: int


class Streams:
    """A replay of a legal lowered schedule. A message is the number of its SEND; see `Numbered`.

    events: What happens, each event after those that it waits for.
    routes: By message, its sender and its receiver.
    posted: By message and rank, the index of its SEND or RECV.
    """

    def __init__(self, schedule: Schedule, links: str):
        self.schedule, self.links, self.numbered = schedule, links, schedule.numbered
        self.events: list[Ran | Posted | Started] = []
        self.routes: dict[int, tuple[int, int]] = {}
        self.posted: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._reached = [0] * schedule.ranks  # the index of each rank's next action
        self._exists = bytearray(self.numbered.total)  # by number: whether a result exists
        self._queues: defaultdict[Stream, deque[int]] = defaultdict(deque)  # the messages that have not started
        awake = deque(range(schedule.ranks))
        while awake:
            awake.extend(self._advance(awake.popleft()))

    def _advance(self, rank: int) -> Iterator[int]:
        """Let a rank continue until it waits for a message. Yield the receivers of the messages that start."""
        numbered, size = self.numbered, self.numbered.microbatches
        order = numbered.orders[rank]
        while self._reached[rank] < len(order):
            index, entry = self._reached[rank], order[self._reached[rank]]
            block = numbered.blocks[entry // size]
            if block.sample.op in COMMUNICATION:
                sends = block.sample.op in SEND
                message = entry + (block.singles if sends else block.requires)[0]
                self.routes[message] = self.schedule.placement.route(block.sample)
                yield from self._post(message, rank, index)
            else:
                if not all(self._exists[entry + distance] for distance in block.requires):
                    return
                self.events.append(Ran(rank, index))
                for distance in block.produces:
                    self._exists[entry + distance] = True
            self._reached[rank] += 1

    def _post(self, message: int, rank: int, index: int) -> Iterator[int]:
        """Append a message to the stream of one of its ranks. Yield the receivers of the messages that start."""
        self.events.append(Posted(message, rank, index))
        self.posted[message][rank] = index
        self._queues[self._stream(message, rank)].append(message)
        first = [message]
        while first:
            message = first.pop()
            queues = [self._queues[stream] for stream in self.streams(message)]
            if all(queue and queue[0] == message for queue in queues):
                self.events.append(Started(message))
                self._exists[self.other_end(message)] = True
                for queue in queues:
                    queue.popleft()
                yield self.routes[message][1]
                first += [queue[0] for queue in queues if queue]

    def streams(self, message: int) -> list[Stream]:
        """Return the two streams that carry a message: the sender's and the receiver's."""
        return [self._stream(message, rank) for rank in self.routes[message]]

    def _stream(self, message: int, rank: int) -> Stream:
        """Return the stream of one of a message's two ranks that carries it."""
        sender, receiver = self.routes[message]
        return stream_of(self.links, rank, sender + receiver - rank)

    def other_end(self, number: int) -> int:
        """Return the number of the RECV of a SEND, or of the SEND of a RECV."""
        kind, stage, microbatch = self.numbered.result(number)
        other = kind.replace("SEND", "RECV") if "SEND" in kind else kind.replace("RECV", "SEND")
        return self.numbered.number(other, stage + TOWARDS[Op(kind)], microbatch)

    # --- deadlocks ------------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """Yield the cycles of ranks and messages in which each waits for the next. A rank is the number -1 - rank."""
        waits_for: dict[int, list[int]] = {}
        for rank, order in enumerate(self.schedule.orders):
            if self._reached[rank] < len(order):
                waits_for[-1 - rank] = [self._awaited(rank)]
        for message in chain(*self._queues.values()):
            waits_for[message] = [self._obstacle(message)]
        for cycle in cycles(waits_for):
            yield self._problem(cycle)

    def _awaited(self, rank: int) -> int:
        """Return the message that a rank waits for."""
        entry = self.numbered.orders[rank][self._reached[rank]]
        requires = self.numbered.blocks[entry // self.numbered.microbatches].requires
        return self.other_end(next(entry + each for each in requires if not self._exists[entry + each]))

    def _obstacle(self, message: int) -> int:
        """Return the rank that has not posted a message, or else the message that blocks it in a stream."""
        for rank in self.routes[message]:
            if rank not in self.posted[message]:
                return -1 - rank
        firsts = (self._queues[self._stream(message, rank)][0] for rank in self.routes[message])
        return next(first for first in firsts if first != message)

    def _problem(self, cycle: list[int]) -> Problem:
        """Return the problem of a cycle. Its sentence begins with a message that blocks another one, if any does."""
        waits = list(zip([cycle[-1], *cycle], cycle, [*cycle[1:], cycle[0]], strict=False))
        first = next((index for index, (before, each, _) in enumerate(waits) if min(before, each) >= 0), 0)
        waits = waits[first:] + waits[:first]
        before, each, _ = waits[0]
        rank = -1 - each if each < 0 else self._side(before, each)
        index = self._reached[rank] if each < 0 else self.posted[each][rank]
        clauses = "; ".join(filter(None, (self._clause(*three) for three in waits)))
        return Problem(rank, index, self.schedule.orders[rank][index], "deadlock", f"deadlock: {clauses}")

    def _clause(self, before: int, each: int, after: int) -> str:
        """Return what a rank or a message in a cycle waits for, which is `after`, and what it blocks: `before`."""
        if each < 0:
            rank = -1 - each
            index, sender = self._reached[rank], self.routes[after][0]
            waiting, sends = self.schedule.orders[rank][index], self._text(after, sender)
            return f"rank {rank} waits at position {index} ({waiting}) for {sends} of rank {sender}"
        rank = self._side(before, each)
        kind, does = ("send", "receive") if rank == self.routes[each][0] else ("receive", "send")
        text = self._text(each, rank)
        waits = f"rank {rank}'s {kind} {text} waits for rank {-1 - after} to {does}" if after < 0 else ""
        blocks = f"blocks {self._text(before, rank)}, which was posted after it" if before >= 0 else ""
        if waits and blocks:
            return f"{waits}, and {blocks}"
        return waits or (blocks and f"rank {rank}'s {kind} {text} {blocks}")

    def _side(self, before: int, message: int) -> int:
        """Return the rank in whose stream a message blocks the message `before`; if none, a rank that has posted it."""
        ranks = list(self.posted[message])
        for rank in ranks if before >= 0 else ():
            if rank in self.posted[before] and self._queues[self._stream(before, rank)][0] == message:
                return rank
        return ranks[0]

    def _text(self, message: int, rank: int) -> str:
        """Return the SEND or the RECV of a message, whichever is the rank's."""
        number = message if rank == self.routes[message][0] else self.other_end(message)
        kind, stage, microbatch = self.numbered.result(number)
        return str(Action(stage, Op(kind), microbatch))
