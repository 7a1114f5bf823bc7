"""The differences between two schedules."""

from __future__ import annotations

from difflib import SequenceMatcher

from ppedu.core import Schedule, SettingError, require_schedule

Place = tuple[int, int]  # a rank, and a position in its order


def differences(first: Schedule, second: Schedule) -> tuple[list[Place], list[Place]]:
    """Return the places of the actions that only the first schedule has, and of those that only the second has.

    Without these actions the orders of both are equal. `difflib` looks for few of them, not for the fewest.

    Raises:
        SettingError: An argument is not a Schedule, or their numbers of ranks differ.
    """
    require_schedule("differences", first)
    require_schedule("differences", second)
    if first.ranks != second.ranks:
        raise SettingError(f"{first!r} and {second!r} must have the same number of ranks")
    left: list[Place] = []
    right: list[Place] = []
    for rank, (one, other) in enumerate(zip(first.orders, second.orders, strict=True)):
        for kind, start, end, begin, stop in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
            if kind != "equal":
                left += [(rank, index) for index in range(start, end)]
                right += [(rank, index) for index in range(begin, stop)]
    return left, right
