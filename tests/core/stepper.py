"""The stepper: an oracle for times and deadlocks, written from the rules instead of ppedu's code.

ppedu replays a schedule from event to event. This module visits every rank at every tick of time. It is slow and short
and shares nothing with `ppedu.core.checking` or `simulate`.
"""

from typing import Any

from ppedu import Action, B, F, I, Op

PAIRS = {"FB": Op.OVERLAP_F_B, "FI": Op.OVERLAP_F_B, "BF": Op.OVERLAP_B_F, "IF": Op.OVERLAP_B_F}


def paired(first, second):
    """Return the pair of two actions, or None unless one is a forward and the other a B or an I."""
    op = PAIRS.get(first.op + second.op)
    return op and Action(-1, op, -1, (first, second))


def parents(action, stages):
    """Return the actions that must end before `action` starts: tuples, of each of which one action suffices."""
    if action.parts:
        return [wanted for part in action.parts for wanted in parents(part, stages)]
    stage, op, microbatch = action[:3]
    if op == "F":
        return [(F(stage - 1, microbatch),)] if stage > 0 else []
    if op == "W":
        return [(I(stage, microbatch),)]
    if op in ("B", "I"):
        after = [(B(stage + 1, microbatch), I(stage + 1, microbatch))] if stage < stages - 1 else []
        return [(F(stage, microbatch),), *after]
    return []


def run(schedule, length=lambda action: 1, latency=0):
    """Return `rows[rank]` as (action, start, end), or None if ranks get stuck. Lengths and latencies are whole ticks.

    latency: A number, or a dict from (source, target) to the latency of that link.
    """
    queues = [list(order) for order in schedule.orders]
    rows = [[] for _ in queues]
    working: list[Any] = [None for _ in queues]
    ended = {}  # by action: the time and the rank

    def travels(source, rank):
        return 0 if source == rank else latency[source, rank] if isinstance(latency, dict) else latency

    def arrived(choices, rank, now):
        for action in choices:
            time, source = ended.get(action, (now + 1, rank))
            if time + travels(source, rank) <= now:
                return True
        return False

    now = 0
    while True:
        changed = True
        while changed:  # actions that take no time may enable other actions at the same tick
            changed = False
            for rank, queue in enumerate(queues):
                if working[rank] and working[rank][2] == now:
                    rows[rank].append(working[rank])
                    for single in working[rank][0].singles:
                        ended.setdefault(single, (now, rank))
                    working[rank], changed = None, True
                if (
                    not working[rank]
                    and queue
                    and all(arrived(choices, rank, now) for choices in parents(queue[0], schedule.stages))
                ):
                    action = queue.pop(0)
                    working[rank], changed = (action, now, now + length(action)), True
        longest = max(latency.values(), default=0) if isinstance(latency, dict) else latency
        if not any(working) and all(now >= time + longest for time, _ in ended.values()):
            return None if any(queues) else rows
        now += 1


def held(row, weigh, kept):
    """Return the memory of a rank's activations in the middle of every tick, recounted each time.

    weigh: `weigh(stage)` is the size of an activation of that stage. kept: `kept(stage)`, the part that I leaves to W.
    """
    given_back = {"B": lambda stage: 1, "I": lambda stage: 1 - kept(stage), "W": kept}
    curve = []
    for tick in range(row[-1][2]):
        value = 0
        for action, start, end in row:
            for single in action.singles:
                if single.op == "F" and start <= tick:
                    value += weigh(single.stage)
                if end <= tick and single.op in given_back:
                    value -= weigh(single.stage) * given_back[single.op](single.stage)
        curve.append(value)
    return curve
