"""Lesson 6: three loops that hang, and one that confuses its messages, rehearsed on simulated ranks."""

from __future__ import annotations

from typing import Any

from ppedu.core.numeric import plural
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.waiting import cycles
from ppedu.notebook.exercises.common import Exercise, call, not_legal, require_function, with_sizes
from ppedu.notebook.rehearsal import Rank, Rehearsal, Tensor, Wait, rehearse
from ppedu.zoo import schedule


def _hang(rehearsal: Rehearsal, case: str, microbatches: int = 0) -> str | None:
    """Explain which ranks wait for each other; return None if the program ended."""
    at = {wait.rank: wait for wait in rehearsal.waits}
    if not at:
        return None
    cycle = next(cycles({rank: wait.peers for rank, wait in at.items()}), [])
    each = "; ".join(_description(at[rank], at) for rank in cycle or at)
    kinds = {at[rank].kind for rank in cycle}
    forwards = [sum(action.op == "F" for action in rank.actions) for rank in rehearsal.ranks]
    if "all" in kinds:
        each += ". A collective must be called by all ranks, and equally often"
    elif "swap" in kinds:
        each += ". A swap needs two ranks that swap with each other"
        late = [rank for rank in cycle if at[rank].doing == "send_bwd_recv_fwd" and forwards[rank] == microbatches]
        if late:
            each += f". After its last microbatch, rank {late[0]} has nothing left to receive, so it should only send"
    elif kinds == {"receive"}:
        each += ". All of them receive, and none sends"
    elif kinds == {"send"}:
        each += ". All of them send, and none receives"
    return f"{case} it hangs: {each}"


def _description(wait: Wait, at: dict[int, Wait]) -> str:
    peers = [f"rank {peer}" + ("" if peer in at else ", which has ended") for peer in wait.peers]
    return f"at line {wait.line}, {wait.source}, rank {wait.rank} waits for {' and '.join(peers)}"


def _mixed_up(rehearsal: Rehearsal, case: str) -> str | None:
    """Explain which action ran with the wrong input; return None if every input was right."""
    for rank in rehearsal.ranks:
        for action, given, own in rank.mixed:
            kind, what = ("forward", "an activation") if action.op == "F" else ("backward", "a gradient")
            runs = f"{case} nothing hangs, but rank {rank.rank} runs the {kind} of microbatch {action.microbatch}"
            if not isinstance(given, Tensor):
                return f"{runs} with {given!r}, where it needs {what}"
            if given != own._replace(microbatch=given.microbatch):
                return f"{runs} with {given} of stage {given.stage}, where it needs {own} of stage {own.stage}"
            return (
                f"{runs} with {given}. Messages are not labeled: the first one that rank {given.stage} sends is the "
                f"first one that rank {rank.rank} receives. The shapes match, so nothing raises an error"
            )
    return None


# (ranks, microbatches): the smallest case that can go wrong comes first, because it is the easiest to understand.
CASES = [(2, 2), (1, 1), (2, 1), (2, 4), (4, 2), (3, 3), (4, 8)]


def _ran(step: Any, ranks: int, microbatches: int) -> tuple[Rehearsal, Schedule]:
    """Rehearse the learner's training step, and return the schedule of the actions that ran as well."""
    case = with_sizes(ranks, microbatches)
    rehearsal = rehearse(lambda me: call(step, f"{case}, on rank {me.rank},", me, microbatches), ranks)
    orders = tuple(tuple(rank.actions) for rank in rehearsal.ranks)
    return rehearsal, Schedule("yours", Placement.make("loop", ranks), microbatches, orders)


def _not_a_step(step: Any, name: str = "") -> str | None:
    """Explain what is wrong with a training step; return None if it is right.

    name: of the schedule whose order the step must keep, if any.
    """
    require_function(step, "me", "microbatches")
    for ranks, microbatches in CASES:
        case = with_sizes(ranks, microbatches)
        rehearsal, yours = _ran(step, ranks, microbatches)
        if fault := _hang(rehearsal, case, microbatches) or _mixed_up(rehearsal, case):
            return fault
        if not any(yours.orders):
            return f"{case} your loop runs nothing; is there a return before its end?"
        if fault := not_legal(yours, f"{case} nothing hangs; still"):
            return fault
        if name:
            theirs = schedule(name, ranks, microbatches)
            for rank, (own, wanted) in enumerate(zip(yours.orders, theirs.orders, strict=True)):
                for mine, its in zip(own, wanted, strict=True):
                    if mine != its:
                        return (
                            f"{case} nothing hangs, but it is not {name.upper()} anymore: rank {rank} runs {mine} "
                            f"where it should run {its}. Keep that order, and change how the ranks send and receive"
                        )
    return None


# (ranks, target, losses, the step after which training should end: the loss is below the target, or no step is left).
TRAININGS = [
    (2, 2.0, (4.0, 3.0, 1.5, 2.5, 1.0, 0.5), 3),
    (4, 2.0, (4.0, 1.5, 2.5, 1.0), 2),
    (3, 0.1, (4.0, 3.0), 2),
    (1, 5.0, (4.0, 3.0), 1),
]


def _not_stopped(train: Any) -> str | None:
    require_function(train, "me", "steps", "target")
    for ranks, target, losses, enough in TRAININGS:
        case = f"with {plural(ranks, 'rank')} and a target of {target:g}"

        def program(me: Rank, case: str = case, steps: int = len(losses), target: float = target) -> None:
            call(train, f"{case}, on rank {me.rank},", me, steps, target)

        rehearsal = rehearse(program, ranks, losses)
        if fault := _hang(rehearsal, case):
            return fault
        taken = rehearsal.ranks[-1].steps
        if taken != enough:
            shown = ", ".join(f"{loss:g}" for loss in losses)
            fault = (
                f"{case} nothing hangs, and the losses are {shown}: training should end after "
                f"{plural(enough, 'step')}, but takes {taken}"
            )
            if taken < enough:
                return f"{fault}. me.step() returns 0 on the other ranks, so the sum over all ranks is the loss itself"
            return fault
    return None


EXERCISES = {
    "06.1": Exercise(
        _not_a_step,
        "Each rank sends what its neighbor is waiting for before it waits for a message of its own.",
    ),
    "06.2": Exercise(
        lambda step: _not_a_step(step, "1f1b"),
        "Every rank gets to its end, on any number of ranks, and it is still 1F1B. This is what your loop ran.",
        lambda step: simulate(_ran(step, 4, 8)[1]),
    ),
    "06.3": Exercise(
        _not_stopped,
        "All ranks know the loss, so all of them stop after the same step.",
    ),
    "06.4": Exercise(
        _not_a_step,
        "Every backward gets its own microbatch's gradient. This is what your loop ran.",
        lambda step: simulate(_ran(step, 4, 8)[1]),
    ),
}
