"""A rehearsal of loops that do not end: it ends, and nothing runs on."""

import os
import signal
import threading
import time

import pytest

from ppedu.core.errors import SettingError
from ppedu.notebook import rehearsal
from ppedu.notebook.rehearsal import rehearse


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
    """What this process computes while nothing should."""
    before = time.process_time()
    time.sleep(0.3)
    return time.process_time() - before


@pytest.mark.parametrize("program", ENDLESS)
def test_a_loop_that_does_not_end_is_ended_and_told_with_its_line(monkeypatch, program):
    monkeypatch.setattr(rehearsal, "MOST_SECONDS", 0.3)
    with pytest.raises(SettingError, match=r"goes on and on at line \d+, (pass|while True:); does your loop"):
        rehearse(program, 2)
    assert seconds_of_computing() < 0.15


@pytest.mark.parametrize("program", ENDLESS)
def test_an_interrupt_ends_a_loop_that_does_not_end(program):
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        rehearse(program, 2)
    assert seconds_of_computing() < 0.15


def test_a_loop_that_catches_its_own_end_does_not_run_on():
    assert [wait.kind for wait in rehearse(receive_and_catch_everything, 1).waits] == ["receive"]
    assert seconds_of_computing() < 0.15


@pytest.mark.parametrize("ranks", [None, 0, -1, 2.5, "2", True, [2], 10**9])
def test_a_number_of_ranks_that_cannot_be_rehearsed_is_refused(ranks):
    with pytest.raises(SettingError, match=r"the number of ranks must|at most 1000 ranks"):
        rehearse(spin, ranks)


@pytest.mark.parametrize("program", [None, 3, "spin", [spin]])
def test_what_is_not_a_function_is_not_rehearsed(program):
    with pytest.raises(SettingError, match="give a function of one rank"):
        rehearse(program, 2)


def test_no_thread_is_left_of_ranks_that_wait_forever():
    before = threading.active_count()
    assert len(rehearse(lambda me: me.recv((me.rank + 1) % 8), 8).waits) == 8
    assert threading.active_count() == before
