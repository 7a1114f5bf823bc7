"""Is a schedule legal? If not: everything that is wrong with it, each in one sentence.

Two questions, kept apart. What does an action need (`needs`)? And can the ranks, each in its own order,
get through to the end if every action waits for what it needs (`replay`)? The simulation asks the same
two questions, so that what is drawn and what is checked cannot differ.
"""

from __future__ import annotations

from collections.abc import Collection

from ppedu.core.dependencies import replay
from ppedu.core.errors import SettingError
from ppedu.core.problems import Problem, find_problems
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.validate import require_rank


def check(schedule: Schedule, *, ranks: Collection[int] | None = None, rendezvous: bool = False) -> list[Problem]:
    """Everything that is wrong with a schedule; an empty list when it is legal.

    Legal: every stage runs each microbatch's forward once and its backward once (B, or I and W), on the
    rank that holds the stage, after what it needs; and no ranks wait for each other in a ring. Of a lowered
    schedule also: what another rank needs is sent and received, once, and each rank receives from each other
    in the order in which that one sends; sharded weights are gathered before they are computed with.

    ranks: judge the orders of these ranks only; the others are taken to do whatever anybody waits for.
    rendezvous: a send waits until the other rank has come to the receive. Otherwise it is buffered: it is
        over at once. Receives wait for their message in both.

    Raises:
        SettingError: it is not a schedule, `ranks` are not a collection, or one of them does not exist.
    """
    require_schedule("check", schedule)
    if ranks is None and not rendezvous:
        return list(schedule.problems)
    try:
        known = list(range(schedule.ranks) if ranks is None else ranks)
    except TypeError:
        raise SettingError(f"ranks are several, such as [0, 1]; got {ranks!r}") from None
    known = sorted({require_rank(rank, schedule.ranks) for rank in known})
    return list(find_problems(schedule, known, replay(schedule.numbered, known, rendezvous)))
