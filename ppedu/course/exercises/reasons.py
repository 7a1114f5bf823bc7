"""Reasons why a learner's schedule is slow, for the exercises of several lessons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ppedu.core import Action
from ppedu.sim import Timeline


def warmup(order: Sequence[Action]) -> int:
    """Count the forwards before the first backward."""
    return next(place for place, action in enumerate(order) if action.op != "F")


def longest_wait(timeline: Timeline) -> str:
    """Describe the longest wait between two actions of a rank, as a sentence."""
    waits = [
        (after.start - before.end, rank, before.end)
        for rank, row in enumerate(timeline.rows)
        for before, after in pairwise(row)
    ]
    _, rank, time = max(waits, key=lambda wait: wait[0])
    return f"Look at the longest wait: {timeline.why_idle(rank, time)}"
