"""A rank from its first moment to its last, under either launcher.

It leaves reports in the run's folder, which only this user can read:

    RANK.json      why the program failed: {rank, time, text}
    RANK.location  where the rank is, once it has been asked through the query pipe, see `hang.Location`
    RANK.stack     Python's stack, on SIGUSR1: less, but also available if the rank lets no other thread run
    RANK.result    the value passed to `give_back`
"""

from __future__ import annotations

import atexit
import contextlib
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

from ppedu.core import PipelineError
from ppedu.launch.exchange import read_inputs, write_private
from ppedu.launch.hang import locate
from ppedu.launch.launcher import exit_with_parent

STARTS_PROGRAMS = {__file__, *(function.__code__.co_filename for function in (runpy.run_path, read_inputs))}


def run_rank(rank: int, local: int, parent: int, folder: Path, job_file: int, output: int, query: int) -> NoReturn:
    """Turn this forked process into a rank, run the program and end the process.

    Args:
        local: its number on this machine.
        parent: the process it was forked from.
        folder: the run's folder.
        job_file: the memory file with the job, see `launcher`.
        output: the pipe to write to.
        query: the read end of a pipe; when the other end closes, the rank reports its location.
    """
    status = 1
    try:
        exit_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        job = read_job(job_file)
        query = redirect(output, query)
        sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
        os.environ.clear()
        os.environ.update(job["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(local), "ROLE_RANK": str(rank)})
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{rank}.error")
        os.chdir(job["folder"])
        sys.path[0:1] = [job["folder"]]
        _reseed()
        status = run_program(rank, folder, job, query)
    except BaseException:
        traceback.print_exc()
    finally:
        end(status)


def end(status: int) -> NoReturn:
    """End the process as an interpreter does, but without finalizing its objects.

    A process group that the program has not destroyed has threads of its own, and finalizing it may abort the process.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # wait for the program's threads
        atexit._run_exitfuncs()  # and call the functions that it has registered
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def read_job(file: int) -> dict[str, Any]:
    """Return the job, see `launcher`, from a memory file that all ranks share; the position in the file stays."""
    return json.loads(os.pread(file, os.fstat(file).st_size, 0))


def redirect(output: int, query: int) -> int:
    """Make `output` stdout and stderr, move `query` to descriptor 3 and return 3. Close all other files but stdin."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    if query != 3:
        os.dup2(query, 3, inheritable=False)
    os.closerange(4, 1024)
    return 3


def run_program(rank: int, folder: Path, job: dict[str, Any], query: int) -> int:
    """Run the job's program as `python program` or `python -m module` would, and return its exit code.

    If the program fails, its traceback is written to RANK.json in the run's folder.

    Args:
        query: a descriptor that becomes readable when the rank must report its location.
    """
    stack = os.open(folder / f"{rank}.stack", os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    threading.Thread(target=_report_location, args=(rank, folder, job["program"], query), daemon=True).start()
    sys.argv = [job["program"], *job["arguments"]]
    try:
        if job["module"]:
            runpy.run_module(job["program"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(job["program"], read_inputs(folder), run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            code = stop.code or 0
            fits_c_long = -(2**63) <= code < 2**63
            return code & 0xFF if fits_c_long else 0xFF  # as the system reports it
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        failure = {"rank": rank, "time": time.monotonic(), "text": _program_traceback(error, job["program"])}
        write_private(folder / f"{rank}.json", json.dumps(failure).encode())
        return 1
    return 0


def _stream(descriptor: int, mode: str) -> Any:
    """Open a descriptor as Python opens stdin, stdout and stderr."""
    return open(descriptor, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _reseed() -> None:
    """Reseed the generators of random, numpy and torch: a forked process would repeat the numbers of its parent."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()


def _report_location(rank: int, folder: Path, program: str, query: int) -> None:
    """Wait until `query` is readable, then write the location of the main thread to RANK.location."""
    with contextlib.suppress(OSError):
        os.read(query, 1)
        write_private(folder / f"{rank}.location", json.dumps(locate(rank, program)._asdict()).encode())


def _program_traceback(error: BaseException, program: str) -> str:
    """Return the error with its traceback, which begins at the first line of the file `program`.

    An error of ppedu explains itself: of its traceback, only the lines of the program are shown. An error raised
    before the first line of the program has no traceback.
    """
    ours = isinstance(error, PipelineError)
    formatted = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = formatted
    while each is not None:  # the error, then the one that caused it, and so on
        frames = list(dropwhile(lambda frame: frame.filename in STARTS_PROGRAMS, each.stack))
        if own := [index for index, frame in enumerate(frames) if frame.filename == program]:
            frames = [frame for frame in frames[own[0] :] if not ours or frame.filename == program]
        each.stack = traceback.StackSummary.from_list(frames)
        before = each.__cause__
        if before is None and not each.__suppress_context__:
            before = each.__context__
        if ours and before and not any(frame.filename == program for frame in before.stack):
            each.__cause__ = each.__context__ = before = None
        each = before
    lines = formatted.format() if formatted.stack else formatted.format_exception_only()
    return "".join(lines).replace(f'File "{program}"', f'File "{Path(program).stem}"').rstrip()
