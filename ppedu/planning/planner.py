"""Which schedule, partition and number of microbatches make a model's step shortest, within the machines' memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from inspect import signature
from itertools import product
from typing import Any
from weakref import WeakValueDictionary

from ppedu.core import Schedule, SettingError
from ppedu.core.numeric import Number, plural, pretty
from ppedu.core.tables import Progress, reporter
from ppedu.core.validate import require_count, require_instance, shown
from ppedu.planning.choice import Choice, Workload
from ppedu.planning.implementations import implementation_named
from ppedu.planning.layout import cuts_of
from ppedu.planning.machine import BANDWIDTH, Machine
from ppedu.planning.model import Model
from ppedu.planning.offload import Offloading
from ppedu.planning.partition import Cuts, Cutting
from ppedu.planning.pieces import MOST, SECONDS, Pieces, per_weight, require_amount
from ppedu.planning.plan import Plan
from ppedu.planning.presets import machine_named, model_named
from ppedu.planning.reasons import explained, shortage
from ppedu.planning.slices import sliced
from ppedu.planning.work import pieces_of
from ppedu.zoo import schedule as registered
from ppedu.zoo import schedules as all_schedules
from ppedu.zoo.registry import options_of, published, require_registered

MOST_CHUNKS = 8
MOST_RANKS = 512
MOST_FORWARDS = 4_000_000  # of all schedules that are tried: a minute or two, and some gigabytes
PROMISING = 6  # schedules that are searched longer
DISTORTED = 1.25  # times as long as with even stages
ALIKE = 0.005  # times that differ by less are alike: the one with less memory is better
QUICKLY, LONGER = 200_000, 2_300_000  # spent on each schedule, and on the promising ones; see `Cutting.spent`
# How a model by sizes is split: arguments of `Model.pieces` that `plan` passes on.
SPLITS = [name for name in signature(pieces_of).parameters if name not in ("model", "sequence", "batch", "past")]


def plan(
    model: Model | Pieces | str,
    machine: Machine | str,
    ranks: int,
    microbatches: int | Iterable[int] = 32,
    *,
    sequence: int | None = None,
    batch: int = 1,
    replicas: int = 1,
    schedules: Iterable[str] | None = None,
    partition: str | Sequence[int] | None = None,
    recompute: bool | str | None = None,
    zero: int | None = None,
    blocking: bool = False,
    barrier: bool = True,
    host_bandwidth: Number | None = None,
    effort: float = 1,
    seconds: float | None = None,
    progress: Progress | bool | None = None,
    **split: Any,
) -> Plan:
    """Return a `Plan`: schedules with their best partitions for a model on `ranks` GPUs in a row, fastest first.

    A schedule that fits only with so uneven stages that it takes 25% longer counts as too large.
    Of those that are slower than the fastest by less than 0.5%, the one with the least memory comes before all others.

    Args:
        model: Sizes (`Model`), times (`Model.measured`), or the name of a published model; see
            `ppedu.planning.presets`.
        machine: A `Machine`, or the name of one.
        microbatches: Of a step and replica; several numbers to compare.
        sequence, batch: Tokens of a sequence, sequences of a microbatch. Times that were measured are for these.
        replicas: Pipelines that train side by side.
        schedules: Names to try; by default all, with two and more chunks where that is possible. Those that cut
            sequences into slices are tried with 2, 4, 8 and 16 that take equally long, of at least 1024 tokens on each
            GPU; by default, if sequences have at least 32,768. They are for models by sizes.
        partition: Of your own: the number of pieces of each stage, or a layout as Megatron writes it, such as
            "Ettt|tttt|tttt|tttL". By default, the best one is searched for.
        recompute: True recomputes the activations of whole stages, "full" those of each layer, "selective" the
            attention. False and "none" recompute nothing; by default, stages are recomputed where a schedule does not
            fit without, and `mario` is tried, whose order has recomputation.
        zero: What the GPUs that hold the same stage share (arXiv 1910.02054, section 5): 0 nothing, 1 the optimizer, 2
            also the gradients, 3 also the weights, which are then gathered for each use; the time for those of experts
            is not counted. By default as in the implementation.
        blocking: A rank does not compute while it sends and receives, as in Megatron without
            `--overlap-p2p-communication`. Schedules of many chunks send most.
        barrier: False if ranks begin the next step without waiting for each other, as with an optimizer that is
            validated afterwards (arXiv 2401.10241, section 4; `pp.run.PostValidation`). A step then takes as long as
            its longest rank.
        host_bandwidth: Bytes per second between a GPU and the memory of its host, such as 25e9. Where a schedule does
            not fit, it is then tried with offload, too: as few activations as it takes go to the host and come back
            beside computations (`pp.offload`). It depends on the server more than on the GPU, and few programs
            offload, so by default none is.
        effort: The part of the usual work for which partitions are improved; 0.2 searches less, and 5 more. The same
            question has the same answer on every machine.
        seconds: To search for at most; by default, the search ends by itself. Ctrl+C ends it with what it has found.
        progress: True draws a bar. A function is called with the schedule that is tried, and with the part of the
            search that is done.
        split: How a model by sizes is split and kept: the other arguments of `Model.pieces`, such as `tensor`,
            `context`, `expert`, `precision` and `implementation`. A rank of the pipeline is `tensor` · `context` GPUs;
            memory, FLOPs and messages are those of one. Pieces know theirs: another value than that is refused, except
            for `bytes_per_weight`.

    Raises:
        SettingError: An argument is not possible, or nothing fits in the machine's memory; it says how much is missing.
    """
    model, machine = model_named(model), machine_named(machine)
    ranks, replicas = require_count("ranks", ranks, most=MOST_RANKS), require_count("replicas", replicas, most=MOST)
    report = reporter(progress)
    if recompute is not None:
        require_instance("recompute", recompute, bool | str, 'True, False, "none", "selective", "full" or None')
    require_amount("effort", effort, "a number of at least 0")
    until = math.inf
    if seconds is not None:
        require_amount("seconds", seconds, "a number of at least 0")
        until = time.monotonic() + seconds
    if isinstance(recompute, str):
        split["recompute"] = recompute
    names = _names(schedules)
    pieces = _pieces(model, machine, sequence, batch, split)
    if zero is None:
        zero = implementation_named(pieces.implementation).zero
    require_count("zero", zero, least=0, most=3)
    if replicas * pieces.gpus % pieces.expert:
        raise SettingError(
            f"experts on {pieces.expert} GPUs need a multiple of that many GPUs for each stage; got {pieces.gpus} in "
            f"each of {plural(replicas, 'replica')}; take a divisor of {replicas * pieces.gpus}"
        )
    _require_below_peak(pieces, machine)
    require_instance("blocking", blocking, bool, "True or False")
    require_instance("barrier", barrier, bool, "True or False")
    asked = [] if schedules is None else [name for name in names if "slices" in options_of(name)]
    slices = sliced(model, machine, pieces, sequence, batch, split, asked)
    if host_bandwidth is not None:
        require_amount("host_bandwidth", host_bandwidth, *BANDWIDTH)
    job = Workload(pieces, machine, ranks, replicas, zero, blocking, barrier, batch, slices, host_bandwidth)
    if ranks > len(pieces):
        raise SettingError(
            f"{ranks} ranks are more than the {plural(len(pieces), 'piece')} of the model: the embedding, each layer "
            f"and the head; take at most {plural(len(pieces), 'rank')}, or give a number for each piece"
        )
    cuts = None if partition is None else cuts_of(partition, pieces.pieces)
    cut = len(cuts) - 1 if cuts else None
    candidates = [*_candidates(job, microbatches, names, schedules is not None, cut, recompute in (None, True))]
    if not candidates:
        stages = f" in {plural(len(cuts) - 1, 'stage')}" if cuts else ""
        raise SettingError(f"no schedule runs on {ranks} ranks with {microbatches} microbatches{stages}")
    tried = [job.cutting(each, recompute is True and not each.recomputed, until) for each in candidates]
    interrupted = False
    try:
        _search(job, tried, recompute is None, cuts, effort, report)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        report("done", 1)
    found = [
        (each, choice)
        for each in tried
        if each.best and ((choice := job.choice(each)).schedule.offloaded or not isinstance(each, Offloading))
    ]
    if not found:
        raise SettingError("the search was interrupted before it found anything")
    choices = sorted((choice for _, choice in found), key=_order)
    if not cuts and not interrupted:
        for search, choice in found:
            if choice is not choices[0] and (even := _even(search)):
                choices[choices.index(choice)] = job.choice(even)
        choices.sort(key=_order)
    if choices[0].excess > 0:
        closest = next(each for each in choices if not each.schedule.offloaded)
        raise shortage(job, closest, recompute is False, cuts is not None)
    fastest = choices[0]
    alike = [each for each in choices if not each.excess and each.longer(fastest) <= ALIKE]
    leanest = min(alike, key=lambda each: max(each.memory))
    choices.remove(leanest)
    choices.insert(0, leanest)
    return Plan(job, tuple(explained(choices, pieces.unit)), interrupted or time.monotonic() > until, interrupted)


def _order(choice: Choice) -> tuple[bool, Number]:
    """Return what choices are ordered by: those that fit by their time, then the others by what they lack."""
    return choice.excess > 0, choice.excess or choice.whole / choice.microbatches


def _even(search: Cutting) -> Cutting | None:
    """Return a schedule's even stages, which do not fit, if far slower, uneven ones do."""
    busy = search.busy(search.best)
    if search.excess(search.best) or max(busy) * len(busy) < DISTORTED * sum(busy):
        return None
    even = replace(search, limit=math.inf)
    even.start()
    if not search.excess(even.best) or search.time(search.best) < DISTORTED * search.time(even.best):
        return None
    return replace(even, limit=search.limit)


def _require_below_peak(pieces: Pieces, machine: Machine) -> None:
    """Raise SettingError if the pieces would use more of their GPUs than all: a utilization (MFU) above 1.

    No schedule takes less than F and the shorter one of B and I with W on each rank.
    """
    if not pieces.flops or machine.peak is None:
        return
    times = (piece.forward + min(piece.backward, piece.input + piece.weight) for piece in pieces.pieces)
    seconds = float(sum(times)) * SECONDS[pieces.unit]
    peak = machine.peak * machine.speedup(pieces.precision)
    least = float(pieces.flops / pieces.gpus / peak)
    if seconds < least * (1 - 1e-9):
        raise SettingError(
            f"the pieces take {pretty(seconds, 's')} for a microbatch of {pieces.flops:.3g} FLOPs on "
            f"{plural(pieces.gpus, 'GPU')}, which takes at least {pretty(least, 's')} at the peak of {peak:.3g} "
            "FLOP/s each, so the utilization (MFU) would be above 1; give pieces whose times, flops and tensor are "
            "those of the same GPUs, and the peak of these GPUs"
        )


def _pieces(model: Model | Pieces, machine: Machine, sequence: int | None, batch: int, split: dict[str, Any]) -> Pieces:
    """Return the timed pieces of a model. split: How it is split, where it is given."""
    batch = require_count("batch", batch, most=MOST)
    sequence = None if sequence is None else require_count("sequence", sequence, most=MOST)
    unknown = [name for name in split if name not in SPLITS]
    if unknown:
        near = get_close_matches(unknown[0], [*SPLITS, *signature(plan).parameters], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise SettingError(f"unknown argument {unknown[0]!r}; {hint}a model is split by {', '.join(SPLITS)}")
    if isinstance(model, Model):
        if sequence is None:
            raise SettingError("sequence is missing: the tokens of a sequence, such as sequence=8192")
        return model.pieces(sequence, batch, **split).timed(machine)
    if "bytes_per_weight" in split:
        model = replace(model, bytes_per_weight=per_weight(split["bytes_per_weight"]))
    for name, value in split.items():
        if name in ("sequence_parallel", "element"):
            raise SettingError(f"{name} is for models by sizes; leave it out: pieces are those of one value")
        if name != "bytes_per_weight" and value != getattr(model, name):
            raise SettingError(
                f"the pieces are those of {name}={getattr(model, name)!r}, not of {name}={value!r}; leave out {name}, "
                f"or make them for it: model.pieces(…, {name}={value!r}) of a Model"
                + (f", or Model.measured(…, tensor={value}) with its times" if name == "tensor" else "")
            )
    if batch != 1 and sequence is None:
        raise SettingError("batch= is for models by sizes; measured times are those of the microbatch as it is")
    if model.tokens is not None and sequence is not None and sequence * batch != model.tokens:
        raise SettingError(
            f"the pieces are for microbatches of {model.tokens} tokens, not {sequence * batch}; leave out sequence and "
            "batch, or make them with model.pieces(sequence=…, batch=…)"
        )
    model = model.timed(machine)
    return model if sequence is None else replace(model, tokens=sequence * batch)


def _candidates(
    job: Workload, microbatches: Any, names: Sequence[str], asked: bool, cut: int | None, may_recompute: bool
) -> Iterator[Schedule]:
    """Yield the schedules to try. A name that was `asked` for must be possible, others are left out if they are not.

    Args:
        cut: The number of stages, if there is just one; otherwise two chunks and more are tried.
        may_recompute: Whether there may be R in the orders.
    """
    few = range(2, 1 + min(MOST_CHUNKS, max(2, len(job.pieces) // job.ranks)))
    if cut is not None:
        few = range(max(2, cut // job.ranks), cut // job.ranks + 1)
    options: dict[str, list[dict[str, int]]] = {}
    stages = 0  # of all schedules, on each rank, once for each slice
    for name in names:
        known = options_of(name)
        if "slices" in known and not job.slices:
            continue
        counts = {what: tried for what, tried in (("chunks", few), ("slices", job.slices)) if what in known and tried}
        options[name] = [dict(zip(counts, each, strict=True)) for each in product(*counts.values())]
        of_rank = 1 if "chunks" in counts else require_registered(name).chunks
        stages += of_rank * sum(math.prod(each.values()) for each in options[name])
    several = microbatches if isinstance(microbatches, (list, tuple, range)) else [microbatches]
    numbers, forwards = [], 0
    for count in several:
        numbers.append(require_count("microbatches", count))
        forwards += job.ranks * stages * numbers[-1]
        if forwards > MOST_FORWARDS:
            raise SettingError(
                f"{plural(len(options), 'schedule')} with {shown(microbatches)} microbatches on {job.ranks} ranks are "
                f"more than {MOST_FORWARDS:,} forwards, too many to plan; take fewer microbatches, or name fewer "
                'schedules, such as schedules=["1f1b"]'
            )
    for count, name in product(numbers, options):
        built, error = [], None
        for option in options[name]:
            try:
                found = legal(name, job.ranks, count, **option)
                if found.recomputed and not may_recompute:
                    raise SettingError(f"{name!r} recomputes stages; leave out recompute, or the schedule")
                built.append(found)
            except Exception as caught:  # a generator that was registered may raise anything
                error = error or caught
        if asked and error and not built:
            raise error
        yield from (each for each in built if cut in (None, each.stages))


# Of published schedules, so that the plans of `divide` share one, as long as one of them lives.
_ALIVE: WeakValueDictionary[tuple[Any, ...], Schedule] = WeakValueDictionary()


def legal(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Return a registered schedule.

    Raises:
        SettingError: Its order does what no plan does.
        ScheduleError: It is not legal.
        Exception: Whatever its generator raises.
    """
    key = name, ranks, microbatches, *sorted(options.items())
    shared = name in published()  # a user's generator may change from call to call
    if shared and (alive := _ALIVE.get(key)):
        return alive
    schedule = registered(name, ranks, microbatches, **options)
    schedule.validate()
    place = schedule.placement
    for is_so, what in (
        (schedule.offloaded, "offloads (O) in its order; plans do so with host_bandwidth=25e9; take gis, say"),
        (schedule.updated, "updates its weights before the end (U), as no plan does; take 1f1b, say"),
        (place.backwards, "streams weights from the host, as no plan does; take looped-bfs, say"),
        (place.barriers, "shares the head in its order; plans do so with shard_vocabulary=True; take 1f1b, say"),
    ):
        if is_so:
            raise SettingError(f"{name!r} {what}")
    if shared:
        _ALIVE[key] = schedule
    return schedule


def _names(given: Any) -> list[str]:
    """Return the names of the schedules to try: by default, all that train."""
    if given is None:
        return [name for name in all_schedules() if not require_registered(name).forward_only]
    chosen = [given] if isinstance(given, str) else given
    if not isinstance(chosen, (list, tuple, set, frozenset)) or not chosen:
        raise SettingError(f'schedules must be a list of names, such as ["1f1b", "zb-v"]; got {shown(given)}')
    for name in chosen:
        if require_registered(name).forward_only:
            raise SettingError(f"{name!r} runs forwards alone, and a plan is for training; leave it out")
    return [*chosen]


def _leaner(job: Workload, search: Cutting, may_recompute: Any) -> list[Cutting]:
    """Return the searches for a schedule with less memory: with recomputation, and with activations on the host."""
    if search.recompute or search.schedule.recomputed:
        return []
    ways = [True] * bool(may_recompute) + [False] * bool(job.host_bandwidth)
    return [job.cutting(search.schedule, again, search.until, offload=not again) for again in ways]


def _search(
    job: Workload, tried: list[Cutting], may_recompute: bool, cuts: Cuts | None, effort: float, progress: Progress
) -> None:
    """Search for the best partition of each schedule, first quickly for all, then longer for the most promising.

    What does not fit, or with uneven stages alone, is tried with recomputation, too; and if even stages do not fit,
    with offload. These searches join `tried`. With `cuts`, there is nothing to search for.
    """
    if cuts:
        for each in [*tried]:
            each.best = cuts
            if each.excess(cuts):
                tried += [replace(other, best=cuts) for other in _leaner(job, each, may_recompute)]
        return
    for index, each in enumerate([*tried]):
        progress(each.schedule.name, index / len(tried) / 2)
        each.start()
        for other in _leaner(job, each, may_recompute and (each.excess(each.best) or _even(each))):
            other.start()
            if other.recompute or other.simulated(other.best).schedule.offloaded:
                tried.append(other)

    def promise(each: Cutting) -> tuple[Any, Any]:
        excess, time = each.worth(each.best)
        return excess, time / (each.schedule.microbatches // each.schedule.slices)

    def related(each: Cutting) -> list[Cuts]:
        return [other.best for other in tried if other.schedule.placement == each.schedule.placement]

    for index, each in enumerate(sorted(tried, key=promise)):
        progress(each.schedule.name, 0.5 + index / len(tried) / 4)
        each.adopt(related(each))
        each.improve(effort * QUICKLY)
    for index, each in enumerate(sorted(tried, key=promise)):
        progress(each.schedule.name, 0.75 + index / len(tried) / 4)
        better = each.adopt(related(each))
        if better or index < PROMISING:
            each.improve(effort * (LONGER if index < PROMISING else QUICKLY))
