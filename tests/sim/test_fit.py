"""Costs fitted to timelines: exact for simulated ones, and not misled by single slow actions and messages."""

from fractions import Fraction
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepper import parents
from strategies import legal_schedules, often, read

import ppedu as pp
from ppedu import Costs, SettingError, Span, Timeline, simulate
from ppedu.sim.fit import fit

NAMES = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def waits(timeline):
    """Yield (source, target, time) of each input that was made when its rank had ended the action before."""
    stages = timeline.schedule.stages
    made = {span.action: (rank, span.end) for rank, row in enumerate(timeline.rows) for span in row}
    for rank, row in enumerate(timeline.rows):
        for before, span in pairwise([None, *row]):
            for choices in parents(span.action, stages):
                source, end = next(made[action] for action in choices if action in made)
                if source != rank and (before is None or before.end <= end):
                    yield source, rank, span.start - end


@given(legal_schedules(), st.randoms(use_true_random=False), st.booleans())
@often(150)
def test_times_and_latencies_of_a_simulation_are_recovered_exactly(schedule, chance, whole):
    part = 1 if whole else 7
    times = {name: [Fraction(chance.randint(1, 9), part) for _ in range(schedule.stages)] for name in NAMES.values()}
    links = [*permutations(range(schedule.ranks), 2)]
    latency = {link: Fraction(chance.randint(0, 5), part) for link in links}
    timeline = simulate(schedule, Costs(**times, latency=latency))
    found = fit([timeline, timeline])
    assert found == Costs.fit(timeline)
    for op, name in NAMES.items():
        fitted = getattr(found, name)
        ran = {single.stage for order in schedule.orders for single in order if single.op == op}
        assert fitted is None if not ran else all(fitted[stage] == times[name][stage] for stage in ran)
    awaited = set()
    for source, target, time in waits(timeline):
        assert time == latency[source, target] == found.delay(source, target)
        awaited.add((source, target))
    known = sorted(latency[link] for link in awaited) or [0]
    usual = (known[len(known) // 2] + known[(len(known) - 1) // 2]) / Fraction(2)
    assert all(found.delay(*link) == usual for link in links if link not in awaited)
    assert not {float} & {type(time) for time in (*found.forward, *(found.delay(*link) for link in links))}


@pytest.mark.parametrize("name", pp.schedules())
def test_simulating_with_the_fitted_costs_gives_the_same_timeline(name):
    schedule = pp.schedule(name, 4, 8)
    timeline = simulate(schedule, Costs(latency=Fraction(1, 4)))
    found = Costs.fit(timeline)
    assert found.latency == Fraction(1, 4)
    assert simulate(schedule, found).rows == timeline.rows
    assert Costs.fit(simulate(pp.lower(schedule), Costs(latency=Fraction(1, 4)))) == found


def test_fit_accepts_a_run_in_which_only_some_stages_split_backwards():
    schedule = read("0F0 0B0", "1F0 1I0 1W0")
    timeline = simulate(schedule, Costs(forward=[1, 2], backward=[3, 9], input=[9, 4], weight=[9, 5]))
    assert simulate(schedule, Costs.fit(timeline)).rows == timeline.rows


def measured(late=0, slow=0):
    """Two ranks that wait for each other. The message of 0F1 is `late`, and 1F1 is `slow`."""
    schedule = pp.schedule("1f1b", 2, 1)
    schedule = pp.Schedule("one by one", schedule.placement, 3, (_rank(0), _rank(1)))
    now, rows = 0.0, ([], [])
    for m in range(3):
        for rank, action in ((0, pp.F(0, m)), (1, pp.F(1, m)), (1, pp.B(1, m)), (0, pp.B(0, m))):
            start = now + (0 if action in (pp.F(0, m), pp.B(1, m)) else 0.25 if action.op == "F" else 0.5)
            start += late if action == pp.F(1, 1) else 0
            now = start + 1 + (slow if action == pp.F(1, 1) else 0)
            rows[rank].append(Span(action, start, now))
    return Timeline(schedule, rows, Costs(unit="s", activation=3, memory_unit="GB"), "measured")


def _rank(rank):
    return tuple(make(rank, m) for m in range(3) for make in (pp.F, pp.B))


def test_one_late_message_and_one_slow_action_do_not_mislead():
    units = {"unit": "s", "activation": 3, "memory_unit": "GB"}
    costs = Costs([1, 1], [1, 1], latency={(0, 1): 0.25, (1, 0): 0.5}, **units)
    assert Costs.fit(measured()) == Costs.fit(measured(late=9, slow=9)) == costs
    assert fit([measured(), measured(late=9), measured(slow=9)]) == costs


def test_the_medians_of_several_timelines_are_over_all_their_actions():
    schedule = pp.schedule("gpipe", 2, 1)
    costs = [Costs([each, 1], [1, 1], latency=each) for each in (1, 2, 6)]
    found = fit([simulate(schedule, each) for each in costs])
    assert found.forward == (2, 1) and found.latency == 2


def test_links_that_are_equal_but_for_rounding_have_one_latency():
    found = Costs.fit(simulate(pp.schedule("1f1b", 4, 8), Costs(forward=0.1, backward=0.3, latency=0.07)))
    assert found.latency == pytest.approx(0.07, abs=1e-9) and isinstance(found.latency, float)


def test_sends_that_take_time_are_not_waits():
    """A rank of a measured, lowered run is busy while it sends: when 1B0 ends, at 7, rank 0 is."""
    schedule = pp.lower(pp.schedule("gpipe", 2, 2))
    actions = {str(action): action for order in schedule.orders for action in order}
    times = [
        {"0F0": (0, 1), "0SEND_F0": (1, 2), "0F1": (2, 3), "0SEND_F1": (3, 8)},
        {"1RECV_F0": (0, 0), "1F0": (3, 5), "1RECV_F1": (5, 5), "1F1": (5, 6), "1B0": (6, 7), "1SEND_B0": (7, 8)},
    ]
    times[0] |= {"0RECV_B0": (8, 8), "0B0": (20, 21), "0RECV_B1": (21, 21), "0B1": (21, 22)}
    times[1] |= {"1B1": (8, 9), "1SEND_B1": (9, 10)}
    rows = [[Span(actions[name], *time) for name, time in row.items()] for row in times]
    assert Costs.fit(Timeline(schedule, rows, Costs(unit="s"), "measured")).latency == 2
    assert {*(span.action for row in rows for span in row)} == {*actions.values()}


@pytest.mark.parametrize(
    ("timelines", "says"),
    [
        ([], "timelines must have the same number of ranks and of stages; got no timelines"),
        (None, "timelines must be a list of timelines, such as"),
        (
            [1],
            "what costs are fitted to must be a Timeline, such as a measured run's pipe.timeline or ",
        ),
        (
            [simulate(pp.schedule("1f1b", ranks, 4)) for ranks in (2, 3)],
            "timelines must have the same number of ranks and of stages; got 2 ranks and 2 stages, 3 ranks",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(timelines, says):
    with pytest.raises(SettingError, match=says):
        fit(timelines)
