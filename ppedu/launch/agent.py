"""The launcher that starts torchrun itself, for several nodes or where ranks cannot be forked.

Each rank that torchrun starts runs `main` of this module. It sends its process ID to a socket in the run's folder,
receives the descriptors of its output and of the job, runs the program, and sends its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from array import array
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from ppedu.launch.exchange import NUMBER, write_private
from ppedu.launch.launcher import LOST, PACKET, become_subreaper, close_all, kill_children, receive, send, signal_all
from ppedu.launch.rank import end, read_job, redirect, run_program

MAX_LINES = 12  # of torchrun's own output, in an error


def serve(descriptor: int) -> NoReturn:
    """Start torchrun whenever the pool, at the other end of the socket `descriptor`, requests it, until that closes.

    The messages are described in `launcher`.
    """
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
            job, *pipes = descriptors
            _run(control, Path(folder), job, pipes)
        request, descriptors = receive(control)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _run(control: socket.socket, folder: Path, job_file: int, pipes: list[int]) -> None:
    """Run one job with torchrun on the ranks of this node, and report their start and end on `control`.

    If `control` closes meanwhile, kill all ranks and return.

    Args:
        job_file: the memory file with the job, see `launcher`.
        pipes: by local rank, where its output goes; closed at the end.
    """
    job = read_job(job_file)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    os.chdir(folder)  # because the path of a socket is limited to 107 characters
    server.bind("socket")
    command = [sys.executable, "-m", "torch.distributed.run", *job["flags"], f"--log-dir={folder / 'logs'}"]
    with (folder / "torchrun.log").open("wb") as log:
        torchrun = subprocess.Popen(
            [*command, "-m", "ppedu.launch.agent", str(folder)],
            env=job["environment"],
            cwd=job["folder"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    torchrun_end = os.pidfd_open(torchrun.pid)
    processes: dict[int, int] = {}  # by local rank, as are the statuses
    statuses: dict[int, int] = {}
    unsent = set(range(len(pipes)))  # the ranks whose end is not reported yet
    while torchrun.poll() is None:
        ready = wait([control, server, torchrun_end])
        if control in ready:
            request, _ = receive(control)
            if "kill" in request or not request:
                torchrun.kill()
                signal_all(processes.values(), signal.SIGKILL)
                torchrun.wait()
            elif "locate" in request:
                for process in processes.values():
                    with contextlib.suppress(OSError):  # the rank may have ended already
                        server.sendto(b"?", f"{process}.socket")
                signal_all(processes.values(), signal.SIGUSR1)
            if not request:
                kill_children()
                return
        if server in ready:
            message, _ = receive(server)
            rank = message["rank"]
            if "process" in message:
                processes[rank] = message["process"]
                files = socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [pipes[rank], job_file])
                with contextlib.suppress(OSError):
                    server.sendmsg([b"!"], [files], 0, f"{processes[rank]}.socket")
                send(control, **message)
            else:
                statuses[rank] = message["status"]
                if len(unsent) > 1:  # the run is over with the report of the last end, so it must follow torchrun's
                    unsent.discard(rank)
                    send(control, **message)
    kill_children()
    # torchrun's log has the exit codes of the ranks that could not report one.
    log_text = (folder / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    logged = re.findall(r"local_rank: (\d+)\)\s*exitcode\s*: (-?\d+)", log_text)
    exit_codes = {int(rank): int(code) for rank, code in logged}
    if torchrun.returncode and not processes:
        last_lines = "\n".join(log_text.splitlines()[-MAX_LINES:])
        failure = {"rank": 0, "time": time.monotonic(), "text": f"torchrun could not start it:\n{last_lines}"}
        write_private(folder / "0.json", json.dumps(failure).encode())
    for rank in unsent - statuses.keys():
        statuses[rank] = exit_codes.get(rank, LOST if rank in processes else torchrun.returncode)
    # torchrun's own kills are not the root cause, so they come last.
    for rank in sorted(unsent, key=lambda rank: statuses[rank] == -signal.SIGTERM):
        send(control, rank=rank, status=statuses[rank])
    server.close()
    close_all([torchrun_end, job_file, *pipes])


def main() -> NoReturn:
    """Run one rank, started by torchrun as `-m ppedu.launch.agent FOLDER`."""
    folder = Path(sys.argv[1])
    local = int(os.environ["LOCAL_RANK"])
    os.environ[NUMBER] = str(local)  # the ranks of other nodes report to other notebooks
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    os.chdir(folder)
    connection.bind(f"{os.getpid()}.socket")
    connection.connect("socket")
    send(connection, rank=local, process=os.getpid())
    _, (output, job_file), _, _ = socket.recv_fds(connection, PACKET, 2)
    job = read_job(job_file)
    sys.path[0] = job["folder"]
    os.chdir(job["folder"])
    status = 1
    try:
        connection = socket.socket(fileno=redirect(output, connection.detach()))
        status = run_program(local, folder, job, connection.fileno())
    finally:
        with contextlib.suppress(OSError):
            send(connection, rank=local, status=status)
    end(status)


if __name__ == "__main__":
    main()
