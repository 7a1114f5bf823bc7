"""Microbatches of unlike times: grouped, ordered and scheduled as in DynaPipe, against all other ways to do so."""

import math
import random
from itertools import permutations

import judge
import pytest
from exhaustive import fastest

import ppedu as pp
from ppedu import Costs, SettingError


def partitions(things):
    """Yield all ways to divide things into groups."""
    if not things:
        yield []
        return
    first, *rest = things
    for found in partitions(rest):
        yield [[first], *found]
        for place, group in enumerate(found):
            yield [*found[:place], [first, *group], *found[place + 1 :]]


def test_no_other_groups_make_a_step_shorter():
    dice = random.Random(1)
    for _ in range(60):
        lengths = [dice.choice([1, 2, 3, 8, 9, 30]) for _ in range(dice.randint(1, 6))]
        ranks, fixed, attention = dice.randint(1, 5), dice.randint(0, 20), dice.choice([0, 0.25])
        tokens = dice.choice([None, max(lengths), 2 * max(lengths)])

        def time(count, length, fixed=fixed, attention=attention):
            return fixed + count * (length + attention * length**2)

        def padded(group, lengths=lengths):
            return len(group), max(lengths[each] for each in group)

        def step(groups, ranks=ranks):
            times = [time(*padded(group)) for group in groups]
            return sum(times) + (ranks - 1) * max(times)

        fitting = [
            groups
            for groups in partitions(range(len(lengths)))
            if all(math.prod(padded(group)) <= (tokens or math.inf) for group in groups)
        ]
        found = pp.dynamic_microbatches(lengths, ranks, time, tokens=tokens)
        assert {frozenset(group) for group in found} in [set(map(frozenset, each)) for each in fitting]
        assert step(found) == min(map(step, fitting))


def test_without_a_fixed_time_every_sequence_is_best_alone():
    found = pp.dynamic_microbatches([5, 9, 2], 4, lambda count, length: count * length)
    assert found == ((1,), (0,), (2,))
    assert pp.dynamic_microbatches([5, 9, 2], 1, lambda count, length: 100 + count * length) == ((1, 0, 2),)


def of(times, ranks, activation=None):
    return Costs([times] * ranks, [[2 * time for time in times]] * ranks, activation=activation or 1)


def test_gpipe_takes_what_the_groups_minimize_in_any_order():
    """As a flow shop with equal machines does, once for the forwards and once for the backwards."""
    for ranks in (2, 3, 4):
        made = pp.schedule("gpipe", ranks, 5)
        for times in set(permutations([1, 1, 2, 3, 7])):
            assert pp.simulate(made, of(times, ranks)).makespan == 3 * (14 + (ranks - 1) * 7)


def test_orders_by_clusters_are_near_the_best_of_all():
    """1F1B takes 19% longer than in its best order if the order is random, and 2% longer if it is by clusters."""
    dice = random.Random(2)
    for made, mean in ((pp.schedule("1f1b", 3, 5), 1.15), (pp.dynapipe(3, 5), 1.05)):
        above = []
        for _ in range(3):
            times = [dice.choice([1, 2, 3, 5, 8]) for _ in range(5)]

            def makespan(order, made=made, times=times):
                return pp.simulate(made, of([times[m] for m in order], 3)).makespan

            every = {order: makespan(order) for order in permutations(range(5))}
            least = min(every.values())
            assert every[pp.order_by_clusters(times, makespan, 5)] == least
            above.append((every[pp.order_by_clusters(times, makespan)] / least, sum(every.values()) / 120 / least))
        by_clusters, of_random = (sum(each) / 3 for each in zip(*above, strict=True))
        assert by_clusters < 1.03 and of_random > mean


def test_dynapipe_is_legal_and_keeps_within_the_memory():
    dice = random.Random(3)
    for _ in range(60):
        ranks, microbatches = dice.randint(1, 5), dice.randint(1, 9)
        sizes = [[dice.randint(1, 9) for _ in range(microbatches)] for _ in range(ranks)]
        memory = max(map(max, sizes)) + dice.randint(0, 20)
        costs = Costs(activation=sizes)
        made = pp.dynapipe(ranks, microbatches, costs, memory=memory)
        assert pp.check(made) == [] and judge.legal(made)
        timeline = pp.simulate(made, costs)
        assert max(timeline.peak_activations) <= memory
        for order, size in zip(made.orders, sizes, strict=True):
            held = 0
            for action in order:
                held += size[action.microbatch] * (1 if action.op == "F" else -1)
                assert held <= memory


# Orders of the authors' program (github.com/awslabs/optimizing-multitask-training-through-dynamic-pipelines) for
# activations of 8, 6, 5, 8, 4 and 7 on 4 ranks, each with a memory of 18; digits are forwards, letters backwards.
THEIRS = """
01a2b34cd5ef
01ab234cde5f
01ab234cde5f
0a1b2c3d4e5f
"""


def test_dynapipe_is_that_of_its_authors():
    made = pp.dynapipe(4, 6, Costs(activation=[[8, 6, 5, 8, 4, 7]] * 4), memory=18)
    rows = ["".join("012345abcdef"[m + 6 * (op == "B")] for _, op, m, _ in row) for row in made.orders]
    assert rows == THEIRS.split()


def test_no_order_within_the_memory_is_much_faster():
    """On two ranks; 1F1B, which uses less memory, is compared with the same best orders."""
    dice, above = random.Random(4), []
    for _ in range(6):
        costs = of([dice.randint(1, 9) for _ in range(4)], 2)
        timeline = pp.simulate(pp.dynapipe(2, 4, costs, memory=3), costs)
        best = fastest(timeline)
        assert timeline.makespan >= best
        above.append((timeline.makespan / best, pp.simulate(pp.schedule("1f1b", 2, 4), costs).makespan / best))
    ours, of_1f1b = (sum(each) / 6 for each in zip(*above, strict=True))
    assert ours < 1.06 and of_1f1b > 1.12, (ours, of_1f1b)


def test_dynapipe_buys_time_with_memory():
    """In good orders, it takes longer than 1F1B with as much memory, and less with twice as much."""
    dice, ratios = random.Random(5), []
    for _ in range(5):
        times = [round(20 * dice.lognormvariate(0, 0.5)) for _ in range(8)]

        def in_good_order(make, times=times):
            def step(order):
                costs = of([times[m] for m in order], 4, [[times[m] for m in order]] * 4)
                return pp.simulate(make(costs), costs)

            return step(pp.order_by_clusters(times, lambda order: step(order).makespan))

        usual = in_good_order(lambda _: pp.schedule("1f1b", 4, 8))
        memory = max(usual.peak_activations)
        for factor in (1, 2):
            found = in_good_order(lambda costs, most=factor * memory: pp.dynapipe(4, 8, costs, memory=most))
            assert max(found.peak_activations) <= factor * memory
            ratios.append(found.makespan / usual.makespan)
    assert sum(ratios[::2]) > 5 * 1.02 and sum(ratios[1::2]) < 5 * 0.97, ratios


def test_for_equal_microbatches_it_takes_as_long_as_1f1b():
    for ranks, microbatches in ((1, 1), (2, 5), (4, 8), (5, 3)):
        made = pp.dynapipe(ranks, microbatches)
        assert pp.simulate(made).makespan == pp.simulate(pp.schedule("1f1b", ranks, microbatches)).makespan
        assert pp.simulate(made).peak_activations == tuple(min(2 * (ranks - r) - 1, microbatches) for r in range(ranks))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pp.dynamic_microbatches([], 2, max), "give sequences of at most inf tokens; got none"),
        (lambda: pp.dynamic_microbatches([3, 9], 2, max, tokens=8), "at most 8 tokens; got a sequence of 9"),
        (
            lambda: pp.dynamic_microbatches([3], 2, lambda count, length: -1),
            r"time\(1, 3\) must be a number",
        ),
        (lambda: pp.order_by_clusters([3, 1], min, clusters=9), "clusters must be at most 8"),
        (lambda: pp.dynapipe(2, 2, Costs(activation=[1, [2, 3]]), memory=2), "rank 1 needs 3 for a microbatch, over"),
    ],
)
def test_what_cannot_be_is_refused(call, says):
    with pytest.raises(SettingError, match=says):
        call()
