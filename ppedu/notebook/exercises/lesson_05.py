"""Lesson 5: the 1F1B schedule, and the memory it needs."""

from __future__ import annotations

from typing import Any

from ppedu.core.costs import Costs
from ppedu.core.numeric import plural
from ppedu.core.simulate import simulate
from ppedu.notebook.exercises.common import (
    CASES,
    Exercise,
    ask,
    learner_schedule,
    listed,
    not_legal,
    require_function,
    with_sizes,
)
from ppedu.notebook.exercises.wrong_schedule import wrong_schedule
from ppedu.zoo import schedule

UNIT = Costs(forward=1, backward=1)


def _not_1f1b(generator: Any) -> str | None:
    require_function(generator, "rank", "ranks", "microbatches")
    for ranks, microbatches in CASES:
        case = with_sizes(ranks, microbatches)
        yours = learner_schedule(generator, ranks, microbatches)
        if fault := not_legal(yours, case, ". Start with the warm-up: which forwards come first?"):
            return fault
        best = simulate(schedule("1f1b", ranks, microbatches), UNIT)
        timeline = simulate(yours, UNIT)
        slower = timeline.makespan > best.makespan
        if not slower and timeline.peak_activations == best.peak_activations:
            continue
        slots = f"but takes {timeline.makespan} slots instead of {best.makespan}" if slower else "and not slower"
        fault = f"{case} your schedule is legal, {slots}"
        warmup = f"{fault}{':' if slower else ', but'} rank"
        for rank, order in enumerate(yours.orders):
            first = next(place for place, action in enumerate(order) if action.op != "F")
            enough = min(ranks - rank, microbatches)
            if first > enough:
                return (
                    f"{warmup} {rank} runs {first} forwards before its first backward, where {enough} would be "
                    f"enough, and holds {timeline.peak_activations[rank]} activations instead of "
                    f"{best.peak_activations[rank]}"
                )
            if first < enough:
                return (
                    f"{warmup} {rank} runs only {plural(first, 'forward')} before its first backward, and then "
                    f"waits. It could run more in the meantime: with {enough}, 1F1B is not slower than GPipe"
                )
        return (
            f"{fault}, with peaks {listed(timeline.peak_activations)} instead of {listed(best.peak_activations)}: "
            "the warm-up is right, so look at the order that follows it"
        )
    return None


def _not_the_peak(formula: Any) -> str | None:
    require_function(formula, "rank", "ranks", "microbatches")
    for ranks, microbatches in CASES:
        timeline = simulate(schedule("1f1b", ranks, microbatches))
        for rank, peak in enumerate(timeline.peak_activations):
            case = with_sizes(ranks, microbatches)
            answer = ask(formula, case, rank, ranks, microbatches)
            if answer != peak:
                return f"{case}, rank {rank} holds {peak} at its peak; your formula gives {answer!r}"
    return None


EXERCISES = {
    "05.1": Exercise(
        _not_1f1b,
        "That is 1F1B, for any number of ranks and microbatches. This is what you built.",
        lambda generator: simulate(learner_schedule(generator, 4, 8), UNIT),
        draw_wrong=wrong_schedule(CASES, UNIT, lambda *case: simulate(schedule("1f1b", *case), UNIT)),
    ),
    "05.2": Exercise(
        _not_the_peak,
        "The peak is the distance to the last rank, plus one. The number of microbatches only matters if it is smaller "
        "than that.",
    ),
}
