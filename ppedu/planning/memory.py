"""The peak memory of each rank for any partition of the model, without a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul
from typing import Any, NamedTuple

from ppedu.core import Op, Schedule

Held = tuple[Any, ...]  # for each stage of a rank, twice: its whole activations, and its inputs, in microbatches


class InFlight(NamedTuple):
    """The activations that a schedule keeps at its peaks. They depend on the order of actions, not on their times.

    Attributes:
        stages: By rank, the stages it holds.
        peaks: By rank, its activations at the moments that may be its peak: no other moment has as much of every stage.
    """

    stages: tuple[tuple[int, ...], ...]
    peaks: tuple[tuple[Held, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule, weight_memory: Any = 1, recompute: bool = False) -> InFlight:
        """Return the activations of a schedule. `weight_memory` and `recompute` are those of `ppedu.Costs`."""
        stages = tuple(schedule.placement.stages_of(rank) for rank in range(schedule.ranks))
        restored = (1, -1) if recompute else (0, 0)  # a backward computes the activations again, from the input
        started = {Op.F: (0, 1) if recompute else (1, 0), Op.B: restored, Op.I: restored, Op.W: (0, 0)}
        ended = {Op.F: 0, Op.B: -1, Op.I: weight_memory - 1, Op.W: -weight_memory}
        peaks = []
        for mine, order in zip(stages, schedule.orders, strict=True):
            place = {stage: 2 * index for index, stage in enumerate(mine)}
            held: list[Any] = [0] * (2 * len(mine))
            seen: set[Held] = set()
            for action in order:
                singles = [single for single in action.singles if single.op in started]
                for stage, op, _, _ in singles:
                    whole, inputs = started[op]
                    held[place[stage]] += whole
                    held[place[stage] + 1] += inputs
                seen.add(tuple(held))
                for stage, op, _, _ in singles:
                    held[place[stage]] += ended[op]
            peaks.append(tuple(_largest(seen)))
        return cls(stages, tuple(peaks))

    def peak(self, rank: int, whole: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Held]:
        """Return the bytes of a rank's activations at its peak, and what it then holds.

        Args:
            whole, inputs: By stage, the bytes of a microbatch's activations, and of the input that recomputation keeps.
        """
        each = [size for stage in self.stages[rank] for size in (whole[stage], inputs[stage])]
        return max((sum(map(mul, held, each)), held) for held in self.peaks[rank])

    def size(self, rank: int, whole: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Return the bytes of `peak` alone, sooner."""
        each = [size for stage in self.stages[rank] for size in (whole[stage], inputs[stage])]
        return max([sum(map(mul, held, each)) for held in self.peaks[rank]])


def _largest(held: Iterable[Held]) -> list[Held]:
    """Return those that no other exceeds in all their parts."""
    kept: list[Held] = []
    for one in sorted(held, reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in kept):
            kept.append(one)
    return kept
