"""R, a forward that runs again: what is legal, against the judge; and `recompute`, which adds it."""

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, read

import ppedu as pp
from ppedu import B, F, R, Schedule, ScheduleError, SettingError, check

randoms = st.randoms(use_true_random=True)


@given(randoms, st.booleans())
@often(400)
def test_check_and_the_judge_agree_about_forwards_that_run_again(random, lowered):
    schedule = judge.recompute(random, judge.draw(random, lowered=lowered))
    assert judge.legal(schedule) and check(schedule) == [], schedule.to_csv()
    for _ in range(4):
        changed = judge.mutate(random, schedule)
        assert (check(changed) == []) == judge.legal(changed), changed.to_csv()


@pytest.mark.parametrize(
    ("line", "kind", "problem"),
    [
        ("0R0 0F0 0B0", "order", "rank 0, position 0: 0R0 needs 0F0, which only comes at position 1"),
        ("0F0 0B0 0R0", "order", "position 1: 0B0 needs 0R0, which only comes at position 2"),
        ("0F0 0I0 0R0 0W0", "order", "position 1: 0I0 needs 0R0, which only comes at position 2"),
        ("0F0 0R0 0R0 0B0", "duplicate", "position 2: 0R0 has already been run (rank 0, position 1)"),
        ("0F0 0R1 0B0", "range", "position 1: 0R1: there is no microbatch 1; the only one is 0"),
        ("0F0 1R0 0B0", "rank", "position 1: 1R0: stage 1 is held by rank 1"),
    ],
)
def test_an_r_that_is_wrong(line, kind, problem):
    other = "1F0 1I0 1W0" if "I" in line else "1F0 1B0"
    found = check(read(line, other))
    assert (found[0].kind, found[0].rank) == (kind, 0) and problem in found[0].message


def test_an_r_is_neither_for_inference_nor_half_of_a_pair():
    schedule = read("0F0 0R0 0B0")
    made = Schedule("mine", schedule.placement, 1, [["0F0", "0R0"]], forward_only=True)
    assert [str(problem) for problem in check(made)] == [
        "rank 0, position 1: 0R0 is for a backward, in a forward-only schedule"
    ]
    assert schedule.forwards.orders == ((F(0, 0),),)
    for text in ("(0R0;0B1)OVERLAP_F_B", "(0F1;0R0)OVERLAP_F_B"):
        with pytest.raises(pp.ParseError):
            pp.Action.parse(text)


def test_csv_and_lowering_keep_it(tmp_path):
    schedule = pp.recompute(pp.schedule("zb-v", 4, 6))
    schedule.to_csv(tmp_path / "zb-v.csv")
    assert Schedule.from_csv(tmp_path / "zb-v.csv", "v").orders == schedule.orders
    assert pp.strip(pp.lower(schedule)) == schedule and Schedule.read(schedule.to_csv()).orders == schedule.orders
    sharded = pp.lower(schedule, fsdp=True, resident=1)
    assert check(sharded) == [] and judge.legal(sharded)


@pytest.mark.parametrize("writer", ["to_torch", "to_megatron", "to_zero_bubble", "to_deepspeed"])
def test_no_other_program_has_it(writer):
    schedule = pp.recompute(pp.schedule("1f1b", 2, 3))
    with pytest.raises(SettingError, match=r"has 0R0; in .* take the schedule without R"):
        getattr(pp.export, writer)(schedule)


def test_recompute_puts_an_r_before_each_backward():
    schedule = pp.schedule("1f1b", 2, 3)
    assert pp.recompute(schedule, [0]).to_csv() == "0F0,0F1,0R0,0B0,0F2,0R1,0B1,0R2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    again = pp.recompute(schedule)
    assert [order.count(R(rank, 2)) for rank, order in enumerate(again.orders)] == [1, 1]
    assert pp.recompute(again) == again and pp.recompute(schedule.forwards) == schedule.forwards
    pairs = pp.recompute(pp.schedule("1f1b-overlap", 2, 4))
    assert check(pairs) == [] and pairs.orders[0][3:5] == (R(0, 0), pp.Action.parse("(0F3;0B0)OVERLAP_F_B"))
    for stages, message in (([2], "there is no stage 2; the stages are 0 to 1"), (["a"], "there is no stage 'a'")):
        with pytest.raises(SettingError, match=message):
            pp.recompute(schedule, stages)
    with pytest.raises(SettingError, match="lowered already; recompute takes"):
        pp.recompute(pp.lower(schedule))
    with pytest.raises(ScheduleError, match="0B0 needs 0R0, which only comes"):
        read("0F0 0B0 0R0").validate()
    assert (str(R(2, 0)), pp.Action.parse("2R0"), B(0, 0).computes) == ("2R0", R(2, 0), R(0, 0).computes)
