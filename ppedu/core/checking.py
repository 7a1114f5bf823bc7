"""Whether a schedule is legal."""

from __future__ import annotations

from ppedu.core.dependencies import replay
from ppedu.core.problems import Problem, find_problems
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.streams import Streams, require_links


def check(
    schedule: Schedule,
    *,
    rendezvous: bool = False,
    links: str | None = None,
) -> list[Problem]:
    """Return everything that is wrong with a schedule: an empty list if it is legal.

    In a legal schedule every stage runs each microbatch's forward once and its backward once (B, or I and W), on the
    rank that holds the stage and after its dependencies, and no ranks wait for each other in a cycle. A forward-only
    schedule has no backwards. In a legal lowered schedule, also, every result that another rank requires is sent and
    received once, messages between two ranks are received in the order sent, and sharded weights are gathered before
    they are used.

    Args:
        rendezvous: A send waits until its peer has reached the receive. By default sends are buffered and end at once.
            A receive waits for its message either way.
        links: "pair" or "rank": Also find ranks that wait for each other because a message blocks those posted after
            it in the same communication stream; see `Costs`. Only for a lowered schedule.

    Raises:
        SettingError: `schedule` is not a Schedule, or `links` is not for it.
    """
    require_schedule("check", schedule)
    if links is not None:
        require_links(schedule, links)
    if rendezvous:
        found = list(find_problems(schedule, replay(schedule.numbered, rendezvous)))
    else:
        found = list(schedule.problems)
    if links and not found:
        found = list(Streams(schedule, links).stuck)
    return found
