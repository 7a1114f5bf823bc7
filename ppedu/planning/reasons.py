"""Why nothing fits, and why a choice is not the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from ppedu.core import PipelineError, SettingError
from ppedu.core.numeric import pretty
from ppedu.planning.choice import Choice, Workload
from ppedu.zoo import schedule as registered

GB = 1e9


class ShortageError(SettingError):
    """Nothing fits in the memory.

    Attributes:
        needed: The least that a GPU would have to have, in bytes.
        explain: Returns the message. It looks for what would fit, and `divide` shows one of many messages.
    """

    def __init__(self, needed: float, explain: Callable[[], str]):
        super().__init__()
        self.needed, self.explain = needed, cache(explain)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _said, (self.needed, str(self))


def _said(needed: float, message: str) -> ShortageError:
    return ShortageError(needed, lambda: message)


def shortage(job: Workload, closest: Choice, kept: bool, fixed: bool) -> ShortageError:
    """Return the error if nothing fits: what is short, by how much, and what would fit.

    Args:
        kept: Whether the caller refused to recompute activations. fixed: Whether the caller gave the partition.
    """
    limit = job.machine.memory
    if limit < 1e6:
        return ShortageError(0, lambda: f"the machine has a memory of {limit:g} bytes; 80 GB are memory=80e9")
    smallest = _smallest(job, closest)
    shown = closest if fixed else smallest
    more = ["another partition"] if fixed and not smallest.excess else []
    return ShortageError(float(max(shown.memory)), lambda: _short(job, shown, kept, more))


def _short(job: Workload, closest: Choice, kept: bool, more: Sequence[str]) -> str:
    """Return the message. `more`: What else would fit."""
    limit, sizes = job.machine.memory, closest.memory
    rank = max(range(len(sizes)), key=sizes.__getitem__)
    parts = ", ".join(f"{kind} {size / GB:.1f}" for kind, size in closest.kinds[rank].items() if size >= 0.05 * GB)
    microbatches = closest.microbatches
    more = [*more, *(["recompute=True"] if kept and _fits_on(job, job.ranks, microbatches) else [])]
    wider = (job.ranks * factor for factor in (2, 4, 8) if job.ranks * factor <= len(job.pieces))
    more += [f"{ranks} ranks" for ranks in wider if _fits_on(job, ranks, microbatches)][:1]
    more.append(f"a memory of {sizes[rank] / GB:.1f} GB")
    return (
        f"nothing fits in {limit / GB:g} GB on {job.ranks} ranks: the closest, {closest.name}, needs "
        f"{sizes[rank] / GB:.1f} GB on rank {rank} ({parts}), {(sizes[rank] - limit) / GB:.1f} GB too many; what would "
        f"fit: {', or '.join(more)}"
    )


def _smallest(job: Workload, choice: Choice) -> Choice:
    """Return a choice with another partition, which needs nearly the least memory."""
    smallest, most = None, max(choice.memory)
    while True:
        found = job.cutting(choice.schedule, choice.recompute, limit=most * 0.97)
        found.start()
        if found.excess(found.best):
            return job.choice(smallest) if smallest else choice
        smallest, most = found, max(found.memory(found.best))


def _fits_on(job: Workload, ranks: int, microbatches: int) -> bool:
    """Return whether a schedule that needs little memory fits on this number of ranks."""
    wider = replace(job, ranks=ranks)
    for name in ("1f1b", "v-min"):
        with suppress(PipelineError):
            found = wider.cutting(registered(name, ranks, max(microbatches, 2 * ranks)), True)
            found.start()
            if not found.excess(found.best):
                return True
    return False


def explained(choices: Sequence[Choice], unit: str) -> list[Choice]:
    """Return the choices, each with the reason why it is not the best, the first one."""
    best, *others = choices
    return [best, *(replace(each, why=_why(each, best, unit)) for each in others)]


def _why(choice: Choice, best: Choice, unit: str) -> str:
    if choice.excess:
        rank = max(range(len(choice.kinds)), key=choice.memory.__getitem__)
        size = f"{float(choice.memory[rank]) / GB:.1f} GB on rank {rank}"
        return f"needs {size}, {float(choice.excess) / GB:.1f} GB too many"
    more_memory = (max(choice.memory) - max(best.memory)) / GB
    if choice.longer(best) < -0.0005:
        return f"takes {-choice.longer(best):.1%} less, and needs {float(more_memory):.1f} GB more"
    if choice.longer(best) < 0.0005:
        return "takes as long"
    scale = best.microbatches / choice.microbatches  # per microbatch, if the numbers differ
    works = choice.busiest * scale - best.busiest
    waits = (choice.step_time - choice.busiest) * scale - (best.step_time - best.busiest)
    after = (choice.after or 0) * scale - (best.after or 0)
    tiny = best.step_time / 5000
    more = f"works {_more(works, unit, tiny)} and waits {_more(waits, unit, tiny)}"
    if abs(after) > tiny:
        more += f"; gradients and optimizer take {_more(after, unit, tiny)}"
    return f"takes {float(choice.longer(best)):.1%} longer: its busiest rank {more}"


def _more(time: Any, unit: str, tiny: Any) -> str:
    """Return a difference of times in words."""
    if abs(time) <= tiny:
        return "as long"
    return f"{pretty(abs(time), unit)} {'longer' if time > 0 else 'less'}"
