"""Whether a schedule is legal."""

from __future__ import annotations

from ppedu.core.dependencies import replay
from ppedu.core.problems import Problem, find_problems
from ppedu.core.schedule import Schedule, require_schedule
from ppedu.core.streams import STREAMED, Streams, require_streamed
from ppedu.core.validate import require_one_of

# How messages block their ranks and each other.
TRANSPORTS = ("buffered", "rendezvous", "any", *STREAMED)


def check(schedule: Schedule, *, transport: str = "buffered") -> list[Problem]:
    """Return everything that is wrong with a schedule: an empty list if it is legal.

    In a legal schedule every stage runs each microbatch's forward once and its backward once (B, or I and W), on the
    rank that holds the stage and after its dependencies, and no ranks wait for each other in a cycle. A forward-only
    schedule has no backwards. In a legal lowered schedule, also, every result that another rank requires is sent and
    received once, messages between two ranks are received in the order sent, a rank that waits for some messages of a
    batch waits for all of it, and sharded weights are gathered before they are used.

    Args:
        transport: "buffered": a send ends at once. "rendezvous": a send, or the wait for it, ends when its peer has
            reached the receive. A receive waits for its message either way. "any": the transport may buffer a send or
            not, as MPI and NCCL may, by its size; if that matters, there is a problem of the kind "unknown".
            "direction", "pair", "rank": messages are carried one by one, or batch by batch, in the order in which a
            rank reaches them, as in `Costs`: by two streams for each peer, one for each direction, by one for each
            peer, or by one for all. The schedule must be lowered.

    Raises:
        SettingError: `schedule` is not a Schedule, or the transport is unknown or not for it.
    """
    require_schedule("check", schedule)
    require_one_of("transport", transport, TRANSPORTS)
    if transport in STREAMED:
        require_streamed(schedule, transport)
        return list(schedule.problems or Streams(schedule, transport).stuck)
    if transport == "buffered" or (transport == "any" and schedule.problems):
        return list(schedule.problems)
    found = list(find_problems(schedule, replay(schedule.numbered, rendezvous=True)))
    return found if transport == "rendezvous" else list(map(_unknown, found))


def _unknown(problem: Problem) -> Problem:
    """Return a deadlock of sends that wait for their receives, where they may as well be buffered."""
    why = "cannot tell: legal as long as sends are buffered, but where a send waits for its receive, "
    return problem._replace(kind="unknown", message=why + problem.message)
