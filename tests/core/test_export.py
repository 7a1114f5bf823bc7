"""Schedules in the formats of other programs. test_against_torch and test_lowered load the CSV into torch."""

import pytest

import ppedu as pp
from ppedu import SettingError
from ppedu.core.export import lookup_table, signed_order, to_torch


def test_the_tables_that_megatron_prints():
    """Megatron-LM, core/pipeline_parallel/schedules.py: the example "PP2 N3M5 with VP2", first rank, warm-up 5."""
    schedule = pp.schedule("interleaved", 2, 5, chunks=2, group=3)
    microbatches, chunks = zip(*lookup_table(schedule), strict=True)
    assert microbatches == (0, 1, 2, 0, 1, 2, 3, 4, 3, 4)
    assert chunks == (0, 0, 0, 1, 1, 1, 0, 0, 1, 1)
    assert signed_order(schedule) == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]


def test_an_overlapped_pair_is_its_two_parts_in_signed_order():
    assert signed_order(pp.schedule("1f1b-overlap", 2, 4), 1) == [1, 1, -1, 1, -1, 1, -1, -1]


@pytest.mark.parametrize("name, reason", [("zb-h1", "only full backwards"), ("dualpipe", "two copies")])
def test_schedules_that_signed_chunks_cannot_express_are_refused(name, reason):
    with pytest.raises(SettingError, match=reason):
        signed_order(pp.schedule(name, 4, 8))


def test_a_rank_must_exist():
    with pytest.raises(SettingError, match="there is no rank 4; the ranks are 0 to 3"):
        lookup_table(pp.schedule("1f1b", 4, 8), 4)


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
