"""The finale: a diagnosis. Its number is in the names of this file, its exercise, its tests and its notebook."""

from __future__ import annotations

from ppedu.course.exercises.common import Exercise
from ppedu.course.exercises.faults import FAULTS
from ppedu.course.exercises.finale import Answer, not_the_fault


def _praise(answer: Answer) -> str:
    kind, where = FAULTS[answer.what].where, answer.where
    if isinstance(where, str):
        at = where
    elif kind == "a replica and a rank":
        at = f"on rank {where[1]} of replica {where[0]}"
    elif isinstance(where, tuple):
        at = f"between ranks {where[0]} and {where[1]}"
    else:
        at = f"{'on' if kind == 'a rank' else 'in'} {kind.removeprefix('a ')} {where}"
    return f"It was “{answer.what}”, {at}, and your cure makes the job what it should be."


EXERCISES = {
    "16.1": Exercise(
        not_the_fault,
        _praise,
        lambda answer: answer.case.after(**answer.cure),
        hints=(
            "First ask which goal fails: does it hang, run out of memory, take too long, or learn the wrong thing? "
            "That leaves a few faults.",
            "Lay a recorded step over the plan: `case.run.timeline(replica=1).show(case.plan)`. Is one box longer, one "
            "row, one column, one gap, or is it just as planned? If it is as planned, the plan is the fault.",
            "`case.run.autopsy()` names a rank, a stage or a microbatch; `case.run.costs().latency` has a time "
            "for each link; `pp.check(case.schedule, transport='rendezvous')` lets sends wait; `case.parity` has a row "
            "for each rank.",
        ),
    ),
}
