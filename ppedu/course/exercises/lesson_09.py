"""Lesson 9: the order of interleaved chunks, the best number of chunks, and the complete schedule."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

from ppedu.core import F, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises.common import (
    Exercise,
    equal,
    formulas,
    learner_schedule,
    listed,
    tried_on,
    with_sizes,
)
from ppedu.course.exercises.schedules import (
    PARAMETERS,
    built,
    schedule_exercise,
    warmup,
    worse_than,
    wrong_schedule,
)
from ppedu.sim import Costs, Timeline, simulate
from ppedu.zoo import schedule
from ppedu.zoo.interleaved import depth_first, equal_groups
from ppedu.zoo.registry import Registered, build

# (ranks, microbatches, chunks), with the microbatches a multiple of the ranks; the lesson's own case first.
DEALT = [(4, 8, 2), (1, 1, 1), (2, 2, 1), (2, 4, 3), (3, 9, 2), (4, 4, 4)]
FIXED = "use ranks, microbatches and chunks instead of 4, 8 and 2"


def shorter_warmup(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return interleaved 1F1B with a shorter warm-up: rank r runs p-1-r + (v-1)p forwards before the first pair.

    Megatron-LM's warm-up is p-1-r forwards longer. The makespan is the same if messages take no time, and the fullest
    rank holds as much as in 1F1B.
    """
    groups = equal_groups(ranks, microbatches)

    def order(rank: int, ranks: int, microbatches: int, chunks: int) -> Any:
        return chain.from_iterable(depth_first(rank, ranks, chunks, groups, warmup=ranks - 1 - rank))

    return build("shorter-warmup", Registered(order, "loop"), ranks, microbatches, {"chunks": chunks})


def _not_depth_first(case: str, yours: Schedule, ranks: int, microbatches: int, chunks: int) -> str | None:
    best = schedule("interleaved", ranks, microbatches, chunks=chunks)
    for rank, order in enumerate(yours.orders):
        wanted = tuple(action for action in best.orders[rank] if action.op == "F")
        if fault := _not_forwards(order, wanted, rank, best) or _not_in_order(order, wanted, rank, best):
            return f"{case}, {fault}"
    return None


def _not_forwards(order: Any, wanted: Any, rank: int, best: Schedule) -> str | None:
    """Explain which forwards of a rank are missing or wrong, whatever their order; return None if none are."""
    if not order:
        return f"your generator yields nothing for rank {rank}"
    stages = best.placement.stages_of(rank)
    for action in order:
        if action.op != "F":
            return f"rank {rank} yields {action}; yield only its forwards, the backwards are added for you"
        if action.stage not in stages:
            held = f"stage{'s' if len(stages) > 1 else ''} {listed(stages)}"
            return f"rank {rank} yields {action}, but holds {held}: the stages are dealt out to the ranks in turn"
        if action not in wanted:
            return f"rank {rank} yields {action}, but the microbatches are 0 to {best.microbatches - 1}; {FIXED}"
        if order.count(action) > 1:
            never = set(stages) - {each.stage for each in order}
            why = f", and stage {min(never)} never runs: chunk c of a rank is stage c · ranks + rank" if never else ""
            return f"rank {rank} yields {action} {order.count(action)} times{why}"
    missing = [action for action in wanted if action not in order]
    if missing:
        more = f" (and {plural(len(missing) - 1, 'more action')})" if len(missing) > 1 else ""
        return f"rank {rank} never yields {missing[0]}{more}"
    return None


def _not_in_order(order: Any, wanted: Any, rank: int, best: Schedule) -> str | None:
    """Explain where the order of a rank's forwards is not depth first; return None if it is."""
    if order == wanted:
        return None
    place = next(place for place, action in enumerate(order) if action != wanted[place])
    fault = f"forward number {place + 1} of rank {rank} is {order[place]}, where depth first has {wanted[place]}. "
    breadth_first = schedule("looped-bfs", best.ranks, best.microbatches, chunks=best.chunks).orders[rank]
    if order == breadth_first[: len(order)]:
        return fault + "Yours is breadth first: all microbatches go through one chunk before the next"
    if order == tuple(F(stage, m) for m in range(best.microbatches) for stage in best.placement.stages_of(rank)):
        return fault + "A microbatch only comes back after passing all other ranks; run others in the meantime"
    return fault + f"Take {plural(best.ranks, 'microbatch')} through the first chunk, then the same through the next"


CHUNKS = (1, 2, 3, 4, 6, 12)  # the divisors of 12, as in the lesson
# (ranks, microbatches, latency); the lesson's own case first.
DELAYED = [(4, 8, 0.1), (4, 8, 0), (4, 8, 0.02), (4, 8, 1), (2, 8, 0.5), (6, 6, 0.1)]


def _interleaved(ranks: int, microbatches: int, latency: float, chunks: Any) -> Timeline:
    return simulate(schedule("interleaved", ranks, microbatches, chunks=chunks), Costs(latency=latency))


@cache
def _makespans(ranks: int, microbatches: int, latency: float) -> dict[int, Any]:
    """Return the makespan for each number of chunks."""
    return {chunks: _interleaved(ranks, microbatches, latency, chunks).makespan for chunks in CHUNKS}


def _best(*sizes: Any) -> int:
    """Return the number of chunks with the least makespan."""
    return min(CHUNKS, key=lambda chunks: _makespans(*sizes)[chunks])


# Common wrong answers for the best number of chunks.
WRONG_CHUNKS = formulas(
    "ranks, microbatches, latency",
    {
        "12": "More chunks mean a smaller bubble, but also more messages, and these take time",
        "1": "One chunk sends the fewest messages, but has the largest bubble",
        "best(4, 8, latency)": "Yours is the best for 4 ranks and 8 microbatches; use ranks and microbatches",
    },
    best=_best,
)


def _with_latency(ranks: int, microbatches: int, latency: float) -> str:
    return with_sizes(ranks, microbatches, f"a latency of {latency}")


def _not_the_best_chunks(case: str, chunks: Any, *sizes: Any) -> str | None:
    takes, best = _makespans(*sizes), _best(*sizes)
    if chunks not in takes:
        makespan = ": that is the makespan; which number of chunks gives it?" if equal(chunks, takes[best]) else ""
        return f"{case} your function returns {pretty(chunks)}, which is not one of {listed(CHUNKS)}{makespan}"
    if equal(takes[chunks], takes[best]):
        return None
    yours = "1 chunk takes" if chunks == 1 else f"{chunks} chunks take"
    return f"{case}, {yours} {pretty(takes[chunks])}, and {best} only {pretty(takes[best])}"


def _not_interleaved(case: str, timeline: Timeline, ranks: int, microbatches: int, chunks: int) -> str | None:
    return worse_than(simulate(schedule("interleaved", ranks, microbatches, chunks=chunks)), case, timeline)


def _why_stuck(yours: Schedule, fault: str) -> str:
    """Add to an explanation why a schedule cannot run, by a rank's first backward."""
    if any(action.microbatch >= yours.microbatches for order in yours.orders for action in order):
        return f"{fault}; {FIXED}"
    backwards = [[k for k, action in enumerate(order) if action.op == "B"] for order in yours.orders]
    firsts = {rank: places[0] for rank, places in enumerate(backwards) if places}
    for rank, first in firsts.items():
        stage, last = yours.orders[rank][first].stage, yours.placement.stages_of(rank)[-1]
        if stage != last:
            begins = f"Rank {rank} begins its backwards with stage {stage}"
            return f"{fault}. {begins}, but gradients reach stage {last} first"
    enough = shorter_warmup(yours.ranks, yours.microbatches, yours.chunks)
    for rank, first in firsts.items():
        if first < warmup(enough.orders[rank]):
            return (
                f"{fault}. Rank {rank} runs {plural(first, 'forward')} before its first backward, too short a warm-up: "
                "a group must pass all chunks before its gradients can come back"
            )
    return fault


def _praise(generator: Any) -> str:
    """Describe a complete schedule, and what its memory costs if it holds less than Megatron-LM's."""
    yours, theirs = learner_schedule(generator, 4, 8, 2), schedule("interleaved", 4, 8, chunks=2)
    held, held_there = (simulate(each).peak_activations[0] for each in (yours, theirs))
    if yours.orders == theirs.orders:
        return "That's interleaved 1F1B, complete, as Megatron-LM runs it. This is what you built."
    if held >= held_there:
        return "That's as fast as Megatron-LM's interleaved 1F1B, in no more memory. This is what you built."
    slow = Costs(latency=0.5)
    return (
        "That's interleaved 1F1B, complete, and with less memory than Megatron-LM's: "
        f"{pretty(held)} instead of {pretty(held_there)} microbatches on rank 0. The price comes with slow messages: "
        f"at a latency of 0.5, yours takes {pretty(simulate(yours, slow).makespan)}, and Megatron-LM's "
        f"{pretty(simulate(theirs, slow).makespan)}. This is what you built."
    )


EXERCISES = {
    "09.1": Exercise(
        tried_on(DEALT, [*PARAMETERS, "chunks"], with_sizes, _not_depth_first, answer_of=built),
        "That is depth first. With backwards in the same order, but from the last chunk to the first, it is "
        "interleaved 1F1B: here with three chunks.",
        lambda _: simulate(schedule("interleaved", 4, 8, chunks=3)),
        hints=(
            "Three loops, one inside the other: over groups, chunks, and the microbatches of a group. Which is the "
            "outermost?",
            "The groups begin at microbatch 0, ranks, 2 · ranks, and so on: range(0, microbatches, ranks).",
        ),
        draw_wrong=wrong_schedule(DEALT),
    ),
    "09.2": Exercise(
        tried_on(DELAYED, ["ranks", "microbatches", "latency"], _with_latency, _not_the_best_chunks, WRONG_CHUNKS),
        "The slower the messages, the fewer chunks. This is the best for 4 ranks, 8 microbatches and a latency of 0.1.",
        lambda function: _interleaved(4, 8, 0.1, function(4, 8, 0.1)),
        hints=(
            "Simulate all six: for these ranks, microbatches and latency, each number of chunks has a makespan.",
            "A schedule is pp.schedule('interleaved', ranks, microbatches, chunks=chunks), its costs are "
            "pp.Costs(latency=latency), and min(…, key=makespan) finds the number with the smallest makespan.",
        ),
    ),
    "09.3": schedule_exercise(
        DEALT,
        _not_interleaved,
        _praise,
        why_illegal=_why_stuck,
        hints=(
            "The backwards take the same groups of microbatches through the chunks, from the last chunk to the first.",
            "After the warm-up, one forward and one backward alternate, as in 1F1B. The remaining backwards come last. "
            "Only the length of the warm-up is new.",
            "How many forwards come before the first pair? A whole group goes through all chunks but the last: "
            "ranks · (chunks - 1). Then a rank runs one more for each rank after it, or, as Megatron-LM does, two.",
        ),
    ),
}
