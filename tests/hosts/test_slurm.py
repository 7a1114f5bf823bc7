"""Ranks and jobs on a real Slurm: a cluster of this machine alone. It needs root, slurm-wlm and munge."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppedu.core import PipelineError, RankError
from ppedu.launch.jobs import Job, save
from ppedu.launch.pool import RankPool

TOOLS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch")


def command(*words: object, **keywords: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **keywords)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
    return str(done.stdout)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start Slurm; return a folder for jobs."""
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip("a Slurm of its own needs root, and Debian's slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    name = socket.gethostname()
    key, door = folder / "munge.key", folder / "munge.socket"
    command("mungekey", "-c", "-k", key)
    files = {"key-file": key, "socket": door, "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    started = [subprocess.Popen(["munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in files.items())])]
    settings = f"""
        ClusterName=one
        SlurmctldHost={name}(127.0.0.1)
        SlurmUser=root
        SlurmdUser=root
        AuthType=auth/munge
        AuthInfo=socket={door}
        CredType=cred/munge
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        SelectType=select/cons_tres
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/spool
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd.pid
        SlurmctldPort={free_port()}
        SlurmdPort={free_port()}
        MpiDefault=none
        SchedulerParameters=sched_interval=1,batch_sched_delay=0
        KillWait=1
        ReturnToService=2
        NodeName={name} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
        PartitionName=all Nodes={name} Default=YES MaxTime=INFINITE State=UP
        """
    (folder / "slurm.conf").write_text("\n".join(line.strip() for line in settings.splitlines()))
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        try:
            _until(door.exists)
            with (folder / "log").open("w") as log:
                for daemon in ("slurmctld", "slurmd"):
                    started.append(subprocess.Popen([daemon, "-D"], stdout=log, stderr=log))
            _until(
                lambda: "idle" in subprocess.run(["sinfo", "-h"], capture_output=True, text=True, check=False).stdout
            )
        except AssertionError:
            pytest.skip(f"Slurm does not start on this machine: {(folder / 'log').read_text()[-500:]}")
        yield folder
    finally:
        for each in reversed(started):
            each.terminate()
            each.wait()
        del os.environ["SLURM_CONF"]


def _until(true: object) -> None:
    end = time.monotonic() + 30
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "Slurm does not start"
        time.sleep(0.1)


def jobs() -> str:
    return command("squeue", "--noheader", "--states=PENDING,RUNNING")


SUM = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(x)
    print(x.item(), os.environ["SLURM_JOB_ID"].isdigit())
    """


def test_ranks_run_in_a_job_which_ends_with_the_pool(slurm, ranks):
    pool = RankPool(on="slurm:--nodes=1")
    try:
        assert ranks(SUM, 2, pool=pool) == ["11 True\n"] * 2
        assert len(jobs().splitlines()) == 1
        with pytest.raises(RankError, match=f"rank 1 on {socket.gethostname()} failed:\n(?s:.*)ZeroDivisionError"):
            ranks("import os\n1 / (1 - int(os.environ['RANK']))", 2, pool=pool)
    finally:
        pool.close()
    _until(lambda: not jobs())


def test_the_job_ends_when_the_notebook_is_killed(slurm, tmp_path):
    source = """
from ppedu.launch.pool import RankPool
pool = RankPool(on="slurm")
pool.run("this", 1, module=True, write=lambda *_: None)
print("ran", flush=True)
import time; time.sleep(100)
"""
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "ran\n" and jobs()
    owner.kill()
    owner.wait()
    _until(lambda: not jobs())


def test_nodes_that_slurm_does_not_have_are_an_error(slurm, ranks):
    pool = RankPool(on="slurm:--partition=gold")
    with pytest.raises(PipelineError, match=r"Slurm gives no nodes: .*Invalid partition"):
        ranks("pass", 1, pool=pool)


def test_waiting_for_nodes_can_be_interrupted(slurm, ranks):
    """Two nodes will never be free here."""
    pool, notes = RankPool(on="slurm:--nodes=2"), []

    def note(line: str) -> None:
        notes.append(line)
        if "waiting" in line:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    pool.note = note
    with pytest.raises(KeyboardInterrupt):
        ranks("pass", 1, pool=pool)
    assert any("waiting for resources" in each for each in notes)
    _until(lambda: not jobs())


def test_a_saved_job_runs(slurm):
    program = b"""import os
text = open("job.inputs").read()
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {text}\\n", end="")  # in one write
"""
    save(slurm / "job.sbatch", Job(["job.py"], 2, 1, files={"job.py": program, "job.inputs": b"7"}))
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    checked = subprocess.run(
        ["sbatch", "--test-only", "job.sbatch"], cwd=slurm, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    command("sbatch", "--output=job.out", "job.sbatch", cwd=slurm, env=path)
    _until(lambda: not jobs())  # `sbatch --wait` asks once in many seconds
    assert sorted((slurm / "job.out").read_text().splitlines()) == ["rank 0 of 2 7", "rank 1 of 2 7"]


def test_a_machine_without_slurm_is_an_error(ranks, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    with pytest.raises(PipelineError, match="salloc is not installed here; start on a machine with Slurm's commands"):
        ranks("pass", 1, pool=RankPool(on="slurm"))
