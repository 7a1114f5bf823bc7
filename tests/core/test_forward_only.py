"""Forward-only schedules, for inference: declared, checked, simulated, read and written."""

import pytest
import stepper

import ppedu as pp
from ppedu import Costs, Schedule, ScheduleError, SettingError, Timeline, simulate

NAMES = ["gpipe", "interleaved", "zb-v", "dualpipe", "dualpipev"]


@pytest.fixture(params=NAMES)
def forwards(request):
    return pp.schedule(request.param, ranks=4, microbatches=8).forwards


def test_the_forwards_of_a_schedule_are_legal_without_backwards(forwards):
    assert forwards.forward_only and not pp.check(forwards)
    assert {action.op for order in forwards.orders for action in order} == {"F"}
    rows = stepper.run(forwards, lambda action: 2)
    expected = max(end for row in rows for *_, end in row) * 4 // forwards.stages
    assert simulate(forwards, Costs(forward=2)).makespan == expected
    assert "forward only" in simulate(forwards).summary()


def test_messages_of_a_forward_only_schedule_are_activations(forwards):
    lowered = pp.lower(forwards)
    assert lowered.forward_only and not pp.check(lowered, transport="rendezvous")
    assert {action.op for order in lowered.orders for action in order} == {"F", "SEND_F", "RECV_F"}
    if forwards.placement.copies == 1:
        assert "REDUCE_GRAD" not in pp.export.to_torch(lowered)
    sharded = pp.lower(forwards, fsdp=True)
    assert {action.op for order in sharded.orders for action in order} == {
        "F",
        "SEND_F",
        "RECV_F",
        "UNSHARD",
        "RESHARD",
    }
    lost = [[action for action in order if str(action) != "1SEND_F3"] for order in lowered.orders]
    assert any(
        "1SEND_F3 is never run" in str(problem)
        for problem in pp.check(Schedule("lost", lowered.placement, 8, lost, True))
    )


def test_activations_are_freed_at_the_end_of_their_forward(forwards):
    timeline = simulate(forwards)
    assert set(timeline.peak_activations) == {4 / forwards.stages}
    assert timeline.memory(0)[-1][1] == 0


def test_a_schedule_that_lost_its_backwards_is_not_for_inference(forwards):
    undeclared = Schedule("undeclared", forwards.placement, 8, forwards.orders)
    with pytest.raises(ScheduleError, match=r"0B0 is never run"):
        undeclared.validate()
    whole = pp.schedule("1f1b", ranks=2, microbatches=2)
    declared = Schedule("declared", whole.placement, 2, whole.orders, forward_only=True)
    assert str(pp.check(declared)[0]) == ("rank 0, position 2: 0B0 is a backward in a forward-only schedule")
    assert len(pp.check(declared)) == 4
    with pytest.raises(SettingError, match="forward_only must be True or False; got 'yes'"):
        Schedule("wrong", whole.placement, 2, whole.orders, forward_only="yes")


def test_files_hold_forward_only_schedules(forwards, tmp_path):
    placement = forwards.placement
    forwards.to_csv(tmp_path / "inference.csv")
    read = Schedule.from_csv(tmp_path / "inference.csv", placement, name=forwards.name, forward_only=True)
    assert read == forwards
    assert pp.check(Schedule.from_csv(tmp_path / "inference.csv", placement))
    simulate(forwards).save(tmp_path / "inference.json")
    assert Timeline.load(tmp_path / "inference.json").schedule == forwards
