"""Rehearsals of endless loops: they end, and no thread keeps running."""

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
