"""The board and its levels, against independent rules, pp.check, the stepper and exhaustive search."""

import random
import re
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import stepper
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu import Action, B, Costs, F, I, Op, Placement, ScheduleError, SettingError, W
from ppedu.course.board.board import Board
from ppedu.course.board.levels import LEVELS, level


@st.composite
def boards(draw, splits=(False, True, None), capped=None):
    """Draw an empty board of up to three ranks."""
    shape = draw(st.sampled_from(["loop", "v", "bidirectional"]))
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    chunks = 1 if shape == "bidirectional" else draw(st.integers(1, 2))
    least = 2 if shape == "bidirectional" and microbatches > 1 else chunks  # several microbatches need not fit
    capped = draw(st.booleans()) if capped is None else capped
    return Board(
        Placement.make(shape, ranks, chunks, microbatches),
        microbatches,
        Costs(forward=draw(st.integers(1, 3)), backward=2 * draw(st.integers(1, 3)), latency=draw(st.integers(0, 2))),
        memory=Fraction(draw(st.integers(least, least + 3)), chunks) if capped else None,
        split=draw(st.sampled_from(splits)),
        pairs=draw(st.booleans()),
    )


def play(board, dice, most=100):
    """Place up to `most` random actions, and return them."""
    placed = []
    while len(placed) < most and (open_ranks := [rank for rank in range(board.ranks) if board.choices(rank)]):
        placed.append(dice.choice(board.choices(dice.choice(open_ranks))))
        board.place(placed[-1])
    return placed


def lay(board, actions):
    """Place actions that are separated by spaces."""
    for action in actions.split():
        board.place(action)


dice = st.builds(random.Random, st.integers(0, 2**32))  # one draw for a seed is faster than a draw for each choice
positions = st.tuples(boards(), dice, st.integers(0, 14))


def singles(board):
    return [single for order in board.schedule.orders for action in order for single in action.singles]


def alphabet(board):
    """Return all actions, some of a stage or a microbatch that does not exist, all allowed pairs and some others."""
    sizes = range(board.placement.stages + 1), range(board.microbatches + 1)
    alone = [Action(stage, op, m) for stage, m, op in product(*sizes, (Op.F, Op.B, Op.I, Op.W))]
    likely = list(product([action for action in alone if allowed(board, action)], repeat=2))
    others = random.Random(0).sample(list(product(alone, alone)), 50)
    return alone + [pair for both in dict.fromkeys(likely + others) if (pair := stepper.paired(*both))]


def allowed(board, action):
    """Return whether the rules allow to place `action`, judged from the placed actions alone."""
    placed, placement = singles(board), board.placement
    for stage, op, m, _ in action.singles:
        if stage >= placement.stages or m >= board.microbatches:
            return False
        if op in {False: "IW", True: "B", None: ""}[board.split]:
            return False
        excluded = {"F": (F,), "B": (B, I), "I": (I, B), "W": (W, B)}[op]
        if any(make(stage, m) in placed for make in excluded):
            return False
    if action.parts:
        first, second = action.parts
        if not board.pairs or (first.op, second.op, action.op) != ("F", "B", "OVERLAP_F_B"):
            return False
        if placement.rank(first.stage, first.microbatch) != placement.rank(second.stage, second.microbatch):
            return False
    if not all(any(way in placed for way in ways) for ways in stepper.parents(action, placement.stages)):
        return False
    rank = placement.rank(*action.singles[0][::2])
    here = [single for single in placed if placement.rank(single.stage, single.microbatch) == rank]
    held = sum({"F": 1, "B": -1, "I": 0, "W": -1}[single.op] for single in here)
    wanted = held + sum(single.op == "F" for single in action.singles)
    share = Fraction(placement.ranks, placement.stages)
    return board.memory is None or action.singles[0].op != "F" or wanted * share <= board.memory


# --- placing ----------------------------------------------------------------------------------------------------


@given(positions)
@often(40)
def test_accepted_actions_are_those_the_rules_allow_and_choices_lists_them_all(position):
    board, dice, most = position
    play(board, dice, most)
    actions = alphabet(board)
    can = {action for action in actions if allowed(board, action)}
    offered = [board.choices(rank) for rank in range(board.ranks)]
    assert {action for action in actions if board.why_not(action) is None} == can
    assert set().union(*offered) == can and sum(map(len, offered)) == len(can)
    for rank, choices in enumerate(offered):
        assert {board.placement.rank(*single[::2]) for action in choices for single in action.singles} <= {rank}


@given(positions)
@often(60)
def test_no_position_is_out_of_order_or_deadlocked_and_times_are_those_of_the_stepper(position):
    board, dice, most = position
    play(board, dice, most)
    assert {problem.kind for problem in pp.check(board.schedule)} <= {"missing"}
    times = {op: lengths[0] for op, lengths in board.costs.durations(board.placement.stages, board.ranks).items()}
    small = min(Fraction(1, Fraction(time).denominator) for time in times.values())
    expected = stepper.run(
        board.schedule,
        lambda action: sum(int(times[single.op] / small) for single in action.singles),
        int(board.costs.latency / small),
    )
    rows = [[(action, start / small, end / small) for action, start, end in row] for row in board.timeline.rows]
    assert rows == expected


@given(boards(), dice)
@often(30)
def test_a_complete_board_is_a_legal_schedule_within_its_memory(board, dice):
    play(board, dice)
    assert board.complete == (pp.check(board.schedule) == [])
    assert board.complete == (not any(board.left(rank) for rank in range(board.ranks)))
    assert board.complete or (board.memory is not None and "undo" in board.stuck)
    assert board.memory is None or max(board.timeline.peak_activations) <= board.memory
    if board.complete:
        assert board.timeline == pp.simulate(board.schedule, board.costs)
        assert board.stuck is None and board.hint() is None and board.finish() == ()


@given(positions)
@often(40)
def test_left_and_placed_actions_are_all_the_work(position):
    board, dice, most = position
    play(board, dice, most)
    left = [action for rank in range(board.ranks) for action in board.left(rank)]
    work = {F: 1} | ({I: 1, W: 1} if board.split else {B: 1})
    done = singles(board)
    for stage, m in product(range(board.placement.stages), range(board.microbatches)):
        halved = board.split is None and I(stage, m) in done
        both = {action for action in (*done, *left) if action[::2] == (stage, m)}
        assert both == {make(stage, m) for make in ((F, I, W) if halved else work)}
    assert len(left) + len(done) == len({*left, *done})


REFUSALS = [
    ("2X0", "'2X0' is not an action; an action is a stage, an op and a microbatch"),
    (None, "None is not an action"),
    ("0SEND_F0", "0SEND_F0 is not an action of this board"),
    ("0UNSHARD", "0UNSHARD is not an action of this board"),
    ("4F0", "4F0 is not an action of this board"),
    ("0F4", "0F4 is not an action of this board"),
    ("0F0", "0F0 has already been placed (rank 0, position 0)"),
    (F(2, 1), "2F1 needs 1F1, which has not been placed yet (rank 1)"),
    ("1B0", "1B0 needs 2B0, which has not been placed yet (rank 0)"),
    ("3B0", "3B0 needs 3F0, which has not been placed yet (rank 1)"),
    ("0F3", "with 0F3, rank 0 would hold 2.5 activations; the limit is 2"),
    ("(2F1;0B0)OVERLAP_F_B", "(2F1;0B0)OVERLAP_F_B is not an action of this board"),
]


def test_every_refusal_states_the_reason():
    board = Board(Placement.make("loop", 2, 2), 4, memory=2)
    lay(board, "0F0 0F1 0F2 1F0 2F0")
    before = board.moves
    for action, words in REFUSALS:
        assert words in board.why_not(action)
        with pytest.raises(ScheduleError, match=re.escape(words)):
            board.place(action)
    assert board.moves == before


@pytest.mark.parametrize(
    ("split", "placed", "action", "words"),
    [
        (False, "0F0", "0I0", "0I0 is not an action of this board"),
        (True, "0F0", "0B0", "0B0 is not an action of this board"),
        (True, "0F0", "0W0", "0W0 needs 0I0, which has not been placed yet (rank 0)"),
        (None, "0F0 1F0 1B0", "1W0", "1W0 is half of 1B0, which has already been placed (rank 1, position 1)"),
        (None, "0F0 1F0 1B0", "1I0", "1I0 is half of 1B0, which has already been placed (rank 1, position 1)"),
        (None, "0F0 1F0 1I0", "1B0", "half of 1B0, 1I0, has already been placed (rank 1, position 1)"),
        (None, "0F0", "(1F0;1B0)OVERLAP_F_B", "1B0 needs 1F0, which runs at the same time (rank 1)"),
        (None, "0F0 1F0", "(0F1;1B0)OVERLAP_F_B", "is not an action of this board"),
        (None, "0F0 1F0", "(1B0;1F1)OVERLAP_B_F", "is not an action of this board"),
    ],
)
def test_refusals_of_halves_and_pairs(split, placed, action, words):
    board = Board(Placement.make("loop", 2), 2, split=split, pairs=True, start=placed.split())
    assert words in board.why_not(action)


def test_choices_are_forwards_then_backwards_then_pairs_low_microbatches_first():
    board = Board(Placement.make("loop", 1, 2), 3, pairs=True, start=["0F1", "0F0", "1F1", "1F0"])
    pairs = "(0F2;1B0)OVERLAP_F_B (0F2;1B1)OVERLAP_F_B"
    assert " ".join(map(str, board.choices(0))) == f"0F2 1B0 1B1 {pairs}"
    board = Board(Placement.make("loop", 1), 3, split=None, pairs=True, start=["0F0"])
    pairs = "(0F1;0B0)OVERLAP_F_B (0F2;0B0)OVERLAP_F_B"
    assert " ".join(map(str, board.choices(0))) == f"0F1 0F2 0B0 0I0 {pairs}"


def test_decimal_memory_is_counted_exactly():
    board = Board(Placement.make("loop", 1), 4, Costs(activation=0.1), memory=0.3)
    lay(board, "0F0 0F1 0F2")
    assert board.why_not("0F3") == "with 0F3, rank 0 would hold 0.4 activations; the limit is 0.3"


def test_an_input_backward_releases_the_memory_that_w_does_not_need():
    board = Board(Placement.make("loop", 1), 2, Costs(weight_memory=0.4), memory=1.5, split=True)
    lay(board, "0F0")
    assert board.why_not("0F1") == "with 0F1, rank 0 would hold 2 activations; the limit is 1.5"
    lay(board, "0I0 0F1")
    assert board.timeline.memory(0)[-1][1] == pytest.approx(1.4)
    board = Board(Placement.make("loop", 1, 2), 1, Costs(activation=[2, 5], weight_memory=[0.5, 0]), 4, split=True)
    lay(board, "0F0")
    assert board.why_not("1F0") == "with 1F0, rank 0 would hold 7 activations; the limit is 4"


@given(positions)
@often(40)
def test_could_start_is_the_time_at_which_the_placed_action_starts(position):
    board, dice, most = position
    play(board, dice, most)
    for action in [action for rank in range(board.ranks) for action in board.choices(rank)]:
        start = board.could_start(action)
        assert board.place(action).start == start
        board.undo()


def test_place_returns_the_span_of_the_action():
    board = Board(Placement.make("loop", 2), 1, Costs(latency=2))
    assert board.place("0F0") == (F(0, 0), 0, 1)
    assert board.place(F(1, 0)) == (F(1, 0), 3, 4)


# --- undo and redo ----------------------------------------------------------------------------------------------


@given(boards(), dice, st.lists(st.sampled_from(["place"] * 4 + ["undo", "redo", "finish", "reset"]), max_size=30))
@often(40)
def test_undo_and_redo_restore_the_same_positions(board, dice, commands):
    def look():
        return board.schedule, board.timeline, [board.choices(rank) for rank in range(board.ranks)], board.moves

    seen, now = [look()], 0  # the positions that undo and redo can reach, and the index of the current one
    for command in commands:
        if command in ("place", "finish"):
            try:
                done = play(board, dice, 1) if command == "place" else board.finish()
            except ScheduleError:  # the board cannot be completed, and is unchanged
                done = ()
            if done:
                now += 1
                seen[now:] = [look()]
        elif command == "undo":
            assert bool(board.undo()) == (now > 0)
            now = max(now - 1, 0)
        elif command == "redo":
            assert bool(board.redo()) == (now + 1 < len(seen))
            now = min(now + 1, len(seen) - 1)
        else:
            board.reset()
            now = 0
        assert look() == seen[now]


def test_given_actions_cannot_be_undone():
    board = Board(Placement.make("loop", 2), 2, start=["0F0", F(1, 0)])
    board.place("1B0")
    assert board.undo() == (B(1, 0),) and board.undo() == ()
    board.reset()
    assert board.moves == (F(0, 0), F(1, 0))


# --- hints and dead ends ----------------------------------------------------------------------------------------


def can_end(board):
    """Return whether the board can be completed within the memory, by trying every order of each microbatch's chain."""
    stages, placement = board.placement.stages, board.placement
    share = Fraction(placement.ranks, stages)

    def fits(progress):
        held = [0] * placement.ranks
        for m, steps in enumerate(progress):
            for stage in range(min(steps, 2 * stages - steps)):
                held[placement.rank(stage, m)] += share
        return max(held) <= board.memory

    @cache
    def ends(progress):
        nexts = [(*progress[:m], steps + 1, *progress[m + 1 :]) for m, steps in enumerate(progress)]
        nexts = [after for after in nexts if max(after) <= 2 * stages and fits(after)]
        return min(progress) == 2 * stages or any(map(ends, nexts))

    return ends(tuple(sum(single.microbatch == m for single in singles(board)) for m in range(board.microbatches)))


@given(boards(splits=[False], capped=True), dice, st.integers(0, 12))
@often(50)
def test_finish_works_if_and_only_if_it_is_possible_and_the_advice_restores_a_possible_position(board, dice, most):
    play(board, dice, most)
    if can_end(board):
        board.finish()
        assert board.complete
        return
    with pytest.raises(ScheduleError, match=r"no order can be completed from here within .*; undo") as caught:
        board.finish()
    back = int(re.search(r"undo (\d+) actions? and place other forwards first", str(caught.value))[1])
    assert board.stuck is None or board.stuck.endswith(str(caught.value).partition("; ")[2])
    for _ in range(back):
        assert not can_end(board)
        board.undo()
    assert can_end(board)


@given(positions)
@often(30)
def test_finish_completes_any_position_within_its_memory_and_hint_is_its_first_action(position):
    board, dice, most = position
    placed = play(board, dice, most)
    try:
        hint = board.hint()
    except ScheduleError:
        assert board.memory is not None and not board.complete
        with pytest.raises(ScheduleError, match="undo"):
            board.finish()
        assert board.moves == tuple(placed)
        return
    assert hint is None or board.why_not(hint) is None
    rest = board.finish()
    assert rest[:1] == (() if hint is None else (hint,)) and board.moves == (*placed, *rest)
    assert pp.check(board.schedule) == [] and board.complete
    assert board.memory is None or max(board.timeline.peak_activations) <= board.memory


def test_a_stuck_board_reports_the_full_rank_and_how_many_actions_to_undo():
    board = Board(Placement.make("loop", 2, 2), 3, memory=1)
    lay(board, "0F0 0F1 1F0")
    assert board.stuck is None
    board.place("1F1")
    full = "with 2F0, rank 0 would hold 1.5 activations; the limit is 1"
    assert board.stuck == f"no rank can place an action: {full}; undo 3 actions and place other forwards first"
    board.reset()
    board.finish()
    assert board.complete and board.stuck is None


@given(st.sampled_from(["two-ranks", "interleaved", "fill", "v"]), dice, st.integers(0, 20))
@often(20)
def test_any_position_of_a_level_can_be_finished_after_enough_undos(name, dice, most):
    board = level(name).board()
    play(board, dice, most)
    while True:
        try:
            board.finish()
            break
        except ScheduleError:
            board.undo()
    assert pp.check(board.schedule) == []
    assert board.timeline.makespan >= level(name).par.makespan


@pytest.mark.parametrize("name", ["first", "two-ranks", "gpipe", "1f1b", "v"])
def test_finish_without_par_is_as_fast_as_the_published_schedule(name):
    chosen, known = level(name), level(name).board()
    board = Board(known.placement, known.microbatches, known.costs, known.memory, known.split)
    board.finish()
    assert board.timeline.makespan == chosen.par.makespan


# --- verdict, par, settings -------------------------------------------------------------------------------------


def test_the_verdict_compares_with_par_and_names_the_costliest_wait():
    board = Board(Placement.make("loop", 2), 2, memory=2, par=pp.schedule("1f1b", 2, 2))
    assert board.verdict() == "8 actions left to place"
    lay(board, "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    assert board.verdict() == (
        "12 slots; par is 9: rank 1 waits 4–7: 1F1 needs 0F1 from rank 0. "
        "No rank holds more than 1 activation; the limit is 2."
    )
    board.reset()
    board.finish()
    assert board.verdict() == "9 slots: that is par. No rank holds more than 2 activations; the limit is 2."
    better = Board(Placement.make("loop", 2), 2, Costs(unit="ms"), par=pp.schedule("naive", 2, 2))
    lay(better, "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1")
    assert better.verdict() == "9 ms: better than par, which is 12 ms. No rank holds more than 2 activations."


def test_unused_pairs_are_not_reported_as_a_wait():
    """F+B takes 3 and a pair takes 1. A single rank never waits."""
    board = Board(Placement.make("loop", 1), 2, Costs(overlap=1), pairs=True, par=pp.schedule("1f1b-overlap", 1, 2))
    lay(board, "0F0 0B0 0F1 0B1")
    assert board.verdict().startswith("6 slots; par is 4: the actions themselves take longer.")


def test_a_start_that_cannot_be_placed_is_refused():
    with pytest.raises(ScheduleError, match="1F0 needs 0F0"):
        Board(Placement.make("loop", 2), 2, start=["1F0"])


# --- levels -----------------------------------------------------------------------------------------------------


def shortest(holders, microbatches, times, most=None):
    """Return the least makespan in ticks, by trying every choice of every rank, tick by tick.

    Stage s is on rank `holders[s]`; `times` are the ticks of F, B, I and W in each stage; `most` is the number of
    stages' activations that fit on a rank. Microbatches are alike, so each stage runs them in order.
    """
    stages, ranks, ops = range(len(holders)), range(max(holders) + 1), list(times)
    gradient, last = ("I", "W") if "W" in times else ("B", "B")
    slots = [(stage, op) for stage in stages for op in ops]

    def options(started, working, rank):
        """Yield what a rank may start now: None to wait, or the next microbatch of a stage and an op."""
        yield None
        if working[rank]:
            return
        counts = dict(zip(slots, started, strict=True))
        running = {work[:2] for work in working if work}
        ended = {slot: count - (slot in running) for slot, count in counts.items()}
        mine = [stage for stage in stages if holders[stage] == rank]
        held = sum(counts[stage, "F"] - ended[stage, last] for stage in mine)
        for stage, op in product(mine, ops):
            if op == "F":
                needs = [(stage - 1, "F")] if stage else []
            else:
                needs = [(stage, "I")] if op == "W" else [(stage, "F"), (stage + 1, gradient)]
            number = counts[stage, op]
            met = all(ended[need] > number for need in needs if need[0] in stages)
            if number < microbatches and met and not (op == "F" and most is not None and held >= most):
                yield stage, op, times[op]

    layer = {((0,) * len(slots), (None,) * len(ranks))}
    seen, ticks = set(layer), 0
    while not any(min(started) == microbatches and not any(working) for started, working in layer):
        following = set()
        for started, working in layer:
            for chosen in product(*(options(started, working, rank) for rank in ranks)):
                starts = {new[:2] for new in chosen if new}
                counts = tuple(count + (slot in starts) for slot, count in zip(slots, started, strict=True))
                now = [new or work for new, work in zip(chosen, working, strict=True)]
                later = tuple((*work[:2], work[2] - 1) if work and work[2] > 1 else None for work in now)
                following.add((counts, later))
        layer = following - seen
        seen |= layer
        ticks += 1
    return ticks


@pytest.mark.parametrize("name", [name for name in LEVELS if name not in ("repeat", "dualpipe")])
def test_no_order_beats_par_within_the_memory(name):
    chosen = level(name)
    placement, chunks = chosen.par.schedule.placement, chosen.par.schedule.chunks
    ops = "FIW" if chosen.board().split else "FB"
    durations = chosen.par.costs.durations(placement.stages, placement.ranks)
    times = {op: durations[Op(op)][0] for op in ops}
    most = None if chosen.memory is None else chosen.memory * chunks
    assert shortest(placement.holders[0], chosen.microbatches, times, most) == chosen.par.makespan


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_solved_by_the_published_orders_in_at_most_48_actions_unless_they_can_be_repeated(name):
    chosen, board = level(name), level(name).board()
    par, start = chosen.par.schedule, len(board.moves)
    for rank, index in par.replay.steps:
        if index >= len(board.schedule.orders[rank]):
            board.place(par.orders[rank][index])
    assert board.complete and board.schedule.orders == par.orders and board.schedule.name == name
    assert board.timeline.makespan == chosen.par.makespan and ": that is par." in board.verdict()
    assert 0 < len(board.moves) - start <= (64 if name == "repeat" else 48)
    board.reset()
    board.finish()
    assert board.schedule.orders == par.orders


def test_levels_have_increasing_difficulty():
    assert list(LEVELS) == ["first", "two-ranks", "gpipe", "1f1b", "repeat", "interleaved", "fill", "v", "dualpipe"]
    assert all(name == each.name and each.title and each.goal for name, each in LEVELS.items())
    one_f, fill = level("1f1b"), level("fill")
    assert one_f.memory < one_f.microbatches  # GPipe does not fit
    assert fill.memory == max(pp.simulate(pp.schedule("1f1b", fill.ranks, fill.microbatches)).peak_activations)
    assert fill.par.makespan < pp.simulate(pp.schedule("1f1b", fill.ranks, fill.microbatches)).makespan
    dualpipe = level("dualpipe").board()
    assert dualpipe.moves and dualpipe.pairs and not any(action.parts for action in dualpipe.moves)
    assert all(dualpipe.choices(rank) for rank in (0, 3))


@pytest.mark.parametrize("name", ["nothing", None, ["first"]])
def test_an_unknown_level_is_refused_with_the_available_ones(name):
    with pytest.raises(SettingError, match=r"unknown level .*; available: first, two-ranks, gpipe"):
        level(name)
