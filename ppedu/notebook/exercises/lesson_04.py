"""Lesson 4: five drawn timelines, not all of them legal, and a formula that is right in two cases only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import eq
from typing import Any

from ppedu.core.actions import Action, Op
from ppedu.core.costs import Costs
from ppedu.core.dependencies import produces, requires
from ppedu.core.errors import ParseError, PipelineError, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Span, Timeline
from ppedu.core.validate import require_rank
from ppedu.notebook.exercises.common import (
    Exercise,
    Mistakes,
    call,
    equal,
    explain_mistake,
    listed,
    missing_return,
    require_function,
    with_sizes,
)
from ppedu.zoo import schedule

SLOTS = Costs(forward=1, backward=1)

# One line per rank, one column per step.
TIMELINES = {
    "A": """\
0F0 0F1 0F2 0F3  ·   ·   ·   ·  0B0 0B2 0B3
 ·  1F0 1F1 1F2 1F3  ·   ·  1B0 1B2 1B3  ·
 ·   ·  2F0 2F1 2F2 2F3 2B0 2B2 2B3  ·   ·""",
    "B": """\
0F0 0F1 2F0 2F1  ·  2B0  ·  1B0 0B0 0B1
 ·  1F0 1F1 3F0 3B0 3F1 3B1 2B1 1B1  ·""",
    "C": """\
0F0 0F1  ·   ·   ·  0B0 0F2  ·   ·  0B1  ·   ·   ·  0B2
 ·  1F0  ·   ·  1B0 1F1  ·   ·  1B1 1F2  ·   ·  1B2  ·
 ·   ·  2F0 2B0  ·   ·  2F1 2B1  ·   ·  2F2 2B2  ·   ·""",
    "D": """\
0F0  ·  0B0 0F1 0B1 0F2  ·  0B2
 ·  1F0 1F1 1B0 1F2 1B1 1B2  ·""",
    "E": """\
0F0 0F1 0F2  ·   ·  0B0  ·  0B1 0B2
 ·  1F0 1F1  ·  1B0 1F2 1B1  ·  1B2
 ·   ·  2F0 2B0 2F1 2B1 2F2 2B2  ·""",
}


def drawn(text: str, name: str = "drawn") -> Timeline:
    """Parse a timeline drawn as text: one line per rank, one word per step, which is an action or a dot.

    Stage s is on rank s mod ranks. The highest stage and microbatch in the text determine their numbers.

    Raises:
        ParseError: a word is neither an action nor a dot, there is no action, or the ranks hold different numbers of
            stages.
    """
    rows = tuple(
        tuple(Span(Action.parse(word), step, step + 1) for step, word in enumerate(line.split()) if word not in "·.")
        for line in text.strip().splitlines()
    )
    actions = [span.action for row in rows for span in row]
    if not actions:
        raise ParseError("there is no action in the text; write one line per rank, such as: 0F0 0F1 · 0B0 0B1")
    stages = 1 + max(action.stage for action in actions)
    if stages % len(rows):
        raise ParseError(
            f"there are {plural(len(rows), 'line')}, one per rank, and {plural(stages, 'stage')}; every rank must "
            "hold the same number of stages"
        )
    placement = Placement.make("loop", len(rows), stages // len(rows))
    orders = tuple(tuple(span.action for span in row) for row in rows)
    microbatches = 1 + max(action.microbatch for action in actions)
    return Timeline(Schedule(name, placement, microbatches, orders), rows, SLOTS, "drawn")


# The kinds of faults, and how they are described to a learner who overlooked one.
OVERLOOKED = {
    "rank": "a rank runs an action of a stage that it does not hold",
    "early": "an action starts before one that it depends on has ended",
    "missing": "an action never runs",
}

WANTED = "'legal', or a rank and its action, such as (2, '2F0')"


def _misjudged(verdicts: Any) -> str | None:
    names = listed(TIMELINES)
    if not isinstance(verdicts, Mapping):
        raise SettingError(f"give a dict with a verdict on each of {names}; got {verdicts!r}")
    for name in verdicts:
        if name not in TIMELINES:
            raise SettingError(f"there is no timeline {name!r}; the timelines are: {names}")
    for name, text in TIMELINES.items():
        if name not in verdicts:
            raise SettingError(f"your verdict on {name} is missing; give {WANTED}")
        try:
            fault = _not_its_fault(drawn(text, name), verdicts[name])
        except PipelineError as error:
            fault = f"for {name}: {error}"
        if fault:
            return fault
    return None


def _not_its_fault(timeline: Timeline, verdict: Any) -> str | None:
    """Explain what is wrong with a verdict, without giving away where the timeline's own faults are."""
    faults = _faults(timeline)
    if isinstance(verdict, str) and verdict == "legal":
        return f"{timeline.schedule.name} is not legal: {OVERLOOKED[next(iter(faults.values()))]}" if faults else None
    if isinstance(verdict, str) or not isinstance(verdict, (tuple, list)) or len(verdict) != 2:
        raise SettingError(f"give {WANTED}, not {verdict!r}")
    if isinstance(verdict[0], str):
        raise SettingError(f"a rank is a number, such as 0; got {verdict[0]!r}")
    rank = require_rank(verdict[0], timeline.schedule.ranks)
    try:
        action = Action.parse(str(verdict[1]))
    except ParseError:
        raise SettingError(
            f"{verdict[1]!r} is not an action; write the stage, F or B, and the microbatch: '0B1'"
        ) from None
    return None if (rank, action) in faults else _why_no_fault(timeline, rank, action)


def _faults(timeline: Timeline) -> dict[tuple[int, Action], str]:
    """Return the faulty actions (rank, action), each with the kind of its fault, a key of `OVERLOOKED`."""
    own, place = timeline.schedule, timeline.schedule.placement
    ends = {result: span.end for row in timeline.rows for span in row for result in produces(span.action)}
    faults = {}
    for rank, row in enumerate(timeline.rows):
        for action, start, _ in row:
            if place.rank(action.stage) != rank:
                faults[rank, action] = "rank"
            elif any(ends.get(need, start) > start for need in requires(action, place)):
                faults[rank, action] = "early"
    for stage in range(own.stages):
        rank = place.rank(stage)
        for microbatch in range(own.microbatches):
            for action in (Action(stage, Op.F, microbatch), Action(stage, Op.B, microbatch)):
                if action not in own.orders[rank]:
                    faults[rank, action] = "missing"
    return faults


def _why_no_fault(timeline: Timeline, rank: int, action: Action) -> str:
    """Explain why there is nothing wrong with an action on a rank."""
    own, place = timeline.schedule, timeline.schedule.placement
    stages, microbatches = range(own.stages), range(own.microbatches)
    if action.op not in ("F", "B") or action.stage not in stages or action.microbatch not in microbatches:
        return (
            f"in {own.name} there is no {action} to run: the stages are 0 to {stages[-1]}, the microbatches 0 to "
            f"{microbatches[-1]}, and each has an F and a B"
        )
    ran = {span.action: (at, span) for at, row in enumerate(timeline.rows) for span in row}
    if action not in own.orders[rank]:
        where = f"; rank {ran[action][0]} runs it" if action in ran else ""
        held = _stages(own, rank)
        return f"in {own.name} rank {rank} does not run {action}, and does not have to: it holds {held}{where}"
    before = sorted(cause for cause in ran.values() if set(produces(cause[1].action)) & set(requires(action, place)))
    after = " and ".join(f"{span.action} in step {span.start}" for _, span in before)
    ready = f"its dependencies have run before, {after}" if before else "it depends on no other action"
    when = f"in {own.name} rank {rank} runs {action} in step {ran[action][1].start}"
    return f"{when}, and that is legal: it holds stage {action.stage}, and {ready}"


def _stages(own: Schedule, rank: int) -> str:
    held = own.placement.stages_of(rank)
    return f"stage{'s' if len(held) > 1 else ''} {' and '.join(map(str, held))}"


# (ranks, microbatches); with many microbatches, both the formula and the bubble are small.
SIZES = [(4, 8), (4, 1), (2, 2), (1, 8), (3, 2), (1, 1), (2, 1), (2, 200), (8, 1), (5, 4), (3, 150)]


def published(ranks: int, microbatches: int) -> float:
    """A formula for 1F1B's bubble that has been published, but is wrong."""
    return (ranks - 1) / (2 * (microbatches - 1) + ranks)


def _bubble(ranks: int, microbatches: int) -> float:
    return simulate(schedule("1f1b", ranks, microbatches)).bubble


# Common wrong answers for where the formula is right.
WRONG_RANGES: Mistakes = [
    (lambda p, m: False, "A wrong formula can be right in some cases; that is why the error goes unnoticed"),
    (
        lambda p, m: equal(published(p, m), (p - 1) / m),
        "You compare with (p-1)/m, which is the overhead: the makespan divided by the time that the busiest rank "
        "works, minus 1. The bubble is the idle fraction of the makespan",
    ),
]


def _not_where_it_holds(function: Any) -> str | None:
    require_function(function, "ranks", "microbatches")
    answers = [_yes_or_no(function, *sizes) for sizes in SIZES]
    for yes, sizes in zip(answers, SIZES, strict=True):
        formula, bubble = published(*sizes), _bubble(*sizes)
        if yes == equal(formula, bubble):
            continue
        fault = (
            f"{with_sizes(*sizes)} the formula gives {pretty(formula)}, and the simulation "
            f"{pretty(bubble)}{', too' if not yes else ''}; your function returns {yes}"
        )
        close = ". Close is not equal: with many microbatches both are small, but the bubble is still twice the formula"
        return fault + (close if yes and bubble - formula < 0.01 else explain_mistake(answers, SIZES, WRONG_RANGES, eq))
    return None


def _yes_or_no(function: Callable[[int, int], Any], ranks: int, microbatches: int) -> bool:
    """Call the learner's function, which should return True or False; NumPy's are accepted as well.

    Raises:
        SettingError: it returns something else.
    """
    case = with_sizes(ranks, microbatches)
    answer = call(function, case, ranks, microbatches)
    if str(answer) not in ("True", "False"):
        raise SettingError(f"{case} your function returns {answer!r}, not True or False{missing_return(answer)}")
    return str(answer) == "True"


EXERCISES = {
    "04.1": Exercise(
        _misjudged,
        "Four of the five cannot run as drawn. In E only the picture is wrong, and its orders are legal: this is when "
        "they really run.",
        lambda _: simulate(drawn(TIMELINES["E"], "E").schedule, SLOTS),
    ),
    "04.2": Exercise(
        _not_where_it_holds,
        "The formula is right for one rank, which never waits, and for one microbatch. Everywhere else it is too "
        "small; with many microbatches it gives half the bubble.",
    ),
}
