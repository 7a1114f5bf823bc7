"""Ranks that succeed: they run as under torchrun and leave nothing behind."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ppedu import RankError, SettingError


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# Which torchrun does not set.
OURS = {"GLOO_SOCKET_IFNAME", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_DIST_INIT_BARRIER"}
DIFFERENT = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}  # differ between runs
DIFFERENT |= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "LINES", "COLUMNS"}  # set by torchrun only
THE_SAME = {"RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK"}
THE_SAME |= {"GROUP_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
THE_SAME |= {f"TORCHELASTIC_{name}" for name in ("RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")}
TORCHRUNS = OURS | DIFFERENT | THE_SAME

PRINT_ENVIRONMENT = """
import json, os, socket, sys
print(json.dumps({
    **{name: value for name, value in os.environ.items() if name not in sys.argv[3].split()},
    "loopback": socket.gethostbyname(os.environ["MASTER_ADDR"]).startswith("127."),
    "port": 1024 <= int(os.environ["MASTER_PORT"]) < 65536,
    "error file": os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])),
    "arguments": sys.argv, "name": __name__, "file": __file__, "folder": os.getcwd(),
}))
"""


def test_a_rank_has_the_environment_that_torchrun_sets(rank_pool, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = tmp_path / "program.py"
    program.write_text(PRINT_ENVIRONMENT)
    pieces, arguments = [], ["--a", "b c", " ".join(OURS | DIFFERENT | set(os.environ))]
    rank_pool.run(str(program), 2, arguments, write=lambda rank, piece: pieces.append(piece), timeout=60)
    real = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, *arguments],
        capture_output=True,
        check=True,
    )
    ours, theirs = (
        sorted(map(json.loads, re.findall(rb"{[^{}]*}", text)), key=lambda said: said["RANK"])
        for text in (b"".join(pieces), real.stdout)
    )
    assert ours == theirs and [said["RANK"] for said in ours] == ["0", "1"] and ours[0].keys() >= THE_SAME


def test_each_rank_is_a_separate_process(ranks):
    processes = [int(text) for text in ranks("import os; print(os.getpid())", 8)]
    assert len({os.getpid(), *processes}) == 9


def test_ranks_rendezvous_at_master_addr_and_port(ranks):
    program = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.tensor(10 ** dist.get_rank())
        dist.all_reduce(x)
        print(x.item())
        """
    for _ in range(4):
        assert ranks(program, 4) == ["1111\n"] * 4


def test_torchs_note_that_a_group_is_connected_is_not_shown(ranks):
    """PyTorch 2.8 to 2.10 print it to stdout."""
    note = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    pieces = [note[:5], note[5:30], note[30:], f"\none\n{note}\n[two]\n", "[", "Gloo] three\n", "[Gl"]
    program = f"""
        import time
        for piece in {pieces}:
            print(piece, end="", flush=True)
            time.sleep(0.05)
        """
    assert ranks(program, 1) == ["one\n[two]\n[Gloo] three\n[Gl"]


def test_a_rank_can_end_before_the_others_have_connected(ranks):
    """Rank 0 leaves `init_process_group` only after rank 1 has made its connections, which takes it a while."""
    output = ranks(
        """
        import os, time
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        connect = distributed_c10d._new_process_group_helper

        def connect_slowly(*arguments, **keywords):
            group = connect(*arguments, **keywords)
            time.sleep(0.5)
            print(time.monotonic())
            return group

        if os.environ["RANK"] == "1":
            distributed_c10d._new_process_group_helper = connect_slowly
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            print(time.monotonic(), flush=True)
            os._exit(0)
        """,
        2,
    )
    assert float(output[0]) > float(output[1])


def test_a_rank_has_one_thread(ranks):
    assert ranks("import torch; print(torch.get_num_threads())", 1) == ["1\n"]


def test_a_module_is_run_as_python_m_does(rank_pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import sys; print(__name__, __spec__.name, sys.argv)")
    pieces = []
    rank_pool.run("mine", 1, ["x"], module=True, write=lambda rank, piece: pieces.append(piece), timeout=60)
    python = subprocess.run([sys.executable, "-m", "mine", "x"], capture_output=True, check=True)
    assert b"".join(pieces) == python.stdout


def test_long_output_arrives_complete_and_in_order(ranks):
    program = """
        import os
        for line in range(200_000):
            print(os.environ["RANK"], line)
        """
    expected = ["".join(f"{rank} {line}\n" for line in range(200_000)) for rank in range(2)]
    assert ranks(program, 2) == expected


def test_stdout_and_stderr_arrive_in_the_order_written(ranks):
    assert ranks("import sys; print('one'); print('two', file=sys.stderr); print('three')", 1) == ["one\ntwo\nthree\n"]


def test_output_is_passed_on_as_bytes_and_an_empty_piece_marks_its_end(ranks):
    pieces = {rank: [] for rank in range(3)}
    program = r"import os; os.write(1, b'\xff\x00\r'); print('ž', end='')"
    ranks(program, 3, each=lambda rank, piece: pieces[rank].append(piece))
    for *some, last in pieces.values():
        assert b"".join(some) == b"\xff\x00\r" + "ž".encode() and all(some) and last == b""


def test_the_program_is_a_real_file(ranks):
    program = """
        import inspect, pickle
        class Mine: pass
        print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, inspect.getsource(Mine))
        """
    assert ranks(program, 1) == ["True class Mine: pass\n\n"]


def test_a_rank_can_use_multiprocessing(ranks):
    program = """
        import multiprocessing
        def double(answer, x): answer.send(2 * x)
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                question, answer = context.Pipe()
                process = context.Process(target=double, args=(answer, 21))
                process.start()
                print(question.recv())
                process.join()
        """
    assert ranks(program, 1) == ["42\n42\n"]


def test_stdin_is_empty(ranks):
    assert ranks("import sys; print(repr(sys.stdin.read()))", 1) == ["''\n"]


@pytest.mark.parametrize("source", ["random.random()", "numpy.random.rand()", "torch.rand(1).item()"])
def test_random_numbers_differ_between_ranks_and_between_runs(ranks, source):
    program = f"import random, numpy, torch; print({source})"
    numbers = [*ranks(program, 2), *ranks(program, 2)]
    assert len(set(numbers)) == 4, numbers


def test_changes_to_the_environment_do_not_outlive_a_run(ranks):
    before = dict(os.environ)
    ranks("import os; os.environ['PPEDU_LEFT'] = '1'; os.putenv('PPEDU_LEFT', '1'); os.chdir('/')", 1)
    program = "import os; print(os.environ.get('PPEDU_LEFT'), os.getcwd())"
    assert ranks(program, 1) == [f"None {Path.cwd()}\n"]
    assert dict(os.environ) == before


def test_ranks_inherit_the_current_environment(ranks, monkeypatch):
    monkeypatch.setenv("PPEDU_SET", "ž")
    monkeypatch.delenv("PATH")  # it was set when the launcher started
    found = json.loads(ranks("import json, os; print(json.dumps(dict(os.environ)))", 1)[0])
    assert {name: found[name] for name in os.environ if name in found} == {
        name: value for name, value in os.environ.items() if name not in TORCHRUNS
    } | {name: found[name] for name in os.environ if name in TORCHRUNS}
    assert found.keys() - os.environ.keys() <= TORCHRUNS


def test_a_process_started_by_a_rank_inherits_its_environment(ranks, monkeypatch):
    monkeypatch.setenv("PPEDU_SET", "ž")
    assert ranks("import subprocess; subprocess.run('echo $PPEDU_SET $RANK', shell=True)", 1) == ["ž 0\n"]


def test_the_environment_may_be_large(ranks, monkeypatch):
    for number in range(30):
        monkeypatch.setenv(f"PPEDU_{number}", "x" * 10_000)
    assert ranks("import os; print(len(os.environ['PPEDU_29']))", 1) == ["10000\n"]


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(3)", "1 / 0"])
def test_atexit_functions_run_however_the_program_ends(ranks, end):
    pieces, program = [], f"import atexit, sys; atexit.register(print, 'done'); {end}"
    with contextlib.suppress(RankError):
        ranks(program, 1, each=lambda rank, piece: pieces.append(piece))
    assert b"".join(pieces) == b"done\n"


def test_a_rank_waits_for_its_threads(ranks):
    program = """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.3), print("done"))).start()
        """
    assert ranks(program, 1) == ["done\n"]


def test_a_run_leaves_no_open_file(ranks):
    ranks("print()", 4)
    before = names("/proc/self/fd")
    for _ in range(3):
        ranks("print()", 4)
    assert names("/proc/self/fd") == before


@pytest.mark.parametrize("number", [0, -1, 65, 2.5, "2", None, True])
def test_an_invalid_number_of_ranks_is_refused(rank_pool, number):
    with pytest.raises(SettingError, match=r"number of ranks must be|at most 64 ranks"):
        rank_pool.run("program.py", number, write=lambda rank, piece: None)


def test_a_run_does_not_change_the_callers_random_state(ranks):
    random.seed(3)
    expected = random.random()
    random.seed(3)
    ranks("print()", 1)
    assert random.random() == expected


@pytest.mark.parametrize("program", ["print()", "1 / 0", "while True: pass"])
def test_no_temporary_folder_is_left(ranks, tmp_path, monkeypatch, program):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen, timeout = set(), 60 if program == "print()" else 1
    try:
        ranks(program, 2, timeout=timeout, each=lambda rank, piece: seen.update(names(tmp_path)))
    except RuntimeError:
        assert program != "print()"
    assert seen, "the folder this test watches was never used"
    assert names(tmp_path) == []
