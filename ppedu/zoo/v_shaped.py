"""ZB-V in less memory: fewer activations for more idle time.

The two chunks of a rank are its two stages, one on the way down the ranks and one on the way back up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from ppedu.core import Action, F, I, W
from ppedu.core.numeric import Number
from ppedu.core.validate import require_number
from ppedu.zoo import Facts, register

PERIOD = 6  # ticks from one microbatch to the next: F, I and W of two chunks, a tick each
SOURCE = "arXiv 2405.15362; idle time by simulation"
IDLE = "(p-1+2*(p-k)+max(0, 3*p-4*k))*F/2 if m >= p and F == I == W"


@register(
    "v-adaptive",
    placement="v",
    chunks=2,
    facts=Facts(
        "arXiv 2405.15362",
        remark="as v-half for k = memory",
        price="The less memory it may use, the longer the ranks wait.",
        used=(
            "Its authors' fork of Megatron-LM has three of its limits: those of V-Min, V-Half and ZB-V "
            "(github.com/sail-sg/zero-bubble-pipeline-parallelism)."
        ),
    ),
)
def v_adaptive(rank: int, ranks: int, microbatches: int, memory: Number | None = None) -> Iterator[Action]:
    """Yield the actions of `rank` in ZB-V with a limit on memory (Qi et al., arXiv 2405.15362, §3).

    The authors search for the order; here it is computed. It is made for F, I and W that take equally long. Let p be
    the ranks. With at least p microbatches and a whole number k of them in memory, a rank idles for
    p-1 + 2(p-k) + max(0, 3p-4k) forwards of one of its two stages, and no order of these actions in that memory idles
    for less.

    In a timeline: ZB-V whose warm-up pauses when the memory is full, and whose cooldown runs out of W.

    Args:
        memory: The number of microbatches whose activations a rank may hold for its share of the model, in steps of
            1/2, at least the floor((p+4)/3) of V-Min; more than the p of ZB-V has no effect. The default is halfway
            between.

    Raises:
        SettingError: `memory` is less than V-Min needs.
    """
    least = (ranks + 4) // 3
    if memory is None:
        memory = (least + ranks) / 2
    wanted = f"at least {least} microbatches on {ranks} ranks"
    require_number("the memory of v-adaptive", memory, lambda memory: memory >= least, wanted)
    yield from _orders(ranks, microbatches, 2 * ranks if memory > ranks else int(2 * memory))[rank]


@register(
    "v-half",
    placement="v",
    chunks=2,
    facts=Facts(
        SOURCE,
        idle=IDLE,
        peak="(p+2)//2 if m >= p and M_W == 1",
        price="It waits longer than ZB-V: 3p-7 forwards of a stage, or 3p-4 if p is odd, instead of p-1.",
        used=(
            "Its authors' fork of Megatron-LM has it, as the memory setup `half` "
            "(github.com/sail-sg/zero-bubble-pipeline-parallelism)."
        ),
    ),
)
def v_half(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in V-Half: ZB-V in half of its memory (Qi et al., arXiv 2405.15362, §3).

    With p ranks, a rank holds at most floor((p+2)/2) activations. If F, I and W take equally long and p > 2, it idles
    for 3p-7 forwards of one of its two stages, 3p-4 if p is odd. For other times the idle time still does not grow with
    the number of microbatches, as long as W + 2I >= 2F and W + 2F >= 2I.
    """
    yield from v_adaptive(rank, ranks, microbatches, memory=(ranks + 2) // 2)


@register(
    "v-min",
    placement="v",
    chunks=2,
    facts=Facts(
        SOURCE,
        idle=IDLE,
        peak="(p+4)//3 if m >= p and M_W == 1",
        price="It waits longer than V-Half, and if F, I and W differ, the idle time may grow with the microbatches.",
        used=(
            "Its authors' fork of Megatron-LM has it, as the memory setup `min` "
            "(github.com/sail-sg/zero-bubble-pipeline-parallelism)."
        ),
    ),
)
def v_min(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of `rank` in V-Min: ZB-V in a third of its memory (Qi et al., arXiv 2405.15362, §3).

    With p ranks, a rank holds at most floor((p+4)/3) activations. If F, I and W take equally long and p > 2, it idles
    for 4p-7, 4p-5 or 4p-9 forwards of one of its two stages if p mod 3 is 0, 1 or 2. For other times the idle time may
    grow with the number of microbatches.
    """
    yield from v_adaptive(rank, ranks, microbatches, memory=(ranks + 4) // 3)


def _pattern(ranks: int, memory: int) -> list[int]:
    """Return the tick at which each of microbatch 0's 4p forwards and Is is due, for p ranks, in their order.

    These are the *stops* of the microbatch: the forwards in stages 0 to 2p-1, then the Is in stages 2p-1 to 0. Each
    further microbatch is due PERIOD ticks later. A hop down the ranks takes one tick. A hop up takes one in the pattern
    of V-Min and two in that of V-Half. Any further memory is spent on a pause before the first I.

    Rank r has four stops; d is 2(p-r) - 1 with one tick for a hop up, 3(p-r) - 1 with two:

        the forwards of its first and second chunk    at r and r + d
        the Is of its second and first chunk          at r + `back` and r + d + `back`

    A microbatch follows every period, so a rank holds an activation of a chunk for each period from the chunk's forward
    to its I. That of the first chunk lives for `back` + d ticks, that of the second for `back` - d: together
    2 · `back`, which is less than 2 · `memory` periods, for the two chunks of `memory` microbatches.

    No two of the stops share a tick of the period. With one tick for a hop up, d is odd, and `back` is 2 more than a
    multiple of 6; with two, d is 2 more than a multiple of 3, and `back` is 3 more than a multiple of 6.

    With 2 ranks and a memory of 2, the forwards are due at 0 and 1 on the way down and at 3 and 5 on the way up, and
    the Is at 9, 10, 12 and 14. Rank 0 has the stops at 0, 5, 9 and 14: ticks 0, 5, 3 and 2 of the period.
    """
    up = 2 if 2 * memory > ranks else 1
    back = PERIOD * (memory - 1) + 1 + up
    way_down = list(range(ranks))
    way_up = [ranks - 1 + up * hops for hops in range(1, ranks + 1)]
    forwards = way_down + way_up
    return forwards + [tick + back for tick in forwards]


@lru_cache(maxsize=1)  # the orders of all ranks are requested one after another
def _orders(ranks: int, microbatches: int, most: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's order, built turn by turn: in each, a rank runs the action that is due next (`_pattern`).

    Ticks only say which of a rank's four stops is next. In warm-up and cooldown, while the first microbatch is not back
    or the last one has set out, a rank runs a later one if the next cannot run yet. It holds the activations of at most
    `most` chunks. It runs a W when nothing else can run, or when the memory is almost full. An early forward always
    leaves memory for the forwards that are due before it. So the action that is due next of all ranks can always run,
    and the ranks never deadlock.
    """
    forwards, last = 2 * ranks, 4 * ranks - 1  # the number of forwards among the stops, and the last stop
    due = _pattern(ranks, most // 2)
    warm = due[last]  # the warm-up lasts until this tick, when the first microbatch is back
    cool = PERIOD * (microbatches - 1)  # the cooldown begins at this tick, when the last microbatch sets out
    # Microbatches that have passed each stop. The last entry, done[-1], is for the way to stop 0: all have passed it.
    done = [0] * len(due) + [microbatches]
    held = [0] * ranks  # activations, in chunks
    delayed: list[deque[Action]] = [deque() for _ in range(ranks)]  # weight backwards
    orders: list[list[Action]] = [[] for _ in range(ranks)]

    def fits(stop: int, rank: int) -> bool:
        """Return whether the memory suffices for a forward and for the forwards of the rank that are due before it."""
        other = forwards - 1 - stop  # the forward of the rank's other chunk
        earlier = range(due[other], due[stop], PERIOD)  # the ticks before this forward at which that one is due
        return held[rank] + len(earlier) < most

    def next_stop(rank: int, arrived: list[int]) -> int | None:
        """Return the stop whose action a rank runs in this turn, or None for a W or a pause.

        Args:
            arrived: The microbatches that had passed each stop when the turn began.
        """
        stops = sorted((rank, forwards - 1 - rank, forwards + rank, last - rank), key=due.__getitem__)
        almost_full = bool(delayed[rank]) and held[rank] + 1 >= most
        cooling_down = due[stops[0]] >= cool
        for stop in stops:
            warming_up = due[stop] <= warm
            may_run_early = (warming_up or cooling_down) and not almost_full
            if stop != stops[0] and not may_run_early:
                break  # a W or a pause
            has_input = arrived[stop - 1] > done[stop]
            if has_input and (stop >= forwards or fits(stop, rank)):
                return stop
        return None

    while done[last] < microbatches:
        arrived = done.copy()
        for rank, order in enumerate(orders):
            stop = next_stop(rank, arrived)
            if stop is None:
                if delayed[rank]:
                    order.append(delayed[rank].popleft())
                    held[rank] -= 1
                continue
            if stop < forwards:
                order.append(F(stop, done[stop]))
                held[rank] += 1
            else:
                order.append(I(last - stop, done[stop]))
                delayed[rank].append(W(last - stop, done[stop]))
            done[stop] += 1
            due[stop] += PERIOD if done[stop] < microbatches else 10**9  # never again
    return tuple((*order, *rest) for order, rest in zip(orders, delayed, strict=True))
