"""Legality: every problem is compared with the schedule. In test_lowered, the verdict is compared with the judge's."""

import dataclasses
import itertools
import re

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepper import parents
from strategies import legal_schedules, mutated_schedules, often, one_f_one_b, read, shuffled_schedules, with_orders

import ppedu as pp
from ppedu import Action, B, F, I, Op, Placement, U, W, check
from ppedu.core import suggest_placement


def found(schedule):
    """Return the problems without their messages."""
    return [(problem.kind, problem.rank, problem.index, str(problem.action)) for problem in check(schedule)]


def test_the_judge_agrees_about_all_576_orders_of_two_ranks_and_two_microbatches():
    base = pp.schedule("1f1b", 2, 2)
    verdicts = []
    for orders in itertools.product(*map(itertools.permutations, base.orders)):
        schedule = with_orders(base, orders)
        verdicts.append(check(schedule) == [])
        assert verdicts[-1] == judge.legal(schedule), orders
    assert len(verdicts) == 576 and 0 < sum(verdicts) < 576


# --- each problem -----------------------------------------------------------------------------------------------


def singles(schedule):
    """Return every single action with its place: (rank, index, action)."""
    orders = enumerate(schedule.orders)
    return [(r, index, each) for r, order in orders for index, action in enumerate(order) for each in action.singles]


@given(mutated_schedules())
@often(80)
def test_all_actions_out_of_range_or_on_a_wrong_rank_are_reported(schedule):
    wrong = {"range": [], "rank": []}
    for rank, index, action in singles(schedule):
        if action.stage not in range(schedule.stages) or action.microbatch not in range(schedule.microbatches):
            wrong["range"].append((rank, index, str(action)))
        elif action.stage % schedule.ranks != rank:
            wrong["rank"].append((rank, index, str(action)))
    for kind, expected in wrong.items():
        assert [each[1:] for each in found(schedule) if each[0] == kind] == expected


@given(mutated_schedules())
@often(80)
def test_all_actions_that_are_missing_are_reported(schedule):
    there = {action for _, _, action in singles(schedule)}
    expected = set()
    for stage, microbatch in itertools.product(range(schedule.stages), range(schedule.microbatches)):
        forward, full, first, second = (make(stage, microbatch) for make in (F, B, I, W))
        expected |= {forward} - there
        if full not in there:
            expected |= {first, second} - there if there & {first, second} else {full}
    if any(action.op == "U" for action in there):  # then each stage needs one for its last gradients
        expected |= {U(stage, schedule.microbatches - 1) for stage in range(schedule.stages)} - there
    reported = [problem.action for problem in check(schedule) if problem.kind == "missing"]
    assert set(reported) == expected and len(reported) == len(expected)
    assert all(p.rank == p.action.stage % schedule.ranks for p in check(schedule) if p.kind == "missing")


@given(legal_schedules(pairs=0.2), st.data())
@often(60)
def test_the_second_occurrence_is_reported_as_the_duplicate(schedule, data):
    rank, _, action = data.draw(st.sampled_from(singles(schedule)))
    orders = [list(order) for order in schedule.orders]
    orders[rank].append(action)
    duplicates = [each for each in found(with_orders(schedule, orders)) if each[0] == "duplicate"]
    assert duplicates == [("duplicate", rank, len(schedule.orders[rank]), str(action))]


@given(shuffled_schedules())
@often(80)
def test_an_order_problem_names_a_later_dependency_on_the_same_rank(schedule):
    for problem in check(schedule):
        if problem.kind == "order":
            action = schedule.orders[problem.rank][problem.index]
            needed = {each for choices in parents(action, schedule.stages) for each in choices}
            later = [single for each in schedule.orders[problem.rank][problem.index :] for single in each.singles]
            assert needed & set(later)


def test_all_problems_are_reported_together():
    schedule = read("0F0 0F0 2F0 0B0 0F5 1B1", "1B0 1F0 1I1 1F1 1W1 1B1 0B1", microbatches=2)
    assert found(schedule) == [
        ("duplicate", 0, 1, "0F0"),
        ("range", 0, 2, "2F0"),
        ("range", 0, 4, "0F5"),
        ("rank", 0, 5, "1B1"),
        ("duplicate", 1, 5, "1B1"),
        ("rank", 1, 6, "0B1"),
        ("missing", 0, None, "0F1"),
        ("duplicate", 0, 5, "1B1"),
        ("order", 1, 0, "1B0"),
        ("order", 1, 2, "1I1"),
    ]


@pytest.mark.parametrize(
    "lines, message",
    [
        (["0F0 0B0 1F0"], "rank 0, position 2: 1F0: there is no stage 1; the stages are 0 to 0"),
        (["0F0 0B0 0F3"], "rank 0, position 2: 0F3: there is no microbatch 3; the only one is 0"),
        (["0F0 0B0", "1F0 0F0 1B0"], "rank 1, position 1: 0F0: stage 0 is held by rank 0"),
        (["0F0 0F0 0B0"], "rank 0, position 1: 0F0 has already been run (rank 0, position 0)"),
        (["0F0 0B0 0W0"], "rank 0, position 1: 0B0 is a full backward, and half of it, 0W0, is run too"),
        (["0F0 0B0 0I0"], "rank 0, position 1: 0B0 is a full backward, and half of it, 0I0, is run too"),
        (["0F0 0I0"], "rank 0: 0W0 is never run"),
        (["0F0 0W0"], "rank 0: 0I0 is never run"),
        (["0F0"], "rank 0: 0B0 is never run"),
        (["0B0"], "rank 0: 0F0 is never run"),
        (["0B0 0F0"], "rank 0, position 0: 0B0 needs 0F0, which only comes at position 1"),
        (["0F0 0W0 0I0"], "rank 0, position 1: 0W0 needs 0I0, which only comes at position 2"),
        (
            ["(0F0;0B0)OVERLAP_F_B"],
            "rank 0, position 0: (0F0;0B0)OVERLAP_F_B needs 0F0, which runs at the same time",
        ),
    ],
)
def test_the_sentence_for_each_kind_of_problem(lines, message):
    assert message in [str(problem) for problem in check(read(*lines))]


SHAPES = {"loop": ["interleaved", "1f1b"], "v": ["zb-v", "dualpipev"], "bidirectional": ["chimera", "dualpipe"]}


@pytest.mark.parametrize("meant, name", [(meant, name) for meant, names in SHAPES.items() for name in names])
@pytest.mark.parametrize("given", SHAPES)
def test_the_placement_that_fits_is_suggested(meant, name, given):
    right = pp.schedule(name, 4, 8)
    if given == "bidirectional" and right.stages > 4:
        return  # with two copies, a rank holds a stage of each
    wrong = dataclasses.replace(right, placement=Placement.make(given, 4, right.stages // 4, 8))
    assert (suggest_placement(wrong) is None) == (given == meant or wrong.problems == ())
    if wrong.problems:
        with pytest.raises(pp.ScheduleError, match=f"with {meant!r} the same orders are; choose that placement"):
            wrong.validate()


def test_no_placement_is_suggested_if_the_orders_are_illegal_with_all():
    assert suggest_placement(read("0F0 1B0", "1F0 0B0")) is None
    assert suggest_placement(read("0F0 0B0", "1F0 1B0 1B0")) is None


def test_weights_may_be_gathered_again_and_messages_are_not_out_of_range():
    assert check(read("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD")) == []
    assert found(read("0UNSHARD 0F0 1SEND_F0 0B0 0RECV_B7 3UNSHARD 0RECV_F0"))[:4] == [
        ("range", 0, 2, "1SEND_F0"),
        ("range", 0, 4, "0RECV_B7"),
        ("range", 0, 5, "3UNSHARD"),
        ("range", 0, 6, "0RECV_F0"),
    ]


NEGATIVE = [F(0, -1), F(-1, 0), B(1, -1), W(-2, 0), Action(1, Op.SEND_F, -1), Action(-1, Op.UNSHARD)]


def test_negative_numbers_are_out_of_range():
    for rank in [0, 1]:
        for action in NEGATIVE:
            orders = [list(order) for order in pp.schedule("1f1b", 2, 2).orders]
            orders[rank].insert(0, action)
            kinds = [(p.kind, p.rank, p.index) for p in check(with_orders(pp.schedule("1f1b", 2, 2), orders))]
            assert ("range", rank, 0) in kinds


# --- deadlocks --------------------------------------------------------------------------------------------------

LINK = re.compile(r"rank (\d+) waits at position (\d+) \(([^ ]+)\) for (\S+) of rank (\d+)")


def cycle(problem):
    """Parse the message of a deadlock into [(rank, position, waiting action, awaited action, awaited rank)]."""
    assert problem.message.startswith("deadlock: ")
    links = [LINK.fullmatch(each) for each in problem.message.removeprefix("deadlock: ").split(", ")]
    return [(int(a), int(b), c, d, int(e)) for a, b, c, d, e in (link.groups() for link in links)]


@given(shuffled_schedules())
@often(80)
def test_complete_orders_get_stuck_where_an_order_or_a_ring_of_ranks_is_wrong(schedule):
    kinds = {problem.kind for problem in check(schedule)}
    assert kinds <= {"order", "deadlock"}
    assert bool(kinds) != judge.legal(schedule)


@given(shuffled_schedules())
@often(80)
def test_a_deadlock_names_a_ring_in_which_each_rank_waits_for_the_next(schedule):
    for problem in (each for each in check(schedule) if each.kind == "deadlock"):
        links = cycle(problem)
        ranks = [rank for rank, *_ in links]
        assert len(links) > 1 and len(set(ranks)) == len(ranks)
        assert (problem.rank, problem.index) == links[0][:2]
        at = {rank: position for rank, position, *_ in links}
        for (rank, position, waiting, awaited, source), after in zip(links, ranks[1:] + ranks[:1], strict=True):
            assert source == after, "the cycle is closed"
            action = schedule.orders[rank][position]
            assert str(action) == waiting
            assert awaited in [str(a) for choices in parents(action, schedule.stages) for a in choices]
            still_to_come = [str(single) for each in schedule.orders[source][at[source] :] for single in each.singles]
            assert awaited in still_to_come, "what is awaited is not run before its rank waits itself"


def test_two_ranks_that_wait_for_each_other():
    schedule = read("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", microbatches=2)
    assert [str(problem) for problem in check(schedule)] == [
        "deadlock: rank 0 waits at position 1 (0B0) for 1B0 of rank 1, "
        "rank 1 waits at position 0 (1F1) for 0F1 of rank 0"
    ]


def test_three_ranks_in_a_ring_that_goes_round_the_loop():
    schedule = read(
        "0F0 0F1 3F0 3F1 3B1 3B0 0B0 0B1",
        "1F0 1F1 4F0 4F1 4B0 1B0 4B1 1B1",
        "2F0 2F1 5F0 5F1 5B0 2B0 5B1 2B1",
        microbatches=2,
        chunks=2,
    )
    (problem,) = check(schedule)
    assert cycle(problem) == [(0, 4, "3B1", "4B1", 1), (1, 5, "1B0", "2B0", 2), (2, 5, "2B0", "3B0", 0)]


def test_a_rank_that_waits_for_the_ring_is_not_part_of_it():
    schedule = read("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1", microbatches=2)
    (problem,) = check(schedule)
    assert [rank for rank, *_ in cycle(problem)] == [1, 2]


def test_1f1b_by_its_rule_is_legal():
    assert one_f_one_b(4, 8, lambda rank: 3 - rank) == pp.schedule("1f1b", 4, 8)


def test_1f1b_with_the_warmup_reversed_deadlocks_and_names_the_ranks():
    schedule = one_f_one_b(4, 8, lambda rank: rank)
    assert not judge.legal(schedule)
    (problem,) = check(schedule)
    assert str(problem) == (
        "deadlock: rank 0 waits at position 1 (0B0) for 1B0 of rank 1, "
        "rank 1 waits at position 1 (1F1) for 0F1 of rank 0"
    )


@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_of_1f1b_that_warms_up_less_than_the_next_one_deadlocks_with_it(short):
    (problem,) = check(one_f_one_b(4, 8, lambda rank: 3 - rank - 2 * (rank == short)))
    assert {rank for rank, *_ in cycle(problem)} == {short, short + 1}


def test_an_unclamped_warmup_runs_microbatches_that_do_not_exist():
    orders = [[F(rank, m) for m in range(3 - rank)] + [F(rank, 3 - rank), B(rank, 0)] for rank in range(4)]
    out_of_range = [each for each in found(with_orders(pp.schedule("1f1b", 4, 2), orders)) if each[0] == "range"]
    assert out_of_range == [("range", 0, 2, "0F2"), ("range", 0, 3, "0F3"), ("range", 1, 2, "1F2")]


def test_two_rings_are_two_problems():
    schedule = read(
        "0F0 0B0 0F1 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2B0 2F1 2B1",
        "3F1 3F0 3B0 3B1",
        microbatches=2,
    )
    problems = check(schedule)
    assert all(problem.kind == "deadlock" for problem in problems)
    assert [{rank for rank, *_ in cycle(problem)} for problem in problems] == [{0, 1}, {2, 3}]


def test_a_rank_is_stuck_at_an_action_that_does_not_exist():
    assert pp.align(read("0F0 0F5 0B0")) == ((F(0, 0),),)


def test_gradients_are_reduced_after_the_last_use_of_their_stage():
    problems = check(read("0F0 0B0 0REDUCE_GRAD 0F1", microbatches=2))
    assert "0REDUCE_GRAD is too early: 0F1 comes after it, at position 3" in " ".join(map(str, problems))


def test_pairs_with_distant_microbatches_are_told_apart():
    order = "0F1 1F1 1B1 0F2 (1F2;0B1)OVERLAP_F_B 0F0 (1F0;1B2)OVERLAP_F_B 1B0 0B2 0B0"
    assert check(pp.Schedule("pairs", Placement.make("loop", 1, 2), 3, (tuple(order.split()),))) == []
