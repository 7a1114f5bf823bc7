"""The findings of an autopsy, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from ppedu.core.numeric import plural, pretty
from ppedu.sim import simulate
from ppedu.trace.calibrate import steps_in_words
from ppedu.trace.predict import in_same_memory
from ppedu.trace.replay import by_rank, kind_of

if TYPE_CHECKING:
    from ppedu.trace.autopsy import Autopsy

WORTH = 0.005  # a finding saves at least this part of a step
HEAVY = 1.1  # a stage that takes this much longer than the others is named
OUTLIER = 2  # an action that takes this much longer than most is named
SLOW_LINK = 2  # a link that takes this much longer than the others is named


class Finding(NamedTuple):
    """A change that would make the steps faster.

    Attributes:
        saved: The part of a step that it would save.
        cause: The cause that it removes; see `CAUSES` in `ppedu.trace.autopsy`.
        sentence: The finding in words.
    """

    saved: float
    cause: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def find(autopsy: Autopsy) -> tuple[Finding, ...]:
    """Return the findings that are worth their words, most valuable first."""
    told = {
        "imbalance": _imbalance,
        "slow worker": _slow_worker,
        "variation": _variation,
        "messages": _messages,
        "pauses": _pauses,
        "tail": _tail,
    }
    found = [
        Finding(autopsy.saved[cause], cause, f"{tell(autopsy)} {autopsy.saved[cause]:.1%} of a step")
        for cause, tell in told.items()
        if autopsy.saved[cause] >= WORTH
    ]
    return tuple(sorted([*found, *_other_schedule(autopsy)], key=lambda finding: -finding.saved))


def _imbalance(autopsy: Autopsy) -> str:
    times = _stage_times(autopsy)
    longest, shortest = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
    others = fmean(time for stage, time in times.items() if stage != longest)
    if times[longest] > HEAVY * others:
        return (
            f"stage {longest} takes {times[longest] / others:.1f}× as long as the others: "
            f"{pretty(times[longest], 's')} a microbatch, against {pretty(others, 's')}; even stages would save"
        )
    return (
        f"stages take {pretty(times[shortest], 's')} (stage {shortest}) to {pretty(times[longest], 's')} (stage "
        f"{longest}) a microbatch; even stages would save"
    )


def _stage_times(autopsy: Autopsy) -> dict[int, float]:
    """Return, by stage, the median time of a microbatch: of its forward and its whole backward."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for measured in autopsy.measured:
        totals: defaultdict[int, float] = defaultdict(float)
        for action, time in measured.timed:
            for single in action.singles:
                totals[single.stage] += time / len(action.singles)
        for stage, total in totals.items():
            found[stage].append(total / measured.schedule.microbatches)
    return {stage: median(times) for stage, times in sorted(found.items())}


def _slow_worker(autopsy: Autopsy) -> str:
    run, worst = autopsy.run, autopsy.stragglers[0]
    several = len(run.replicas) > 1
    stages = run.schedule.placement.stages_of(worst.rank)
    held = f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"
    who = f"rank {worst.rank}{f' of replica {worst.replica}' if several else ''} ({held})"
    when = "in all steps" if len(worst.steps) == len(autopsy.steps) else f"in {steps_in_words(worst.steps)}"
    like = "in the other replicas" if several else "in the other steps"
    more = f", like {plural(len(autopsy.stragglers) - 1, 'other rank')}," if len(autopsy.stragglers) > 1 else ""
    return f"{who}{more} takes {worst.factor:.1f}× as long as {like}, {when}; without it, a run would save"


def _variation(autopsy: Autopsy) -> str:
    parts = []  # of the usual time of its kind, that each action takes
    for measured in autopsy.measured:
        usual = measured.usual()
        parts += [(time / (usual[kind_of(action)] or 1), action) for action, time in measured.timed]
    parts.sort()
    tenth = len(parts) // 10
    (low, _), (high, _), (most, longest) = parts[tenth], parts[-1 - tenth], parts[-1]
    usually = f"most of a step take {low:.0%} to {high:.0%} of their stage's usual time"
    alone = f"{longest} once takes {most:.1f} times as long as usual" if most > OUTLIER * high else "microbatches vary"
    return f"{alone}: {usually}; microbatches of equal length would save"


def _messages(autopsy: Autopsy) -> str:
    costs = autopsy.run.costs()
    links = {link: costs.delay(*link) for link in permutations(range(autopsy.run.schedule.ranks), 2)}
    slowest = max(links, key=links.__getitem__)
    usual = median(links.values())
    if links[slowest] > SLOW_LINK * usual:
        return (
            f"a message from rank {slowest[0]} to rank {slowest[1]} takes {pretty(links[slowest], 's')}, others "
            f"{pretty(usual, 's')}; messages that take no time would save"
        )
    return f"a message takes {pretty(usual, 's')}; messages that take no time would save"


def _pauses(autopsy: Autopsy) -> str:
    steps = [[sum(row) for row in by_rank(each.schedule, each.pauses)] for each in autopsy.measured]
    paused = [fmean(times) for times in zip(*steps, strict=True)]
    most = paused.index(max(paused))
    return (
        f"between their actions, ranks pause, most of all rank {most}, {pretty(paused[most], 's')} a step (launches, "
        "garbage collection, late messages); no pauses would save"
    )


def _tail(autopsy: Autopsy) -> str:
    names: defaultdict[str, list[float]] = defaultdict(list)
    for recorded in autopsy.run.steady.values():
        for other in recorded.others:
            names[other.name].append(other.end - other.start)
    longest = sorted(names, key=lambda name: -median(names[name]))[:2]
    shown = ", ".join(f"{name} {pretty(median(names[name]), 's')}" for name in longest)
    return f"what ranks do outside the pipeline{f' ({shown})' if shown else ''} takes"


def _other_schedule(autopsy: Autopsy) -> Iterator[Finding]:
    """Yield the schedule that would save the most in the same memory, with the same stages."""
    run = autopsy.run
    found = dict(in_same_memory(run))
    if not found:
        return
    best = min(found, key=found.__getitem__)
    saved = (1 - found[best] / simulate(run.schedule, run.costs()).makespan) * autopsy.pipeline
    if saved >= WORTH:
        sentence = f"the schedule {best} would save {saved:.1%} of a step, with the same stages in the same memory"
        yield Finding(saved, "warm-up and cooldown", sentence)
