"""Costs fitted to timelines: medians, which single slow actions and messages do not change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, permutations
from typing import Any

from ppedu.core import Op, SettingError, produces, requires
from ppedu.core.numeric import ratio
from ppedu.core.validate import require_instance
from ppedu.sim.costs import Costs
from ppedu.sim.per_link import Link
from ppedu.sim.rows import Span
from ppedu.sim.timeline import Timeline

NAMES = {Op.F: "forward", Op.R: "forward", Op.B: "backward", Op.I: "input", Op.W: "weight", Op.U: "update"}
NAMES |= {Op.S: "head", Op.T: "head_backward"}
SAME = 1e-9  # latencies that differ by at most this are one number


def fit(timelines: Sequence[Timeline]) -> Costs:
    """Return the costs of runs of a schedule; see `Costs.fit`. Medians are over all timelines.

    Raises:
        SettingError: `timelines` are not timelines of the same number of ranks and stages.
    """
    such_as = "a list of timelines, such as [pipe.timeline]"
    require_instance("timelines", timelines, Sequence, such_as)
    such_as = "a Timeline, such as a measured run's pipe.timeline or simulate(schedule)"
    for timeline in timelines:
        require_instance("what costs are fitted to", timeline, Timeline, such_as)
    sizes = {(timeline.schedule.ranks, timeline.schedule.stages) for timeline in timelines}
    if len(sizes) != 1:
        found = ", ".join(f"{ranks} ranks and {stages} stages" for ranks, stages in sorted(sizes)) or "no timelines"
        raise SettingError(f"timelines must have the same number of ranks and of stages; got {found}")
    if len(slices := {timeline.schedule.slices for timeline in timelines}) != 1:
        raise SettingError(f"timelines must have the same number of slices; got {sorted(slices)}")
    known = timelines[0].costs
    times: dict[str, Any] = {}
    for name, stages in action_times(timelines).items():
        # A stage that never runs such an action gets the median over the other stages.
        times[name] = [_median(own or chain(*stages)) for own in stages]
    return Costs(
        **times,
        latency=_latency(timelines),
        activation=known.activation,
        weight_memory=known.weight_memory,
        stage_input=known.stage_input,
        unit=known.unit,
        memory_unit=known.memory_unit,
        attention=known.attention,
        lengths=known.lengths,
    )


def action_times(timelines: Sequence[Timeline]) -> dict[str, list[list[Any]]]:
    """Return, by the name of a cost and by stage, the times of all actions with this cost, of whole sequences."""
    slices = timelines[0].schedule.slices
    times: dict[str, list[defaultdict[tuple[int, Op, int], Any]]] = {}
    for step, timeline in enumerate(timelines):
        for action, start, end in chain(*timeline.rows):
            if action.computes:
                with_i = any(part.op is Op.I for part in action.parts)
                name = "overlap_input" if with_i else NAMES.get(action.op, "overlap")
                stages = times.setdefault(name, [defaultdict(int) for _ in range(timeline.schedule.stages)])
                for single in action.singles:
                    stages[single.stage][step, single.op, single.microbatch // slices] += end - start
    return {name: [[*whole.values()] for whole in stages] for name, stages in times.items()}


def _latency(timelines: Sequence[Timeline]) -> Any:
    """Return the latency of each link, or one number if all are equal."""
    samples: defaultdict[Link, list[Any]] = defaultdict(list)
    for timeline in timelines:
        for link, time in _messages(timeline):
            samples[link].append(time)
    if not samples:
        return 0
    found = {link: _median(each) for link, each in samples.items()}
    usual = _median(found.values())
    if max(found.values()) - min(found.values()) <= SAME:
        return usual
    return {link: found.get(link, usual) for link in permutations(range(timelines[0].schedule.ranks), 2)}


def _median(numbers: Iterable[Any]) -> Any:
    """Return the median, exact if the numbers are; that of `statistics` is a float."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else ratio(ordered[middle - 1] + ordered[middle], 2)


def _messages(timeline: Timeline) -> Iterator[tuple[Link, Any]]:
    """Yield the link and the time of each message for which its rank was waiting when it was made.

    The time is that from the end of the action that made it to the start of the action that requires it. If a rank
    waited for two messages at once, it is not known which one came last.
    """
    for rank, before, span, made in inputs(timeline):
        awaited = set()
        for source, end in made:
            waiting = before is None or before.end <= end
            if source != rank and waiting:
                awaited.add((source, end))
        if len(awaited) == 1:
            source, end = awaited.pop()
            if end <= span.start:
                yield (source, rank), span.start - end


def inputs(timeline: Timeline) -> Iterator[tuple[int, Span | None, Span, list[tuple[int, Any]]]]:
    """Yield the rank of each compute span, the span before it, the span, and its inputs.

    An input is the rank on which it was made, and when.
    """
    made: dict[Any, tuple[int, Any]] = {}  # by result
    for rank, row in enumerate(timeline.rows):
        for action, _, end in row:
            made.update(dict.fromkeys(produces(action), (rank, end)))
    placement = timeline.schedule.placement
    for rank, row in enumerate(timeline.rows):
        before: Span | None = None
        for span in row:
            if span.action.computes:
                yield rank, before, span, [made[need] for need in requires(span.action, placement) if need in made]
            if timeline.occupies_rank(span.action):
                before = span
