"""Messages that occupy their links: each communication stream carries one at a time, in the order they are posted.

A rank posts a message when it reaches the SEND or RECV in its order, and continues at once. It has one stream for each
peer ("pair": `isend` and `irecv`, with one communicator for each pair of ranks) or one for all of them ("rank":
`batch_isend_irecv` of one message each). A message starts once both ranks have posted it and it is the first in both
streams. It occupies both for the transfer time; its latency later, it has arrived. So a receive that is posted early
blocks what is posted after it.

The order of each stream is known from the schedule, so the times do not depend on which message starts first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from ppedu.core.actions import COMMUNICATION, SEND, Action, Op
from ppedu.core.clock import Clock
from ppedu.core.costs import Costs
from ppedu.core.errors import ScheduleError, SettingError
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


def occupied(schedule: Schedule, clock: Clock, links: str) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return when the actions of each rank start and end, in ticks. For a SEND or a RECV that is the transfer.

    Raises:
        ScheduleError: The schedule is not legal, or its ranks would wait for each other.
        SettingError: The schedule is not lowered.
    """
    require_links(schedule, links)
    schedule.validate()
    run = _Run(schedule, clock, links)
    if stuck := tuple(run.problems()):
        lines = "".join(f"\n  {problem}" for problem in stuck[:5])
        raise ScheduleError(f"{schedule!r} gets stuck with links={links!r}:{lines}", stuck)
    return run.starts, run.ends


def stuck(schedule: Schedule, links: str) -> list[Problem]:
    """Return the deadlocks of a legal lowered schedule whose messages occupy their links."""
    return list(_Run(schedule, Clock.of(schedule, Costs()), links).problems())


class _End(NamedTuple):
    """A SEND or a RECV that a rank has posted, and when."""

    rank: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    time: Any


class _Run:
    """A replay of a legal lowered schedule. A message is the number of its SEND; see `Numbered`."""

    def __init__(self, schedule: Schedule, clock: Clock, links: str):
        self.schedule, self.clock, self.links, self.numbered = schedule, clock, links, schedule.numbered
        self._transfer, self._delay = cache(clock.occupies), cache(clock.delay)  # there are few links
        self.starts: list[list[Any]] = [[0] * len(order) for order in schedule.orders]
        self.ends: list[list[Any]] = [[0] * len(order) for order in schedule.orders]
        self.reached = [0] * schedule.ranks  # the index of each rank's next action
        self.free: list[Any] = [0] * schedule.ranks
        self.exists: list[Any] = [None] * self.numbered.total  # by number: the time from which a result exists
        self.routes: dict[int, tuple[int, int]] = {}  # by message: the sender and the receiver
        self.posted: defaultdict[int, dict[int, _End]] = defaultdict(dict)  # by message and rank
        self.queues: defaultdict[Stream, deque[int]] = defaultdict(deque)  # the messages that have not started
        self.idle: defaultdict[Stream, Any] = defaultdict(int)  # the time from which a stream carries no message
        awake = deque(range(schedule.ranks))
        while awake:
            awake.extend(self._advance(awake.popleft()))

    def _advance(self, rank: int) -> Iterator[int]:
        """Let a rank continue until it waits for a message. Yield the receivers of the messages that start."""
        schedule, numbered, size = self.schedule, self.numbered, self.numbered.microbatches
        order = numbered.orders[rank]
        while self.reached[rank] < len(order):
            index, entry = self.reached[rank], order[self.reached[rank]]
            block = numbered.blocks[entry // size]
            if block.sample.op in COMMUNICATION:
                sends = block.sample.op in SEND
                message = entry + (block.singles if sends else block.requires)[0]
                self.routes[message] = schedule.placement.route(block.sample)
                yield from self._post(message, _End(rank, index, self.free[rank]))
            else:
                times = [self.exists[entry + distance] for distance in block.requires]
                if None in times:
                    return
                start = max([self.free[rank], *times])
                end = self.free[rank] = start + self.clock.duration(schedule.orders[rank][index])
                self.starts[rank][index], self.ends[rank][index] = start, end
                for distance in block.produces:
                    self.exists[entry + distance] = end
            self.reached[rank] += 1

    def _post(self, message: int, end: _End) -> Iterator[int]:
        """Append a message to the stream of one of its ranks. Yield the receivers of the messages that start."""
        self.posted[message][end.rank] = end
        self.queues[self._stream(message, end.rank)].append(message)
        first = [message]
        while first:
            message = first.pop()
            streams = [self._stream(message, rank) for rank in self.routes[message]]
            if all(self.queues[stream] and self.queues[stream][0] == message for stream in streams):
                self._start(message, streams)
                yield self.routes[message][1]
                first += [self.queues[stream][0] for stream in streams if self.queues[stream]]

    def _start(self, message: int, streams: list[Stream]) -> None:
        """Let a message start that is the first in both of its streams."""
        ends, route = self.posted[message].values(), self.routes[message]
        start = max([*(end.time for end in ends), *(self.idle[stream] for stream in streams)])
        over = start + self._transfer(*route)
        for rank, index, _ in ends:
            self.starts[rank][index], self.ends[rank][index] = start, over
        for stream in streams:
            self.queues[stream].popleft()
            self.idle[stream] = over
        self.exists[self._other_end(message)] = start + self._delay(*route)

    def _stream(self, message: int, rank: int) -> Stream:
        """Return the stream of one of a message's two ranks that carries it."""
        sender, receiver = self.routes[message]
        return stream_of(self.links, rank, sender + receiver - rank)

    def _other_end(self, number: int) -> int:
        """Return the number of the RECV of a SEND, or of the SEND of a RECV."""
        kind, stage, microbatch = self.numbered.result(number)
        other = kind.replace("SEND", "RECV") if "SEND" in kind else kind.replace("RECV", "SEND")
        return self.numbered.number(other, stage + TOWARDS[Op(kind)], microbatch)

    # --- deadlocks ------------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """Yield the cycles of ranks and messages in which each waits for the next. A rank is the number -1 - rank."""
        waits_for: dict[int, list[int]] = {}
        for rank, order in enumerate(self.schedule.orders):
            if self.reached[rank] < len(order):
                waits_for[-1 - rank] = [self._awaited(rank)]
        for message in chain(*self.queues.values()):
            waits_for[message] = [self._obstacle(message)]
        for cycle in cycles(waits_for):
            yield self._problem(cycle)

    def _awaited(self, rank: int) -> int:
        """Return the message that a rank waits for."""
        entry = self.numbered.orders[rank][self.reached[rank]]
        requires = self.numbered.blocks[entry // self.numbered.microbatches].requires
        return self._other_end(next(entry + each for each in requires if self.exists[entry + each] is None))

    def _obstacle(self, message: int) -> int:
        """Return the rank that has not posted a message, or else the message that blocks it in a stream."""
        for rank in self.routes[message]:
            if rank not in self.posted[message]:
                return -1 - rank
        firsts = (self.queues[self._stream(message, rank)][0] for rank in self.routes[message])
        return next(first for first in firsts if first != message)

    def _problem(self, cycle: list[int]) -> Problem:
        """Return the problem of a cycle. Its sentence begins with a message that blocks another one, if any does."""
        waits = list(zip([cycle[-1], *cycle], cycle, [*cycle[1:], cycle[0]], strict=False))
        first = next((index for index, (before, each, _) in enumerate(waits) if min(before, each) >= 0), 0)
        waits = waits[first:] + waits[:first]
        before, each, _ = waits[0]
        rank = -1 - each if each < 0 else self._side(before, each)
        index = self.reached[rank] if each < 0 else self.posted[each][rank].index
        clauses = "; ".join(filter(None, (self._clause(*three) for three in waits)))
        return Problem(rank, index, self.schedule.orders[rank][index], "deadlock", f"deadlock: {clauses}")

    def _clause(self, before: int, each: int, after: int) -> str:
        """Return what a rank or a message in a cycle waits for, which is `after`, and what it blocks: `before`."""
        if each < 0:
            rank = -1 - each
            index, sender = self.reached[rank], self.routes[after][0]
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
            if rank in self.posted[before] and self.queues[self._stream(before, rank)][0] == message:
                return rank
        return ranks[0]

    def _text(self, message: int, rank: int) -> str:
        """Return the SEND or the RECV of a message, whichever is the rank's."""
        number = message if rank == self.routes[message][0] else self._other_end(message)
        kind, stage, microbatch = self.numbered.result(number)
        return str(Action(stage, Op(kind), microbatch))
