"""Schedules in the formats of other programs. test_against_torch and test_lowered load the CSV into torch."""

import pytest

import ppedu as pp
from ppedu import SettingError
from ppedu.core.export import to_torch


def test_a_pair_unknown_to_torch_is_exported_as_two_actions(tmp_path):
    schedule = pp.schedule("interleaved-overlap", 2, 4, backward_first=True)
    assert "OVERLAP_B_F" in schedule.to_csv()
    text = to_torch(schedule, tmp_path / "s.csv")
    assert "OVERLAP" not in text and (tmp_path / "s.csv").read_text() == text
    kept = pp.Schedule.from_csv(tmp_path / "s.csv")
    assert [[single for action in order for single in action.singles] for order in schedule.orders] == [
        list(order) for order in kept.orders
    ]


def test_pairs_known_to_torch_are_exported_as_pairs():
    schedule = pp.schedule("dualpipev", 2, 4)
    assert to_torch(schedule) == schedule.to_csv()


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_two_copies_are_refused_with_the_reason(name):
    with pytest.raises(SettingError, match="two copies of the model"):
        to_torch(pp.schedule(name, 4, 8))


def test_a_schedule_without_actions_is_refused():
    with pytest.raises(SettingError, match="has no actions; there is nothing to export"):
        to_torch(pp.Schedule("mine", pp.Placement.make("loop", 2), 3, ((), ())))
