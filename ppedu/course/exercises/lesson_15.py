"""Lesson 15: a plan for a model of one's own, and a partition by rank for a V."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise, product
from typing import Any

from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises.common import Exercise, call, listed, missing_return, require_function
from ppedu.planning.model import Model
from ppedu.planning.plan import Plan
from ppedu.planning.presets import machine_named
from ppedu.sim.partition import by_cost

# The lesson's models: what each piece of the first takes forward, in ms, and the sizes of the second.
TIMES = (0.5, *[12] * 32, 29)
LLAMA = Model(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128_256)
MOST_WAITING = 0.25  # of a step, in a plan that can be defended
BALANCED = "You balanced the stages, not the ranks: a rank works on two of them, and their sum counts"
_chance = random.Random(13)
CASES = [
    (TIMES, 8),
    ((1, 2, 3, 4), 1),
    ((4, 1, 1, 4), 2),
    ((0.5, 3, 3, 3, 3, 9), 2),
    *((tuple(_chance.randint(1, 9) for _ in range(count)), ranks) for count, ranks in ((7, 2), (9, 3), (12, 3))),
]


def ranks_of_v(lengths: Sequence[int], times: Sequence[float]) -> list[float]:
    """Return how long each rank works on a microbatch, if stage s and the one as far from the end are on one rank."""
    stages = _stages(lengths, times)
    return [first + last for first, last in zip(stages, reversed(stages), strict=True)][: len(stages) // 2]


def _stages(lengths: Sequence[int], times: Sequence[float]) -> list[float]:
    """Return how long each stage takes."""
    before = [0, *accumulate(times)]
    return [before[end] - before[begin] for begin, end in pairwise([0, *accumulate(lengths)])]


def least_busiest(times: Sequence[float], ranks: int) -> float:
    """Return the least that the busiest rank of a V can work: the smallest limit for which all pieces find a place.

    For each number of pieces that the ranks so far hold at the front, keep the largest possible number at the back.
    """
    count, front, back = len(times), [0, *accumulate(times)], [0, *accumulate(reversed(times))]

    def fits(limit: float) -> bool:
        most = {0: 0}
        for _ in range(ranks):
            after: dict[int, int] = {}
            for held, end in most.items():
                for more in range(held, count + 1):
                    rest = limit - (front[more] - front[held])
                    if rest < 0:
                        break
                    reached = bisect_right(back, back[end] + rest) - 1
                    after[more] = max(after.get(more, 0), reached)
            most = after
        return any(held + end >= count for held, end in most.items())

    pieces, others = ({end - begin for begin, end in combinations([0, *sums], 2)} for sums in (front, back))
    return min(each for each in {round(a + b, 6) for a, b in product(pieces, others)} if fits(each + 1e-6))


def _not_even_ranks(cut: Any) -> str | None:
    require_function(cut, "times", "ranks")
    for times, ranks in CASES:
        shown = f"times {listed(list(times))}" if len(times) <= 12 else "the lesson's times"
        case = f"with {shown} and {plural(ranks, 'rank')}"
        lengths = call(cut, case, list(times), ranks)
        if hasattr(lengths, "tolist"):
            lengths = lengths.tolist()
        if not isinstance(lengths, Sequence) or not all(type(each) is int and each >= 0 for each in lengths):
            wanted = "a list with the number of pieces in each stage"
            return f"{case} your function returns {lengths!r} instead of {wanted}{missing_return(lengths)}"
        if len(lengths) != 2 * ranks:
            return f"{case} your function returns {plural(len(lengths), 'stage')}; there are two on each rank"
        if sum(lengths) != len(times):
            return f"{case} your stages hold {plural(sum(lengths), 'piece')} in all; the model has {len(times)}"
        loads, least = ranks_of_v(lengths, times), least_busiest(times, ranks)
        if max(loads) > least + 1e-6:
            rank = max(range(ranks), key=loads.__getitem__)
            first, last = lengths[rank], lengths[2 * ranks - 1 - rank]
            fault = (
                f"{case} rank {rank} works {pretty(loads[rank])} on each microbatch, with {plural(first, 'piece')} in "
                f"stage {rank} and {last} in stage {2 * ranks - 1 - rank}; the busiest rank can do with {pretty(least)}"
            )
            best = [len(cut) for cut in by_cost(times, len(lengths))]  # makes the longest stage as short as possible
            balanced = max(_stages(lengths, times)) <= max(_stages(best, times)) + 1e-6
            return f"{fault}. {BALANCED}" if balanced else fault
    return None


def _not_your_plan(plan: Any) -> str | None:
    if not isinstance(plan, Plan):
        return f"give a plan, as pp.plan returns it, not {plan!r}{missing_return(plan)}"
    llama = LLAMA.pieces(4096).timed(machine_named("h100"))
    lessons = TIMES, tuple(piece.forward for piece in llama.pieces) if plan.job.ranks == 4 else ()
    if tuple(piece.forward for piece in plan.job.pieces.pieces) in lessons:
        return "that's the lesson's model; make a plan with the times or the sizes of yours"
    if plan.job.ranks == 1:
        return "one rank is not a pipeline, and never waits; plan for two or more"
    if len({choice.schedule.name for choice in plan.choices if not choice.excess}) == 1:
        return f"{plan.best.name} is the only schedule of your plan that fits; compare it with others"
    if plan.best.bubble > MOST_WAITING:
        return (
            f"with {plan.best.name}, the best of your plan, ranks wait for {plan.best.bubble:.0%} of a step. Get that "
            f"under {MOST_WAITING:.0%}: with more microbatches, fewer ranks, or a schedule that isn't among yours"
        )
    return None


def _decision(plan: Plan) -> str:
    best = plan.best
    fullest = max(map(float, best.memory)) / 1e9
    second = plan.choices[1] if len(plan.choices) > 1 and not plan.choices[1].excess else None
    lead = f", {second.longer(best):.1%} ahead of {second.name}" if second else ""
    return (
        f"For your model on {plural(plan.job.ranks, 'rank')}: {best.name}, "
        f"{pretty(float(best.step_time), plan.job.pieces.unit)} a step, {fullest:.1f} GB on the fullest rank{lead}."
    )


EXERCISES = {
    "15.1": Exercise(
        _not_your_plan,
        _decision,
        hints=(
            'Sizes are enough: pp.Model(layers=…, width=…, heads=…, vocabulary=…) with a machine such as "h100".',
            "With a trace of your run, run.costs() has the times of your stages; divide them by their layers.",
        ),
    ),
    "15.2": Exercise(
        _not_even_ranks,
        "No partition makes the busiest rank work less. For your own runs, `pp.plan` also looks at the order and the "
        "memory.",
        hints=(
            "Add up stages r and 2 · ranks - 1 - r: that's the work of rank r. Rank 0 has the embedding and the head.",
            "Guess a limit, and fill the ranks from rank 0 on: some pieces from the front, the rest from the back, "
            "never more than the limit. If all pieces find a place, the limit is possible.",
            "For one limit: keep, for each number of pieces taken from the front, the largest number that can be taken "
            "from the back. Each rank extends every such pair in all possible ways. Then look for the smallest limit.",
        ),
    ),
}
