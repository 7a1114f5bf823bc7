"""The peak memory and the actions of each rank for any partition of the model, without a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import chain
from operator import mul, sub
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from ppedu.core import Op, Schedule
from ppedu.core.numeric import Number, ratio

# Of the times of pieces.
NAMES = {Op.F: "forward", Op.R: "forward", Op.B: "backward", Op.I: "input", Op.W: "weight"}
Held = tuple[int, ...]
Answer = TypeVar("Answer")


class Sizes(NamedTuple):
    """The bytes that a rank keeps for a microbatch or, if sequences are cut, for the mean slice.

    Args:
        whole, freed: By the rank's stages: of the activations, and those of them that I frees.
        message: Of one input.
        keys: By the rank's stages: of a slice's keys and values, which are not in `whole`.
    """

    whole: Sequence[Any]
    freed: Sequence[Any]
    message: Number = 0
    keys: Sequence[Any] = ()


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

    A rank's activations are counted in microbatches, or tokens of slices: of all its stages, the inputs that are kept
    for recomputation; then, if sequences are cut, for each stage the keys and values of sequences, from the first
    slice's forward to its backward, and their gradients, from the last slice's backward on; then for each stage the
    microbatches whose W (or B) has not ended; then, if I frees something, for each stage the microbatches whose I (or
    B) has not ended.

    Attributes:
        stages: By rank, the stages it holds.
        peaks: By rank, what it holds at the moments that may be its peak: no other moment has as much of everything.
        freeing: The same with the last counts; of no rank if no backward is split.
        tokens: Of each slice; microbatches are counted in these. (1,) if slices are alike, or not cut.
        slices: Of a sequence.
    """

    stages: tuple[tuple[int, ...], ...]
    peaks: tuple[tuple[Held, ...], ...]
    freeing: tuple[tuple[Held, ...], ...]
    tokens: tuple[int, ...]
    slices: int

    def peak(self, rank: int, sizes: Sizes) -> tuple[Held, Any]:
        """Return what a rank holds at its peak, and its bytes."""
        peaks, each = self.freeing[rank] if self.freeing and any(sizes.freed) else self.peaks[rank], self._each(sizes)
        bytes_of = [sum(map(mul, held, each)) for held in peaks]
        most = max(bytes_of)
        return peaks[bytes_of.index(most)], most

    def size(self, held: Held, sizes: Sizes) -> Any:
        """Return the bytes of a rank's activations, which are counted in `held`."""
        return sum(map(mul, held, self._each(sizes)))

    def _each(self, sizes: Sizes) -> list[Any]:
        """Return the bytes of one for each count."""
        each = [sizes.message, *map(sub, sizes.whole, sizes.freed), *sizes.freed]
        if not self.freeing:
            each = [sizes.message, *sizes.whole]
        if self.slices == 1:
            return each
        message, *others = [ratio(size * len(self.tokens), sum(self.tokens)) for size in each]
        return [message, *(self.slices * size for size in sizes.keys), *others]


@once
def in_flight(schedule: Schedule, recompute: bool, tokens: tuple[int, ...] = (1,)) -> InFlight:
    """Return the activations of a schedule.

    Args:
        recompute: As in `ppedu.Costs`: what has no R in the order is recomputed within its backward.
        tokens: Of each slice of a sequence; (1,) if all are alike.
    """
    stages = tuple(schedule.placement.stages_of(rank) for rank in range(schedule.ranks))
    split = any(single.op is Op.I for order in schedule.orders for action in order for single in action.singles)
    # A forward that is recomputed leaves an input. An R or a backward computes the activations again, from it.
    kept = {Op.F: (1, 0), Op.B: (0, 0), Op.I: (0, 0), Op.W: (0, 0)}
    restored = {Op.F: (0, 1), Op.B: (1, -1), Op.I: (1, -1), Op.W: (0, 0)}
    before = {Op.F: (0, 1), Op.R: (1, -1), Op.B: (0, 0), Op.I: (0, 0), Op.W: (0, 0)}
    ended = {Op.F: (), Op.R: (), Op.B: (0, 1), Op.I: (1,), Op.W: (0,)}  # which of a stage's two counts an end reduces
    slices, recomputed = schedule.slices, schedule.recomputed
    peaks, freeing = [], []
    for mine, order in zip(stages, schedule.orders, strict=True):
        cut = len(mine) if slices > 1 else 0  # counts of keys and values
        place = {stage: 1 + cut + index for index, stage in enumerate(mine)}
        held = [0] * (1 + cut + 2 * len(mine))
        seen: set[Held] = set()
        for action in order:
            singles = [single for single in action.singles if single.op in ended]
            for stage, op, number, _ in singles:
                started = before if (stage, number) in recomputed else restored if recompute else kept
                whole, inputs = started[op]
                size = tokens[number % len(tokens)]
                held[0] += inputs * size
                held[place[stage]] += whole * size
                held[place[stage] + len(mine)] += whole * size
                if cut and number % slices == (0 if op is Op.F else slices - 1):
                    held[place[stage] - cut] += op is not Op.W
            seen.add(tuple(held))
            for stage, op, number, _ in singles:
                for count in ended[op]:
                    held[place[stage] + count * len(mine)] -= tokens[number % len(tokens)]
                if cut and op in (Op.B, Op.I) and number % slices == 0:
                    held[place[stage] - cut] -= 2
        peaks.append(_largest(each[: 1 + cut + len(mine)] for each in seen))
        if split:
            freeing.append(_largest(seen))
    return InFlight(stages, tuple(peaks), tuple(freeing), tokens, slices)


def _largest(held: Iterable[Held]) -> tuple[Held, ...]:
    """Return those that no other exceeds in all their parts."""
    kept: list[Held] = []
    for one in sorted(set(held), reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in kept):
            kept.append(one)
    return tuple(kept)


@once
def counts_of(schedule: Schedule) -> list[dict[int, Counter[str]]]:
    """Return for each rank how often it runs which op of which stage."""
    found = []
    for order in schedule.orders:
        counts: dict[int, Counter[str]] = {}
        for single in chain.from_iterable(action.singles for action in order):
            counts.setdefault(single.stage, Counter())[NAMES[single.op]] += 1
        found.append(counts)
    return found


@once
def ends_of(schedule: Schedule) -> list[tuple[int, int | None]]:
    """Return for each rank: the stage of its first action; and that of its last one if this sends a gradient on."""
    found: list[tuple[int, int | None]] = []
    for order in schedule.orders:
        singles = [*order[0].singles, *order[-1].singles] if order else []
        last = singles[-1].stage if singles and singles[-1].op in (Op.B, Op.I) else None
        found.append((singles[0].stage if singles else 0, last))
    return found
