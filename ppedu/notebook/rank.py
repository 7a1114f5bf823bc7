"""What a rank does from its first moment to its last, whoever has started it.

A rank reports in its run's folder, which only this user can read:

    RANK.json    why it failed: {rank, time, text}
    RANK.place   where it is, once it has been asked by way of `bell`: see `waits`
    RANK.stack   the same, from SIGUSR1: Python's stack alone, but also of a rank that lets no other thread run
    RANK.result  what `give_back` was given
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
from itertools import dropwhile
from pathlib import Path
from typing import Any, NoReturn

from ppedu.core.errors import PipelineError
from ppedu.notebook.exchange import read_inputs, write_private
from ppedu.notebook.waits import place

PR_SET_PDEATHSIG = 1
STARTS_PROGRAMS = {__file__, *(function.__code__.co_filename for function in (runpy.run_path, read_inputs))}


def become(rank: int, parent: int, report: Path, job_file: int, output: int, bell: int) -> NoReturn:
    """Be the rank, from the fork to the end of the process.

    parent: the process it was forked from. report: the run's folder. job_file: what to run, see `zygote`. output: where
    to write. bell: something to read from that ends when the rank is asked where it is.
    """
    status = 1
    try:
        end_with(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        job = read_job(job_file)
        bell = redirect(output, bell)
        sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
        os.environ.clear()
        os.environ.update(job["environment"] | {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")})
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(report / f"{rank}.error")
        os.chdir(job["folder"])
        sys.path[0:1] = [job["folder"]]
        _draw_anew()
        status = work(rank, report, job, bell)
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end: wait for threads
        atexit._run_exitfuncs()  # and call what was registered
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def read_job(file: int) -> dict[str, Any]:
    """What to run, from a file in memory that all ranks share."""
    job: dict[str, Any] = json.loads(os.pread(file, os.fstat(file).st_size, 0))
    return job


def end_with(parent: int) -> None:
    """In a process of its own group, ended by the system when its parent ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def redirect(output: int, bell: int) -> int:
    """Write to `output` from now on, and hold nothing else open but `bell`; returns its new number."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    if bell != 3:
        os.dup2(bell, 3, inheritable=False)
    os.closerange(4, 1024)
    return 3


def work(rank: int, report: Path, job: dict[str, Any], bell: int) -> int:
    """Run the program as `python program` or `python -m module` would, and return its exit code."""
    stack = os.open(report / f"{rank}.stack", os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    threading.Thread(target=_answer, args=(rank, report, job["program"], bell), daemon=True).start()
    sys.argv = [job["program"], *job["arguments"]]
    try:
        if job["module"]:
            runpy.run_module(job["program"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(job["program"], read_inputs(report), run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return _exit_code(stop.code or 0)
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        failure = {"rank": rank, "time": time.monotonic(), "text": _explain(error, job["program"])}
        write_private(report / f"{rank}.json", json.dumps(failure).encode())
        return 1
    return 0


def _exit_code(code: int) -> int:
    """What the system makes of an exit code: its last eight bits, as long as it fits into a C long."""
    return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF


def _stream(descriptor: int, mode: str) -> Any:
    return open(descriptor, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _draw_anew() -> None:
    """A forked process would repeat its parent's random numbers; a new one would not."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(1)


def _answer(rank: int, report: Path, program: str, bell: int) -> None:
    """Once the bell has rung, say where the main thread is, which may be waiting in a message."""
    with contextlib.suppress(OSError):
        os.read(bell, 1)
        file = report / f"{rank}.place"
        write_private(file.with_suffix(".tmp"), json.dumps(place(rank, program)).encode())
        file.with_suffix(".tmp").rename(file)


def _explain(error: BaseException, program: str) -> str:
    """The traceback from the program's own lines on; of ppedu's errors, which explain themselves, only those.

    A program that could not begin has no lines, and so no traceback.
    """
    ours = isinstance(error, PipelineError)
    told = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = told
    while each is not None:
        frames = list(dropwhile(lambda frame: frame.filename in STARTS_PROGRAMS, each.stack))
        if own := [place for place, frame in enumerate(frames) if frame.filename == program]:
            frames = [frame for frame in frames[own[0] :] if not ours or frame.filename == program]
        each.stack = traceback.StackSummary.from_list(frames)
        before = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if ours and before and not any(frame.filename == program for frame in before.stack):
            each.__cause__ = each.__context__ = before = None
        each = before
    lines = told.format() if told.stack else told.format_exception_only()
    return "".join(lines).replace(f'File "{program}"', f'File "{Path(program).stem}"').rstrip()
