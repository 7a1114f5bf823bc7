"""Rehearsals: endless loops end and leave no thread, and every rehearsal can be stepped through."""

import os
import re
import signal
import threading
import time

import pytest

from ppedu.core import SettingError
from ppedu.course import rehearsal
from ppedu.course.rehearsal import rehearse


def spin(me):
    while True:
        pass


def spin_beside_one_that_waits(me):
    if me.rank == 0:
        me.recv(1)
    spin(me)


def catch_everything(me):
    while True:
        try:  # noqa: SIM105
            spin(me)
        except BaseException:
            pass


def receive_and_catch_everything(me):
    while True:
        try:  # noqa: SIM105
            me.recv(0)
        except BaseException:
            pass


ENDLESS = [spin, spin_beside_one_that_waits, catch_everything]


def seconds_of_computing():
    """Return the processor time that this process uses while it should be idle."""
    before = time.process_time()
    time.sleep(0.3)
    return time.process_time() - before


@pytest.mark.parametrize("program", ENDLESS)
def test_an_endless_loop_is_ended_and_reported_with_its_line(monkeypatch, program):
    monkeypatch.setattr(rehearsal, "TIMEOUT", 0.3)
    with pytest.raises(
        SettingError, match=r"still running after 0.3 s at line \d+, (pass|while True:); does your loop"
    ):
        rehearse(program, 2)
    assert seconds_of_computing() < 0.15


@pytest.mark.parametrize("program", ENDLESS)
def test_an_interrupt_ends_an_endless_loop(program):
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        rehearse(program, 2)
    assert seconds_of_computing() < 0.15


def test_an_interrupt_while_a_thread_starts_ends_it(monkeypatch):
    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    ran = []
    with pytest.raises(KeyboardInterrupt):
        rehearse(ran.append, 2)
    assert ran == [] and seconds_of_computing() < 0.15


def test_a_rank_that_catches_every_exception_does_not_keep_running():
    assert [wait.kind for wait in rehearse(receive_and_catch_everything, 1).waits] == ["receive"]
    assert seconds_of_computing() < 0.15


@pytest.mark.parametrize("ranks", [None, 0, -1, 2.5, "2", True, [2], 10**9])
def test_an_invalid_number_of_ranks_is_refused(ranks):
    with pytest.raises(SettingError, match=r"the number of ranks must|at most 1000 ranks"):
        rehearse(spin, ranks)


@pytest.mark.parametrize("program", [None, 3, "spin", [spin]])
def test_a_program_that_is_not_a_function_is_refused(program):
    with pytest.raises(SettingError, match="program must be a function of one rank"):
        rehearse(program, 2)


def test_a_deadlock_leaves_no_thread():
    before = threading.active_count()
    assert len(rehearse(lambda me: me.recv((me.rank + 1) % 8), 8).waits) == 8
    assert threading.active_count() == before


# Step by step


def in_turn(me):
    if me.rank == 0:
        me.send("a tensor", 1)
    else:
        me.recv(0)


def both_receive(me):
    me.recv(1 - me.rank)


def a_sum(me):
    me.all_reduce(1)


STEPS = {
    in_turn: """\
  1  Rank 0 calls send(1) and waits for rank 1.
  2  Rank 1 calls recv(0), and rank 0 is in send(1): the message arrives, and both continue.
  3  Rank 1 ends.
  4  Rank 0 ends.
     All ranks have ended.""",
    both_receive: """\
  1  Rank 0 calls recv(1) and waits for rank 1.
  2  Rank 1 calls recv(0) and waits for rank 0.
     Deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0.""",
    a_sum: """\
  1  Rank 0 calls all_reduce and waits for the other ranks.
  2  Rank 1 calls all_reduce, as the last of all ranks. They get the sum and continue.
  3  Rank 0 ends.
  4  Rank 1 ends.
     All ranks have ended.""",
}


@pytest.mark.parametrize("program", STEPS)
def test_a_rehearsal_is_displayed_as_its_steps(program):
    assert repr(rehearse(program, 2)) == STEPS[program]


def test_a_rank_that_waits_for_an_ended_one_is_stuck():
    rehearsal = rehearse(lambda me: me.recv(0) if me.rank else None, 2)
    assert repr(rehearsal).endswith("Stuck: rank 1 waits for rank 0, which will not answer anymore.")


def test_the_last_step_shows_the_program_with_the_ranks_beside_their_lines():
    def victim(me):
        me.recv({0: 1, 1: 0, 2: 0}[me.rank])

    page = rehearse(victim, 3)._repr_mimebundle_()[0]["text/html"]
    [line] = [part for part in page.split("</div>") if "me.recv({" in part]
    assert [re.search(f"#(.{{6}});'>{rank}<", line)[1] for rank in range(3)] == ["c0392b", "c0392b", "c2701c"]
    assert "Step 4 of 4.</b> Deadlock: rank 0 waits" in page
    assert "waits in recv(0) for rank 0 (a victim: outside the cycle)" in page
    assert "<li>Rank 2 calls recv(0) and waits for rank 0.</li>" in page


def test_only_the_first_moments_of_a_long_rehearsal_are_kept(monkeypatch):
    monkeypatch.setattr(rehearsal, "MAX_MOMENTS", 3)

    def long(me):
        for _ in range(10):
            in_turn(me)

    assert len(rehearse(long, 2).moments) == 3
