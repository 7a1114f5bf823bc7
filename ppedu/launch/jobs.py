"""Jobs for a scheduler: what a cell or `ppedu train` does, as a file for Slurm, SkyPilot or Kubernetes.

Each job starts torchrun once on every node. The store of torchrun has no password, and listens on all interfaces.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

from ppedu.core import SettingError
from ppedu.core.files import replace_bytes
from ppedu.launch.exchange import write_private

SAVED = "# Saved by ppedu."  # in the first lines of all that is saved
PORT = 29500  # of torchrun's store, its default
RESTARTS = 3  # after the loss of a node
# Otherwise ranks that start again may read the addresses of those that have ended, and wait for them:
# https://github.com/pytorch/pytorch/issues/135712
FRESH_STORE = "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
LARGEST_MAP = 250_000  # bytes of a ConfigMap, of which `kubectl apply` keeps a copy in an annotation of 256 KiB
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")  # of a job: one that all schedulers accept


@dataclass(frozen=True)
class Job:
    """A program to run on the nodes of a cluster.

    Args:
        program: the words after torchrun's options, such as ["job.py"] or ["-m", "ppedu.course.training.train"].
        ranks: on each node.
        nodes, least: how many are asked for, and how many suffice after a failure; the program must then continue from
            its own checkpoint.
        files: those that the program needs, contents by name.
        options: of sbatch.
    """

    program: Sequence[str]
    ranks: int
    nodes: int = 1
    least: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    options: Sequence[str] = ()

    @property
    def elastic(self) -> bool:
        """Whether the program goes on with fewer nodes."""
        return self.least is not None and self.least < self.nodes

    def torchrun(self, *options: str) -> str:
        """Return the command that starts the ranks of one node."""
        nodes = f"{self.least}:{self.nodes}" if self.elastic else str(self.nodes)
        words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={self.ranks}", *options, shlex.join(self.program)]
        if self.elastic:
            words.insert(0, FRESH_STORE)
        return " ".join(words)


def divide(ranks: int, nodes: int) -> int:
    """Return the number of ranks on each node; raise SettingError if they cannot be divided evenly."""
    if nodes < 1:
        raise SettingError(f"a job needs at least one node; got {nodes}")
    if ranks % nodes:
        raise SettingError(f"a job has equally many ranks on each node; {ranks} ranks do not fit on {nodes} nodes")
    return ranks // nodes


def save(path: Path, job: Job) -> None:
    """Write a job, in the format that the end of the name says, and the files that it needs beside it; or only these.

    Files with the values of variables can be read by this user only.

    Raises:
        SettingError: the name has another ending, or a scheduler would not accept it; a file exists and was not saved
            by ppedu, or cannot be written; the format cannot hold the job.
    """
    ending = next((each for each in FORMATS if path.name.endswith(each)), None)
    if ending is None:
        raise SettingError(f"the name of the file to save must end in {', '.join(FORMATS)}; got {str(path)!r}")
    if ending != ".py" and not NAME.fullmatch(path.name.removesuffix(ending)):
        raise SettingError(
            f"{path.name!r}: a job's name begins with a letter and has at most 40 letters, digits, - and _; "
            f"write, for example, job{ending}"
        )
    if unprintable := [word for word in (*job.program, *job.options) if not word.isprintable()]:
        raise SettingError(f"a job cannot contain line breaks or other control characters; got {unprintable[0]!r}")
    texts = FORMATS[ending](path, job)
    for file in texts:
        require_own(file)
    private = any(name.endswith(".inputs") for name in job.files)
    try:
        for file, content in texts.items():
            if file.suffix == ".inputs" or (private and ending == ".k8s.yaml"):
                write_private(file, content)
            else:
                replace_bytes(file, content)
    except OSError as error:
        raise SettingError(f"{file} cannot be written: {error.strerror}") from None


def require_own(file: Path) -> None:
    """Raise SettingError if a file exists and was not saved by ppedu. Inputs have no mark: their script has it."""
    marked = file.with_suffix(".py") if file.suffix == ".inputs" else file
    try:
        ours = marked.exists() and SAVED.encode() in marked.read_bytes()[:100]
        if file.is_symlink() or (file.exists() and not ours):
            raise SettingError(f"{file} exists and was not saved by ppedu; choose another name")
    except OSError as error:
        raise SettingError(f"{file} cannot be written: {error.strerror}") from None


def _script(path: Path, job: Job) -> dict[Path, bytes]:
    return {path.with_name(name): each for name, each in job.files.items()}


def _sbatch(path: Path, job: Job) -> dict[Path, bytes]:
    options = [f"--job-name={path.stem}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={job.ranks}"]
    meeting = ['--rdzv-id="$SLURM_JOB_ID"', "--rdzv-backend=c10d", f'--rdzv-endpoint="$first:{PORT}"']
    srun = "srun --kill-on-bad-exit=1"
    if job.elastic:
        options.append("--no-kill")
        meeting.append(f"--max-restarts={RESTARTS}")
        srun = "srun --no-kill --kill-on-bad-exit=0"
    run = job.torchrun(*meeting)
    own = {each.partition("=")[0] for each in job.options}  # the user's options replace ours
    options = [each for each in options if each.partition("=")[0] not in own] + list(job.options)
    text = f"""\
        #!/bin/bash
        {SAVED} Submit it with: sbatch {path.name}
        # For GPUs, add a line such as #SBATCH --gpus-per-node={job.ranks}
        """
    lines = [dedent(text), *(f"#SBATCH {shlex.quote(each)}\n" for each in options)]
    lines.append('\nexport OMP_NUM_THREADS=1\nfirst=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n')
    lines.append(f"{srun} {run}\n")
    return {path: "".join(lines).encode()} | _script(path, job)


def _sky(path: Path, job: Job) -> dict[Path, bytes]:
    if job.elastic:
        raise SettingError(f"SkyPilot starts a fixed number of nodes; write --nodes {job.nodes}")
    run = job.torchrun('--node-rank="$SKYPILOT_NODE_RANK"', '--master-addr="$first"', f"--master-port={PORT}")
    text = f"""\
        {SAVED} Start it, in this folder, with: sky launch {path.name}
        name: "{_name(path)}"
        num_nodes: {job.nodes}
        resources:
          cpus: {job.ranks}+  # for GPUs: accelerators: H100:{job.ranks}
        workdir: .
        setup: |
          pip install {shlex.quote(requirement())}
        run: |
          export OMP_NUM_THREADS=1
          first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
          {run}
        """
    return {path: dedent(text).encode()} | _script(path, job)


def _kubernetes(path: Path, job: Job) -> dict[Path, bytes]:
    name = _name(path)
    content = {each: base64.b64encode(text).decode() for each, text in job.files.items()}
    if sum(map(len, content.values())) > LARGEST_MAP:
        raise SettingError(
            f"the cell and its --in exceed {LARGEST_MAP // 1000} kB, the most that kubectl apply accepts; save the "
            "data elsewhere, and read it in the cell"
        )
    if job.elastic:
        options = ["--rdzv-backend=c10d", '--rdzv-endpoint="$PET_RDZV_ENDPOINT"', f"--rdzv-id={name}"]
        options.append(f"--max-restarts={RESTARTS}")
        replicas = {"Worker": job.nodes}
    else:
        options = ['--node-rank="$PET_NODE_RANK"', '--master-addr="$MASTER_ADDR"', '--master-port="$MASTER_PORT"']
        replicas = {"Master": 1, "Worker": job.nodes - 1}
    lines = [f"{SAVED} Start it with: kubectl apply -f {path.name} (needs Kubeflow's training operator)"]
    if content:
        lines += ["apiVersion: v1", "kind: ConfigMap", f'metadata: {{name: "{name}"}}', "binaryData:"]
        lines += [f"  {each}: {text}" for each, text in content.items()] + ["---"]
    lines += ["apiVersion: kubeflow.org/v1", "kind: PyTorchJob", f'metadata: {{name: "{name}"}}', "spec:"]
    lines += [f'  nprocPerNode: "{job.ranks}"']
    if job.elastic:
        lines += ["  elasticPolicy:", "    rdzvBackend: c10d", f"    minReplicas: {job.least}"]
        lines += [f"    maxReplicas: {job.nodes}", f"    maxRestarts: {RESTARTS}"]
    lines += ["  pytorchReplicaSpecs:"]
    for kind, count in replicas.items():
        if count:
            lines += [f"    {kind}:", f"      replicas: {count}", "      restartPolicy: OnFailure", "      template:"]
            lines += ["        spec:", "          containers:"]
            lines += ["            - name: pytorch"]
            lines += ["              image: python:3.12  # better: an image in which PyTorch and ppedu are installed"]
            lines += ["              command: [bash, -c]", "              args:", "                - |"]
            lines += [f"                  cd {'/job' if content else '/tmp'}; export OMP_NUM_THREADS=1"]
            lines += [f"                  python -c 'import ppedu' || pip install '{requirement()}'"]
            lines += [f"                  exec {job.torchrun(*options)}"]
            if content:
                lines += ["              volumeMounts: [{name: job, mountPath: /job}]"]
                lines += [f'          volumes: [{{name: job, configMap: {{name: "{name}"}}}}]']
    return {path: "\n".join([*lines, ""]).encode()}


def requirement() -> str:
    """Return what pip must install on a node."""
    return f"ppedu[run]=={version('ppedu')}"


def _name(path: Path) -> str:
    """Return the job's name: the file's, in the letters that Kubernetes allows."""
    stem = path.name.split(".")[0].lower()
    name = "".join(each if each.isascii() and each.isalnum() else "-" for each in stem)
    return name.strip("-") or "job"


FORMATS: dict[str, Callable[[Path, Job], dict[Path, bytes]]] = {
    ".py": _script,
    ".sbatch": _sbatch,
    ".k8s.yaml": _kubernetes,
    ".yaml": _sky,
}
