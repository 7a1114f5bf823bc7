"""After a failure, an interrupt or the death of any process, no process and no file is left, and the next run works."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ppedu import RankError
from ppedu.launch import pool
from ppedu.launch.pool import RankPool

RUN = "pool.run(sys.argv[1], 2, write=write)"  # the source of an owner, see `start_owner`
GRANDCHILD = "import os, subprocess, sys; print(os.getpid(), subprocess.Popen(['sleep', '100']).pid, flush=True)\n"


@pytest.mark.parametrize(
    ("end", "timeout"), [("", 60), ("1 / 0", 60), ("os.kill(os.getpid(), 9)", 60), ("__import__('time').sleep(100)", 2)]
)
def test_processes_that_a_rank_has_started_end_with_it(ranks, gone, end, timeout):
    text = [b""] * 2

    def write(rank, piece):
        text[rank] += piece

    with contextlib.nullcontext() if not end else pytest.raises(RankError):
        ranks(GRANDCHILD + end, 2, timeout=timeout, each=write)
    processes = [int(number) for number in b"".join(text).split()]
    assert len(processes) == 4 and gone(processes)


def test_all_ranks_end_when_one_has_failed(ranks, gone):
    program = "import os, time; print(os.getpid(), flush=True); os.environ['RANK'] == '1' and 1 / 0; time.sleep(1000)"
    processes = []
    with pytest.raises(RankError, match="rank 1 failed"):
        ranks(program, 3, each=lambda rank, piece: processes.extend(map(int, piece.split())))
    assert len(processes) == 3 and gone(processes)


def test_an_interrupt_ends_all_ranks(ranks, gone):
    processes = []

    def write(rank, piece):
        processes.extend(map(int, piece.split()))
        if len(processes) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks(GRANDCHILD + "while True: pass", 2, each=write)
    assert gone(processes)
    assert ranks("print('well')", 2) == ["well\n"] * 2


def test_the_next_run_works_after_two_interrupts(ranks, light_pool):
    program = "import os, time; print(os.getppid(), flush=True); time.sleep(1000)"

    def write(rank, piece):
        server = int(piece)
        os.kill(server, signal.SIGSTOP)  # as on a busy machine, where ending the ranks takes a while
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        threading.Timer(0.6, os.kill, [server, signal.SIGCONT]).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks(program, 2, pool=light_pool, each=write)
    time.sleep(1)
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2


def test_no_process_outlives_an_interrupted_owner(start_owner, light, marked, gone):
    process, mark = start_owner(RUN, GRANDCHILD + "while True: pass", PYTHONPATH=light)
    ranks = {int(number) for _ in range(2) for number in process.stdout.readline().split()}  # and their children
    started = ranks | set(marked(mark))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert len(ranks) == 4 and len(started) == 7 and gone(started)  # with the owner, the launcher and the store


def test_no_process_outlives_a_killed_owner_with_unread_messages(start_owner, light, tmp_path, gone):
    program = f"""
import os, subprocess, time
rank = os.environ["RANK"]
print(rank, os.getpid(), subprocess.Popen(["sleep", "100"]).pid, flush=True)
while rank == "1" or not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
"""
    process, _ = start_owner(RUN, program, PYTHONPATH=light)
    lines = sorted([int(word) for word in process.stdout.readline().split()] for _ in range(2))
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    assert gone(lines[0][1:])  # rank 0 has ended, and its owner has not read the message
    process.kill()
    process.communicate(timeout=60)
    assert gone(lines[1][1:])


def test_no_process_outlives_an_owner_that_did_not_close_its_pool(start_owner, light, marked, gone):
    process, mark = start_owner(RUN, "print('started', flush=True)", PYTHONPATH=light)
    process.stdout.readline()
    started = marked(mark)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert started and gone(started)


def test_the_next_run_works_after_the_launcher_was_killed(ranks, light_pool, gone):
    server = int(ranks("import os; print(os.getppid())", 1, pool=light_pool)[0])
    os.kill(server, signal.SIGKILL)
    assert gone([server])
    with contextlib.suppress(RankError):  # the pool may notice only now
        ranks("print()", 1, pool=light_pool)
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2


def test_a_run_whose_launcher_is_killed_ends_with_advice(ranks, light_pool, tmp_path, gone):
    program = """
        import os, sys, time
        server = os.getppid()
        open(f"{sys.argv[1]}/{os.getpid()}", "x")
        if os.environ["RANK"] == "0":
            while len(os.listdir(sys.argv[1])) < 2: time.sleep(0.01)
            os.kill(server, 9)
        time.sleep(1000)
        """
    with pytest.raises(RankError, match="run the cell again"):
        ranks(program, 2, str(tmp_path), pool=light_pool)
    assert gone(int(path.name) for path in tmp_path.iterdir())
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2


def test_a_failed_run_leaves_no_open_file(ranks):
    ranks("print()", 4)
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    for program in ("1 / 0", "import time; time.sleep(100)"):
        with pytest.raises(RankError):
            ranks(program, 4, timeout=1)
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before


def test_close_ends_the_launcher(ranks, light_pool, gone):
    server = int(ranks("import os; print(os.getppid())", 1, pool=light_pool)[0])
    assert int(ranks("import os; print(os.getppid())", 1, pool=light_pool)[0]) == server
    light_pool.close()
    light_pool.close()
    assert gone([server])


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_the_next_run_works_after_an_interrupt_at_any_time(ranks, light_pool, times):
    ranks("print()", 4, pool=light_pool)
    for tenths in range(0, 40, 40 // times):
        interrupt = threading.Timer(tenths / 10_000, os.kill, [os.getpid(), signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            ranks("while True: pass", 4, pool=light_pool, timeout=20)
        assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2


@pytest.mark.parametrize("launcher", ["zygote", "torchrun"])
def test_processes_that_have_left_a_ranks_group_end_with_the_run(ranks, gone, light_pool, launcher):
    pool, text = light_pool if launcher == "zygote" else RankPool(launcher), []
    start = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    with pytest.raises(RankError, match="division by zero"):
        program = f"import subprocess\nprint({start}.pid, flush=True)\n1 / 0"
        ranks(program, 1, pool=pool, each=lambda rank, piece: text.append(piece))
    assert gone([int(b"".join(text))])
    pool.close()


STOP_THE_LAUNCHER = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getppid(), 19)\n"


def test_the_timeout_holds_if_a_rank_has_stopped_the_launcher(ranks, light_pool, monkeypatch):
    monkeypatch.setattr(pool, "KILL_TIMEOUT", 0.5)
    ranks("print()", 1, pool=light_pool)
    with pytest.raises(RankError) as caught:
        ranks(STOP_THE_LAUNCHER + "time.sleep(1000)", 2, timeout=1, pool=light_pool)
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2
    assert str(caught.value).splitlines() == [
        "the ranks were stopped because they had not ended after 1 s",
        "rank 0 did not answer",
        "rank 1 did not answer",
    ]


def test_an_interrupt_ends_the_run_if_a_rank_has_stopped_the_launcher(ranks, light_pool, monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "KILL_TIMEOUT", 0.5)

    def interrupt():
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    program = f"{STOP_THE_LAUNCHER}    open({str(tmp_path / 'here')!r}, 'w')\ntime.sleep(1000)"
    with pytest.raises(KeyboardInterrupt):
        ranks(program.replace(": os.kill", ":\n    os.kill"), 2, pool=light_pool)
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2


def test_no_process_outlives_a_killed_owner_if_a_rank_has_stopped_the_launcher(start_owner, light, leftovers):
    program = "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    program += STOP_THE_LAUNCHER + "print('stopped', flush=True)\ntime.sleep(1000)"
    process, mark = start_owner(RUN, program, PYTHONPATH=light)
    assert [process.stdout.readline() for _ in range(2)] == ["stopped\n"] * 2
    process.kill()
    process.communicate(timeout=60)
    assert leftovers(mark) == []


def test_a_run_may_begin_while_another_thread_stops_the_launcher(ranks, light_pool):
    ranks("print()", 1, pool=light_pool)
    thread = threading.Thread(target=light_pool.stop)
    thread.start()
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2
    thread.join()


@pytest.mark.parametrize(("times", "size"), [(8, 8), pytest.param(20, 16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks_end", [True, False])
def test_another_thread_can_stop_the_ranks_at_any_time(light_pool, tmp_path, ranks, ranks_end, times, size):
    program, errors, over = tmp_path / "program.py", [], threading.Event()
    program.write_text("pass" if ranks_end else "while True: pass")

    def stop():
        try:
            while not over.is_set():
                if light_pool.processes:
                    light_pool.stop()
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        for _ in range(times):
            with contextlib.suppress(RankError):
                light_pool.run(program, size, write=lambda rank, piece: None, timeout=60)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2
