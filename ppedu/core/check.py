"""Is a schedule legal? If not: everything that is wrong with it, each in one sentence.

Two questions, kept apart. What does an action need (`needs`)? And can the ranks, each in its own order,
get through to the end if every action waits for what it needs (`replay`)? The simulation asks the same
two questions, so that what is drawn and what is checked cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ppedu.core.actions import COMPUTE, SHARDING, Action, Op
from ppedu.core.errors import SettingError

if TYPE_CHECKING:
    from ppedu.core.placement import Placement
    from ppedu.core.schedule import Schedule

# What an action leaves behind for others. ("F", 2, 0): the activation that stage 2 made of microbatch 0.
# ("B", 2, 0): the gradient of stage 2's input, whether a full backward made it or its first half, I.
Result = tuple[str, int, int]


Placed = dict[Action, tuple[int, int]]  # the rank and position at which an action stands first
Maker = dict[Result, Action]


class Problem(NamedTuple):
    """One thing that is wrong. `index` is the position in the rank's order, None where nothing stands.

    kind: "range" (no such stage or microbatch), "rank" (not this rank's stage), "missing", "duplicate",
    "order" (before what it needs, on the same rank), "deadlock" (ranks waiting for each other in a ring).
    """

    rank: int
    index: int | None  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    action: Action
    kind: str
    message: str

    def __str__(self) -> str:
        return self.message


# `orders[rank][index]` runs; it has waited for some results and gives some: (rank, index, waited for, given).
Step = tuple[int, int, tuple[Result, ...], tuple[Result, ...]]


@dataclass(frozen=True)
class Replay:
    """All the steps that can be taken, each after those it needs. `blocked[rank]` is (index, what is missing)."""

    steps: list[Step]
    blocked: dict[int, tuple[int, Result]]


def needs(action: Action, placement: Placement) -> tuple[Result, ...]:
    """The results that an action waits for.

    A forward needs the activation of the stage before; a backward its own forward and the gradient of the
    stage after; a weight backward its own input backward; an overlapped pair what both of its parts need.
    Messages and sharding take no time and are passed over.
    """
    stage, op, microbatch, parts = action
    if parts:
        return tuple(need for part in parts for need in needs(part, placement))
    if op == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if op in ("B", "I"):
        own = ("F", stage, microbatch)
        return (own, ("B", stage + 1, microbatch)) if stage + 1 < placement.stages else (own,)
    if op == "W":
        return (("B", stage, microbatch),)
    return ()


def gives(action: Action) -> tuple[Result, ...]:
    """The results that are there once an action has ended."""
    stage, op, microbatch, parts = action
    if parts:
        return tuple(result for part in parts for result in gives(part))
    if op == "F":
        return (("F", stage, microbatch),)
    if op in ("B", "I"):
        return (("B", stage, microbatch),)
    return ()


def replay(schedule: Schedule) -> Replay:
    """Let every rank run its order until it must wait, and wake it when what it waits for is there."""
    placement = schedule.placement
    there: set[Result] = set()
    steps: list[Step] = []
    waiting: dict[Result, list[tuple[int, int]]] = {}

    def run(rank: int) -> Iterator[tuple[int, Result]]:
        for index, action in enumerate(schedule.orders[rank]):
            wanted, given = needs(action, placement), gives(action)
            for need in wanted:
                if need not in there:
                    yield index, need
            steps.append((rank, index, wanted, given))
            for result in given:
                there.add(result)
                for sleeper, _ in waiting.pop(result, ()):
                    awake.append(sleeper)

    runs = [run(rank) for rank in range(schedule.ranks)]
    awake = list(range(schedule.ranks))
    while awake:
        rank = awake.pop()
        for index, missing in runs[rank]:
            waiting.setdefault(missing, []).append((rank, index))
            break
    return Replay(steps, {rank: (at, need) for need, ranks in waiting.items() for rank, at in ranks})


def check(schedule: Schedule) -> list[Problem]:
    """Everything that is wrong with a schedule; an empty list when it is legal.

    Legal: every stage runs each microbatch's forward once and its backward once (B, or I and W), on the
    rank that holds the stage, after what it needs; and no ranks wait for each other in a ring.
    Judged are the compute actions; messages and sharding are carried along.

    Raises:
        SettingError: it is no schedule.
    """
    if not hasattr(schedule, "problems"):
        raise SettingError(
            f"check takes a schedule, such as schedule('1f1b', ranks=4, microbatches=8); got {schedule!r}"
        )
    return list(schedule.problems)


def find_problems(schedule: Schedule) -> Iterator[Problem]:
    """The problems, those of single actions first. `check` is the way in."""
    placed: Placed = {}
    stages, microbatches, holder = schedule.stages, schedule.microbatches, schedule.placement.rank
    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            here = rank, index
            for single in action.singles:
                stage, op, microbatch, _ = single
                first = placed.setdefault(single, here)
                if not 0 <= stage < stages:
                    kind, why = "range", f": there is no stage {stage}; the stages are 0 to {stages - 1}"
                elif op not in SHARDING and not 0 <= microbatch < microbatches:
                    kind, why = "range", f": there is no microbatch {microbatch}; they are 0 to {microbatches - 1}"
                elif holder(stage, microbatch) != rank:
                    kind, why = "rank", f": stage {stage} is held by rank {holder(stage, microbatch)}"
                elif first != here and op in COMPUTE:
                    kind, why = "duplicate", f" has already been run (rank {first[0]}, position {first[1]})"
                else:
                    continue
                yield Problem(rank, index, single, kind, f"rank {rank}, position {index}: {single}{why}")
    yield from _incomplete(schedule, placed)
    if schedule.replay.blocked:
        maker = {result: single for single in placed for result in gives(single)}
        yield from _too_early(schedule, placed, maker)
        yield from _deadlocks(schedule, placed, maker)


def _incomplete(schedule: Schedule, placed: Placed) -> Iterator[Problem]:
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            # An action equals the tuple of its fields, and there are many to look up.
            forward, full, first, second = [(stage, op, microbatch, ()) for op in "FBIW"]
            missing = [] if forward in placed else ["F"]
            if full not in placed:
                split = [half[1] for half in (first, second) if half not in placed]
                missing += ["B"] if len(split) == 2 else split
            elif first in placed or second in placed:
                whole = Action(stage, Op.B, microbatch)
                half = Action(stage, Op.I if first in placed else Op.W, microbatch)
                rank, index = placed[whole]
                why = f"{whole} is a full backward, and half of it, {half}, is run too"
                yield Problem(rank, index, whole, "duplicate", f"rank {rank}, position {index}: {why}")
            for op in missing:
                rank, action = schedule.placement.rank(stage, microbatch), Action(stage, Op(op), microbatch)
                yield Problem(rank, None, action, "missing", f"rank {rank}: {action} is never run")


def _too_early(schedule: Schedule, placed: Placed, maker: Maker) -> Iterator[Problem]:
    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            for need in needs(action, schedule.placement):
                if need in maker:
                    source, at = placed[maker[need]]
                    if source == rank and at >= index:
                        where = f"only comes at position {at}" if at > index else "runs at the same time"
                        yield Problem(
                            rank,
                            index,
                            action,
                            "order",
                            f"rank {rank}, position {index}: {action} needs {maker[need]}, which {where}",
                        )


def _deadlocks(schedule: Schedule, placed: Placed, maker: Maker) -> Iterator[Problem]:
    blocked = schedule.replay.blocked
    waits_for = {rank: placed[maker[missing]][0] for rank, (_, missing) in blocked.items() if missing in maker}
    seen: set[int] = set()
    for start in sorted(waits_for):
        path: list[int] = []
        rank = start
        while rank in waits_for and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for[rank]
        # A ring ends where it began; a rank that waits for itself is an "order" problem.
        ring = path[path.index(rank) :] if rank in path else []
        if len(ring) > 1:
            links = []
            for member in ring:
                index, missing = blocked[member]
                links.append(
                    f"rank {member} waits at position {index} ({schedule.orders[member][index]}) "
                    f"for {maker[missing]} of rank {waits_for[member]}"
                )
            index, _ = blocked[ring[0]]
            yield Problem(ring[0], index, schedule.orders[ring[0]][index], "deadlock", "deadlock: " + ", ".join(links))
