"""The registry of schedules: register a generator under a name, and build the schedule of a name.

Register a generator of your own with `ppedu.register`, and everything that works for the published ones works for it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from ppedu.core.actions import Action
from ppedu.core.errors import ScheduleError, SettingError
from ppedu.core.garbage import without_gc
from ppedu.core.placement import Placement
from ppedu.core.schedule import Schedule
from ppedu.core.tables import in_html, in_text
from ppedu.core.validate import require_count, require_name, require_size

Generator = Callable[..., Iterable[Action]]
MOST_ACTIONS = 1000  # of a stage for each microbatch; a generator that yields more never ends


@dataclass(frozen=True)
class Entry:
    """A registered schedule: its generator, the placement it is written for, and the stages on each rank.

    A generator that takes `chunks` decides the number of stages itself.
    """

    generator: Generator
    placement: str
    chunks: int = 1


_entries: dict[str, Entry] = {}


def register(name: str, placement: str = "loop", chunks: int = 1) -> Callable[[Generator], Generator]:
    """Make a generator known under `name`. Registering a name again replaces it, so that a cell can be re-run.

        @register("mine")
        def mine(rank, ranks, microbatches):
            for m in range(microbatches): yield F(rank, m)
            for m in range(microbatches): yield B(rank, m)

    placement, chunks: as in `Placement.make`; a generator with a parameter `chunks` decides by its value.

    Raises:
        SettingError: there is no such placement, or the name is no name or a published schedule's.
    """
    if not isinstance(name, str):
        raise SettingError(f'give the schedule a name, as in @register("mine"); got {name!r}')
    require_name("a schedule's name", name)
    Placement.make(placement, 1, chunks)

    def remember(generator: Generator) -> Generator:
        try:
            inspect.signature(generator)
        except (TypeError, ValueError):  # not a function, or a type of Python's own
            raise SettingError(
                f"the schedule {name!r} needs a generator of rank, ranks and microbatches; got {generator!r}"
            ) from None
        if name in _entries and _is_published(_entries[name].generator) and not _is_published(generator):
            raise SettingError(f"{name!r} is a published schedule; give yours a name of its own")
        _entries[name] = Entry(generator, placement, chunks)
        return generator

    return remember


def _is_published(generator: Generator) -> bool:
    return str(getattr(generator, "__module__", None)).startswith("ppedu.zoo.")


class Names(tuple[str, ...]):
    """Names of schedules. Printed, or at the end of a notebook's cell, they are a table of what is known about each.

    In a terminal too narrow for a table, they are a list.
    """

    __slots__ = ()

    def __str__(self) -> str:
        width = get_terminal_size().columns
        head, *rows = self._rows()
        lines = [*chain.from_iterable(in_text([head, *rows], 24))]
        if max(map(len, lines)) > width:
            margin = 2 + max(map(len, self))
            facts = [
                (row[0] if number == 1 else "", f"{title}: {cell}")
                for row in rows
                for number, (title, cell) in enumerate(zip(head, row, strict=True))
                if number and cell != "–"
            ]
            lines = [*chain.from_iterable(in_text(facts, max(20, width - margin)))]
        return "\n".join([*lines, "", *wrap(_LETTERS, width)])

    def _repr_html_(self) -> str:
        from html import escape

        head, *rows = ([escape(cell) for cell in row] for row in self._rows())
        for row in rows:
            row[:2] = f"<code>{row[0]}</code>", _PAPER.sub(_link, row[1])
        return in_html([head, *rows], _LETTERS)

    def _rows(self) -> Iterator[Sequence[str]]:
        from ppedu.zoo.theory import FORMS, Form

        yield ("schedule", "paper", "placement", "takes", "idle time of a rank", "peak activations", "options")
        for name in self:
            entry = _entries[name]
            form = FORMS.get(name, Form("")) if _is_published(entry.generator) else Form("")
            papers = ", ".join(match[0] for match in _PAPER.finditer(form.source))
            options = options_of(name).values()
            settings = ", ".join(str(option.replace(annotation=inspect.Parameter.empty)) for option in options)
            placement = entry.placement + (", weights twice" if entry.placement == "bidirectional" else "")
            yield [cell or "–" for cell in (name, papers, placement, *form.in_words(), settings)]


_PAPER = re.compile(r"arXiv (?P<number>[0-9.]+[0-9])|(?P<page>(?:[a-z]+\.)+(?:com|org)/[\w./-]+)")
_LETTERS = (
    "p ranks, m microbatches, v chunks on a rank, r the rank, k its peak; F, B = I + W: times of a share of the model, "
    "FB of a pair, c of a message; M_W: what W still needs of a microbatch's activations"
)


def _link(paper: re.Match[str]) -> str:
    address = f"arxiv.org/abs/{paper['number']}" if paper["number"] else paper["page"]
    return f'<a href="https://{address}">{paper[0]}</a>'


def schedules() -> Names:
    """The names that `schedule` knows: the published ones from the simplest on, then one's own.

    Print them, or end a cell with them, to see what is known about each (`ppedu.zoo.theory`).
    """
    from ppedu.zoo.theory import FORMS

    return Names(dict.fromkeys([*(name for name in FORMS if name in _entries), *_entries]))


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """What the registered schedule takes beside ranks and microbatches."""
    return dict([*inspect.signature(_entries[name].generator).parameters.items()][3:])


def schedule(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """The registered schedule `name` for so many ranks and microbatches.

    Raises:
        SettingError: the name is unknown, a number is below 1, or the schedule does not take an option.
        ScheduleError: the generator yields something that is not an action.
    """
    if not isinstance(name, str) or name not in _entries:
        close = get_close_matches(name.lower(), _entries, 1, cutoff=0.8) if isinstance(name, str) else ()
        meant = f"; did you mean {close[0]!r}? There is" if close else "; there is"
        raise SettingError(f"there is no schedule called {name!r}{meant}: {', '.join(schedules())}")
    ranks, microbatches = require_count("ranks", ranks), require_count("microbatches", microbatches)
    return build(name, _entries[name], ranks, microbatches, options)


@without_gc
def build(name: str, entry: Entry, ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    """What `schedule` returns, from an entry that need not be registered."""
    settings = _settings(name, entry.generator, options)
    _, chunks, _ = require_size(ranks, settings.get("chunks", entry.chunks), microbatches)
    if "chunks" in options:
        options["chunks"] = chunks
    most = MOST_ACTIONS * microbatches * chunks
    orders = []
    it = f"the schedule {name!r}"
    for rank in range(ranks):
        actions = entry.generator(rank, ranks, microbatches, **options)
        if isinstance(actions, Action):  # a tuple, and so one could go through it
            raise ScheduleError(f"{it} returns one action for rank {rank}, {actions}; `yield` each action instead")
        if not isinstance(actions, Iterable):
            raise ScheduleError(f"{it} gives {actions!r} for rank {rank}; it must yield actions")
        orders.append(tuple(islice(actions, most + 1)))
        if len(orders[rank]) > most:
            raise ScheduleError(f"{it} yields more and more actions on rank {rank}; does it end?")
    placement = Placement.make(entry.placement, ranks, chunks, microbatches)
    try:
        return Schedule(name, placement, microbatches, tuple(orders))
    except SettingError as error:
        raise ScheduleError(f"{it} must yield actions, such as pp.F(0, 0): {error}") from None


def _settings(name: str, generator: Generator, options: dict[str, Any]) -> dict[str, Any]:
    """The options that the generator is called with, its defaults included."""
    signature = inspect.signature(generator)
    try:
        bound = signature.bind(0, 1, 1, **options)
    except TypeError as error:
        own = signature.parameters.values()
        takes = ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in own)
        given = ", ".join(["rank", "ranks", "microbatches", *(f"{key}={value!r}" for key, value in options.items())])
        raise SettingError(f"the schedule {name!r} takes ({takes}), not ({given}): {error}") from None
    bound.apply_defaults()
    for option, value in bound.arguments.items():
        if isinstance(signature.parameters[option].default, bool) and not isinstance(value, bool):
            raise SettingError(f"{option} must be True or False; got {value!r}")
    return bound.arguments
