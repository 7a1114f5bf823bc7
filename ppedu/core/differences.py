"""Where two schedules differ: which of their actions are not the same, rank by rank."""

from __future__ import annotations

from difflib import SequenceMatcher

from ppedu.core.errors import SettingError
from ppedu.core.schedule import Schedule, require_schedule

Place = tuple[int, int]  # a rank, and a position in its order


def differences(first: Schedule, second: Schedule) -> tuple[list[Place], list[Place]]:
    """The actions of each that the other does not have, or not in that order: the fewest that make the orders equal
    when they are taken out, as far as `difflib` finds them.

    Raises:
        SettingError: one is no schedule, or they have not the same number of ranks.
    """
    require_schedule("differences", first)
    require_schedule("differences", second)
    if first.ranks != second.ranks:
        raise SettingError(f"{first!r} and {second!r} have not the same number of ranks")
    left: list[Place] = []
    right: list[Place] = []
    for rank, (one, other) in enumerate(zip(first.orders, second.orders, strict=True)):
        for kind, start, end, begin, stop in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
            if kind != "equal":
                left += [(rank, index) for index in range(start, end)]
                right += [(rank, index) for index in range(begin, stop)]
    return left, right
