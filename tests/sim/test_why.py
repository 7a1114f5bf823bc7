"""Critical path, idle times and causes: compared with the spans, and with known properties of schedules."""

import re
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepper import parents
from strategies import legal_schedules, often, one_f_one_b, read, with_orders

import ppedu as pp
from ppedu import Costs, SettingError, Timeline, simulate
from ppedu.core.numeric import pretty

some_costs = st.builds(
    Costs,
    forward=st.integers(1, 4),
    input=st.integers(1, 4),
    weight=st.integers(1, 4),
    latency=st.integers(0, 3),
)
SENTENCE = re.compile(
    r"rank (\d+) waits ([\d.]+)–([\d.]+): (\S+) needs ([^\s,]+)(?:, which ends at ([\d.]+) on| from) rank (\d+)"
)


# --- critical path ----------------------------------------------------------------------------------------------


@given(legal_schedules(pairs=0.2), some_costs)
@often(150)
def test_the_critical_path_has_no_slack_from_the_first_start_to_the_last_end(schedule, costs):
    timeline = simulate(schedule, costs)
    path = timeline.critical_path()
    assert path[0][1].start == 0 and path[-1][1].end == timeline.makespan
    for (rank, span), (next_rank, following) in pairwise(path):
        assert span in timeline.spans(rank)
        assert following.start == span.end + (costs.latency if rank != next_rank else 0)
        needed = {action for choices in parents(following.action, schedule.stages) for action in choices}
        assert rank == next_rank or needed & set(span.action.singles)


def test_the_critical_path_of_one_microbatch_is_all_of_its_actions():
    path = simulate(pp.schedule("1f1b", 3, 1)).critical_path()
    assert [(rank, str(span.action)) for rank, span in path] == [
        (0, "0F0"),
        (1, "1F0"),
        (2, "2F0"),
        (2, "2B0"),
        (1, "1B0"),
        (0, "0B0"),
    ]


# --- why idle ---------------------------------------------------------------------------------------------------


@given(legal_schedules(split=0.3), some_costs)
@often(100)
def test_every_gap_is_explained_by_what_came_last(schedule, costs):
    timeline = simulate(schedule, costs)
    for rank, row in enumerate(timeline.rows):
        since = 0
        for action, start, end in row:
            if start > since:
                sentence = timeline.why_idle(rank, since)
                assert sentence == timeline.why_idle(rank, Fraction(since + start, 2))
                found = SENTENCE.fullmatch(sentence)
                assert found and found.group(1, 2, 3, 4) == (str(rank), pretty(since), pretty(start), str(action))
                maker = next(span for span in timeline.spans(int(found[7])) if str(span.action) == found[5])
                assert maker.end + costs.latency == start
                assert found[6] == (pretty(maker.end) if costs.latency else None)
            assert (
                timeline.why_idle(rank, start)
                == f"rank {rank} is not idle: it runs {action} at {pretty(start)}–{pretty(end)}"
            )
            since = end
        assert timeline.why_idle(rank, since) == f"rank {rank} has nothing left to do after {pretty(since)}"


def test_a_lowered_schedule_is_explained_by_what_is_computed():
    lowered = simulate(pp.lower(pp.schedule("1f1b", 4, 4)))
    assert lowered.why_idle(2, 1) == "rank 2 waits 0–2: 2F0 needs 1F0 from rank 1"


def test_a_measured_rank_may_start_late_without_a_reason_in_the_schedule():
    schedule = read("0F0 0B0")
    (first, second) = schedule.orders[0]
    row = pp.Span(first, 1.5, 2.0), pp.Span(second, 2.25, 2.375)
    measured = Timeline(schedule, (row,), Costs(unit="s"), "measured")
    assert measured.why_idle(0, 0.6) == "rank 0 waits 500–750 ms: 0B0 could have started before"


@pytest.mark.parametrize("rank", [-1, 4, "0", True])
def test_a_rank_that_does_not_exist_is_refused(rank):
    with pytest.raises(SettingError, match="there is no rank"):
        simulate(pp.schedule("1f1b", 4, 4)).why_idle(rank, 0)


# --- causes -----------------------------------------------------------------------------------------------------


@given(legal_schedules(pairs=0.2), some_costs)
@often(100)
def test_the_causes_add_up_to_the_bubble(schedule, costs):
    timeline = simulate(schedule, costs)
    causes = timeline.causes()
    assert sum(causes.values()) == pytest.approx(timeline.bubble, abs=1e-12)
    assert causes["imbalance"] == 0 and min(causes.values()) >= -1e-12
    assert costs.latency or causes["communication"] == pytest.approx(0, abs=1e-12)


def or_nothing(stages):
    """Draw a time for all stages, or one for each; it may be 0."""
    return st.integers(0, 1) | st.lists(st.integers(0, 2), min_size=stages, max_size=stages)


@given(st.data(), legal_schedules(most_chunks=2, pairs=0.2), st.integers(1, 3), st.booleans())
@often(150)
def test_actions_that_take_no_time_are_explained_like_others(data, schedule, steps, barrier):
    times = {name: data.draw(or_nothing(schedule.stages)) for name in ("forward", "input", "weight", "overlap")}
    times |= {name: data.draw(st.integers(0, 1)) for name in ("latency", "transfer")}
    links = data.draw(st.sampled_from(["buffered", "pair", "rank"]))
    timeline = simulate(pp.lower(schedule), Costs(**times, transport=links), steps=steps, barrier=barrier)
    causes = timeline.causes()
    assert sum(causes.values()) == pytest.approx(timeline.bubble, abs=1e-12)
    assert min(share for cause, share in causes.items() if cause != "imbalance") >= -1e-12
    assert sum(gap.end - gap.start for gap in timeline.gaps()) == sum(timeline.idle)
    path = [span for _, span in timeline.critical_path()]
    assert path[0].start == 0 and path[-1].end == timeline.makespan
    assert all(before.end <= after.start for before, after in pairwise(path))
    assert timeline.summary() and timeline.text() and 0 <= timeline.bubble <= 1


def test_steps_that_take_no_time_have_no_causes():
    causes = simulate(pp.schedule("1f1b", 2, 2), Costs(forward=0), steps=2).causes()
    assert set(causes.values()) == {0.0}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_warm_up_and_cooldown_are_the_only_causes_of_these_bubbles(name):
    timeline = simulate(pp.schedule(name, 4, 8))
    assert timeline.causes() == {
        "warm-up and cooldown": pytest.approx(timeline.bubble),
        "ordering": 0,
        "imbalance": 0,
        "communication": pytest.approx(0, abs=1e-12),
    }


@pytest.mark.parametrize(
    "schedule",
    [
        *(pp.schedule("interleaved", 4, 1, chunks=chunks) for chunks in (1, 2, 3)),
        pp.schedule("naive", 3, 5),  # each rank has memory for one microbatch
        pp.lower(pp.schedule("hanayo", 4, 1)),
        read("0F0 0B0", "1F0 1I0 1W0", "2F0 2B0"),
    ],
    ids=repr,
)
def test_a_single_possible_order_is_never_a_cause(schedule):
    assert simulate(schedule).causes()["ordering"] == 0


def test_a_bad_order_costs_what_a_better_one_saves():
    """The last of two ranks runs its backwards in reverse, so the first rank waits for the backward of microbatch 0."""
    first = [*(pp.F(0, m) for m in range(6)), *(pp.B(0, m) for m in range(6))]
    last = [*(pp.F(1, m) for m in range(6)), *(pp.B(1, m) for m in reversed(range(6)))]
    timeline = simulate(with_orders(pp.schedule("gpipe", 2, 6), [first, last]))
    gpipe = simulate(pp.schedule("gpipe", 2, 6))
    assert timeline.peak_activations == gpipe.peak_activations and timeline.makespan > gpipe.makespan
    assert timeline.causes()["ordering"] == pytest.approx(1 - gpipe.makespan / timeline.makespan)
    assert timeline.causes()["warm-up and cooldown"] > 0


def test_messages_that_leave_late_count_as_ordering():
    late = read(
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        *["1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"],
        microbatches=2,
    )
    assert simulate(late).makespan == 1 + simulate(pp.schedule("1f1b", 2, 2)).makespan
    assert simulate(late).causes()["ordering"] == pytest.approx(1 / 10)


def test_a_warm_up_that_is_short_by_one_counts_as_warm_up_and_cooldown():
    """The makespan is 36 instead of 22 with 4 ranks, 8 microbatches and F = B. The peaks are lower, too: 3, 2, 1, 1."""
    schedule = one_f_one_b(4, 8, lambda rank: max(0, 2 - rank))
    timeline = simulate(schedule, Costs(backward=1))
    assert timeline.makespan == 36 and timeline.peak_activations == (3, 2, 1, 1)
    assert timeline.causes()["ordering"] == 0, "in as little memory no faster order is found"


@pytest.mark.parametrize("name, costs", [("1f1b", {"latency": 5}), ("dualpipe", {"overlap": 2})])
def test_saving_a_run_or_measuring_it_keeps_its_causes(tmp_path, name, costs):
    timeline = simulate(pp.schedule(name, 4, 8), Costs(**{"forward": 1, "backward": 2, **costs}))
    timeline.save(tmp_path / "x.json")
    assert Timeline.load(tmp_path / "x.json").causes() == pytest.approx(timeline.causes(), abs=1e-9)
    measured = Timeline(timeline.schedule, timeline.rows, Costs(unit="s"), "measured")
    assert measured.causes() == pytest.approx(timeline.causes(), abs=1e-9)


def test_an_illegal_order_has_a_critical_path():
    schedule = read("0B0 0F0")
    (first, second) = schedule.orders[0]
    measured = Timeline(schedule, ((pp.Span(first, 0, 1), pp.Span(second, 1, 2)),), Costs(unit="s"), "measured")
    assert [str(span.action) for _, span in measured.critical_path()] == ["0B0", "0F0"]
    assert Timeline(schedule, ((),), Costs(), "measured").critical_path() == []


def test_a_slow_stage_and_a_slow_network_are_told_apart():
    schedule = pp.schedule("1f1b", 4, 8)
    slow_stage = simulate(schedule, Costs(forward=[1, 2, 1, 1], backward=[2, 4, 2, 2])).causes()
    slow_network = simulate(schedule, Costs(latency=1)).causes()
    assert slow_stage["imbalance"] > 0.2 and slow_stage["communication"] == pytest.approx(0, abs=1e-12)
    assert slow_network["communication"] > 0.3 and slow_network["imbalance"] == 0


def test_unexplained_idle_time_of_a_measured_run_counts_as_communication():
    schedule = pp.schedule("1f1b", 2, 2)
    rows = simulate(schedule, Costs(latency=Fraction(1, 2))).rows
    measured = Timeline(schedule, rows, Costs(unit="s"), "measured")
    causes = measured.causes()
    assert causes["communication"] > 0.1 and causes["imbalance"] == causes["ordering"] == 0
    assert sum(causes.values()) == pytest.approx(measured.bubble)
