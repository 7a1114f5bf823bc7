"""Buffers that are filled too early. Oracle: a replay that fills and reads them, and published numbers."""

import itertools
import re
from contextlib import suppress

import judge
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from strategies import often, read, sample, with_orders

import ppedu as pp
from ppedu import Action, Op, check
from ppedu.core import lower
from ppedu.zoo.registry import published

INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "input", "output", "gradient of the output", "gradient of the input"
randoms = st.randoms(use_true_random=True)


class _LostError(Exception):
    """The value that an action reads was overwritten."""


def plays(schedule, buffers):
    """Return whether every action finds what it reads, with `buffers` buffers for each stage of each copy."""
    try:
        for rank in range(schedule.ranks):
            _play(schedule, rank, buffers)
    except _LostError:
        return False
    return True


def _play(schedule, rank, buffers):
    placement, order = schedule.placement, [*judge.apart(schedule.orders[rank])]
    received = {(each.op, *each[::2]) for each in order if each.op.startswith("RECV")}  # op, stage, microbatch
    memory = {}  # from a buffer to its microbatch and what it holds of it

    def buffer(stage, m):
        copy = placement.copy(m)
        return stage, copy, (m - copy * placement.split) % buffers

    def write(stage, m, what):
        if memory.get(buffer(stage, m), (None,))[0] != m:
            memory[buffer(stage, m)] = m, set()
        memory[buffer(stage, m)][1].add(what)

    def reads(stage, m, *wanted):
        owner, there = memory.get(buffer(stage, m), (None, set()))
        if owner != m or not there.issuperset(wanted):
            raise _LostError

    def here(stage, m, op):
        return 0 <= stage < schedule.stages and judge.runner(placement, stage, m, op) == rank

    away = judge.parted(placement)
    sent = {"SEND_F": OUTPUT, "SEND_B": INPUT_GRADIENT, "SEND_R": INPUT}
    posted = {"RECV_F": INPUT, "RECV_B": OUTPUT_GRADIENT, "RECV_R": INPUT}
    for action in order:
        singles = [each for each in action.singles if each.op not in judge.SHARDING]
        for stage, op, m, _ in singles:  # the parts of a pair start together
            if op in posted:
                write(stage, m, posted[op])
            begins = op == "F" or (op == "R" and stage in away)
            if begins and (f"RECV_{op}", stage, m) not in received:
                write(stage, m, INPUT)
        for stage, op, m, _ in singles:
            if (message := op.removeprefix("WAIT_")) in (*sent, *posted):
                reads(stage, m, {**sent, **posted}[message])
                continue
            reads(stage, m, INPUT)
            if op == "F":
                if here(stage - 1, m, "F"):
                    reads(stage - 1, m, OUTPUT)
                write(stage, m, OUTPUT)
            elif op == "R":
                if stage in away:
                    write(stage, m, OUTPUT)
            else:
                reads(stage, m, OUTPUT, *[OUTPUT_GRADIENT] * (("RECV_B", stage, m) in received))
                if op != "W" and here(stage + 1, m, "B"):
                    reads(stage + 1, m, INPUT_GRADIENT)
                write(stage, m, INPUT_GRADIENT)


def agree(schedule, buffers):
    """Assert that `check` and the replay agree, also about the least number of buffers; return the problems."""
    found = check(schedule, buffers=buffers)
    assert (found == []) == plays(schedule, buffers), f"{schedule.placement} {buffers}\n{schedule.to_csv()}"
    if found:
        least = next(number for number in range(1, schedule.microbatches + 1) if plays(schedule, number))
        would_do = f"; {least} buffers would do"
        assert all(problem.kind == "buffer" and problem.message.endswith(would_do) for problem in found)
    for problem in found:
        rank, index, action, message = problem.rank, problem.index, problem.action, problem.message
        assert action in schedule.orders[rank][index].singles
        start = f"rank {rank}, position {index}: {action} fills the buffer of microbatch "
        before, last, end = re.fullmatch(
            r"(\d+), which is in use until (.+) \(position (\d+)\); .*", message[len(start) :]
        ).groups()
        assert message.startswith(start) and int(end) >= index and (action.microbatch - int(before)) % buffers == 0
        there = schedule.orders[rank][int(end)]
        assert last in (str(there), *map(str, there.singles))
    return found


def zoo():
    for name, ranks, microbatches in itertools.product(published(), (1, 2, 3, 4), (1, 2, 3, 5, 8)):
        with suppress(pp.PipelineError):  # there is not one of this size
            schedule = pp.schedule(name, ranks, microbatches)
            if schedule.slices == 1 and not schedule.placement.barriers and not schedule.offloaded:
                yield schedule


def test_published_schedules_are_judged_like_the_replay():
    for schedule in sample([*zoo()]):
        for each in (schedule, schedule.forwards, lower(schedule), lower(schedule, "late"), lower(schedule.forwards)):
            for buffers in range(1, schedule.microbatches + 2):
                agree(each, buffers)


@pytest.mark.parametrize("lowered", [False, True])
@given(randoms)
@often(400)
def test_random_orders_are_judged_like_the_replay(lowered, random):
    schedule = judge.draw(random, lowered=lowered, most_microbatches=5, apart=random.random() < 0.3)
    loose = judge.loosen(random, schedule) if lowered else schedule
    for each in (schedule, loose):
        for buffers in range(1, 6) if not check(each) else ():
            event(f"{len(agree(each, buffers)) > 0}")


@given(randoms)
@often(400)
def test_other_problems_come_first(random):
    schedule = judge.mutate(random, judge.loosen(random, judge.draw(random, most_ranks=3)))
    for transport in ("buffered", "rendezvous", "any"):
        found, limited = check(schedule, transport=transport), check(schedule, transport=transport, buffers=1)
        assert limited == found or (not found and {problem.kind for problem in limited} == {"buffer"})


# --- published numbers -----------------------------------------------------------------------------------------------


def needed(schedule):
    """Return for each rank the least number of buffers with which no problem is on it."""
    wrong = [{problem.rank for problem in check(schedule, buffers=n)} for n in range(1, schedule.microbatches + 1)]
    return [next(n for n, ranks in enumerate(wrong, 1) if rank not in ranks) for rank in range(schedule.ranks)]


def test_1f1b_needs_a_buffer_for_each_later_stage_and_gpipe_for_each_microbatch():
    """In flight are at most p - s microbatches, or all (arXiv 2104.04473, sections 2.2.1 and 2.2)."""
    for ranks, microbatches in itertools.product(range(1, 6), range(1, 9)):
        assert needed(pp.schedule("1f1b", ranks, microbatches)) == [min(ranks - s, microbatches) for s in range(ranks)]
        assert needed(pp.schedule("gpipe", ranks, microbatches)) == [microbatches] * ranks


def deepspeed(ranks, microbatches, fixed):
    """Return 1F1B with the messages of DeepSpeed's `TrainSchedule`, whose forwards and backwards alternate in steps.

    Where a step follows another, it first receives an activation and then sends the last gradient, or it first sends
    the last activation and then receives a gradient. Since it was fixed, both are the other way round.
    """
    one_f_one_b, orders = pp.schedule("1f1b", ranks, microbatches), []
    for rank, row in enumerate(one_f_one_b.orders):
        order, sends, before = [], [], 0
        for action in row:
            forward = action.op == "F"
            step = 2 * action.microbatch + (rank if forward else 2 * ranks - 1 - rank)
            receives = [action._replace(op=Op.RECV_F if forward else Op.RECV_B)]
            if rank == (0 if forward else ranks - 1):
                receives = []
            order += [*sends, *receives] if step > before + 1 or forward == fixed else [*receives, *sends]
            sends, before = [action._replace(op=Op.SEND_F if forward else Op.SEND_B)], step
            if rank == (ranks - 1 if forward else 0):
                sends = []
            order.append(action)
        orders.append(order + sends)
    return with_orders(one_f_one_b, orders)


def test_deepspeeds_number_of_buffers_is_enough_since_it_was_fixed():
    """`TrainSchedule.num_pipe_buffers`, which DeepSpeed 2862 made one less; gradients are sent earlier since then.

    The first order is what DeepSpeed 0.19.8 prints, as in `test_read.py`.
    """
    printed = "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2"
    assert " ".join(map(str, deepspeed(2, 3, fixed=True).orders[0])) == printed
    for ranks, microbatches in itertools.product(range(2, 6), range(1, 9)):
        now, then = (deepspeed(ranks, microbatches, fixed) for fixed in (True, False))
        assert check(now, transport="rendezvous") == check(then, transport="rendezvous") == []
        numbers = [max(2, min(ranks - stage, microbatches)) for stage in range(ranks)]
        one_more = [max(2, min(ranks - stage + 1, microbatches)) for stage in range(ranks)]
        assert needed(now) == [min(ranks - stage, microbatches) for stage in range(ranks)]
        assert all(needs <= has for needs, has in zip(needed(now), numbers, strict=True))
        assert all(needs <= has for needs, has in zip(needed(then), one_more, strict=True))
        too_few = [needs > has for needs, has in zip(needed(then), numbers, strict=True)]
        assert too_few == [0 < stage < ranks - 1 and microbatches > ranks - stage for stage in range(ranks)]


# --- single cases ----------------------------------------------------------------------------------------------------


SENDER = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"


def clash(rank, index, action, last, end, buffers=2):
    why = f"fills the buffer of microbatch 0, which is in use until {last} (position {end})"
    return f"rank {rank}, position {index}: {action} {why}; {buffers} buffers would do"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([SENDER, "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"], (1, 3, "1RECV_F1", "1SEND_B0", 4)),
        ([SENDER, "1RECV_F0 1F0 1B0 (1RECV_F1;1SEND_B0)BATCH_P2P 1F1 1B1 1SEND_B1"], (1, 3, "1RECV_F1", "1SEND_B0", 3)),
        (
            [SENDER, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1WAIT_SEND_B0 1B1 1SEND_B1"],
            (1, 4, "1RECV_F1", "1WAIT_SEND_B0", 6),
        ),
        (["0F0 (0F1;0B0)OVERLAP_F_B 0B1"], (0, 1, "0F1", "0B0", 1)),
        (["0F0 0I0 0F1 0W0 0B1"], (0, 2, "0F1", "0W0", 3)),
    ],
)
def test_the_sentence_names_both_actions(lines, told):
    schedule = read(*lines, microbatches=2)
    assert clash(*told) in map(str, check(schedule, buffers=1))
    assert check(schedule, buffers=2) == []


def test_a_gradient_is_in_use_until_the_next_stage_of_the_rank_has_it():
    found = check(read("0F0 1F0 1B0 0F1 1F1 0B0 1B1 0B1", microbatches=2, chunks=2), buffers=1)
    assert [*map(str, found)] == [clash(0, 3, "0F1", "0B0", 5), clash(0, 4, "1F1", "0B0", 5)]


def test_each_microbatch_that_fills_the_buffer_is_reported():
    found = check(read("0F0 0F1 0B1 0F2 0B2 0B0", microbatches=3), buffers=1)
    assert [*map(str, found)] == [clash(0, 1, "0F1", "0B0", 5, 3), clash(0, 3, "0F2", "0B0", 5, 3)]


def test_more_buffers_may_be_worse():
    order = read("0F1 0B1 0F2 0B2 0F0 0F3 0B0 0B3", microbatches=4)
    assert check(order, buffers=2) == check(order, buffers=4) == []
    assert [*map(str, check(order, buffers=3))] == [clash(0, 5, "0F3", "0B0", 6)]


def test_sharding_needs_no_buffer():
    schedule = lower(pp.schedule("1f1b", 2, 4), fsdp=True, resident=1)
    assert any(action == Action(0, Op.UNSHARD) for action in schedule.orders[0])
    assert agree(schedule, 1) and agree(schedule, 4) == []


@pytest.mark.parametrize("buffers", [0, -1, 2.0, "2", True, [2]])
def test_a_number_of_buffers_is_a_whole_number(buffers):
    with pytest.raises(pp.SettingError, match="buffers must be"):
        check(pp.schedule("1f1b", 2, 2), buffers=buffers)


@pytest.mark.parametrize("transport", ["direction", "pair", "rank"])
def test_a_forward_only_order_says_when_its_sends_have_left(transport):
    """A message travels on after its rank has posted it; in training, its gradient shows that it has arrived."""
    text = "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1F1"
    schedule = pp.Schedule.read(text, forward_only=True)
    assert pp.check(schedule, buffers=1) == pp.check(schedule, transport=transport) == []
    for call in (pp.check, pp.verify):
        with pytest.raises(pp.SettingError, match="write 0WAIT_SEND_F0 where the rank waits for it"):
            call(schedule, transport=transport, buffers=1)
    text = text.replace("0F1 0SEND_F1", "0F1 0WAIT_SEND_F0 0SEND_F1 0WAIT_SEND_F1")
    waits = pp.Schedule.read(text, forward_only=True)
    assert [problem.kind for problem in pp.check(waits, transport=transport, buffers=1)] == ["buffer"]
