"""A clean process with torch imported, from which ranks are forked: a rank starts in milliseconds.

It must never compute: a process that has used torch's threads cannot be forked safely. So it imports,
forks, and reports; one thread each (OMP_NUM_THREADS=1 is set before it starts); no CUDA, no process group.

It is told what to run by JSON packets on a socket; with the first come a socket that listens at MASTER_PORT, and one
pipe's writing end for each rank:

    in   {"run": FOLDER}   FOLDER/job.json holds {program, module, arguments, folder, environment}
         {"signal": n}     to every rank that is alive; SIGKILL goes to all that the rank has started, too
         {"where": true}   every rank writes down where it is, see `rank`
    out  {"ready": true}   torch is imported
         {"rank": k, "process": n}   a rank has started
         {"rank": k, "status": n}    a rank has ended, with its exit code, or minus a signal's number

When the socket closes, because whoever started it has ended, it ends all ranks and itself, and removes the folder.
`agent` speaks the same language.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from ppedu.notebook.rank import become, end_with

PACKET = 1 << 20  # bytes; a request is far smaller
MOST_RANKS = 64
PR_SET_CHILD_SUBREAPER = 36


def serve(descriptor: int) -> NoReturn:
    """Import torch, then fork ranks as told on the socket `descriptor`, until it closes."""
    import numpy  # noqa: F401
    import torch.distributed
    import torch.distributed.pipelining  # noqa: F401 (the first optimizer step imports the same, for a second)

    # What the imports would clean up at their end takes a rank 60 ms, and 30 MB of its own; the system does it, too.
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False
    gc.collect()
    gc.freeze()  # the imports stay shared memory: ranks' collections do not touch them
    adopt()
    control = socket.socket(fileno=descriptor)
    send(control, ready=True)

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
    folder, bell = "", -1  # of the run: its folder, and the end of a pipe that the ranks listen to
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        with contextlib.suppress(BlockingIOError):
            while wake.recv(512):
                pass
        request: dict[str, Any] = {}
        pipes: list[int] = []
        try:
            for process, status in _ended():
                if process in alive:
                    kill_group(process)  # whatever the rank has started and left
                    rank = alive.pop(process)
                    if not alive:
                        kill_children()  # and what has left its group
                        bell = _close(bell)
                    send(control, rank=rank, status=os.waitstatus_to_exitcode(status))
            if control not in ready:
                continue
            request, pipes = receive(control)
        except ConnectionError:
            pass  # whoever started this process has ended without reading its last news: as good as closed
        if not request:
            signal_all(alive, signal.SIGKILL)
            kill_children()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        if "run" in request:
            folder, own = request["run"], os.getpid()
            listen, bell = os.pipe()
            if os.fork() == 0:
                _keep_store(own, pipes[0])
            for rank, pipe in enumerate(pipes[1:]):
                process = os.fork()
                if process == 0:
                    become(rank, own, Path(folder), pipe, listen)
                alive[process] = rank
                send(control, rank=rank, process=process)
            for descriptor in (listen, *pipes):
                os.close(descriptor)
        elif "where" in request:
            bell = _close(bell)
            signal_all(alive, signal.SIGUSR1)
        else:
            signal_all(alive, request["signal"])


def _keep_store(parent: int, door: int) -> NoReturn:
    """Be the store in which the ranks find each other. By itself, rank 0 would listen to the whole network.

    door: a socket that listens to this machine alone.
    """
    from torch.distributed import TCPStore

    try:
        end_with(parent)
        os.dup2(door, 3)
        os.closerange(4, 1024)
        port = socket.socket(fileno=os.dup(3)).getsockname()[1]
        kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=3)
        while kept:
            signal.pause()
    finally:
        os._exit(1)


def adopt() -> None:
    """What the ranks leave behind becomes this process's own children, for `kill_children`."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def send(control: socket.socket, **message: Any) -> None:
    control.send(json.dumps(message).encode())


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, empty if the socket is closed, and the descriptors that came with it."""
    packet, descriptors, _, _ = socket.recv_fds(control, PACKET, MOST_RANKS + 1)
    return json.loads(packet) if packet else {}, descriptors


def signal_all(processes: Iterable[int], number: int) -> None:
    for process in processes:
        if number == signal.SIGKILL:
            kill_group(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)  # in its first moment it has no group of its own yet


def kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _close(descriptor: int) -> int:
    if descriptor >= 0:
        os.close(descriptor)
    return -1


def _ended() -> list[tuple[int, int]]:
    """Children that have ended, with their status."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (each := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(each)
    return found


def kill_children() -> None:
    """End all children, and those that then become ours, until there are none."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for file in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(file.parent.name), signal.SIGKILL)
            os.waitpid(-1, 0)
