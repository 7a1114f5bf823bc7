"""The faults of the finale: where each may be, how it is planted in a sound job, and what cures it.

A fault is found by its cure: applied in the right place, it makes the job right, and the cures of all other faults and
places do not. `tests/course/test_finale.py` shows this for many cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from random import Random
from statistics import fmean
from typing import Any

from ppedu.core import Action, Schedule, SettingError, check, lower
from ppedu.course.exercises.setups import REPLICAS, Setup, spread
from ppedu.zoo import schedule

RANKS, SEQUENCES, LAYERS = 4, 16, 32
EVERYWHERE = "everywhere"
CLEAR = 1.12  # a fault makes a step at least this many times as long

Change = dict[str, Any]  # arguments of `changed`
Planted = tuple[Setup, Any]  # a job with a fault, and the fault's place
Where = tuple[str, Callable[[Setup], Sequence[Any]]]


@dataclass(frozen=True)
class Fault:
    """A fault of a job.

    Args:
        text: What it means, after "would mean that".
        breaks: The goals of `Setup.failing` that it may break.
        where: What to name as its place; `places(setup)` lists all of them.
        plant: `plant(random)` returns a job with the fault, without its goal and room, and the fault's place.
        cure: `cure(setup, place)` returns the change that would cure this fault; {} if it would not change anything.
    """

    name: str
    text: str
    breaks: tuple[str, ...]
    where: str
    places: Callable[[Setup], Sequence[Any]]
    plant: Callable[[Random], Planted]
    cure: Callable[[Setup, Any], Change]


def changed(
    setup: Setup,
    *,
    schedule: Schedule | None = None,
    layers: Sequence[float] | None = None,
    node: tuple[int, int] | None = None,
    link: tuple[int, int] | None = None,
    quiet: int | None = None,
    repack: int | None = None,
    code: str | None = None,
    at: Any = None,
) -> Setup:
    """Return the job with some settings changed.

    Args:
        schedule: Another order, number of microbatches or placement. The sequences and the layers on a rank stay.
        layers: The layers in each stage; their sum stays.
        node: A replica and a rank, whose node is replaced.
        link: Two ranks; the switch between them, which both replicas use, is replaced.
        quiet: A rank on which nothing else runs during a step: no garbage collection, no other process.
        repack: A microbatch that is cut to the usual length; the others get the rest of it.
        code: One of FIXES, which is applied to the training program.
        at: The rank or the two ranks that `code` is for, if any.

    Raises:
        SettingError: A value is not possible for this job.
    """
    if schedule is not None:
        if not isinstance(schedule, Schedule) or schedule.ranks != setup.ranks or schedule.forward_only:
            raise SettingError(f"schedule= takes a Schedule for training on {setup.ranks} ranks; got {schedule!r}")
        if len(setup.lengths) % schedule.microbatches:
            raise SettingError(
                f"{len(setup.lengths)} sequences cannot be divided among {schedule.microbatches} microbatches; choose "
                "a divisor"
            )
        setup = replace(setup, schedule=schedule, layers=spread(setup.layers, setup.schedule, schedule))
    if layers is not None:
        given = tuple(layers) if isinstance(layers, list | tuple) else ()
        if len(given) != len(setup.layers) or not all(isinstance(each, int | float) and each >= 0 for each in given):
            raise SettingError(f"layers= takes a number for each of {len(setup.layers)} stages; got {layers!r}")
        if abs(sum(given) - sum(setup.layers)) > 1e-6:
            raise SettingError(f"the model has {sum(setup.layers):g} layers; yours add up to {sum(given):g}")
        setup = replace(setup, layers=given)
    if repack is not None:
        if repack not in range(len(setup.lengths)) or setup.schedule.microbatches != len(setup.lengths):
            raise SettingError(f"repack= takes a microbatch of one sequence; got {repack!r}")
        setup = replace(setup, lengths=_evened(setup.lengths, repack))
    if code is not None:
        if code not in FIXES.values():
            raise SettingError(f"code= takes one of: {'; '.join(FIXES.values())}; got {code!r}")
        if FIXES.get(setup.bug) == code and setup.bug_at in (None, place(at)):
            setup = replace(setup, bug="", bug_at=None)
    return replace(
        setup,
        slow={key: factor for key, factor in setup.slow.items() if key != place(node)},
        cables={key: time for key, time in setup.cables.items() if key != place(link)},
        stalls={key: time for key, time in setup.stalls.items() if key != quiet},
    )


def place(where: Any) -> Any:
    """Return a place in the form of the faults: two ranks, or a replica and a rank, as a tuple."""
    return tuple(where) if isinstance(where, list) else where


def _evened(parts: Sequence[float], index: int) -> tuple[float, ...]:
    """Return the parts with one of them at their mean, and the rest of it added to the others."""
    mean = fmean(parts)
    rest = (parts[index] - mean) / (len(parts) - 1)
    return tuple(mean if each == index else part + rest for each, part in enumerate(parts))


# Where a fault may be: what to name as its place, and a function that lists all such places of a job.

RANK = ("a rank", lambda setup: range(setup.ranks))
RECEIVER = ("a rank", lambda setup: range(1, setup.ranks))  # rank 0 receives no activations
LINK = ("two neighboring ranks", lambda setup: [*pairwise(range(setup.ranks))])
NODE = ("a replica and a rank", lambda setup: [*product(range(REPLICAS), range(setup.ranks))])
STAGE = ("a stage", lambda setup: range(setup.schedule.stages))
MICROBATCH = ("a microbatch", lambda setup: range(setup.schedule.microbatches))
ANYWHERE = (EVERYWHERE, lambda _: [EVERYWHERE])
ENDS = ("two ranks", lambda setup: [(0, setup.ranks - 1)])


# Sound jobs, and schedules


def _job(
    random: Random, names: Sequence[str], hop: float = 0.1, microbatches: int = SEQUENCES, **options: Any
) -> Setup:
    """Return a sound job with one of these schedules. hop: the time of a message, as a part of a rank's forward."""
    chosen = schedule(random.choice(names), RANKS, microbatches, **options)
    time = random.uniform(1.5e-3, 4e-3)
    layers = (LAYERS / chosen.stages,) * chosen.stages
    return Setup(chosen, layers, (1.0,) * SEQUENCES, time, hop=hop * time * LAYERS / RANKS)


def _published(ours: Schedule, microbatches: int | None = None, **options: Any) -> Schedule:
    """Return the published schedule of this name and size."""
    chunks = {"chunks": ours.chunks} if ours.name == "interleaved" else {}
    found = schedule(ours.name, ours.ranks, microbatches or ours.microbatches, **{**chunks, **options})
    return lower(found, receive="late") if ours.lowered else found


def _with_order(ours: Schedule, rank: int, order: Sequence[Action]) -> Schedule:
    return replace(ours, orders=(*ours.orders[:rank], tuple(order), *ours.orders[rank + 1 :]))


def _as_published(setup: Setup, rank: int) -> Change:
    """Give one rank the order that the published schedule has."""
    return {"schedule": _with_order(setup.schedule, rank, _published(setup.schedule).orders[rank])}


# The faults: planting them, and curing them


def _plant(where: Where, spoil: Callable[[Setup, Any, Random], Setup], *names: str) -> Callable[[Random], Planted]:
    """Return the `plant` of a fault: `spoil(job, place, random)` returns the job with the fault."""

    def plant(random: Random) -> Planted:
        job = _job(random, names)
        place = random.choice(where[1](job))
        return spoil(job, place, random), place

    return plant


def _plant_order(random: Random) -> Planted:
    job = _job(random, ["1f1b", "zb-h1"])
    rank, microbatch = random.randrange(1, RANKS), random.randrange(SEQUENCES)
    order = [*job.schedule.orders[rank]]
    late = next(each for each in order if each.microbatch == microbatch and each.op in ("B", "I"))
    order.remove(late)
    if random.random() < 0.5:  # a backward before its forward; otherwise it is missing
        order.insert(order.index(Action.of(f"{rank}F{microbatch}")), late)
    return replace(job, schedule=_with_order(job.schedule, rank, order)), rank


def _plant_messages(random: Random) -> Planted:
    job = _job(random, ["1f1b"])
    sound = lower(job.schedule, receive="late")
    found = [
        (replace(job, schedule=crossed), link)
        for link in pairwise(range(RANKS))
        for crossed in _crossed(sound, link)
        if not check(crossed) and check(crossed, transport="rendezvous")
    ]
    return random.choice(found)


def _crossed(sound: Schedule, link: tuple[int, int]) -> Iterator[Schedule]:
    """Yield the schedule with two neighboring messages of the second rank swapped: a receive, and a send."""
    order = sound.orders[link[1]]
    for index, (first, second) in enumerate(pairwise(order)):
        if (first.op, second.op) == ("RECV_F", "SEND_B"):
            yield _with_order(sound, link[1], [*order[:index], second, first, *order[index + 2 :]])


def _cure_messages(setup: Setup, link: tuple[int, int]) -> Change:
    """Give two ranks the order of messages between them that lowering gives."""
    ours = setup.schedule
    if not ours.lowered:
        return {}
    sound = _published(ours)
    for rank, ops in zip(link, (("SEND_F", "RECV_B"), ("RECV_F", "SEND_B")), strict=True):
        between = iter([action for action in sound.orders[rank] if action.op in ops])
        order = [next(between) if action.op in ops else action for action in ours.orders[rank]]
        ours = _with_order(ours, rank, order)
    return {"schedule": ours}


def _imbalance(job: Setup, stage: int, random: Random) -> Setup:
    fewer = random.choice([1, 2])
    layers = tuple(each + 3 * fewer if s == stage else each - fewer for s, each in enumerate(job.layers))
    return replace(job, layers=layers)


def _long_sequence(job: Setup, microbatch: int, random: Random) -> Setup:
    length = random.uniform(4, 6)
    lengths = [(SEQUENCES - length) / (SEQUENCES - 1)] * SEQUENCES
    lengths[microbatch] = length
    return replace(job, lengths=tuple(lengths))


def _late_weights(job: Setup, rank: int, random: Random) -> Setup:
    order = job.schedule.orders[rank]
    waiting = random.choice([SEQUENCES // 2, SEQUENCES])  # the Ws that wait for the end
    late = [action for action in order if action.op == "W"][-waiting:]
    return replace(job, schedule=_with_order(job.schedule, rank, [*(a for a in order if a not in late), *late]))


def _plant_copies(random: Random) -> Planted:
    job = _job(random, ["dualpipe"], hop=0.02)
    return replace(job, exchange=random.uniform(0.25, 0.5) * job.step), EVERYWHERE


# Bugs of the training program, with their names in the museum: what each means, where it may be, and its fix.
_BUGS: dict[str, tuple[str, Where, str]] = {
    "loss not divided": (
        "the losses of the microbatches aren't divided by their number",
        ANYWHERE,
        "divide each loss by the number of microbatches",
    ),
    "norm per stage": ("each rank clips by a norm of its own", ANYWHERE, "clip by the norm of all ranks"),
    "tied copies drift apart": (
        "each copy of a weight gets its own gradient alone",
        ENDS,
        "add up the gradients of both copies",
    ),
    "gradients newest first": (
        "gradients are received in another order than sent",
        ("two ranks", LINK[1]),
        "receive in the order in which the peer sends",
    ),
    "one receive buffer": (
        "a rank receives all activations into the same memory",
        RECEIVER,
        "receive into a new tensor",
    ),
}
FIXES = {bug: fix for bug, (_, _, fix) in _BUGS.items()}


def _bug(name: str, text: str, where: Where, fix: str) -> Fault:
    def spoil(job: Setup, place: Any, random: Random) -> Setup:
        return replace(job, bug=name, bug_at=None if where in (ANYWHERE, ENDS) else place)

    def cure(setup: Setup, place: Any) -> Change:
        return {"code": fix, "at": place}

    return Fault(name, text, ("gradients",), *where, _plant(where, spoil, "1f1b"), cure)


_FAULTS = [
    Fault(
        "illegal order",
        "a rank's order lacks a backward that another rank waits for, or has one before its forward",
        ("order",),
        *RANK,
        _plant_order,
        _as_published,
    ),
    Fault(
        "crossed messages",
        "two ranks send to each other, and each waits until the other receives",
        ("messages",),
        *LINK,
        _plant_messages,
        _cure_messages,
    ),
    Fault(
        "imbalance",
        "a stage has more layers than the others",
        ("time",),
        *STAGE,
        _plant(STAGE, _imbalance, "1f1b", "zb-h1"),
        lambda setup, stage: {"layers": _evened(setup.layers, stage)},
    ),
    Fault(
        "slow node",
        "a node computes more slowly than the same rank of another replica",
        ("time",),
        *NODE,
        _plant(NODE, lambda job, node, random: replace(job, slow={node: random.uniform(1.4, 1.8)}), "1f1b", "zb-h1"),
        lambda setup, node: {"node": node},
    ),
    Fault(
        "slow link",
        "messages between two ranks take longer than between the others",
        ("time",),
        *LINK,
        _plant(LINK, lambda job, link, random: replace(job, cables={link: random.uniform(15, 25) * job.hop}), "1f1b"),
        lambda setup, link: {"link": link},
    ),
    Fault(
        "interruptions",
        "a rank stops in every step for something that is not training",
        ("time",),
        *RANK,
        _plant(RANK, lambda job, rank, random: replace(job, stalls={rank: random.uniform(90, 130)}), "1f1b", "zb-h1"),
        lambda setup, rank: {"quiet": rank},
    ),
    Fault(
        "long sequence",
        "a microbatch is longer than the others, on every rank",
        ("time",),
        *MICROBATCH,
        _plant(MICROBATCH, _long_sequence, "1f1b", "zb-h1"),
        lambda setup, m: {"repack": m} if setup.schedule.microbatches == SEQUENCES else {},
    ),
    Fault(
        "too few microbatches",
        "warm-up and cooldown are long beside the rest",
        ("time",),
        *ANYWHERE,
        lambda random: (_job(random, ["1f1b", "zb-h1"], microbatches=RANKS), EVERYWHERE),
        lambda setup, _: (
            {"schedule": _published(setup.schedule, SEQUENCES)} if setup.schedule.microbatches < SEQUENCES else {}
        ),
    ),
    Fault(
        "too many activations",
        "the schedule begins its backwards too late",
        ("memory",),
        *ANYWHERE,
        lambda random: (_job(random, ["gpipe"]), EVERYWHERE),
        lambda setup, _: {"schedule": schedule("1f1b", setup.ranks, setup.schedule.microbatches)},
    ),
    Fault(
        "too many chunks",
        "every microbatch crosses every link more often than the network allows",
        ("time",),
        *ANYWHERE,
        lambda random: (_job(random, ["interleaved"], hop=random.uniform(0.45, 0.7), chunks=4), EVERYWHERE),
        lambda setup, _: {"schedule": _published(setup.schedule, chunks=2)} if setup.schedule.chunks > 2 else {},
    ),
    Fault(
        "late weight gradients",
        "a rank leaves its Ws for the end",
        ("memory", "time"),
        *RANK,
        _plant(RANK, _late_weights, "zb-h1"),
        lambda setup, rank: _as_published(setup, rank) if "W" in {a.op for a in setup.schedule.orders[rank]} else {},
    ),
    Fault(
        "two copies",
        "adding up the gradients of two copies takes longer than the second copy saves",
        ("time",),
        *ANYWHERE,
        _plant_copies,
        lambda setup, _: (
            {"schedule": schedule("dualpipev", setup.ranks, setup.schedule.microbatches)}
            if setup.schedule.placement.copies > 1
            else {}
        ),
    ),
    *(_bug(name, *bug) for name, bug in _BUGS.items()),
]
FAULTS = {fault.name: fault for fault in _FAULTS}


def planted(fault: Fault, random: Random) -> Planted:
    """Return a job with this fault, and the fault's place. Its goal and room are those of the cured job."""
    while True:
        job, where = fault.plant(random)
        cured = changed(job, **fault.cure(job, where))
        fitting = [cured] if "memory" in fault.breaks or job.hangs else [cured, job]
        job = replace(job, goal=cured.step, room=1.1 * max(max(each.peaks) for each in fitting))
        if job.hangs or job.bug or job.step > CLEAR * job.goal or job.overflows:
            return job, where
