"""`doctor()`: check whether this machine can run the lessons, and say what to install or change if it cannot.

It imports only the standard library. torch is queried in another process, so that this one never initializes a GPU that
its ranks may need.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

PYTHON = (3, 10)  # the oldest supported version
TORCH = ("2.6", "2.11", "2.13", "2.15")  # the releases that are tested; those between them are supported, too
MEMORY = 1 << 30  # bytes; the most that a lesson and its ranks use
TIMEOUT = 60  # seconds for each check
CPU_BUILD = "https://download.pytorch.org/whl/cpu"

TORCH_QUERY = """
import json, torch
print(torch.__version__)
built = torch.backends.cuda.is_built()
print(json.dumps([built, [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]]))
"""
SUM_RANKS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
assert total == 3, f"all_reduce of 1 and 2 returned {total}"
dist.destroy_process_group()
"""

Finding = tuple[bool, str]  # whether the check passed, and the text of its line


class Checked(NamedTuple):
    """The result of one check: its name, whether it passed, and what was found; if it failed, with what to do."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True, repr=False)
class Checkup:
    """The report of `doctor`, which prints as one line for each check."""

    checks: tuple[Checked, ...]

    @property
    def ok(self) -> bool:
        """Whether all checks passed, so that the lessons can run."""
        return all(check.ok for check in self.checks)

    def __repr__(self) -> str:
        lines = [f"{'ok' if check.ok else '!':3} {check.name:11} {check.text}" for check in self.checks]
        end = "This machine is ready." if self.ok else "Not ready: fix the lines marked !, then run this again."
        return "\n".join([*lines, "", end])


def doctor() -> Checkup:
    """Check whether the lessons can run on this machine, and report what to do if they cannot.

    It takes some seconds, because it starts two ranks. It never raises.
    """
    answer = _query_torch()
    checks: dict[str, Callable[[], Finding]] = {
        "Python": _python,
        "torch": lambda: _torch(answer),
        "cores": _cores,
        "memory": _memory,
        "GPUs": lambda: _gpus(answer),
        "ranks": lambda: _ranks(answer),
        "matplotlib": lambda: _packages("matplotlib"),
        "widgets": lambda: _packages("anywidget", "ipykernel"),
    }
    found = []
    for name, check in checks.items():
        try:
            found.append(Checked(name, *check()))
        except Exception as error:  # the report must be complete, whatever is wrong with the machine
            found.append(Checked(name, False, f"could not be checked: {_in_a_line(error)}"))
    return Checkup(tuple(found))


def _in_a_line(error: object) -> str:
    """Return the first and the last line of an error's message, joined: what happened, and why."""
    lines = [line.strip() for line in str(error).splitlines() if not line.endswith("failed afterwards)")]
    return " ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or repr(error)


class _Answer(NamedTuple):
    """The lines that the process printed that imports torch, and its error, "" if it succeeded."""

    lines: list[str]
    error: str


def _query_torch() -> _Answer:
    command = [sys.executable, "-c", TORCH_QUERY]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as late:
        written = os.fsdecode(late.stdout or b"")  # bytes on Linux, despite text=True
        return _Answer(written.splitlines(), f"no answer after {TIMEOUT} s")
    except OSError as error:
        return _Answer([], str(error))
    last_line = done.stderr.strip().rpartition("\n")[2]
    return _Answer(done.stdout.splitlines(), last_line if done.returncode else "")


def _python() -> Finding:
    own, least = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, PYTHON))
    return (True, own) if sys.version_info >= PYTHON else (False, f"{own}; install {least} or newer")


def _torch(answer: _Answer) -> Finding:
    install = f"pip install 'ppedu[run]' (without a GPU: --extra-index-url {CPU_BUILD})"
    if not answer.lines:
        if "No module named 'torch'" in answer.error:
            return False, f"not installed; {install}"
        return False, f"cannot be imported ({answer.error}); install it again: {install}"
    own = answer.lines[0]
    release, oldest, newest = map(_numbers, (own, TORCH[0], TORCH[-1]))
    if release < oldest:
        return False, f"{own} is too old; {install}"
    if release > newest:
        return True, f"{own} (newer than {TORCH[-1]}, the newest release that is tested)"
    tested = release in map(_numbers, TORCH)
    return True, f"{own} (supported and tested)" if tested else f"{own} (supported; tested are {', '.join(TORCH)})"


def _numbers(release: str) -> list[int]:
    """Return the first two numbers of a version, which name a release of torch."""
    return [int(number) for number in re.findall(r"\d+", release)[:2]]


def _cores() -> Finding:
    """Report the number of processors that this process may use, by its affinity and its container's quota."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # int("max") fails: there is no quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split())
        cores = min(cores, quota / period)
    return True, f"{cores:.2g}" + ("; four ranks share them, which the lessons allow for" if cores < 4 else "")


def _memory() -> Finding:
    from ppedu.launch.resources import free_memory, memory

    free = free_memory()
    if free is None:
        return True, f"unknown; the lessons use up to {MEMORY >> 20} MB"
    text = f"{free >> 20} MB are free; the lessons use up to {MEMORY >> 20} MB"
    enough = free + (memory(os.getpid()) or 0) >= MEMORY  # the memory of this process is already the lesson's
    return (True, text) if enough else (False, f"{text}: shut down other notebooks, or give the container more")


def _gpus(answer: _Answer) -> Finding:
    """Report the GPUs that torch named in `answer`. The lessons need none, so the check always passes."""
    none = "; the lessons need none"
    if not answer.lines:
        return True, f"unknown without torch{none}"
    if len(answer.lines) == 1:  # the version of torch
        return True, f"torch failed to list them ({answer.error}){none}"
    built, names = json.loads(answer.lines[1])
    if names:
        return True, f"{len(names)}: {', '.join(dict.fromkeys(names))}; pp.run.place() returns the one of a rank"
    if not built:
        return True, f"none that torch can use, because this is its CPU build{none}"
    return True, f"none found{none}"


def _ranks(answer: _Answer) -> Finding:
    """Start two ranks and add up one number of each with all_reduce, unless torch is missing in `answer`."""
    from ppedu.core import PipelineError, RankError
    from ppedu.launch.pool import RankPool

    if not answer.lines:
        return False, "not started, because torch is missing; install it first"
    began = time.monotonic()
    try:
        with contextlib.closing(RankPool()) as pool, tempfile.TemporaryDirectory(prefix="ppedu-") as folder:
            program = Path(folder, "sum_ranks.py")
            program.write_text(SUM_RANKS, encoding="utf-8")
            pool.run(program, 2, timeout=TIMEOUT, write=lambda rank, piece: None)
    except RankError as error:
        return False, f"{_in_a_line(error)}; processes on this machine must be able to connect through 127.0.0.1 (lo)"
    except PipelineError as error:  # its message says what to do
        return False, str(error)
    except OSError as error:
        return False, f"{error}; allow this user to start processes and to write temporary files (to TMPDIR)"
    return True, f"2 ranks started and summed their numbers in {time.monotonic() - began:.1f} s"


def _packages(*names: str) -> Finding:
    """Report the versions of packages, or how to install the missing ones."""
    found, missing = [], []
    for name in names:
        try:
            found.append(version(name) if len(names) == 1 else f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return False, f"no {' and no '.join(missing)}; pip install 'ppedu[lab]', then restart the kernel"
    return True, ", ".join(found)
