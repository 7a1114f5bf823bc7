"""The launcher that forks: a process that has imported torch and nothing else, so that a rank starts in milliseconds.

It must never compute: a process whose torch threads have started cannot be forked safely. So it has one thread
(OMP_NUM_THREADS=1 is set before it starts), no CUDA context and no process group.

The fork server of multiprocessing cannot replace it: when its owner is killed, that server ends and leaves
behind the run's folder and the processes that ranks have started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from ppedu.launch import launcher
from ppedu.launch.rank import run_rank


def serve(descriptor: int) -> NoReturn:
    """Import torch, then fork ranks whenever the pool at the other end of the socket `descriptor` requests it.

    The messages are described in `launcher`. Ends this process when the socket closes.
    """
    control = socket.socket(fileno=descriptor)
    try:
        import numpy  # noqa: F401
        import torch.distributed
        import torch.distributed.pipelining  # noqa: F401 (the first optimizer step would import it, in a second)
    except Exception as error:
        text = f"importing torch failed: {type(error).__name__}: {error}; pip install 'ppedu[run]'"
        launcher.send(control, error=f"cannot start ranks: {text}")
        os._exit(1)

    # The finalizers that these imports have registered would cost each rank 60 ms and 30 MB, and the system frees all.
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False
    gc.collect()
    gc.freeze()  # keep the imported objects in shared memory: the ranks' garbage collections do not touch them
    launcher.become_subreaper()
    launcher.send(control, ready=True)

    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive: dict[int, int] = {}  # process → rank
    folder = ""
    query: list[int] = []  # the write end of the run's query pipe, until it is closed
    while True:
        ready = wait([control, woken])
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 16)  # all that a pipe can hold
        for process, status in _ended_children():
            if process in alive:
                launcher.kill_group(process)  # the processes that the rank has started
                rank = alive.pop(process)
                if not alive:
                    launcher.kill_children()  # those that have left its group
                    launcher.close_all(query)
                launcher.send(control, rank=rank, status=os.waitstatus_to_exitcode(status))
        if control not in ready:
            continue
        request, descriptors = launcher.receive(control)
        if not request:
            launcher.signal_all(alive, signal.SIGKILL)
            launcher.kill_children()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        if "folder" in request:
            folder = request["folder"]
        elif "run" in request:
            folder, first, own = request["run"], request["first"], os.getpid()
            job, *outputs = descriptors
            asked, asking = os.pipe()
            query.append(asking)
            if request["store"]:
                listener = outputs.pop()
                if os.fork() == 0:
                    _serve_store(own, listener)
            for rank, output in enumerate(outputs, first):
                process = os.fork()
                if process == 0:
                    run_rank(rank, rank - first, own, Path(folder), job, output, asked)
                alive[process] = rank
                launcher.send(control, rank=rank, process=process)
            launcher.close_all([asked, *descriptors])
        elif "locate" in request:
            launcher.close_all(query)
            launcher.signal_all(alive, signal.SIGUSR1)
        elif "kill" in request:
            launcher.signal_all(alive, signal.SIGKILL)


def _serve_store(parent: int, listener: int) -> NoReturn:
    """Serve the TCPStore in which the ranks rendezvous, until `parent` ends or this process is killed.

    Args:
        listener: a socket that listens on one interface only; the store of rank 0 would listen on all.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]  # which torch does not export explicitly

    try:
        launcher.exit_with_parent(parent)
        os.dup2(listener, 3)
        os.closerange(4, 1024)
        address, port = socket.socket(fileno=os.dup(3)).getsockname()[:2]
        # Before 2.7, torch's newer store, which uses libuv, cannot take over a socket.
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, use_libuv=False, master_listen_fd=3)
        while store:
            signal.pause()
    finally:
        os._exit(1)


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yield the ID and wait status of each child that has ended since the last call."""
    with contextlib.suppress(ChildProcessError):
        while (each := os.waitpid(-1, os.WNOHANG))[0]:
            yield each
