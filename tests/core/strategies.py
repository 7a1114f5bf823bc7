"""Hypothesis strategies: legal and illegal schedules."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from stepper import paired, parents

from ppedu import Action, B, F, I, Op, Placement, Schedule, W


def often(examples):
    """Settings of a property: the number of examples that a full run tries, scaled by the profile, and no deadline."""
    return settings(max_examples=scaled(examples), deadline=None, suppress_health_check=list(HealthCheck))


def scaled(examples):
    """Return the number of examples that the profile tries: all in a full run, otherwise a part, but at least 10."""
    return max(10, examples * settings().max_examples // 100)


def sample(values, start=0):
    """Return all values in a full run; otherwise every tenth, say, from an index that `start` determines."""
    step = 100 // settings().max_examples
    return values[start % step :: step]


def slow(values):
    """Return the values of a parameter, or tuples of several parameters, as cases that only a full run includes."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def read(*lines, microbatches=1, chunks=1):
    """Return the schedule with a line of actions for each rank."""
    orders = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    return Schedule("read", Placement.make("loop", len(lines), chunks), microbatches, orders)


def random_legal(random, ranks, chunks, microbatches, split=0.5, pairs=0.0):
    """Return a legal schedule: actions in a random order in which each follows its dependencies.

    split: The share of backwards that are split into I and W.
    pairs: The share of the steps at which a rank runs an overlapped pair, if two of its actions can.
    """
    placement = Placement.make("loop", ranks, chunks)
    left = []
    for stage in range(ranks * chunks):
        for microbatch in range(microbatches):
            halves = (I, W) if random.random() < split else (B,)
            left += [make(stage, microbatch) for make in (F, *halves)]
    orders = [[] for _ in range(ranks)]
    done = set()
    while left:
        ready = [action for action in left if all(done & set(choices) for choices in parents(action, placement.stages))]
        action = random.choice(ready)
        here = [other for other in ready if (other.stage - action.stage) % ranks == 0]
        partners = [other for other in here if paired(action, other)]
        orders[action.stage % ranks].append(action)
        done.add(action)
        left.remove(action)
        if partners and random.random() < pairs:
            partner = random.choice(partners)
            orders[action.stage % ranks][-1] = paired(action, partner)
            done.add(partner)
            left.remove(partner)
    return Schedule("drawn", placement, microbatches, tuple(map(tuple, orders)))


@st.composite
def legal_schedules(draw, most_ranks=4, most_chunks=3, most_microbatches=4, split=0.5, pairs=0.0):
    ranks = draw(st.integers(1, most_ranks))
    chunks = draw(st.integers(1, most_chunks))
    microbatches = draw(st.integers(1, most_microbatches))
    return random_legal(draw(st.randoms(use_true_random=False)), ranks, chunks, microbatches, split, pairs)


def with_orders(schedule, orders):
    """Return `schedule` with other orders."""
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, tuple(map(tuple, orders)))


@st.composite
def shuffled_schedules(draw):
    """Draw a complete schedule whose orders may or may not be legal."""
    schedule = draw(legal_schedules(most_ranks=3, most_chunks=2, most_microbatches=3, pairs=0.2))
    orders = [list(order) for order in schedule.orders]
    for order in orders:
        for _ in range(draw(st.integers(0, 2))):
            here, there = (draw(st.integers(0, len(order) - 1)) for _ in range(2))
            order.insert(there, order.pop(here))
    return with_orders(schedule, orders)


MUTATIONS = ("drop", "double", "move", "swap", "restage", "renumber", "reop", "split", "unpair")


@st.composite
def mutated_schedules(draw, mutations=MUTATIONS):
    """Draw a legal schedule with up to three random changes. Usually, but not always, it is illegal."""
    schedule = draw(legal_schedules(most_ranks=3, most_chunks=2, most_microbatches=3, pairs=0.2))
    orders = [list(order) for order in schedule.orders]
    for _ in range(draw(st.integers(0, 3))):
        rank, index = draw(st.sampled_from([(r, i) for r, order in enumerate(orders) for i in range(len(order))]))
        action = orders[rank][index]
        mutation = draw(st.sampled_from(mutations))
        if mutation == "drop":
            if sum(map(len, orders)) > 1:
                del orders[rank][index]
        elif mutation in ("double", "move"):
            if mutation == "move":
                del orders[rank][index]
            other = orders[draw(st.integers(0, len(orders) - 1))]
            other.insert(draw(st.integers(0, len(other))), action)
        elif mutation == "swap":
            other = draw(st.integers(0, len(orders[rank]) - 1))
            orders[rank][index], orders[rank][other] = orders[rank][other], action
        else:
            orders[rank][index : index + 1] = _changed(draw, schedule, mutation, action)
    return with_orders(schedule, orders)


def _changed(draw, schedule, mutation, action):
    """Return the actions that replace `action`."""
    if action.parts:
        if mutation == "unpair":
            return action.parts
        first = _changed(draw, schedule, mutation, action.parts[0])[0]
        return [paired(first, action.parts[1]) or first]
    if mutation == "restage":
        return [action._replace(stage=draw(st.integers(-1, schedule.stages)))]
    if mutation == "renumber":
        return [action._replace(microbatch=draw(st.integers(-1, schedule.microbatches)))]
    if mutation == "reop":
        return [action._replace(op=draw(st.sampled_from([Op.F, Op.B, Op.I, Op.W])))]
    if mutation == "split" and action.op == Op.B:
        return [action._replace(op=Op.I), action._replace(op=Op.W)]
    return [action]


actions = st.deferred(lambda: compute | messages | sharding | overlapped)
_numbers = st.integers(0, 10**6)
compute = st.builds(lambda *fields: Action(*fields), _numbers, st.sampled_from([Op.F, Op.B, Op.I, Op.W]), _numbers)
messages = st.builds(
    lambda *fields: Action(*fields), _numbers, st.sampled_from([Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B]), _numbers
)
sharding = st.builds(
    lambda stage, op: Action(stage, op), _numbers, st.sampled_from([Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD])
)
overlapped = st.builds(paired, compute, compute).filter(bool)
