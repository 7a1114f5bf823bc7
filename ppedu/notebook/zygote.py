"""A clean process with torch imported, from which ranks are forked: a rank starts in milliseconds.

It must never compute: a process that has used torch's threads cannot be forked safely. So it imports,
forks, and reports; one thread each (OMP_NUM_THREADS=1 is set before it starts); no CUDA, no process group.

It is told what to run by JSON packets on a socket, with one pipe's writing end for each rank:

    in   {"run": FOLDER}   FOLDER/job.json holds {program, module, arguments, folder, environment}
         {"signal": n}     to every rank that is alive; SIGKILL goes to all that the rank has started, too
    out  {"ready": true}   torch is imported
         {"rank": k, "status": n}   a rank has ended, with its exit code, or minus a signal's number

When the socket closes, because whoever started it has ended, it ends all ranks and itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

PACKET = 1 << 20  # bytes; a request is far smaller
MOST_RANKS = 64
PR_SET_PDEATHSIG = 1


def serve(descriptor: int) -> NoReturn:
    """Import torch, then fork ranks as told on the socket `descriptor`, until it closes."""
    import numpy  # noqa: F401
    import torch
    import torch.distributed
    import torch.distributed.pipelining  # noqa: F401 (the first optimizer step imports the same, for a second)

    gc.collect()
    gc.freeze()  # the imports stay shared memory: ranks' collections do not touch them
    control = socket.socket(fileno=descriptor)
    control.send(json.dumps({"ready": True}).encode())

    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    alive: dict[int, int] = {}  # process → rank
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        with contextlib.suppress(BlockingIOError):
            while wake.recv(512):
                pass
        packet, pipes = b"", list[int]()
        try:
            for process, rank in list(alive.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    del alive[process]
                    _kill_group(process)  # whatever the rank has started and left
                    answer = {"rank": rank, "status": os.waitstatus_to_exitcode(status)}
                    control.send(json.dumps(answer).encode())
            if control not in ready:
                continue
            packet, pipes, _, _ = socket.recv_fds(control, PACKET, MOST_RANKS)
        except ConnectionError:
            pass  # whoever started this process has ended without reading its last news: as good as closed
        if not packet:
            for process in alive:
                _kill_group(process)
            os._exit(0)
        request = json.loads(packet)
        if "signal" in request:
            for process in alive:
                if request["signal"] == signal.SIGKILL:
                    _kill_group(process)
                else:
                    os.kill(process, request["signal"])
        else:
            for rank in range(len(pipes)):
                process = os.fork()
                if process == 0:
                    _become(rank, Path(request["run"]), pipes)
                alive[process] = rank
            for pipe in pipes:
                os.close(pipe)


def _stream(descriptor: int, mode: str) -> Any:
    return open(descriptor, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _become(rank: int, report: Path, pipes: list[int]) -> NoReturn:
    """Be the rank, from the fork to the end of the process."""
    status = 1
    try:
        parent = os.getppid()
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(pipes[rank], 1)
        os.dup2(pipes[rank], 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 1024)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
        with (report / f"{rank}.stack").open("w") as stack:
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
            status = _run(rank, report)
            threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end: wait for threads
            atexit._run_exitfuncs()  # and call what was registered
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _run(rank: int, report: Path) -> int:
    """Run the program as `python program` or `python -m program` would, and return its exit code."""
    import numpy
    import torch

    job = json.loads((report / "job.json").read_text(encoding="utf-8"))
    os.environ.clear()
    os.environ.update(job["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.chdir(job["folder"])
    sys.path[0:1] = [job["folder"]]
    sys.argv = [job["program"], *job["arguments"]]
    # A forked process would repeat the parent's random numbers; a new one would not.
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(1)
    try:
        if job["module"]:
            runpy.run_module(job["program"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(job["program"], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        failure = {"rank": rank, "time": time.monotonic(), "text": _explain(error, job["program"])}
        (report / f"{rank}.json").write_text(json.dumps(failure), encoding="utf-8")
        return 1
    return 0


def _explain(error: BaseException, program: str) -> str:
    """The traceback from the program's own lines on; of ppedu's errors, which explain themselves, only those."""
    told = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = told
    while each is not None:
        own = [place for place, frame in enumerate(each.stack) if frame.filename == program]
        if own:
            frames = list(each.stack)[own[0] :]
            if any(kind.__name__ == "PipelineError" for kind in type(error).__mro__):
                frames = [frame for frame in frames if frame.filename == program]
            each.stack = traceback.StackSummary.from_list(frames)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "".join(told.format()).replace(f'File "{program}"', f'File "{Path(program).stem}"').rstrip()
