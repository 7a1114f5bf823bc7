"""Registering a schedule, and mistakes in its generator."""

import itertools

import pytest

import ppedu as pp
from ppedu import B, F, PipelineError, ScheduleError, SettingError


def flush(rank, ranks, microbatches):
    yield from (F(rank, m) for m in range(microbatches))
    yield from (B(rank, m) for m in range(microbatches))


def test_a_registered_generator_can_be_checked_simulated_and_printed(tmp_path):
    assert pp.register("mine")(flush) is flush
    assert "mine" in pp.schedules()
    schedule = pp.schedule("mine", ranks=3, microbatches=4)
    assert schedule.orders == pp.schedule("gpipe", 3, 4).orders
    assert pp.check(schedule) == []
    assert pp.simulate(schedule).makespan == 3 * (4 + 3 - 1)
    assert str(schedule).startswith("mine, 3 ranks, 4 microbatches")


def test_a_function_may_return_a_list():
    pp.register("mine")(lambda rank, ranks, microbatches: list(flush(rank, ranks, microbatches)))
    assert pp.schedule("mine", 2, 3).orders == pp.schedule("gpipe", 2, 3).orders


def test_registering_a_name_again_replaces_it():
    pp.register("mine")(flush)
    pp.register("mine")(lambda rank, ranks, microbatches: [F(rank, 0), B(rank, 0)])
    assert pp.schedule("mine", 1, 1).orders == ((F(0, 0), B(0, 0)),)
    assert pp.schedules().count("mine") == 1


def test_options_are_passed_to_the_generator():
    @pp.register("mine")
    def mine(rank, ranks, microbatches, first=0, *, reverse):
        order = list(flush(rank, ranks, microbatches))[first:]
        return order[::-1] if reverse else order

    assert pp.schedule("mine", 1, 2, reverse=True).orders == ((B(0, 1), B(0, 0), F(0, 1), F(0, 0)),)
    assert pp.schedule("mine", 1, 2, reverse=False, first=3).orders == ((B(0, 1),),)


def test_unknown_or_missing_options_are_refused_with_the_accepted_ones():
    @pp.register("mine")
    def mine(rank, ranks, microbatches, warmup, depth=2):
        return flush(rank, ranks, microbatches)

    for options, wrong in [({}, "warmup"), ({"warmup": 1, "width": 3}, "width")]:
        with pytest.raises(SettingError, match="the schedule 'mine' ") as caught:
            pp.schedule("mine", 2, 2, **options)
        assert all(name in str(caught.value) for name in ("warmup", "depth", wrong))


def test_a_generator_that_does_not_take_rank_ranks_and_microbatches_is_refused():
    pp.register("mine")(lambda rank: [])
    with pytest.raises(SettingError, match=r"the schedule 'mine' .*too many positional arguments"):
        pp.schedule("mine", 2, 2)


def test_an_unknown_placement_is_refused_at_registration():
    with pytest.raises(SettingError, match="unknown placement 'ring'; available: loop"):
        pp.register("ringed", placement="ring")
    assert "ringed" not in pp.schedules()


@pytest.mark.parametrize("wrong", ["0F", (0, "F", 0), [0, "F", 0], None, 5, F(0, 0.5)], ids=repr)
def test_a_yielded_value_that_is_not_an_action_is_refused(wrong):
    pp.register("mine")(lambda rank, ranks, microbatches: [F(rank, 0), wrong])
    said = r"'mine' must yield actions, such as pp\.F\(0, 0\): rank 0, position 1: .* is not an action"
    with pytest.raises(ScheduleError, match=said) as caught:
        pp.schedule("mine", 2, 1)
    assert (tuple.__repr__(wrong) if isinstance(wrong, tuple) else repr(wrong)) in str(caught.value)
    assert isinstance(caught.value, PipelineError)


def test_the_text_of_an_action_may_be_yielded():
    pp.register("mine")(lambda rank, ranks, microbatches: [f"{rank}F0", f"{rank}B0"])
    assert pp.schedule("mine", 2, 1).orders == pp.schedule("gpipe", 2, 1).orders


@pytest.mark.parametrize("nothing", [None, 0, flush])
def test_a_function_that_returns_no_iterable_is_refused(nothing):
    pp.register("mine")(lambda rank, ranks, microbatches: nothing)
    with pytest.raises(ScheduleError, match=r"'mine' returned .* for rank 0; it must yield actions"):
        pp.schedule("mine", 2, 1)


@pytest.mark.parametrize("microbatches", [1, 5])
def test_a_generator_that_never_ends_is_stopped(microbatches):
    pp.register("mine")(lambda rank, ranks, microbatches: itertools.repeat(F(rank, 0)))
    with pytest.raises(ScheduleError, match=r"'mine' yielded more than [0-9]+ actions on rank 0; does its loop end?"):
        pp.schedule("mine", 2, microbatches)


def test_a_generator_that_yields_nothing_makes_an_incomplete_schedule():
    pp.register("mine")(lambda rank, ranks, microbatches: [])
    assert [problem.kind for problem in pp.check(pp.schedule("mine", 1, 1))] == ["missing", "missing"]


def test_an_error_inside_a_generator_is_raised_unchanged():
    @pp.register("mine")
    def mine(rank, ranks, microbatches):
        yield F(rank, 1 // (rank - 1))

    with pytest.raises(ZeroDivisionError):
        pp.schedule("mine", 2, 1)


def test_check_finds_a_wrong_microbatch():
    """The backwards subtract ranks - 1 instead of the warm-up, so that the last rank runs microbatch -3."""

    @pp.register("mine")
    def mine(rank, ranks, microbatches):
        warmup = ranks - rank - 1
        yield from (F(rank, m) for m in range(warmup))
        for m in range(warmup, microbatches):
            yield F(rank, m)
            yield B(rank, m - ranks + 1)
        yield from (B(rank, m) for m in range(microbatches - warmup, microbatches))

    problems = pp.check(pp.schedule("mine", 4, 8))
    assert {(p.rank, p.action.microbatch) for p in problems if p.kind == "range"} == {
        *[(1, -1), (2, -2), (2, -1), (3, -3), (3, -2), (3, -1)]
    }


def test_a_generator_of_forwards_alone_is_registered_as_such():
    pp.register("mine", forward_only=True)(lambda rank, ranks, microbatches: [F(rank, m) for m in range(microbatches)])
    made = pp.schedule("mine", ranks=4, microbatches=8)
    assert made.forward_only and not pp.check(made) and made.orders == pp.schedule("gpipe", 4, 8).forwards.orders
