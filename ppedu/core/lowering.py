"""Lowering: from a schedule of computations to one with messages. Small passes, each from schedule to schedule.

`lower` adds a send and a receive wherever a result goes to another rank, and, for weights that are sharded over
replicas, the actions that gather and free them. `merge_backward` joins the halves of a backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from ppedu.core.actions import RECEIVE, SEND, Action, B, Op
from ppedu.core.dependencies import produces, requires
from ppedu.core.errors import SettingError
from ppedu.core.garbage import without_gc
from ppedu.core.placement import TOWARDS, Placement
from ppedu.core.schedule import Schedule, require_compute, require_schedule
from ppedu.core.validate import require_count, require_instance

Group = tuple[Action, ...]


@without_gc()
def lower(schedule: Schedule, receive: str = "early", fsdp: bool = False, resident: int = 3) -> Schedule:
    """Return the schedule with a SEND after each result that another rank requires, and a RECV before its use there.

    Messages are ordered globally, as their results are produced when the ranks take turns, one action each. Every rank
    sends and receives in this order. So ranks never wait for each other in a cycle, whether sends are buffered or wait
    for their receives, and messages between two ranks are received in the order sent.

    receive: "early" posts a receive as soon as its peer sends, so that the message travels while the rank computes;
        "late" posts it as late as the order of messages allows, so that few are in flight at a time.
    fsdp: Weights are sharded over replicas of the pipeline. Each rank gathers (UNSHARD) the stages that it computes
        with next, at most `resident` at a time, frees the other stages (RESHARD), and sums the gradients of a stage
        after its last backward (REDUCE_GRAD).

    An incomplete schedule, such as one without backwards, stays incomplete; `check` lists what is missing. `label`
    describes a message.

    Raises:
        ScheduleError: The ranks would wait forever.
        SettingError: The schedule is lowered already, or an option is invalid.
    """
    require_compute("lower", schedule)
    if not isinstance(receive, str) or receive not in ("early", "late"):
        raise SettingError(f'receive must be "early" or "late"; got {receive!r}')
    if schedule.replay.blocked:
        schedule.validate()
    if fsdp:
        require_count("resident", resident)
        groups = [list(_gathered(order, resident)) for order in schedule.orders]
    else:
        groups = [[*((action,) for action in order), ()] for order in schedule.orders]
    orders = _with_messages(schedule, groups)
    if receive == "late":
        orders = [list(_deferred(order, schedule.placement)) for order in orders]
    return replace(schedule, orders=tuple(map(tuple, orders)))


def _with_messages(schedule: Schedule, groups: Sequence[Sequence[Group]]) -> list[list[Action]]:
    """Return the orders with each message sent, and its receive posted, as soon as its result is produced.

    `groups[rank][index]` replaces the rank's action at that index. One group more ends the order.
    """
    placement, numbered = schedule.placement, schedule.numbered
    # For each block the results that go to another rank: the two ends of the message without their microbatch, the
    # receiving rank, and the distance from the action's microbatch to the result's.
    onward: list[list[tuple[int, Op, int, Op, int, int]]] = [[] for _ in numbered.blocks]
    for messages, block in zip(onward, numbered.blocks, strict=True):
        for kind, stage, microbatch in produces(block.sample):
            send, receive = Op(f"SEND_{kind}"), Op(f"RECV_{kind}")
            if send in placement.links[placement.copy(microbatch)][stage]:
                peer, distance = stage + TOWARDS[send], microbatch - block.sample.singles[0].microbatch
                messages.append((stage, send, peer, receive, placement.rank(peer, microbatch), distance))
    orders: list[list[Action]] = [[] for _ in groups]
    remaining = [zip(*each, strict=False) for each in zip(numbered.orders, groups, strict=True)]
    for rank in schedule.replay.turns:
        entry, group = next(remaining[rank])
        orders[rank] += group
        index, first = divmod(entry, numbered.microbatches)
        for stage, send, peer, receive, target, distance in onward[index]:
            orders[rank].append(Action(stage, send, first + distance))
            orders[target].append(Action(peer, receive, first + distance))
    for order, each in zip(orders, groups, strict=True):
        order += each[-1]
    return orders


def _deferred(order: Sequence[Action], placement: Placement) -> Iterator[Action]:
    """Yield an order with each receive delayed until its message is required, or until the rank sends."""
    posted: deque[Action] = deque()
    for action in order:
        if action.op in RECEIVE:
            posted.append(action)
            continue
        wanted = {(stage, kind, m, ()) for kind, stage, m in requires(action, placement, lowered=True)}
        while posted and (action.op in SEND or any(each in wanted for each in posted)):
            yield posted.popleft()
        yield action
    yield from posted


def label(action: Action, placement: Placement) -> str:
    """Return a description of a message: "rank 0 → 1: F of microbatch 1", with the stage if ranks hold several.

    Raises:
        SettingError: `action` is not a SEND or RECV, or `placement` is not a Placement.
    """
    require_instance("placement", placement, Placement, "a Placement, such as schedule.placement")
    source, target = placement.route(action)
    sender = action.stage if action.op in SEND else action.stage + TOWARDS[action.op]
    which = f"stage {sender}'s " if placement.stages > placement.ranks else ""
    return f"rank {source} → {target}: {which}{action.op[-1]} of microbatch {action.microbatch}"


def _gathered(order: Sequence[Action], resident: int) -> Iterator[Group]:
    """Yield each action, preceded by the sharding actions that it requires; at the end, the remaining ones.

    resident: how many stages are gathered at a time, namely those that the rank computes with soonest.
    """
    used = [tuple(dict.fromkeys(single.stage for single in action.singles)) for action in order]
    if (most := max(map(len, used), default=1)) > resident:
        raise SettingError(f"a pair may compute with {most} stages at once; resident must be at least {most}")

    @cache  # there are few stages and many actions, so the same few results are computed again and again
    def before(stages: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(stages + after))

    # For each action the stages from there on, by first use; at the end, no stages.
    coming: list[tuple[int, ...]] = [()]
    for stages in reversed(used):
        coming.append(before(stages, coming[-1]))
    gathered: frozenset[int] = frozenset()
    left = frozenset(coming[-1])  # stages whose gradients are not complete
    for action in (*order, None):
        ahead = coming.pop()
        wanted = frozenset(ahead[:resident])
        own = (action,) if action else ()
        if wanted != gathered or len(ahead) != len(left):
            done = sorted(left.difference(ahead))
            own = (
                *(Action(stage, Op.REDUCE_GRAD) for stage in done),
                *(Action(stage, Op.RESHARD) for stage in sorted(gathered - wanted)),
                *(Action(stage, Op.UNSHARD) for stage in ahead if stage in wanted - gathered),
                *own,
            )
            left, gathered = left.difference(done), wanted
        yield own


def merge_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with each I and the W right after it joined into a B, which may compute faster.

    The schedule can take longer, because actions that wait for the I must wait for the W, too.

    Raises:
        SettingError: `schedule` is not a Schedule.
    """
    require_schedule("merge_backward", schedule)

    def merged(order: Sequence[Action]) -> tuple[Action, ...]:
        actions: list[Action] = []
        for action in order:
            if action.op == Op.W and actions and actions[-1] == (action.stage, Op.I, action.microbatch, ()):
                actions[-1] = B(action.stage, action.microbatch)
            else:
                actions.append(action)
        return tuple(actions)

    return replace(schedule, orders=tuple(map(merged, schedule.orders)))
