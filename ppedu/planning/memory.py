"""The peak memory of each rank for any partition of the model, without a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import mul, sub
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from ppedu.core import Op, Schedule
from ppedu.core.numeric import Number

Held = tuple[int, ...]
# For each stage of a rank, the bytes of a microbatch's activations, and those that I frees; and the bytes of one input.
Sizes = tuple[Sequence[Any], Sequence[Any], Number]
Answer = TypeVar("Answer")


def once(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Keep what a function returns for a schedule, as long as the schedule lives: plans of one model may share it."""
    kept: WeakKeyDictionary[Schedule, dict[tuple[Any, ...], Answer]] = WeakKeyDictionary()

    @wraps(function)
    def asked(schedule: Schedule, *others: Any) -> Answer:
        known = kept.setdefault(schedule, {})
        if others not in known:
            known[others] = function(schedule, *others)
        return known[others]

    return asked


class InFlight(NamedTuple):
    """The activations that a schedule keeps at its peaks. They depend on the order of actions, not on their times.

    A rank's activations are counted in microbatches: of all its stages, the inputs that are kept for recomputation;
    then for each stage the microbatches whose W (or B) has not ended; then, if I frees something, for each stage the
    microbatches whose I (or B) has not ended.

    Attributes:
        stages: By rank, the stages it holds.
        peaks: By rank, what it holds at the moments that may be its peak: no other moment has as much of everything.
        freeing: The same with the last counts; of no rank if no backward is split.
    """

    stages: tuple[tuple[int, ...], ...]
    peaks: tuple[tuple[Held, ...], ...]
    freeing: tuple[tuple[Held, ...], ...]

    def peak(self, rank: int, sizes: Sizes) -> tuple[Held, Any]:
        """Return what a rank holds at its peak, and its bytes."""
        _, freed, _ = sizes
        peaks, each = self.freeing[rank] if self.freeing and any(freed) else self.peaks[rank], self._each(sizes)
        bytes_of = [sum(map(mul, held, each)) for held in peaks]
        most = max(bytes_of)
        return peaks[bytes_of.index(most)], most

    def size(self, held: Held, sizes: Sizes) -> Any:
        """Return the bytes of a rank's activations, which are counted in `held`."""
        return sum(map(mul, held, self._each(sizes)))

    def _each(self, sizes: Sizes) -> list[Any]:
        """Return the bytes of a microbatch for each count."""
        whole, freed, message = sizes
        return [message, *map(sub, whole, freed), *freed] if self.freeing else [message, *whole]


@once
def in_flight(schedule: Schedule, recompute: bool) -> InFlight:
    """Return the activations of a schedule. `recompute` is that of `ppedu.Costs`."""
    stages = tuple(schedule.placement.stages_of(rank) for rank in range(schedule.ranks))
    split = any(single.op is Op.I for order in schedule.orders for action in order for single in action.singles)
    # A forward that is recomputed leaves an input; a backward computes the activations again, from it.
    restored = (1, -1) if recompute else (0, 0)
    started = {Op.F: (0, 1) if recompute else (1, 0), Op.B: restored, Op.I: restored, Op.W: (0, 0)}
    ended = {Op.F: (), Op.B: (0, 1), Op.I: (1,), Op.W: (0,)}  # which of a stage's two counts an end reduces
    peaks, freeing = [], []
    for mine, order in zip(stages, schedule.orders, strict=True):
        place = {stage: 1 + index for index, stage in enumerate(mine)}
        held = [0] * (1 + 2 * len(mine))
        seen: set[Held] = set()
        for action in order:
            singles = [single for single in action.singles if single.op in started]
            for stage, op, _, _ in singles:
                whole, inputs = started[op]
                held[0] += inputs
                held[place[stage]] += whole
                held[place[stage] + len(mine)] += whole
            seen.add(tuple(held))
            for stage, op, _, _ in singles:
                for count in ended[op]:
                    held[place[stage] + count * len(mine)] -= 1
        peaks.append(_largest(each[: 1 + len(mine)] for each in seen))
        if split:
            freeing.append(_largest(seen))
    return InFlight(stages, tuple(peaks), tuple(freeing))


def _largest(held: Iterable[Held]) -> tuple[Held, ...]:
    """Return those that no other exceeds in all their parts."""
    kept: list[Held] = []
    for one in sorted(set(held), reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in kept):
            kept.append(one)
    return tuple(kept)
