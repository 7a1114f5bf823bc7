"""Slices of sequences: a slice waits for the one before it, and its backward for that of the one after."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from strategies import sample

import ppedu as pp
from ppedu import Costs, SettingError
from ppedu.course.board.board import Board
from ppedu.planning.fitted import fitted
from ppedu.planning.pieces import Piece, Pieces
from ppedu.trace.recognize import recognize

# A figure of the authors of Seq1F1B (github.com/thunlp/Seq1F1B): 4 ranks, 8 microbatches of two slices. Forwards are
# digits, backwards letters: a is microbatch 1. In the figure, one box of the second row says 1 instead of 5.
FIGURE = """
11223a3a4b4b5c5c6d6d7e7e8f8fgghh
1122a3a3b4b4c5c5d6d6e7e7f8f8gghh
112a2a3b3b4c4c5d5d6e6e7f7f8g8ghh
11a2a2b3b3c4c4d5d5e6e6f7f7g8g8hh
"""


def test_seq1f1b_is_that_of_its_figure():
    schedule = pp.schedule("seq1f1b", 4, 8, slices=2)
    rows = ["".join("12345678abcdefgh"[m // 2 + 8 * (op == "B")] for _, op, m, _ in row) for row in schedule.orders]
    assert rows == FIGURE.split()
    assert pp.simulate(schedule, Costs(1, 2)).makespan == 28.5  # in the figure, 1F1B takes 33


def replayed(orders, slices, times, latency):
    """Return when each action ends, by asking again and again which rank can go on. One stage on each rank."""
    ends, at, clock = {}, [0] * len(orders), [0] * len(orders)
    last = len(orders) - 1
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        before = len(ends)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                op, m = order[at[rank]].op, order[at[rank]].microbatch
                needs = []  # with the time on the way
                if op == "F":
                    needs += [(("F", rank - 1, m), latency)] if rank else []
                    needs += [(("F", rank, m - 1), 0)] if m % slices else []
                else:
                    needs += [(("F", rank, m), 0)]
                    needs += [(("B", rank + 1, m), latency)] if rank < last else []
                    needs += [(("B", rank, m + 1), 0)] if m % slices < slices - 1 else []
                if any(need not in ends for need, _ in needs):
                    break
                start = max([clock[rank], *(ends[need] + lag for need, lag in needs)])
                clock[rank] = ends[op, rank, m] = start + times[op][m % slices]
                at[rank] += 1
        if len(ends) == before:
            return None
    return ends


def test_any_order_is_judged_and_timed_like_the_replay():
    """In random orders, most of which break the order of slices or get stuck."""
    dice = random.Random(5)
    judged = {True: 0, False: 0}
    for ranks, slices, whole in itertools.product((1, 2, 3), (2, 3), (1, 2)):
        made = pp.schedule("seq1f1b", ranks, whole, slices=slices)
        for _ in range(30):
            orders = [list(order) for order in made.orders]
            for order in orders:
                for _ in range(dice.randint(0, 2)):
                    place = dice.randrange(len(order) - 1)
                    order[place : place + 2] = reversed(order[place : place + 2])
            schedule = replace(made, orders=tuple(map(tuple, orders)))
            attention = dice.choice([0, Fraction(1, 2)])
            costs = Costs(forward=6, backward=12, latency=dice.choice([0, 1]), attention=attention)
            parts = [(1 - attention) / Fraction(slices) + attention * (2 * j + 1) / slices**2 for j in range(slices)]
            times = {"F": [6 * each for each in parts], "B": [12 * each for each in parts]}
            ends = replayed(orders, slices, times, costs.latency)
            judged[ends is not None] += 1
            assert (ends is None) == bool(schedule.problems)
            if ends is not None:
                found = {}
                for rank, row in enumerate(pp.simulate(schedule, costs).rows):
                    found |= {(str(span.action.op), rank, span.action.microbatch): span.end for span in row}
                assert found == ends
    assert min(judged.values()) > 40


def test_slices_are_not_microbatches():
    whole = pp.schedule("1f1b", 4, 8)
    cut = replace(whole, placement=replace(whole.placement, slices=2))
    comes, why = "3B0 needs 3B1, which only comes at position 3", "later slices add to the gradients of earlier ones"
    assert [str(each) for each in pp.check(cut) if each.action == pp.B(3, 0)] == [f"rank 3, position 1: {comes}: {why}"]
    swapped = replace(cut, orders=(tuple(reversed(cut.orders[0])), *cut.orders[1:]))
    assert any("0F1 needs 0F0, which only comes" in str(each) for each in swapped.problems)
    assert all("attends to those before it" in str(each) for each in swapped.problems if "0F1 needs 0F0" in str(each))
    assert pp.check(pp.lower(pp.schedule("seq1f1b", 4, 8, slices=2)), transport="any") == []


@pytest.mark.parametrize("name", ["terapipe", "seq1f1b", "slimpipe"])
def test_it_is_legal_for_every_size(name):
    for p, m, slices in sample([*itertools.product(range(1, 7), range(1, 10), range(1, 9))]):
        if name == "slimpipe" and slices < p:
            continue
        schedule = pp.schedule(name, p, m, slices=slices)
        assert pp.check(schedule) == [] == pp.check(pp.lower(schedule)), (p, m, slices)
        assert (schedule.slices, schedule.microbatches) == (slices, m * slices)


def slices_in_flight(rank, p, m, n, v):
    """Yield the order of SlimPipe's code: a forward if fewer than n v + 2 (p - 1 - rank) are held, else a backward.

    Slices run in groups, of the smallest divisor of n that is not below p.
    """
    size = min(each for each in range(p, n + 1) if n % each == 0)
    turns = [(batch, group, stage, each) for batch in range(m) for group in range(n // size) for stage in range(v)
             for each in range(size)]  # fmt: skip
    forwards, backwards = iter(turns), iter(turns)
    held, left = 0, len(turns)
    while held or left:
        if left and held < n * v + 2 * (p - 1 - rank):
            batch, group, stage, each = next(forwards)
            yield pp.F(stage * p + rank, batch * n + group * size + each)
            held, left = held + 1, left - 1
        else:
            batch, group, stage, each = next(backwards)
            yield pp.B((v - 1 - stage) * p + rank, (batch + 1) * n - 1 - group * size - each)
            held -= 1


def test_slimpipe_runs_the_orders_of_its_code():
    for p, m, n, v in sample([*itertools.product((1, 2, 3, 4), (2, 3), (4, 5, 6, 8, 12), (1, 2, 3))]):
        made = pp.schedule("slimpipe", p, m, slices=n, chunks=v)
        assert all([*slices_in_flight(rank, p, m, n, v)] == [*made.order(rank)] for rank in range(p)), (p, m, n, v)


def test_slimpipe_holds_little_more_than_one_microbatch():
    """Figure 1 of arXiv 2504.14519: activations shrink with the number of ranks, and those of 1F1B do not."""
    for p in (2, 4, 8):
        model = Costs(activation=Fraction(1, p))  # of a microbatch on all ranks: 1
        assert max(pp.simulate(pp.schedule("1f1b", p, 2 * p), model).peak_activations) == 1
        thin = pp.simulate(pp.schedule("slimpipe", p, 2 * p, slices=4 * p), model)
        assert max(thin.peak_activations) == Fraction(1, p) * (1 + Fraction(p - 1, 4 * p))
        assert thin.idle[0] * 8 * p == pp.simulate(pp.schedule("1f1b", p, 2 * p), model).idle[0]


def test_slimpipe_needs_its_exchange_if_attention_is_long():
    """Half of the time is attention: without the exchange, the bubble is about three times as large."""
    bubbles = {}
    for slices, attention in itertools.product((16, 64), (0, 0.5)):
        timeline = pp.simulate(pp.schedule("slimpipe", 4, 4, slices=slices), Costs(attention=attention))
        bubbles[slices, attention] = round(timeline.bubble, 3)
    assert bubbles == {(16, 0): 0.023, (16, 0.5): 0.074, (64, 0): 0.006, (64, 0.5): 0.022}


def test_one_slice_is_the_schedule_of_whole_sequences():
    for sliced, whole in (("seq1f1b", "1f1b"), ("terapipe", "gpipe")):
        one, other = pp.schedule(sliced, 3, 5, slices=1), pp.schedule(whole, 3, 5)
        assert pp.simulate(one).rows == pp.simulate(other).rows


def test_all_slices_together_take_as_long_as_their_sequence():
    costs = Costs(forward=4, input=5, weight=3, attention=Fraction(1, 4), activation=6)
    one, many = (pp.simulate(pp.schedule("seq1f1b", 1, 2, slices=slices), costs) for slices in (1, 4))
    assert one.makespan == many.makespan == 2 * (4 + 5 + 3)
    assert max(one.peak_activations) == max(many.peak_activations) == 6


def test_what_cannot_be_cut_is_refused():
    made = pp.schedule("seq1f1b", 2, 3, slices=2)
    assert made.size == "2 ranks, 3 microbatches of 2 slices"
    with pytest.raises(SettingError, match="microbatches have 2 slices each; got 5 slices in all"):
        replace(made, microbatches=5)
    with pytest.raises(SettingError, match="the second copy begins with a whole microbatch"):
        replace(pp.schedule("chimera", 2, 6).placement, slices=2)
    for asked, says in (
        (lambda: pp.schedule("seq1f1b", 2, 3, slices=0), "slices must be at least 1"),
        (lambda: pp.export.to_torch(made), "cuts sequences into slices, which"),
        (lambda: pp.check(made, buffers=2), "buffers are of whole microbatches"),
        (lambda: pp.plan("gpt2", "h100", 2, 4, sequence=64, schedules="seq1f1b"), "slices of at least 1024 tokens"),
        (lambda: pp.search.optimal(2, 6, placement=made.placement, slices=2), "the slices are those of the placement"),
        (lambda: Board(made.placement, 6), "a board has whole sequences"),
        (lambda: pp.schedule("seq1f1b", 2, 2, slices=10**9), "2 microbatches, 1000000000 slices make 4000000000"),
        (lambda: Costs(attention=2), "attention must be a part of the time, 0 to 1"),
    ):
        with pytest.raises(SettingError, match=says):
            asked()


def test_a_saved_timeline_keeps_its_slices(tmp_path):
    timeline = pp.simulate(pp.schedule("seq1f1b", 3, 2, slices=3), Costs(attention=0.5))
    timeline.save(tmp_path / "t.json")
    found = pp.Timeline.load(tmp_path / "t.json")
    assert found.schedule == timeline.schedule and found.costs == timeline.costs


def test_numbers_and_tables_are_not_cut_twice():
    """A table has the times of slices, and numbers those of whole sequences: each way to say 4, 6 and 2 is the same."""
    made = pp.schedule("seq1f1b", 2, 3, slices=2)
    whole = {"forward": 4, "input": 6, "weight": 2}
    tables = {name: [[Fraction(time, 2)] * 6] * 2 for name, time in whole.items()}
    for recompute in (False, True):
        known = pp.simulate(made, Costs(**whole, recompute=recompute))
        for names in itertools.product((0, 1), repeat=3):
            mixed = {name: tables[name] if table else whole[name] for name, table in zip(whole, names, strict=True)}
            found = pp.simulate(made, Costs(**mixed, recompute=recompute))
            assert found.rows == known.rows
            assert known.causes().items() <= found.causes().items()


def test_longer_slices_are_a_cause_of_the_bubble():
    made = pp.schedule("seq1f1b", 2, 3, slices=2)
    even, uneven = (pp.simulate(made, Costs(4, 8, attention=attention)) for attention in (0, 1))
    shares = uneven.causes()
    assert uneven.bubble > even.bubble and "variation" not in even.causes()
    assert shares["variation"] == pytest.approx((uneven.makespan - even.makespan) / uneven.makespan)
    assert pp.simulate(made, Costs([[1, 3] * 3] * 2, [[2, 6] * 3] * 2)).causes() == shares


def test_half_a_backward_without_room_for_its_attention_is_refused():
    orders = [[pp.F(0, 0), pp.F(0, 1), pp.I(0, 1), pp.W(0, 1), pp.I(0, 0), pp.W(0, 0)]]
    made = pp.Schedule("split", pp.Placement.make("loop", 1, slices=2), 2, orders)
    assert pp.simulate(made, Costs(4, input=6, weight=2, attention=Fraction(3, 4))).makespan == 12
    with pytest.raises(SettingError, match="all attention of B is in I"):
        pp.simulate(made, Costs(4, input=1, weight=7, attention=Fraction(3, 4)))


def test_a_part_of_a_schedule_has_whole_microbatches():
    whole = pp.schedule("1f1b", 4, 8)
    part = pp.shrink(replace(whole, placement=replace(whole.placement, slices=2)))
    assert part.size == "1 rank, 1 microbatch of 2 slices"
    assert [" ".join(map(str, order)) for order in part.orders] == ["0F0 0F1 0B0 0B1"]


def test_a_model_is_cut_best_for_slices():
    """Its loads are those of whole sequences: against all partitions of six pieces into three stages."""
    times = [5, 9, 5, 5, 6, 1], [2, 3, 3, 1, 1, 2], [6, 9, 8, 5, 1, 7]
    made = pp.schedule("seq1f1b", 3, 4, slices=4)
    for each in times:
        model = Pieces(tuple(Piece("", time, 2 * time, time, time) for time in each))
        found = pp.simulate(made, fitted(made, model)).makespan
        cuts = [(0, *two, 6) for two in itertools.combinations_with_replacement(range(7), 2)]
        stages = ([sum(each[a:b]) for a, b in itertools.pairwise(cut)] for cut in cuts)
        assert found == min(pp.simulate(made, Costs(stage)).makespan for stage in stages)


def test_slices_are_recognized():
    for name in ("seq1f1b", "terapipe", "1f1b"):
        made = pp.schedule(name, 3, 4, **({} if name == "1f1b" else {"slices": 2}))
        assert recognize(replace(made, name="x")).name == (name if name == "1f1b" else f"{name}, slices=2")
        assert recognize(replace(made.forwards, name="x")).slices == made.slices
