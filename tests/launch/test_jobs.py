"""Saved jobs: what schedulers read is well formed, and the commands in it do what the cell does."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ppedu.core import SettingError
from ppedu.launch.jobs import Job, divide, save

PROGRAM = b"""# Saved by ppedu.
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor(10 ** dist.get_rank())
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("sum", x.item(), pathlib.Path("job.inputs").read_text(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
JOB = Job(["job.py"], 2, 2, files={"job.py": PROGRAM, "job.inputs": b"7"})


def run_nodes(script: str, folder: Path, *nodes: dict[str, str]) -> str:
    """Run a shell script once for each node, all on this machine; return what they print."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = [
        subprocess.Popen(
            ["bash", "-c", script],
            env=os.environ | {"PATH": path} | each,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in nodes
    ]
    printed = [each.communicate(timeout=100) for each in started]
    assert not any(each.returncode for each in started), printed
    return "".join(out for out, _ in printed)


@pytest.mark.slow  # as Kubernetes does, from other variables
def test_a_job_for_skypilot_runs_the_program_on_its_nodes(tmp_path):
    save(tmp_path / "job.yaml", JOB)
    task = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("job", 2, ".")
    assert task["setup"].startswith("pip install 'ppedu[run]==")
    nodes = [{"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": str(rank)} for rank in range(2)]
    assert run_nodes(task["run"], tmp_path, *nodes) == "sum 1111 7\n"


def test_a_job_for_kubernetes_runs_the_program_on_its_nodes(tmp_path):
    program = b"""# Saved by ppedu.
import os, pathlib
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {pathlib.Path('job.inputs').read_text()}\\n", end="")
"""
    save(tmp_path / "My_job.k8s.yaml", Job(["job.py"], 1, 2, files={"job.py": program, "job.inputs": b"7"}))
    files, job = yaml.safe_load_all((tmp_path / "My_job.k8s.yaml").read_text())
    assert files["metadata"] == job["metadata"] == {"name": "my-job"}
    assert job["spec"]["nprocPerNode"] == "1"
    for name, text in files["binaryData"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {"Master": 1, "Worker": 1}
    pod = replicas["Worker"]["template"]["spec"]
    assert pod == replicas["Master"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["volumeMounts"] == [{"name": "job", "mountPath": "/job"}]
    assert pod["volumes"] == [{"name": "job", "configMap": {"name": "my-job"}}]
    assert container["command"] == ["bash", "-c"]
    # As Kubeflow's training operator sets them.
    nodes = [
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617", "PET_NODE_RANK": str(rank), "PET_NNODES": "2"}
        for rank in range(2)
    ]
    script = container["args"][0].replace("cd /job", f"cd '{tmp_path}'")
    assert run_nodes(script, tmp_path, *nodes) == "rank 0 of 2 7\nrank 1 of 2 7\n"  # so the nodes have met


def test_an_elastic_job_asks_kubernetes_for_workers_only(tmp_path):
    save(tmp_path / "job.k8s.yaml", Job(["-m", "ppedu.course.training.train", "--save", "/shared/a b"], 4, 3, 1))
    job = yaml.safe_load((tmp_path / "job.k8s.yaml").read_text())
    assert job["spec"]["elasticPolicy"] == {
        "rdzvBackend": "c10d",
        "minReplicas": 1,
        "maxReplicas": 3,
        "maxRestarts": 3,
    }
    assert {kind: each["replicas"] for kind, each in job["spec"]["pytorchReplicaSpecs"].items()} == {"Worker": 3}
    command = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"][0]
    assert "--nnodes=1:3" in command and command.endswith("-m ppedu.course.training.train --save '/shared/a b'\n")


def test_ranks_that_start_again_do_not_see_what_the_ended_ones_have_written(tmp_path):
    (tmp_path / "again.py").write_text("""import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
seen = store.check(["address"])
dist.barrier()
store.set("address", "of a rank that ends")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)
print(seen)
""")
    options = ["--rdzv-id=7", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29618", "--local-addr=127.0.0.1"]
    options += ["--max-restarts=1", "--rdzv-conf=last_call_timeout=1"]
    assert run_nodes(Job(["again.py"], 1, 2, 1).torchrun(*options), tmp_path, {}) == "False\n"


def test_a_job_for_slurm_keeps_the_options_that_it_is_given(tmp_path):
    save(tmp_path / "job.sbatch", Job(["job.py"], 4, 2, options=("--partition=gpu", "--nodes=2")))
    lines = (tmp_path / "job.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    given = [each.partition(" ")[2] for each in lines if each.startswith("#SBATCH")]
    assert sorted(given) == [
        "--cpus-per-task=4",
        "--job-name=job",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--partition=gpu",
    ]


@pytest.mark.parametrize(
    ("name", "job", "problem"),
    [
        ("job.txt", JOB, r"must end in \.py, \.sbatch, \.k8s\.yaml, \.yaml; got .*job.txt"),
        ("job.yaml", Job(["job.py"], 1, 2, 1), "SkyPilot starts a fixed number of nodes; write --nodes 2"),
        ("job.k8s.yaml", Job(["job.py"], 1, files={"job.inputs": bytes(2 * 10**5)}), "exceed 250 kB"),
        ("job.sbatch", Job(["a\nb"], 1), "cannot contain line breaks or other control characters"),
        ("missing/job.sbatch", Job(["job.py"], 1), r"job\.sbatch cannot be written: No such file or directory"),
        ("7b.k8s.yaml", JOB, "'7b.k8s.yaml': a job's name begins with a letter .* for example, job.k8s.yaml"),
        ("my job.sbatch", JOB, "a job's name begins with a letter"),
        (f"{'a' * 41}.yaml", JOB, "has at most 40 letters"),
        (".sbatch", JOB, "a job's name begins with a letter"),
    ],
)
def test_a_job_that_cannot_be_saved_is_an_error(tmp_path, name, job, problem):
    with pytest.raises(SettingError, match=problem):
        save(tmp_path / name, job)
    assert not list(tmp_path.iterdir())


def test_other_files_are_kept(tmp_path):
    (tmp_path / "job.py").write_text("mine")
    with pytest.raises(SettingError, match=r"job.py exists and was not saved by ppedu"):
        save(tmp_path / "job.sbatch", JOB)
    assert [each.name for each in tmp_path.iterdir()] == ["job.py"]


@pytest.mark.parametrize("link", [False, True])
def test_other_inputs_are_kept(tmp_path, link):
    own = tmp_path / "own"
    own.write_text("mine")
    inputs = tmp_path / "job.inputs"
    inputs.symlink_to(own) if link else own.rename(inputs)
    with pytest.raises(SettingError, match=r"job.inputs exists and was not saved by ppedu"):
        save(tmp_path / "job.sbatch", JOB)
    assert inputs.read_text() == "mine" and not (tmp_path / "job.sbatch").exists()


@pytest.mark.parametrize("name", ["true", "null", "no"])
def test_a_name_stays_a_name(tmp_path, name):
    for ending in ("yaml", "k8s.yaml"):
        save(tmp_path / f"{name}.{ending}", JOB)
        [*found] = yaml.safe_load_all((tmp_path / f"{name}.{ending}").read_text())
        assert [each.get("metadata", each)["name"] for each in found] == [name] * len(found)


def test_a_job_can_be_saved_again(tmp_path):
    for name in ("job.sbatch", "job.yaml", "job.k8s.yaml"):
        save(tmp_path / name, JOB)
        save(tmp_path / name, JOB)


def test_ranks_that_nodes_cannot_share_are_an_error():
    assert divide(8, 2) == 4
    with pytest.raises(SettingError, match="8 ranks do not fit on 3 nodes"):
        divide(8, 3)


def test_only_the_owner_reads_the_inputs(tmp_path):
    save(tmp_path / "job.sbatch", JOB)
    assert (tmp_path / "job.inputs").stat().st_mode & 0o777 == 0o600
