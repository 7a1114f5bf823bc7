"""S and T, the parts of a head that all ranks share: what is legal, and how long it takes, against a small replay."""

import csv
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_schedules, often, read

import ppedu as pp
from ppedu import Costs, Schedule, ScheduleError, SettingError, check, simulate
from ppedu.sim.reorder import reorder

randoms = st.randoms(use_true_random=False)
TIMES = {"F": 2, "B": 3, "I": 2, "W": 1, "S": 1, "T": 4}


def needs(action, stages, firsts, barriers):
    """Return the actions of which an action needs one each, as the paper has it."""
    stage, op, m = action.stage, action.op.value, action.microbatch
    if op == "W":
        return [{("I", stage, m)}]
    if op == "S":
        return [{("F", stages - 1, m)}]
    if op == "T":
        return [{("S", first, m)} for first in firsts]
    if op == "F":
        return [{("F", stage - 1, m)}] if stage else []
    after = [{("B", stage + 1, m), ("I", stage + 1, m)}] if stage < stages - 1 else []
    if stage == stages - 1:
        after = [{("T" if barriers == 2 else "S", first, m)} for first in firsts]
    return [{("F", stage, m)}, *after]


def played(schedule, barriers, delay=0):
    """Return the end of each action, or None if the ranks get stuck: every rank runs what it can, again and again."""
    firsts = [min(schedule.placement.stages_of(rank)) for rank in range(schedule.ranks)]
    ends, free, left = {}, [0] * schedule.ranks, [list(order) for order in schedule.orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while order:
                found = [
                    next((each for each in wanted if each in ends), None)
                    for wanted in needs(order[0], schedule.stages, firsts, barriers)
                ]
                if None in found:
                    break
                arrivals = [ends[each][0] + (delay if ends[each][1] != rank else 0) for each in found]
                action = order.pop(0)
                free[rank] = max([free[rank], *arrivals]) + TIMES[action.op]
                ends[action.op.value, action.stage, action.microbatch] = free[rank], rank
                moved = True
    return None if any(left) else ends


def sums(schedule, barriers):
    """Return, for each rank, the sums over all ranks in the order in which it comes to them."""
    ops = ("S", "T") if barriers == 2 else ("S",)
    return [[(each.op, each.microbatch) for each in order if each.op in ops] for order in schedule.orders]


def costs(stages, delay):
    times = {"forward": "F", "backward": "B", "input": "I", "weight": "W", "head": "S", "head_backward": "T"}
    return Costs(**{name: [TIMES[op]] * stages for name, op in times.items()}, latency=delay)


@given(legal_schedules(most_ranks=3, most_chunks=2, split=0.3), st.sampled_from([1, 2]), st.integers(0, 2))
@often(200)
def test_any_schedule_can_share_its_head_and_takes_as_long_as_in_the_replay(schedule, barriers, delay):
    shared = pp.share_head(schedule, barriers)
    assert check(shared) == [] and shared.placement.barriers == barriers
    without = [[each for each in order if each.op not in ("S", "T")] for order in shared.orders]
    assert [*map(tuple, without)] == [*schedule.orders]
    ends = played(shared, barriers, delay)
    timeline = simulate(shared, costs(shared.stages, delay))
    assert {tuple(span.action)[:3]: span.end for row in timeline.rows for span in row} == {
        (stage, op, m): end for (op, stage, m), (end, _) in ends.items()
    }
    assert check(pp.lower(shared)) == []
    assert simulate(pp.lower(shared), timeline.costs).makespan == timeline.makespan


@given(legal_schedules(most_ranks=3, most_chunks=2, split=0.3), st.sampled_from([1, 2]), randoms)
@often(300)
def test_check_and_the_replay_agree_about_orders_with_s_and_t(schedule, barriers, chance):
    shared = pp.share_head(schedule, barriers)
    for _ in range(3):
        orders = [list(order) for order in shared.orders]
        order = chance.choice(orders)
        spots = [index for index, each in enumerate(order) if each.op in ("S", "T")]
        if chance.random() < 0.8:
            order.insert(chance.randint(0, len(order)), order.pop(chance.choice(spots)))
        else:
            del order[chance.choice(spots)]
        changed = Schedule("changed", schedule.placement, schedule.microbatches, orders)
        complete = sorted(map(str, order)) == sorted(map(str, shared.orders[orders.index(order)]))
        barriers = changed.placement.barriers
        met = sums(changed, barriers)
        legal = complete and all(each == met[0] for each in met) and played(changed, barriers) is not None
        assert (check(changed) == []) == legal, changed.to_csv()


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("0F0 0S0 0T0 0B0", "1F0 1S0 1B0", "rank 1: 1T0 is never run"),
        ("0F0 0T0 0B0", "1F0 1S0 1B0 1T0", "rank 0: 0S0 is never run"),
        ("0F0 0T0 0S0 0B0", "1F0 1S0 1B0 1T0", "position 1: 0T0 needs 0S0, which only comes at position 2"),
        ("0F0 0S0 0B0 0T0", "1F0 1B0 1S0 1T0", "rank 1, position 1: 1B0 needs 1S0, which only comes at position 2"),
        (
            "0F0 0B0 0S0 0T0",
            "1F0 1S0 1B0 1T0",
            "deadlock: rank 0 waits at position 1 (0B0) for 1B0 of rank 1, rank 1 w",
        ),
        (
            "0F0 0S0 0B0 0T0",
            "1F0 1S0 1T0 1B0",
            "deadlock: rank 0 waits at position 2 (0B0) for 1B0 of rank 1, rank 1 w",
        ),
        ("0F0 0S0 0S0 0T0 0B0", "1F0 1S0 1B0 1T0", "position 2: 0S0 has already been run (rank 0, position 1)"),
        ("0F0 0S0 1S0 0T0 0B0", "1F0 1B0 1T0", "rank 0, position 2: 1S0: stage 1 is held by rank 1"),
    ],
)
def test_an_order_that_is_wrong(first, second, problem):
    found = check(read(first, second))
    assert any(problem in each.message for each in found[:1]), found


def test_sums_that_meet_in_another_order_are_named():
    first = "0F0 0F1 0S0 0S1 0T0 0T1 0B0 0B1"
    (found,) = check(read(first, "1F0 1F1 1S1 1S0 1B0 1T0 1B1 1T1", microbatches=2))
    why = "all ranks come to their sums in the same order"
    assert str(found) == f"rank 1, position 2: 1S1 would meet 0S0 of rank 0 (position 2): {why}"
    assert (found.kind, found.index) == ("message", 2)
    late = "0F0 0F1 0S0 0S1 0T1 0T0 0B0 0B1"  # no sum ends T if there is one barrier
    assert check(read(late, "1F0 1F1 1S0 1S1 1B0 1T0 1B1 1T1", microbatches=2)) == []
    (found,) = check(read(late, "1F0 1F1 1S0 1S1 1T0 1T1 1B0 1B1", microbatches=2))
    assert str(found) == f"rank 1, position 4: 1T0 would meet 0T1 of rank 0 (position 4): {why}"


def test_a_part_goes_by_the_first_stage_of_its_rank():
    v = pp.schedule("v-half-vocab", 2, 2)
    assert v.placement.shards == (0, 1)
    orders = [[pp.Action.parse(str(each).replace("0S", "3S")) for each in order] for order in v.orders]
    found = check(Schedule("mine", v.placement, 2, orders))
    assert ": a rank's part of a shared head goes by the rank's first stage; these are 0, 1" in found[0].message


def test_what_cannot_share_a_head():
    shared = pp.schedule("1f1b-vocab", 2, 3)
    two = pp.schedule("chimera", 2, 2)
    orders = [[*order, pp.S(rank, 0)] for rank, order in enumerate(two.orders)]
    why = "is for a shared head, which schedules without backwards or with a stage on two ranks cannot have"
    assert any(why in str(each) for each in check(Schedule("mine", two.placement, 2, orders)))
    only = Schedule("mine", shared.placement, 3, shared.orders, forward_only=True)
    assert any(why in str(each) for each in check(only))
    for schedule in (two, shared, shared.forwards):
        with pytest.raises(SettingError, match="each stage on one rank and no S, not Schedule"):
            pp.share_head(schedule)
    with pytest.raises(SettingError, match="barriers must be at most 2; got 3"):
        pp.share_head(pp.schedule("1f1b", 2, 3), 3)
    with pytest.raises(ScheduleError, match="0B0 is never run"):
        pp.share_head(read("0F0"))
    with pytest.raises(SettingError, match="weights cannot be sharded over replicas"):
        pp.lower(shared, fsdp=True)
    with pytest.raises(SettingError, match="'pair' is for messages between two; all ranks share a head"):
        check(pp.lower(shared), transport="pair")
    with pytest.raises(SettingError, match="buffers are of stages"):
        check(shared, buffers=3)


@pytest.mark.parametrize("writer", ["to_torch", "to_megatron", "to_zero_bubble", "to_deepspeed"])
def test_no_other_program_has_it(writer):
    with pytest.raises(SettingError, match=r"has S and T; in .*, one stage has the head — take the schedule without"):
        getattr(pp.export, writer)(pp.schedule("1f1b-vocab", 2, 3))


@pytest.mark.parametrize("barriers", [1, 2])
def test_text_files_and_links_keep_it(barriers, tmp_path):
    schedule = pp.schedule("1f1b-vocab", 3, 5, barriers=barriers)
    schedule.to_csv(tmp_path / "vocab.csv")
    assert Schedule.from_csv(tmp_path / "vocab.csv", name=schedule.name) == schedule
    assert Schedule.read(schedule.to_csv(), name=schedule.name) == schedule
    assert pp.strip(pp.lower(schedule)) == schedule
    simulate(schedule).save(tmp_path / "vocab.json")
    assert pp.Timeline.load(tmp_path / "vocab.json").schedule == schedule
    assert str(pp.T(2, 3)) == "2T3" and pp.Action.parse("1S0") == pp.S(1, 0) and pp.S(1, 0).computes
    assert schedule.placement.barriers == barriers and schedule.forwards.placement.barriers == 0


# --- the paper ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "barriers"), [*product([1, 2, 4, 8], [1, 2])])
def test_the_extra_activations_are_those_of_the_paper(ranks, barriers):
    """Table 1 of the README: p + 2 microbatches for Vocab-1, with two barriers, p + 1 for Vocab-2, with one."""
    peaks = simulate(pp.schedule("1f1b-vocab", ranks, 20, barriers=barriers)).peak_activations
    assert max(peaks) == ranks + barriers
    if ranks >= 4:
        half, shared = (pp.schedule(*each, 32) for each in (("v-half", ranks), ("v-half-vocab", ranks)))
        assert max(simulate(shared).peak_activations) == max(simulate(half).peak_activations) + 1


def test_the_order_is_that_of_the_papers_figure():
    """Figure 10 (b), device 4: 1 S1 2 B1 T1 S2 3 B2 …, and (a): 1 S1 2 T1 S2 3 B1 T2 S3 …; microbatches from 0 here."""
    one, two = (pp.schedule("1f1b-vocab", 4, 8, barriers=barriers).orders[3] for barriers in (1, 2))
    assert " ".join(map(str, one[:10])) == "3F0 3S0 3F1 3B0 3T0 3S1 3F2 3B1 3T1 3S2"
    assert " ".join(map(str, two[:12])) == "3F0 3S0 3F1 3T0 3S1 3F2 3B0 3T1 3S2 3F3 3B1 3T2"


def test_ranks_wait_as_long_as_in_1f1b():
    for ranks, microbatches, barriers in product([2, 4, 8, 16], [16, 64], [1, 2]):
        times = Costs(forward=2, backward=4)  # S and T take 1, as in the figure
        timeline = simulate(pp.schedule("1f1b-vocab", ranks, microbatches, barriers=barriers), times)
        idle, plain = timeline.makespan - 8 * microbatches, 6 * (ranks - 1)
        assert plain - 1 <= idle <= plain + 1, (ranks, microbatches, barriers, idle)


PUBLISHED = Path(__file__).parents[1] / "published" / "vocabulary_parallelism.csv"


def published():
    """Yield the authors' runs on 8 GPUs whose parts they measured: the barriers, and a step in milliseconds."""
    for row in csv.DictReader(PUBLISHED.read_text().splitlines()):
        if row["method"] in ("vocab", "synctwice"):
            parts = ("forward", "backward", "output", "input_forward", "input_backward", "message")
            times = {part: [int(each) / 1e3 for each in row[f"{part}_us_of_each_rank"].split()] for part in parts}
            yield 1 if row["method"] == "vocab" else 2, times, float(row["iteration_ms"]), int(row["global_batch"])


def test_a_step_takes_as_long_as_the_authors_measured():
    """They give the time of S and T together; the embedding, which they share too, is on the rank that runs it here."""
    errors = []
    for barriers, times, measured, microbatches in published():
        embedding = [sum(each) for each in zip(times["input_forward"], times["input_backward"], strict=True)]
        half = [each / 2 for each in times["output"]]
        costs = Costs(
            forward=times["forward"],
            backward=[b + more for b, more in zip(times["backward"], embedding, strict=True)],
            head=half,
            head_backward=half,
            latency=times["message"][0],
        )
        schedule = pp.schedule("1f1b-vocab", 8, microbatches, barriers=barriers)
        errors.append(simulate(schedule, costs).makespan / measured - 1)
    assert len(errors) == 16
    assert max(map(abs, errors)) < 0.015, errors


def test_its_order_stays():
    timeline = simulate(pp.schedule("1f1b-vocab", 4, 8), Costs(forward=3, head=2))
    assert reorder(timeline) is timeline
