"""Is this machine ready for the lessons? `doctor()` looks, and says what to do about what is not.

It loads the standard library alone. What torch has to say is asked of another process, so that this one never touches
a GPU: the ranks it starts may want them.
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

PYTHON, TORCH = (3, 10), (2, 13)  # and newer
MEMORY = 1 << 30  # bytes; no lesson takes more, its ranks included
SECONDS = 60  # that anything asked here may take
CPU_BUILD = "https://download.pytorch.org/whl/cpu"

ASK_TORCH = """
import json, torch
print(torch.__version__)
built = torch.backends.cuda.is_built()
print(json.dumps([built, [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]]))
"""
ADD_UP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
assert total == 3, f"1 + 2 came out as {total}"
dist.destroy_process_group()
"""

Found = tuple[bool, str]  # is it well, and what there is to say


@dataclass(frozen=True)
class Check:
    """What was looked at, is it well, and what was found; if it is not well, with what to do."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True, repr=False)
class Checkup:
    """What `doctor` has found. `ok`: the lessons can run here."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def __repr__(self) -> str:
        lines = [f"{'ok' if check.ok else '!':3} {check.name:11} {check.text}" for check in self.checks]
        end = "This machine is ready." if self.ok else "Not ready: see to the lines with a !, and ask again."
        return "\n".join([*lines, "", end])


def doctor() -> Checkup:
    """Look whether the lessons can run on this machine: a line for each thing they need, with what to do about it.

    Two ranks are really started, so this takes some seconds. It raises nothing.
    """
    answer = _ask_torch()
    looks: dict[str, Callable[[], Found]] = {
        "Python": _python,
        "torch": lambda: _torch(answer),
        "cores": _cores,
        "memory": _memory,
        "GPUs": lambda: _gpus(answer),
        "ranks": lambda: _ranks(answer),
        "matplotlib": lambda: _packages("matplotlib"),
        "widgets": lambda: _packages("anywidget", "ipykernel"),
    }
    return Checkup(tuple(Check(name, *_found(look)) for name, look in looks.items()))


def _found(look: Callable[[], Found]) -> Found:
    try:
        return look()
    except Exception as error:  # whoever asks whether all is well is not to be told by a traceback
        return False, f"could not be looked at: {_in_a_line(error)}"


def _in_a_line(error: object) -> str:
    """The first line of what an error says, and the last: what happened, and why."""
    lines = [line.strip() for line in str(error).splitlines() if not line.endswith("failed afterwards)")]
    return " ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or repr(error)


@dataclass(frozen=True)
class _Answer:
    """What a process that imports torch has printed, and what went wrong there."""

    lines: list[str]
    error: str


def _ask_torch() -> _Answer:
    words = [sys.executable, "-c", ASK_TORCH]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as late:
        written = os.fsdecode(late.stdout or b"")  # bytes on Linux, whatever was asked for
        return _Answer(written.splitlines(), f"no answer after {SECONDS} s")
    except OSError as error:
        return _Answer([], str(error))
    return _Answer(done.stdout.splitlines(), done.stderr.strip().rpartition("\n")[2] if done.returncode else "")


def _python() -> Found:
    own, least = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, PYTHON))
    return (True, own) if sys.version_info >= PYTHON else (False, f"{own}; install {least} or newer")


def _torch(answer: _Answer) -> Found:
    install = f"pip install 'ppedu[run]' (without a GPU: --extra-index-url {CPU_BUILD})"
    if not answer.lines:
        if "No module named 'torch'" in answer.error:
            return False, f"not installed; {install}"
        return False, f"cannot be imported ({answer.error}); install it again: {install}"
    own = answer.lines[0]
    if tuple(map(int, re.findall(r"\d+", own)[:2])) < TORCH:
        return False, f"{own} is too old; {install}"
    return True, own


def _cores() -> Found:
    """The processors that this process may use: those it is bound to, or what its container may take of them."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split())
        cores = min(cores, quota / period)
    return True, f"{cores:.2g}" + ("; four ranks take turns, which the lessons allow for" if cores < 4 else "")


def _memory() -> Found:
    from ppedu.notebook.resources import free_memory, memory

    free = free_memory()
    if free is None:
        return True, f"nobody here says how much is free; the lessons take up to {MEMORY >> 20} MB"
    text = f"{free >> 20} MB are free; the lessons take up to {MEMORY >> 20} MB"
    well = free + (memory(os.getpid()) or 0) >= MEMORY  # what this process has is the lesson's already
    return (True, text) if well else (False, f"{text}: shut down other notebooks, or give the container more")


def _gpus(answer: _Answer) -> Found:
    """None are needed, so all is well in any case."""
    none = "; the lessons need none"
    if len(answer.lines) < 2:
        return True, (f"torch cannot say ({answer.error})" if answer.lines else "not known without torch") + none
    built, names = json.loads(answer.lines[1])
    if names:
        return True, f"{len(names)}: {', '.join(dict.fromkeys(names))}; a rank asks for its own with pp.run.place()"
    return True, ("none found" if built else "none that torch can use: this is its CPU build") + none


def _ranks(answer: _Answer) -> Found:
    """Two of them are started, and add up their numbers."""
    from ppedu.core.errors import PipelineError, RankError
    from ppedu.notebook.pool import RankPool

    if not answer.lines:
        return False, "none without torch; install it first"
    began = time.monotonic()
    try:
        pool = RankPool()
        try:
            with tempfile.TemporaryDirectory(prefix="ppedu-") as folder:
                program = Path(folder, "add_up.py")
                program.write_text(ADD_UP, encoding="utf-8")
                pool.run(str(program), 2, timeout=SECONDS, write=lambda rank, piece: None)
        finally:
            pool.close()
    except RankError as error:
        return False, f"{_in_a_line(error)}; processes here must be able to talk by way of 127.0.0.1 (lo)"
    except PipelineError as error:  # says itself what to do
        return False, str(error)
    except OSError as error:
        return False, f"{error}; there must be processes to be had, and a folder for temporary files (TMPDIR)"
    return True, f"2 were started and added up their numbers, in {time.monotonic() - began:.1f} s"


def _packages(*names: str) -> Found:
    """Their versions, or how to install those that are missing."""
    there, missing = [], []
    for name in names:
        try:
            there.append(version(name) if len(names) == 1 else f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return False, f"no {' and no '.join(missing)}; pip install 'ppedu[lab]', then restart the kernel"
    return True, ", ".join(there)
