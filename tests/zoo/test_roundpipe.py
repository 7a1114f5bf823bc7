"""RoundPipe against its authors' program, https://github.com/ITcarrot/RoundPipe, commit e813c67."""

import pytest

import ppedu as pp
from ppedu import B, F, Placement, R
from ppedu.core.export import to_torch

# By GPUs and layers: each GPU's jobs, in order. They are `ModelExecutePlan.auto("fused", …)` of roundpipe/scheduler.py,
# with layers whose forward takes 1, and whose backward takes 3 with recomputation, dealt to the GPUs as
# `forward_backward` of roundpipe/roundpipe.py does: the forward plan, the fused stage, the rest of the backward plan.
JOBS = {
    (2, 4): ["F0-2 B2 B0", "FB3 B1"],
    (3, 6): ["F0-1 B4 B1", "F2-4 B3 B0", "FB5 B2"],
    (4, 4): ["F0-2 B0", "FB3", "B2", "B1"],
    (4, 8): ["F0-0 B6 B2", "F1-3 B5 B1", "F4-6 B4 B0", "FB7 B3"],
    (5, 10): ["F0-2 B7 B2", "F3-5 B6 B1", "F6-8 B5 B0", "FB9 B4", "B8 B3"],
    (8, 16): [
        *("F0-2 B12 B4", "F3-5 B11 B3", "F6-8 B10 B2", "F9-11 B9 B1", "F12-14 B8 B0", "FB15 B7", "B14 B6", "B13 B5"),
    ],
}


def actions(job, microbatches):
    """Yield what a GPU does in a job: all microbatches, one after the other, as roundpipe/run.py does."""
    kind = job.rstrip("-0123456789")
    first, last = (int(number) for number in (job[len(kind) :] + "-" + job[len(kind) :]).split("-")[:2])
    for m in range(microbatches):
        if kind == "F":
            yield from (F(layer, m) for layer in range(first, last + 1))
        else:
            yield from ((F if kind == "FB" else R)(first, m), B(first, m))


@pytest.mark.parametrize(("ranks", "layers"), JOBS)
def test_the_order_is_that_of_the_authors_program(ranks, layers):
    for microbatches in (1, ranks, 2 * ranks + 1):
        found = pp.schedule("roundpipe", ranks, microbatches, chunks=layers // ranks)
        expected = [[each for job in row.split() for each in actions(job, microbatches)] for row in JOBS[ranks, layers]]
        assert [*map(list, found.orders)] == expected
        assert pp.check(found) == []


def test_ranks_wait_only_where_a_step_begins_and_ends():
    """With equal turns and at least as many microbatches as ranks, rank r starts r turns of one microbatch late."""
    timeline = pp.simulate(pp.schedule("roundpipe", 4, 8, chunks=4), pp.Costs(forward=4, backward=8))
    turn, turns = 3, 5 + 16
    starts = [row[0].start for row in timeline.rows]
    assert starts == [0, turn, 2 * turn, 3 * turn]
    for rank, row in enumerate(timeline.rows):
        own = len(range(rank, turns, 4))
        assert row[-1].end - row[0].start == 8 * turn * own == timeline.busy[rank]


def test_stages_of_any_times_can_take_turns():
    """The last stage takes as long as three others: no rank that owns it has to wait for it."""
    long = pp.Costs(forward=[1] * 7 + [3], backward=[2] * 7 + [6])
    owned = pp.simulate(pp.schedule("looped-bfs", 4, 16, chunks=2), long)
    turns = pp.simulate(pp.schedule("roundpipe", 4, 16), long)
    assert max(turns.busy) < max(owned.busy) * 1.05 and min(turns.busy) > min(owned.busy)


def test_what_the_placement_cannot_be():
    for given in ([0], [0, 1, 2], ["0", 1]):
        with pytest.raises(pp.SettingError):
            Placement("mine", 2, ((0, 1),), backwards=given)
    with pytest.raises(pp.SettingError, match="needs one copy of the model and no slices"):
        Placement("mine", 2, ((0, 1),), slices=2, backwards=(1, 0))
    assert Placement.custom([0, 1], [0, 1]) == Placement.custom([0, 1])


def test_what_a_schedule_lacks_and_cannot_have():
    place = Placement.custom([0, 1], [1, 1])
    made = pp.Schedule("mine", place, 1, [["0F0"], ["1F0", "1B0", "0R0", "0B0"]])
    assert pp.check(made) == [] and pp.check(pp.lower(made)) == []
    problems = {
        "rank 1: 0R0 is never run": [["0F0"], ["1F0", "1B0", "0B0"]],
        "0B0 needs 0R0, which only comes at position 3": [["0F0"], ["1F0", "1B0", "0B0", "0R0"]],
        "the backward of stage 0 is held by rank 1": [["0F0", "0R0", "0B0"], ["1F0", "1B0"]],
        "and runs it again": [["0F0"], ["1F0", "1B0", "0O0", "0L0", "0R0", "0B0"]],
        "is an update, which schedules": [["0F0"], ["1F0", "1B0", "1U0", "0R0", "0B0", "0U0"]],
    }
    for words, orders in problems.items():
        assert any(words in str(each) for each in pp.check(pp.Schedule("mine", place, 1, orders))), words


def test_it_is_saved_and_read_as_it_was(tmp_path):
    made = pp.schedule("roundpipe", 4, 8)
    own = pp.Schedule("own", Placement.custom(made.placement.holders[0], made.placement.backwards), 8, made.orders)
    for schedule in (made, own):
        pp.simulate(schedule).save(tmp_path / "timeline.json")
        assert pp.Timeline.load(tmp_path / "timeline.json").schedule == schedule
    for lowered in (made, pp.lower(made)):
        assert pp.Schedule.read(lowered.to_csv()).placement == made.placement
    with pytest.raises(pp.SettingError, match="cannot hold a placement of one's own with a stage on two ranks"):
        pp.simulate(own).link()
    for refuse in (lambda: pp.search.optimal(3, 3, placement="round"), lambda: to_torch(made)):
        with pytest.raises(pp.SettingError, match="on one rank"):
            refuse()
