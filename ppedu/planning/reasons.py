"""Why nothing fits, and why a choice is not the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from ppedu.core import PipelineError, SettingError
from ppedu.core.numeric import Number, pretty
from ppedu.planning.choice import Choice, Workload
from ppedu.zoo import schedule as registered

GB = 1e9
Sentence = list[str | tuple[str, list[str]]]  # a number comes with the sentences that say where it is from


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
    return [best, *(replace(each, why=joined(compared(each, best, unit))) for each in others)]


def above(size: Number, limit: Number) -> str:
    """Return a size in GB, with as many digits as show that it is above a limit."""
    texts = (f"{float(size) / GB:.{digits}f}" for digits in range(10))
    return next((text for text in texts if float(text) > limit / GB), f"{float(size) / GB}")


def joined(sentence: Sentence) -> str:
    """Return a sentence as text."""
    return "".join(part if isinstance(part, str) else part[0] for part in sentence)


def compared(choice: Choice, best: Choice, unit: str) -> Sentence:
    """Return how a choice differs from the best, after its name."""
    if choice.excess:
        rank = max(range(len(choice.kinds)), key=choice.memory.__getitem__)
        size = f"{float(choice.memory[rank]) / GB:.1f} GB on rank {rank}"
        return [f"needs {size}, {float(choice.excess) / GB:.1f} GB too many"]
    longer = choice.longer(best)
    if -0.0005 <= longer < 0.0005:
        return ["takes as long"]

    def each(time: Callable[[Choice], Any], what: str) -> tuple[Any, list[str]]:
        """Return how much more time a choice takes for the best's microbatches, with a sentence."""
        mine, others = time(choice) * best.microbatches / choice.microbatches, time(best)
        scaled = f", for {best.microbatches} microbatches" if best.microbatches != choice.microbatches else ""
        return mine - others, [f"{what}{scaled}: {pretty(mine, unit)}, and {pretty(others, unit)} with {best.name}."]

    whole = each(lambda one: one.whole, "The step with gradients and optimizer")[1]
    if longer < 0:
        sizes = [float(max(one.memory)) / GB for one in (choice, best)]
        fullest = [f"The fullest rank: {sizes[0]:.1f} GB, and {sizes[1]:.1f} GB with {best.name}."]
        more = f"{sizes[0] - sizes[1]:.1f} GB"
        return ["takes ", (f"{-longer:.1%}", whole), " less, and needs ", (more, fullest), " more"]
    tiny = best.step_time / 5000

    def more_of(found: tuple[Any, list[str]]) -> Sentence:
        time, said = found
        if abs(time) <= tiny:
            return ["as long"]
        return [(pretty(abs(time), unit), said), " longer" if time > 0 else " less"]

    works = each(lambda one: one.busiest, "The busiest rank works")
    waits = each(lambda one: one.step_time - one.busiest, "The busiest rank waits")
    after = each(lambda one: one.after or 0, "Gradients and optimizer add to the step")
    said: Sentence = ["takes ", (f"{longer:.1%}", whole), " longer: its busiest rank works "]
    said += [*more_of(works), " and waits ", *more_of(waits)]
    return [*said, "; gradients and optimizer take ", *more_of(after)] if abs(after[0]) > tiny else said
