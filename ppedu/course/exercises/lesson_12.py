"""Lesson 12: the copies of the model, DualPipeV's row of the published table, and the two streams inside a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ppedu.core import Op, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.course.exercises.common import Exercise, call, equal, formulas, idle_time, require_function, tried_on
from ppedu.sim import Costs, simulate
from ppedu.view.look import COLORS
from ppedu.zoo import schedule

# The schedules whose copies are counted; the lesson's own case first.
COUNTED = [
    (schedule("1f1b", 4, 8),),
    (schedule("dualpipe", 4, 8),),
    (schedule("dualpipev", 4, 8),),
    (schedule("zb-v", 4, 8),),
    (schedule("interleaved", 2, 4, chunks=3),),
    (schedule("chimera", 6, 6),),
    (schedule("dualpipev", 3, 6),),
]


def _all_held(schedule: Schedule) -> list[int]:
    """Return the stages that all ranks hold, counted with repetition."""
    return [stage for rank in range(schedule.ranks) for stage in schedule.placement.stages_of(rank)]


# Common wrong answers for the number of copies.
WRONG_COUNTS = formulas(
    "s",
    {
        "len(s.placement.stages_of(0))": "You count the stages on one rank; how many stages is the model cut into?",
        "s.chunks": "chunks is the number of stages of one copy on a rank: it says how finely a copy is cut, not how "
        "many copies there are",
        "len(held(s))": "You count all stages on all ranks; how many make one model?",
        "len(s.placement.stages_of(0)) / s.stages": "That is the fraction of the model that one rank holds; add up all "
        "ranks",
        "len({*held(s)}) / s.stages": "Do you count each stage once? Count a stage twice if two ranks hold it",
    },
    held=_all_held,
)


def _named(schedule: Schedule) -> str:
    return f"for {schedule.name} on {plural(schedule.ranks, 'rank')}"


def _not_the_copies(case: str, value: Any, schedule: Schedule) -> str | None:
    held = len(_all_held(schedule))
    if equal(value, held / schedule.stages):
        return None
    return (
        f"{case} the model is cut into {plural(schedule.stages, 'stage')}, and together the ranks hold "
        f"{held}: {pretty(held / schedule.stages)} of each; your function returns {pretty(value)}"
    )


# (ranks, time of F, time of B, time of W of a share), for which the published formula is exact: F = I, and W is not
# longer. The lesson's own case first.
TIMES = [(4, 1, 2, 1), (8, 1, 2, 1), (3, 2, 4, 2), (5, 4, 6, 2), (1, 1, 2, 1), (6, 3, 4, 1)]

DOUBLED = "You double the times. A rank has two stages, so a stage's times are half of those of its share"
# Common wrong readings of the published (PP/2-1)(F&B+B-3W), with p ranks.
WRONG_ROWS = formulas(
    "p, f, b, w",
    {
        "(p / 2 - 1) * (f + 2 * b - 3 * w)": "That is the idle time of DualPipe on the same number of ranks. In the "
        "table PP counts the stages, and the times are those of a stage: how many stages does DualPipeV have here, and "
        "what fraction of a rank's share is each?",
        "(p - 1) * (f + 2 * b - 3 * w)": "PP is right. But the table's times are those of a stage, and here a stage is "
        "half of a rank's share",
        "(p / 2 - 1) * (f + 2 * b - 3 * w) / 2": "You are right that a stage's times are halves. But PP counts the "
        "stages, and a rank has two",
        "(p - 1) * (max(f, b) + b - 3 * w) / 2": "You let the shorter half of a pair take no time; without overlap F&B "
        "is F+B",
        "(p - 1) * (f + 2 * b - 3 * w) * 2": DOUBLED,
        "(p / 2 - 1) * (f + 2 * b - 3 * w) * 2": DOUBLED,
        "(p - 1) * (f + b)": "That is the idle time of 1F1B",
        "(p - 1) * (f + b - 2 * w)": "That is the idle time of ZB-H1, which the table calls ZB1P",
    },
)


def _idle_time(ranks: int, forward: int, backward: int, weight: int) -> Any:
    costs = Costs(forward=forward, backward=backward, weight=weight)
    return simulate(schedule("dualpipev", ranks, 2 * ranks), costs).idle[0]


# Inside a pair

COMPUTE, NETWORK = "compute", "network"
STREAMS = {"attention": COMPUTE, "dispatch": NETWORK, "experts": COMPUTE, "combine": NETWORK}
Orders = Mapping[str, Sequence[str]]  # stream -> the parts that it runs, in order
Spans = list[tuple[str, str, float, float]]  # stream, part, start, end


class Half(NamedTuple):
    """A part of a forward or a backward. It needs the result of `after`."""

    stream: str
    time: float
    after: str | None


def parts(layers: int = 1) -> dict[str, Half]:
    """Return the parts of a forward, which takes 1, and a backward, 2, through layers of experts, by name.

    A quarter of the time goes to each: attention, dispatch (the tokens travel to their experts), experts, combine (the
    results travel back). A backward passes them in reverse.
    """
    found = {}
    for letter, total, passed in (("F", 1, 1), ("B", 2, -1)):
        chain = [f"{letter} {kind} {layer}" for layer in range(layers) for kind in STREAMS][::passed]
        for before, name in pairwise([None, *chain]):
            if name:
                found[name] = Half(STREAMS[name.split()[1]], total / (4 * layers), before)
    return found


def paired(layers: int = 1) -> dict[str, list[str]]:
    """Return the order of a pair in which each half computes while the other's messages travel."""
    orders: dict[str, list[str]] = {COMPUTE: [], NETWORK: []}
    for layer in range(layers):
        back = layers - 1 - layer
        orders[COMPUTE] += [f"F attention {layer}", f"B experts {back}", f"F experts {layer}", f"B attention {back}"]
        orders[NETWORK] += [f"B combine {back}", f"F dispatch {layer}", f"B dispatch {back}", f"F combine {layer}"]
    return orders


def one_after_the_other(layers: int = 1) -> dict[str, list[str]]:
    """Return the order in which the forward ends before the backward starts."""
    orders: dict[str, list[str]] = {COMPUTE: [], NETWORK: []}
    for name, part in parts(layers).items():
        orders[part.stream].append(name)
    return orders


def simulate_streams(orders: Orders, known: Mapping[str, Half]) -> Spans:
    """Return the spans of the parts, if each starts as soon as its stream is free and its input has arrived.

    Parts that can never start are left out.
    """
    left, free = {stream: list(names) for stream, names in orders.items()}, dict.fromkeys(orders, 0.0)
    ends: dict[str | None, float] = {None: 0.0}
    spans: Spans = []
    moved = True
    while moved:
        moved = False
        for stream, names in left.items():
            while names and known[names[0]].after in ends:
                name = names.pop(0)
                start = max(free[stream], ends[known[name].after])
                ends[name] = free[stream] = start + known[name].time
                spans.append((stream, name, start, ends[name]))
                moved = True
    return spans


def draw_streams(ax: Any, spans: Spans, title: str) -> None:
    """Draw what the processor and the network do: forwards blue, backwards green."""
    for stream, name, start, end in spans:
        row = [COMPUTE, NETWORK].index(stream)
        color = COLORS[Op.F if name[0] == "F" else Op.B]
        ax.barh(row, end - start, left=start, height=0.8, color=color, edgecolor="white")
        words = name.rsplit(" ", 1)[0].replace(" ", "\n")
        ax.text((start + end) / 2, row, words, ha="center", va="center", color="white", fontsize=9)
    ax.set(yticks=[0, 1], yticklabels=[COMPUTE, NETWORK], ylim=(1.5, -0.5))
    ax.set_title(title, loc="left", fontsize=11, weight="bold")
    ax.set_title(f"takes {max(end for *_, end in spans):.2f}", loc="right", fontsize=10)
    ax.set_xlabel("time", fontsize=9, loc="right")
    ax.label_outer()
    ax.tick_params(length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _not_the_streams(function: Any) -> str | None:
    require_function(function, "layers")
    for layers in (1, 2, 3):
        case = f"with {plural(layers, 'layer')}"
        answer = call(function, case, layers)
        two = isinstance(answer, (tuple, list)) and len(answer) == 2
        if not two or not all(isinstance(each, (tuple, list)) for each in answer):
            return f"{case} your function returns {answer!r}; return two lists: the parts of compute, and of network"
        fault = _not_a_pair({COMPUTE: list(answer[0]), NETWORK: list(answer[1])}, layers)
        if fault:
            return f"{case}, {fault}"
    return None


def _not_a_pair(orders: dict[str, list[Any]], layers: int) -> str | None:
    known = parts(layers)
    for stream, names in orders.items():
        for name in names:
            if not isinstance(name, str) or name not in known:
                return f"{name!r} is not a part; parts are named like {next(iter(known))!r}"
            if known[name].stream != stream:
                return f"{name} is in the list of {stream}, but it runs on {known[name].stream}"
            if names.count(name) > 1:
                return f"{name} runs twice"
    missing = [name for name, part in known.items() if name not in orders[part.stream]]
    if missing:
        return f"{missing[0]} is never run" + (f" (and {plural(len(missing) - 1, 'more part')})" if missing[1:] else "")
    spans = simulate_streams(orders, known)
    ran = {name for _, name, *_ in spans}
    stuck = [next(name for name in names if name not in ran) for names in orders.values() if set(names) - ran]
    if stuck:
        waits = " and ".join(f"{name} waits for {known[name].after}" for name in stuck)
        return f"the streams deadlock: {waits}"
    takes, best = max(end for *_, end in spans), sum(part.time for name, part in known.items() if name[0] == "B")
    if takes > best + 1e-9:
        late = _first_wait(spans, known)
        return f"the pair takes {pretty(takes)} units, and {pretty(best)} are possible: {late}"
    return None


def _first_wait(spans: Spans, known: Mapping[str, Half]) -> str:
    """Name the first part that starts later than its input arrives: of the backward if one of its parts waits."""
    ends: dict[str | None, float] = {None: 0.0, **{name: end for _, name, _, end in spans}}
    starts = {name: start for _, name, start, _ in sorted(spans, key=lambda span: span[2])}
    late = [name for name, start in starts.items() if start > ends[known[name].after] + 1e-9]
    name = min(late, key=lambda each: each[0] != "B")
    why = "" if name[0] == "B" else "no part of the backward waits, but the forward ends after it. "
    return f"{why}{name} could start at {pretty(ends[known[name].after])} and starts at {pretty(starts[name])}"


EXERCISES = {
    "12.1": Exercise(
        tried_on(COUNTED, ["schedule"], _named, _not_the_copies, WRONG_COUNTS),
        "DualPipe's ranks hold the model twice. DualPipeV's hold it once, although each has two stages as well.",
        hints=(
            "Each rank holds some stages. How many stages do all ranks hold together, counted with repetition?",
            "Divide that by the number of stages that make one model.",
        ),
    ),
    "12.2": Exercise(
        idle_time({"forward": "F", "backward": "B", "weight": "W"}, TIMES, _idle_time, WRONG_ROWS),
        "That is the published row for p ranks: twice as many stages, each half as long.",
        hints=(
            "How many stages does DualPipeV have on p ranks? That is the table's PP.",
            "A stage is half of a rank's share, so its F, B and W are half as long.",
        ),
    ),
    "12.3": Exercise(
        _not_the_streams,
        "The backward never waits, and the forward fits into its gaps: the pair takes no longer than its backward "
        "alone, however many layers there are.",
        hints=(
            "Start from the picture of one layer. Which layer is the backward in when the forward is in layer 0?",
            "With n layers, the forward's layer k stands beside the backward's layer n-1-k. In each such step, the "
            "order on both streams is that of the picture.",
        ),
    ),
}
