"""Versions of the weights, in schedules whose optimizers step before the end (U)."""

from __future__ import annotations

from typing import NamedTuple

from ppedu.core import Op, Schedule, require_schedule
from ppedu.core.numeric import plural


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
