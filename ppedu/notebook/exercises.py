"""Predictions and exercises: `predict`, `outcome`, and `check_answer`, which says what is wrong and why.

An exercise is a function that takes the learner's answer and returns what is wrong with it, in a sentence,
or None; it is known by the lesson's number and its own. It may also be given a reward: the picture of what
the learner has built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from numbers import Real
from textwrap import fill
from typing import Any

from ppedu.core.actions import F
from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import Costs, simulate
from ppedu.core.timeline import Timeline, several, show
from ppedu.zoo import Entry, build, schedule

_predictions: dict[str, Any] = {}


def predict(name: str, value: Any) -> None:
    """Note what you expect `name` to be, before you run anything. `outcome` shows it beside what came out."""
    _predictions[name] = value
    print(f"Noted: {name} = {_say(value)}. Now run it.")


def outcome(name: str, value: Any) -> None:
    """Show `value`, what came out, beside what was predicted for `name`.

    Raises:
        SettingError: nothing was predicted under that name.
    """
    if name not in _predictions:
        raise SettingError(f"nothing was predicted for {name!r}; run its predict cell first")
    said, found = _say(_predictions[name]), _say(value)
    print(f"{name}: you said {said}, it is {found}{' — right.' if said == found else '.'}")


def _say(value: Any) -> str:
    return show(value) if isinstance(value, Real) else str(value)


@dataclass(frozen=True)
class Exercise:
    """`wrong(answer)` gives the reason, or None if the answer is right; `reward(answer)` a timeline to draw."""

    wrong: Callable[[Any], str | None]
    praise: str
    reward: Callable[[Any], Timeline] | None = None


def check_answer(exercise: str, answer: Any) -> None:
    """Say whether `answer` solves the exercise, such as "05.1"; if it does not, what is wrong and why.

    Raises:
        SettingError: there is no such exercise.
    """
    if exercise not in EXERCISES:
        raise SettingError(f"there is no exercise {exercise!r}; there is: {', '.join(EXERCISES)}")
    task = EXERCISES[exercise]
    wrong = find_fault(exercise, answer)
    print(fill(f"Not yet: {wrong}{'' if wrong[-1] in '.?!)' else '.'}" if wrong else f"Right. {task.praise}", 100))
    if not wrong and task.reward:
        task.reward(answer).plot()


def find_fault(exercise: str, answer: Any) -> str | None:
    """What is wrong with an answer, in a sentence; None if it is right."""
    try:
        return EXERCISES[exercise].wrong(answer)
    except PipelineError as error:
        return str(error)


UNIT = Costs(forward=1, backward=1)
# Fewer, as many and more microbatches than ranks; the lesson's own case first.
CASES = [(4, 8), (1, 1), (2, 1), (4, 2), (3, 3), (5, 4), (8, 20)]


def _require_function(answer: Any, *of: str) -> None:
    wanted = f"give a function of {', '.join(of[:-1])} and {of[-1]}"
    if not callable(answer):
        raise SettingError(f"{wanted}, not {answer!r}")
    try:
        signature(answer).bind(*of)
    except TypeError as error:
        raise SettingError(f"{wanted}; yours has {error}") from None


def _case(ranks: int, microbatches: int, *others: str) -> str:
    *first, last = several(ranks, "rank"), several(microbatches, "microbatch"), *others
    return f"with {', '.join(first)} and {last}"


def _ask(function: Any, case: str, *sizes: Any) -> Any:
    """The number that a learner's function gives.

    Raises:
        SettingError: it gives something else, or divides by zero.
    """
    try:
        answer = function(*sizes)
    except ZeroDivisionError:
        raise SettingError(f"{case} your function divides by zero; is it right for any of these?") from None
    if isinstance(answer, bool) or not isinstance(answer, Real):
        forgotten = "; is there a return?" if answer is None else ""
        raise SettingError(f"{case} your function gives {answer!r}, where a number is wanted{forgotten}")
    return answer


def _unlike(number: Any, other: Any) -> str:
    """The number as people write it, but with all its digits where it would look like the other."""
    return str(number) if show(number) == show(other) else show(number)


def _equal(one: Any, other: Any) -> bool:
    return bool(abs(one - other) < 1e-9)


# What people write for GPipe's bubble, p ranks and m microbatches, and what it is instead.
OTHER_BUBBLES: list[tuple[Callable[[int, int], float], str]] = [
    (
        lambda p, m: (p - 1) / m,
        "That is the overhead, the idle time over the working time, which Megatron calls the bubble. The share of the "
        "makespan is less, because the makespan holds the idle time too",
    ),
    (lambda p, m: (p - 1) / p, "That is naive's bubble, where one rank works at a time however many microbatches"),
    (lambda p, m: m / (m + p - 1), "That is the share of the time in which a rank works; the bubble is the rest"),
    (lambda p, m: p - 1, "That is the idle time, in units of F+B; divide it by the makespan in the same units"),
    (
        lambda p, m: p / (m + p),
        "The last rank waits for the ranks before it, and there is one less of these than ranks",
    ),
    (lambda p, m: p / (m + p - 1), "The makespan is right, but only the ranks before the last keep it waiting"),
    (lambda p, m: (p - 1) / (m + p), "The idle time is right; the makespan is that and the working time, no more"),
    (
        lambda p, m: (p - 1) / (2 * (m - 1) + p),
        "This one is in circulation: it counts the forwards and the backwards of the work, but of the wait only one",
    ),
    (
        lambda p, m: (p - 1) / (2 * m + p - 1),
        "It counts the forwards and the backwards of the work, but of the wait only one of the two",
    ),
    (
        lambda p, m: 2 * (p - 1) / (m + 2 * (p - 1)),
        "The wait is counted twice: the last rank waits for p-1 forwards, and then for p-1 backwards; together that is "
        "p-1 times F+B",
    ),
    (lambda p, m: (m - 1) / (m + p - 1), "Ranks and microbatches have changed places"),
    (lambda p, m: 100 * (p - 1) / (m + p - 1), "Give it as a share, between 0 and 1, not in percent"),
]


def _not_the_bubble(formula: Any) -> str | None:
    _require_function(formula, "ranks", "microbatches")
    said, right = [], []
    for ranks, microbatches in CASES:
        said.append(_ask(formula, _case(ranks, microbatches), ranks, microbatches))
        right.append(simulate(schedule("gpipe", ranks, microbatches)))
    wrong = [not _equal(yours, timeline.bubble) for yours, timeline in zip(said, right, strict=True)]
    if not any(wrong):
        return None
    place = wrong.index(True)
    timeline, value = right[place], said[place]
    fault = (
        f"{_case(*CASES[place])} each rank is idle for {timeline.idle[0]} of {timeline.makespan}, a share of "
        f"{show(timeline.bubble)}; your formula says {_unlike(value, timeline.bubble)}"
    )
    for other, why in OTHER_BUBBLES:
        if all(_equal(yours, other(*sizes)) for yours, sizes in zip(said, CASES, strict=True)):
            return f"{fault}. {why}"
    holds = f", although it is right {_case(*CASES[wrong.index(False)])}" if False in wrong[:place] else ""
    return fault + holds


def _learners(generator: Any, ranks: int, microbatches: int) -> Schedule:
    return build("yours", Entry(generator, "loop"), ranks, microbatches, {})


def _not_1f1b(generator: Any) -> str | None:
    _require_function(generator, "rank", "ranks", "microbatches")
    for ranks, microbatches in CASES:
        case = _case(ranks, microbatches)
        yours = _learners(generator, ranks, microbatches)
        if not any(yours.orders):
            return f"{case} your generator yields nothing. Start with the warm-up: which forwards come first?"
        if yours.problems:
            more = len(yours.problems) - 1
            return f"{case}, {yours.problems[0]}" + (f" (and {more} more)" if more else "")
        best = simulate(schedule("1f1b", ranks, microbatches), UNIT)
        timeline = simulate(yours, UNIT)
        slower = timeline.makespan > best.makespan
        if not slower and timeline.peak_activations == best.peak_activations:
            continue
        slots = f"takes {timeline.makespan} slots instead of {best.makespan}" if slower else "no slower"
        for rank, order in enumerate(yours.orders):
            first = next(place for place, action in enumerate(order) if action.op == "B")
            enough = min(ranks - rank, microbatches)
            if first > enough:
                return (
                    f"{case} it is legal and {slots}, but rank {rank} runs {first} forwards before its first backward, "
                    f"where {enough} would do: it holds {timeline.peak_activations[rank]} activations instead of "
                    f"{best.peak_activations[rank]}"
                )
            if first < enough:
                return (
                    f"{case} it is legal, but {slots}: rank {rank} runs {several(first, 'forward')} before its first "
                    f"backward, and then waits; {enough} would keep it busy"
                )
        return (
            f"{case} it is legal, but {slots}, with peaks {_list(timeline.peak_activations)} instead of "
            f"{_list(best.peak_activations)}: the warm-up is right, so look at the order after it"
        )
    return None


def _not_the_peak(formula: Any) -> str | None:
    _require_function(formula, "rank", "ranks", "microbatches")
    for ranks, microbatches in CASES:
        timeline = simulate(schedule("1f1b", ranks, microbatches))
        for rank, peak in enumerate(timeline.peak_activations):
            case = _case(ranks, microbatches)
            said = _ask(formula, case, rank, ranks, microbatches)
            if said != peak:
                return f"{case}, rank {rank} holds {peak} at its peak; your formula says {said!r}"
    return None


# Ranks, microbatches (a multiple of them) and chunks; the lesson's own case first.
DEALT = [(4, 8, 2), (1, 1, 1), (2, 2, 1), (2, 4, 3), (3, 9, 2), (4, 4, 4)]


def _not_depth_first(generator: Any) -> str | None:
    names = ("rank", "ranks", "microbatches", "chunks")
    _require_function(generator, *names)

    def forwards(rank: int, ranks: int, microbatches: int, chunks: int) -> Any:
        return generator(rank, ranks, microbatches, chunks)

    for ranks, microbatches, chunks in DEALT:
        yours = build("yours", Entry(forwards, "loop"), ranks, microbatches, {"chunks": chunks})
        best = schedule("interleaved", ranks, microbatches, chunks=chunks)
        for rank, order in enumerate(yours.orders):
            wanted = tuple(action for action in best.orders[rank] if action.op == "F")
            fault = _not_forwards(order, wanted, rank, best) or _not_in_order(order, wanted, rank, best)
            if fault:
                return f"{_case(ranks, microbatches, several(chunks, 'chunk'))}, {fault}"
    return None


def _not_forwards(order: Any, wanted: Any, rank: int, best: Schedule) -> str | None:
    """What is wrong with the forwards of a rank, whatever their order."""
    if not order:
        return f"your generator yields nothing for rank {rank}"
    stages = best.placement.stages_of(rank)
    for action in order:
        if action.op != "F":
            return f"rank {rank} yields {action}; yield its forwards only, the backwards follow from them"
        if action.stage not in stages:
            held = f"stage{'s' if len(stages) > 1 else ''} {_list(stages)}"
            return f"rank {rank} yields {action}, but holds {held}: stages are dealt out to the ranks in turn"
        if action not in wanted:
            return f"rank {rank} yields {action}, but the microbatches are 0 to {best.microbatches - 1}"
        if order.count(action) > 1:
            return f"rank {rank} yields {action} {order.count(action)} times"
    missing = [action for action in wanted if action not in order]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return f"rank {rank} never yields {missing[0]}{more}"
    return None


def _not_in_order(order: Any, wanted: Any, rank: int, best: Schedule) -> str | None:
    """Where the order of a rank's forwards is not depth first."""
    if order == wanted:
        return None
    place = next(place for place, action in enumerate(order) if action != wanted[place])
    fault = f"forward number {place + 1} of rank {rank} is {order[place]} where depth first has {wanted[place]}. "
    breadth_first = schedule("looped-bfs", best.ranks, best.microbatches, chunks=best.chunks).orders[rank]
    if order == breadth_first[: len(order)]:
        return fault + "Yours is breadth first: all microbatches go through one chunk before the next"
    if order == tuple(F(stage, m) for m in range(best.microbatches) for stage in best.placement.stages_of(rank)):
        return fault + "A microbatch comes back only when it has been to all the other ranks; run others meanwhile"
    return fault + f"Take {several(best.ranks, 'microbatch')} through the first chunk, then the same through the next"


CHUNKS = (1, 2, 3, 4, 6, 12)  # into which the twelve layers of a rank can be cut evenly
# Ranks, microbatches and latency; the lesson's own case first.
DELAYED = [(4, 8, 0.1), (4, 8, 0), (4, 8, 0.02), (4, 8, 1), (2, 8, 0.5), (6, 6, 0.1)]


def _interleaved(ranks: int, microbatches: int, latency: float, chunks: Any) -> Timeline:
    return simulate(schedule("interleaved", ranks, microbatches, chunks=chunks), Costs(latency=latency))


@cache
def _makespans(ranks: int, microbatches: int, latency: float) -> dict[int, Any]:
    """For each number of chunks."""
    return {chunks: _interleaved(ranks, microbatches, latency, chunks).makespan for chunks in CHUNKS}


def _not_the_best_chunks(function: Any) -> str | None:
    _require_function(function, "ranks", "microbatches", "latency")
    cases = [_case(ranks, microbatches, f"a latency of {latency}") for ranks, microbatches, latency in DELAYED]
    said = [_ask(function, case, *sizes) for case, sizes in zip(cases, DELAYED, strict=True)]
    for case, (ranks, microbatches, latency), chunks in zip(cases, DELAYED, said, strict=True):
        takes = _makespans(ranks, microbatches, latency)
        best = min(takes, key=lambda each: takes[each])
        if chunks not in takes:
            makespan = ": that is the makespan; which number of chunks gives it?" if _equal(chunks, takes[best]) else ""
            return f"{case} your function gives {show(chunks)}, which is not one of {_list(CHUNKS)}{makespan}"
        if _equal(takes[chunks], takes[best]):
            continue
        yours = "1 chunk takes" if chunks == 1 else f"{chunks} chunks take"
        fault = f"{case}, {yours} {show(takes[chunks])}, and {best} only {show(takes[best])}"
        if set(said) == {max(CHUNKS)}:
            return f"{fault}. The most chunks have the smallest bubble, but also the most messages, and these take time"
        if set(said) == {1}:
            return f"{fault}. One chunk sends the fewest messages, but has the largest bubble"
        return fault
    return None


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


EXERCISES = {
    "03.1": Exercise(
        _not_the_bubble,
        "A rank works m times F+B, and waits for p-1 times F+B; whatever F and B are, they cancel.",
    ),
    "05.1": Exercise(
        _not_1f1b,
        "That is 1F1B, for any number of ranks and microbatches: this is what you built.",
        lambda generator: simulate(_learners(generator, 4, 8), UNIT),
    ),
    "05.2": Exercise(_not_the_peak, "The peak depends on the distance to the last rank, no longer on the batch."),
    "09.1": Exercise(
        _not_depth_first,
        "That is depth first. With backwards dealt out in the same way, from the last chunk to the first, it is "
        "interleaved 1F1B: here with three chunks.",
        lambda _: simulate(schedule("interleaved", 4, 8, chunks=3)),
    ),
    "09.2": Exercise(
        _not_the_best_chunks,
        "The slower the messages, the fewer chunks. This is the best for 4 ranks, 8 microbatches and a latency of 0.1.",
        lambda function: _interleaved(4, 8, 0.1, function(4, 8, 0.1)),
    ),
}
