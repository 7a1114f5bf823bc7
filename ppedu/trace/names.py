"""Names: which action a range of a trace, or an operation of a table, is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

from ppedu.core import COMPUTE, Action, Op, ParseError, SettingError
from ppedu.trace.records import UNKNOWN

SHORT = re.compile(rf"([0-9]{{1,9}})?({'|'.join(sorted(COMPUTE))})([0-9]{{1,9}})?").fullmatch
SUCH_AS = r"a dict of regular expressions and actions, such as {'forward_step': 'F', r'fwd (\d+)': r'F\1'}"

# torch's pipeline runtime and this package's engine write the first, ScheduleGPipe the others.
USUAL = {r"PP:(.*)": r"\1", r"Forward ([0-9]{1,9})": r"F\1", r"Backward ([0-9]{1,9})": r"B\1"}

LookUp = Callable[[str], tuple[bool, Action | None]]


def look_up(given: Mapping[str, str] | None, usual: Mapping[str, str]) -> LookUp:
    """Return a function that returns whether a name is known, and its action: None if that cannot be understood.

    Args:
        given: The caller's regular expressions for whole names, each with the action that such a name stands for. An
            action may contain groups of the expression, and may lack its stage, its microbatch or both: `r"\\1F\\2"`,
            `r"F\\1"`, `"F"`. The first expression that matches counts.
        usual: More of them, which come after those.

    Raises:
        SettingError: `given` is not a dict of regular expressions and actions.
    """
    if not isinstance(given, Mapping | None):
        raise SettingError(f"names must be {SUCH_AS}; got {given!r}")
    rules = []
    for pattern, meaning in [*(given or {}).items(), *usual.items()]:
        try:
            rules.append((re.compile(pattern), meaning))
            # "pattern or nothing" matches "", with the groups of the pattern, which are then empty.
            if match := re.fullmatch(f"(?:{pattern})|", ""):
                match.expand(meaning)  # raises re.error for a group that does not exist
        except (re.error, TypeError, IndexError) as error:
            raise SettingError(f"names: {pattern!r}: {meaning!r} is not usable: {error}; give {SUCH_AS}") from None

    @cache
    def find(name: str) -> tuple[bool, Action | None]:
        for rule, meaning in rules:
            if match := rule.fullmatch(name):
                return True, _action(match.expand(meaning))
        return False, None

    return find


def _action(text: str) -> Action | None:
    """Return the action that a text stands for, where its stage and microbatch may be missing; else None."""
    if match := SHORT(text):
        stage, op, microbatch = match.groups()
        return Action(int(stage or UNKNOWN), Op(op), int(microbatch or UNKNOWN))
    try:
        return Action.parse(text)
    except ParseError:
        return None
