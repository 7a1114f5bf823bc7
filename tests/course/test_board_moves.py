"""Moves of many actions, forecasts, recognition and the board of the day, against brute force and the zoo."""

import random
from collections import Counter
from datetime import date, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often
from test_board import boards, dice, lay, play, positions

import ppedu as pp
from ppedu import Costs, Placement, ScheduleError
from ppedu.course.board import daily
from ppedu.course.board.board import Board
from ppedu.course.board.levels import LEVELS
from ppedu.course.board.outlook import Outlook
from ppedu.course.board.patterns import block_of, repeat, walk
from ppedu.course.board.recognition import recognize
from ppedu.zoo.registry import published


def completions(board):
    """Yield the timelines of all complete boards that can be reached, each way of interleaving the ranks once."""
    seen = set()

    def visit():
        key = tuple(map(tuple, board.schedule.orders))
        if key in seen:
            return
        seen.add(key)
        if board.complete:
            yield board.timeline
        for rank in range(board.ranks):
            for action in board.choices(rank):
                board.place(action)
                yield from visit()
                board.undo()

    yield from visit()


TINY = [
    (Placement.make("loop", 2), 2, {"split": False}),
    (Placement.make("loop", 2), 1, {"split": None, "costs": Costs(forward=2, input=3, weight=1, backward=5)}),
    (Placement.make("v", 1, 2), 1, {"split": True, "costs": Costs(forward=2, input=2, weight=4)}),
    (Placement.make("loop", 1), 2, {"pairs": True, "costs": Costs(overlap=2)}),
    (Placement.make("bidirectional", 2), 2, {"costs": Costs(latency=1)}),
]


@pytest.mark.parametrize("case", range(len(TINY)))
def test_no_completion_is_better_than_the_forecast_and_some_are_as_good(case):
    placement, microbatches, rules = TINY[case]
    board, draw, tight = Board(placement, microbatches, **rules), random.Random(case), 0
    while not board.complete:
        outlook, held = Outlook(board), board.moves
        for action in (action for rank in range(board.ranks) for action in board.choices(rank)):
            forecast = outlook.after(action)
            span = board.place(action)
            assert (span.start, span.end) == (forecast.start, forecast.end)
            found = list(completions(board))
            best = min(each.makespan for each in found)
            assert forecast.makespan <= best
            assert forecast.bubble <= min(each.bubble for each in found) + 1e-9
            assert forecast.peak <= min(max(each.peak_activations) for each in found)
            tight += forecast.makespan == best
            board.undo()
        assert board.moves == held
        play(board, draw, 1)
    assert tight, "a bound of 0 would be of no use"


@pytest.mark.parametrize(("name", "least"), [("1f1b", 33), ("zb-h1", 27)])
def test_the_forecast_of_an_empty_board_is_the_least_possible_makespan(name, least):
    par = pp.schedule(name, 4, 8)
    board = Board(par.placement, 8, split=name == "zb-h1")
    assert Outlook(board).after(pp.F(0, 0)).makespan == least == pp.simulate(par).makespan


@given(boards(), dice, st.integers(0, 8))
@often(40)
def test_a_repeated_block_keeps_the_board_legal_and_is_one_step(board, dice, most):
    play(board, dice, most)
    before, orders = board.moves, board.schedule.orders
    if not before:
        return
    block = tuple(dice.sample(before, dice.randint(1, len(before))))
    try:
        done = repeat(board, block)
    except ScheduleError:
        assert board.moves == before
        return
    assert len(board.moves) == len(before) + done.copies * len(block)
    copied = Counter((single.stage, single.op) for each in block for single in each.singles)
    added = Counter((single.stage, single.op) for each in set(board.moves) - set(before) for single in each.singles)
    assert added == Counter({key: number * done.copies for key, number in copied.items()})
    for old, new in zip(orders, board.schedule.orders, strict=True):
        assert [each for each in new if each in before] == list(old), "what was placed keeps its order"
    fresh = Board(board.placement, board.microbatches, board.costs, board.memory, board.split, board.pairs)
    for action in board.moves:
        fresh.place(action)  # or it raises
    assert {problem.kind for problem in pp.check(board.schedule)} <= {"missing"}
    assert set(board.undo()) == set(fresh.moves) - set(before) and board.moves == before


@given(positions)
@often(30)
def test_walk_places_all_of_a_microbatch_that_can_follow(position):
    board, dice, most = position
    play(board, dice, most)
    free = [each for rank in range(board.ranks) for each in board.choices(rank) if not each.parts]
    if not free:
        return
    action = dice.choice(free)
    placed = walk(board, action)
    assert placed[0] == action and {each.microbatch for each in placed} == {action.microbatch}
    rest = [each for rank in range(board.ranks) for each in board.choices(rank) if not each.parts]
    assert action.microbatch not in {each.microbatch for each in rest}
    assert board.undo() == placed


def test_one_microbatch_repeated_is_1f1b_and_a_part_of_the_steady_state_is_appended():
    board = LEVELS["repeat"].board()
    walk(board, "0F0")
    assert repeat(board, block_of(board, [])).period == 3
    assert board.schedule.orders == pp.schedule("1f1b", 4, 8).orders
    board = LEVELS["1f1b"].board()
    lay(board, "0F0 1F0 2F0 0F1 1F1 0F2 2B0 1B0 0B0 0F3 2F1 2B1 1F2 1B1")
    block = block_of(board, ["0B0", "0F3", "2F1", "2B1", "1F2", "1B1"])
    done = repeat(board, block)
    assert (done.copies, done.period) == (2, None)
    known = pp.schedule("1f1b", 3, 6).orders
    assert all(order == known[rank][: len(order)] for rank, order in enumerate(board.schedule.orders))


def test_copies_of_a_split_microbatch_cost_few_slots_beyond_the_least_makespan():
    par = pp.schedule("zb-h1", 4, 8)
    board = Board(par.placement, 8, memory=4, split=True)
    walk(board, "0F0")
    repeat(board, block_of(board, []))
    assert board.complete and 27 <= board.timeline.makespan <= 30


def test_a_block_that_does_not_fit_again_is_refused_with_the_reason():
    board = LEVELS["1f1b"].board()
    with pytest.raises(ScheduleError, match="nothing is placed yet"):
        block_of(board, [])
    lay(board, "0F0 0F1 0F2")
    with pytest.raises(ScheduleError, match=r"with 0F3, rank 0 would hold 4 activations; the limit is 3"):
        repeat(board, block_of(board, []))
    with pytest.raises(ScheduleError, match="no microbatch is left"):
        repeat(board, block_of(board, ["9F9"]))


SIZES = [(2, 1), (2, 4), (3, 6), (4, 8)]


@pytest.mark.parametrize("size", SIZES)
def test_every_published_schedule_is_recognized_also_with_other_numbers(size):
    shuffled = 0
    for name, entry in published().items():
        try:
            made = pp.schedule(name, *size)
        except pp.PipelineError:
            continue
        if entry.forward_only or made.slices > 1:
            continue
        assert recognize(made, name) == (name, False)
        split = made.placement.split if made.placement.copies == 2 else made.microbatches
        other = [*reversed(range(split)), *reversed(range(split, made.microbatches))]
        changed = pp.Schedule("mine", made.placement, made.microbatches, [
            [renamed(action, other) for action in order] for order in made.orders
        ])  # fmt: skip
        found = recognize(changed, name)
        assert found and found.name == name and found.renamed == (changed.orders != made.orders)
        shuffled += found.renamed
        worse = [list(order) for order in made.orders]
        worse[0][-2:] = reversed(worse[0][-2:])
        if worse[0] != list(made.orders[0]):
            again = recognize(pp.Schedule("mine", made.placement, made.microbatches, worse), name)
            assert again is None or again.name != name or again.renamed
    assert shuffled or size[1] == 1


def renamed(action, other):
    if action.parts:
        return pp.core.overlap(*(renamed(part, other) for part in action.parts))
    return action._replace(microbatch=other[action.microbatch])


def test_the_board_of_a_day_depends_on_the_date_alone_and_its_par_is_proven():
    days = [date(2026, 5, 4) + timedelta(day) for day in range(len(daily.candidates()))]
    levels = [daily.board_of(day) for day in days]
    assert len({each.entry.key for each in levels}) == len(levels), "each has its turn"
    assert all(one.entry.key[:3] != other.entry.key[:3] for one, other in pairwise(levels))
    for each in levels:
        found = pp.search.atlas(each.ranks, each.microbatches, each.memory, each.entry.placement)
        assert each.par.makespan == found.makespan == found.bound and max(each.par.peak_activations) <= each.memory
        assert daily.find(each.name) == each and 24 <= len(each.board().finish()) <= 48
    assert daily.find("2026-05-04").title == "2026-05-04: from both ends, 4 ranks, 3 microbatches"


def test_today_is_the_board_of_the_date(monkeypatch):
    monkeypatch.setattr(daily, "today", lambda: date(2026, 5, 4))
    board = pp.puzzle("today")
    assert board.level.name == "2026-05-04" and "2026-05-04" in dict(board.state()["levels"])
    monkeypatch.setattr(daily, "today", lambda: date(2026, 5, 5))
    assert list(dict(board.state()["levels"]))[-2:] == ["2026-05-05", "2026-05-04"], "yesterday's stays open"


def test_a_half_finished_board_is_restored_from_its_link():
    board = pp.puzzle("repeat")
    for message in ({"walk": "0F0"}, {"repeat": ["0F0", "1F0"]}):
        board.handle(message)
    again = pp.puzzle(*board.inputs.values())
    assert again.schedule == board.schedule and not again.board.complete and again.board.moves
    with pytest.raises(ScheduleError, match="1F0 needs 0F0"):
        pp.puzzle("first", "1F0")
