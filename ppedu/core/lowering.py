"""Lowering: from a schedule of computations to one with messages. Small passes, each from schedule to schedule.

`lower` adds a send and a receive wherever a result goes to another rank, and, for weights that are sharded over
replicas, the actions that gather and free them. `recompute` adds forwards that run again, `offload` copies to the host
and back, `share_head` the parts of a head that all ranks share, and `merge_backward` joins the halves of a backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from typing import Any

from ppedu.core.actions import RECEIVE, SEND, Action, B, L, O, Op, R, S, T, U
from ppedu.core.dependencies import produces, requires
from ppedu.core.errors import SettingError
from ppedu.core.garbage import without_gc
from ppedu.core.grid import align, earliest_times
from ppedu.core.numeric import Number
from ppedu.core.placement import TOWARDS, Placement, other_end
from ppedu.core.schedule import Schedule, require_compute, require_schedule
from ppedu.core.validate import require_count, require_instance, require_number

SENT = {"F": (Op.SEND_F, Op.SEND_R), "B": (Op.SEND_B,)}  # by result, the messages that it can cause


@without_gc()
def lower(schedule: Schedule, receive: str = "early", fsdp: bool = False, resident: int = 3) -> Schedule:
    """Return the schedule with a SEND after each result that another rank requires, and a RECV before its use there.

    Messages are ordered globally, as their results are produced when the ranks take turns, one action each. Every rank
    sends and receives in this order. So ranks never wait for each other in a cycle, whether sends are buffered or wait
    for their receives, and messages between two ranks are received in the order sent.

    An incomplete schedule, such as one without backwards, stays incomplete; `check` lists what is missing. `label`
    describes a message.

    Args:
        receive: "early" posts a receive as soon as its peer sends, so that the message travels while the rank computes;
            "late" posts it as late as the order of messages allows, so that few are in flight at a time.
        fsdp: Weights are sharded over replicas of the pipeline. Each rank gathers (UNSHARD) the stages that it computes
            with next, frees the other stages (RESHARD), and sums the gradients of a stage after its last backward
            (REDUCE_GRAD).
        resident: With `fsdp`, how many stages a rank holds gathered at a time.

    Raises:
        ScheduleError: The ranks would wait forever.
        SettingError: The schedule is lowered already, or an option is invalid.
    """
    require_compute("lower", schedule)
    if not isinstance(receive, str) or receive not in ("early", "late"):
        raise SettingError(f'receive must be "early" or "late"; got {receive!r}')
    if schedule.replay.blocked:
        schedule.validate()
    if fsdp and schedule.updated:
        raise SettingError(f"{schedule!r} has {U(*min(schedule.updated))}; sharded weights are updated at the end")
    if fsdp and schedule.placement.barriers:
        raise SettingError(f"{schedule!r} shares its head among all ranks; its weights cannot be sharded over replicas")
    orders = _with_messages(schedule)
    if fsdp:
        require_count("resident", resident)
        orders = [list(_with_sharding(order, resident)) for order in orders]
    if receive == "late":
        orders = [list(_deferred(order, schedule.placement)) for order in orders]
    return replace(schedule, orders=tuple(map(tuple, orders)))


def _with_messages(schedule: Schedule) -> list[list[Action]]:
    """Return the orders with each message sent, and its receive posted, as soon as its result is produced."""
    placement, numbered = schedule.placement, schedule.numbered
    # For each block, the messages that its actions cause: the SEND and RECV of its sample, the receiver, and a shift.
    # The microbatch of an action's message is its own (of a pair, its first part's) plus the shift. In a block of pairs
    # like (0F1;0B0), the shift is 0 for the activation and -1 for the gradient.
    onward: list[list[tuple[Action, Action, int, int]]] = []
    for block in numbered.blocks:
        first = block.sample.singles[0].microbatch
        messages = []
        for kind, stage, microbatch in produces(block.sample):
            for op in SENT.get(kind, ()):  # other results stay on their rank
                send, needless = Action(stage, op, microbatch), op is Op.SEND_R and schedule.forward_only
                if op in placement.links[placement.copy(microbatch)][stage] and not needless:
                    _, receiver = placement.route(send)
                    messages.append((send, other_end(send), receiver, microbatch - first))
        onward.append(messages)
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    remaining = [*map(iter, schedule.orders)]
    for rank, entry in zip(schedule.replay.turns, schedule.replay.entries, strict=True):
        orders[rank].append(next(remaining[rank]))
        index, microbatch = divmod(entry, numbered.microbatches)  # that of the action, or of a pair's first part
        for send, receive, target, shift in onward[index]:
            orders[rank].append(Action(send.stage, send.op, microbatch + shift))
            orders[target].append(Action(receive.stage, receive.op, microbatch + shift))
    return orders


def _deferred(order: Sequence[Action], placement: Placement) -> Iterator[Action]:
    """Yield an order with each receive delayed until its message is required, or until the rank sends."""
    delayed: deque[Action] = deque()
    for action in order:
        if action.op in RECEIVE:
            delayed.append(action)
        elif action.op in SEND:
            # Every receive so far comes before a send, or the ranks' orders of messages would differ.
            yield from delayed
            delayed.clear()
            yield action
        else:
            inputs = requires(action, placement, lowered=True)
            receives = {Action(stage, Op(kind), m) for kind, stage, m in inputs if kind in RECEIVE}
            while not receives.isdisjoint(delayed):  # receives stay in order, so those before are posted, too
                yield delayed.popleft()
            yield action
    yield from delayed


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


def _with_sharding(order: Sequence[Action], resident: int) -> Iterator[Action]:
    """Yield an order with the sharding actions that each computation requires before it, and the last ones at the end.

    The rank gathers the `resident` stages that it computes with soonest. With `resident` 1, the order 0F0 1F0 1B0 0B0
    becomes

        0UNSHARD 0F0
        0RESHARD 1UNSHARD 1F0 1B0
        1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0
        0REDUCE_GRAD 0RESHARD
    """
    # By computation: its stages, of which a pair has one or two.
    used = [tuple(dict.fromkeys(single.stage for single in action.singles)) for action in order if action.computes]
    most = max(map(len, used), default=1)
    if most > resident:
        raise SettingError(f"a pair may compute with {most} stages at once; resident must be at least {most}")

    @cache  # there are few stages and many actions, so the same few results are computed again and again
    def without_repeats(stages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(stages))

    # A stack with an entry for each computation, the first on top, and one for the end: the stages that are used from
    # there on, in the order of their first use. It is built from the end, where no stages are left.
    upcoming: list[tuple[int, ...]] = [()]
    for stages in reversed(used):
        upcoming.append(without_repeats(stages + upcoming[-1]))
    trained = {single.stage for action in order for single in action.singles if single.op in (Op.B, Op.I, Op.W)}
    gathered: frozenset[int] = frozenset()
    before = upcoming[-1]  # the stages that were still to be used at the last change
    for action in (*order, None):  # None is the end
        if action is None or action.computes:
            ahead = upcoming.pop()
            wanted = frozenset(ahead[:resident])
            # Seldom true. A finished stage makes it true: it was just used, so it is gathered, but no longer wanted.
            if wanted != gathered:
                finished = sorted((set(before) - set(ahead)) & trained)
                yield from (Action(stage, Op.REDUCE_GRAD) for stage in finished)
                yield from (Action(stage, Op.RESHARD) for stage in sorted(gathered - wanted))
                yield from (Action(stage, Op.UNSHARD) for stage in ahead if stage in wanted - gathered)
                gathered, before = wanted, ahead
        if action is not None:
            yield action


def recompute(schedule: Schedule, stages: Sequence[int] | Set[int] | None = None) -> Schedule:
    """Return the schedule with an R right before each B or I: a microbatch's forward runs again for its backward.

    Until then, a stage keeps only the microbatch's input (activation checkpointing, arXiv 1604.06174). A backward that
    recomputes, as with `Costs(recompute=True)`, first waits for its gradient. An R does not need it, so it runs while
    the rank waits, as in torchgpipe (arXiv 2004.09910). The memory is the same. Where a rank does not wait, so is the
    time. In a `Pipeline`, buffers such as BatchNorm's are updated twice.

    Args:
        stages: Those that recompute, by default all. Where a backward follows its forward, as at the last stage of
            1F1B, an R saves no memory.

    Raises:
        SettingError: `schedule` is not a Schedule, or it is lowered, or it lacks one of the `stages`.
    """
    require_compute("recompute", schedule)
    every = range(schedule.stages)
    given = every if stages is None else stages
    require_instance("stages", given, Sequence | Set, "a list of their numbers, such as [0, 1]")
    if other := [stage for stage in given if stage not in every]:
        raise SettingError(f"there is no stage {other[0]!r}; the stages are 0 to {every[-1]}")
    chosen = {*given}

    def recomputing(order: Sequence[Action]) -> Iterator[Action]:
        for action in order:
            for stage, op, microbatch, _ in action.singles:
                if op in (Op.B, Op.I) and stage in chosen and (stage, microbatch) not in schedule.recomputed:
                    yield R(stage, microbatch)
            yield action

    return replace(schedule, orders=tuple(tuple(recomputing(order)) for order in schedule.orders))


def offload(schedule: Schedule, part: Number | Collection[tuple[int, int]] = 1, ahead: int = 2) -> Schedule:
    """Return the schedule with activations that go to the host, and come back for their backward (arXiv 2503.01328).

    An O follows a forward, and frees the memory when it has ended. The L comes `ahead` computations of its rank before
    the backward (or the forward that runs again), so that the copy takes place beside them. A rank copies one by one,
    so in the long run the two copies of a microbatch should take no longer than its forward and its backward. What
    would be loaded before its forward has ended stays.

    Args:
        part: Of each rank's activations, the part that is offloaded, 0 to 1: those with the longest time between
            forward and backward, if all actions take equally long. Or the pairs (stage, microbatch) to offload.
        ahead: How many computations before its use an activation is loaded. More hide a slow copy, and need memory.

    Raises:
        SettingError: `schedule` is not a Schedule, or it is lowered, for inference, or has copies. Or an option is
            invalid.
        ScheduleError: The ranks would wait forever.
    """
    require_compute("offload", schedule)
    share: Any = part
    pairs: set[Any] | None = None
    if isinstance(part, (list, tuple, set, frozenset)) and all(isinstance(each, (list, tuple)) for each in part):
        pairs = {*map(tuple, part)}
    else:
        require_number("part", part, lambda number: 0 <= number <= 1, "a part of the activations, 0 to 1")
    if pairs and (wrong := pairs - {*product(range(schedule.stages), range(schedule.microbatches))}):
        raise SettingError(f"part has {wrong.pop()!r}, which is not a pair (stage, microbatch) of {schedule!r}")
    require_count("ahead", ahead)
    if schedule.forward_only or schedule.offloaded:
        has = "has no backwards" if schedule.forward_only else f"has {O(*min(schedule.offloaded))}"
        raise SettingError(f"{schedule!r} {has}; offload takes one with backwards and without copies")
    if schedule.replay.blocked:
        schedule.validate()
    grid, orders = align(schedule), []
    for row, order in zip(grid, schedule.orders, strict=True):
        begun = {single: step for step, action in enumerate(row) if action for single in action.singles}
        spans: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by stage and microbatch, when it is used
        for (stage, op, microbatch, _), step in begun.items():
            if op in (Op.F, Op.B, Op.I):
                spans[stage, microbatch].append(step)
        longest = sorted(spans, key=lambda place: min(spans[place]) - max(spans[place]))
        chosen = longest[: round(share * len(longest))] if pairs is None else pairs & spans.keys()
        orders.append(tuple(offloaded(order, chosen, ahead)))
    return replace(schedule, orders=tuple(orders))


def offloaded(order: Sequence[Action], chosen: Collection[tuple[int, int]], ahead: int = 2) -> Iterator[Action]:
    """Yield the order of a rank with the copies of `offload` for the chosen stages and microbatches."""
    made: dict[tuple[int, int], int] = {}  # by stage and microbatch, the index of the forward
    used: dict[tuple[int, int], int] = {}  # and that of the first R or backward
    for index, action in enumerate(order):
        for stage, op, microbatch, _ in action.singles:
            (made if op is Op.F else used).setdefault((stage, microbatch), index)
    moved = {place for place in chosen if made[place] < used[place] - ahead}
    loads: defaultdict[int, list[Action]] = defaultdict(list)
    for place in sorted(moved, key=used.__getitem__):
        loads[used[place] - ahead].append(L(*place))
    for index, action in enumerate(order):
        yield from loads[index]
        yield action
        for stage, op, microbatch, _ in action.singles:
            if op is Op.F and (stage, microbatch) in moved:
                yield O(stage, microbatch)


def share_head(schedule: Schedule, barriers: int = 1) -> Schedule:
    """Return the schedule with an S and a T on each rank for each microbatch: all ranks share the head.

    The sums over all ranks take time, in which other actions run (Yeung et al., arXiv 2411.05288). So S is right
    behind the last stage's backward of the microbatch before, or the one before that if there are two barriers, and T
    with the next S. Another rank has them where it is at this time, if F takes 1 and B takes 2. If the last stage has
    no forwards ahead of its backwards, as in 1F1B, all ranks wait for each sum; `1f1b-vocab` has one ahead.

    Args:
        barriers: How often the ranks wait for each other. 1: S computes the gradient of the head's input, too
            (algorithm 2 of the paper). 2: T does (algorithm 1).

    Raises:
        SettingError: The schedule is lowered, is for inference, has a stage on two ranks or shares its head already, or
            there are neither 1 nor 2 barriers.
        ScheduleError: It is not legal.
    """
    require_compute("share_head", schedule)
    placement = schedule.placement
    barriers = require_count("barriers", barriers, most=2)
    if schedule.forward_only or not placement.alone or placement.barriers:
        raise SettingError(
            f"share_head takes a schedule with backwards, each stage on one rank and no S, not {schedule!r}"
        )
    schedule.validate()
    durations: list[int] = []
    for block in schedule.numbered.blocks:
        durations += [sum(2 if single.op == Op.B else 1 for single in block.sample.singles)] * schedule.microbatches
    starts, ends = earliest_times(schedule, durations, lambda *_: 0)
    last = placement.stages - 1
    home = placement.rank(last)
    made, used = {}, {}  # by microbatch: the end of the last stage's forward; the start and the end of its backward
    for action, start, end in zip(schedule.orders[home], starts[home], ends[home], strict=True):
        for stage, op, microbatch, _ in action.singles:
            if stage == last and op == Op.F:
                made[microbatch] = end
            elif stage == last and op in (Op.B, Op.I):
                used[microbatch] = start, end
    before = [0] * barriers + [end for _, end in used.values()]
    times = [*accumulate(map(max, map(made.__getitem__, used), before), max), before[len(used)]]
    parts = []  # a head's actions, and the times at which a rank comes to them
    for number, (microbatch, (start, _)) in enumerate(used.items()):
        after = max(times[number : number + 2])
        parts += [(times[number], S, microbatch), (min(after, start) if barriers == 2 else after, T, microbatch)]

    def sharing(rank: int) -> Iterator[Action]:
        left = deque(parts)
        for action, start in zip(schedule.orders[rank], starts[rank], strict=True):
            while left and left[0][0] <= start:
                _, make, microbatch = left.popleft()
                yield make(placement.shards[rank], microbatch)
            yield action
        yield from (make(placement.shards[rank], microbatch) for _, make, microbatch in left)

    return replace(schedule, orders=tuple(tuple(sharing(rank)) for rank in range(schedule.ranks)))


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
