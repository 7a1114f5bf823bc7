"""The faults of the finale: where each may be, how it is planted in a sound job, and what cures it.

A fault is found by its cure: applied in the right place, it makes the job right, and the cures of all other faults and
places do not. `tests/course/test_finale.py` shows this for many cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import Any

from ppedu.core import Action, Schedule, SettingError, check, lower
from ppedu.course.exercises.setups import Setup, spread
from ppedu.zoo import schedule

RANKS, SEQUENCES, LAYERS = 4, 16, 32
EVERYWHERE = "everywhere"
CLEAR = 1.12  # a fault makes a step at least this many times as long
FIXES = {
    "loss not divided": "divide each loss by the number of microbatches",
    "norm per stage": "clip by the norm of all ranks",
    "tied copies drift apart": "add up the gradients of both copies",
    "gradients newest first": "receive in the order in which the peer sends",
    "one receive buffer": "receive into a new tensor",
}

Change = dict[str, Any]  # arguments of `changed`


@dataclass(frozen=True)
class Fault:
    """A fault of a job.

    breaks: the goals of `Setup.failing` that it may break.
    where: what to name as its place, and `places(setup)` lists all of them.
    plant: `plant(random)` returns a job with the fault, without its goal and room, and the fault's place.
    cure: `cure(setup, place)` returns the change that would cure this fault; {} if it would not change anything.
    """

    name: str
    text: str
    breaks: tuple[str, ...]
    where: str
    places: Callable[[Setup], Sequence[Any]]
    plant: Callable[[Random], tuple[Setup, Any]]
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

    schedule: another order, number of microbatches or placement. The sequences stay, and so do the layers on a rank.
    layers: the layers in each stage; as many as before.
    node: a replica and a rank, whose node is replaced. link: two ranks, whose cable is replaced.
    quiet: a rank on which nothing else runs during a step: no garbage collection, no other process.
    repack: a microbatch that is cut to the usual length; the others get the rest of it.
    code: one of FIXES, which is applied to the training program. at: the rank or the two ranks that it is for, if any.

    Raises:
        SettingError: a value is not possible for this job.
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


# Where a fault may be


def _ranks(setup: Setup) -> Sequence[Any]:
    return range(setup.ranks)


def _links(setup: Setup) -> Sequence[Any]:
    return [*pairwise(range(setup.ranks))]


def _nodes(setup: Setup) -> Sequence[Any]:
    return [(replica, rank) for replica in range(2) for rank in range(setup.ranks)]


def _stages(setup: Setup) -> Sequence[Any]:
    return range(setup.schedule.stages)


def _microbatches(setup: Setup) -> Sequence[Any]:
    return range(setup.schedule.microbatches)


def _everywhere(setup: Setup) -> Sequence[Any]:
    return [EVERYWHERE]


def _ends(setup: Setup) -> Sequence[Any]:
    return [(0, setup.ranks - 1)]


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


def _plant_order(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["1f1b", "zb-h1"])
    rank, microbatch = random.randrange(1, RANKS), random.randrange(SEQUENCES)
    order = [*job.schedule.orders[rank]]
    late = next(each for each in order if each.microbatch == microbatch and each.op in ("B", "I"))
    order.remove(late)
    if random.random() < 0.5:  # a backward before its forward; otherwise it is missing
        order.insert(order.index(Action.of(f"{rank}F{microbatch}")), late)
    return replace(job, schedule=_with_order(job.schedule, rank, order)), rank


def _plant_messages(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["1f1b"])
    sound = lower(job.schedule, receive="late")
    found = [
        (link, crossed)
        for link in _links(job)
        for crossed in _crossed(sound, link)
        if not check(crossed) and check(crossed, rendezvous=True)
    ]
    link, crossed = random.choice(found)
    return replace(job, schedule=crossed), link


def _crossed(sound: Schedule, link: tuple[int, int]) -> Iterator[Schedule]:
    """Yield the schedule with two neighboring messages of the second rank swapped: a receive, and a send."""
    order = sound.orders[link[1]]
    for index, pair in enumerate(pairwise(order)):
        if tuple(action.op for action in pair) == ("RECV_F", "SEND_B"):
            yield _with_order(sound, link[1], [*order[:index], pair[1], pair[0], *order[index + 2 :]])


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


def _plant_imbalance(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["1f1b", "zb-h1"])
    stage, fewer = random.randrange(RANKS), random.choice([1, 2])
    layers = tuple(each + 3 * fewer if s == stage else each - fewer for s, each in enumerate(job.layers))
    return replace(job, layers=layers), stage


def _plant_node(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["1f1b", "zb-h1"])
    where = random.choice(_nodes(job))
    return replace(job, slow={where: random.uniform(1.4, 1.8)}), where


def _plant_link(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["1f1b"])
    link = random.choice(_links(job))
    return replace(job, cables={link: random.uniform(15, 25) * job.hop}), link


def _plant_interruptions(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["1f1b", "zb-h1"])
    rank = random.randrange(RANKS)
    return replace(job, stalls={rank: random.uniform(90, 130)}), rank


def _plant_variation(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["1f1b", "zb-h1"])
    long = random.randrange(SEQUENCES)
    rest = (SEQUENCES - (length := random.uniform(4, 6))) / (SEQUENCES - 1)
    return replace(job, lengths=tuple(length if each == long else rest for each in range(SEQUENCES))), long


def _plant_few(random: Random) -> tuple[Setup, Any]:
    return _job(random, ["1f1b", "zb-h1"], microbatches=RANKS), EVERYWHERE


def _plant_memory(random: Random) -> tuple[Setup, Any]:
    return _job(random, ["gpipe"]), EVERYWHERE


def _plant_chunks(random: Random) -> tuple[Setup, Any]:
    return _job(random, ["interleaved"], hop=random.uniform(0.45, 0.7), chunks=4), EVERYWHERE


def _plant_weights(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["zb-h1"])
    rank = random.randrange(RANKS)
    order = job.schedule.orders[rank]
    waiting = random.choice([SEQUENCES // 2, SEQUENCES])  # the Ws that wait for the end
    late = [action for action in order if action.op == "W"][-waiting:]
    order = (*(action for action in order if action not in late), *late)
    return replace(job, schedule=_with_order(job.schedule, rank, order)), rank


def _plant_copies(random: Random) -> tuple[Setup, Any]:
    job = _job(random, ["dualpipe"], hop=0.02)
    return replace(job, exchange=random.uniform(0.25, 0.5) * job.step), EVERYWHERE


def _bug(name: str, places: Callable[[Setup], Sequence[Any]], placed: bool) -> Callable[[Random], tuple[Setup, Any]]:
    def plant(random: Random) -> tuple[Setup, Any]:
        job = _job(random, ["1f1b"])
        where = random.choice(places(job))
        return replace(job, bug=name, bug_at=where if placed else None), where

    return plant


def _fix(name: str) -> Callable[[Setup, Any], Change]:
    return lambda setup, where: {"code": FIXES[name], "at": where}


def _faults() -> Iterator[Fault]:
    yield Fault(
        "illegal order",
        "a rank's order lacks an action, or has one before what it depends on",
        ("order",),
        "a rank",
        _ranks,
        _plant_order,
        _as_published,
    )
    yield Fault(
        "crossed messages",
        "two ranks send to each other, and each waits until the other receives",
        ("messages",),
        "two neighboring ranks",
        _links,
        _plant_messages,
        _cure_messages,
    )
    yield Fault(
        "imbalance",
        "a stage has more layers than the others",
        ("time",),
        "a stage",
        _stages,
        _plant_imbalance,
        lambda setup, stage: {"layers": _evened(setup.layers, stage)},
    )
    yield Fault(
        "slow node",
        "a node computes more slowly than the same rank of another replica",
        ("time",),
        "a replica and a rank",
        _nodes,
        _plant_node,
        lambda setup, node: {"node": node},
    )
    yield Fault(
        "slow link",
        "messages between two ranks take longer than between the others",
        ("time",),
        "two neighboring ranks",
        _links,
        _plant_link,
        lambda setup, link: {"link": link},
    )
    yield Fault(
        "interruptions",
        "a rank stops in every step for something that is not training",
        ("time",),
        "a rank",
        _ranks,
        _plant_interruptions,
        lambda setup, rank: {"quiet": rank},
    )
    yield Fault(
        "long sequence",
        "a microbatch is longer than the others, on every rank",
        ("time",),
        "a microbatch",
        _microbatches,
        _plant_variation,
        lambda setup, m: {"repack": m} if setup.schedule.microbatches == SEQUENCES else {},
    )
    yield Fault(
        "too few microbatches",
        "warm-up and cooldown are long beside the rest",
        ("time",),
        EVERYWHERE,
        _everywhere,
        _plant_few,
        lambda setup, _: (
            {"schedule": _published(setup.schedule, SEQUENCES)} if setup.schedule.microbatches < SEQUENCES else {}
        ),
    )
    yield Fault(
        "too many activations",
        "the schedule begins its backwards too late",
        ("memory",),
        EVERYWHERE,
        _everywhere,
        _plant_memory,
        lambda setup, _: {"schedule": schedule("1f1b", setup.ranks, setup.schedule.microbatches)},
    )
    yield Fault(
        "too many chunks",
        "every microbatch crosses every link more often than the network allows",
        ("time",),
        EVERYWHERE,
        _everywhere,
        _plant_chunks,
        lambda setup, _: {"schedule": _published(setup.schedule, chunks=2)} if setup.schedule.chunks > 2 else {},
    )
    yield Fault(
        "late weight gradients",
        "a rank leaves its Ws for the end",
        ("memory", "time"),
        "a rank",
        _ranks,
        _plant_weights,
        lambda setup, rank: _as_published(setup, rank) if "W" in {a.op for a in setup.schedule.orders[rank]} else {},
    )
    yield Fault(
        "two copies",
        "two copies of the model exchange their gradients for longer than they save",
        ("time",),
        EVERYWHERE,
        _everywhere,
        _plant_copies,
        lambda setup, _: (
            {"schedule": schedule("dualpipev", setup.ranks, setup.schedule.microbatches)}
            if setup.schedule.placement.copies > 1
            else {}
        ),
    )
    bugs = (
        ("loss not divided", "a loss counts as much as the whole batch", _everywhere, EVERYWHERE),
        ("norm per stage", "each rank clips by a norm of its own", _everywhere, EVERYWHERE),
        ("tied copies drift apart", "each copy of a weight gets its own gradient alone", _ends, "two ranks"),
        (
            "gradients newest first",
            "gradients are received in another order than sent",
            _links,
            "two ranks",
        ),
        ("one receive buffer", "a rank receives all activations into the same memory", _ranks, "a rank"),
    )
    for name, text, places, where in bugs:
        placed = places in (_links, _ranks)
        yield Fault(name, text, ("gradients",), where, places, _bug(name, places, placed), _fix(name))


FAULTS = {fault.name: fault for fault in _faults()}


def planted(fault: Fault, random: Random) -> tuple[Setup, Any]:
    """Return a job with this fault, and the fault's place. Its goal and room are those of the cured job."""
    while True:
        job, where = fault.plant(random)
        cured = changed(job, **fault.cure(job, where))
        room = 1.1 * max(cured.peaks)
        if "memory" not in fault.breaks and not job.hangs:
            room = max(room, 1.1 * max(job.peaks))
        goal = cured.step
        job = replace(job, goal=goal, room=room)
        if job.hangs or job.bug or job.step > CLEAR * goal or max(job.peaks) > room:
            return job, where
