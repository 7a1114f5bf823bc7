"""Which schedule, partition and number of microbatches make a model's step shortest, within the machines' memory."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ppedu.core.costs import Costs
from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.numeric import Number, plural, pretty
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_count, require_instance, require_number
from ppedu.planning.handover import megatron, save, torchtitan
from ppedu.planning.machine import Machine
from ppedu.planning.model import Model
from ppedu.planning.partition import Cutting
from ppedu.planning.pieces import FLOP, SECONDS, Pieces
from ppedu.planning.presets import machine_named, model_named
from ppedu.zoo import schedule as registered
from ppedu.zoo import schedules as all_schedules
from ppedu.zoo.registry import require_registered

GB = 1e9
MOST_CHUNKS = 8
PROMISING, FIRST, LATER = (
    6,
    1_500_000,
    500_000,
)  # schedules that are searched longer; what is spent on each, and on the others
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Choice:
    """A schedule with its best partition.

    partition: The pieces of each stage: 0 is the embedding, then come the layers, and the last one is the head.
    recompute: Whether each stage runs its forward again before its backward, from its input (`Costs.recompute`).
    costs: Of the stages, to simulate with; activations in bytes.
    step_time: Of the pipeline, in the unit of the model. after: What gradient reduction and optimizer add; None if the
        machine's bandwidths are unknown.
    tokens_per_second: Of all replicas. mfu: The model FLOPs utilization. None if unknown.
    busiest: How long the busiest rank works. bubble: The idle share of all ranks' time.
    kinds: By rank, the bytes at its peak, by what they are for. memory: Their sums.
    excess: By how many bytes the fullest rank exceeds the machine's memory, or 0.
    proven: Whether no partition is better.
    why: How it differs from the best choice, in a sentence.
    """

    schedule: Schedule
    partition: tuple[range, ...]
    recompute: bool
    costs: Costs
    step_time: Number
    after: Number | None
    tokens_per_second: float | None
    mfu: float | None
    busiest: Number
    bubble: float
    kinds: tuple[dict[str, Number], ...]
    excess: Number
    proven: bool
    why: str = ""

    @property
    def memory(self) -> tuple[Number, ...]:
        return tuple(sum(kinds.values()) for kinds in self.kinds)

    @property
    def name(self) -> str:
        """The schedule's name, with its chunks if there are several, and with recomputation."""
        chunks = f", {self.schedule.chunks} chunks" if self.schedule.chunks > 1 else ""
        return f"{self.schedule.name}{chunks}{', recomputing' if self.recompute else ''}"

    @property
    def whole(self) -> Number:
        """The time of the step with gradient reduction and optimizer, as far as it is known."""
        return self.step_time + (self.after or 0)

    def longer(self, other: Choice) -> float:
        """Return by what fraction a microbatch takes longer than with another choice, the end of the step included."""
        mine, others = (each.whole / each.schedule.microbatches for each in (self, other))
        return float(mine / others - 1) if others else 0.0

    def timeline(self) -> Timeline:
        """Return the simulation of the step."""
        return simulate(self.schedule, self.costs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule and the partition to a file, for `python -m ppedu train --plan`.

        Raises:
            PipelineError: The file cannot be written.
        """
        save(path, self.schedule, self.partition, self.recompute)

    def torchtitan(self) -> list[list[str]]:
        """Return the names of each stage's modules, as torchtitan's `module_fqns_per_model_part` has them."""
        return torchtitan(self.partition)

    def megatron(self) -> str:
        """Return the layout for Megatron's `--pipeline-model-parallel-layout`: E, t, L; stages between |.

        Raises:
            SettingError: The schedule does not place its stages in a loop.
        """
        return megatron(self.schedule, self.partition)


@dataclass(frozen=True)
class Job:
    """A model and the machines that it is to run on."""

    pieces: Pieces
    machine: Machine
    ranks: int
    replicas: int
    tensor: int

    def cutting(self, schedule: Schedule, recompute: bool, until: float = math.inf) -> Cutting:
        """Return the search for a schedule's partition."""
        delay = self.machine.delays(self.ranks, self.pieces.message, self.pieces.unit, self.tensor)
        return Cutting(schedule, self.pieces, self.machine.memory, delay, recompute, until)

    def choice(self, found: Cutting) -> Choice:
        """Return the best partition of a search with all its numbers."""
        cuts, schedule, pieces = found.best, found.schedule, self.pieces
        kinds = tuple(found.kinds(rank, cuts) for rank in range(self.ranks))
        step_time, busy = found.time(cuts), found.busy(cuts)
        after = self.after(kinds, schedule.placement.copies)
        seconds = float(step_time + (after or 0)) * SECONDS[pieces.unit]
        tokens = pieces.tokens and pieces.tokens * schedule.microbatches * self.replicas
        flops, peak = pieces.flops, self.machine.peak
        return Choice(
            schedule,
            tuple(found.ranges(cuts)),
            found.recompute,
            found.costs(cuts),
            step_time,
            after,
            tokens / seconds if tokens and seconds else None,
            float(flops * schedule.microbatches / (seconds * peak * self.ranks * self.tensor))
            if flops and peak
            else None,
            max(busy),
            float(1 - sum(busy) / (self.ranks * step_time)) if step_time else 0.0,
            kinds,
            max(0, *(size - self.machine.memory for size in found.memory(cuts))),
            found.proven,
        )

    def after(self, kinds: Sequence[dict[str, Number]], copies: int) -> Number | None:
        """Return the time of gradient reduction and optimizer on the slowest rank, if the bandwidths are known.

        A ring sends each gradient 2 · (n - 1) / n times among the n ranks that hold the same stage. The optimizer reads
        and writes all that belongs to a weight.
        """
        width, machine = self.replicas * copies, self.machine
        within = self.replicas * self.ranks * self.tensor <= (machine.node or 1)
        bandwidth = machine.near_bandwidth if within and machine.near_bandwidth else machine.bandwidth
        if (width > 1 and bandwidth is None) or machine.memory_bandwidth is None:
            return None
        times = []
        for each in kinds:
            reduced = each["gradients"] * 2 * (width - 1) / width / (bandwidth or 1)
            read = 2 * (each["weights"] + each["gradients"] + each["optimizer"]) / machine.memory_bandwidth
            times.append((reduced + read) / SECONDS[self.pieces.unit])
        return max(times)


def plan(
    model: Model | Pieces | str,
    machine: Machine | str,
    ranks: int,
    microbatches: int | Iterable[int] = 32,
    *,
    sequence: int | None = None,
    batch: int = 1,
    replicas: int = 1,
    tensor: int = 1,
    schedules: Iterable[str] | None = None,
    recompute: bool | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Any:
    """Return a `Plan`: schedules with their best partitions for a model on `ranks` GPUs in a row, fastest first.

    model: Sizes (`Model`), times (`Model.measured`), or the name of a published model; see `ppedu.planning.presets`.
    machine: A `Machine`, or the name of one.
    microbatches: Of a step and replica; several numbers to compare.
    sequence, batch: Tokens of a sequence, sequences of a microbatch. Times that were measured are for these.
    replicas: Pipelines that train side by side. tensor: GPUs that split each stage of a model given by sizes; a rank
        of the pipeline is then `tensor` GPUs, and memory and FLOPs are those of one.
    schedules: Names to try; by default all, with two and more chunks where that is possible.
    recompute: Recompute activations in the backward; by default where a schedule does not fit without.
    seconds: To search for at most; by default, the search ends by itself. Ctrl+C ends it with what it has found.
    progress: Is called with the schedule that is tried, and with the part of the search that is done.

    Raises:
        SettingError: An argument is not possible, or nothing fits in the machine's memory; it says how much is missing.
    """
    from ppedu.planning.table import Plan

    model = model_named(model) if isinstance(model, str) else model
    machine = machine_named(machine) if isinstance(machine, str) else machine
    require_instance("model", model, (Model, Pieces), "a Model, Model.measured(…), or the name of a published model")
    require_instance("machine", machine, Machine, 'a Machine, such as Machine(memory=80e9), or a name, such as "h100"')
    ranks, replicas = require_count("ranks", ranks), require_count("replicas", replicas)
    if recompute is not None:
        require_instance("recompute", recompute, bool, "True, False or None")
    until = math.inf
    if seconds is not None:
        require_number("seconds", seconds, lambda each: each >= 0, "a number of at least 0")
        until = time.monotonic() + seconds
    job = Job(_pieces(model, machine, sequence, batch, tensor), machine, ranks, replicas, tensor)
    if ranks > len(job.pieces):
        raise SettingError(
            f"{ranks} ranks are more than the {plural(len(job.pieces), 'piece')} of the model: the embedding, each "
            f"layer and the head; take at most {plural(len(job.pieces), 'rank')}, or give a number for each piece"
        )
    counts = microbatches if isinstance(microbatches, (list, tuple, range)) else [microbatches]
    tried = [
        job.cutting(each, bool(recompute), until)
        for count in counts
        for each in _candidates(job, require_count("microbatches", count), schedules)
    ]
    if not tried:
        raise SettingError(f"no schedule runs on {ranks} ranks with {microbatches} microbatches")
    interrupted = False
    try:
        _search(tried, recompute is None, progress or (lambda what, part: None))
    except KeyboardInterrupt:
        interrupted = True
    done = [job.choice(each) for each in tried if each.best]
    done.sort(key=lambda each: (each.excess > 0, each.excess or each.whole / each.schedule.microbatches))
    if not done:
        raise SettingError("the search was interrupted before it found anything")
    if done[0].excess > 0:
        raise SettingError(_shortage(job, done[0], recompute))
    interrupted = interrupted or time.monotonic() > until
    return Plan(job, tuple(_explained(done, job.pieces.unit)), interrupted)


def _pieces(model: Model | Pieces, machine: Machine, sequence: int | None, batch: int, tensor: int) -> Pieces:
    """Return the timed pieces of a model."""
    batch, tensor = require_count("batch", batch), require_count("tensor", tensor)
    if isinstance(model, Model):
        if sequence is None:
            raise SettingError("sequence is missing: the tokens of a sequence, such as sequence=8192")
        return model.pieces(require_count("sequence", sequence), batch, tensor).timed(machine.flops)
    if tensor != 1:
        raise SettingError("tensor= is for models by sizes; measured times are those of one GPU as they are")
    if batch != 1 and sequence is None:
        raise SettingError("batch= is for models by sizes; measured times are those of the microbatch as it is")
    if (
        model.tokens is not None
        and sequence is not None
        and require_count("sequence", sequence) * batch != model.tokens
    ):
        raise SettingError(
            f"the pieces are for microbatches of {model.tokens} tokens, not {sequence * batch}; leave out sequence and "
            "batch, or make them with model.pieces(sequence=…, batch=…)"
        )
    if model.unit == FLOP:
        model = model.timed(machine.flops)
    return model if sequence is None else replace(model, tokens=require_count("sequence", sequence) * batch)


def _candidates(job: Job, microbatches: int, names: Iterable[str] | None) -> Iterator[Schedule]:
    """Yield the schedules to try. A name that was given must be possible, others are left out if they are not."""
    given = names is not None
    chosen = all_schedules() if names is None else [names] if isinstance(names, str) else names
    if not isinstance(chosen, (list, tuple, set, frozenset)):
        raise SettingError(f'schedules must be a list of names, such as ["1f1b", "zb-v"]; got {names!r}')
    for name in chosen:
        entry = require_registered(name)
        if entry.forward_only:
            continue
        if "chunks" in inspect.signature(entry.generator).parameters:
            most = min(MOST_CHUNKS, max(2, len(job.pieces) // job.ranks))
            options: list[dict[str, Any]] = [{"chunks": chunks} for chunks in range(2, most + 1)]
        else:
            options = [{}]
        built, error = [], None
        for option in options:
            try:
                made = registered(name, job.ranks, microbatches, **option)
                made.validate()
                built.append(made)
            except PipelineError as caught:
                error = error or caught
        if given and error and not built:
            raise error
        yield from built


def _search(tried: list[Cutting], may_recompute: bool, progress: Progress) -> None:
    """Search for the best partition of each schedule, first quickly for all, then for the most promising first.

    What does not fit is tried with recomputation, too; it joins `tried`.
    """
    for index, each in enumerate([*tried]):
        progress(each.schedule.name, index / len(tried) / 2)
        each.start()
        if may_recompute and each.excess(each.best):
            tried.append(replace(each, recompute=True, best=(), times={}))
            tried[-1].start()

    def promise(each: Cutting) -> tuple[Any, Any]:
        excess, time = each.worth(each.best)
        return excess, time / each.schedule.microbatches

    for index, each in enumerate(sorted(tried, key=promise)):
        progress(each.schedule.name, 0.5 + index / len(tried) / 2)
        each.improve(FIRST if index < PROMISING else LATER)


def _shortage(job: Job, closest: Choice, recompute: bool | None) -> str:
    """Return the error if nothing fits: what is short, by how much, and what would fit."""
    closest = _smallest(job, closest)
    sizes = closest.memory
    rank = max(range(len(sizes)), key=sizes.__getitem__)
    parts = ", ".join(f"{kind} {size / GB:.1f}" for kind, size in closest.kinds[rank].items() if size >= 0.05 * GB)
    excess = sizes[rank] - job.machine.memory
    more = []
    if recompute is False and _fits_on(job, job.ranks, closest.schedule.microbatches):
        more.append("recompute=True")
    for factor in (2, 4, 8):
        if job.ranks * factor <= len(job.pieces) and _fits_on(job, job.ranks * factor, closest.schedule.microbatches):
            more.append(f"{job.ranks * factor} ranks")
            break
    more.append(f"a memory of {sizes[rank] / GB:.1f} GB")
    return (
        f"nothing fits in {job.machine.memory / GB:g} GB on {job.ranks} ranks: the closest, {closest.name}, needs "
        f"{sizes[rank] / GB:.1f} GB on rank {rank} ({parts}), {excess / GB:.1f} GB too many; what would fit: "
        f"{', or '.join(more)}"
    )


def _smallest(job: Job, choice: Choice) -> Choice:
    """Return a choice with another partition, which needs nearly the least memory."""
    while True:
        machine = replace(job.machine, memory=max(choice.memory) * 0.97)
        smaller = replace(job, machine=machine)
        found = smaller.cutting(choice.schedule, choice.recompute)
        found.start()
        if found.excess(found.best):
            return choice
        choice = smaller.choice(found)


def _fits_on(job: Job, ranks: int, microbatches: int) -> bool:
    """Return whether a schedule that needs little memory fits on this number of ranks."""
    wider = Job(job.pieces, job.machine, ranks, job.replicas, job.tensor)
    for name in ("1f1b", "v-min"):
        with suppress(PipelineError):
            found = wider.cutting(registered(name, ranks, max(microbatches, 2 * ranks)), True)
            found.start()
            if not found.excess(found.best):
                return True
    return False


def _explained(choices: Sequence[Choice], unit: str) -> Iterator[Choice]:
    """Yield the choices, each with the reason why it is not the best."""
    best = choices[0]
    for each in choices:
        if each is best:
            yield each
        elif each.excess:
            rank = max(range(len(each.kinds)), key=each.memory.__getitem__)
            size = f"{float(each.memory[rank]) / GB:.1f} GB on rank {rank}"
            yield replace(each, why=f"needs {size}, {float(each.excess) / GB:.1f} GB too many")
        else:
            scale = best.schedule.microbatches / each.schedule.microbatches  # per microbatch, if the numbers differ
            works = each.busiest * scale - best.busiest
            waits = (each.step_time - each.busiest) * scale - (best.step_time - best.busiest)
            tiny = best.step_time / 5000
            if each.longer(best) < 0.0005:
                yield replace(each, why="takes as long")
                continue
            more = f"works {_more(works, unit, tiny)} and waits {_more(waits, unit, tiny)}"
            after = ((each.after or 0) * scale) - (best.after or 0)
            if abs(after) > tiny:
                more += f"; gradients and optimizer take {_more(after, unit, tiny)}"
            yield replace(each, why=f"takes {float(each.longer(best)):.1%} longer: its busiest rank {more}")


def _more(time: Any, unit: str, tiny: Any) -> str:
    """Return a difference of times in words."""
    if abs(time) <= tiny:
        return "as long"
    return f"{pretty(abs(time), unit)} {'longer' if time > 0 else 'less'}"
