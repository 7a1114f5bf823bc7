"""Lesson 5: 1F1B, the peak of its memory, a longer warm-up: any right answer is accepted, wrong ones are explained."""

import pytest
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

from ppedu import B, F, I, W

RIGHT = {}
WRONG = {}


# Exercise 1: write 1F1B


def with_warmup(warmup):
    def generator(rank, ranks, microbatches):
        first = warmup(rank, ranks, microbatches)
        for m in range(first):
            yield F(rank, m)
        for m in range(first, microbatches):
            yield F(rank, m)
            yield B(rank, m - first)
        for m in range(microbatches - first, microbatches):
            yield B(rank, m)

    return generator


right = with_warmup(lambda rank, ranks, microbatches: min(ranks - rank - 1, microbatches))


def right_as_a_simulation(rank, ranks, microbatches):
    """Run a backward whenever the rank holds the most it may, or has no microbatch left to start."""
    order, started, ended = [], 0, 0
    while ended < microbatches:
        if started < microbatches and started - ended < ranks - rank:
            order.append(F(rank, started))
            started += 1
        else:
            order.append(B(rank, ended))
            ended += 1
    return order


def right_as_a_tuple(rank, ranks, microbatches):
    return tuple(right(rank, ranks, microbatches))


RIGHT["05.1"] = [right, lambda r, p, m: right(r, p, m), right_as_a_simulation, right_as_a_tuple]


def gpipe(rank, ranks, microbatches):
    for m in range(microbatches):
        yield F(rank, m)
    for m in range(microbatches):
        yield B(rank, m)


def one_at_a_time(rank, ranks, microbatches):
    for m in range(microbatches):
        yield F(rank, m)
        yield B(rank, m)


def no_cooldown(rank, ranks, microbatches):
    warmup = min(ranks - rank - 1, microbatches)
    for m in range(warmup):
        yield F(rank, m)
    for m in range(warmup, microbatches):
        yield F(rank, m)
        yield B(rank, m - warmup)


def backward_first(rank, ranks, microbatches):
    for m in range(microbatches):
        yield B(rank, m)
        yield F(rank, m)


def nothing(rank, ranks, microbatches):
    return
    yield


def endless(rank, ranks, microbatches):
    while True:
        yield F(rank, 0)


def newest_first(rank, ranks, microbatches):
    """Run the right warm-up, but then the backward of the forward that has just run."""
    warmup = min(ranks - rank - 1, microbatches)
    for m in range(warmup):
        yield F(rank, m)
    for m in range(warmup, microbatches):
        yield F(rank, m)
        yield B(rank, m)
    for m in range(warmup):
        yield B(rank, m)


WRONG["05.1"] = {
    "GPipe": (
        gpipe,
        "your schedule is legal, and not slower, but it is GPipe: every rank runs all its forwards before its first "
        "backward, and so holds all 8 activations at once. When could the last rank run its first backward?",
    ),
    "naive": (one_at_a_time, "takes 64 slots instead of 22: rank 0 runs only 1 forward before its first backward"),
    "naive in halves": (
        lambda r, p, m: [action for k in range(m) for action in (F(r, k), I(r, k), W(r, k))],
        "rank 0 runs only 1 forward before its first backward, and then waits for that backward's gradient. It could",
    ),
    "warm-up one short": (
        with_warmup(lambda r, p, m: min(max(p - r - 2, 0), m)),
        "your schedule is legal, but takes 36 slots instead of 22: rank 0 runs only 3 forwards before its "
        "first backward, and then waits for that backward's gradient. It could run more forwards in the meantime.",
    ),
    "warm-up one long": (with_warmup(lambda r, p, m: min(p - r, m)), "holds 5 activations instead of 4"),
    "the same warm-up everywhere": (
        with_warmup(lambda r, p, m: min(p - 1, m)),
        "your schedule is legal, but takes 46 slots instead of 22: rank 1 runs 4 forwards before its first "
        "backward, and holds 4 activations instead of 3. Its warm-up is too long: it waits for",
    ),
    "the newest first": (
        newest_first,
        "takes 55 slots instead of 22: the warm-up is right, so look at the order that follows it. "
        "Rank 0 runs 0B3 before 0B0; run the oldest backward first.",
    ),
    "warm-up longer than the batch": (
        with_warmup(lambda r, p, m: p - r - 1),
        "with 4 ranks and 2 microbatches, rank 0, position 2: 0F2: there is no microbatch 2",
    ),
    "no cooldown": (
        no_cooldown,
        "rank 0: 0B5 is never run (and 5 more problems). The cooldown runs the remaining backwards.",
    ),
    "backward first": (backward_first, "rank 0, position 0: 0B0 needs 0F0, which only comes at position 1"),
    "another rank's stage": (lambda r, p, m: right(0, p, m), "stage 0 is held by rank 0"),
    "nothing": (nothing, "yields nothing. Start with the warm-up"),
    "returns an action": (
        lambda r, p, m: F(r, 0),
        "the schedule 'yours' returned <0F0> for rank 0; it must yield actions: `yield` each",
    ),
    "tuples": (
        lambda r, p, m: [("F", r, 0)],
        "must yield actions, such as pp.F(0, 0): rank 0, position 0: ('F', 0, 0) is",
    ),
    "texts": (lambda r, p, m: [f"F{r}"], "must yield actions, such as pp.F(0, 0): rank 0, position 0: 'F0' is not"),
    "endless": (endless, "actions on rank 0; does its loop end?"),
}


@pytest.mark.parametrize("answer", [nothing, endless, gpipe])
def test_a_reason_ends_with_one_punctuation_mark(told, answer):
    message = told("05.1", answer)
    assert message[-1] in ".?)" and message[-2] not in ".?"


def test_an_error_in_a_line_that_ends_with_a_colon_is_followed_by_one_colon(told):
    def misspelt(rank, ranks, microbatches):
        for m in range(microbatch):  # noqa: F821
            yield F(rank, m)

    assert "`for m in range(microbatch)`: NameError: name 'microbatch'" in told("05.1", misspelt)


# Exercise 2: the peak


RIGHT["05.2"] = {
    "written with min": lambda rank, ranks, microbatches: min(ranks - rank, microbatches),
    "written with if": lambda r, p, m: m if m < p - r else p - r,
    "as a float": lambda r, p, m: float(min(p - r, m)),
}


WRONG_PEAKS = {
    "GPipe's": (
        lambda r, p, m: m,
        "with 4 ranks and 8 microbatches, rank 0 holds 4 at its peak; your formula gives 8. That is GPipe's peak:",
    ),
    "one short": (
        lambda r, p, m: min(p - r - 1, m),
        "gives 3. That is the number of ranks after this one. The steady state begins with one more forward.",
    ),
    "one short and not clamped": (
        lambda r, p, m: p - r - 1,
        "and a rank cannot hold more than there are microbatches.",
    ),
    "one too many": (lambda r, p, m: min(p - r + 1, m), "gives 5. That counts one too many: the last rank frees its"),
    "not clamped": (
        lambda r, p, m: p - r,
        "rank 0 holds 1 at its peak; your formula gives 2. With few microbatches, a",
    ),
    "clamped from below": (lambda r, p, m: max(p - r, m), "Which one is reached first, the larger or the smaller?"),
    "the same on all": (
        lambda r, p, m: min(p, m),
        "rank 1 holds 3 at its peak; your formula gives 4. That is the peak of rank 0. A later rank is closer to the",
    ),
    "the ranks": (lambda r, p, m: p, "That is the peak of rank 0, if there are enough microbatches."),
    "from the other end": (lambda r, p, m: min(r + 1, m), "That is the peak in a pipeline that runs the other way:"),
    "something else": (lambda r, p, m: 4, "rank 1 holds 3 at its peak; your formula gives 4."),
    "forgets return": (lambda r, p, m: None, "is a return missing?"),
}


@pytest.mark.parametrize(("formula", "reason"), WRONG_PEAKS.values(), ids=WRONG_PEAKS)
def test_a_wrong_peak_formula_is_rejected_with_a_counterexample(told, formula, reason):
    message = told("05.2", formula)
    assert message.startswith("Not yet: ") and reason in message


def test_a_single_microbatch_is_named_in_the_singular(told):
    assert "with 2 ranks and 1 microbatch, rank 0" in told("05.2", lambda r, p, m: p - r)


# Exercise 3, optional: no slower than GPipe when messages take half a slot, with at most twice the memory of 1F1B


def eager(most):
    return with_warmup(lambda rank, ranks, microbatches: min(most(rank, ranks) - 1, microbatches))


RIGHT["05.3"] = [eager(lambda rank, ranks: 2 * (ranks - rank) - 1), eager(lambda rank, ranks: 2 * (ranks - rank))]


WRONG["05.3"] = {
    "GPipe": (
        gpipe,
        "with 4 ranks and 8 microbatches, rank 1 holds 8 activations at its peak; 1F1B holds 3 there, so at most 6 are",
    ),
    "1F1B": (
        right,
        "your schedule takes 30 slots, and GPipe 25. That is 1F1B: its microbatches in flight just fill the round trip",
    ),
    "one more": (
        eager(lambda rank, ranks: ranks - rank + 1),
        "Rank 0 is idle for 13 of them. Look at the longest wait: rank 0 waits 5–11: 0B0 needs",
    ),
    "as much as rank 0": (eager(lambda rank, ranks: 2 * ranks), "rank 1 holds 8 activations at its peak"),
    "within rank 0's 1F1B": (
        eager(lambda rank, ranks: min(ranks + 1, 2 * (ranks - rank))),
        "your schedule takes 34 slots, and GPipe 25. Rank 0 is idle for 18 of them.",
    ),
    "longer than the batch": (
        with_warmup(lambda r, p, m: 2 * (p - r - 1)),
        "with 2 ranks and 1 microbatch, rank 0, position 1: 0F1: there is no microbatch 1",
    ),
    "nothing": (nothing, "yields nothing. Start from your 1F1B, and change its warm-up."),
}
