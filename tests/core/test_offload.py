"""O and L, copies to the host and back: what is legal, against the judge; and `offload`, which adds them."""

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, read

import ppedu as pp
from ppedu import F, L, O, Schedule, SettingError, check

randoms = st.randoms(use_true_random=True)


@given(randoms, st.booleans(), st.booleans())
@often(150)
def test_check_and_the_judge_agree_about_copies(random, lowered, again):
    schedule = judge.draw(random, lowered=lowered)
    schedule = judge.offload(random, judge.recompute(random, schedule) if again else schedule)
    assert judge.legal(schedule) and check(schedule) == [], schedule.to_csv()
    for _ in range(4):
        changed = judge.mutate(random, schedule)
        assert (check(changed) == []) == judge.legal(changed), changed.to_csv()


@pytest.mark.parametrize(
    ("line", "kind", "problem"),
    [
        ("0F0 0O0 0B0", "missing", "rank 0: 0L0 is never run, and 0O0 is"),
        ("0F0 0L0 0B0", "missing", "rank 0: 0O0 is never run, and 0L0 is"),
        ("0O0 0F0 0L0 0B0", "order", "position 0: 0O0 needs 0F0, which only comes at position 1"),
        ("0F0 0L0 0O0 0B0", "order", "position 1: 0L0 needs 0O0, which only comes at position 2"),
        ("0F0 0O0 0B0 0L0", "order", "position 2: 0B0 needs 0L0, which only comes at position 3"),
        ("0F0 0B0 0O0 0L0", "order", "position 1: 0B0 needs 0L0, which only comes at position 3"),
        ("0F0 0O0 0I0 0L0 0W0", "order", "position 2: 0I0 needs 0L0, which only comes at position 3"),
        ("0F0 0O0 0R0 0L0 0B0", "order", "position 2: 0R0 needs 0L0, which only comes at position 3"),
        ("0F0 0O0 0O0 0L0 0B0", "duplicate", "position 2: 0O0 has already been run (rank 0, position 1)"),
        ("0F0 0O1 0L1 0B0", "range", "position 1: 0O1: there is no microbatch 1; the only one is 0"),
        ("0F0 1O0 1L0 0B0", "rank", "position 1: 1O0: stage 1 is held by rank 1"),
    ],
)
def test_a_copy_that_is_wrong(line, kind, problem):
    other = "1F0 1I0 1W0" if "I" in line else "1F0 1B0"
    found = check(read(line, other))
    assert any(each.kind == kind and each.rank == 0 and problem in each.message for each in found), found


def test_a_copy_is_neither_for_inference_nor_half_of_a_pair():
    schedule = read("0F0 0O0 0L0 0B0")
    made = Schedule("mine", schedule.placement, 1, [["0F0", "0O0", "0L0"]], forward_only=True)
    assert [problem.message.partition(": ")[2] for problem in check(made)] == [
        f"0{op}0 is for a backward, in a forward-only schedule" for op in "OL"
    ]
    assert schedule.forwards.orders == ((F(0, 0),),) and not schedule.plain
    for text in ("(0O0;0B1)OVERLAP_F_B", "(0F1;0L0)OVERLAP_F_B"):
        with pytest.raises(pp.ParseError):
            pp.Action.parse(text)
    assert pp.Action.parse("2O3") == O(2, 3) and str(L(2, 3)) == "2L3" and not O(0, 0).computes


def test_csv_and_lowering_keep_copies(tmp_path):
    schedule = pp.offload(pp.schedule("zb-v", 4, 6))
    schedule.to_csv(tmp_path / "zb-v.csv")
    assert Schedule.from_csv(tmp_path / "zb-v.csv", "v").orders == schedule.orders
    assert pp.strip(pp.lower(schedule)) == schedule and Schedule.read(schedule.to_csv()).orders == schedule.orders
    sharded = pp.lower(schedule, fsdp=True, resident=1)
    assert check(sharded) == [] and judge.legal(sharded)
    assert pp.align(schedule) == pp.align(pp.schedule("zb-v", 4, 6))  # copies take their step beside the others


@pytest.mark.parametrize("writer", ["to_torch", "to_megatron", "to_zero_bubble", "to_deepspeed"])
def test_no_other_program_has_them(writer):
    schedule = pp.offload(pp.schedule("1f1b", 4, 8))
    with pytest.raises(SettingError, match=r"has 0O0; .* have no copies to the host"):
        getattr(pp.export, writer)(schedule)


def test_offload_moves_what_a_rank_keeps_longest():
    schedule = pp.schedule("1f1b", 3, 4)
    assert " ".join(map(str, schedule.order(0))) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    every = "0F0 0O0 0F1 0O1 0L0 0F2 0O2 0B0 0L1 0F3 0O3 0L2 0B1 0L3 0B2 0B3"
    assert " ".join(map(str, pp.offload(schedule, ahead=1).order(0))) == every
    half = "0F0 0F1 0O1 0F2 0O2 0B0 0L1 0F3 0L2 0B1 0B2 0B3"  # kept for 4 actions, 0 and 3 for 3
    assert " ".join(map(str, pp.offload(schedule, part=0.5, ahead=1).order(0))) == half
    assert pp.offload(schedule, 0) == schedule
    assert pp.offload(schedule, [(0, 1), (0, 2)], ahead=1).order(0) == pp.offload(schedule, part=0.5, ahead=1).order(0)
    for bad, message in (
        ((2,), "part must be"),
        (([(0, 4)],), r"has \(0, 4\), which is not a pair"),
        ((1, 0), "ahead must be"),
    ):
        with pytest.raises(SettingError, match=message):
            pp.offload(schedule, *bad)
    for other, message in ((pp.offload(schedule), "has 0O0"), (schedule.forwards, "has no backwards")):
        with pytest.raises(SettingError, match=message):
            pp.offload(other)
    with pytest.raises(SettingError, match="lowered already; offload takes"):
        pp.offload(pp.lower(schedule))


@given(randoms, st.integers(1, 4), st.fractions(0, 1))
@often(100)
def test_what_offload_returns_is_legal(random, ahead, part):
    schedule = judge.draw(random, lowered=False)
    moved = pp.offload(judge.recompute(random, schedule), part, ahead)
    assert judge.legal(moved) and check(moved) == []
