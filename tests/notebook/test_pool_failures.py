"""Ranks that end badly: the first cause is told, no process is left, and the next run works."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest

from ppedu import PipelineError, RankError, SettingError
from ppedu.notebook import pool
from ppedu.notebook.pool import RankPool

MEET = """
import os, signal, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.zeros(1)
"""


def failure(ranks, program, n, **options):
    with pytest.raises(RankError) as caught:
        ranks(program, n, **options)
    assert ranks("print('well')", 2, **{**options, "timeout": 60}) == ["well\n"] * 2, "the next run does not work"
    return str(caught.value)


def line(program, text):
    return next(number for number, line in enumerate(program.splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def spare():
    """A pool that tests may harm."""
    pool = RankPool()
    pool.start()
    yield pool
    pool.close()


# What the message says


def test_the_rank_that_failed_is_named_with_its_own_line(ranks):
    program = """
def share(parts):
    return 10 / parts

if rank == 2:
    share(0)  # nobody to share with
dist.barrier()
"""
    message = failure(ranks, MEET + program, 3)
    assert message.startswith("rank 2 failed:\nTraceback (most recent call last):\n")
    program = MEET + program
    assert f"line {line(program, 'share(0)')}, in <module>\n    share(0)  # nobody to share with\n" in message
    assert f"line {line(program, 'return')}, in share\n    return 10 / parts\n" in message
    assert "ZeroDivisionError: division by zero" in message


def test_the_peers_of_a_failed_rank_do_not_fill_the_message(ranks):
    message = failure(ranks, MEET + "if rank == 2: raise ValueError('mine')\ndist.barrier()", 3)
    assert message.count("Traceback") == 1 and "Connection" not in message


def test_ranks_that_are_left_alone_are_told_who_has_ended(ranks):
    message = failure(ranks, MEET + "if rank != 1: dist.barrier()", 3)
    assert re.match(r"rank [02] failed: rank 1 had ended, nobody was there to answer\nTraceback", message)


def test_of_several_failures_the_first_is_told_and_the_others_named(ranks):
    program = """
        import os, time
        rank = int(os.environ["RANK"])
        time.sleep(0 if rank == 1 else 0.2)
        raise ValueError(f"from {rank}")
        """
    message = failure(ranks, program, 3)
    assert message.startswith("rank 1 failed") and message.count("Traceback") == 1
    assert "ValueError: from 1" in message and message.endswith("(then also ranks 0, 2)")


def test_the_message_shows_nothing_of_the_pool(ranks):
    assert failure(ranks, "raise ValueError(5)", 1) == (
        'rank 0 failed:\nTraceback (most recent call last):\n  File "program", line 1, in <module>\n'
        "    raise ValueError(5)\nValueError: 5"
    )


def test_an_error_of_ours_is_told_without_our_own_lines(ranks):
    message = failure(ranks, "from ppedu.run import communicate\ncommunicate('recv_fwd')", 1)
    assert "line 2, in <module>\n    communicate('recv_fwd')\n" in message
    assert "SettingError: unknown operation 'recv_fwd'" in message and "comm.py" not in message


def test_the_cause_of_an_error_is_told_too(ranks):
    program = "try:\n    {}['size']\nexcept KeyError as error:\n    raise ValueError('no size') from error"
    message = failure(ranks, program, 1)
    assert "KeyError: 'size'" in message and "direct cause" in message and "ValueError: no size" in message


def test_a_program_that_is_not_python_is_told_with_its_line(ranks):
    message = failure(ranks, "print('never')\nif True print()", 2)
    assert "line 2\n    if True print()\n" in message and "SyntaxError" in message


@pytest.mark.parametrize("stop", ["sys.exit()", "sys.exit(0)", "sys.exit(None)", "raise SystemExit", "os._exit(0)"])
def test_a_rank_may_leave_early(ranks, stop):
    ranks(f"import os, sys; {stop}; print('never')", 2)


@pytest.mark.parametrize(
    ("stop", "code"), [("sys.exit(3)", 3), ("os._exit(4)", 4), ("sys.exit('no data')", 1), ("sys.exit(-1)", 255)]
)
def test_an_exit_code_is_told(ranks, stop, code):
    message = failure(ranks, f"import os, sys\nif os.environ['RANK'] == '1': {stop}", 2)
    assert message == f"rank 1 ended with exit code {code}"


def test_what_a_rank_says_when_it_exits_is_shown(rank_pool, tmp_path):
    (tmp_path / "program.py").write_text("import sys; sys.exit('no data')")
    pieces = []
    with pytest.raises(RankError):
        rank_pool.run(str(tmp_path / "program.py"), 1, write=lambda rank, piece: pieces.append(piece))
    assert b"".join(pieces) == b"no data\n"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"])
def test_a_rank_that_was_killed_is_named_with_its_signal(ranks, name):
    program = f"{MEET}\nif rank == 1: os.kill(os.getpid(), signal.{name})\ndist.barrier()  # without it"
    message = failure(ranks, program, 2)
    assert message.splitlines()[:2] == [
        f"rank 1 was killed by {name}",
        f"rank 0 missed it at line {line(program, 'without it')}: dist.barrier()  # without it",
    ]


def test_a_signal_without_a_name_has_its_number(ranks):
    message = failure(ranks, "import os; os.kill(os.getpid(), 40)", 1)
    assert message.startswith("rank 0 was killed by ") and "40" in message


def test_a_rank_that_was_killed_comes_before_what_others_say_of_it_later(ranks):
    program = """
        import os, time
        if os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
        time.sleep(0.5)
        raise RuntimeError("where is rank 1?")
        """
    message = failure(ranks, program, 2)
    assert message.splitlines()[0] == "rank 1 was killed by SIGKILL"


def test_a_segmentation_fault_is_named(ranks):
    message = failure(ranks, f"{MEET}\nif rank == 1: __import__('ctypes').string_at(0)\ndist.barrier()", 2)
    assert message.splitlines()[0] == "rank 1 was killed by SIGSEGV"


@pytest.mark.parametrize(
    ("end", "told"), [("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"), ("os._exit(3)", "exit code 3")]
)
def test_the_first_to_end_is_named_even_if_all_have_ended_when_it_is_heard_of(ranks, spare, end, told):
    # As on a machine too busy to say so at once: what reaps the ranks stands still until all of them have ended.
    program = f"""
if rank == 1:
    os.kill(os.getppid(), signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {{os.getppid()}}"], start_new_session=True)
    {end}
dist.recv(x, src=1)
"""
    message = failure(ranks, MEET + program, 2, pool=spare)
    assert message.startswith("rank 1 ") and told in message.splitlines()[0]


# Time


def test_ranks_that_wait_for_each_other_are_told_with_the_line_each_is_at(ranks):
    program = """
if rank == 0:
    dist.recv(x, src=1)
else:
    dist.recv(x, src=0)  # for ever
"""
    message = failure(ranks, MEET + program, 2, timeout=4)
    assert message.splitlines()[0] == "the ranks were stopped, because they had not ended after 4 s"
    program = MEET + program
    assert message.splitlines()[1:] == [
        f"rank 0 waits in recv(src=1) at line {line(program, 'src=1')}: dist.recv(x, src=1)",
        f"rank 1 waits in recv(src=0) at line {line(program, 'src=0')}: dist.recv(x, src=0)  # for ever",
        "rank 0 waits for rank 1, and rank 1 waits for rank 0: all receive, nobody sends",
    ]


def test_a_rank_that_computes_for_ever_is_told_with_the_innermost_line(ranks):
    message = failure(ranks, "def spin():\n    while True: pass\nspin()", 1, timeout=1)
    assert message.splitlines()[1] == "rank 0 is at line 2: while True: pass"


def test_ranks_that_have_ended_are_not_said_to_wait(ranks):
    message = failure(ranks, "import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)", 3, timeout=2)
    assert [line[:6] for line in message.splitlines()[1:]] == ["rank 1"]


def test_endless_output_does_not_outlast_the_timeout(rank_pool, tmp_path):
    (tmp_path / "program.py").write_text("while True: print('x' * 1000)")
    pieces = []
    with pytest.raises(RankError, match="had not ended after 1 s"):
        rank_pool.run(str(tmp_path / "program.py"), 2, timeout=1, write=lambda rank, piece: pieces.append(len(piece)))
    assert sum(pieces) > 100_000


@pytest.mark.parametrize("timeout", [1e-6, 0.01])
def test_a_timeout_may_be_shorter_than_a_start(ranks, timeout):
    assert f"had not ended after {timeout:g} s" in failure(ranks, "while True: pass", 4, timeout=timeout)


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e9])
def test_a_timeout_may_be_no_limit(ranks, timeout):
    assert ranks("print('well')", 2, timeout=timeout) == ["well\n"] * 2


# What is left


GRANDCHILD = "import os, subprocess, sys; print(os.getpid(), subprocess.Popen(['sleep', '100']).pid, flush=True)\n"


@pytest.mark.parametrize(
    ("end", "timeout"), [("", 60), ("1 / 0", 60), ("os.kill(os.getpid(), 9)", 60), ("while True: pass", 2)]
)
def test_what_a_rank_has_started_ends_with_it(rank_pool, tmp_path, gone, end, timeout):
    (tmp_path / "program.py").write_text(GRANDCHILD + end)
    text = [b""] * 2

    def write(rank, piece):
        text[rank] += piece

    with contextlib.nullcontext() if not end else pytest.raises(RankError):
        rank_pool.run(str(tmp_path / "program.py"), 2, timeout=timeout, write=write)
    processes = [int(number) for number in b"".join(text).split()]
    assert len(processes) == 4 and gone(processes)


def test_the_other_ranks_end_when_one_has_failed(ranks, rank_pool, tmp_path, gone):
    (tmp_path / "program.py").write_text(
        "import os, time; print(os.getpid(), flush=True); os.environ['RANK'] == '1' and 1 / 0; time.sleep(1000)"
    )
    processes = []
    with pytest.raises(RankError, match="rank 1 failed"):
        rank_pool.run(
            str(tmp_path / "program.py"), 3, write=lambda rank, piece: processes.extend(map(int, piece.split()))
        )
    assert len(processes) == 3 and gone(processes)


def test_an_interrupt_while_output_is_shown_leaves_no_rank(ranks, rank_pool, tmp_path, gone):
    (tmp_path / "program.py").write_text(GRANDCHILD + "while True: pass")
    processes = []

    def write(rank, piece):
        processes.extend(map(int, piece.split()))
        if len(processes) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rank_pool.run(str(tmp_path / "program.py"), 2, timeout=60, write=write)
    assert gone(processes)
    assert ranks("print('well')", 2) == ["well\n"] * 2


def test_a_second_interrupt_does_not_spoil_the_next_run(ranks, spare, tmp_path):
    (tmp_path / "program.py").write_text("import os, time; print(os.getppid(), flush=True); time.sleep(1000)")

    def write(rank, piece):
        server = int(piece)
        os.kill(server, signal.SIGSTOP)  # a busy machine: the ranks' end takes its time, and somebody is impatient
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        threading.Timer(0.6, os.kill, [server, signal.SIGCONT]).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spare.run(str(tmp_path / "program.py"), 2, timeout=60, write=write)
    time.sleep(1)
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


OWNER = """
import sys
from ppedu.notebook.pool import RankPool
pool = RankPool()
pool.run(sys.argv[1], 2, write=lambda rank, piece: (sys.stdout.buffer.write(piece), sys.stdout.flush()))
"""


def owner(tmp_path, program):
    """A process that has a pool, in which the program runs on 2 ranks; and a mark that all its processes carry."""
    mark = uuid.uuid4().hex
    (tmp_path / "program.py").write_text(program)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), tmp_path / "program.py"],
        env=os.environ | {"PPEDU_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return process, mark


def test_nothing_outlives_an_owner_that_was_interrupted(tmp_path, marked, gone):
    process, mark = owner(tmp_path, GRANDCHILD + "while True: pass")
    ranks = {int(number) for _ in range(2) for number in process.stdout.readline().split()}  # and their children
    started = ranks | set(marked(mark))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert len(ranks) == 4 and len(started) == 7 and gone(started)  # also the server, and the store


def test_nothing_outlives_an_owner_that_was_killed_with_news_unread(tmp_path, gone):
    program = f"""
import os, subprocess, time
rank = os.environ["RANK"]
print(rank, os.getpid(), subprocess.Popen(["sleep", "100"]).pid, flush=True)
while rank == "1" or not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
"""
    process, _ = owner(tmp_path, program)
    lines = sorted([int(word) for word in process.stdout.readline().split()] for _ in range(2))
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    assert gone(lines[0][1:])  # rank 0 has ended, and its owner has not read so
    process.kill()
    process.communicate(timeout=60)
    assert gone(lines[1][1:])


def test_nothing_outlives_a_pool_that_nobody_has_closed(tmp_path, marked, gone):
    process, mark = owner(tmp_path, "print('started', flush=True)")
    process.stdout.readline()
    started = marked(mark)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert started and gone(started)


def test_after_the_death_of_what_ranks_are_forked_from_the_next_run_works(ranks, spare, gone):
    server = int(ranks("import os; print(os.getppid())", 1, pool=spare)[0])
    os.kill(server, signal.SIGKILL)
    if not gone([server]):
        pytest.fail("it has survived SIGKILL")
    with contextlib.suppress(RankError):  # which may say to run it again
        ranks("print()", 1, pool=spare)
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


def test_the_death_of_what_ranks_are_forked_from_ends_the_run_with_advice(ranks, spare, tmp_path, gone):
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
        ranks(program, 2, str(tmp_path), pool=spare)
    assert gone(int(path.name) for path in tmp_path.iterdir())
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


def test_a_failed_run_leaves_no_open_file_here(ranks):
    ranks("print()", 4)
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    for program in ("1 / 0", "while True: pass"):
        with pytest.raises(RankError):
            ranks(program, 4, timeout=1)
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), "soon"])
def test_a_timeout_that_is_no_time_is_refused_before_anything_starts(ranks, spare, timeout):
    with pytest.raises(SettingError, match="timeout must"):
        ranks("print('never')", 1, timeout=timeout, pool=spare)


def test_closing_a_pool_ends_what_ranks_are_forked_from(ranks, spare, gone):
    server = int(ranks("import os; print(os.getppid())", 1, pool=spare)[0])
    assert int(ranks("import os; print(os.getppid())", 1, pool=spare)[0]) == server
    spare.close()
    spare.close()
    assert gone([server])


def test_an_interrupt_at_any_time_does_not_spoil_the_next_run(ranks, spare):
    ranks("print()", 4, pool=spare)
    for tenths in range(0, 40, 4):
        interrupt = threading.Timer(tenths / 10_000, os.kill, [os.getpid(), signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            ranks("while True: pass", 4, pool=spare, timeout=20)
        assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


def test_two_threads_cannot_run_ranks_in_one_pool(ranks, spare, tmp_path):
    found = []

    def other():
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        with pytest.raises(SettingError) as caught:
            ranks("print('never')", 1, pool=spare)
        found.append(str(caught.value))
        spare.stop()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        ranks(f"open({str(tmp_path / 'here')!r}, 'w'); import time; time.sleep(1000)", 2, pool=spare)
    thread.join()
    assert "other ranks run already" in found[0]
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


@pytest.mark.parametrize("launcher", ["zygote", "torchrun"])
def test_what_left_a_ranks_group_ends_with_the_run_too(tmp_path, gone, launcher):
    pool, text = RankPool(launcher), []
    (tmp_path / "program.py").write_text(
        "import subprocess\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True)\n1 / 0"
    )
    with pytest.raises(RankError, match="division by zero"):
        pool.run(str(tmp_path / "program.py"), 1, timeout=60, write=lambda rank, piece: text.append(piece))
    assert gone([int(b"".join(text))])
    pool.close()


# Its beginning, and its worst moments


def begun(tmp_path, source, **environment):
    """A process that runs this source, in which `pool` is one, and a mark that all its processes carry."""
    mark = uuid.uuid4().hex
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{BEGIN}\n{textwrap.dedent(source)}", tmp_path / "program.py"],
        env=os.environ | {"PPEDU_TEST": mark, "TMPDIR": str(tmp_path / "temporary")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, mark


BEGIN = """
import os, sys, time
from pathlib import Path
from ppedu.notebook.exchange import new_folder
from ppedu.notebook.pool import RankPool
pool = RankPool(os.environ.get("LAUNCHER", "zygote"))
def write(rank, piece): sys.stdout.buffer.write(piece), sys.stdout.flush()
"""


def before_others(folder):
    """The PYTHONPATH by which modules in `folder` are found first."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def left(tmp_path, marked, mark):
    """What is there some seconds later: processes, and folders of runs."""

    def now():
        folders = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("ppedu-")]
        return [*marked(mark), *folders]

    end = time.monotonic() + 20
    while now() and time.monotonic() < end:
        time.sleep(0.05)
    return now()


@pytest.mark.parametrize("slow", [False, True])
def test_an_interrupt_while_torch_is_imported_is_obeyed_at_once(tmp_path, marked, slow):
    if slow:
        (tmp_path / "torch.py").write_text("import time; time.sleep(1000)")
    source = """
        print("begun", flush=True)
        try: pool.run(sys.argv[1], 2, write=write)
        finally: pool.close()
        """
    process, mark = begun(tmp_path, source, PYTHONPATH=before_others(tmp_path))
    process.stdout.readline()
    time.sleep(0.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and time.monotonic() - begin < 4
    assert "BrokenPipe" not in said and said.count("Traceback") == 1
    assert left(tmp_path, marked, mark) == []


@pytest.mark.parametrize("launcher", ["zygote", "torchrun"])
def test_what_has_lost_its_owner_while_it_began_ends_without_a_word(tmp_path, marked, launcher):
    process, mark = begun(tmp_path, "pool.start(); os.kill(os.getpid(), 9)", LAUNCHER=launcher)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGKILL, "")
    assert left(tmp_path, marked, mark) == []


@pytest.mark.parametrize("told", [False, True])
def test_what_is_killed_while_torch_is_imported_is_told_as_killed(ranks, spare, tmp_path, told):
    spare.close()
    spare.start()
    if told:  # something that it never reads
        spare.make(tmp_path / "folder")
    os.kill(spare.server, signal.SIGKILL)
    with pytest.raises(PipelineError, match="the process for it was killed by SIGKILL; run it again"):
        spare._wait_until_ready()
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


def test_without_torch_one_sentence_tells_what_to_install(tmp_path, marked):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    source = """
        folder = new_folder()
        try:
            pool.make(folder)
            pool.run(sys.argv[1], 2, write=write, folder=folder)
        except Exception as error: print(error)
        folder.rmdir()
        """
    process, mark = begun(tmp_path, source, PYTHONPATH=before_others(tmp_path))
    printed, said = process.communicate(timeout=60)
    reason = "importing torch failed, ModuleNotFoundError: No module named 'torch'; pip install 'ppedu[run]'"
    assert (printed, said) == (f"ranks cannot be started: {reason}\n", "")
    assert left(tmp_path, marked, mark) == []


@pytest.mark.parametrize("launcher", ["zygote", "torchrun"])
@pytest.mark.parametrize("ready", [False, True])
def test_no_folder_outlives_an_owner_that_was_killed_before_its_ranks_began(tmp_path, marked, ready, launcher):
    source = f"""
        {ready} and (pool.start(), pool._wait_until_ready())
        folder = new_folder()
        pool.make(folder)
        (folder / "cell.py").touch()
        print(folder.exists(), flush=True)
        os.kill(os.getpid(), 9)
        """
    process, mark = begun(tmp_path, source, LAUNCHER=launcher)
    assert process.communicate(timeout=60)[0] == "True\n"
    assert left(tmp_path, marked, mark) == []


@pytest.mark.parametrize("launcher", ["zygote", "torchrun"])
def test_the_environment_is_in_no_file(tmp_path, marked, launcher):
    (tmp_path / "program.py").write_text("""
import os, tempfile
from pathlib import Path
files = [file for file in Path(tempfile.gettempdir()).rglob("*") if file.is_file()]
print(len(files) > 0, [file.name for file in files if os.environ["PASSWORD"].encode() in file.read_bytes()])""")
    source = "pool.run(sys.argv[1], 1, write=write); pool.close()"
    process, mark = begun(tmp_path, source, PASSWORD=uuid.uuid4().hex, LAUNCHER=launcher)
    assert process.communicate(timeout=60)[0] == "True []\n"
    assert left(tmp_path, marked, mark) == []


STOP_WHAT_STARTS_RANKS = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getppid(), 19)\n"


def test_a_timeout_holds_even_if_what_starts_ranks_has_been_stopped(ranks, spare, monkeypatch):
    monkeypatch.setattr(pool, "PATIENCE", 0.5)
    ranks("print()", 1, pool=spare)
    message = failure(ranks, STOP_WHAT_STARTS_RANKS + "time.sleep(1000)", 2, timeout=1, pool=spare)
    assert message.splitlines() == [
        "the ranks were stopped, because they had not ended after 1 s",
        "rank 0 did not answer",
        "rank 1 did not answer",
    ]


def test_an_interrupt_is_obeyed_even_if_what_starts_ranks_has_been_stopped(ranks, spare, monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "PATIENCE", 0.5)

    def interrupt():
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    program = f"{STOP_WHAT_STARTS_RANKS}    open({str(tmp_path / 'here')!r}, 'w')\ntime.sleep(1000)"
    with pytest.raises(KeyboardInterrupt):
        ranks(program.replace(": os.kill", ":\n    os.kill"), 2, pool=spare)
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


def test_nothing_outlives_an_owner_if_what_starts_ranks_has_been_stopped(tmp_path, marked):
    (tmp_path / "program.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        + STOP_WHAT_STARTS_RANKS
        + "print('stopped', flush=True)\ntime.sleep(1000)"
    )
    process, mark = begun(tmp_path, "pool.run(sys.argv[1], 2, write=write)")
    assert [process.stdout.readline() for _ in range(2)] == ["stopped\n"] * 2
    process.kill()
    process.communicate(timeout=60)
    assert left(tmp_path, marked, mark) == []


def test_a_rank_that_has_been_stopped_did_not_answer(ranks):
    program = MEET + "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ndist.recv(x, src=1)"
    assert failure(ranks, program, 2, timeout=4).splitlines()[1:] == [
        f"rank 0 waits in recv(src=1) at line {line(program, 'src=1')}: dist.recv(x, src=1)",
        "rank 1 did not answer",
        "rank 0 waits for rank 1, which did not answer",
    ]


DAMAGED = ["garbage", "[]", "{}", "\xff", '{"rank": 1}', '{"time": 1, "text": 5}', "[" * 100_000]


DAMAGE = f"""
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
def damage(name):
    (folder / f"{{rank}}.{{name}}").write_text({DAMAGED}[rank], encoding="latin-1")
"""


def test_a_damaged_report_of_where_a_rank_is_is_left_out(ranks):
    program = f"{DAMAGE}\ndamage('place')\nos.kill(os.getpid(), signal.SIGSTOP)"
    message = failure(ranks, program, len(DAMAGED), timeout=3)
    assert message.splitlines()[1:] == [f"rank {rank} did not answer" for rank in range(len(DAMAGED))]


def test_a_damaged_report_of_why_a_rank_failed_is_left_out(ranks):
    for failing in range(len(DAMAGED)):
        message = failure(ranks, f"{DAMAGE}\nif rank == {failing}:\n    damage('json')\n    sys.exit(3)", len(DAMAGED))
        assert message == f"rank {failing} ended with exit code 3"


@pytest.mark.parametrize("code", [10**30, -(10**30), 2**32 + 7, 2**63, 256 + 3, -2, True])
def test_any_exit_code_is_what_python_makes_of_it(rank_pool, tmp_path, code):
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.exit({code})")
    expected, pieces = subprocess.run([sys.executable, program]).returncode, []
    with pytest.raises(RankError) as caught:
        rank_pool.run(program, 1, write=lambda rank, piece: pieces.append(piece), timeout=60)
    assert str(caught.value) == f"rank 0 ended with exit code {expected}" and pieces == [b""]


@pytest.mark.parametrize("ranks_end", [True, False])
def test_ranks_can_be_stopped_by_another_thread_at_any_time(spare, tmp_path, ranks, ranks_end):
    program, errors, over = tmp_path / "program.py", [], threading.Event()
    program.write_text("pass" if ranks_end else "while True: pass")

    def stop():
        try:
            while not over.is_set():
                if spare.processes:
                    spare.stop()
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        for _ in range(10):
            with contextlib.suppress(RankError):
                spare.run(program, 16, write=lambda rank, piece: None, timeout=60)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


def test_what_has_not_begun_can_be_stopped_by_another_thread(spare, tmp_path, ranks):
    (tmp_path / "program.py").write_text("import time; time.sleep(1000)")
    spare.close()
    timer = threading.Timer(0.3, spare.stop)
    timer.start()
    with pytest.raises(PipelineError, match="was killed by SIGKILL; run it again"):
        spare.run(tmp_path / "program.py", 2, write=lambda rank, piece: None, timeout=60)
    timer.join()
    assert ranks("print('well')", 2, pool=spare) == ["well\n"] * 2


@pytest.mark.parametrize("launcher", [None, 3, [], "", "wat", {}])
def test_a_launcher_that_does_not_exist_is_refused(launcher):
    with pytest.raises(SettingError, match="there is no launcher"):
        RankPool(launcher)


NONSENSE = [None, 3, "text", b"bytes", [1], {"a": 1}, object(), 2.5, float("nan"), True, ["x", None], "\ud800"]
WELL = {  # of each argument, what is no nonsense here
    "program": ("text", "\ud800"),
    "ranks": (3,),
    "arguments": (),
    "timeout": (None, 3, 2.5),
    "flags": (),
    "folder": (None,),
    "environment": (None,),
    "write": (),
}


@pytest.mark.parametrize("name", WELL)
def test_an_argument_of_a_wrong_type_is_refused_before_anything_starts(tmp_path, name):
    fresh = RankPool()
    for value in NONSENSE:
        if not any(value is each for each in WELL[name]):
            given = {"program": "x.py", "ranks": 1, "write": print, name: value}
            with pytest.raises(SettingError, match=f"{name}|the number of ranks"):
                fresh.run(**given)
    assert fresh.server is None
