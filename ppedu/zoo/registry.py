"""The registry of schedules: register a generator under a name, and build the schedule of that name.

Register a generator of your own with `ppedu.register`. It can then be used by name like the published schedules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice, zip_longest
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from ppedu.core import Action, Placement, Schedule, ScheduleError, SettingError
from ppedu.core.garbage import without_gc
from ppedu.core.tables import in_html, in_text
from ppedu.core.validate import require_count, require_name, require_size
from ppedu.zoo.facts import LETTERS, Facts

Generator = Callable[..., Iterable[Action]]
WEIGHTS = {"bidirectional": ", weights twice", "round": ", weights on the host"}  # by placement
MOST_ACTIONS = 1000  # per stage and microbatch; a generator that yields more is assumed never to end


@dataclass(frozen=True)
class Registered:
    """A registered schedule: the arguments of `register`."""

    generator: Generator
    placement: str
    chunks: int = 1
    facts: Facts | None = None
    forward_only: bool = False


_entries: dict[str, Registered] = {}


def register(
    name: str, placement: str = "loop", chunks: int = 1, facts: Facts | None = None, forward_only: bool = False
) -> Callable[[Generator], Generator]:
    """Return a decorator that registers a generator of one rank's actions as the schedule `name`.

        @register("mine")
        def mine(rank, ranks, microbatches):
            for m in range(microbatches): yield F(rank, m)
            for m in range(microbatches): yield B(rank, m)

    Registering a name again replaces it, so that a notebook's cell can be run twice.

    Args:
        placement, chunks: Which rank holds which stages, and the stages on each rank, as in `Placement.make`; if the
            generator has a parameter `chunks`, its value is used instead. If it has a parameter `slices`, each
            microbatch is cut into as many, and its actions count slices; see `Placement`.
        facts: Closed forms of the schedule and their source, for `ppedu.theory` and the table of `schedules`.
        forward_only: The generator yields forwards alone, for inference.

    Raises:
        SettingError: The placement is unknown, the name is not text or belongs to a published schedule, or the
            generator is not a function.
    """
    require_name('the name in @register("name")', name)
    Placement.make(placement, 1, chunks)  # refuses an unknown placement

    def remember(generator: Generator) -> Generator:
        try:
            inspect.signature(generator)
        except (TypeError, ValueError):  # not a function, or a built-in type
            raise SettingError(f"{name!r} needs a generator(rank, ranks, microbatches); got {generator!r}") from None
        if name in published() and not _is_published(generator):
            raise SettingError(f"{name!r} is the name of a published schedule; register yours under another name")
        _entries[name] = Registered(generator, placement, chunks, facts, forward_only)
        return generator

    return remember


def _is_published(generator: Generator) -> bool:
    """Return whether a generator is defined in this package."""
    return str(getattr(generator, "__module__", None)).startswith("ppedu.zoo.")


def published() -> dict[str, Registered]:
    """Return the entries of the published schedules by name, the simplest first."""
    return {name: entry for name, entry in _entries.items() if _is_published(entry.generator)}


def facts_of(name: str) -> Facts | None:
    """Return the facts of the schedule `name`; None if the name is unknown or was registered without facts."""
    return _entries[name].facts if isinstance(name, str) and name in _entries else None


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a schedule: its generator's parameters after rank, ranks and microbatches.

    Raises:
        SettingError: There is no such schedule.
    """
    parameters = inspect.signature(require_registered(name).generator).parameters
    return dict(islice(parameters.items(), 3, None))


def require_even(name: str, what: str, count: int) -> None:
    """Raise SettingError unless `count` is even. `name` and `what` (such as "ranks") are for the message."""
    if count % 2:
        nearest = " or ".join(str(even) for even in (count - 1, count + 1) if even)
        raise SettingError(f"{name} needs an even number of {what}; got {count} — try {nearest}")


class NameTable(tuple[str, ...]):
    """Names of registered schedules. They print and display as a table of the facts about each schedule.

    In a terminal too narrow for the table, they print as a list with one fact on a line.
    """

    __slots__ = ()

    def __str__(self) -> str:
        width = get_terminal_size().columns
        head, *rows = self._rows()
        lines = [*chain.from_iterable(in_text([head, *rows], 24))]
        if max(map(len, lines)) > width:
            lines = self._list(head, rows, width)
        return "\n".join([*lines, "", *wrap(_LETTERS, width)])

    def _list(self, head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
        """Return the lines of a list: each name with its first known fact, then one known fact on a line."""
        cells: list[tuple[str, str]] = []
        for name, *row in rows:
            known = [f"{title}: {cell}" for title, cell in zip(head[1:], row, strict=True) if cell != "–"]
            cells += zip_longest([name], known, fillvalue="")
        margin = 2 + max(map(len, self))
        return [*chain.from_iterable(in_text(cells, max(20, width - margin)))]

    def _repr_html_(self) -> str:
        from html import escape

        head, *rows = ([escape(cell) for cell in row] for row in self._rows())
        for row in rows:
            links = ", ".join(f'<a href="https://{address}">{paper}</a>' for paper, address in papers_in(row[1]))
            row[:2] = f"<code>{row[0]}</code>", links or row[1]
        return in_html([head, *rows], _LETTERS)

    def _rows(self) -> Iterator[Sequence[str]]:
        """Yield the head of the table, then a row for each schedule."""
        yield ("schedule", "paper", "placement", "sizes", "idle time of a rank", "peak activations", "options")
        for name in self:
            entry = _entries[name]
            facts = entry.facts or Facts("")
            papers = ", ".join(name for name, _ in papers_in(facts.source))
            options = ", ".join(map(_without_type, options_of(name).values()))
            placement = entry.placement + WEIGHTS.get(entry.placement, "")
            yield [cell or "–" for cell in (name, papers, placement, *facts.cells(), options)]


_PAPER = re.compile(r"arXiv (?P<number>[0-9.]+[0-9])|(?P<page>(?:[a-z]+\.)+(?:com|org)/[\w./-]+)")
_LETTERS = ", ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items())


def papers_in(source: str) -> list[tuple[str, str]]:
    """Return the papers and pages that a text names, such as "arXiv 1811.06965", each with its address on the web."""
    found = _PAPER.finditer(source)
    return [(each[0], f"arxiv.org/abs/{each['number']}" if each["number"] else each["page"]) for each in found]


def _without_type(parameter: inspect.Parameter) -> str:
    """Return a parameter and its default without its type: "chunks=2"."""
    return str(parameter.replace(annotation=inspect.Parameter.empty))


def schedules() -> NameTable:
    """Return the names of all registered schedules: the published ones, the simplest first, then those of the user.

    Printed, or at the end of a notebook's cell, they are a table of the facts about each schedule.
    """
    return NameTable(_entries)


def schedule(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Return the registered schedule `name` for a number of ranks and of microbatches.

    Args:
        options: Keyword arguments of its generator, such as chunks=3; `schedules` lists them.

    Raises:
        SettingError: The name is unknown, a number is below 1, or the schedule does not have such an option.
        ScheduleError: The generator yields something that is not an action, or never ends.
    """
    return build(name, require_registered(name), ranks, microbatches, options)


def require_registered(name: object) -> Registered:
    """Return the entry of the schedule `name`; raise SettingError if it is not the name of a registered schedule."""
    if isinstance(name, str) and name in _entries:
        return _entries[name]
    if not isinstance(name, str):
        raise SettingError(f"give the name of a schedule: {', '.join(schedules())}; got {name!r}")
    close = get_close_matches(name.lower(), _entries, 1, cutoff=0.8)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    raise SettingError(f"unknown schedule {name!r}; {suggestion}available: {', '.join(schedules())}")


@without_gc()
def build(name: str, entry: Registered, ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    """Return the schedule of an entry, registered or not, under the name `name`. Errors as for `schedule`."""
    settings = _settings(name, entry.generator, options)
    slices = require_count("slices", settings.get("slices", 1))
    ranks, chunks, microbatches = require_size(ranks, settings.get("chunks", entry.chunks), microbatches, slices)
    if "chunks" in options:
        options["chunks"] = chunks  # an int of Python, where it was one of NumPy or torch
    most = MOST_ACTIONS * microbatches * chunks * slices
    label = f"the schedule {name!r}"
    orders = []
    for rank in range(ranks):
        actions = entry.generator(rank, ranks, microbatches, **options)
        if isinstance(actions, Action) or not isinstance(actions, Iterable):  # an action is a tuple
            raise ScheduleError(f"{label} returned {actions!r} for rank {rank}; it must yield actions: `yield` each")
        orders.append(tuple(islice(actions, most + 1)))
        if len(orders[rank]) > most:
            raise ScheduleError(f"{label} yielded more than {most} actions on rank {rank}; does its loop end?")
    placement = Placement.make(entry.placement, ranks, chunks, microbatches, slices)
    try:
        return Schedule(name, placement, microbatches * slices, tuple(orders), entry.forward_only)
    except SettingError as error:
        raise ScheduleError(f"{label} must yield actions, such as pp.F(0, 0): {error}") from None


def _settings(name: str, generator: Generator, options: dict[str, Any]) -> dict[str, Any]:
    """Return the generator's arguments by name, its defaults included. Raise SettingError for unsuitable options."""
    signature = inspect.signature(generator)
    try:
        bound = signature.bind(0, 1, 1, **options)  # in place of rank, ranks and microbatches
    except TypeError as error:
        accepted = ", ".join(map(_without_type, signature.parameters.values()))
        given = ", ".join(["rank", "ranks", "microbatches", *(f"{key}={value!r}" for key, value in options.items())])
        raise SettingError(f"the schedule {name!r} takes ({accepted}), not ({given}): {error}") from None
    bound.apply_defaults()
    for option, value in bound.arguments.items():
        if isinstance(signature.parameters[option].default, bool) and not isinstance(value, bool):
            raise SettingError(f"{option} must be True or False; got {value!r}")
    return bound.arguments
