"""Lesson 14: schedules that beat the built-in ones are accepted, others rejected with the reason."""

import itertools
from dataclasses import replace

import pytest
import stepper
from answers import in_turn, test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401
from strategies import slow

from ppedu import B, F, I, W, schedule, schedules, simulate
from ppedu.course.exercises import EXERCISES
from ppedu.course.exercises.lesson_14 import COSTS, LEAST_TIMES
from ppedu.notebook import heron
from ppedu.search import optimal
from ppedu.zoo.registry import Registered, build

RIGHT = {}
WRONG = {}


def when_full(rank, ranks, microbatches):
    """Run a W only when no other microbatch fits in memory, and the remaining Ws at the end."""
    forwards, weights = more_at_the_top(rank, ranks), 0
    for m in range(forwards):
        yield F(rank, m)
    for m in range(microbatches):
        yield I(rank, m)
        if forwards - weights == room(ranks):
            yield W(rank, weights)
            weights += 1
        if forwards < microbatches:
            yield F(rank, forwards)
            forwards += 1
    for m in range(weights, microbatches):
        yield W(rank, m)


def room(ranks):
    return ranks + ranks // 2


def filled(lead):
    """Return `in_turn(lead, ...)` with each W delayed as long as memory allows."""
    return in_turn(lead, lambda r, p: room(p) - lead(r, p))


def more_at_the_top(r, p):
    return p - r + min(p // 2, p - r - 1)


def evenly(r, p):
    return 1 + -(-(p - 1 - r) * (room(p) - 1) // (p - 1))


def full_at_once(rank, ranks, microbatches):
    """Run the right number of forwards, then a W where memory is full, and one in place of each F that is missing."""
    started, last = more_at_the_top(rank, ranks), 0
    yield from (F(rank, m) for m in range(started))
    for m in range(microbatches):
        yield I(rank, m)
        if started - last >= room(ranks):
            yield W(rank, last)
            last += 1
        if started < microbatches:
            yield F(rank, started)
            started += 1
        elif last <= m:
            yield W(rank, last)
            last += 1
    yield from (W(rank, m) for m in range(last, microbatches))


def in_whole_pieces(rank, ranks, microbatches):
    return schedule("1f1b", ranks, microbatches).orders[rank]


right = filled(more_at_the_top)


RIGHT["14.1"] = [right, filled(evenly), lambda *sizes: list(right(*sizes))]


def measured(each):
    """Return makespan and peak of an independent simulation in eighths of an F: a message takes two of them."""
    ticks = 8 * each.ranks // each.stages
    rows = stepper.run(each, lambda action: ticks * sum(2 if op == "B" else 1 for _, op, _, _ in action.singles), 2)
    peaks = []
    for row in rows:
        held, most = 0, 0
        for action, *_ in row:
            held += sum(op == "F" for _, op, _, _ in action.singles)
            most = max(most, held)
            held -= sum(op in ("B", "W") for _, op, _, _ in action.singles)
        peaks.append(most * each.ranks / each.stages)
    return max(end for row in rows for *_, end in row) / 8, max(peaks)


def test_an_independent_simulation_confirms_that_the_answer_is_fastest():
    known = [schedule(name, 4, 8) for name in schedules()]
    times = [measured(each) for each in known if each.plain and each.placement.copies == 1]
    assert min(time for time, peak in times if peak <= 6) == 28.75
    assert min(time for time, _ in times) == 27.75
    assert measured(build("right", Registered(right, "loop"), 4, 8, {})) == (27.75, 6)


WRONG["14.1"] = {
    "what the lesson starts with": (
        in_whole_pieces,
        "with 4 ranks and 8 microbatches your schedule is legal and fits, but takes 37, 8.25 more than zb-v. "
        "Time is lost here: rank 3 waits 9.75–10.25: 3F2 needs 2F2, which ends at 10 on rank 2. And with "
        "an undivided B, the previous rank also has to wait for the W in it.",
    ),
    "ZB-H1": (
        in_turn(lambda r, p: p - r, lambda r, p: r),
        "takes 30, 1.25 more than zb-v. Time is lost here: rank 3 waits 7.75–8.25: 3F2 needs 2F2, which ends at "
        "8 on rank 2. Rank 0 never holds more than 4 microbatches, but there is memory for 6",
    ),
    "ZB-H2": (
        lambda rank, *sizes: schedule("zb-h2", *sizes).orders[rank],
        "but rank 0 holds 7 microbatches from 6 on, when it starts 0F6, and there is memory for only 6: none of "
        "them has started its backward.",
    ),
    "GPipe": (lambda rank, *sizes: schedule("gpipe", *sizes).orders[rank], "rank 0 holds 7 microbatches from 6 on"),
    "all Ws at the end": (
        in_turn(lambda r, p: p - r, lambda r, p: 10**6),
        "rank 0 holds 7 microbatches from 14 on, when it starts 0F6, and there is memory for only 6: 3 of them "
        "only wait for their W.",
    ),
    "more on every rank": (
        filled(lambda r, p: p - r + p // 2),
        "takes 30, 1.25 more than zb-v. Time is lost here: rank 3 waits 9.75–10.25: 3F4 needs 2F4, which ends at "
        "10 on rank 2. All ranks wait for the last rank's first I, and it runs 3 forwards before "
        "that, where 1 would be enough.",
    ),
    "ZB-H2's forwards, cut off": (
        filled(lambda r, p: min(room(p), 2 * (p - r) - 1)),
        "with 6 ranks and 12 microbatches your schedule is legal and fits, but takes 48, 3.75 more than "
        "zb-v. Time is lost here: rank 5 waits 31.25–32.75: 5F11 needs 4F11, which ends at 32.5 on rank 4. "
        "Before their first I the ranks run 9, 9, 7, 5, 3, 1 forwards. Rank 1 runs the same number as rank 0, so it "
        "never has one queued; let it run at least one fewer.",
    ),
    "more on the first ranks": (
        filled(lambda r, p: 1 + (p - 1 - r) * (room(p) - 1) // (p - 1)),
        "takes 29.5, 0.75 more than zb-v. Time is lost here: rank 3 waits 7.75–8.25: 3F2 needs 2F2, which ends at "
        "8 on rank 2. Before their first I the ranks run 6, 4, 2, 1 forwards. You have the large "
        "steps at the top, but rank 3 runs only 1 fewer than rank 2. Start the steps of 2 from the last rank up.",
    ),
    "too few on the first ranks": (
        filled(lambda r, p: p - r + (r < p - 1)),
        "If a rank runs 2 more than the next one, a microbatch is always in flight between them.",
    ),
    "Ws only where memory is full": (
        full_at_once,
        "with 3 ranks and 7 microbatches your schedule is legal and fits, but takes 24.5, 0.5 more than zb-v. Time is "
        "lost here: rank 0 waits 19.5–20.5: 0I5 needs 1I5, which ends at 20.25 on rank 1. Before their first I the "
        "ranks run 4, 3, 1 forwards, so the forwards are fine. Look at the Ws",
    ),
    "right for four ranks": (
        filled(lambda r, p: p - r + min(1, p - r - 1)),
        "with 6 ranks and 12 microbatches your schedule is legal and fits, but takes 45, 0.75 more than zb-v.",
    ),
    "more on all but the last": (
        filled(lambda r, p: p - r + p // 2 if r < p - 1 else 1),
        "with 8 ranks and 20 microbatches your schedule is legal and fits, but takes 72, 0.5 more than zb-",
    ),
    "W at once": (
        in_turn(more_at_the_top, lambda r, p: 0),
        "takes 31.5, 2.75 more than zb-v. Time is lost here: rank 0 waits 28.5–29.5: 0I7 needs 1I7, which ends at "
        "29.25 on rank 1. Rank 3 never holds more than 1 microbatch, but there is memory for 6: use "
        "it for more forwards at the start, or to delay Ws.",
    ),
    "W when full": (
        when_full,
        "takes 30.5, 1.75 more than zb-v. Time is lost here: rank 0 waits 23.5–24.5: 0I7 needs 1I7, which ends at "
        "24.25 on rank 1. While it waits, rank 0 could run 0W3, but its order has 0W3 after 0I7.",
    ),
    "as fast as par": (
        in_turn(more_at_the_top, lambda r, p: r),
        "with 3 ranks and 7 microbatches your schedule is legal and fits, but takes 24, as much as zb-v.",
    ),
    "stages that are not there": (
        lambda rank, *sizes: schedule("zb-v", *sizes).orders[rank],
        "rank 0, position 7: 7F0: there is no stage 7; the stages are 0 to 3",
    ),
    "a cycle": (
        in_turn(lambda r, p: 1 if r < p - 1 else 2, lambda r, p: 0),
        "deadlock: rank 2 waits at position 1 (2I0) for 3I0 of rank 3, rank 3 waits at position 1 (3F1) for 2F1 of",
    ),
    "W forgotten": (lambda *sizes: [action for action in right(*sizes) if action.op != "W"], "0W0 is never run"),
    "B and I": (lambda r, p, m: [*right(r, p, m), *(B(r, k) for k in range(m))], "half of it, 0I0, is run too"),
}


def backtracked(rank, ranks, microbatches):
    """Return a rank's part of a schedule that a search of all states finds, with memory for three."""
    start, end = ((0, 0, 0),) * ranks, ((microbatches,) * 3,) * ranks

    def after(state, r):
        f, i, w = state[r]
        if f < microbatches and f - w < 3 and (r == 0 or state[r - 1][0] > f):
            yield f + 1, i, w
        if i < f and (r == ranks - 1 or state[r + 1][1] > i):
            yield f, i + 1, w
        if w < i:
            yield f, i, w + 1
        yield state[r]

    came, states = {start: None}, [start]
    while end not in came:
        following = {}
        for state in states:
            for new in itertools.product(*(after(state, r) for r in range(ranks))):
                if new not in came:
                    came[new] = following[new] = state
        states = list(following)
    steps, state = [], end
    while came[state]:
        before = came[state]
        steps += [op(rank, old) for op, old, new in zip((F, I, W), before[rank], state[rank], strict=True) if new > old]
        state = before
    return steps[::-1]


RIGHT["14.2"] = [backtracked]


def test_a_search_of_all_states_finds_a_schedule_of_the_least_time():
    makespan, peak = measured_instantly(build("tight", Registered(backtracked, "loop"), 4, 8, {}))
    assert (makespan, peak) == (31, 3)


def measured_instantly(each):
    rows = stepper.run(each, lambda action: 1, 0)
    held = [
        itertools.accumulate((op == "F") - (op == "W") for action, *_ in row for _, op, _, _ in action.singles)
        for row in rows
    ]
    return max(end for row in rows for *_, end in row), max(map(max, held))


def test_a_right_answer_pays_on_heron_only_with_long_hops():
    """The lesson states these times, with the head on the last stage, and shows only the built-in schedules' own."""
    cluster = replace(heron, sequence=16_384)
    costs = cluster.costs(8)
    yours = build("yours", Registered(right, "loop"), 8, 32, {})
    zb_h1, zb_h2, zb_v = (schedule(name, 8, 32) for name in ("zb-h1", "zb-h2", "zb-v"))

    def run(each, hop):
        head = 2 * cluster.sequence * cluster.vocabulary * cluster.width / (cluster.node * cluster.speed)
        forward = [cluster.layers / each.stages * cluster.layer_time] * each.stages
        forward[-1] += head
        return simulate(each, replace(costs, forward=forward, latency=hop * costs.forward))

    def took(*sizes):
        return float(run(*sizes).makespan)

    own = costs.latency / costs.forward
    assert own == pytest.approx(0.07, abs=0.005)
    for hop in (own, 0.28, 0.56):
        assert took(yours, hop) == pytest.approx(took(zb_h2, hop))
    assert took(zb_v, own) < min(took(each, own) for each in (yours, zb_h1))
    assert took(yours, 0.28) > took(zb_v, 0.28) and took(yours, 0.3) < took(zb_v, 0.3)
    assert took(zb_v, 0.56) / took(yours, 0.56) == pytest.approx(1.04, abs=0.005)
    large, small, largest = (float(cluster.peak(run(each, own))) for each in (yours, zb_v, zb_h2))
    assert large == pytest.approx(69.8, abs=0.05) and large - small == pytest.approx(16, abs=0.5)
    assert large < cluster.memory / 1e9 < largest


def test_what_the_lesson_says_of_halves_that_are_not_equal():
    """As in lesson 10: at half of attention, a layer's products with weights take 12·w a token, and attention T."""
    products, attention = 12 * heron.width, 16_384

    def took(each, link, longer=1.0):
        costs = replace(heron, sequence=16_384, link=link).costs(8)
        unit = costs.forward / (products + attention)
        halves = {"input": (products + 2.5 * attention) * unit, "weight": products * unit}
        whole = sum(halves.values())
        halves = {name: time * longer for name, time in halves.items()}
        return simulate(each, replace(costs, backward=whole, **halves)).makespan

    yours = build("yours", Registered(right, "loop"), 8, 32, {})
    others = [schedule(name, 8, 32) for name in ("1f1b", "zb-h1", "zb-v")]
    chunks = schedule("interleaved", 8, 32, chunks=4)
    assert took(yours, heron.link / 4) < min(took(each, heron.link / 4) for each in (*others, chunks))
    assert took(schedule("zb-h2", 8, 32), heron.link / 4) < took(yours, heron.link / 4)  # but it does not fit
    assert took(others[2], heron.link) < min(took(each, heron.link) for each in (yours, *others[:2], chunks))
    assert took(chunks, heron.link, 1.05) < took(others[2], heron.link, 1.05)


WRONG["14.2"] = {
    "what the lesson starts with": (
        in_turn(lambda r, p: min(3, p - r), lambda r, p: 0),
        "with 4 ranks and 8 microbatches your schedule is legal and fits, but takes 38, 7 more than the least. Time is "
        "lost here: rank 3 waits 15–17: 3F4 needs 2F4 from rank 2",
    ),
    "Ws delayed as long as memory allows": (
        in_turn(lambda r, p: min(3, p - r), lambda r, p: max(0, 3 - (p - r))),
        "takes 38, 7 more than the least. Time is lost here: rank 3 waits 10–12: 3F3 needs 2F3 from rank 2",
    ),
    "whole backwards": (
        lambda rank, *sizes: schedule("1f1b", *sizes).orders[rank],
        "rank 0 holds 4 microbatches from 3 on, when it starts 0F3, and there is memory for only 3: none of them",
    ),
    "ZB-H1": (lambda rank, *sizes: schedule("zb-h1", *sizes).orders[rank], "rank 0 holds 4 microbatches from 3 on"),
    "W forgotten": (lambda *sizes: [each for each in right(*sizes) if each.op != "W"], "0W0 is never run"),
}


def test_the_score_is_1_for_the_least_time_and_none_where_a_schedule_does_not_fit():
    best, usual, large = (
        EXERCISES["14.1"].score(generator)
        for generator in (
            filled(more_at_the_top),
            lambda rank, *sizes: schedule("zb-h1", *sizes).orders[rank],
            lambda rank, *sizes: schedule("gpipe", *sizes).orders[rank],
        )
    )
    assert all(1 <= ratio < usual[size] for size, ratio in best.items())
    assert set(large.values()) == {None}


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 9), *slow([(4, 11), (5, 12), (6, 14)])])
def test_the_least_times_are_proven_by_the_solver(ranks, microbatches):
    found = optimal(ranks, microbatches, COSTS, memory=room(ranks), time_limit=60)
    assert (found.status, found.makespan) == ("optimal", LEAST_TIMES[ranks, microbatches])
