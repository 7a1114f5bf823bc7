"""Whether a schedule is legal."""

from __future__ import annotations

from collections.abc import Collection

from ppedu.core.dependencies import replay
from ppedu.core.errors import SettingError
from ppedu.core.problems import Problem, find_problems
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.streams import Streams, require_links
from ppedu.core.validate import require_rank


def check(
    schedule: Schedule,
    *,
    ranks: Collection[int] | None = None,
    rendezvous: bool = False,
    links: str | None = None,
) -> list[Problem]:
    """Return everything that is wrong with a schedule: an empty list if it is legal.

    In a legal schedule every stage runs each microbatch's forward once and its backward once (B, or I and W), on the
    rank that holds the stage and after its dependencies, and no ranks wait for each other in a cycle. A forward-only
    schedule has no backwards. In a legal
    lowered schedule, also, every result that another rank requires is sent and received once, messages between two
    ranks are received in the order sent, and sharded weights are gathered before they are used.

    ranks: Check the orders of these ranks only. The other ranks are assumed to do everything these wait for.
    rendezvous: A send waits until its peer has reached the receive. By default sends are buffered and end at once. A
        receive waits for its message either way.
    links: "pair" or "rank": Also find ranks that wait for each other because a message blocks those posted after it in
        the same communication stream; see `Costs`. Only for a lowered schedule and all ranks.

    Raises:
        SettingError: `schedule` is not a Schedule, `ranks` is not a collection, a rank does not exist, or `links` is
            not for these arguments.
    """
    require_schedule("check", schedule)
    if links is not None:
        require_links(schedule, links)
        if ranks is not None:
            raise SettingError("links are checked for all ranks together; leave out ranks")
        return check(schedule, rendezvous=rendezvous) or list(Streams(schedule, links).stuck)
    if ranks is None and not rendezvous:
        return list(schedule.problems)
    try:
        known = list(range(schedule.ranks) if ranks is None else ranks)
    except TypeError:
        raise SettingError(f"ranks must be a collection, such as [0, 1]; got {ranks!r}") from None
    known = sorted({require_rank(rank, schedule.ranks) for rank in known})
    return list(find_problems(schedule, known, replay(schedule.numbered, known, rendezvous)))
