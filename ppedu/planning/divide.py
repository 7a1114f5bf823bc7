"""How to divide a number of GPUs: into tensor groups, sequence parts, experts, pipeline ranks and replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from random import Random
from textwrap import wrap
from typing import Any

from ppedu.core import PipelineError, SettingError
from ppedu.core.numeric import plural
from ppedu.core.tables import LINE, Progress, in_html, in_text, reporter
from ppedu.core.validate import require_count
from ppedu.planning.machine import Machine
from ppedu.planning.model import Model
from ppedu.planning.pieces import MOST, require_amount
from ppedu.planning.plan import Plan
from ppedu.planning.planner import MOST_RANKS, legal, plan
from ppedu.planning.presets import machine_named, model_named
from ppedu.planning.reasons import GB, ShortageError

FIRST = ("1f1b", "zb-v")  # the schedules by which divisions are compared before the best are planned
PROMISING = 3  # divisions that are planned with all schedules
LEAST = 30  # times as long as with two schedules, such a plan takes at least: it has to build and simulate all
SHOWN = 10  # in the printed table


@dataclass(frozen=True)
class Division:
    """A way to divide the GPUs, with its plan.

    Attributes:
        tensor, context, expert, replicas: As in `plan` and `Model.pieces`. batch: Sequences of a microbatch.
    """

    tensor: int
    context: int
    expert: int
    replicas: int
    batch: int
    plan: Plan

    @property
    def tokens_per_second(self) -> float:
        return self.plan.best.tokens_per_second or 0.0


@dataclass(frozen=True)
class Divisions:
    """The answer of `ppedu.divide`.

    Attributes:
        rows: The fastest first.
        too_large: How many other ways to divide the GPUs do not fit in their memory, or cannot run what was asked.
        interrupted: Whether the search was ended early.
    """

    rows: tuple[Division, ...]
    too_large: int
    interrupted: bool = False

    @property
    def best(self) -> Division:
        return self.rows[0]

    def _cells(self, count: int) -> Iterator[Sequence[str]]:
        """Yield the head of the table and its rows."""
        of_experts = any(row.expert > 1 for row in self.rows)
        sizes = ["tensor", "context", *["expert"] * of_experts, "ranks", "replicas", "microbatch"]
        yield *sizes, "schedule", "tokens/s", "", "MFU", "GB"
        for row in self.rows[:count]:
            best = row.plan.best
            slower = "best" if row is self.best else f"{row.tokens_per_second / self.best.tokens_per_second - 1:.1%}"
            numbers = (
                row.tensor,
                row.context,
                *[row.expert] * of_experts,
                best.schedule.ranks,
                row.replicas,
                row.batch,
            )
            speed = f"{row.tokens_per_second:,.0f}", slower, "" if best.mfu is None else f"{best.mfu:.1%}"
            yield *map(str, numbers), best.name, *speed, f"{float(max(best.memory)) / GB:.1f}"

    def __str__(self) -> str:
        lines = [line for row in in_text(self._cells(SHOWN), 30, LINE) for line in row]
        if len(self.rows) > SHOWN:
            lines.append(f"… and {len(self.rows) - SHOWN} more")
        lines += ["", *wrap(f"the first: {self.best.plan.settings}", LINE)]
        if self.too_large:
            others = plural(self.too_large, "other division")
            lines += ["", f"{others} cannot run the schedules that are tried first, most for want of memory"]
        if self.interrupted:
            lines += ["", "The search was interrupted, or its time was over; a longer one may find better plans."]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return in_html([[escape(cell) for cell in row] for row in self._cells(len(self.rows))])


def divide(
    model: Model | str,
    machine: Machine | str,
    gpus: int,
    batch: int,
    sequence: int,
    *,
    tensor: int | Iterable[int] | None = None,
    context: int | Iterable[int] = 1,
    expert: int | Iterable[int] | None = None,
    ranks: int | Iterable[int] | None = None,
    microbatch: int | Iterable[int] = (1, 2, 4),
    seconds: float | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Divisions:
    """Return the ways to divide GPUs among tensor groups, sequence parts, experts, ranks and replicas, fastest first.

        pp.divide("llama-3-70b", "h100", gpus=64, batch=256, sequence=8192)

    Every way that uses all GPUs is planned quickly, with two schedules; the best few are then planned with all.

    Args:
        gpus: All of them.
        batch: Sequences of a step, of all replicas together.
        sequence: Tokens of a sequence.
        tensor: GPUs that split each stage, a number or several to try; by default the powers of two up to a node.
        context: Parts of a sequence, likewise.
        expert: GPUs among which the experts of a layer are divided, likewise; by default the powers of two up to a
            node, for a model with experts.
        ranks: Of the pipeline, likewise; by default all that leave a whole number of replicas.
        microbatch: Sequences of a microbatch, likewise.
        seconds: To search for at most.
        progress: As in `plan`: True draws a bar.
        options: The other arguments of `plan`.

    Raises:
        SettingError: An argument is not possible, or no way fits in the machine's memory.
    """
    sized, machine = model_named(model), machine_named(machine)
    if not isinstance(sized, Model):
        raise SettingError("divide needs a model by sizes: a Model, or the name of a published one; pieces are for one")
    gpus, batch = require_count("gpus", gpus, most=MOST), require_count("batch", batch, most=MOST)
    sequence = require_count("sequence", sequence, most=MOST)
    if own := [name for name in ("replicas", "microbatches") if name in options]:
        raise SettingError(
            f"divide finds {own[0]} itself; narrow it by gpus, batch, tensor, context, expert, ranks, microbatch"
        )
    report = reporter(progress)
    powers = [1 << power for power in range((machine.node or 1).bit_length())]
    given = {
        "tensor": _several("tensor", powers if tensor is None else tensor),
        "context": _several("context", context),
        "expert": _several("expert", (powers if sized.experts else 1) if expert is None else expert),
        "ranks": _several("ranks", range(1, MOST_RANKS + 1) if ranks is None else ranks),
        "microbatch": _several("microbatch", microbatch),
    }
    until = math.inf
    if seconds is not None:
        require_amount("seconds", seconds, "a number of at least 0")
        until = time.monotonic() + seconds
    ways = [
        {"tensor": t, "context": c, "expert": e, "ranks": p, "replicas": gpus // (t * c * p), "batch": b}
        for t, c, e, p, b in product(*given.values())
        if gpus % (t * c * p) == 0 and batch % (gpus // (t * c * p) * b) == 0
        if sized.heads % t == 0 and c <= sequence and p <= sized.layers + 2
        if max(sized.experts, 1) % e == 0 and gpus // p % e == 0
    ]
    if not ways:
        raise SettingError(
            f"no division uses all of {plural(gpus, 'GPU')}, splits {plural(sized.heads, 'head')} among tensor groups, "
            f"and a batch of {batch} among microbatches, with at most {sized.layers + 2} ranks; allow more values of "
            "tensor, context, expert, ranks or microbatch"
        )

    Random(0).shuffle(ways)  # a search that is ended early has tried ways of every kind

    def planned(way: dict[str, int], schedules: Any, seconds: float | None) -> Division:
        count = batch // (way["replicas"] * way["batch"])
        if schedules is None and seconds == 0:
            schedules = [name for name in FIRST if _runs(name, way["ranks"], count)]
        asked = {**options, **way, "schedules": schedules, "seconds": seconds}
        answer = plan(sized, machine, microbatches=count, sequence=sequence, **asked)
        if answer.stopped:
            raise KeyboardInterrupt
        return Division(way["tensor"], way["context"], way["expert"], way["replicas"], way["batch"], answer)

    schedules = options.get("schedules")
    found: list[tuple[Division, dict[str, int], float]] = []  # with the seconds that the quick plan took
    problems: list[SettingError] = []
    interrupted = False
    try:
        for place, way in enumerate(ways):
            report(f"division {place + 1} of {len(ways)}", place / len(ways) / 2)
            if time.monotonic() > until and found:
                interrupted = True
                break
            begun = time.monotonic()
            try:
                found.append((planned(way, schedules, 0), way, time.monotonic() - begun))
            except SettingError as error:  # it does not fit, as a rule
                problems.append(error)
        if not found:
            short = [problem for problem in problems if isinstance(problem, ShortageError)]
            raise min(short, key=attrgetter("needed"), default=problems[0])
        found.sort(key=_slowness)
        more = 0.0  # seconds that such a plan takes beside its search; another may take twice that
        for place, (_, way, took) in enumerate(found[:PROMISING]):
            report(f"the best divisions: {place + 1}", 0.5 + place / PROMISING / 2)
            begun = time.monotonic()
            left = until - begun - max(2 * more, LEAST * took)
            if left <= 0:
                interrupted = True
                break
            with suppress(SettingError):  # too many schedules for this many microbatches; the quick plan stays
                longest = left / (PROMISING - place)
                found[place] = planned(way, schedules, None if left == math.inf else longest), way, took
                more = max(more, time.monotonic() - begun - longest)
    except KeyboardInterrupt:
        if not found:
            raise SettingError("the search was interrupted before it found anything") from None
        interrupted = True
    finally:
        report("done", 1)
    rows = tuple(division for division, *_ in sorted(found, key=_slowness))
    return Divisions(rows, len(problems), interrupted)


def _slowness(found: tuple[Division, dict[str, int], float]) -> float:
    return -found[0].tokens_per_second


def _runs(name: str, ranks: int, microbatches: int) -> bool:
    """Return whether a schedule of this name exists for the numbers."""
    with suppress(PipelineError):
        legal(name, ranks, microbatches)
        return True
    return False


def _several(name: str, given: Any) -> list[int]:
    """Return several values, or a single one as the only value."""
    values = [*given] if isinstance(given, (list, tuple, range, set)) else [given]
    return [require_count(name, value, most=MOST) for value in values]
