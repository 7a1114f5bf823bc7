"""A training job as the finale's cases describe it: what it runs, on which machines, and what goes wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ppedu.core import Schedule, check, replay
from ppedu.core.numeric import pretty
from ppedu.sim import Costs, Timeline, simulate, simulate_partial
from ppedu.trace.records import Other, Recorded
from ppedu.trace.run import Run

if TYPE_CHECKING:  # the package must import without torch
    from ppedu.course.exercises.silent import Trained

REPLICAS, STEPS = 2, 3
NOISE = 0.01  # times vary by this part
ENOUGH = 1.05  # a step may take this many times as long as it should
EXACT = 1e-4  # gradients may be off by this part
GB_PER_LAYER = 0.2  # the activations of one sequence


@dataclass(frozen=True)
class Setup:
    """A job of REPLICAS pipelines. Times are in seconds, memory in GB.

    Args:
        layers: The number of layers in each stage.
        lengths: The length of each sequence of a replica's batch, 1 on average. A microbatch has equally many of them.
        layer_time: The forward of one layer for a sequence of length 1; each half of the backward takes as long.
        hop: The time of a message.
        exchange: The time of adding up the gradients of two copies of the model.
        goal: The time of a step that these machines allow.
        room: The memory of a rank for activations.
        slow: By (replica, rank), how many times as long a node takes.
        cables: By two ranks, the time of a message.
        stalls: By rank, how many layer times it stops once in each step.
        bug, bug_at: An exhibit of the bug museum, and its ranks; see `silent.train`.
    """

    schedule: Schedule
    layers: tuple[float, ...]
    lengths: tuple[float, ...]
    layer_time: float
    hop: float
    exchange: float = 0.0
    goal: float = 0.0
    room: float = 0.0
    slow: Mapping[tuple[int, int], float] = field(default_factory=dict)
    cables: Mapping[tuple[int, int], float] = field(default_factory=dict)
    stalls: Mapping[int, float] = field(default_factory=dict)
    bug: str = ""
    bug_at: Any = None

    @property
    def ranks(self) -> int:
        return self.schedule.ranks

    @property
    def plan(self) -> Setup:
        """The same schedule and layers without any trouble: sound machines, and sequences of equal lengths."""
        return replace(self, slow={}, cables={}, stalls={}, lengths=(1.0,) * len(self.lengths))

    @property
    def hangs(self) -> bool:
        """Whether a step has no end, or lacks an action."""
        return bool(self.schedule.problems) or bool(self.crossed)

    @cached_property
    def crossed(self) -> list[Any]:
        """The problems with sends that wait for their receives."""
        return (
            check(self.schedule, transport="rendezvous") if self.schedule.lowered and not self.schedule.problems else []
        )

    def costs(self, replica: int = 0, random: Random | None = None) -> Costs:
        """Return the costs of one step of a replica; `random` lets them vary."""
        each = len(self.lengths) // self.schedule.microbatches
        lengths = [sum(self.lengths[m * each : (m + 1) * each]) for m in range(self.schedule.microbatches)]
        stalls = {rank: (random or Random(0)).randrange(len(lengths)) for rank in self.stalls}

        def times(op: str) -> list[list[float]]:
            return [[time(op, stage, m) for m in range(len(lengths))] for stage in range(self.schedule.stages)]

        def time(op: str, stage: int, m: int) -> float:
            rank = self.schedule.placement.rank(stage, m)
            lasts = self.layers[stage] * lengths[m] * self.slow.get((replica, rank), 1.0)
            if op == "F" and stalls.get(rank) == m:
                lasts += self.stalls[rank]
            return self.layer_time * lasts * (random.uniform(1 - NOISE, 1 + NOISE) if random else 1)

        ranks = range(self.ranks)
        latency = {(a, b): self.cables.get((min(a, b), max(a, b)), self.hop) for a in ranks for b in ranks if a != b}
        forward, inputs, weights = map(times, "FIW")
        activation = [GB_PER_LAYER * layers * each for layers in self.layers]
        return Costs(
            forward, input=inputs, weight=weights, latency=latency, activation=activation, unit="s", memory_unit="GB"
        )

    @property
    def tail(self) -> float:
        return self.exchange if self.schedule.placement.copies > 1 else 0.0

    @cached_property
    def step(self) -> float:
        """The time of a step: of its slowest replica, with the exchange of gradients between copies."""
        unlike = range(REPLICAS) if self.slow else [0]
        times = [float(simulate(self.schedule, self.costs(replica)).makespan) for replica in unlike]
        return max(times) + self.tail

    @cached_property
    def peaks(self) -> list[float]:
        """The most activations that each rank holds, in GB."""
        return [float(peak) for peak in simulate(self.schedule, self.costs()).peak_activations]

    @property
    def overflows(self) -> bool:
        """Whether a rank needs more memory than it has."""
        return max(self.peaks) > self.room

    @property
    def late(self) -> bool:
        """Whether a step takes longer than these machines allow."""
        return self.step > self.goal * ENOUGH

    def measured(self, seed: int) -> Run:
        """Return STEPS steps of this job, as if they had been recorded."""
        recorded = {}
        for step, replica in product(range(STEPS), range(REPLICAS)):
            costs = self.costs(replica, Random(f"{seed} {step} {replica}"))
            timeline = _without_costs(simulate(self.schedule, costs))
            end = timeline.end
            ranks = range(self.ranks) if self.tail else ()
            others = (Other(rank, "gradients of both copies", end, end + self.tail) for rank in ranks)
            recorded[step, replica] = Recorded(timeline, tuple(others))
        return Run(recorded)

    @cached_property
    def halted(self) -> list[int]:
        """By rank, how many actions it has run when nothing happens any more."""
        blocked = replay(self.schedule.numbered, rendezvous=bool(self.crossed)).blocked
        return [blocked[rank][0] if rank in blocked else len(row) for rank, row in enumerate(self.schedule.orders)]

    def stuck(self) -> Timeline:
        """Return what the ranks have done when nothing happens any more."""
        orders = tuple(order[:end] for order, end in zip(self.schedule.orders, self.halted, strict=True))
        return _without_costs(simulate_partial(replace(self.schedule, orders=orders), self.costs()))

    def waiting(self) -> list[str]:
        """Describe what each rank does when nothing happens any more."""
        return [
            f"rank {rank} is at {order[end]}" if end < len(order) else f"rank {rank} has finished"
            for rank, (order, end) in enumerate(zip(self.schedule.orders, self.halted, strict=True))
        ]

    @property
    def trained(self) -> Trained:
        """The losses and gradients of this job's training program."""
        from ppedu.course.exercises.silent import train

        return train(self.ranks, self.bug, self.bug_at)

    def failing(self) -> dict[str, str]:
        """Return what is not as it should be, by goal, each with a sentence: order, messages, memory, time, gradients.

        A job that hangs has no times and no memory. One that only looks fast, because a faster schedule hides that it
        takes longer than planned, fails in its time, too.
        """
        if problems := self.schedule.problems:
            return {"order": f"pp.check still finds {len(problems)} of: {problems[0]}"}
        if self.crossed:
            return {"messages": f"with sends that wait for their receives, {self.crossed[0]}"}
        failing = {}
        if self.overflows:
            most = self.peaks.index(max(self.peaks))
            failing["memory"] = f"rank {most} keeps {pretty(max(self.peaks))} GB, and has {pretty(self.room)}"
        planned = self.plan.step
        if self.late:
            failing["time"] = f"a step takes {pretty(self.step, 's')}, and {pretty(self.goal, 's')} is possible"
        elif self.step > planned * ENOUGH:
            failing["time"] = (
                f"a step takes {pretty(self.step, 's')}, where this schedule should take {pretty(planned, 's')}: the "
                "trouble is hidden, and still there"
            )
        off, rank = max((max(each), rank) for rank, each in enumerate(self.trained.off)) if self.bug else (0, 0)
        if off > EXACT:
            failing["gradients"] = f"gradients are off by up to {off:.0%}, on rank {rank}"
        return failing


def _without_costs(timeline: Timeline) -> Timeline:
    """Return a simulation as if it had been recorded: its costs, which tell the fault, are not known."""
    costs = Costs(activation=timeline.costs.activation, unit="s", memory_unit="GB")
    return replace(timeline, costs=costs, source="measured")


def spread(layers: Sequence[float], old: Schedule, new: Schedule) -> tuple[float, ...]:
    """Return the layers of each stage of another schedule. The number of layers on a rank stays.

    A stage that two ranks hold, in two copies of the model, gets the mean.
    """
    if old.placement == new.placement:
        return tuple(layers)
    share = old.stages / old.ranks
    held = [fmean(layers[stage] for stage in old.placement.stages_of(rank)) * share for rank in range(old.ranks)]
    placed: list[list[float]] = [[] for _ in range(new.stages)]  # by stage, the layers of each rank that holds it
    for rank, layers_of_rank in enumerate(held):
        for stage in new.placement.stages_of(rank):
            placed[stage].append(layers_of_rank)
    return tuple(fmean(each) * new.ranks / new.stages for each in placed)
