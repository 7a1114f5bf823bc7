"""Schedules in tests: `check_schedule` fails with everything that is wrong."""

from __future__ import annotations

from typing import Any

from ppedu.core import Schedule
from ppedu.sim.verify import verify

__all__ = ["check_schedule"]


def check_schedule(schedule: Schedule, **options: Any) -> None:
    """Raise AssertionError with a line for each reason to reject a schedule.

        def test_our_schedule():
            check_schedule(pp.Schedule.from_csv("ours.csv"), transport="rendezvous", peak=4)

    Args:
        options: Those of `ppedu.verify`: `transport`, `buffers`, `peak` and `baseline`.

    Raises:
        SettingError: As in `ppedu.verify`.
    """
    __tracebackhide__ = True  # pytest shows the test in place of this function
    if found := verify(schedule, **options):
        raise AssertionError(f"{schedule.name}:\n" + "\n".join(finding.text for finding in found))
