"""Messages that occupy their links: each communication stream carries one at a time, in the order they are posted.

A rank posts a message when it reaches the SEND or RECV in its order, and continues at once. It has one stream for each
peer ("pair": `isend` and `irecv`, with one communicator for each pair of ranks), or one for all of them ("rank":
`batch_isend_irecv` with one communicator), or for each peer one in each direction ("direction": two communicators, as
Megatron-LM has on two ranks). A message starts once both ranks have posted it and it is the first in both
streams, or in the same batch as the first. So a receive that is posted early blocks what is posted after it.

A message occupies both of its streams for its transfer time; its latency later, it has arrived. The messages of a batch
travel side by side, and the stream carries on when the last of them has been transferred. The order of each
stream is known from the schedule, so times and deadlocks do not depend on which message the replay starts first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from ppedu.core.actions import COMMUNICATION, COPIES, SEND, WAITS, Action
from ppedu.core.dependencies import awaited
from ppedu.core.errors import Problem, SettingError
from ppedu.core.placement import other_end
from ppedu.core.schedule import Schedule
from ppedu.core.validate import require_one_of
from ppedu.core.waiting import cycles

STREAMED = ("direction", "pair", "rank")
Stream = tuple[int, ...]  # the rank that it belongs to, and its peer, and whether it sends, if that matters


def stream_of(transport: str, rank: int, peer: int, sends: bool) -> Stream:
    """Return the stream in which a rank posts a message that it sends to a peer, or receives from it."""
    if transport == "rank":
        return (rank,)
    return (rank, peer) if transport == "pair" else (rank, peer, sends)


def require_streamed(schedule: Schedule, transport: str) -> None:
    """Raise SettingError unless `transport` is one of `STREAMED` and results for other ranks have messages."""
    require_one_of("transport", transport, STREAMED)
    if schedule.placement.barriers:
        raise SettingError(
            f"transport={transport!r} is for messages between two; all ranks share a head in {schedule!r}"
        )
    if not schedule.lowered and any(any(block.links) for block in schedule.numbered.blocks):
        raise SettingError(
            f"transport={transport!r} needs messages, and {schedule.name} is not lowered; take lower(schedule)"
        )


def _no_time(sender: int, receiver: int) -> int:
    return 0


class Streams:
    """A replay of a legal lowered schedule whose messages occupy their links. A message is named by its SEND.

    Args:
        durations: The time of each action that is not a message, by its entry in `Numbered.orders`. Without times, the
            replay still finds what gets stuck.
        transfer: The time for which a message from one rank to another occupies its streams.
        delay: The time from the start of a message to its arrival.

    Attributes:
        starts, ends: `starts[rank][index]` is when an action of `Schedule.one_by_one` starts; a SEND and its RECV start
            with the transfer.
        stuck: The problems of the ranks that wait for each other: none if every rank gets through its order.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: str,
        durations: Sequence[Any] | None = None,
        transfer: Callable[[int, int], Any] = _no_time,
        delay: Callable[[int, int], Any] = _no_time,
    ):
        self.given, self._positions = schedule, [schedule.positions(rank) for rank in range(schedule.ranks)]
        self.schedule, self.transport, self.numbered = schedule.one_by_one, transport, schedule.numbered
        self._durations, self._transfer, self._delay = durations, transfer, delay
        self.starts: list[list[Any]] = [[0] * len(order) for order in self.schedule.orders]
        self.ends: list[list[Any]] = [[0] * len(order) for order in self.schedule.orders]
        self._reached = [0] * schedule.ranks  # the index of each rank's next action
        self._free: list[Any] = [0] * schedule.ranks  # the time from which a rank is free
        self._copied: list[Any] = [0] * schedule.ranks  # and its copy engine
        self._exists: list[Any] = [None] * self.numbered.total  # by number: the time from which a result exists
        self._routes: dict[Action, tuple[int, int]] = {}  # by message, its sender and its receiver
        self._streams: dict[Action, tuple[Stream, Stream]] = {}  # and their streams that carry it
        self._posted: defaultdict[Action, dict[int, int]] = defaultdict(dict)  # by message and rank, the index
        self._ready: defaultdict[Action, Any] = defaultdict(int)  # when the later of its ranks has posted a message
        # By stream, the messages that have not started, those of a batch together; the time from which the stream can
        # carry the first of these; and that from which it carries nothing.
        self._queues: defaultdict[Stream, deque[dict[Action, None]]] = defaultdict(deque)
        self._idle: defaultdict[Stream, Any] = defaultdict(int)
        self._busy: defaultdict[Stream, Any] = defaultdict(int)
        # By block, the distances to the results that an action waits for, or to the message that a WAIT does.
        self._wanted = [block.requires for block in self.numbered.blocks]
        for number, block in enumerate(self.numbered.blocks):
            if block.sample.op in WAITS:
                entry = number * self.numbered.microbatches + block.sample.microbatch
                stage, op, microbatch, _ = awaited(block.sample)
                self._wanted[number] = (self.numbered.number(op, stage, microbatch) - entry,)
        # A message that starts wakes its receiver, and where ranks wait for sends, its sender, the first of its route.
        self._woken = 0 if self.schedule.waits else 1
        awake = deque(range(schedule.ranks))
        while awake:
            awake.extend(self._advance(awake.popleft()))
        self.stuck = tuple(self._deadlocks())

    def _advance(self, rank: int) -> Iterator[int]:
        """Let a rank continue until it waits for a message. Yield the receivers of the messages that start."""
        order, size = self.numbered.orders[rank], self.numbered.microbatches
        while self._reached[rank] < len(order):
            index = self._reached[rank]
            entry = order[index]
            block = self.numbered.blocks[entry // size]
            if block.sample.op in COMMUNICATION:
                together = self._together(rank, index)
                yield from self._post(rank, together)
                self._reached[rank] += len(together)
            else:
                arrivals = [self._exists[entry + distance] for distance in self._wanted[entry // size]]
                if None in arrivals:
                    return
                copies = block.sample.op in COPIES
                start = max([self._free[rank], *arrivals, *self._copied[rank : rank + copies]])
                end = start + (self._durations[entry] if self._durations else 0)
                self.starts[rank][index], self.ends[rank][index] = start, end
                (self._copied if copies else self._free)[rank] = end
                for distance in block.produces:
                    self._exists[entry + distance] = end
                self._reached[rank] += 1

    def _together(self, rank: int, index: int) -> range:
        """Return the indexes of the messages that a rank posts with one: those of its batch, or itself alone."""
        if self.given is self.schedule:
            return range(index, index + 1)
        given = self.given.orders[rank][self._positions[rank][index]]
        return range(index, index + max(1, len(given.parts)))

    def _post(self, rank: int, indexes: range) -> Iterator[int]:
        """Append messages to streams of one of their ranks. Yield the ranks of those that start."""
        groups: dict[Stream, dict[Action, None]] = {}
        candidates = []  # a message that starts lets the next ones in its two streams start
        for index in indexes:
            action = self.schedule.orders[rank][index]
            message = action if action.op in SEND else other_end(action)
            if message not in self._routes:
                sender, receiver = route = self.schedule.placement.route(message)
                streams = (
                    stream_of(self.transport, sender, receiver, True),
                    stream_of(self.transport, receiver, sender, False),
                )
                self._routes[message], self._streams[message] = route, streams
            self._posted[message][rank] = index
            self._ready[message] = max(self._ready[message], self._free[rank])
            stream = self._stream(message, rank)
            if stream not in groups:
                groups[stream] = {}
                self._queues[stream].append(groups[stream])
            groups[stream][message] = None
            candidates.append(message)
        while candidates:
            candidate = candidates.pop()
            streams = self._streams[candidate]
            queues = [self._queues[stream] for stream in streams]
            # It is among the first in both of its streams, so both of its ranks have posted it.
            if all(queue and candidate in queue[0] for queue in queues):
                self._start(candidate)
                for stream, queue in zip(streams, queues, strict=True):
                    del queue[0][candidate]
                    if not queue[0]:
                        queue.popleft()
                        self._idle[stream] = self._busy[stream]
                        candidates += queue[0] if queue else ()
                yield from self._routes[candidate][self._woken :]

    def _start(self, message: Action) -> None:
        """Enter the times of a message that both ranks have posted and no other message blocks."""
        route, streams = self._routes[message], self._streams[message]
        start = max([self._ready[message], *(self._idle[stream] for stream in streams)])
        end = start + self._transfer(*route)
        for rank, index in self._posted[message].items():
            self.starts[rank][index], self.ends[rank][index] = start, end
        for stream in streams:
            self._busy[stream] = max(self._busy[stream], end)
        for action, time in ((message, end), (other_end(message), start + self._delay(*route))):
            self._exists[self.numbered.number(action.op, action.stage, action.microbatch)] = time

    def _stream(self, message: Action, rank: int) -> Stream:
        """Return the stream of one of a message's two ranks that carries it."""
        return self._streams[message][rank != self._routes[message][0]]

    # --- deadlocks ------------------------------------------------------------------------------------------------

    def _deadlocks(self) -> Iterator[Problem]:
        """Yield the cycles of ranks and messages in which each waits for the next."""
        waits_for: dict[int | Action, list[int | Action]] = {}
        for rank, order in enumerate(self.schedule.orders):
            if self._reached[rank] < len(order):
                waits_for[rank] = [self._awaited(rank)]
        for message in chain.from_iterable(chain(*self._queues.values())):
            waits_for[message] = [self._obstacle(message)]
        for cycle in cycles(waits_for):
            waits = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
            told = [self._wait(waiter, awaited) for waiter, awaited in waits]
            sentences = "; ".join(sentence for _, _, sentence in told)
            places = tuple((rank, index) for rank, index, _ in told)
            # Preferably, the problem is a message that blocks another one.
            blocking = [pair for pair in waits if all(isinstance(each, Action) for each in pair)]
            waiter, awaited = blocking[0] if blocking else waits[0]
            rank, index, _ = self._wait(waiter, awaited)
            action = self.given.orders[rank][index]
            yield Problem(rank, index, action, "deadlock", f"deadlock: {sentences}", places)

    def _awaited(self, rank: int) -> Action:
        """Return the message that a rank waits for."""
        entry = self.numbered.orders[rank][self._reached[rank]]
        wanted = [entry + distance for distance in self._wanted[entry // self.numbered.microbatches]]
        message = self.numbered.action(next(number for number in wanted if self._exists[number] is None))
        return message if message.op in SEND else other_end(message)

    def _obstacle(self, message: Action) -> int | Action:
        """Return the rank that has not posted a message, or else the message that blocks it in a stream."""
        for rank in self._routes[message]:
            if rank not in self._posted[message]:
                return rank
        firsts = (self._queues[stream][0] for stream in self._streams[message])
        return next(next(iter(first)) for first in firsts if message not in first)

    def _wait(self, waiter: int | Action, awaited: int | Action) -> tuple[int, int, str]:
        """Return a sentence about what waits for what, with the rank and the position of an action in it.

        Args:
            waiter: A rank, or a message.
            awaited: A message; or, of a message, the rank that has not posted it.
        """
        orders = self.given.orders
        if isinstance(waiter, int):
            assert isinstance(awaited, Action)
            position, (sender, _) = self._positions[waiter][self._reached[waiter]], self._routes[awaited]
            waits = f"rank {waiter} waits at position {position} ({orders[waiter][position]})"
            if sender == waiter:
                return waiter, position, f"{waits} until {awaited} is received"
            return waiter, position, f"{waits} for {awaited} of rank {sender}"
        sender, receiver = self._routes[waiter]
        if isinstance(awaited, int):
            rank, does = (sender, "receive") if awaited == receiver else (receiver, "send")
            position, told = self._position(waiter, rank)
            return rank, position, f"{told} waits for rank {awaited} to {does}"
        # The awaited message is first in a stream of the waiter's; the action that posted it is to blame.
        rank = next(rank for rank in (sender, receiver) if waiter not in self._queues[self._stream(waiter, rank)][0])
        position, told = self._position(awaited, rank)
        blocked = orders[rank][self._position(waiter, rank)[0]]
        return rank, position, f"{told} blocks {blocked}, which was posted after it"

    def _position(self, message: Action, rank: int) -> tuple[int, str]:
        """Return the position at which a rank posted a message, and what it does there: "rank 1's send 1SEND_B0"."""
        position = self._positions[rank][self._posted[message][rank]]
        action = self.given.orders[rank][position]
        kind = "batch" if action.parts else "send" if rank == self._routes[message][0] else "receive"
        return position, f"rank {rank}'s {kind} {action}"
