"""The launcher that starts torchrun itself, for several nodes or where ranks cannot be forked.

Each rank that torchrun starts runs `main` of this module. It connects to a socket in the run's folder, receives the
descriptor to write to, runs the program, and reports its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ppedu.notebook.exchange import write_private
from ppedu.notebook.launcher import PACKET, become_subreaper, close_all, kill_children, receive, send, signal_all
from ppedu.notebook.rank import read_job, redirect, run_program

MAX_LINES = 12  # of torchrun's own output, in an error
LOST = -signal.SIGKILL  # the status of a rank whose end neither it nor torchrun has reported


def serve(descriptor: int) -> NoReturn:
    """Start torchrun as requested on the socket `descriptor`, until it closes."""
    become_subreaper()
    control = socket.socket(fileno=descriptor)
    send(control, ready=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = ""
    request, descriptors = receive(control)
    while request:
        folder = request.get("folder", folder)
        if "run" in request:  # any other request is for ranks that have ended
            folder = request["run"]
            listener, job, *pipes = descriptors
            os.close(listener)  # torchrun serves the store itself
            if not _run(control, Path(folder), job, pipes):
                break
        request, descriptors = receive(control)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _run(control: socket.socket, folder: Path, job_file: int, pipes: list[int]) -> bool:
    """Run one program on the ranks of this node; return False if `control` was closed meanwhile."""
    job = read_job(job_file)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short_path(folder) as path:
        server.bind(f"{path}/socket")
    server.listen()
    command = [sys.executable, "-m", "torch.distributed.run", *job["flags"], f"--log-dir={folder / 'logs'}"]
    with (folder / "torchrun.log").open("wb") as log:
        torchrun = subprocess.Popen(
            [*command, "-m", "ppedu.notebook.agent", str(folder)],
            env=job["environment"],
            cwd=job["folder"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    torchrun_end = os.pidfd_open(torchrun.pid)
    processes: dict[int, int] = {}  # by local rank
    connections: dict[int, socket.socket] = {}
    ended: dict[int, int] = {}  # by local rank: the status
    unsent: list[int] = []  # ranks whose end is reported after torchrun's: the last one, and those that were lost
    with selectors.DefaultSelector() as selector:
        for each in (control, server, torchrun_end):
            selector.register(each, selectors.EVENT_READ)
        while torchrun.poll() is None:
            for key, _ in selector.select():
                if key.fileobj is control:
                    request, _ = receive(control)
                    if "kill" in request or not request:
                        torchrun.kill()
                        signal_all(processes.values(), signal.SIGKILL)
                        torchrun.wait()
                    elif "locate" in request:
                        for connection in connections.values():
                            with contextlib.suppress(OSError):
                                connection.send(b"?")
                        signal_all(processes.values(), signal.SIGUSR1)
                    if not request:
                        kill_children()
                        return False
                elif key.fileobj is server:
                    connection, _ = server.accept()
                    hello = json.loads(connection.recv(PACKET))
                    local = hello["local"]
                    processes[local], connections[local] = hello["process"], connection
                    with contextlib.suppress(OSError):  # the rank may have ended already
                        socket.send_fds(connection, [b"!"], [pipes[local], job_file])
                    selector.register(connection, selectors.EVENT_READ, local)
                    send(control, rank=local, process=hello["process"])
                elif key.data is not None:
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(OSError):
                        if packet := connections[key.data].recv(PACKET):
                            ended[key.data] = json.loads(packet)["status"]
                            if len(ended) < len(pipes):
                                send(control, rank=key.data, status=ended[key.data])
                            else:
                                unsent.append(key.data)
    kill_children()
    # torchrun's log has the exit codes of the ranks that could not report one.
    log_text = (folder / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    logged = re.findall(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)", log_text)
    exit_codes = {int(process): int(code) for code, process in logged}
    if torchrun.returncode and not processes:
        last_lines = "\n".join(log_text.splitlines()[-MAX_LINES:])
        failure = {"rank": 0, "time": time.monotonic(), "text": f"torchrun could not start it:\n{last_lines}"}
        write_private(folder / "0.json", json.dumps(failure).encode())
    for local in set(range(len(pipes))) - set(ended):
        ended[local] = exit_codes.get(processes[local], LOST) if local in processes else torchrun.returncode
        unsent.append(local)
    unsent.sort(key=lambda local: ended[local] == -signal.SIGTERM)  # torchrun's own kills are not the root cause
    for local in unsent:
        send(control, rank=local, status=ended[local])
    close_all([torchrun_end, job_file, *pipes])
    for each in (server, *connections.values()):
        each.close()
    return True


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Provide a short path of `folder`: that of a socket is limited to 107 characters."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def main() -> NoReturn:
    """Run one rank, started by torchrun as `-m ppedu.notebook.agent FOLDER`."""
    folder = Path(sys.argv[1])
    local = int(os.environ["LOCAL_RANK"])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short_path(folder) as path:
        connection.connect(f"{path}/socket")
    send(connection, local=local, process=os.getpid())
    _, (output, job_file), _, _ = socket.recv_fds(connection, PACKET, 2)
    job = read_job(job_file)
    sys.path[0] = job["folder"]
    status = 1
    try:
        connection = socket.socket(fileno=redirect(output, connection.detach()))
        import torch

        torch.set_num_threads(1)
        status = run_program(local, folder, job, connection.fileno())
    finally:
        with contextlib.suppress(OSError):
            send(connection, status=status)
    sys.exit(status)


if __name__ == "__main__":
    main()
