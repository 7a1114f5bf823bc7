"""Lesson 6: loops that hang, and one that confuses its messages, rehearsed on simulated ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

from ppedu.core import Action, Placement, Schedule, SettingError, lower
from ppedu.core.numeric import plural
from ppedu.core.waiting import cycles
from ppedu.course.exercises import parts
from ppedu.course.exercises.common import Exercise, call, missing_return, not_legal, require_function, with_sizes
from ppedu.course.exercises.feedback import has_page, publish
from ppedu.course.rehearsal import HeldCall, Rank, Rehearsal, Tensor, rehearse
from ppedu.sim import Timeline, simulate
from ppedu.zoo import schedule


def _deferred(order: Iterable[Action]) -> Iterator[Action]:
    """Move each receive to just before the action that needs its message."""
    late = {}
    for action in order:
        if "RECV" in str(action):
            late[str(action).replace("RECV_", "")] = action
            continue
        needed = str(action).replace("I", "B")  # 2I0, the first half of a split backward, needs 2RECV_B0
        if needed in late:
            yield late.pop(needed)
        yield action


def patched(name: str, microbatches: int) -> Schedule:
    """Return a schedule for two ranks, with each message received just before it is needed.

    That is what a patch of PyTorch did: https://github.com/pytorch/pytorch/issues/172668.
    """
    lowered = lower(schedule(name, 2, microbatches))
    orders = tuple(tuple(_deferred(order)) for order in lowered.orders)
    return Schedule(f"{name}, patched", lowered.placement, lowered.microbatches, orders)


def draw_orders(ax: Any, drawn: Schedule, reached: Sequence[int], columns: int = 6, size: float = 10) -> None:
    """Draw the first actions of two ranks on axes of matplotlib: blue if done, red if it waits for the other rank.

    reached: by rank, the position of the first action that is not done.
    """
    for rank in (0, 1):
        ax.text(-0.6, 1 - rank, f"rank {rank}", ha="right", va="center", size=size)
        for position, action in enumerate(drawn.orders[rank][:columns]):
            face, ink = ("#c9ddf2" if position < reached[rank] else "white"), "#222222"
            if position == reached[rank]:
                face, ink = ("#c0392b", "white") if "_" in str(action) else ("#f0c75e", "#222222")
            look = {"boxstyle": "square,pad=0.45", "facecolor": face, "edgecolor": "#8a8a8a"}
            ax.text(position, 1 - rank, action, ha="center", va="center", size=size, color=ink, bbox=look)
    ax.set(xlim=(-1.3, columns - 0.5), ylim=(-0.5, 1.5))
    ax.axis("off")


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
        each += f". All of them receive, and none sends{_unsent(rehearsal, [at[rank] for rank in cycle])}"
    elif kinds == {"send"}:
        each += ". All of them send, and none receives"
    return f"{case} it {'deadlocks' if cycle else 'hangs'}: {each}"


def _unsent(rehearsal: Rehearsal, cycle: list[HeldCall]) -> str:
    """Explain, as a new sentence, which rank has computed a gradient that another one waits for, and not sent it."""
    for wait in cycle:
        [peer] = wait.peers
        complete = [each for moment in rehearsal.moments for each in moment.matched]
        sent = sum(each.rank == peer and each.doing.startswith(("send_backward", "send_bwd")) for each in complete)
        computed = sum(action.op == "B" for action in rehearsal.ranks[peer].actions)
        if wait.doing == "recv_backward" and computed > sent:
            return f". Rank {peer} has computed the gradient that rank {wait.rank} waits for, but not sent it"
    return ""


def _description(wait: HeldCall, at: dict[int, HeldCall]) -> str:
    peers = [f"rank {peer}" + ("" if peer in at else ", which has ended") for peer in wait.peers]
    return f"at line {wait.line}, {wait.source}, rank {wait.rank} waits for {' and '.join(peers)}"


def _mixed_up(rehearsal: Rehearsal, case: str) -> str | None:
    """Explain which action ran with the wrong input; return None if every input was right.

    A forward comes before a backward: wrong activations may be the reason for wrong gradients.
    """
    mixed = [(rank.rank, *each) for rank in rehearsal.ranks for each in rank.mixed]
    if not mixed:
        return None
    rank, action, given, own = min(mixed, key=lambda each: each[1].op != "F")
    kind, what = ("forward", "an activation") if action.op == "F" else ("backward", "a gradient")
    runs = f"{case} nothing hangs, but rank {rank} runs the {kind} of microbatch {action.microbatch}"
    if not isinstance(given, Tensor):
        return f"{runs} with {given!r}, where it needs {what}"
    if given != own._replace(microbatch=given.microbatch):
        return f"{runs} with {given} of stage {given.stage}, where it needs {own} of stage {own.stage}"
    return (
        f"{runs} with {given}. Messages are not labeled: the first one that rank {given.stage} sends is the first one "
        f"that rank {rank} receives. The shapes match, so nothing raises an error"
    )


# For each case that is tried, what is wrong, if anything, and the rehearsal of that case.
Checks = Iterator[tuple[str | None, Rehearsal]]

# (ranks, microbatches): the smallest case that can go wrong comes first, because it is the easiest to understand.
CASES = [(2, 2), (1, 1), (2, 1), (2, 4), (4, 2), (3, 3), (4, 8)]


def _rehearsed(
    function: Any, case: str, ranks: int, given: Callable[[int], Sequence[Any]], losses: Sequence[float] = ()
) -> tuple[Rehearsal, list[Any]]:
    """Rehearse the learner's function of a rank and what it is `given`; return what it returned on each rank, too."""
    results: list[Any] = [None] * ranks

    def program(me: Rank) -> None:
        results[me.rank] = call(function, f"{case}, on rank {me.rank},", me, *given(me.rank))

    return rehearse(program, ranks, losses)._replace(program=function), results


def _ran(step: Any, ranks: int, microbatches: int) -> tuple[Rehearsal, Schedule]:
    """Rehearse the learner's training step, and return the schedule of the actions that ran as well."""
    rehearsal, _ = _rehearsed(step, with_sizes(ranks, microbatches), ranks, lambda _: [microbatches])
    orders = tuple(tuple(rank.actions) for rank in rehearsal.ranks)
    return rehearsal, Schedule("yours", Placement.make("loop", ranks), microbatches, orders)


def _steps(step: Any, name: str = "") -> Checks:
    """Check a training step. name: of the schedule whose order it must keep, if any."""
    require_function(step, "me", "microbatches")
    for ranks, microbatches in CASES:
        case = with_sizes(ranks, microbatches)
        rehearsal, yours = _ran(step, ranks, microbatches)
        fault = _hang(rehearsal, case, microbatches) or _mixed_up(rehearsal, case)
        if not fault and not any(yours.orders):
            fault = f"{case} your loop runs nothing; is there a return before its end?"
        fault = fault or not_legal(yours, f"{case} nothing hangs; still")
        yield fault or (_not_in_order(yours, name, case) if name else None), rehearsal


def _not_in_order(yours: Schedule, name: str, case: str) -> str | None:
    """Explain where a rank leaves the order of the schedule `name`; return None if none does."""
    theirs = schedule(name, yours.ranks, yours.microbatches)
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


def _sum_ignored(rehearsal: Rehearsal, target: float) -> str:
    """Explain, as a new sentence, that a rank stopped above the target, or went on below it."""
    waiting = {wait.rank: wait.doing for wait in rehearsal.waits}
    if not any(rank.sums for rank in rehearsal.ranks) and "all_reduce" not in waiting.values():
        return (
            ". No rank asks for the sum. me.step() gives every rank but the last a 0, which is below the target: only "
            "the last rank knows the loss"
        )
    if rehearsal.waits and rehearsal.waits[-1].doing == "all_reduce":
        for rank in rehearsal.ranks:
            if rank.rank not in waiting and rank.steps and not rank.sums:
                return f". Rank {rank.rank}'s own loss is 0, which is below any target: it stopped before the sum"
    for rank in rehearsal.ranks:
        if rank.rank in waiting and rank.sums and rank.sums[-1] < target:
            return (
                f". all_reduce gave rank {rank.rank} {rank.sums[-1]:g}, which is below the target, and still it went "
                "on: the break must not depend on the rank. Move it out of the if that asks for me.rank"
            )
        if rank.rank not in waiting and rank.sums and rank.sums[-1] >= target:
            return (
                f". all_reduce gave rank {rank.rank} {rank.sums[-1]:g}, which is not below the target, and still it "
                "stopped: you dropped what all_reduce returns. It does not change its argument; it returns the sum"
            )
    return ""


def _trainings(train: Any) -> Checks:
    """Check a training loop that should end when the loss is below a target."""
    require_function(train, "me", "steps", "target")
    for ranks, target, losses, enough in TRAININGS:
        case = f"with {plural(ranks, 'rank')} and a target of {target:g}"
        given = len(losses), target
        rehearsal, _ = _rehearsed(train, case, ranks, lambda _, given=given: given, losses)  # type: ignore[misc]
        taken = rehearsal.ranks[-1].steps
        if fault := _hang(rehearsal, case):
            fault += _sum_ignored(rehearsal, target)
        elif taken != enough:
            shown = ", ".join(f"{loss:g}" for loss in losses)
            fault = (
                f"{case} nothing hangs, and the losses are {shown}: training should end after "
                f"{plural(enough, 'step')}, but takes {taken}"
            )
            if taken < enough:
                fault += ". me.step() returns 0 on the other ranks, so the sum over all ranks is the loss itself"
        yield fault, rehearsal


# The optional exercise: a sum over all ranks, made of messages. A chain there and back sends two per rank.
MAX_SENDS = 2


def _sums(function: Any) -> Checks:
    """Check a sum over all ranks."""
    require_function(function, "me", "value")
    for ranks in (2, 3, 1, 4, 7):
        values = [2**rank for rank in range(ranks)]
        case = f"with {plural(ranks, 'rank')}"
        rehearsal, results = _rehearsed(function, case, ranks, lambda rank: [2**rank])
        yield _hang(rehearsal, case) or _not_the_sum(rehearsal, results, values, case), rehearsal


def _not_the_sum(rehearsal: Rehearsal, results: list[Any], values: list[int], case: str) -> str | None:
    """Explain what is wrong with the results of a sum that has ended; return None if they are right."""
    if any(rank.sums for rank in rehearsal.ranks):
        return "your function calls all_reduce, and that is what you are to build: use me.send and me.recv"
    for rank, result in enumerate(results):
        if isinstance(result, bool) or not isinstance(result, Real):
            return f"{case} rank {rank} returns {result!r} instead of a number{missing_return(result)}"
        if result != sum(values):
            fault = (
                f"{case}, whose values are {', '.join(map(str, values))}, rank {rank} returns {result!r}, and the "
                f"sum is {sum(values)}"
            )
            if result == sum(values[: rank + 1]):
                return f"{fault}. It knows the sum up to its own value; how does it learn the rest?"
            return fault
    calls = [wait for moment in rehearsal.moments for wait in moment.matched if wait.kind in ("send", "swap")]
    [(rank, most)] = Counter(wait.rank for wait in calls).most_common(1) or [(0, 0)]
    if most > MAX_SENDS:
        return (
            f"{case} every rank gets the sum, but rank {rank} sends {most} messages, and at most {MAX_SENDS} are "
            "allowed: on 2,048 ranks, that rank would keep all the others waiting"
        )
    return None


def _exercise(
    checks: Callable[[Any], Checks],
    praise: str,
    reward: Callable[[Any], Timeline] | None = None,
    hints: tuple[str, ...] = (),
) -> Exercise:
    """Return an exercise whose answer is wrong if one of the checks finds a fault. That one's rehearsal is shown."""

    def first(answer: Any) -> tuple[str | None, Rehearsal | None]:
        return next((found for found in checks(answer) if found[0]), (None, None))

    def show(answer: Any, _: str) -> None:
        with suppress(SettingError):  # the answer has failed with an error, and the feedback has reported it
            if has_page() and (rehearsal := first(answer)[1]) and rehearsal.moments:
                publish(rehearsal._repr_mimebundle_()[0])

    return Exercise(lambda answer: first(answer)[0], praise, reward, hints, show)


EXERCISES = {
    "06.1": _exercise(
        _steps,
        "Each rank sends what its neighbor is waiting for before it waits for a message of its own. This is what your "
        "loop ran.",
        lambda step: simulate(_ran(step, 4, 2)[1]),
        hints=(
            "Step to the deadlock. What does rank 1 wait for, and on which line would rank 0 send it?",
            "Rank 0 can run `me.forward` as soon as it has `x`. It doesn't need `dy` until `me.backward`.",
            "Move one line: receive `dy` just before the line that uses it.",
        ),
    ),
    "06.2": _exercise(
        lambda step: _steps(step, "1f1b"),
        "Every rank gets to its end, on any number of ranks, and it is still 1F1B. This is what your loop ran.",
        lambda step: simulate(_ran(step, 4, 8)[1]),
        hints=(
            "In the middle loop, a rank sends `y` and then receives `dy`, both with the next rank. One swap does both.",
            "A rank also sends `dx` and then, in the next round, receives `x`, both with the previous rank. So the "
            "first `x` has to come from before the loop.",
            "There is nothing left to receive after the last microbatch: there, send `dx` with `communicate`. And if "
            "`warmup == microbatches`, the middle loop has no first `x` to receive.",
        ),
    ),
    "06.3": _exercise(
        _trainings,
        "All ranks know the loss, so all of them stop after the same step.",
        hints=(
            "Which ranks call `me.all_reduce`, and which must?",
            "`me.step()` returns 0 on all ranks but the last. Which number is the sum over all ranks, then?",
            "Call `me.all_reduce` outside of any `if`, and let every rank decide by what it returns.",
        ),
    ),
    "06.4": _exercise(
        _steps,
        "Every backward gets its own microbatch's gradient. This is what your loop ran.",
        lambda step: simulate(_ran(step, 4, 8)[1]),
        hints=(
            "In which order does the last rank send its gradients, and in which order does its peer expect them?",
            "Two ranks must agree on one order. Which one doesn't matter.",
        ),
    ),
    "06.5": parts.exercise(
        "06.5",
        "No rank sends before it has received what its peer is sending, so even sends that wait cannot hang.",
        hints=(
            "While this rank sends `y` down, the next rank sends a gradient up, and both wait. Which of the two "
            "should this rank do first?",
            "After the forward. The warm-up has no gradient to wait for: if `m >= warmup`, receive `dy`; "
            "then send `y`; then run the backward and send its result.",
        ),
    ),
    "06.6": _exercise(
        _sums,
        "You have built a collective. Every rank knows the sum, and none has sent more than two messages. One way is "
        "that of a pipeline: partial sums go down the ranks, and the total comes back up.",
        hints=(
            "Who can know the sum first, if every rank may only add its value to the one it receives?",
            "Rank 0 sends its value to rank 1, which adds its own and sends the result on. The last rank has the sum.",
            "The sum goes back the same way: receive it from the next rank and send it to the previous one.",
        ),
    ),
}
