"""Lesson 13: orders on slices, lengths of equal time and numbers of chunks; wrong ones are rejected with the reason."""

import csv
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest
import stepper
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

import ppedu as pp
from ppedu import B, F
from ppedu.course.exercises.lesson_13 import CUT, PROMPTS, SLICED, _best_chunks, _first_token
from ppedu.notebook import heron
from ppedu.zoo.registry import Registered, build

RIGHT = {}
WRONG = {}


def in_turn(warmup, backwards=reversed):
    """Return 1F1B on slices with `warmup(rank, ranks, slices)` forwards before the first pair."""

    def generator(rank, ranks, microbatches, slices):
        back = [k for m in range(microbatches) for k in backwards(range(m * slices, (m + 1) * slices))]
        first = min(warmup(rank, ranks, slices), len(back))
        yield from (F(rank, k) for k in range(first))
        for place, number in enumerate(back):
            if first + place < len(back):
                yield F(rank, first + place)
            yield B(rank, number)

    return generator


def enough(r, p, s):
    return p - 1 - r + s - 1


right = in_turn(enough)
RIGHT["13.1"] = {
    "a generator": right,
    "the built-in one": lambda r, p, m, s: pp.schedule("seq1f1b", p, m, slices=s).orders[r],
    "fewer at the last ranks": lambda r, p, m, s: list(
        in_turn(lambda r, p, s: max(s - 1, enough(r, p, s)))(r, p, m, s)
    ),
}
WRONG["13.1"] = {
    "what the lesson starts with": (
        lambda r, p, m, s: [F(r, k) for k in range(m * s)] + [B(r, k) for k in reversed(range(m * s))],
        "with 4 ranks, 2 microbatches and 4 slices your schedule is legal, but rank 0 holds 2 microbatches at its "
        "peak, where 1.75 would do: it runs 8 forwards before its first backward.",
    ),
    "backwards from the first slice": (
        in_turn(enough, backwards=iter),
        "Rank 0 begins its backwards with slice 0, but later slices add to the gradients of its keys and values: begin "
        "with slice 3.",
    ),
    "the warm-up of 1F1B": (
        in_turn(lambda r, p, s: p - 1 - r),
        "Rank 1 runs 3 forwards before its first backward, which is that of slice 3: all 4 slices have to run forward",
    ),
    "the warm-up of 1F1B, in whole sequences": (
        in_turn(lambda r, p, s: (p - 1 - r) * s + s - 1),
        "rank 0 holds 2 microbatches at its peak, where 1.75 would do: it runs 8 forwards before its first backward.",
    ),
    "one too many": (
        in_turn(lambda r, p, s: enough(r, p, s) + 1),
        "rank 0 holds 2 microbatches at its peak, where 1.75 would do",
    ),
    "only enough slices": (
        in_turn(lambda r, p, s: s - 1),
        "your schedule is legal, but takes 17.25, where 8.25 is possible. Look at the longest wait: rank ",
    ),
    "for four slices": (
        lambda r, *_: right(r, 4, 2, 4),
        "; use ranks, microbatches and slices instead of 4, 2 and 4.",
    ),
    "without backwards": (lambda r, p, m, s: [F(r, k) for k in range(m * s)], "0B0 is never run"),
    "a list instead": ([F(0, 0)], "give a function of rank, ranks, microbatches and slices, not "),
}


@pytest.mark.parametrize("sizes", SLICED)
def test_an_independent_simulation_confirms_makespan_and_peak(sizes):
    """A step is (m + (p - 1) / s) · (F + B); a rank holds p - 1 - r + s slices."""
    ranks, microbatches, slices = sizes
    yours = build(
        "right",
        Registered(lambda r, p, m, slices: right(r, p, m, slices), "loop"),
        ranks,
        microbatches,
        {"slices": slices},
    )
    rows = stepper.run(yours, lambda action: {"F": 1, "B": 2}[action.op])  # a tick is a slice's F
    assert max(row[-1][-1] for row in rows) == 3 * (microbatches * slices + ranks - 1)
    held, most = 0, 0
    for action, *_ in rows[0]:
        held += 1 if action.op == "F" else -1
        most = max(most, held)
    assert most == min(ranks - 1 + slices, microbatches * slices)


def halved(slices, attention):
    """Find each cut by halving an interval."""
    ends = [0.0]
    for k in range(1, slices + 1):
        low, high = ends[-1], 1.0
        for _ in range(60):
            middle = (low + high) / 2
            late = (1 - attention) * middle + attention * middle**2 > k / slices
            low, high = (low, middle) if late else (middle, high)
        ends.append(high)
    return [end - start for start, end in pairwise(ends)]


def whole_tokens(slices, attention):
    return [each / 10**6 for each in pp.equal_time_slices(10**6, slices, attention)]


def ends_of(slices, attention):
    lengths = halved(slices, attention)
    return [sum(lengths[: k + 1]) for k in range(slices)]


RIGHT["13.2"] = [halved, whole_tokens, lambda s, a: tuple(halved(s, a))]
WRONG["13.2"] = {
    "what the lesson starts with": (
        lambda s, a: [1 / s] * s,
        "with 4 slices and attention=0.5, slice 0 takes 0.1562 of a sequence's time, and slice 3 takes 0.3438; each "
        "should take 0.25. These have equal tokens. A later slice attends to more tokens, so it must be shorter.",
    ),
    "in reverse": (lambda s, a: halved(s, a)[::-1], "The lengths are right, but in reverse"),
    "nothing but attention": (lambda s, a: halved(s, 1), "That is right if all of the time is attention"),
    "a mean of cuts": (
        lambda s, a: [(1 - a) * (k / s - (k - 1) / s) + a * (sqrt(k / s) - sqrt((k - 1) / s)) for k in range(1, s + 1)],
        "You take the mean of two cuts",
    ),
    "where slices end": (
        ends_of,
        "your lengths add up to 2.807 instead of 1: these are the places where slices end; how long is each?",
    ),
    "tokens": (lambda s, a: [1000] * s, "your lengths add up to 4000 instead of 1, the whole sequence."),
    "the cuts": (lambda s, a: halved(s, a)[1:], "your list has 3 numbers; return 4, the length of each slice."),
    "an empty slice": (lambda s, a: [1, *[0] * (s - 1)], "slice 1 has the length 0; each must be longer than 0."),
    "for one attention": (lambda s, a: halved(s, 0.5), "with 2 slices and attention=1, slice "),
    "not a number": (lambda s, a: [float("nan")] * s, "slice 0 has the length nan; each must be longer than 0."),
    "nothing": (lambda s, a: None, "returns None instead of a list of numbers; is a return missing?"),
    "a number": (lambda s, a: 0.25, "your function returns 0.25 instead of a list of numbers."),
    "a generator": (lambda s, a: (yield 1), "instead of a list of numbers; write return in place of yield."),
    "divides by attention": (
        lambda s, a: [1 / s / a] * s if a == 0 else halved(s, a),
        "with 3 slices and attention=0 your function fails at line",
    ),
}


@pytest.mark.parametrize(("slices", "attention"), CUT)
def test_such_slices_leave_no_more_idle_time_than_those_without_attention(slices, attention):
    made = pp.schedule("seq1f1b", ranks=4, microbatches=2, slices=slices)
    costs = pp.Costs(attention=attention, lengths=halved(slices, attention))
    assert pp.simulate(made, costs).makespan == pytest.approx(float(pp.simulate(made).makespan))


def tried(ranks, work, each):
    return min(range(1, 1000), key=lambda n: work + n * each + (ranks - 1) * (work / n + each))


RIGHT["13.3"] = [tried, lambda p, w, d: float(tried(p, w, d))]
WRONG["13.3"] = {
    "what the lesson starts with": (
        lambda p, w, d: 512,
        "with 4 ranks, work=0.5 and each=0.002 and 512 chunks, the first token comes after 1.533, and with 27 after "
        "0.6156.",
    ),
    "one": (lambda p, w, d: 1, "and 1 chunk, the first token comes after 2.008, and with 27 after 0.6156. A single"),
    "without the other ranks": (
        lambda p, w, d: round(sqrt(w / d)) or 1,
        "What does the last rank wait for? A chunk on each of the other ranks.",
    ),
    "all ranks": (
        lambda p, w, d: round(sqrt(p * w / d)) or 1,
        "one chunk on each of the *other* ranks".replace("*", ""),
    ),
    "not whole": (
        lambda p, w, d: sqrt((p - 1) * w / d),
        "your function returns 27.39; return a whole number of at least 1; one of the whole numbers around it is",
    ),
    "none": (
        lambda p, w, d: int(sqrt((p - 1) * w / d)),
        "with 1 rank, work=0.5 and each=0.002 your function returns 0;",
    ),
}


@pytest.mark.parametrize("sizes", PROMPTS)
def test_the_formula_for_the_first_token_is_that_of_a_simulated_prefill(sizes):
    ranks, work, each = sizes
    best = _best_chunks(*sizes)
    assert best == tried(*sizes)
    costs = pp.Costs(work, attention=0.5)
    for chunks in {best, 7}:
        run = pp.prefill(ranks, 10**6, chunks, costs, equal_time=True, decode=each)
        assert run.time_to_first_token == pytest.approx(_first_token(chunks, *sizes), rel=1e-4)


LONG = replace(heron, sequence=131_072)


def test_the_numbers_that_the_lesson_states_without_computing_them():
    now, step = (pp.simulate(pp.schedule("1f1b", 8, m), each.costs(8)) for m, each in ((32, heron), (2, LONG)))
    assert 32 * heron.sequence == 2 * LONG.sequence, "a step has the same tokens"
    assert (round(now.bubble, 3), round(step.bubble, 2)) == (0.214, 0.78)
    assert LONG.peak(step) == pytest.approx(88, abs=0.5) and heron.memory == 80e9
    assert (step.busy[0], step.makespan) == pytest.approx((7.4, 33.9), abs=0.05)
    parts = [2 * each.sequence * heron.width / (2 * heron.layer_weights) for each in (heron, LONG)]  # attention by rest
    assert parts[0] / (1 + parts[0]) == pytest.approx(0.08, abs=0.005) and parts[1] > 1
    sixteen = pp.simulate(pp.schedule("seq1f1b", 4, 2, slices=16))
    assert (round(sixteen.bubble, 3), max(sixteen.peak_activations)) == (0.086, 19 / 16)
    assert pp.equal_time_slices(131_072, 4, 0.5)[0] / 131_072 == pytest.approx(0.37, abs=0.005)
    assert min(pp.equal_time_slices(131_072, 32, 4 / 7)) == 2626


def test_what_the_lesson_says_of_llama_3():
    with (Path(__file__).parents[1] / "published" / "llama3.csv").open(encoding="utf-8") as file:
        _, short, long = [
            {name: each[name] for name in ("sequence", "global_batch", "replicas", "context")}
            for each in csv.DictReader(file)
        ]
    assert short == {"sequence": "8192", "global_batch": "2048", "replicas": "128", "context": "1"}
    assert long == {"sequence": "131072", "global_batch": "128", "replicas": "8", "context": "16"}
