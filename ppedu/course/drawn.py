"""Runs drawn by lot, with a known cause of slowness: to try readers and autopsies on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ppedu.core import Op, Schedule, SettingError
from ppedu.trace.records import Record
from ppedu.trace.replay import Measured, by_rank, travels
from ppedu.zoo import schedule

BETWEEN = 0.01  # seconds from the end of a step to the next one
PLANTED = ("imbalance", "slow worker", "variation", "messages", "pauses")


@dataclass(frozen=True)
class DrawnJob:
    """A training job whose steps are drawn by lot. Times are in seconds.

    Args:
        forward, backward: of a stage; I and W take half of `backward` each.
        noise: the part by which the time of an action varies (standard deviation).
        latency, overhead: of a message; of an action.
        tail: by name, what comes after the last backward of a replica.
        warm_up: steps at the start that take a fifth longer.
        planted: what slows the job down, one of `PLANTED`, and `by` how much:
            "imbalance": the last stage takes 1 + by times as long.
            "slow worker": so does one rank of one replica, in the second half of the steps; with `always`, in all.
            "variation": microbatches have unlike lengths (standard deviation of the logarithm).
            "messages": the link into one rank takes `by` forwards longer.
            "pauses": one action of each rank and step begins `by` forwards late, for garbage collection.
        skew: the most by which the clock of a rank is wrong.
    """

    schedule: Schedule
    replicas: int = 2
    steps: int = 12
    forward: Sequence[float] | float = 0.06
    backward: Sequence[float] | float = 0.12
    noise: float = 0.01
    latency: float = 0.0004
    overhead: float = 0.0001
    tail: tuple[tuple[str, float], ...] = (("grads-reduce-scatter", 0.05), ("optimizer", 0.04))
    warm_up: int = 0
    planted: str | None = None
    by: float = 0.5
    always: bool = False
    skew: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.planted is not None and self.planted not in PLANTED:
            raise SettingError(f"planted must be one of {', '.join(PLANTED)}, or None; got {self.planted!r}")

    def records(self) -> Iterator[Record]:
        """Yield the operations of all steps, as a table of operations has them."""
        chance = random.Random(self.seed)
        slow_replica, slow_rank = chance.randrange(self.replicas), chance.randrange(self.schedule.ranks)
        link = chance.randrange(1, max(2, self.schedule.ranks))
        skews = [[chance.uniform(-self.skew, self.skew) for _ in self.schedule.orders] for _ in range(self.replicas)]
        began = 0.0
        for step in range(self.steps):
            drawn = []
            for replica in range(self.replicas):
                victim = slow_rank if replica == slow_replica else -1
                drawn.append(self._draw(chance, step, link, victim))
            end = max(each.makespan() for each in drawn)
            for replica, measured in enumerate(drawn):
                actions = chain(*self.schedule.orders)
                timed = zip(actions, measured.starts(), measured.lasts, strict=True)
                for rank, row in enumerate(by_rank(self.schedule, timed)):
                    shift = began + skews[replica][rank]
                    for action, start, time in row:
                        yield Record(step, replica, rank, action, str(action), shift + start, shift + start + time)
                    after = shift + end
                    for name, time in self.tail:
                        yield Record(step, replica, rank, None, name, after, after + time)
                        after += time
            began += end + sum(time for _, time in self.tail) + BETWEEN

    def _draw(self, chance: random.Random, step: int, link: int, victim: int) -> Measured:
        """Return a step of a replica. link: the slow one leads to this rank. victim: the rank that may be slow."""
        schedule, stages = self.schedule, self.schedule.stages
        forward, backward = _each(self.forward, stages), _each(self.backward, stages)
        extra = self.by * sum(forward) / stages
        if self.planted == "imbalance":
            forward[-1] *= 1 + self.by
            backward[-1] *= 1 + self.by
        times = {Op.F: forward, Op.B: backward, Op.I: [b / 2 for b in backward], Op.W: [b / 2 for b in backward]}
        sigma = self.by if self.planted == "variation" else 0.0
        lengths = [chance.lognormvariate(0, sigma) for _ in range(schedule.microbatches)]
        lasts: list[float] = []
        pauses: list[float] = []
        for rank, order in enumerate(schedule.orders):
            slower = 1.2 if step < self.warm_up else 1.0
            if self.planted == "slow worker" and rank == victim and (self.always or 2 * step >= self.steps):
                slower *= 1 + self.by
            row = [sum(times[op][stage] * lengths[m] for stage, op, m, _ in action.singles) for action in order]
            lasts += [time * slower * max(0.1, chance.gauss(1, self.noise)) for time in row]
            waits = [0.0 if index == 0 else self.overhead for index in range(len(order))]
            if self.planted == "pauses" and len(order) > 1:
                waits[chance.randrange(1, len(order))] += extra
            pauses += waits

        def latency(sender: int, receiver: int) -> float:
            if self.planted == "messages" and {sender, receiver} == {link - 1, link}:
                return self.latency + extra
            return self.latency

        return Measured(schedule, lasts, pauses, travels(schedule, latency))


def _each(times: Sequence[float] | float, stages: int) -> list[float]:
    return [float(times)] * stages if isinstance(times, int | float) else list(times)


def table_of(records: Iterable[Record]) -> str:
    """Return records as the text of a table of operations, as `ppedu.trace.csv_table` reads it."""
    lines = ["step,replica,rank,operation,start,duration"]
    for step, replica, rank, action, name, start, end in records:
        operation = str(action) if action else name
        quoted = f'"{operation}"' if "," in operation else operation
        lines.append(f"{step},{replica or 0},{rank},{quoted},{start:.6f},{end - start:.6f}")
    return "\n".join([*lines, ""])


# A job like the one of which "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025)
# publishes a trace: 4 stages and 2 replicas, and a last stage that takes too long. Times are rounded from that trace.
CLUSTER = DrawnJob(
    schedule("1f1b", 4, 8),
    forward=(0.067, 0.068, 0.068, 0.139),
    backward=(0.145, 0.145, 0.146, 0.206),
    noise=0.015,
    latency=0.0005,
    overhead=0.0003,
    tail=(("grads-reduce-scatter", 0.055), ("optimizer", 0.043)),
    warm_up=2,
    seed=8,
)
