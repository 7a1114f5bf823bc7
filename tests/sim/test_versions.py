"""Versions of the weights: what the papers state, and random orders against a count that shares nothing."""

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu import B, Costs, F, ScheduleError, SettingError, U, W, simulate, versions
from ppedu.sim import simulate_partial
from ppedu.view.why import peak
from ppedu.zoo import theory

randoms = st.randoms(use_true_random=False)


def test_the_order_of_pipedream():
    """arXiv 1806.03377, figure 8, with machines and minibatches counted from 0, and an update after each backward."""
    schedule = pp.schedule("pipedream", 4, 6)
    first = "0F0 0F1 0F2 0F3 0B0 0U0 0F4 0B1 0U1 0F5 0B2 0U2 0B3 0U3 0B4 0U4 0B5 0U5"
    assert [*map(str, schedule.orders[0])] == first.split()
    assert [*map(str, schedule.orders[3])] == " ".join(f"3F{m} 3B{m} 3U{m}" for m in range(6)).split()


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_pipedreams_gradients_are_as_old_as_its_paper_says(n):
    """w(t+1) = w(t) - v·∇f(w_1(t-n+1), w_2(t-n+2), …, w_n(t)); its code keeps warm-up + 1 versions."""
    found = versions(pp.schedule("pipedream", n, 4 * n))
    for stage in range(1, n + 1):
        assert found.stepped[stage - 1] == tuple(range(4 * n))
        assert found.used[stage - 1] == tuple(max(0, t - n + stage) for t in range(4 * n))
    assert found.held == tuple(n - rank - 1 + 1 for rank in range(n))


def test_microbatch_5_of_pipedream():
    """arXiv 1806.03377, figure 9: minibatch 5 uses weights after 1 on the first machine, after 3 on the third."""
    used = versions(pp.schedule("pipedream", 4, 8)).used
    assert (used[0][5 - 1], used[2][5 - 1]) == (1, 3)


@pytest.mark.parametrize(("n", "m"), [(4, 4), (2, 2), (3, 5), (1, 1), (1, 3), (4, 16)])
def test_two_versions_are_enough_for_2bw(n, m):
    """arXiv 2006.09503, section 3.1: input k uses version max(⌊(k-1)/m⌋-1, 0), and W(t+1) = W(t) - v·∇f(W(t-1))."""
    for count in (5 * m, 5 * m + m // 2):
        found = versions(pp.schedule("pipedream-2bw", n, count, batch=m))
        for used, stepped in zip(found.used, found.stepped, strict=True):
            assert used == tuple(max((k - 1) // m - 1, 0) for k in range(1, count + 1))
            assert stepped == tuple((k - 1) // m for k in range(1, count + 1))
        assert {late for stage in found.staleness for late in stage[m:]} == {1}
        assert max(found.held) <= 2
    assert pp.schedule("pipedream-2bw", n, 9) == pp.schedule("pipedream-2bw", n, 9, batch=n)


def test_2bw_needs_a_microbatch_for_each_rank():
    with pytest.raises(SettingError, match="at least 4 microbatches a batch, one for each rank; got 3"):
        pp.schedule("pipedream-2bw", 4, 12, batch=3)


@given(randoms)
@often(150)
def test_versions_are_counted(random):
    plain = judge.draw(random, lowered=False)
    if plain.placement.copies > 1:
        return
    schedule = judge.update(random, plain)
    found = versions(schedule)
    for stage in range(schedule.stages):
        order = schedule.orders[schedule.placement.rank(stage)]
        own = [each for action in order for each in action.singles if each.stage == stage]
        updates = [each.microbatch for each in own if each.op == "U"]
        for m in range(schedule.microbatches):
            before = own[: own.index(F(stage, m))]
            assert found.used[stage][m] == sum(each.op == "U" for each in before)
            assert found.stepped[stage][m] == sum(each < m for each in updates)
            assert found.staleness[stage][m] == found.stepped[stage][m] - found.used[stage][m]
        moments = []
        for end in range(len(own) + 1):
            ran = own[:end]
            over = {each.microbatch for each in ran if each in (B(stage, each.microbatch), W(stage, each.microbatch))}
            flying = {each.microbatch for each in ran if each.op == "F"} - over
            moments.append({*(found.used[stage][m] for m in flying), sum(each.op == "U" for each in ran)})
        assert found.held[stage] == max(map(len, moments))
    assert {*versions(plain).held} == {1} and not any(map(any, versions(plain).staleness))


def test_what_has_no_versions():
    with pytest.raises(SettingError, match="versions takes a schedule"):
        versions("1f1b")
    with pytest.raises(ScheduleError):
        versions(pp.Schedule("mine", pp.schedule("1f1b", 1, 1).placement, 1, [["0F0"]]))
    assert versions(pp.schedule("1f1b", 2, 3).forwards).held == (1, 1)


def test_the_bubble_is_paid_once_and_not_in_each_step():
    steps, m = 16, 8
    assert simulate(pp.schedule("1f1b", 4, m), steps=steps).bubble == pytest.approx(3 / (m + 3))
    for name in ("pipedream", "pipedream-2bw"):
        assert simulate(pp.schedule(name, 4, steps * m)).bubble == pytest.approx(3 / (steps * m + 3))


def test_updates_take_time():
    schedule = pp.schedule("pipedream", 1, 3)
    assert simulate(schedule).makespan == 9
    assert simulate(schedule, Costs(update=2)).makespan == 15
    assert simulate(schedule, Costs(update=[5])).makespan == 24
    assert simulate(schedule, Costs(update=lambda stage, m: m)).makespan == 12
    two = pp.schedule("pipedream", 2, 8)
    timeline = simulate(two, Costs(update=0.5))
    assert timeline.peak_activations == simulate(two).peak_activations == (2, 1)
    assert Costs.fit(timeline) == Costs([1] * 2, [2] * 2, update=[0.5] * 2, activation=1, latency=0)
    assert simulate(pp.schedule("1f1b", 2, 8), Costs(update=9)) == simulate(pp.schedule("1f1b", 2, 8), Costs(update=9))
    assert set(timeline.causes()) >= {"ordering"} and timeline.causes()["ordering"] == 0
    with pytest.raises(SettingError, match="update must be"):
        Costs(update=-1)


def test_a_slice_does_not_share_an_update():
    plain = pp.schedule("seq1f1b", 1, 2, slices=2)
    schedule = pp.Schedule("mine", plain.placement, 4, [[*plain.orders[0], U(0, 3)]])
    for costs in (Costs(update=3, attention=0.5), Costs(update=3, lengths=[3, 1])):
        assert simulate(schedule, costs).makespan == simulate(plain, costs).makespan + 3


def test_formulas_are_those_of_1f1b():
    for name in ("pipedream", "pipedream-2bw"):
        assert theory.idle(name, 4, 8).value == theory.idle("1f1b", 4, 8).value


def test_a_timeline_says_how_many_versions_there_are_and_how_late_gradients_are():
    said = "4 versions of the weights, gradients up to 3 updates late"
    timeline = simulate(pp.schedule("pipedream", 4, 8))
    assert timeline.summary().endswith(f"peak activations 4, {said}")
    assert peak(timeline).words[-1] == f"Weights do not count: {said}."
    said = "2 versions of the weights, gradients up to 1 update late"
    assert simulate(pp.schedule("pipedream-2bw", 4, 8)).summary().endswith(said)
    part = pp.Schedule("mine", pp.schedule("1f1b", 1, 1).placement, 1, [["0F0", "0U0", "0B0"]])
    assert simulate_partial(part, Costs()).summary().endswith("peak activations 1")
    assert "version" not in simulate(pp.schedule("1f1b", 4, 8)).summary()
