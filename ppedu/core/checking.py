"""Whether a schedule is legal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import NamedTuple

from ppedu.core.actions import SEND, WAIT_OF, WAITS, Action
from ppedu.core.dependencies import awaited, replay, waited_for
from ppedu.core.errors import Problem, SettingError
from ppedu.core.problems import MOST_PROBLEMS, find_problems
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.streams import STREAMED, Streams, require_streamed
from ppedu.core.validate import require_count, require_one_of

# How messages block their ranks and each other.
TRANSPORTS = ("buffered", "rendezvous", "any", *STREAMED)


def check(schedule: Schedule, *, transport: str = "buffered", buffers: int | None = None) -> list[Problem]:
    """Return everything that is wrong with a schedule: an empty list if it is legal.

    In a legal schedule every stage runs each microbatch's forward once and its backward once (B, or I and W), on the
    rank that holds the stage and after its dependencies, and no ranks wait for each other in a cycle. A forward-only
    schedule has no backwards. In a legal lowered schedule, also, every result that another rank requires is sent and
    received once, messages between two ranks are received in the order sent, a rank that waits for some messages of a
    batch waits for all of it, and sharded weights are gathered before they are used.

    Args:
        transport: "buffered": a send ends at once. "rendezvous": a send, or the wait for it, ends when its peer has
            reached the receive. A receive waits for its message either way. "any": the transport may buffer a send or
            not, as MPI and NCCL may, by its size; if that matters, there is a problem of the kind "unknown".
            "direction", "pair", "rank": messages are carried one by one, or batch by batch, in the order in which a
            rank reaches them, as in `Costs`: by two streams for each peer, one for each direction, by one for each
            peer, or by one for all. The schedule must be lowered, and legal where each RECV waits for its message,
            unless the order has a WAIT for it.
        buffers: The number of buffers of each stage, where memory is allocated once, as in DeepSpeed or for a CUDA
            graph. Microbatch m is kept in buffer m % buffers, with its input, its output and later their gradients. It
            fills the buffer at its first action in the stage: when its receive is posted, or at its forward. It uses it
            until its last action there, a backward or the wait for a send, and until the neighboring stages on the same
            rank have read its results. If a microbatch fills a buffer that another one still uses, the results are
            wrong without an error; there is a problem of the kind "buffer". By default, each microbatch has its own
            memory.

    Raises:
        SettingError: `schedule` is not a Schedule, the transport is unknown or not for it, or `buffers` is not a whole
            number from 1 on, or not for a forward-only schedule on this transport without waits for its sends.
    """
    require_schedule("check", schedule)
    require_one_of("transport", transport, TRANSPORTS)
    if buffers is not None and schedule.slices > 1:
        raise SettingError(f"buffers are of whole microbatches; {schedule!r} cuts them into slices")
    if buffers is not None and schedule.placement.barriers:
        raise SettingError(f"buffers are of stages; {schedule!r} has a head that all ranks share")
    if buffers is not None:
        if transport in STREAMED and schedule.forward_only:
            _require_waits(schedule, transport)
        refilled = _refilled(schedule, require_count("buffers", buffers))
        return check(schedule, transport=transport) or list(islice(refilled, MOST_PROBLEMS))
    if transport in STREAMED:
        require_streamed(schedule, transport)
        return list(schedule.problems or Streams(schedule, transport).stuck)
    if transport == "buffered" or (transport == "any" and schedule.problems):
        return list(schedule.problems)
    found = list(find_problems(schedule, replay(schedule.numbered, rendezvous=True)))
    return found if transport == "rendezvous" else list(map(_unknown, found))


def _unknown(problem: Problem) -> Problem:
    """Return a deadlock of sends that wait for their receives, where they may as well be buffered."""
    why = "cannot tell: legal as long as sends are buffered, but where a send waits for its receive, "
    return problem._replace(kind="unknown", message=why + problem.message)


def _require_waits(schedule: Schedule, transport: str) -> None:
    """Raise SettingError if a send goes on after its action. A backward would show that it has arrived."""
    for rank, order in enumerate(schedule.orders):
        waited = waited_for(order)
        for action in chain.from_iterable(action.singles for action in order):
            if action.op in SEND and action not in waited:
                wait = action._replace(op=WAIT_OF[action.op])
                raise SettingError(
                    f"with transport={transport!r}, {action} goes on after rank {rank} has reached it, so nothing says "
                    f"when its buffer is free; write {wait} where the rank waits for it"
                )


class Life(NamedTuple):
    """The time for which a microbatch needs a buffer of a stage, from one index in `Schedule.one_by_one` to another."""

    stage: int
    microbatch: int
    start: int
    end: int


def _refilled(schedule: Schedule, buffers: int) -> Iterator[Problem]:
    """Yield the actions of a legal schedule that fill a buffer that is still needed."""
    stages, clashes = [*_lives(schedule)], []
    for rank, lives in stages:
        held: dict[int, Life] = {}  # by buffer, the life that ends last
        for life in lives:
            before = held.setdefault(life.microbatch % buffers, life)
            if before is not life and before.end >= life.start:
                clashes.append((rank, life, before))
            held[life.microbatch % buffers] = max(before, life, key=lambda each: each.end)
    if not clashes:
        return
    enough = _least(lives for _, lives in stages)
    positions = [*map(schedule.positions, range(schedule.ranks))]
    for rank, life, before in clashes:
        index, end = positions[rank][life.start], positions[rank][before.end]
        action, last = _single(schedule, rank, life.start, life), _single(schedule, rank, before.end, before)
        if last.op in WAITS and schedule.orders[rank][end].parts:  # a batch waits for its own messages
            last = awaited(last)
        why = f"fills the buffer of microbatch {before.microbatch}, which is in use until {last} (position {end})"
        message = f"rank {rank}, position {index}: {action} {why}; {enough} buffers would do"
        yield Problem(rank, index, action, "buffer", message)


def _single(schedule: Schedule, rank: int, index: int, life: Life) -> Action:
    """Return the action at an index, or of a pair the part that belongs to a life."""
    action = schedule.one_by_one.orders[rank][index]
    own = (single for single in action.singles if (single.stage, single.microbatch) == (life.stage, life.microbatch))
    return next(own, action)


def _lives(schedule: Schedule) -> Iterator[tuple[int, list[Life]]]:
    """Yield, for each stage of each copy of the model, its rank and the lives of its microbatches, by their start.

    A life lasts from the first to the last action of a microbatch in the stage, or on another stage of the same rank
    that takes its result from there: no message copies it.
    """
    numbered, size, places = schedule.numbered, schedule.microbatches, schedule.stages * schedule.microbatches
    used = []  # for each block, the distances to its actions and to what they require of their own rank
    for block in numbered.blocks:
        near = [distance for distance, link in zip(block.requires, block.links, strict=True) if link is None]
        used.append([*block.singles, *near] if block.rank >= 0 else [])  # sharding has no microbatch
    for rank, order in enumerate(numbered.orders):
        first: dict[int, int] = {}  # by the number of an action without its kind
        last: dict[int, int] = {}
        for index, entry in enumerate(order):
            for distance in used[entry // size]:
                place = (entry + distance) % places
                first.setdefault(place, index)
                last[place] = index
        lives = defaultdict(list)
        for place, start in first.items():
            stage, microbatch = divmod(place, size)
            lives[stage, microbatch >= numbered.split].append(Life(stage, microbatch, start, last[place]))
        yield from ((rank, each) for each in lives.values())


def _least(stages: Iterable[Sequence[Life]]) -> int:
    """Return the least number of buffers with which no microbatch fills one that is still needed.

    Two microbatches share a buffer if the number of buffers divides their distance. So it must not divide the distance
    of any two whose lives overlap, of which there are some. A larger number than the least may divide one again.
    """
    apart = 0  # a bit for each distance of two lives that overlap
    for lives in stages:
        top = max(life.microbatch for life in lives)
        up = down = 0  # a bit for each life at the time: microbatch m has bit m, and bit top - m
        times = [(life.start, False, life.microbatch) for life in lives]
        times += [(life.end, True, life.microbatch) for life in lives]
        for _, ends, microbatch in sorted(times):
            if not ends:
                apart |= up >> microbatch | down >> (top - microbatch)
            up ^= 1 << microbatch
            down ^= 1 << (top - microbatch)
    bits = f"{apart:b}"[::-1]
    return next(number for number in count(2) if "1" not in bits[number::number])
