"""Structure of the bug museum: an exhibit, the collection, and how both are printed. The exhibits are in `bugs`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ppedu.core import SettingError
from ppedu.core.tables import LINE, in_html, in_text

Program = Callable[..., Any]


@dataclass(frozen=True, repr=False)
class Bug:
    """An exhibit. Its repr is the symptom, then the program, then the detector and the cure.

    wrong: the program with the bug; its docstring says what the mistake is.
    right: a correct program that takes the same arguments.
    symptom, detector, cure: what you see, what finds the bug, and how to fix it.
    source: where the bug was found; "" for a common mistake.
    """

    wrong: Program
    right: Program
    symptom: str
    detector: str
    cure: str
    source: str = ""

    @property
    def name(self) -> str:
        """The key of the exhibit in the museum."""
        return self.wrong.__name__.replace("_", " ")

    def __repr__(self) -> str:
        program = inspect.getsource(self.wrong)
        facts = {"Found by": self.detector, "Cure": self.cure, "Seen in": self.source}
        lines = [f"{name}: {text}" for name, text in facts.items() if text]
        return "\n".join([f"You see: {self.symptom}", "", program[program.index("def ") :].rstrip(), "", *lines])


class Museum(dict[str, Bug]):
    """A dictionary of the exhibits: bugs of pipeline programs, by name. In a notebook it is shown as a table."""

    def __getitem__(self, name: str) -> Bug:
        if not isinstance(name, str) or name not in self:
            raise SettingError(f"unknown exhibit {name!r}; available: {', '.join(self)}")
        return super().__getitem__(name)

    def exhibit(self, right: Program, **texts: str) -> Callable[[Program], Program]:
        """Add the decorated program as a `Bug` with these texts. `right` is its correct counterpart."""

        def add(wrong: Program) -> Program:
            bug = Bug(wrong, right, **texts)
            self[bug.name] = bug
            return wrong

        return add

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(row) for row in in_text(self._rows(), 27, LINE))

    def _repr_html_(self) -> str:
        return in_html([escape(cell) for cell in row] for row in self._rows())

    def _rows(self) -> list[Sequence[str]]:
        bugs = ((bug.name, bug.symptom, bug.detector, bug.cure) for bug in self.values())
        return [("bug", "you see", "found by", "cure"), *bugs]
