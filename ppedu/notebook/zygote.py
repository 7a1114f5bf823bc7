"""A clean process with torch imported, from which ranks are forked: a rank starts in milliseconds.

It must never compute: a process that has used torch's threads cannot be forked safely. So it imports,
forks, and reports; one thread each (OMP_NUM_THREADS=1 is set before it starts); no CUDA, no process group.

It is told what to run by JSON packets on a socket. With "run" come a socket that listens at MASTER_PORT, a file in
memory that holds {program, module, arguments, folder, environment} as JSON, and one pipe's writing end for each rank:

    in   {"folder": FOLDER}   a run's folder is about to be made
         {"run": FOLDER}      start the ranks
         {"signal": n}     to every rank that is alive; SIGKILL goes to all that the rank has started, too
         {"where": true}   every rank writes down where it is, see `rank`
    out  {"ready": true}   torch is imported
         {"error": text}   it cannot be; nothing follows
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

from ppedu.notebook.rank import PR_SET_PDEATHSIG, become, end_with

PACKET = 1 << 20  # bytes; a request is far smaller
MOST_RANKS = 64
PR_SET_CHILD_SUBREAPER = 36


def serve(descriptor: int) -> NoReturn:
    """Import torch, then fork ranks as told on the socket `descriptor`, until it closes."""
    control = socket.socket(fileno=descriptor)
    try:
        import numpy  # noqa: F401
        import torch.distributed
        import torch.distributed.pipelining  # noqa: F401 (the first optimizer step imports the same, for a second)
    except Exception as error:
        send(control, error=f"{type(error).__name__}: {error}")
        os._exit(1)

    # What the imports would clean up at their end takes a rank 60 ms, and 30 MB of its own; the system does it, too.
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False
    gc.collect()
    gc.freeze()  # the imports stay shared memory: ranks' collections do not touch them
    adopt()
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
        if not request:
            signal_all(alive, signal.SIGKILL)
            kill_children()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        if "folder" in request:
            folder = request["folder"]
        elif "run" in request:
            folder, own = request["run"], os.getpid()
            door, job, *outputs = pipes
            listen, bell = os.pipe()
            if os.fork() == 0:
                _keep_store(own, door)
            for rank, output in enumerate(outputs):
                process = os.fork()
                if process == 0:
                    become(rank, own, Path(folder), job, output, listen)
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
    """Be the parent of what the ranks leave behind, for `kill_children`; and wake when this process's parent ends.

    If a rank has stopped this process, it could not see then that its socket is closed.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def send(control: socket.socket, *descriptors: int, **message: Any) -> None:
    """Send a message, with these descriptors. If the other process has ended, `receive` will tell."""
    with contextlib.suppress(ConnectionError):
        socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a message, empty if the other process has ended, and the descriptors that came with it."""
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(control, PACKET, MOST_RANKS + 2)
        except ConnectionResetError:  # it has ended without reading everything; what it has sent comes after this
            continue
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
