"""`ppedu train` on two hosts, and a training run that goes on with one of them after the other has failed."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = ["--microbatches", "4", "--batch", "8", "--context", "16", "--heads", "2", "--width", "16"]


def train(*arguments: object, on: str = "local") -> str:
    words = [sys.executable, "-m", "ppedu", "train", "--on", on, *SMALL, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return re.search(r"^loss (.*)$", done.stdout, re.MULTILINE)[1]  # type: ignore[index]


@pytest.mark.slow
def test_the_loss_is_that_of_one_machine(network, nothing_left):
    assert train("-n", 4, "--steps", 3, on="ssh:alpha,beta") == train("-n", 4, "--steps", 3)


@pytest.mark.slow
def test_training_goes_on_with_one_host_from_the_last_checkpoint(network, tmp_path):
    """The job runs torchrun on two hosts. One dies; the other goes on with half the ranks, to the same loss."""
    arguments = ["--steps", 400, "--save", tmp_path / "run", "--every", 20]
    job = tmp_path / "train.sbatch"
    words = [sys.executable, "-m", "ppedu", "train", "-n", 4, "--nodes", "1:2", "--job", job, *SMALL, *arguments]
    subprocess.run([*map(str, words)], check=True)
    line = job.read_text().splitlines()[-1]
    script = line.partition("--kill-on-bad-exit=0 ")[2]
    environment = {"SLURM_JOB_ID": "7", "first": "alpha", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    nodes = []
    for name in ("alpha", "beta"):
        with (tmp_path / f"{name}.log").open("w") as log:
            words = [*network.on(name), "bash", "-c", script]
            nodes.append(subprocess.Popen(words, env=os.environ | environment, cwd=tmp_path, stdout=log, stderr=log))
    try:
        end = time.monotonic() + 100
        while not any((tmp_path / "run").glob("step-*0")) and time.monotonic() < end:
            time.sleep(0.1)
        assert [*(tmp_path / "run").glob("step-*")], "no checkpoint was written"
        network.crash("beta")
        nodes[0].wait(timeout=250)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        if not (network.folder / "beta.pid").exists():
            network.start("beta")
    printed = (tmp_path / "alpha.log").read_text()
    assert nodes[0].returncode == 0, printed[-3000:]
    found = re.search(r"^loss (.*)$", printed, re.MULTILINE)
    assert found and found[1] == train("-n", 4, "--steps", 400)
