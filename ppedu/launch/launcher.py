"""Code shared by the launchers `zygote`, `agent` and `remote`: starting them, messages, and ending processes.

A launcher reads JSON messages from a socket, and answers with others. With "run" come file descriptors: a memory file
that holds {program, module, arguments, folder, environment, flags} as JSON, for each rank the write end of the pipe for
its output, and with "store" a socket that listens at MASTER_PORT, for the store in which the ranks rendezvous.

    in   {"folder": FOLDER}           the folder of a run is about to be made
         {"run": FOLDER, "first": k, "store": s}
                                      start ranks k, k + 1 and so on
         {"kill": true}               kill all ranks, and the processes that they have started
         {"locate": true}             have every rank report where it is, see `rank`
    out  {"ready": true}              torch is imported
         {"note": text}               what it waits for until it can start ranks
         {"error": text}              it cannot start ranks, and has ended
         {"rank": k, "host": name}    a rank will be started on another host
         {"rank": k, "process": n}    a rank has started
         {"rank": k, "status": n}     a rank has ended: its exit code, or the negative number of a signal; with
                                      "lost", another host is lost, and the launcher ends with this run

Once the socket closes, because the owner of the pool has ended, the launcher kills all ranks, removes the folder of the
run, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppedu.launch.environment import HOME, ONE_THREAD, module_path

PACKET = 1 << 20  # bytes; a message is far smaller
MAX_RANKS = 64
LOST = -signal.SIGKILL  # the status of a rank that cannot report its end, as its host is gone, for example
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def start(module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a launcher, and return its process and the socket for messages.

    Args:
        module: of this package; its `serve` is called with the descriptor of the launcher's socket and `arguments`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    call = f"import sys; from ppedu.launch.{module} import serve; serve({theirs.fileno()}, *sys.argv[1:])"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", call, *arguments],
            pass_fds=[theirs.fileno()],
            env=os.environ | ONE_THREAD | module_path(),
            cwd=HOME,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that an interrupt at the terminal reaches only the process that calls this
        )
    return process, ours


def send(control: socket.socket, *descriptors: int, **message: Any) -> None:
    """Send a message with file descriptors. If the peer has ended, do nothing: the next `receive` returns {}."""
    with contextlib.suppress(ConnectionError):
        socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for the next message; return it and the file descriptors that came with it. {} if the peer has ended."""
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(control, PACKET, MAX_RANKS + 2)
        except ConnectionResetError:  # the peer has ended without reading all; what it has sent follows
            continue
        return json.loads(packet) if packet else {}, descriptors


def close_all(descriptors: list[int]) -> None:
    """Close the file descriptors and empty the list; calling this again does nothing."""
    while descriptors:
        os.close(descriptors.pop())


def become_subreaper() -> None:
    """Make this process the parent of processes that ranks leave behind, and continue it when its own parent ends.

    A rank may have stopped this process with SIGSTOP: it would not notice that its socket is closed.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def exit_with_parent(parent: int) -> None:
    """Move this process to a session of its own, and have the system kill it when the process `parent` ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_all(processes: Iterable[int], number: int) -> None:
    """Send the signal `number` to the processes; SIGKILL also to the process groups that they lead."""
    for process in processes:
        if number == signal.SIGKILL:
            kill_group(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)  # a process that has just started has no group of its own yet


def kill_group(process: int) -> None:
    """Kill the process group that `process` leads, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def kill_children() -> None:
    """Kill the children of this process, and their children, of which it becomes the parent, until no child is left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for file in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    _, parent, *_ = file.read_text().rpartition(")")[2].split()  # after the name, which may have spaces
                    if int(parent) == os.getpid():
                        os.kill(int(file.parent.name), signal.SIGKILL)
            os.waitpid(-1, 0)
