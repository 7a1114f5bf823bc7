"""The finale: a diagnosis. Its number is in the names of this file, its exercise, its tests and its notebook."""

from __future__ import annotations

from typing import Any

from ppedu.course.exercises.common import Exercise
from ppedu.course.exercises.faults import FAULTS
from ppedu.course.exercises.finale import Answer, not_the_fault
from ppedu.sim import Timeline


def _praise(answer: Answer) -> str:
    return f"It was “{answer.what}”, {_at(answer.what, answer.where)}, and your cure makes the job what it should be."


def _at(fault: str, where: Any) -> str:
    """Return a place in words, such as "on rank 1"."""
    kind = FAULTS[fault].where
    if isinstance(where, str):
        return where
    if kind == "a replica and a rank":
        return f"on rank {where[1]} of replica {where[0]}"
    if isinstance(where, tuple):
        return f"between ranks {where[0]} and {where[1]}"
    return f"{'on' if kind == 'a rank' else 'in'} {kind.removeprefix('a ')} {where}"


def _cured(answer: Answer) -> Timeline:
    return answer.case.after(**answer.cure)


EXERCISES = {
    "15.1": Exercise(
        not_the_fault,
        _praise,
        _cured,
        hints=(
            "First ask which goal fails: does it hang, run out of memory, take too long, or learn the wrong thing? "
            "That leaves a few faults.",
            "Lay a recorded step over the plan: `case.run.timeline(replica=1).show(case.plan)`. Is one box longer, one "
            "row, one column, one gap, or is it just as planned? If it is as planned, the plan is the fault.",
            "`case.run.autopsy()` names a rank, a stage or a microbatch; `case.run.costs().latency` has a time "
            "for each link; `pp.check(case.schedule, rendezvous=True)` lets sends wait; `case.parity` has a row "
            "for each rank.",
        ),
    ),
}
