"""Lesson 4: a slide and five drawn timelines, not all of them possible, and a formula that is right in two cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from ppedu.core import (
    Action,
    B,
    F,
    Op,
    ParseError,
    PipelineError,
    Placement,
    Schedule,
    SettingError,
    produces,
    requires,
)
from ppedu.core.numeric import plural, pretty
from ppedu.core.validate import require_rank
from ppedu.course.exercises.common import (
    Exercise,
    call,
    enumerated,
    equal,
    formulas,
    listed,
    missing_return,
    require_function,
    tried_on,
    with_sizes,
)
from ppedu.sim import Costs, Span, Timeline, simulate
from ppedu.view.lineup import Lineup
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


# The stages that the ranks of each timeline hold.
HELD = {
    **dict.fromkeys("ACDE", "rank r holds stage r"),
    "B": "rank 0 holds stages 0 and 2, rank 1 holds 1 and 3",
}

# A 1F1B as slides show it: all ranks end in the same step. Six backwards start too early.
SLIDE = """\
0F0 0F1 0F2 0F3  ·   ·   ·  0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
 ·  1F0 1F1 1F2  ·   ·  1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
 ·   ·  2F0 2F1  ·  2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
 ·   ·   ·  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"""


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


def slide() -> Timeline:
    """Return the timeline of the slide."""
    return drawn(SLIDE, "1F1B, as on the slide")


def lineup() -> Lineup:
    """Return the five timelines as a widget in which a click gives a verdict; see exercise 04.1."""
    return Lineup({name: drawn(text, name) for name, text in TIMELINES.items()}, HELD)


def _misjudged(verdicts: Any) -> str | None:
    names = listed(TIMELINES)
    if not isinstance(verdicts, Mapping):
        raise SettingError(f"give a dict with a verdict on each of {names}; got {verdicts!r}")
    for name in verdicts:
        if name not in TIMELINES:
            raise SettingError(f"there is no timeline {name!r}; the timelines are: {names}")
    if missing := [name for name in TIMELINES if name not in verdicts]:
        raise SettingError(f"judge all five timelines first; a verdict is missing on {listed(missing)}")
    right, accused = 0, []  # an overlooked fault is only counted: its reason would give away the answer
    for name, text in TIMELINES.items():
        timeline = drawn(text, name)
        try:
            accusation = _accusation(verdicts[name], timeline.schedule.ranks)
        except PipelineError as error:
            raise SettingError(f"for {name}: {error}") from None
        faults = _faults(timeline)
        if accusation in faults or not (accusation or faults):
            right += 1
        elif accusation:
            accused.append(_why_no_fault(timeline, *accusation))
    if right == len(TIMELINES):
        return None
    counted = f"{right} of your {len(TIMELINES)} verdicts {'is' if right == 1 else 'are'} right"
    return ". ".join([counted, *accused[:1]])


def _accusation(verdict: Any, ranks: int) -> tuple[int, Action] | None:
    """Return the rank and the action that a verdict accuses; None if the verdict is "legal".

    Raises:
        SettingError: the verdict is neither.
    """
    if isinstance(verdict, str) and verdict == "legal":
        return None
    if not isinstance(verdict, (tuple, list)) or len(verdict) != 2:
        raise SettingError(f"give 'legal', or a rank and its action, such as (2, '2F0'), not {verdict!r}")
    rank, action = verdict
    if isinstance(rank, str):
        raise SettingError(f"a rank is a number, such as 0; got {rank!r}")
    try:
        return require_rank(rank, ranks), Action.parse(str(action))
    except ParseError:
        raise SettingError(f"{action!r} is not an action; write the stage, F or B, and the microbatch: '0B1'") from None


def _faults(timeline: Timeline) -> set[tuple[int, Action]]:
    """Return the faulty actions, each with its rank: run on the wrong rank, too early, or never on the right rank."""
    own, early = timeline.schedule, premature(timeline)
    ran = {(rank, action) for rank, order in enumerate(own.orders) for action in order}
    wanted = {
        (own.placement.rank(stage), Action(stage, op, microbatch))
        for stage, op, microbatch in product(range(own.stages), (Op.F, Op.B), range(own.microbatches))
    }
    return (ran ^ wanted) | {(rank, action) for rank, action in ran if action in early}


def _needed(timeline: Timeline, action: Action) -> list[Span]:
    """Return the actions on which an action depends, with their times."""
    wanted = set(requires(action, timeline.schedule.placement))
    return [span for row in timeline.rows for span in row if wanted & set(produces(span.action))]


def premature(timeline: Timeline) -> dict[Action, Span]:
    """Return the actions that start before one that they depend on has ended, each with the one that ends last."""
    found = {}
    for row in timeline.rows:
        for action, start, _ in row:
            last = max(_needed(timeline, action), key=lambda span: span.end, default=None)
            if last and last.end > start:
                found[action] = last
    return found


def early_marks(timeline: Timeline) -> set[tuple[int, int]]:
    """Return the rank and the position of each action that starts too early, as `Timeline.plot` takes them."""
    early = premature(timeline)
    orders = timeline.schedule.orders
    return {(rank, place) for rank, order in enumerate(orders) for place, each in enumerate(order) if each in early}


def _why_no_fault(timeline: Timeline, rank: int, action: Action) -> str:
    """Explain, as a new sentence, why there is nothing wrong with an action on a rank."""
    own = timeline.schedule
    if action.op not in ("F", "B") or not (
        0 <= action.stage < own.stages and 0 <= action.microbatch < own.microbatches
    ):
        return (
            f"In {own.name} there is no {action} to run: the stages are 0 to {own.stages - 1}, the microbatches 0 to "
            f"{own.microbatches - 1}, and each has an F and a B"
        )
    ran = {span.action: (at, span.start) for at, row in enumerate(timeline.rows) for span in row}
    if action not in own.orders[rank]:
        stages = own.placement.stages_of(rank)
        held = f"stage{'s'[: len(stages) - 1]} {enumerated(map(str, stages))}"
        where = f"; rank {ran[action][0]} runs it" if action in ran else ""
        return f"In {own.name} rank {rank} does not run {action}, and does not have to: it holds {held}{where}"
    before = enumerated(f"{span.action} in slot {span.start}" for span in _needed(timeline, action))
    ready = f"its dependencies have run before, {before}" if before else "it depends on no other action"
    when = f"In {own.name} rank {rank} runs {action} in slot {ran[action][1]}"
    return f"{when}, and that is legal: it holds stage {action.stage}, and {ready}"


# (ranks, microbatches); with many microbatches, both the formula and the bubble are small.
SIZES = [(4, 8), (4, 1), (2, 2), (1, 8), (3, 2), (1, 1), (2, 1), (2, 200), (8, 1), (5, 4), (3, 150), (2, 3000)]


def published(ranks: int, microbatches: int) -> float:
    """A formula for 1F1B's bubble that has been published, but is wrong."""
    return (ranks - 1) / (2 * (microbatches - 1) + ranks)


# Common wrong answers for where the formula is right.
WRONG_RANGES = formulas(
    "p, m",
    {
        "False": "A wrong formula can be right in some cases; that is why the error goes unnoticed. Try the smallest "
        "sizes",
        "p == 1": "With one rank it is right, but there are more such cases",
        "m == 1": "With one microbatch it is right, but there are more such cases",
        "p == 1 and m == 1": "That is one such case of many: change one of the two sizes",
    },
)


def _not_where_it_holds(case: str, yes: bool, *sizes: int) -> str | None:
    formula, bubble = published(*sizes), simulate(schedule("1f1b", *sizes)).bubble
    if yes == equal(formula, bubble):
        return None
    gives = f"{case} the formula gives {pretty(formula)}, and the simulation {pretty(bubble)}"
    if yes and bubble - formula < 0.01:
        close = "Close is not equal: with many microbatches both are small, but the bubble is still twice the formula"
        return f"{gives}; your function returns True. {close}"
    return f"{gives}{'' if yes else ', too'}; your function returns {yes}"


def _yes_or_no(function: Any, case: str, *sizes: int) -> bool:
    """Call the learner's function, which should return True or False; NumPy's are accepted as well.

    Raises:
        SettingError: it returns something else.
    """
    answer = call(function, case, *sizes)
    if str(answer) not in ("True", "False"):
        raise SettingError(f"{case} your function returns {answer!r}, not True or False{missing_return(answer)}")
    return str(answer) == "True"


def _to_judge() -> dict[str, Timeline]:
    """Return complete timelines by name, for the check of 04.3."""
    uneven = Costs(forward=[1, 0.5, 1.5, 1], backward=[2, 1.25, 2.5, 2])
    slow = (Span(F(0, 0), 0, 1), Span(B(0, 0), 4, 6)), (Span(F(1, 0), 1, 2), Span(B(1, 0), 2, 5))
    return {
        "the slide": slide(),
        "a 1F1B that is possible": simulate(schedule("1f1b", 4, 8), SLOTS),
        "E": drawn(TIMELINES["E"], "E"),
        "a backward before its own forward": drawn("0F0 ·   ·   0B0\n·   1B0 1F0 ·"),
        "a forward too early": drawn("0F0 0F1 ·   ·   0B0 0B1\n1F0 ·   1F1 1B0 1B1 ·"),
        "a backward that starts before the next stage's has ended": replace(drawn("0F0 0B0\n1F0 1B0"), rows=slow),
        "two stages on each rank": simulate(schedule("interleaved", 2, 4), SLOTS),
        "a timeline with uneven times": simulate(schedule("gpipe", 4, 5), uneven),
    }


def _misses_early_actions(function: Any) -> str | None:
    require_function(function, "timeline")
    for name, timeline in _to_judge().items():
        case = f"for {name}"
        early, found = premature(timeline), _found(function, case, timeline)
        spans = {span.action: span for row in timeline.rows for span in row}
        for action, span in spans.items():
            starts = f"{action}, which starts at {pretty(span.start)}"
            if action in early and action not in found:
                cause = f"{early[action].action}, on which it depends, ends at {pretty(early[action].end)}"
                return f"{case}, your function does not list {starts}, while {cause}"
            if action in found and action not in early:
                ends = enumerated(f"{each.action} at {pretty(each.end)}" for each in _needed(timeline, action))
                ready = f"what it depends on has ended, {ends}" if ends else "it depends on no other action"
                return f"{case}, your function lists {starts}; {ready}"
        if others := found - spans.keys():
            return f"{case}, your function lists {next(iter(others))}, which does not run there"
    return None


def _found(function: Any, case: str, timeline: Timeline) -> set[Action]:
    """Return the actions that the learner's function finds, given as Actions or as text.

    Raises:
        SettingError: it returns something else, or looks up an action of a stage that does not exist.
    """
    try:
        found = call(function, case, timeline)
    except SettingError as error:
        key = error.__context__.args[0] if isinstance(error.__context__, KeyError) else None
        if not isinstance(key, Action) or key.stage in range(timeline.schedule.stages):
            raise
        raise SettingError(
            f"{error}. Stage {key.stage} does not exist: a forward of the first stage depends on no other action, and "
            "a backward of the last stage only on its own forward"
        ) from None
    try:
        return {Action.of(each) for each in found}
    except (TypeError, ParseError):
        wanted = f"not a list of actions{missing_return(found)}"
        raise SettingError(f"{case} your function returns {found!r}, {wanted}") from None


EXERCISES = {
    "04.1": Exercise(
        _misjudged,
        "Four of the five cannot run as drawn. In E only the picture is wrong, and its orders are legal: this is when "
        "they really run.",
        lambda _: simulate(drawn(TIMELINES["E"], "E").schedule, SLOTS),
        (
            "Go through the four conditions one at a time. Start with the first: count the forwards and the backwards "
            "of each rank.",
            "Then check the ranks: in B, all that begins with 1 or 3 belongs to rank 1. In the others, a rank's "
            "actions begin with its own number.",
            "For the rest, take each backward and find the backward of the same microbatch in the next stage. It must "
            "have *ended* when the first one starts. Being slow is not a fault.",
        ),
    ),
    "04.2": Exercise(
        tried_on(SIZES, ["ranks", "microbatches"], with_sizes, _not_where_it_holds, WRONG_RANGES, _yes_or_no),
        "The formula is right for one rank, which never waits, and for one microbatch. Everywhere else it is too "
        "small; with many microbatches it gives half the bubble.",
        hints=(
            "For p and m from 1 to 4, print the formula and `pp.simulate(pp.schedule('1f1b', p, m)).bubble` side by "
            "side.",
            "Lesson 3's formula is right: (p-1)/(m+p-1). Two fractions with the same numerator are equal if their "
            "denominators are, or if the numerator is 0.",
        ),
    ),
    "04.3": Exercise(
        _misses_early_actions,
        "Six boxes of the slide come too early. This is how its orders really run.",
        lambda _: simulate(replace(slide().schedule, name="the slide's orders, as they run"), SLOTS),
        (
            "First make a dict of all ends: `ends = {span.action: span.end for row in timeline.rows for span in row}`.",
            "Then visit every action again. A forward has one dependency, `pp.F(stage - 1, microbatch)`; a backward "
            "has two, `pp.F(stage, microbatch)` and `pp.B(stage + 1, microbatch)`. The first and the last stage have "
            "one fewer: use `ends.get(dependency, 0)`.",
        ),
    ),
}
