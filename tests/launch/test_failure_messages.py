"""Error messages of failed, killed and hanging ranks. After each failure, the next run works."""

import re
import subprocess
import sys

import pytest

from ppedu import RankError
from ppedu.launch.pool import RankPool

MEET = """
import os, signal, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.zeros(1)
"""


def failure(ranks, program, n, **options):
    """Run a program that fails, then one that does not, and return the error message."""
    with pytest.raises(RankError) as caught:
        ranks(program, n, **options)
    assert ranks("print('well')", 2, **{**options, "timeout": 60}) == ["well\n"] * 2, "the next run does not work"
    return str(caught.value)


def line(program, text):
    """Return the number of the first line that contains `text`."""
    return next(number for number, line in enumerate(program.splitlines(), 1) if text in line)


def test_a_failed_rank_is_reported_with_its_traceback(ranks):
    program = """
def share(parts):
    return 10 / parts

if rank == 2:
    share(0)  # no part to share
dist.barrier()
"""
    message = failure(ranks, MEET + program, 3)
    assert message.startswith("rank 2 failed:\nTraceback (most recent call last):\n")
    program = MEET + program
    assert f"line {line(program, 'share(0)')}, in <module>\n    share(0)  # no part to share\n" in message
    assert f"line {line(program, 'return')}, in share\n    return 10 / parts\n" in message
    assert "ZeroDivisionError: division by zero" in message


def test_errors_caused_by_a_dead_peer_are_not_reported(ranks):
    message = failure(ranks, MEET + "if rank == 2: raise ValueError('mine')\ndist.barrier()", 3)
    assert message.count("Traceback") == 1 and "Connection" not in message


def test_a_rank_that_fails_because_its_peer_has_ended_names_the_peer(ranks):
    message = failure(ranks, MEET + "if rank != 1: dist.barrier()", 3)
    assert re.match(r"rank [02] failed because rank 1 had already ended:\nTraceback", message)


def test_the_first_of_several_failures_is_reported_and_the_others_are_named(ranks):
    program = """
        import os, time
        rank = int(os.environ["RANK"])
        time.sleep(0 if rank == 1 else 0.2)
        raise ValueError(f"from {rank}")
        """
    message = failure(ranks, program, 3)
    assert message.startswith("rank 1 failed") and message.count("Traceback") == 1
    assert "ValueError: from 1" in message and message.endswith("(ranks 0, 2 failed afterwards)")


def test_the_traceback_has_no_frame_of_the_pool(ranks):
    assert failure(ranks, "raise ValueError(5)", 1) == (
        'rank 0 failed:\nTraceback (most recent call last):\n  File "program", line 1, in <module>\n'
        "    raise ValueError(5)\nValueError: 5"
    )


def test_an_error_of_ppedu_has_no_frame_of_ppedu(ranks):
    message = failure(ranks, "from ppedu.run import communicate\ncommunicate('recv_fwd')", 1)
    assert "line 2, in <module>\n    communicate('recv_fwd')\n" in message
    assert "SettingError: unknown operation 'recv_fwd'" in message and "comm.py" not in message


def test_the_cause_of_an_exception_is_reported(ranks):
    program = "try:\n    {}['size']\nexcept KeyError as error:\n    raise ValueError('no size') from error"
    message = failure(ranks, program, 1)
    assert "KeyError: 'size'" in message and "direct cause" in message and "ValueError: no size" in message


def test_a_syntax_error_is_reported_with_its_line(ranks):
    message = failure(ranks, "print('never')\nif True print()", 2)
    assert "line 2\n    if True print()\n" in message and "SyntaxError" in message


@pytest.mark.parametrize("stop", ["sys.exit()", "sys.exit(0)", "sys.exit(None)", "raise SystemExit", "os._exit(0)"])
def test_exiting_with_code_zero_is_not_a_failure(ranks, stop):
    ranks(f"import os, sys; {stop}; print('never')", 2)


@pytest.mark.parametrize(
    ("stop", "code"), [("sys.exit(3)", 3), ("os._exit(4)", 4), ("sys.exit('no data')", 1), ("sys.exit(-1)", 255)]
)
def test_an_exit_code_is_reported(ranks, stop, code):
    message = failure(ranks, f"import os, sys\nif os.environ['RANK'] == '1': {stop}", 2)
    assert message == f"rank 1 exited with code {code}"


def test_the_message_of_sys_exit_is_part_of_the_output(ranks):
    pieces = []
    with pytest.raises(RankError):
        ranks("import sys; sys.exit('no data')", 1, each=lambda rank, piece: pieces.append(piece))
    assert b"".join(pieces) == b"no data\n"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"])
def test_a_killed_rank_is_reported_with_its_signal(ranks, name):
    end = "__import__('ctypes').string_at(0)" if name == "SIGSEGV" else f"os.kill(os.getpid(), signal.{name})"
    program = f"{MEET}\nif rank == 1: {end}\ndist.barrier()  # without it"
    message = failure(ranks, program, 2)
    assert message.splitlines()[:2] == [
        f"rank 1 was killed by {name}",
        f"rank 0 noticed at line {line(program, 'without it')}: dist.barrier()  # without it",
    ]


def test_a_signal_without_a_name_is_reported_by_number(ranks):
    message = failure(ranks, "import os; os.kill(os.getpid(), 40)", 1)
    assert message.startswith("rank 0 was killed by ") and "40" in message


def test_a_killed_rank_is_the_root_cause_of_later_failures(ranks):
    program = """
        import os, time
        if os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
        time.sleep(0.5)
        raise RuntimeError("where is rank 1?")
        """
    message = failure(ranks, program, 2)
    assert message.splitlines()[0] == "rank 1 was killed by SIGKILL"


def test_a_rank_that_torchrun_ends_before_it_has_begun_is_not_the_root_cause(ranks, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('LOCAL_RANK') == '0': time.sleep(1000)  # as on a busy machine"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = RankPool("torchrun")
    with pytest.raises(RankError) as caught:
        ranks("import os; os.kill(os.getpid(), 9)", 2, pool=pool)
    pool.close()
    assert str(caught.value) == "rank 1 was killed by SIGKILL\n(rank 0 failed afterwards)"


@pytest.mark.parametrize(
    ("end", "reported"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"), ("os._exit(3)", "exited with code 3")],
)
def test_the_root_cause_is_found_even_if_the_launcher_is_slow(ranks, spare_pool, end, reported):
    # As on a busy machine: the launcher does not run until all ranks have ended.
    program = f"""
if rank == 1:
    os.kill(os.getppid(), signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {{os.getppid()}}"], start_new_session=True)
    {end}
dist.recv(x, src=1)
"""
    message = failure(ranks, MEET + program, 2, pool=spare_pool)
    assert message.startswith("rank 1 ") and reported in message.splitlines()[0]


def test_a_deadlock_is_reported_with_the_line_of_each_rank(ranks):
    program = """
if rank == 0:
    dist.recv(x, src=1)
else:
    dist.recv(x, src=0)  # forever
"""
    message = failure(ranks, MEET + program, 2, timeout=4)
    assert message.splitlines()[0] == "the ranks were stopped because they had not ended after 4 s"
    program = MEET + program
    assert message.splitlines()[1:] == [
        f"rank 0 waits in recv(src=1) at line {line(program, 'src=1')}: dist.recv(x, src=1)",
        f"rank 1 waits in recv(src=0) at line {line(program, 'src=0')}: dist.recv(x, src=0)  # forever",
        "deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0: all receive, none sends",
    ]


def test_an_endless_loop_is_reported_with_its_innermost_line(ranks):
    message = failure(ranks, "def spin():\n    while True: pass\nspin()", 1, timeout=1)
    assert message.splitlines()[1] == "rank 0 is at line 2: while True: pass"


def test_ranks_that_have_ended_are_not_reported_as_waiting(ranks):
    message = failure(ranks, "import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)", 3, timeout=2)
    assert [line[:6] for line in message.splitlines()[1:]] == ["rank 1"]


def test_the_timeout_holds_during_endless_output(ranks):
    pieces = []
    with pytest.raises(RankError, match="had not ended after 1 s"):
        ranks("while True: print('x' * 1000)", 2, timeout=1, each=lambda rank, piece: pieces.append(len(piece)))
    assert sum(pieces) > 100_000


@pytest.mark.parametrize("timeout", [1e-6, 0.01])
def test_the_timeout_may_pass_before_the_ranks_have_started(ranks, timeout):
    assert f"had not ended after {timeout:g} s" in failure(ranks, "while True: pass", 2, timeout=timeout)


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e9])
def test_a_timeout_may_be_unlimited(ranks, timeout):
    assert ranks("print('well')", 2, timeout=timeout) == ["well\n"] * 2


def test_a_stopped_rank_is_reported_as_not_answering(ranks):
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
def damage(name, text):
    (folder / f"{{rank}}.{{name}}").write_text({DAMAGED}[text], encoding="latin-1")
"""


def test_a_damaged_location_is_ignored(ranks):
    program = f"{DAMAGE}\ndamage('location', rank)\nos.kill(os.getpid(), signal.SIGSTOP)"
    message = failure(ranks, program, len(DAMAGED), timeout=3)
    assert message.splitlines()[1:] == [f"rank {rank} did not answer" for rank in range(len(DAMAGED))]


def test_a_damaged_failure_report_is_ignored(ranks):
    for text in range(len(DAMAGED)):
        program = f"{DAMAGE}\nif rank == 1:\n    damage('json', {text})\n    sys.exit(3)"
        assert failure(ranks, program, 2) == "rank 1 exited with code 3"


@pytest.mark.parametrize("code", [10**30, -(10**30), 2**32 + 7, 2**63, 256 + 3, -2, True])
def test_exit_codes_are_those_of_python(rank_pool, tmp_path, code):
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.exit({code})")
    expected, pieces = subprocess.run([sys.executable, program]).returncode, []
    with pytest.raises(RankError) as caught:
        rank_pool.run(program, 1, write=lambda rank, piece: pieces.append(piece), timeout=60)
    assert str(caught.value) == f"rank 0 exited with code {expected}" and pieces == [b""]
