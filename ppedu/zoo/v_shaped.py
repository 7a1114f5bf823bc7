"""Down the ranks and back up in as much memory as there is: fewer activations for more idle time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from numbers import Real

from ppedu.core.actions import Action, F, I, W
from ppedu.core.errors import SettingError
from ppedu.core.numeric import Number
from ppedu.zoo.registry import register


@register("v-adaptive", placement="v", chunks=2)
def v_adaptive(rank: int, ranks: int, microbatches: int, memory: Number | None = None) -> Iterator[Action]:
    """The V of ZB-V in the memory that there is (Qi et al., arXiv 2405.15362, §3; computed here, not searched for).

    `memory` is the number of microbatches of which a rank may hold its share's activations: from V-Min's on,
    halves count, more than ZB-V's p is of no use; by default halfway between the two. Made for F = I = W: with
    p microbatches or more and a whole number k of them in memory, a rank idles for p-1 + 2(p-k) + max(0, 3p-4k)
    forwards of a chunk, and no order of these actions in that memory idles for less. Picture: ZB-V whose warm-up
    pauses when the memory is full, and whose cool-down runs out of W.
    """
    least = (ranks + 4) // 3
    if memory is None:
        memory = (least + ranks) / 2
    if isinstance(memory, bool) or not isinstance(memory, Real) or not memory >= least:
        raise SettingError(f"v-adaptive needs memory for {least} microbatches or more on {ranks} ranks; got {memory!r}")
    yield from _orders(ranks, microbatches, 2 * ranks if memory > ranks else int(2 * memory))[rank]


@register("v-half", placement="v", chunks=2)
def v_half(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Half of ZB-V's memory, floor((p+2)/2) activations (Qi et al., arXiv 2405.15362, §3).

    v-adaptive in that memory. For F = I = W and p > 2 it idles for 3p-7 forwards of a chunk, 3p-4 where p is odd;
    for other times the bubble still does not grow with m, as long as W + 2I >= 2F and W + 2F >= 2I.
    """
    yield from v_adaptive(rank, ranks, microbatches, memory=(ranks + 2) // 2)


@register("v-min", placement="v", chunks=2)
def v_min(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """A third of ZB-V's memory, floor((p+4)/3) activations (Qi et al., arXiv 2405.15362, §3).

    v-adaptive in that memory. For F = I = W and p > 2 it idles for 4p-7, 4p-5 or 4p-9 forwards of a chunk, where
    p mod 3 is 0, 1 or 2; for other times the bubble may grow with m.
    """
    yield from v_adaptive(rank, ranks, microbatches, memory=(ranks + 4) // 3)


def _pattern(ranks: int, memory: int) -> list[int]:
    """When microbatch 0 is due at its 4p stops: forwards in stages 0 to 2p-1, then an I in each on the way back.

    Every 6 ticks another one follows. A hop down the ranks takes a tick, a hop up one in V-Min's pattern and two
    in V-Half's; what memory there is beyond that goes into a rest before the first I. On each rank an I comes
    `back` ticks after either forward, so neither leads by more than `memory`, and the four never fall together.
    """
    up = 2 if 2 * memory > ranks else 1
    back = 6 * memory - 5 + up
    forwards = [stop if stop < ranks else ranks - 1 + up * (stop - ranks + 1) for stop in range(2 * ranks)]
    return forwards + [tick + back for tick in forwards]


@lru_cache(maxsize=1)  # all ranks' orders are asked for, one after another
def _orders(ranks: int, microbatches: int, room: int) -> tuple[tuple[Action, ...], ...]:
    """The orders in which the ranks, tick by tick, do what is due next; in warm-up and cool-down, what they can.

    A rank holds `room` chunks' activations at most, and does W when nothing else can run or there is no room to
    spare. As an early forward leaves room for those that are due before it, what is due next of all can always run:
    ranks never wait for each other in a ring.
    """
    turn, last = 2 * ranks, 4 * ranks - 1
    due = _pattern(ranks, room // 2)
    warm, cool = due[last], 6 * (microbatches - 1)  # the first microbatch is back; the last one sets out
    done = [0] * len(due) + [microbatches]  # the first stop finds what it waits for at done[-1]
    held = [0] * ranks
    late: list[deque[Action]] = [deque() for _ in range(ranks)]  # weight backwards
    orders: list[list[Action]] = [[] for _ in range(ranks)]

    def fits(stop: int, rank: int) -> bool:
        before = (due[stop] - due[turn - 1 - stop]) // 6 + 1  # forwards of the other chunk that are due before it
        return held[rank] + max(0, before) < room

    def next_stop(rank: int, arrived: list[int]) -> int | None:
        stops = sorted((rank, turn - 1 - rank, turn + rank, last - rank), key=due.__getitem__)
        for stop in stops:
            short = late[rank] and held[rank] + 1 >= room
            steady = warm < due[stop] and due[stops[0]] < cool
            if stop != stops[0] and (short or steady):
                break
            if arrived[stop - 1] > done[stop] and (stop >= turn or fits(stop, rank)):
                return stop
        return None

    while done[last] < microbatches:
        arrived = done.copy()
        for rank, order in enumerate(orders):
            stop = next_stop(rank, arrived)
            if stop is None:
                if late[rank]:
                    order.append(late[rank].popleft())
                    held[rank] -= 1
                continue
            if stop < turn:
                order.append(F(stop, done[stop]))
                held[rank] += 1
            else:
                order.append(I(last - stop, done[stop]))
                late[rank].append(W(last - stop, done[stop]))
            done[stop] += 1
            due[stop] += 6 if done[stop] < microbatches else 10**9  # never
    return tuple((*order, *rest) for order, rest in zip(orders, late, strict=True))
