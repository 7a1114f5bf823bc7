"""A second judge and a second clock, written from the rules and not from ppedu's code.

ppedu replays a schedule from event to event. This module goes through time tick by tick and looks, at every
tick, at every rank. It is slow and short, and it shares nothing with `ppedu.core.check` or `simulate`.
"""

from collections import Counter

from ppedu import Action, B, F, I, Op, W

COMPUTE = ("F", "B", "I", "W")
PAIRS = {"FB": Op.OVERLAP_F_B, "FI": Op.OVERLAP_F_B, "BF": Op.OVERLAP_B_F, "IF": Op.OVERLAP_B_F}


def paired(first, second):
    """The pair of two actions in this order, or None: one is a forward, the other a backward or its first half."""
    op = PAIRS.get(first.op + second.op)
    return op and Action(-1, op, -1, (first, second))


def parents(action, stages):
    """What must have ended before `action` starts: a list of tuples, of each of which one action is enough."""
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
    """`rows[rank]` as (action, start, end), or None if the ranks get stuck. Lengths and latency are whole ticks."""
    queues = [list(order) for order in schedule.orders]
    rows = [[] for _ in queues]
    working = [None for _ in queues]
    ended = {}  # action -> (time, rank)

    def arrived(choices, rank, now):
        for action in choices:
            time, source = ended.get(action, (now + 1, rank))
            if time + (latency if source != rank else 0) <= now:
                return True
        return False

    now = 0
    while True:
        changed = True
        while changed:  # what takes no time may free others at this very tick
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
        if not any(working) and all(now >= time + latency for time, _ in ended.values()):
            return None if any(queues) else rows
        now += 1


def complete(schedule):
    """Each stage runs each microbatch's F once and its B once, or I and W, on rank `stage % ranks`, and no more."""
    found = Counter(
        (rank, single)
        for rank, order in enumerate(schedule.orders)
        for action in order
        for single in action.singles
        if single.op in COMPUTE
    )
    for stage in range(schedule.stages):
        rank = stage % schedule.ranks
        for microbatch in range(schedule.microbatches):
            ways = (F, B), (F, I, W)
            for way in ways:
                wanted = [(rank, make(stage, microbatch)) for make in way]
                if all(found[each] for each in wanted):
                    found.subtract(wanted)
                    break
            else:
                return False
    return not any(found.values())


def legal(schedule):
    """The verdict that `ppedu.check` should come to."""
    return complete(schedule) and run(schedule) is not None


def held(row, weigh, kept=1):
    """The activations that a rank holds, at half past every tick, counted afresh each time.

    `weigh(stage)` is what an activation of that stage weighs; `kept` the part of it that I leaves for W.
    """
    given_back = {"B": 1, "I": 1 - kept, "W": kept}
    curve = []
    for tick in range(row[-1][2]):
        value = 0
        for action, start, end in row:
            for single in action.singles:
                if single.op == "F" and start <= tick:
                    value += weigh(single.stage)
                if end <= tick:
                    value -= weigh(single.stage) * given_back.get(single.op, 0)
        curve.append(value)
    return curve


def singles(schedule):
    """Every single action with its place: (rank, index, action)."""
    return [
        (rank, index, single)
        for rank, order in enumerate(schedule.orders)
        for index, action in enumerate(order)
        for single in action.singles
    ]
