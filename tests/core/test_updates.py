"""U, a step of the optimizer before the end: what is legal, against the judge."""

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, read

import ppedu as pp
from ppedu import Schedule, SettingError, U, check
from ppedu.core.actions import SHARDING

randoms = st.randoms(use_true_random=True)


@given(randoms, st.booleans())
@often(400)
def test_check_and_the_judge_agree_about_updates(random, lowered):
    schedule = judge.draw(random, lowered=lowered, apart=random.random() < 0.2)
    updated = judge.update(random, schedule)
    legal = schedule.placement.alone and not any(each.op in SHARDING for each in sum(schedule.orders, ()))
    assert (check(updated) == []) == judge.legal(updated) >= legal, updated.to_csv()
    for _ in range(4):
        changed = judge.mutate(random, updated)
        assert (check(changed) == []) == judge.legal(changed), changed.to_csv()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("0F0 0U0 0B0 0F1 0B1 0U1", "position 1: 0U0 needs 0B0, which only comes at position 2"),
        ("0F0 0F1 0B1 0U1 0B0", "3: 0U1 steps with the gradient of 0B0, which only comes later; put it behind 0B0"),
        ("0F0 0F1 0I0 0B1 0U1 0W0", "4: 0U1 steps with the gradient of 0W0, which only comes later; put it behind 0W0"),
        ("0F0 0F1 0B1 0I0 0U0 0W0 0U1", "4: 0U0 steps with the gradient of 0W0, which only comes later; put it behind"),
        ("0F0 0F1 0B0 0B1 0U1 0U0", "position 5: 0U0 must come before 0U1 or nowhere"),
        ("0F0 0F1 0B0 0B1 0U0 0U1 0U1", "position 6: 0U1 has already been run (rank 0, position 5)"),
        ("0F0 0B0 0U0 0F1 0B1", "rank 0: 0U1 is never run: no update uses the gradients from microbatch 1 on"),
        ("0F0 0F1 0B0 0B1 0U1 0U2", "position 5: 0U2: there is no microbatch 2; they are 0 to 1"),
        ("0F0 0F1 0B0 0B1 0U1 1U1", "position 5: 1U1: stage 1 is held by rank 1"),
    ],
)
def test_an_update_that_is_wrong(line, problem):
    found = check(read(line, "1F0 1F1 1B0 1B1 1U1", microbatches=2))
    assert problem in found[0].message, found


def test_all_stages_update_or_none():
    (found,) = check(read("0F0 0B0 0U0", "1F0 1B0"))
    assert str(found) == "rank 1: 1U0 is never run: no update uses the gradients from microbatch 0 on"


def test_what_has_no_updates():
    placement = pp.schedule("1f1b", 1, 1).placement
    why = "0U0 is an update, which schedules without backwards or with a stage on two ranks cannot have"
    (found,) = check(Schedule("mine", placement, 1, [["0F0", "0U0"]], forward_only=True))
    assert str(found) == f"rank 0, position 1: {why}"
    two = pp.schedule("chimera", 2, 2)
    orders = [[*order, U(order[0].stage, order[0].microbatch)] for order in two.orders]
    assert why in str(check(Schedule("mine", two.placement, 2, orders))[0])
    for text in ("(0U0;0B1)OVERLAP_F_B", "(0F1;0U0)OVERLAP_F_B"):
        with pytest.raises(pp.ParseError):
            pp.Action.parse(text)
    with pytest.raises(SettingError, match="has 0U0; sharded weights are updated at the end"):
        pp.lower(pp.schedule("pipedream", 2, 2), fsdp=True)


@pytest.mark.parametrize("writer", ["to_torch", "to_megatron", "to_zero_bubble", "to_deepspeed"])
def test_no_other_program_has_it(writer):
    with pytest.raises(SettingError, match=r"has 0U0; in .*, the optimizer steps once, after the end — take .* 1f1b"):
        getattr(pp.export, writer)(pp.schedule("pipedream", 2, 3))


def test_csv_and_lowering_keep_it(tmp_path):
    schedule = pp.schedule("pipedream-2bw", 3, 8)
    schedule.to_csv(tmp_path / "2bw.csv")
    assert Schedule.from_csv(tmp_path / "2bw.csv").orders == schedule.orders == Schedule.read(schedule.to_csv()).orders
    assert pp.strip(pp.lower(schedule)) == schedule
    assert (str(U(2, 3)), pp.Action.parse("2U3"), U(2, 3).computes) == ("2U3", U(2, 3), True)
