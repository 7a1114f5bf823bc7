"""Lesson 10: filled bubbles and the remaining idle time: equivalent answers are accepted, wrong ones explained."""

import pytest
import stepper
from answers import in_turn, test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

from ppedu import B, F, I, W, schedule
from ppedu.core import check
from ppedu.zoo.registry import Registered, build

RIGHT = {}
WRONG = {}


def delayed(late, warmup=lambda rank, ranks: ranks - rank - 1):
    """Return 1F1B with split backwards, and each W delayed by `late` microbatches."""
    return in_turn(lambda rank, ranks: 1 + max(0, warmup(rank, ranks)), late)


right = delayed(lambda rank, ranks: rank)


def when_there_is_no_room(rank, ranks, microbatches):
    """Run a W only when the rank holds as much as 1F1B's first rank, and the remaining Ws at the end."""
    forwards, weights = 0, 0
    for m in range(microbatches):
        while forwards < min(microbatches, m + ranks - rank):
            if forwards - weights == min(ranks, microbatches):
                yield W(rank, weights)
                weights += 1
            yield F(rank, forwards)
            forwards += 1
        yield I(rank, m)
        if forwards == microbatches and m >= rank:  # in the cooldown, while the next gradient is on its way
            yield W(rank, weights)
            weights += 1
    for m in range(weights, microbatches):
        yield W(rank, m)


RIGHT["10.1"] = [right, when_there_is_no_room, lambda *sizes: tuple(right(*sizes))]


def test_an_independent_simulation_confirms_makespan_27_and_peak_4():
    rows = stepper.run(build("right", Registered(right, "loop"), 4, 8, {}))
    assert max(end for row in rows for _, _, end in row) == 27
    for row in rows:
        held = [sum((action.op == "F") - (action.op == "W") for action, *_ in row[: place + 1]) for place in range(24)]
        assert max(held) == 4


def without(op):
    return lambda *sizes: [action for action in right(*sizes) if action.op != op]


def whole(rank, ranks, microbatches):
    return schedule("1f1b", ranks, microbatches).orders[rank]


def weights_first(rank, ranks, microbatches):
    for action in whole(rank, ranks, microbatches):
        m = action.microbatch
        yield from [W(rank, m), I(rank, m)] if action.op == "B" else [action]


def newest_first(rank, ranks, microbatches):
    warmup = min(ranks - rank - 1, microbatches)
    for m in range(warmup):
        yield F(rank, m)
    for m in [*range(warmup, microbatches), *range(warmup)]:
        if m >= warmup:
            yield F(rank, m)
        yield I(rank, m)
        yield W(rank, m)


def two_at_once(rank, ranks, microbatches):
    """Let rank 0 wait for its second gradient before it uses the first."""
    order = list(right(rank, ranks, microbatches))
    if rank == 0 and microbatches > 1:
        order.remove(I(0, 1))
        order.insert(order.index(I(0, 0)), I(0, 1))
    return order


WRONG["10.1"] = {
    "W right after I": (
        delayed(lambda r, p: 0),
        "with 4 ranks and 8 microbatches your schedule is legal, but takes 30, where 27 is possible. Each W runs right "
        "after its I, and the gaps stay empty. Rank 2 waits 25–26: which of its Ws could it have kept for then?",
    ),
    "one microbatch too early": (
        delayed(lambda r, p: max(0, r - 1)),
        "takes 28, where 27 is possible. At 7–8 rank 1 runs",
    ),
    "backwards in one piece": (
        whole,
        "takes 33, where 27 is possible. Rank 1 runs 1B0 in one piece, so rank 0 waits for all of it, not just for I.",
    ),
    "the same delay everywhere": (
        delayed(lambda r, p: p - 1),
        "rank 0 holds 7 activations at its peak, and no rank of 1F1B holds more than 4. Activations are held",
    ),
    "the wrong way round": (
        delayed(lambda r, p: p - 1 - r),
        "rank 0 holds 7 activations at its peak, and no rank of 1F1B holds more than 4. Upside down: rank 0 is full",
    ),
    "one microbatch too late": (delayed(lambda r, p: r + 1), "rank 0 holds 5 activations at its peak"),
    "all Ws at the end": (delayed(lambda r, p: 10**6), "rank 0 holds 8 activations at its peak"),
    "ZB-H2": (
        lambda rank, *sizes: schedule("zb-h2", *sizes).orders[rank],
        "rank 0 holds 7 activations at its peak, and no rank of 1F1B holds more than 4: it runs 7 forwards before",
    ),
    "right for four ranks": (
        delayed(lambda r, p: min(r, 3)),
        "with 8 ranks and 20 microbatches your schedule is legal, but takes 71, where 67 is possible. At 15–16 rank 7",
    ),
    "the same warm-up everywhere": (
        delayed(lambda r, p: 0, lambda r, p: p - 1),
        "takes 54, where 27 is possible. Rank 1 runs 4 forwards before its first backward, where 3 would be enough.",
    ),
    "warm-up one short": (
        delayed(lambda r, p: r + (r < p - 1), lambda r, p: p - r - 2),
        "takes 42, where 27 is possible. Rank 0 runs 3 forwards before its first backward, where 1F1B runs 4.",
    ),
    "no warm-up": (
        delayed(lambda r, p: 0, lambda r, p: 0),
        "takes 72, where 27 is possible. Rank 0 runs 1 forward before its first backward, where 1F1B runs 4.",
    ),
    "naive": (
        lambda rank, *sizes: schedule("naive", *sizes).orders[rank],
        "takes 96, where 27 is possible. Only one rank works at a time, as in naive. Rank 0 runs 1 forward "
        "before its first backward, where",
    ),
    "two at once": (
        two_at_once,
        "takes 30, where 27 is possible. Look at the longest wait: rank 0 waits 4–9: 0I1 needs 1I1 from rank 1.",
    ),
    "the newest first": (newest_first, "takes 66, where 27 is possible."),
    "W forgotten": (without("W"), "rank 0: 0W0 is never run (and 31 more problems)"),
    "the last Ws forgotten": (
        lambda r, p, m: [action for action in right(r, p, m) if (action.op, action.microbatch) != ("W", m - 1)],
        "rank 0: 0W7 is never run (and 3 more problems)",
    ),
    "I forgotten": (without("I"), "rank 0: 0I0 is never run"),
    "backwards forgotten": (
        lambda r, p, m: [F(r, k) for k in range(m)],
        "with 4 ranks and 8 microbatches, rank 0: 0I0 and 0W0 are never run (and 31 more problems)",
    ),
    "W before its I": (weights_first, "rank 0, position 4: 0W0 needs 0I0, which only comes at position 5"),
    "both B and I": (
        lambda r, p, m: [*right(r, p, m), *(B(r, k) for k in range(m))],
        "0B0 is a full backward, and half of it, 0I0, is run too",
    ),
}


def test_the_lessons_starting_point_is_legal():
    assert check(build("start", Registered(delayed(lambda r, p: 0), "loop"), 4, 8, {})) == []


# Exercise 2: the idle time


def idle_time(ranks, forward, input, weight):
    return (ranks - 1) * max(forward, input, forward + input - weight)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (2, 1, 2), (1, 1, 4), (1, 2, 2), (3, 1, 1)])
def test_an_independent_simulation_confirms_the_idle_time(times):
    lasts = dict(zip("FIW", times, strict=True))
    rows = stepper.run(schedule("zb-h1", 4, 9), lambda action: lasts[action.op])
    assert max(end for row in rows for _, _, end in row) - 9 * sum(times) == idle_time(4, *times)


def by_cases(p, f, i, w):
    return (p - 1) * (f + i - w) if w <= f and w <= i else (p - 1) * (f if f > i else i)


RIGHT["10.2"] = [idle_time, by_cases, lambda *sizes: float(idle_time(*sizes))]


WRONG["10.2"] = {
    "the paper's": (
        lambda p, f, i, w: (p - 1) * (f + i - w),
        "with 4 ranks, F = 2, I = 1 and W = 2 each rank is idle for 6; your formula gives 3. That is the published",
    ),
    "the paper's, not below 0": (
        lambda p, f, i, w: (p - 1) * max(0, f + i - w),
        "F = 2, I = 1 and W = 2 each rank is idle for 6; your formula gives 3. Not all of the waiting can be "
        "filled: before its",
    ),
    "without the first gradient": (
        lambda p, f, i, w: (p - 1) * max(f, f + i - w),
        "F = 1, I = 2 and W = 2 each rank is idle for 6; your formula gives 3. The last rank's wait",
    ),
    "without the first microbatch": (
        lambda p, f, i, w: (p - 1) * max(i, f + i - w),
        "F = 2, I = 1 and W = 2 each rank is idle for 6; your formula gives 3. Rank 0's wait for its first gradient",
    ),
    "1F1B's": (
        lambda p, f, i, w: (p - 1) * (f + i + w),
        "each rank is idle for 3; your formula gives 9. That is the idle time of 1F1B.",
    ),
    "no W delayed": (
        lambda p, f, i, w: (p - 1) * (f + i),
        "your formula gives 6. That is the idle time if the backward is split, but no W",
    ),
    "all waits added": (
        lambda p, f, i, w: (p - 1) * (f + i + max(0, f + i - w)),
        "your formula gives 9. You add the waits; only the longest counts.",
    ),
    "the first wait alone": (lambda p, f, i, w: (p - 1) * f, "That is the last rank's wait for its"),
    "the long Ws' alone": (lambda p, f, i, w: (p - 1) * max(f, i), "but a short W leaves more"),
    "one I too many": (
        lambda p, f, i, w: max((p - 1) * f, p * i, (p - 1) * (f + i - w)),
        "idle for 3; your formula gives 4. A wait of p times I for the first gradient is too long.",
    ),
    "one I too many, and nothing else": (
        lambda p, f, i, w: max(p * i, (p - 1) * (f + i - w)),
        "how many Is lie between then and rank 0's first?",
    ),
    "the ranks' number": (lambda p, f, i, w: p * max(f, i, f + i - w), "idle for 3; your formula gives 4."),
    "one time for all": (lambda p, f, i, w: p - 1, "with 4 ranks, F = 2, I = 3 and W = 1 each rank is idle for 12"),
}


# Exercise 3, optional: no rank waits between its own first and last action, with at most 2 * ranks - 1 activations


zb_h2 = in_turn(lambda r, p: 2 * (p - r) - 1, lambda r, p: 2 * r)


RIGHT["10.3"] = [zb_h2, lambda rank, *sizes: schedule("zb-h2", *sizes).orders[rank]]


@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 3), (2, 2), (2, 5), (3, 7), (4, 3), (4, 8), (6, 13), (8, 20)], ids=lambda sizes: str(sizes)
)
def test_the_solution_is_zb_h2(sizes):
    assert build("right", Registered(zb_h2, "loop"), *sizes, {}).orders == schedule("zb-h2", *sizes).orders


WRONG["10.3"] = {
    "ZB-H1": (
        right,
        "with 4 ranks and 8 microbatches a rank waits between its own first and last action. Rank 0 waits 4–7 for its "
        "first gradient, after 4 forwards; it may hold 7.",
    ),
    "backwards in one piece": (whole, "Rank 1 runs 1B0 in one piece, so rank 0 waits for all of it"),
    "no W delayed": (
        in_turn(lambda r, p: 2 * (p - r) - 1, lambda r, p: 0),
        "Each W runs right after its I, on some ranks too early: no W is left for the gaps. Look at the longest wait: "
        "rank 0 waits",
    ),
    "delayed as in ZB-H1": (
        in_turn(lambda r, p: 2 * (p - r) - 1, lambda r, p: r),
        "Look at the longest wait: rank 0 waits 14–15: 0I3 needs 1I3 from rank 1. Rank 3 never holds more than 4 "
        "activations; it may hold 7: delay its Ws further.",
    ),
    "delayed by one more": (
        in_turn(lambda r, p: 2 * (p - r) - 1, lambda r, p: 2 * r + 1),
        "holds 8 activations at its peak; at most 7 are allowed",
    ),
    "all forwards first": (
        in_turn(lambda r, p: 10**6, lambda r, p: 0),
        "rank 0 holds 8 activations at its peak; at most 7 are allowed",
    ),
    "right for four ranks": (
        in_turn(lambda r, p: min(7, 2 * (p - r) - 1), lambda r, p: min(6, 2 * r)),
        "with 8 ranks and 20 microbatches a rank waits",
    ),
    "W forgotten": (lambda *sizes: [a for a in zb_h2(*sizes) if a.op != "W"], "rank 0: 0W0 is never run"),
}
