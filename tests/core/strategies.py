"""Hypothesis strategies: legal and illegal schedules."""

import judge
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from stepper import paired

from ppedu import Action, B, F, Op, Placement, Schedule
from ppedu.core import COMPUTE


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


@st.composite
def legal_schedules(draw, most_ranks=4, most_chunks=3, most_microbatches=4, split=0.5, pairs=0.0):
    """Draw a legal schedule in a loop, without messages; see `judge.draw`."""
    placement = Placement.make("loop", draw(st.integers(1, most_ranks)), draw(st.integers(1, most_chunks)))
    random = draw(st.randoms(use_true_random=False))
    return judge.draw(
        random, lowered=False, most_microbatches=most_microbatches, placement=placement, split=split, pairs=pairs
    )


def with_orders(schedule, orders):
    """Return `schedule` with other orders."""
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, tuple(map(tuple, orders)))


def one_f_one_b(ranks, microbatches, warmup):
    """Return 1F1B with `warmup(rank)` forwards before its steady state."""
    orders = []
    for rank in range(ranks):
        first = min(warmup(rank), microbatches)
        order = [F(rank, m) for m in range(first)]
        for m in range(first, microbatches):
            order += [F(rank, m), B(rank, m - first)]
        orders.append(order + [B(rank, m) for m in range(microbatches - first, microbatches)])
    return Schedule("1f1b", Placement.make("loop", ranks), microbatches, tuple(map(tuple, orders)))


@st.composite
def mutated_schedules(draw, *mutations):
    """Draw a legal schedule with one to three of these mutations of `judge.mutate`, none of which adds messages."""
    schedule = draw(legal_schedules(most_ranks=3, most_chunks=2, most_microbatches=3, pairs=0.2))
    some = mutations or [each for each in judge.MUTATIONS if each != "insert"]
    return judge.mutate(draw(st.randoms(use_true_random=False)), schedule, some)


def shuffled_schedules():
    """Draw a complete schedule whose orders may or may not be legal."""
    return mutated_schedules("swap", "neighbours")


actions = st.deferred(lambda: compute | messages | sharding | overlapped)
_numbers = st.integers(0, 10**6)
compute = st.builds(lambda *fields: Action(*fields), _numbers, st.sampled_from(sorted(COMPUTE)), _numbers)
messages = st.builds(
    lambda *fields: Action(*fields), _numbers, st.sampled_from([Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B]), _numbers
)
sharding = st.builds(
    lambda stage, op: Action(stage, op), _numbers, st.sampled_from([Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD])
)
overlapped = st.builds(paired, compute, compute).filter(bool)
