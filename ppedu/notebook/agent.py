"""Ranks started by torchrun itself, for several nodes or where ranks cannot be forked. It talks as `zygote` does.

Each rank that torchrun starts runs this module's `main`: it asks here, over a socket in the run's folder, where to
write, does what every rank does, and says with what exit code it ends.
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
from ppedu.notebook.rank import read_job, redirect, work
from ppedu.notebook.zygote import PACKET, adopt, kill_children, receive, send, signal_all

MOST_LINES = 12  # of what torchrun itself has to say
LOST = -signal.SIGKILL  # the status of a rank of which torchrun does not say how it ended


def serve(descriptor: int) -> NoReturn:
    """Start torchrun as told on the socket `descriptor`, until it closes."""
    adopt()
    control = socket.socket(fileno=descriptor)
    send(control, ready=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = ""
    request, descriptors = receive(control)
    while request:
        folder = request.get("folder", folder)
        if "run" in request:  # a signal is meant for ranks that have ended
            folder = request["run"]
            door, job, *pipes = descriptors
            os.close(door)  # torchrun keeps the store
            if not _run(control, Path(folder), job, pipes):
                break
        request, descriptors = receive(control)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _run(control: socket.socket, folder: Path, job_file: int, pipes: list[int]) -> bool:
    """One program on the ranks of this machine, from the first to the last; False if `control` has been closed."""
    job = read_job(job_file)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _in_short(folder) as path:
        door.bind(f"{path}/door")
    door.listen()
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
    watch = os.pidfd_open(torchrun.pid)
    processes: dict[int, int] = {}  # by local rank
    connections: dict[int, socket.socket] = {}
    ended: dict[int, int] = {}  # by local rank: the status
    untold: list[int] = []  # those of whom it is told when torchrun has ended, too: the last one, and the lost
    with selectors.DefaultSelector() as selector:
        for each in (control, door, watch):
            selector.register(each, selectors.EVENT_READ)
        while torchrun.poll() is None:
            for key, _ in selector.select():
                if key.fileobj is control:
                    request, _ = receive(control)
                    if request.get("signal") == signal.SIGKILL or not request:
                        torchrun.kill()
                        signal_all(processes.values(), signal.SIGKILL)
                        torchrun.wait()
                    elif "where" in request:
                        for connection in connections.values():
                            with contextlib.suppress(OSError):
                                connection.send(b"?")
                        signal_all(processes.values(), signal.SIGUSR1)
                    if not request:
                        kill_children()
                        return False
                elif key.fileobj is door:
                    connection, _ = door.accept()
                    hello = json.loads(connection.recv(PACKET))
                    local = hello["local"]
                    processes[local], connections[local] = hello["process"], connection
                    with contextlib.suppress(OSError):  # it may be gone again
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
                                untold.append(key.data)
    kill_children()
    # What torchrun says of ranks that could not say it themselves.
    said = (folder / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    told = {int(process): int(code) for code, process in re.findall(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)", said)}
    if torchrun.returncode and not processes:
        end = "\n".join(said.splitlines()[-MOST_LINES:])
        failure = {"rank": 0, "time": time.monotonic(), "text": f"torchrun could not start it:\n{end}"}
        write_private(folder / "0.json", json.dumps(failure).encode())
    for local in set(range(len(pipes))) - set(ended):
        ended[local] = told.get(processes[local], LOST) if local in processes else torchrun.returncode
        untold.append(local)
    untold.sort(key=lambda local: ended[local] == -signal.SIGTERM)  # what torchrun itself ended is not the cause
    for local in untold:
        send(control, rank=local, status=ended[local])
    for descriptor in (watch, job_file, *pipes):
        os.close(descriptor)
    for each in (door, *connections.values()):
        each.close()
    return True


@contextlib.contextmanager
def _in_short(folder: Path) -> Iterator[str]:
    """Another path of the folder: a socket's may have 107 characters, and that of temporary files can be longer."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def main() -> NoReturn:
    """One rank, started by torchrun as `-m ppedu.notebook.agent FOLDER`."""
    folder = Path(sys.argv[1])
    local = int(os.environ["LOCAL_RANK"])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _in_short(folder) as path:
        connection.connect(f"{path}/door")
    send(connection, local=local, process=os.getpid())
    _, (output, job_file), _, _ = socket.recv_fds(connection, PACKET, 2)
    job = read_job(job_file)
    sys.path[0] = job["folder"]
    status = 1
    try:
        connection = socket.socket(fileno=redirect(output, connection.detach()))
        import torch

        torch.set_num_threads(1)
        status = work(local, folder, job, connection.fileno())
    finally:
        with contextlib.suppress(OSError):
            send(connection, status=status)
    sys.exit(status)


if __name__ == "__main__":
    main()
