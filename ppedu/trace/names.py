"""Names: which action a range of a trace, or an operation of a table, is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ppedu.core import COMPUTE, Action, Op, ParseError, SettingError

UNKNOWN = -2  # a stage or a microbatch that a name does not say; -1 is that of a pair
SHORT = re.compile(rf"([0-9]{{1,9}})?({'|'.join(sorted(COMPUTE))})([0-9]{{1,9}})?").fullmatch

# torch's pipeline runtime and this package's engine write the first, ScheduleGPipe the others.
USUAL = {r"PP:(.*)": r"\1", r"Forward ([0-9]{1,9})": r"F\1", r"Backward ([0-9]{1,9})": r"B\1"}


class Names:
    """Regular expressions for whole names, each with the action that such a name stands for.

    An action may contain groups of the expression, and may lack its stage, its microbatch or both: `r"\\1F\\2"`,
    `r"F\\1"`, `"F"`. None stands for a name that is to be ignored. The first expression that matches counts.

    Raises:
        SettingError: They are not a dict of regular expressions and actions.
    """

    def __init__(self, given: Mapping[str, str | None] | None, usual: Mapping[str, str] = USUAL):
        such_as = r"a dict of regular expressions and actions, such as {'forward_step': 'F', r'fwd (\d+)': r'F\1'}"
        if not isinstance(given, Mapping | None):
            raise SettingError(f"names must be {such_as}; got {given!r}")
        self._rules = []
        for pattern, meaning in [*(given or {}).items(), *usual.items()]:
            try:
                rule = re.compile(pattern)
                if (nothing := re.fullmatch(f"(?:{pattern})|", "")) and meaning is not None:
                    nothing.expand(meaning)  # raises re.error for a group that does not exist
            except (re.error, TypeError, IndexError) as error:
                raise SettingError(f"names: {pattern!r}: {meaning!r} is not usable: {error}; give {such_as}") from None
            self._rules.append((rule, meaning))
        self._known: dict[str, tuple[bool, Action | None]] = {}

    def __call__(self, name: str) -> tuple[bool, Action | None]:
        """Return whether a name matches, and its action: None for one that is ignored or cannot be understood."""
        if name not in self._known:
            self._known[name] = self._look_up(name)
        return self._known[name]

    def _look_up(self, name: str) -> tuple[bool, Action | None]:
        for rule, meaning in self._rules:
            if match := rule.fullmatch(name):
                return True, None if meaning is None else _action(match.expand(meaning))
        return False, None


def _action(text: str) -> Action | None:
    """Return the action that a text stands for, where its stage and microbatch may be missing; else None."""
    if match := SHORT(text):
        stage, op, microbatch = match.groups()
        return Action(
            UNKNOWN if stage is None else int(stage), Op(op), UNKNOWN if microbatch is None else int(microbatch)
        )
    try:
        return Action.parse(text)
    except ParseError:
        return None
