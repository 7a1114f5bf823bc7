"""Activations in flight, and versions of weights: both follow from the order of the actions alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import chain
from operator import mul, sub
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from ppedu.core import Action, Op, Schedule, require_schedule
from ppedu.core.actions import COPIES
from ppedu.core.numeric import Number, plural, ratio

# Of the times of pieces.
NAMES = {Op.F: "forward", Op.R: "forward", Op.B: "backward", Op.I: "input", Op.W: "weight"}
Held = tuple[int, ...]
Moment = tuple[Action, bool]  # that an action starts or, if True, ends
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
    """Return the activations of a schedule without copies.

    Args:
        recompute: As in `ppedu.Costs`: what has no R in the order is recomputed within its backward.
        tokens: Of each slice of a sequence; (1,) if all are alike.
    """
    moments = [[(action, ends) for action in order for ends in (False, True)] for order in schedule.orders]
    return peaks_of(schedule, recompute, tokens, moments)


def peaks_of(
    schedule: Schedule, recompute: bool, tokens: tuple[int, ...], moments: Iterable[Iterable[Moment]]
) -> InFlight:
    """Return the activations of a schedule if each rank has these moments."""
    stages = tuple(schedule.placement.stages_of(rank) for rank in range(schedule.ranks))
    split = any(single.op is Op.I for order in schedule.orders for action in order for single in action.singles)
    peaks, freeing = [], []
    for mine, row in zip(stages, moments, strict=True):
        seen = {*held_at(schedule, mine, recompute, tokens, row)}
        peaks.append(_largest(each[: len(each) - len(mine)] for each in seen))
        if split:
            freeing.append(_largest(seen))
    return InFlight(stages, tuple(peaks), tuple(freeing), tokens, schedule.slices)


def held_at(
    schedule: Schedule, mine: Sequence[int], recompute: bool, tokens: tuple[int, ...], moments: Iterable[Moment]
) -> Iterator[Held]:
    """Yield what a rank with the stages `mine` holds after each start among its moments; see `InFlight`."""
    # A forward that is recomputed leaves an input. An R or a backward computes the activations again, from it.
    none = dict.fromkeys((Op.W, Op.O), (0, 0))
    kept = {Op.F: (1, 0), Op.B: (0, 0), Op.I: (0, 0), Op.L: (1, 0), **none}
    restored = {Op.F: (0, 1), Op.B: (1, -1), Op.I: (1, -1), **none}
    before = {Op.F: (0, 1), Op.R: (1, -1), Op.B: (0, 0), Op.I: (0, 0), **none}
    # Which of a stage's two counts an end reduces.
    ended = {Op.F: (), Op.R: (), Op.L: (), Op.B: (0, 1), Op.O: (0, 1), Op.I: (1,), Op.W: (0,)}
    slices, recomputed = schedule.slices, schedule.recomputed
    cut = len(mine) if slices > 1 else 0  # counts of keys and values, which stay where they are
    place = {stage: 1 + cut + index for index, stage in enumerate(mine)}
    held = [0] * (1 + cut + 2 * len(mine))
    for action, ends in moments:
        for stage, op, number, _ in action.singles:
            if op not in ended:
                continue
            size = tokens[number % len(tokens)]
            if ends:
                for count in ended[op]:
                    held[place[stage] + count * len(mine)] -= size
                if cut and op in (Op.B, Op.I) and number % slices == 0:
                    held[place[stage] - cut] -= 2
                continue
            started = before if (stage, number) in recomputed else restored if recompute else kept
            whole, inputs = started[op]
            held[0] += inputs * size
            held[place[stage]] += whole * size
            held[place[stage] + len(mine)] += whole * size
            if cut and op not in (Op.W, *COPIES) and number % slices == (0 if op is Op.F else slices - 1):
                held[place[stage] - cut] += 1
        if not ends:
            yield tuple(held)


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


class Versions(NamedTuple):
    """The versions of each stage's weights, counted from 0; each U makes the next one.

    Attributes:
        used: `used[stage][microbatch]` is the version in its forward, and so in its backward: weights are stashed until
            then (arXiv 1806.03377).
        stepped: That to which its gradient is applied.
        held: By stage, the most versions that it holds at once: those of microbatches between their forward and the end
            of their backward, and the latest.
    """

    used: tuple[tuple[int, ...], ...]
    stepped: tuple[tuple[int, ...], ...]
    held: tuple[int, ...]

    @property
    def staleness(self) -> tuple[tuple[int, ...], ...]:
        """By stage and microbatch, the updates between its forward and the one that uses its gradient."""
        rows = zip(self.stepped, self.used, strict=True)
        return tuple(tuple(to - at for to, at in zip(*row, strict=True)) for row in rows)

    def __str__(self) -> str:
        late = max(map(max, self.staleness))
        return f"{plural(max(self.held), 'version')} of the weights, gradients up to {plural(late, 'update')} late"


def versions(schedule: Schedule) -> Versions:
    """Return which weights each microbatch meets, and to which its gradient is applied.

    In PipeDream, stage 0 of 2 runs 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2. The forwards of microbatches 0 and 1 use
    version 0, and that of microbatch 2, after an update, version 1. 0U0 steps from version 0, 0U1 from 1 and 0U2 from
    2. So the gradients of 1 and 2 come one update late, and the stage holds two versions:

        >>> pp.versions(pp.schedule("pipedream", ranks=2, microbatches=3)).staleness
        ((0, 1, 1), (0, 0, 0))

    A schedule without U is one step: all of it uses version 0, and nothing is late. Staleness says how late gradients
    are, not whether training converges. Reports differ. With one update of delay, arXiv 2006.09503 ends about as
    accurate as without, and arXiv 2606.30634 finds that Muon bears it, and that AdamW gets much worse. In
    arXiv 2602.03515, training slows down as the delay grows with the number of stages.

    Raises:
        SettingError: `schedule` is not a Schedule.
        ScheduleError: It is not legal.
    """
    require_schedule("versions", schedule)
    schedule.validate()
    ends = {Op.F} if schedule.forward_only else {Op.B, Op.W}
    used = [[0] * schedule.microbatches for _ in range(schedule.stages)]
    stepped = [[0] * schedule.microbatches for _ in range(schedule.stages)]
    latest, unused, held = ([each] * schedule.stages for each in (0, 0, 1))
    flying: list[dict[int, int]] = [{} for _ in range(schedule.stages)]  # the versions of microbatches in flight
    for order in schedule.orders:
        for stage, op, m, _ in (single for action in order for single in action.singles):
            if op is Op.F:
                used[stage][m] = flying[stage][m] = latest[stage]
            if op is Op.U:
                count = m + 1 - unused[stage]
                stepped[stage][unused[stage] : m + 1] = [latest[stage]] * count
                latest[stage], unused[stage] = latest[stage] + 1, m + 1
            if op in ends:
                del flying[stage][m]
            held[stage] = max(held[stage], len({*flying[stage].values(), latest[stage]}))
    return Versions(tuple(map(tuple, used)), tuple(map(tuple, stepped)), tuple(held))
