"""Lesson 9: complete interleaved schedules are accepted, others rejected with the reason."""

import pytest
import stepper
from answers import pictures, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

from ppedu import B, Costs, F, schedule, simulate
from ppedu.course.exercises.lesson_09 import shorter_warmup
from ppedu.zoo.registry import Registered, build

WRONG = {}


def chunk_by_chunk(action, chunks, rank, ranks, microbatches):
    """Yield the action of each group of microbatches in each of these chunks."""
    for first in range(0, microbatches, ranks):
        for chunk in chunks:
            for m in range(first, first + ranks):
                yield action(chunk * ranks + rank, m)


def interleaved(length, backwards=reversed):
    """Return interleaved 1F1B with `length(rank, ranks, chunks)` forwards before the first pair."""

    def generator(rank, ranks, microbatches, chunks):
        forwards = list(chunk_by_chunk(F, range(chunks), rank, ranks, microbatches))
        gradients = list(chunk_by_chunk(B, list(backwards(range(chunks))), rank, ranks, microbatches))
        first = max(0, min(length(rank, ranks, chunks), len(forwards)))
        yield from forwards[:first]
        for k, gradient in enumerate(gradients):
            yield from forwards[first + k : first + k + 1]
            yield gradient

    return generator


def enough(rank, ranks, chunks):
    return ranks * (chunks - 1) + 2 * (ranks - 1 - rank)


right = interleaved(enough)


def as_built_in(rank, ranks, microbatches, chunks):
    return schedule("interleaved", ranks, microbatches, chunks=chunks).orders[rank]


def as_short_as_1f1b(r, p, v):
    return p - 1 - r if v == 1 else enough(r, p, v)


@pytest.mark.parametrize("answer", [right, as_built_in, interleaved(as_short_as_1f1b)])
def test_any_complete_interleaved_schedule_is_accepted(told, answer):
    assert told("09.3", answer).startswith("Right. That's interleaved 1F1B, complete, as Megatron-LM runs it.")
    assert len(pictures()) == 1, "the learner is shown what was built"


def test_another_order_that_is_as_fast_is_not_called_megatrons(told):
    said = told("09.3", interleaved(lambda r, p, v: enough(r, p, v) + (r > 0)))
    assert said.startswith("Right. That's as fast as Megatron-LM's interleaved 1F1B, in no more memory.")


def test_a_shorter_warmup_is_praised_for_its_memory_and_told_its_price(told):
    said = told("09.3", interleaved(lambda r, p, v: p * (v - 1) + p - 1 - r))
    assert "with less memory than Megatron-LM's: 4 instead of 5.5 microbatches on rank 0." in said
    assert "at a latency of 0.5, yours takes 43.5, and Megatron-LM's 35.5." in said


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_shorter_warmup_is_as_fast_if_messages_take_no_time_and_holds_no_more_than_1f1b(chunks):
    timeline, built_in = (simulate(each) for each in (shorter_warmup(4, 8, chunks), schedule("1f1b", 4, 8)))
    assert timeline.makespan == simulate(schedule("interleaved", 4, 8, chunks=chunks)).makespan
    assert max(timeline.peak_activations) == max(built_in.peak_activations) == 4


def test_the_longer_warmup_hides_messages():
    slow = Costs(latency=0.1)
    longer, shorter = (simulate(s, slow) for s in (schedule("interleaved", 4, 8, chunks=2), shorter_warmup(4, 8, 2)))
    assert (longer.makespan, shorter.makespan) == (pytest.approx(29.9), pytest.approx(31.5))


def test_an_independent_simulation_confirms_makespan_and_peak():
    def orders(rank, ranks, microbatches, chunks):
        return right(rank, ranks, microbatches, chunks)

    yours = build("right", Registered(orders, "loop"), 4, 8, {"chunks": 2})
    rows = stepper.run(yours, lambda action: {"F": 1, "B": 2}[action.op])  # a tick is half a unit
    assert max(end for row in rows for _, _, end in row) / 2 == 28.5
    held = [sum((action.op == "F") - (action.op == "B") for action, *_ in rows[0][: k + 1]) for k in range(32)]
    assert max(held) / 2 == 5.5


WRONG["09.3"] = {
    "the lesson's start": (
        lambda *sizes: [each for each in right(*sizes) if each.op == "F"],
        "with 4 ranks, 8 microbatches and 2 chunks, rank 0: 0B0 is never run",
    ),
    "everything forward first": (
        interleaved(lambda r, p, v: 10**6),
        "your schedule is legal, but rank 0 holds 8 microbatches at its peak, where 5.5 would do: it runs 16 forwards "
        "before its first backward.",
    ),
    "one too many": (
        interleaved(lambda r, p, v: enough(r, p, v) + 1),
        "rank 0 holds 6 microbatches at its peak, where 5.5 would do: it runs 12 forwards before its first backward.",
    ),
    "1F1B's warm-up": (
        interleaved(lambda r, p, v: p - 1 - r),
        ". Rank 0 runs 4 forwards before its first backward, too short a warm-up: a group must pass all chunks before",
    ),
    "one short": (
        interleaved(lambda r, p, v: enough(r, p, v) - (v > 1)),
        "rank 3, position 4: 7B0 needs 7F0, which only comes at position 5",
    ),
    "1F1B's warm-up, in chunks": (
        interleaved(lambda r, p, v: v * (p - 1 - r)),
        "rank 2, position 3: 6B0 needs 6F0, which only comes at position 6",
    ),
    "backwards from the first chunk": (
        interleaved(enough, backwards=iter),
        "Rank 0 begins its backwards with stage 0, but gradients reach stage 4 first.",
    ),
    "the first rank's warm-up on all ranks": (
        interleaved(lambda r, p, v: enough(0, p, v)),
        "your schedule is legal, but takes 51, where 28.5 is possible. Look at the longest wait: rank 0 waits 5.5–10: "
        "4B0 needs 5B0 from rank 1.",
    ),
    "for four ranks": (
        lambda rank, *sizes: right(rank, 4, 8, 2),
        "; use ranks, microbatches and chunks instead of 4, 8 and 2.",
    ),
    "stages next to each other": (
        lambda r, p, m, v: [F(r * v, k) for k in range(m)],
        "rank 1, position 0: 2F0: stage 2 is held by rank 2",
    ),
}


def fixed(rank, ranks, microbatches, chunks):
    return chunk_by_chunk(F, range(2), rank, 4, 8)


WRONG["09.1"] = {
    "for four ranks": (fixed, "use ranks, microbatches and chunks instead of 4, 8 and 2."),
    "the same stage in each chunk": (
        lambda r, p, m, v: [F(r, k) for _ in range(v) for k in range(m)],
        "rank 0 yields 0F0 2 times, and stage 4 never runs: chunk c of a rank is stage c · ranks + rank.",
    ),
}
