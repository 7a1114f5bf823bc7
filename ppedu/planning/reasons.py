"""Why nothing fits, and why a choice is not the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ppedu.core import PipelineError
from ppedu.core.numeric import pretty
from ppedu.planning.choice import Choice, Workload
from ppedu.zoo import schedule as registered

GB = 1e9


def shortage(job: Workload, closest: Choice, recompute: bool | None) -> str:
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
    if job.machine.memory < 1e6:
        return f"the machine has a memory of {job.machine.memory:g} bytes; 80 GB are memory=80e9"
    return (
        f"nothing fits in {job.machine.memory / GB:g} GB on {job.ranks} ranks: the closest, {closest.name}, needs "
        f"{sizes[rank] / GB:.1f} GB on rank {rank} ({parts}), {excess / GB:.1f} GB too many; what would fit: "
        f"{', or '.join(more)}"
    )


def _smallest(job: Workload, choice: Choice) -> Choice:
    """Return a choice with another partition, which needs nearly the least memory."""
    while True:
        found = job.cutting(choice.schedule, choice.recompute, limit=max(choice.memory) * 0.97)
        found.start()
        if found.excess(found.best):
            return choice
        choice = job.choice(found)


def _fits_on(job: Workload, ranks: int, microbatches: int) -> bool:
    """Return whether a schedule that needs little memory fits on this number of ranks."""
    wider = Workload(job.pieces, job.machine, ranks, job.replicas)
    for name in ("1f1b", "v-min"):
        with suppress(PipelineError):
            found = wider.cutting(registered(name, ranks, max(microbatches, 2 * ranks)), True)
            found.start()
            if not found.excess(found.best):
                return True
    return False


def explained(choices: Sequence[Choice], unit: str) -> Iterator[Choice]:
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
