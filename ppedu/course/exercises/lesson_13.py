"""Lesson 13: 1F1B on slices of sequences, slices that take equally long, and the best number of chunks of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, sqrt
from numbers import Real
from typing import Any

from ppedu.core import Schedule, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises.common import Exercise, call, enumerated, formulas, missing_return, too_large, tried_on
from ppedu.course.exercises.schedules import schedule_exercise, warmup, worse_than
from ppedu.sim import Timeline, simulate
from ppedu.sim.lengths import shares_of
from ppedu.zoo import schedule

# (ranks, microbatches, slices); the lesson's own case first.
SLICED = [(4, 2, 4), (1, 1, 1), (2, 3, 2), (4, 3, 1), (3, 1, 5), (5, 4, 3)]


def _best(ranks: int, microbatches: int, slices: int) -> Timeline:
    return simulate(schedule("seq1f1b", ranks, microbatches, slices=slices))


def _why_stuck(yours: Schedule, fault: str) -> str:
    """Add to an explanation why a schedule cannot run, by a rank's first backward."""
    if any(action.microbatch >= yours.microbatches for order in yours.orders for action in order):
        return f"{fault}; use ranks, microbatches and slices instead of 4, 2 and 4"
    last = yours.slices - 1
    for rank, order in enumerate(yours.orders):
        first = next((action.microbatch for action in order if action.op == "B"), last)
        if first < last:
            return (
                f"{fault}. Rank {rank} begins its backwards with slice {first}, but later slices add to the gradients "
                f"of its keys and values: begin with slice {last}"
            )
    for rank, order in enumerate(yours.orders):
        if any(action.op == "B" for action in order) and (ran := warmup(order)) <= last:
            return (
                f"{fault}. Rank {rank} runs {plural(ran, 'forward')} before its first backward, which is that of slice "
                f"{last}: all {yours.slices} slices have to run forward before it"
            )
    return fault


# (slices, part of attention); the lesson's own case first.
CUT = [(4, 0.5), (1, 0.5), (2, 1), (3, 0), (8, 0.2), (16, 0.6)]
CLOSE = 1e-3  # so much of its time, a slice may take longer than it should


def _cut_named(slices: int, attention: float) -> str:
    return f"with {plural(slices, 'slice')} and attention={attention}"


def _lengths(function: Any, case: str, slices: int, attention: float) -> list[Any]:
    """Call the learner's function, which should return a number for each slice."""
    answer = call(function, case, slices, attention)
    if isinstance(answer, (list, tuple)) and all(isinstance(each, Real) and not too_large(each) for each in answer):
        return list(answer)
    wanted = f"instead of a list of numbers{missing_return(answer)}"
    raise SettingError(f"{case} your function returns {answer!r} {wanted}")


def _not_equal_times(case: str, lengths: list[Any], slices: int, attention: float) -> str | None:
    if len(lengths) != slices:
        return f"{case} your list has {plural(len(lengths), 'number')}; return {slices}, the length of each slice"
    if not min(lengths) > 0:
        empty = lengths.index(min(lengths))
        return f"{case} slice {empty} has the length {pretty(lengths[empty])}; each must be longer than 0"
    if not isclose(total := sum(lengths), 1, rel_tol=1e-6):
        where = slices > 1 and isclose(lengths[-1], 1) and lengths == sorted(lengths)
        ends = ": these are the places where slices end; how long is each?" if where else ", the whole sequence"
        return f"{case} your lengths add up to {pretty(total)} instead of 1{ends}"
    times = [(1 - attention) * tokens + attention * attended for tokens, attended in shares_of(lengths, slices)]
    if max(times) <= (1 + CLOSE) / slices:
        return None
    short, long = times.index(min(times)), times.index(max(times))
    return (
        f"{case}, slice {short} takes {pretty(times[short])} of a sequence's time, and slice {long} "
        f"takes {pretty(times[long])}; each should take {pretty(1 / slices)}"
    )


def _between(ends: Sequence[float]) -> list[float]:
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _ends(slices: int, attention: float) -> list[float]:
    """Return where slices of equal time end."""
    linear, times = 1 - attention, [cut / slices for cut in range(1, slices + 1)]
    return [2 * time / (linear + sqrt(linear**2 + 4 * attention * time)) for time in times]


# Common wrong answers for the lengths.
WRONG_LENGTHS = formulas(
    "s, a",
    {
        "[1 / s] * s": "These have equal tokens. A later slice attends to more tokens, so it must be shorter",
        "between(ends(s, a))[::-1]": "The lengths are right, but in reverse: the first slice attends to the fewest "
        "tokens, so it is the longest",
        "between(ends(s, 1))": "That is right if all of the time is attention; the rest, 1 - attention, goes by the "
        "length",
        "between([(1 - a) * k / s + a * sqrt(k / s) for k in range(1, s + 1)])": "You take the mean of two cuts, that "
        "for no attention and that for nothing else. But it is the times that add up: solve for the cut",
    },
    between=_between,
    ends=_ends,
)


def _same(yours: list[Any], other: list[float]) -> bool:
    return len(yours) == len(other) and all(isclose(*pair, rel_tol=1e-6) for pair in zip(yours, other, strict=True))


# (ranks, time of a rank for the whole prompt, time that each chunk takes in addition); the lesson's own case first.
PROMPTS = [(4, 0.5, 0.002), (1, 0.5, 0.002), (2, 1, 0.01), (8, 2, 0.005), (16, 1, 0.4), (3, 1, 0.25)]


def _prompt_named(ranks: int, work: float, each: float) -> str:
    return f"with {enumerated([plural(ranks, 'rank'), f'work={work}', f'each={each}'])}"


def _first_token(chunks: int, ranks: int, work: float, each: float) -> float:
    """Return the time of the first token: a rank's work, and a chunk for each other rank."""
    return work + chunks * each + (ranks - 1) * (work / chunks + each)


def _best_chunks(ranks: int, work: float, each: float) -> int:
    root = int(sqrt((ranks - 1) * work / each))
    return min((max(1, root), root + 1), key=lambda chunks: _first_token(chunks, ranks, work, each))


def _not_the_best_chunks(case: str, chunks: Any, *sizes: Any) -> str | None:
    if not chunks >= 1 or chunks % 1:
        near = "; one of the whole numbers around it is the best" if chunks > 1 else ""
        return f"{case} your function returns {pretty(chunks)}; return a whole number of at least 1{near}"
    best = _best_chunks(*sizes)
    yours, least = _first_token(chunks, *sizes), _first_token(best, *sizes)
    if yours <= least + 1e-9:
        return None
    takes = "chunk, the first token comes after" if chunks == 1 else "chunks, the first token comes after"
    return f"{case} and {pretty(chunks)} {takes} {yours:.4g}, and with {best} after {least:.4g}"


# Common wrong answers for the number of chunks.
WRONG_CHUNKS = formulas(
    "p, w, d",
    {
        "1": "A single chunk costs the least, but then the ranks work one after the other",
        "round(sqrt(w / d)) or 1": "What does the last rank wait for? A chunk on each of the other ranks",
        "round(sqrt(p * w / d)) or 1": "The last rank waits for one chunk on each of the *other* ranks",
        "round(w / d)": "Such a chunk costs as much again as its work: too short",
    },
)


EXERCISES = {
    "13.1": schedule_exercise(
        SLICED,
        lambda case, timeline, *sizes: worse_than(_best(*sizes), case, timeline),
        "That is Seq1F1B: with one slice it is 1F1B. This is what you built.",
        hints=(
            "A rank of 1F1B runs ranks - 1 - rank forwards, then a forward and a backward in turn. Here the first "
            "backward is that of the first sequence's last slice. How many more forwards come before it?",
            "The warm-up has ranks - 1 - rank + slices - 1 forwards, or all of them if there are not as many.",
            "The order of the backwards is a list of its own: for each microbatch, "
            "`reversed(range(m * slices, (m + 1) * slices))`.",
        ),
        best=_best,
        why_illegal=_why_stuck,
        cut="slices",
    ),
    "13.2": Exercise(
        tried_on(CUT, ["slices", "attention"], _cut_named, _not_equal_times, WRONG_LENGTHS, _lengths, _same),
        "All slices take the same time. Multiplied by the tokens and rounded, they are `pp.equal_time_slices`.",
        hints=(
            "Find the cuts first, then the lengths between them. Cut k of s ends k slices: up to there, the sequence "
            "takes k/s of its time.",
            "So (1 - attention) · c + attention · c² = k/s. Solve for c, or search: halve an interval from 0 to 1 "
            "forty times.",
            "With b = 1 - attention and t = k/s, the solution is c = 2t / (b + √(b² + 4 · attention · t)). It has no "
            "division by attention, which may be 0.",
        ),
    ),
    "13.3": Exercise(
        tried_on(PROMPTS, ["ranks", "work", "each"], _prompt_named, _not_the_best_chunks, WRONG_CHUNKS),
        "The best number grows with the square root: four times the prompt's work, twice the chunks.",
        hints=(
            "With n chunks of equal time, the first token comes after a rank's own work, `work + n * each`, and one "
            "chunk on each of the other ranks.",
            "You may try all n, from 1 to a few hundred, and take the best: `min(range(1, 1000), key=…)`.",
        ),
    ),
}
