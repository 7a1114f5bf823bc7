"""Lesson 6: three loops that hang and one that takes one message for another, tried on ranks in this process."""

from __future__ import annotations

from typing import Any

from ppedu.core.numeric import plural
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.waiting import rings
from ppedu.notebook.exercises.common import Exercise, call, not_legal, require_function, with_sizes
from ppedu.notebook.rehearsal import Rank, Rehearsal, Tensor, Wait, rehearse
from ppedu.zoo import schedule


def _hang(rehearsal: Rehearsal, case: str, microbatches: int = 0) -> str | None:
    """Who waits for whom, if anybody does."""
    at = {wait.rank: wait for wait in rehearsal.waits}
    if not at:
        return None
    ring = next(rings({rank: wait.peers for rank, wait in at.items()}), [])
    each = "; ".join(_said(at[rank], at) for rank in ring or at)
    kinds = {at[rank].kind for rank in ring}
    forwards = [sum(action.op == "F" for action in rank.actions) for rank in rehearsal.ranks]
    if "all" in kinds:
        each += ". What all ranks do together, all of them must call, each as often as the others"
    elif "swap" in kinds:
        each += ". A swap needs two that swap with each other"
        late = [rank for rank in ring if at[rank].doing == "send_bwd_recv_fwd" and forwards[rank] == microbatches]
        if late:
            each += f". After its last microbatch rank {late[0]} has nothing more to receive, so there it only sends"
    elif kinds == {"receive"}:
        each += ". All receive, nobody sends"
    elif kinds == {"send"}:
        each += ". All send, nobody receives"
    return f"{case} it hangs: {each}"


def _said(wait: Wait, at: dict[int, Wait]) -> str:
    others = [f"rank {peer}" + ("" if peer in at else ", which has ended") for peer in wait.peers]
    return f"at line {wait.line}, {wait.source}, rank {wait.rank} waits for {' and '.join(others)}"


def _mixed_up(rehearsal: Rehearsal, case: str) -> str | None:
    """What was computed with something else than its own, if anything was."""
    for rank in rehearsal.ranks:
        for action, given, own in rank.mixed:
            kind, what = ("forward", "an activation") if action.op == "F" else ("backward", "a gradient")
            runs = f"{case} nothing hangs, but rank {rank.rank} runs the {kind} of microbatch {action.microbatch}"
            if not isinstance(given, Tensor):
                return f"{runs} with {given!r}, where it needs {what}"
            if given != own._replace(microbatch=given.microbatch):
                return f"{runs} with {given} of stage {given.stage}, where it needs {own} of stage {own.stage}"
            return (
                f"{runs} with {given}. A message has no name on it: what rank {given.stage} sends first, "
                f"rank {rank.rank} receives first. And the shapes are the same, so nobody complains"
            )
    return None


# Ranks and microbatches: the smallest case that can go wrong first, so that there is little to think through.
CASES = [(2, 2), (1, 1), (2, 1), (2, 4), (4, 2), (3, 3), (4, 8)]


def _ran(step: Any, ranks: int, microbatches: int) -> tuple[Rehearsal, Schedule]:
    """A learner's training step, rehearsed, and what was run in it."""
    case = with_sizes(ranks, microbatches)
    rehearsal = rehearse(lambda me: call(step, f"{case}, on rank {me.rank},", me, microbatches), ranks)
    orders = tuple(tuple(rank.actions) for rank in rehearsal.ranks)
    return rehearsal, Schedule("yours", Placement.make("loop", ranks), microbatches, orders)


def _not_a_step(step: Any, like: str = "") -> str | None:
    """What is wrong with a training step, which is to run what the schedule `like` runs, if one is named."""
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
        if like:
            theirs = schedule(like, ranks, microbatches)
            for rank, (own, wanted) in enumerate(zip(yours.orders, theirs.orders, strict=True)):
                for mine, its in zip(own, wanted, strict=True):
                    if mine != its:
                        return (
                            f"{case} nothing hangs, but it is no {like.upper()} any more: rank {rank} runs {mine} "
                            f"where it should run {its}. Keep that order, and change how the ranks send and receive"
                        )
    return None


# Ranks, the target, the losses, and after how many steps the loss is below the target or no step is left.
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
                return f"{fault}. me.step() gives 0 on the other ranks: they add 0, so the sum is the loss itself"
            return fault
    return None


EXERCISES = {
    "06.1": Exercise(
        _not_a_step,
        "Each rank sends what the next one waits for before it waits itself.",
    ),
    "06.2": Exercise(
        lambda step: _not_a_step(step, "1f1b"),
        "Nobody waits for ever, on any number of ranks, and it is still 1F1B: this is what your loop ran.",
        lambda step: simulate(_ran(step, 4, 8)[1]),
    ),
    "06.3": Exercise(
        _not_stopped,
        "All ranks know the loss, so all of them leave after the same step.",
    ),
    "06.4": Exercise(
        _not_a_step,
        "Every backward gets its own microbatch's gradient: this is what your loop ran.",
        lambda step: simulate(_ran(step, 4, 8)[1]),
    ),
}
