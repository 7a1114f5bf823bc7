"""Lesson 6: repaired loops are accepted, wrong ones explained, and rehearsal is compared with real ranks."""

import inspect
import subprocess
import sys
import textwrap
import threading
from functools import partial

import pytest
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

from ppedu import Action, SettingError, check, lower, schedule
from ppedu.core import Schedule, replay
from ppedu.course.exercises import find_fault, lesson_06
from ppedu.course.rehearsal import BOTH_WAYS, ONE_WAY, rehearse
from ppedu.engine.ranks import comm


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    for thread in threading.enumerate():
        if thread.daemon and "_live" in thread.name:
            thread.join(5)
    assert threading.active_count() <= before


# The loops of the lesson, and repaired ones


def receives_first(me, microbatches):
    for m in range(microbatches):
        x = me.communicate("recv_forward")
        dy = me.communicate("recv_backward")
        y = me.forward(m, x)
        me.communicate("send_forward", y)
        dx = me.backward(m, dy)
        me.communicate("send_backward", dx)


def naive(me, microbatches):
    for m in range(microbatches):
        x = me.communicate("recv_forward")
        y = me.forward(m, x)
        me.communicate("send_forward", y)
        dy = me.communicate("recv_backward")
        dx = me.backward(m, dy)
        me.communicate("send_backward", dx)


def one_f_one_b(me, microbatches, middle):
    warmup = min(me.ranks - me.rank - 1, microbatches)
    for m in range(warmup):
        x = me.communicate("recv_forward")
        y = me.forward(m, x)
        me.communicate("send_forward", y)
    middle(me, warmup, microbatches)
    for m in range(microbatches - warmup, microbatches):
        dy = me.communicate("recv_backward")
        dx = me.backward(m, dy)
        me.communicate("send_backward", dx)


def sends_first(me, microbatches):
    def middle(me, warmup, microbatches):
        for m in range(warmup, microbatches):
            x = me.communicate("recv_forward")
            y = me.forward(m, x)
            me.communicate("send_forward", y)
            dy = me.communicate("recv_backward")
            dx = me.backward(m - warmup, dy)
            me.communicate("send_backward", dx)

    one_f_one_b(me, microbatches, middle)


def receives_before_it_sends(me, microbatches):
    def middle(me, warmup, microbatches):
        for m in range(warmup, microbatches):
            x = me.communicate("recv_forward")
            y = me.forward(m, x)
            dy = me.communicate("recv_backward")
            me.communicate("send_forward", y)
            dx = me.backward(m - warmup, dy)
            me.communicate("send_backward", dx)

    one_f_one_b(me, microbatches, middle)


def swaps(me, microbatches, to_the_end=False):
    def middle(me, warmup, microbatches):
        if warmup < microbatches:
            x = me.communicate("recv_forward")
        for m in range(warmup, microbatches):
            y = me.forward(m, x)
            dy = me.bidirectional_communicate("send_fwd_recv_bwd", y)
            dx = me.backward(m - warmup, dy)
            if to_the_end or m < microbatches - 1:
                x = me.bidirectional_communicate("send_bwd_recv_fwd", dx)
            else:
                me.communicate("send_backward", dx)

    one_f_one_b(me, microbatches, middle)


def swaps_alone(me, microbatches):
    def middle(me, warmup, microbatches):
        for m in range(warmup, microbatches):
            x = me.communicate("recv_forward")
            y = me.forward(m, x)
            dy = me.bidirectional_communicate("send_fwd_recv_bwd", y)
            dx = me.backward(m - warmup, dy)
            me.communicate("send_backward", dx)

    one_f_one_b(me, microbatches, middle)


def sum_on_one(me, steps, target):
    for _ in range(steps):
        loss = me.step()
        if me.rank == me.ranks - 1:
            loss = me.all_reduce(loss)
            if loss < target:
                break


def sum_on_all(me, steps, target):
    for _ in range(steps):
        if me.all_reduce(me.step()) < target:
            break


def told_by_the_last(me, steps, target):
    for _ in range(steps):
        loss = me.step()
        if me.rank == me.ranks - 1:
            for other in range(me.rank):
                me.send(loss, other)
        else:
            loss = me.recv(me.ranks - 1)
        if loss < target:
            return


def gpipe(order):
    def step(me, microbatches):
        for m in range(microbatches):
            x = me.communicate("recv_forward")
            y = me.forward(m, x)
            me.communicate("send_forward", y)
        for m in order(me, microbatches):
            dy = me.communicate("recv_backward")
            dx = me.backward(m, dy)
            me.communicate("send_backward", dx)

    return step


def newest_first(me, microbatches):
    return reversed(range(microbatches))


def newest_first_on_the_last(me, microbatches):
    return range(microbatches) if me.rank < me.ranks - 1 else newest_first(me, microbatches)


def forwards_in_that_order_too(me, microbatches):
    for m in newest_first_on_the_last(me, microbatches):
        x = me.communicate("recv_forward")
        y = me.forward(m, x)
        me.communicate("send_forward", y)
    for m in newest_first_on_the_last(me, microbatches):
        dy = me.communicate("recv_backward")
        dx = me.backward(m, dy)
        me.communicate("send_backward", dx)


def up_and_back(me, value):
    if me.rank > 0:
        value += me.recv(me.rank - 1)
    if me.rank < me.ranks - 1:
        me.send(value, me.rank + 1)
        value = me.recv(me.rank + 1)
    if me.rank > 0:
        me.send(value, me.rank - 1)
    return value


def around(me, value):
    """The sum goes round the ranks twice: once to be added up, once to be passed on."""
    before, after = (me.rank - 1) % me.ranks, (me.rank + 1) % me.ranks
    if me.ranks == 1:
        return value
    if me.rank == 0:
        me.send(value, after)
        total = me.recv(before)
        me.send(total, after)
        return total
    me.send(value + me.recv(before), after)
    total = me.recv(before)
    if after:
        me.send(total, after)
    return total


RIGHT = {
    "06.1": [naive, swaps],
    "06.2": {"a swap": swaps, "no swap": receives_before_it_sends},
    "06.3": {"a sum on all": sum_on_all, "the last rank tells": told_by_the_last},
    "06.4": [gpipe(lambda me, microbatches: range(microbatches)), gpipe(newest_first)],
    "06.6": {"a sum up and back down": up_and_back, "a sum that goes round and round again": around},
}


def no_sum(me, steps, target):
    for _ in range(steps):
        if me.step() < target:
            break


def only_the_last_stops(me, steps, target):
    for _ in range(steps):
        loss = me.all_reduce(me.step())
        if me.rank == me.ranks - 1 and loss < target:
            break


def never_stops(me, steps, target):
    for _ in range(steps):
        me.all_reduce(me.step())


def mean_of_all(me, steps, target):
    for _ in range(steps):
        if me.all_reduce(me.step()) / me.ranks < target:
            break


def one_more_step(me, steps, target):
    sum_on_all(me, steps, target)
    me.step()


def drops_the_sum(me, steps, target):
    for _ in range(steps):
        loss = me.step()
        me.all_reduce(loss)
        if loss < target:
            break


def stops_before_the_sum(me, steps, target):
    for _ in range(steps):
        loss = me.step()
        if loss < target:
            break
        me.all_reduce(loss)


def gradient_unsent(me, microbatches):
    for m in range(microbatches):
        x = me.communicate("recv_forward")
        y = me.forward(m, x)
        me.communicate("send_forward", y)
        dy = me.communicate("recv_backward")
        me.backward(m, dy)


def star(me, value):
    if me.rank:
        me.send(value, 0)
        return me.recv(0)
    total = value + sum(me.recv(rank) for rank in range(1, me.ranks))
    for rank in range(1, me.ranks):
        me.send(total, rank)
    return total


def only_up(me, value):
    if me.rank > 0:
        value += me.recv(me.rank - 1)
    if me.rank < me.ranks - 1:
        me.send(value, me.rank + 1)
    return value


def all_send_first(me, value):
    me.send(value, (me.rank + 1) % me.ranks)
    return value + me.recv((me.rank - 1) % me.ranks)


def swap_of_two(me, value):
    return value + me.swap(value, 1 - me.rank) if me.ranks == 2 else value


def endless(me, *_):
    while True:
        me.forward(0)


def sends_what_came(me, microbatches):
    for _ in range(microbatches):
        x = me.communicate("recv_forward")
        me.communicate("send_forward", x)  # and not what is made of it


def sends_back_what_came(me, microbatches):
    if me.rank == 0:
        me.communicate("send_forward", me.forward(0))
    else:
        me.communicate("send_backward", me.communicate("recv_backward"))


def receives_again(me, microbatches):
    if me.rank == 0:
        me.communicate("send_forward", me.forward(0))
        me.bidirectional_communicate("send_fwd_recv_bwd", me.forward(1))
        me.communicate("recv_backward")  # the swap has brought it
    elif me.rank == 1:
        me.forward(0, me.communicate("recv_forward"))
        me.bidirectional_communicate("send_bwd_recv_fwd", me.backward(0))
        me.communicate("recv_forward")


def receives_too_late(me, microbatches):
    for m in range(microbatches):
        if m > 0:
            x = me.communicate("recv_forward")
        me.forward(m, x)


def passes_on(me, microbatches):
    for m in range(microbatches):
        y = me.forward(m, me.communicate("recv_forward"))
        me.communicate("send_forward", y)
        me.communicate("recv_backward")
        me.communicate("send_backward", me.backward(m, y))


WRONG = {}
WRONG["06.1"] = {
    "both receive first": (receives_first, "rank 1 waits for rank 0. All of them receive, and none sends."),
    "a gradient is not sent": (
        gradient_unsent,
        "none sends. Rank 1 has computed the gradient that rank 0 waits for, but not sent it.",
    ),
    "sends nothing": (
        sends_what_came,
        'me.communicate("send_forward", x), rank 0 sends None; it receives no x: send the result of its forward, y.',
    ),
}
WRONG["06.2"] = {
    "both send first": (sends_first, "rank 1 waits for rank 0. All of them send, and none receives."),
    "the place": (sends_first, 'me.communicate("send_backward", dx), rank 1 waits for rank 0'),
    "one side swaps": (swaps_alone, "A swap needs two ranks that swap with each other."),
    "one swap too many": (
        partial(swaps, to_the_end=True),
        "two ranks that swap with each other. After its last microbatch, rank 1 has nothing left to receive, "
        "so it should only send.",
    ),
    "no longer 1F1B": (naive, "it is not 1F1B anymore: rank 0 runs 0B0 where it should run 0F1. Keep that"),
}
WRONG["06.3"] = {
    "a sum on one rank": (
        sum_on_one,
        "loss = me.all_reduce(loss), rank 1 waits for rank 0. A collective must be called by all ranks, and "
        "equally often.",
    ),
    "no sum": (no_sum, "rank 1 waits for rank 0, which has ended. No rank asks for the sum. me.step() gives"),
    "only the last stops": (
        only_the_last_stops,
        "rank 0 waits for rank 1, which has ended. all_reduce gave rank 0 1.5, which is below the target, and still it "
        "went on: the break must not depend on the rank. Move it out of the if that asks for me.rank.",
    ),
    "stops before the sum": (
        stops_before_the_sum,
        "for rank 0, which has ended. Rank 0's own loss is 0, which is below any target: it stopped before the sum.",
    ),
    "never stops": (never_stops, "training should end after 3 steps, but takes 6"),
    "the sum divided": (
        mean_of_all,
        "end after 3 steps, but takes 2. me.step() returns 0 on the other ranks, so the sum over all ranks "
        "is the loss itself.",
    ),
    "one step too many": (one_more_step, "training should end after 3 steps, but takes 4"),
    "the sum dropped": (
        drops_the_sum,
        "all_reduce gave rank 0 4, which is not below the target, and still it stopped: you dropped what all_reduce "
        "returns.",
    ),
    "a sum of nothing": (lambda me, steps, target: me.all_reduce(None), "all_reduce on rank 0 needs a number"),
    "another rank": (lambda me, *_: me.send(1, 2), "there is no rank 2; the ranks are 0 to 1"),
}
WRONG["06.4"] = {
    "another order on the last rank": (
        gpipe(newest_first_on_the_last),
        "rank 0 runs the backward of microbatch 0 with the gradient of microbatch 1. Messages are not "
        "labeled: the first one that rank 1 sends is the first one that rank 0 receives. The shapes "
        "match, so nothing raises an error.",
    ),
    "forwards in another order, too": (
        forwards_in_that_order_too,
        "rank 1 runs the forward of microbatch 1 with the activation of microbatch 0. Messages are not labeled:",
    ),
    "backward on the activation": (
        passes_on,
        "the backward of microbatch 0 with the activation of microbatch 0 of stage 0, where it needs the gradient of "
        "microbatch 0 of stage 1",
    ),
    "forward on nothing": (lambda me, m: me.forward(0), "rank 1 runs the forward of microbatch 0 with None"),
    "a microbatch forgotten": (lambda me, m: naive(me, m - 1), "nothing hangs; still, rank 0: 0F1 is never run"),
    "runs nothing": (lambda me, m: None, "your loop runs nothing"),
    "sends nothing back": (
        sends_back_what_came,
        "rank 1 sends None; it receives no dy: send the result of its backward, dx.",
    ),
    "another operation": (lambda me, m: me.communicate("send"), "there is no operation 'send' here; there is:"),
    "itself": (lambda me, *_: me.swap(1, me.rank), "rank 0 waits for rank 0"),
    "endless": (endless, "rank 0 has made more than 10000 calls"),
}
WRONG["06.6"] = {
    "a star": (star, "with 4 ranks every rank gets the sum, but rank 0 sends 3 messages, and at most 2 are"),
    "only up": (
        only_up,
        "with 2 ranks, whose values are 1, 2, rank 0 returns 1, and the sum is 3. It knows the sum up to its own value",
    ),
    "all send first": (all_send_first, "with 2 ranks it deadlocks: at line"),
    "two ranks only": (swap_of_two, "with 3 ranks, whose values are 1, 2, 4, rank 0 returns 1, and the sum is"),
    "the real one": (lambda me, value: me.all_reduce(value), "calls all_reduce, and that is what you are to"),
    "no return": (lambda me, value: None, "rank 0 returns None instead of a number; is a return missing?"),
}


def test_a_gradient_that_came_with_a_swap_was_sent(refused):
    assert "not sent it" not in refused("06.1", receives_again, "All of them receive, and none sends.")


def ring_of_even_ranks_first(me, value):
    """Return a wrong sum with three ranks; with a single one, hang."""
    down, up = (me.rank + 1) % me.ranks, (me.rank - 1) % me.ranks
    if me.rank % 2 == 0:
        me.send(value, down)
        return value + me.recv(up)
    received = me.recv(up)
    me.send(value, down)
    return value + received


def test_the_steps_shown_are_those_of_the_run_that_the_reason_is_about(monkeypatch):
    shown = []
    monkeypatch.setattr(lesson_06, "has_page", lambda: True)
    monkeypatch.setattr(lesson_06, "publish", lambda bundle: shown.append(bundle["text/plain"]))
    for exercise, answer, ranks, end in [
        ("06.6", ring_of_even_ranks_first, 3, "All ranks have ended."),
        ("06.1", receives_first, 2, "Deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0."),
    ]:
        reason = find_fault(exercise, answer)
        lesson_06.EXERCISES[exercise].draw_wrong(answer, reason)
        assert f"with {ranks} ranks" in reason and end in shown[-1]
        assert all((f"ank {rank} " in shown[-1]) == (rank < ranks) for rank in range(4))


def test_an_error_in_the_learners_code_is_reported_with_its_line_and_rank(refused):
    line = receives_too_late.__code__.co_firstlineno + 4
    reason = (
        f"with 2 ranks and 2 microbatches, on rank 0, your function fails at line {line}, `me.forward(m, x)`: Unbou"
    )
    refused("06.1", receives_too_late, reason)
    reason = "with 2 ranks and a target of 2, on rank 1, your function fails at line"
    refused("06.3", lambda me, steps, target: 1 // (1 - me.rank), reason)


def test_a_sum_on_one_rank_is_not_called_no_sum(refused):
    assert "No rank asks" not in refused("06.3", sum_on_one, "A collective must be called by all ranks")


def test_exercises_can_be_imported_without_torch():
    program = "import sys, ppedu.notebook; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_patch_mixes_up_the_messages_of_zb_v_as_the_lesson_says():
    """Rank 1 needs a gradient first; rank 0 has sent an activation before it."""
    rank_0, rank_1 = lesson_06.patched("zb-v", 3).orders
    sent = " ".join(str(action) for action in rank_0 if "SEND" in str(action))
    received = " ".join(str(action) for action in rank_1 if "RECV" in str(action))
    assert sent == "0SEND_F0 0SEND_F1 0SEND_F2 3SEND_B0 3SEND_B1 3SEND_B2"
    assert received == "1RECV_F0 1RECV_F1 2RECV_B0 1RECV_F2 2RECV_B1 2RECV_B2"
    assert len(check(lesson_06.patched("zb-v", 3))) == 2


# Rehearsal, compared with real ranks and with the checker


def test_rehearsed_neighbors_are_those_of_communicate():
    assert {name: step for name, (_, step) in comm.ONE_WAY.items()} == ONE_WAY
    assert {name: step for name, (_, step) in comm.BOTH_WAYS.items()} == BOTH_WAYS


def both_send(me, _):
    me.send(1.0, 1 - me.rank)
    me.recv(1 - me.rank)


def one_adds_up(me, _):
    if me.rank == 0:
        me.all_reduce(1.0)
    if me.rank == 0:
        me.send(1.0, 1)
    else:
        me.recv(0)


PROGRAMS = [both_send, one_adds_up, sends_first, receives_before_it_sends, swaps, swaps_alone]

ON_REAL_RANKS = """
from datetime import timedelta
import torch, torch.distributed as dist
from ppedu.run import PipelineGroup, bidirectional_communicate, communicate

class Me:
    def __init__(self, group):
        self.rank, self.ranks, self.group = dist.get_rank(group), 2, group
        self.pipeline = PipelineGroup(self.rank, 2, group)

    def send(self, value, rank):
        dist.send(torch.ones(1), group=self.group, group_dst=rank)

    def recv(self, rank):
        dist.recv(torch.empty(1), group=self.group, group_src=rank)

    def all_reduce(self, value):
        dist.all_reduce(torch.ones(1), group=self.group)

    def communicate(self, operation, value=None):
        return communicate(operation, value, (1,), group=self.pipeline)

    def bidirectional_communicate(self, operation, value=None):
        return bidirectional_communicate(operation, value, (1,), group=self.pipeline)

    def forward(self, microbatch, x=None):
        return torch.ones(1)

    backward = forward

dist.init_process_group("gloo")
for program in PROGRAMS:
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier()
    try:
        program(Me(group), 3)
        print("ends")
    except RuntimeError:
        print("hangs")
"""


def test_a_program_hangs_in_rehearsal_exactly_if_it_hangs_on_real_ranks(ranks):
    """Compare with gloo, with a timeout of one second and single numbers as messages."""
    sources = [textwrap.dedent(inspect.getsource(program)) for program in (one_f_one_b, *PROGRAMS)]
    listed = f"PROGRAMS = {', '.join(program.__name__ for program in PROGRAMS)}\n"
    real = ranks("".join(sources) + listed + ON_REAL_RANKS, 2)
    hang = [bool(rehearse(lambda me, each=each: each(me, 3), 2).waits) for each in PROGRAMS]
    assert hang == [True, True, True, False, False, True]
    assert [text.split() for text in real] == [["hangs" if each else "ends" for each in hang]] * 2


@often(60)
@given(st.data())
def test_the_ranks_that_wait_in_rehearsal_are_those_that_the_checker_finds_blocked(data):
    """Compare on lowered orders in which adjacent messages of different kinds are swapped, so that some deadlock."""
    ranks, name = data.draw(st.integers(2, 4)), data.draw(st.sampled_from(["gpipe", "1f1b"]))
    legal = lower(schedule(name, ranks, data.draw(st.integers(1, 5))))
    orders = [list(order) for order in legal.orders]
    for order in orders:
        for place in range(1, len(order)):
            one, other = order[place - 1 : place + 1]
            if not (one.computes or other.computes or one.op == other.op) and data.draw(st.booleans()):
                order[place - 1 : place + 1] = other, one
    mixed = Schedule("mixed", legal.placement, legal.microbatches, tuple(map(tuple, orders)))
    names = {"SEND_F": "send_forward", "RECV_F": "recv_forward", "SEND_B": "send_backward", "RECV_B": "recv_backward"}

    def program(me):
        for action in mixed.orders[me.rank]:
            if not action.computes:
                me.communicate(names[action.op], 1)

    blocked = replay(mixed.numbered, rendezvous=True).blocked
    found = {wait.rank: (wait.doing, wait.peers) for wait in rehearse(program, ranks).waits}
    at = {rank: mixed.orders[rank][index] for rank, (index, _) in blocked.items()}
    assert found == {rank: (names[action.op], _peer(action, rank, mixed)) for rank, action in at.items()}


def _peer(action: Action, rank: int, mixed: Schedule) -> tuple[int, ...]:
    return tuple(each for each in mixed.placement.route(action) if each != rank)


def test_ranks_in_a_cycle_are_distinguished_from_ranks_that_wait_for_them():
    def four(me):
        """Ranks 1 and 2 wait for each other, 0 and 3 for them."""
        me.recv({0: 1, 1: 2, 2: 1, 3: 2}[me.rank])

    assert [(wait.rank, wait.peers) for wait in rehearse(four, 4).waits] == [(0, (1,)), (1, (2,)), (2, (1,)), (3, (2,))]
    with pytest.raises(SettingError, match="there is no rank 4"):
        rehearse(lambda me: me.swap(1, 4), 4)
