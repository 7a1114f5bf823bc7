"""Lesson 4: five timelines, drawn step by step and not all legal, and a formula that is right in two cases alone."""

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
from ppedu.notebook.exercises.common import Exercise, Others, call, equal, listed, mistake, require_function, with_sizes
from ppedu.zoo import schedule

SLOTS = Costs(forward=1, backward=1)

# A line for each rank, a column for each step.
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
    """The timeline in a text: a line for each rank, a word for each step, which is an action or a dot.

    Stage s is on rank s mod ranks; as many stages and microbatches are meant as are named.

    Raises:
        ParseError: a word is neither, there are none, or the ranks do not hold equally many stages.
    """
    rows = tuple(
        tuple(Span(Action.parse(word), step, step + 1) for step, word in enumerate(line.split()) if word not in "·.")
        for line in text.strip().splitlines()
    )
    actions = [span.action for row in rows for span in row]
    if not actions:
        raise ParseError("there is no action in the text; write a line for each rank, such as: 0F0 0F1 · 0B0 0B1")
    stages = 1 + max(action.stage for action in actions)
    if stages % len(rows):
        raise ParseError(
            f"{plural(len(rows), 'line')}, one for each rank, and {plural(stages, 'stage')}; every rank must hold "
            "the same number of stages"
        )
    placement = Placement.make("loop", len(rows), stages // len(rows))
    orders = tuple(tuple(span.action for span in row) for row in rows)
    microbatches = 1 + max(action.microbatch for action in actions)
    return Timeline(Schedule(name, placement, microbatches, orders), rows, SLOTS, "drawn")


# What somebody overlooks who takes an illegal timeline for legal.
OVERLOOKED = {
    "rank": "a rank runs something of a stage that it does not hold",
    "early": "something is drawn before what it needs has ended",
    "missing": "something is never run",
}

WANTED = "'legal', or a rank and its action, such as (2, '2F0')"


def _misjudged(verdicts: Any) -> str | None:
    names = listed(TIMELINES)
    if not isinstance(verdicts, Mapping):
        raise SettingError(f"give a dict with a verdict on each of {names}; got {verdicts!r}")
    for name in verdicts:
        if name not in TIMELINES:
            raise SettingError(f"there is no timeline {name!r}; there is: {names}")
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
    """What is wrong with a verdict; of the timeline's own faults no more than it takes to look again."""
    faults = _faults(timeline)
    if isinstance(verdict, str) and verdict == "legal":
        return f"{timeline.schedule.name} is not legal: {OVERLOOKED[next(iter(faults.values()))]}" if faults else None
    if isinstance(verdict, str) or not isinstance(verdict, (tuple, list)) or len(verdict) != 2:
        raise SettingError(f"give {WANTED}, and not {verdict!r}")
    if isinstance(verdict[0], str):
        raise SettingError(f"a rank is a number, such as 0; got {verdict[0]!r}")
    rank = require_rank(verdict[0], timeline.schedule.ranks)
    try:
        action = Action.parse(str(verdict[1]))
    except ParseError:
        raise SettingError(f"{verdict[1]!r} is no action; write the stage, F or B, and the microbatch: '0B1'") from None
    return None if (rank, action) in faults else _all_right(timeline, rank, action)


def _faults(timeline: Timeline) -> dict[tuple[int, Action], str]:
    """What is wrong with an action on a rank: a key of `OVERLOOKED`."""
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


def _all_right(timeline: Timeline, rank: int, action: Action) -> str:
    """Why nothing is wrong with an action on a rank."""
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
        return f"in {own.name} rank {rank} does not run {action}, and need not: it holds {_stages(own, rank)}{where}"
    before = sorted(cause for cause in ran.values() if set(produces(cause[1].action)) & set(requires(action, place)))
    after = " and ".join(f"{span.action} in step {span.start}" for _, span in before)
    ready = f"what it needs has been run, {after}" if before else "it needs nothing from anybody"
    when = f"in {own.name} rank {rank} runs {action} in step {ran[action][1].start}"
    return f"{when}, and may: it holds stage {action.stage}, and {ready}"


def _stages(own: Schedule, rank: int) -> str:
    held = own.placement.stages_of(rank)
    return f"stage{'s' if len(held) > 1 else ''} {' and '.join(map(str, held))}"


# Ranks and microbatches; of some so many that both the formula and the bubble are small.
SIZES = [(4, 8), (4, 1), (2, 2), (1, 8), (3, 2), (1, 1), (2, 1), (2, 200), (8, 1), (5, 4), (3, 150)]


def published(ranks: int, microbatches: int) -> float:
    """A formula for 1F1B's bubble that is in circulation."""
    return (ranks - 1) / (2 * (microbatches - 1) + ranks)


def _bubble(ranks: int, microbatches: int) -> float:
    return simulate(schedule("1f1b", ranks, microbatches)).bubble


# What people answer, and what they overlook.
OTHER_RANGES: Others = [
    (lambda p, m: False, "A wrong formula can be right in places; that is why it is not noticed"),
    (
        lambda p, m: equal(published(p, m), (p - 1) / m),
        "One rank is also where it equals (p-1)/m, but that is the overhead, the makespan over the time that the "
        "busiest rank works, minus 1; the bubble is the idle share of the makespan",
    ),
]


def _not_where_it_holds(function: Any) -> str | None:
    require_function(function, "ranks", "microbatches")
    said = [_yes_or_no(function, *sizes) for sizes in SIZES]
    for yes, sizes in zip(said, SIZES, strict=True):
        formula, bubble = published(*sizes), _bubble(*sizes)
        if yes == equal(formula, bubble):
            continue
        fault = (
            f"{with_sizes(*sizes)} the formula gives {pretty(formula)}, and the simulation "
            f"{pretty(bubble)}{', too' if not yes else ''}; your function says {yes}"
        )
        close = ". Close is not equal: with many microbatches both are small, and still the one is twice the other"
        return fault + (close if yes and bubble - formula < 0.01 else mistake(said, SIZES, OTHER_RANGES, eq))
    return None


def _yes_or_no(function: Callable[[int, int], Any], ranks: int, microbatches: int) -> bool:
    """The learner's True or False, NumPy's too.

    Raises:
        SettingError: it is something else.
    """
    case = with_sizes(ranks, microbatches)
    answer = call(function, case, ranks, microbatches)
    if str(answer) not in ("True", "False"):
        forgotten = "; is there a return?" if answer is None else ""
        raise SettingError(f"{case} your function gives {answer!r}, where True or False is wanted{forgotten}")
    return str(answer) == "True"


EXERCISES = {
    "04.1": Exercise(
        _misjudged,
        "Four of the five cannot be run as they are drawn. Of E the picture alone is wrong, its orders are legal: this "
        "is when they run.",
        lambda _: simulate(drawn(TIMELINES["E"], "E").schedule, SLOTS),
    ),
    "04.2": Exercise(
        _not_where_it_holds,
        "It is right for one rank, which never waits, and for one microbatch. Everywhere else it is too small, and "
        "with many microbatches by half.",
    ),
}
