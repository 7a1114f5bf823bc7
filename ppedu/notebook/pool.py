"""The rank pool: starts a program on several ranks, listens to them, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ppedu
from ppedu.core.errors import PipelineError, RankError, SettingError, require_count
from ppedu.notebook.zygote import MOST_RANKS, PACKET

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
GRACE = 1.0  # seconds that the other ranks get to end by themselves once one has failed

# What a rank is told when the one it talks to is gone: never the first cause.
ECHO = re.compile("[Cc]onnection (closed|reset|refused)|remote worker crashing|Broken pipe")

Write = Callable[[int, bytes], None]  # takes a rank and what it has written; nothing more comes after b""


class RankPool:
    """Ranks on this machine, forked from a process that has torch imported already.

    That process is started by the first `start` or `run` and ends with this object's `close` or with this
    process. One program runs at a time.
    """

    def __init__(self) -> None:
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._settled = True  # every rank that was asked for is known to have ended

    def start(self) -> None:
        """Start the process that ranks are forked from, if it is not there; do not wait for its imports.

        Raises:
            PipelineError: this is not Linux, or torch is not installed.
        """
        if self._zygote is not None and self._zygote.poll() is None and self._settled:
            return
        if sys.platform != "linux":
            raise PipelineError("ranks can be started from here on Linux only; elsewhere, start them with torchrun")
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        home = str(Path(ppedu.__file__).parent.parent)
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        code = f"from ppedu.notebook.zygote import serve; serve({theirs.fileno()})"
        with theirs:
            self._zygote = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(paths)},
                cwd=home,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is for us to handle
            )
        self._control, self._ready, self._settled = ours, False, True

    def close(self) -> None:
        """End the process that ranks are forked from, and with it any rank."""
        if self._control is not None:
            self._control.close()
        if self._zygote is not None:
            try:
                self._zygote.wait(5)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
        self._zygote = self._control = None

    def run(
        self,
        program: str,
        ranks: int,
        arguments: Sequence[str] = (),
        *,
        module: bool = False,
        timeout: float | None = None,
        write: Write,
    ) -> None:
        """Run a program on `ranks` ranks, as torchrun would, and return when all have ended well.

        program: a Python file, or a module's name if `module`. timeout: seconds it may take, None for no limit.
        write: is called with a rank and a piece of its output, stdout and stderr together, as it comes.

        Raises:
            SettingError: `ranks` is below 1 or above 64, or `timeout` not above 0.
            RankError: a rank has failed, or they ran out of time; all have been ended.
            KeyboardInterrupt: with a line for each rank, which says where it was; all have been ended.
        """
        require_count("the number of ranks", ranks)
        if ranks > MOST_RANKS:
            raise SettingError(f"at most {MOST_RANKS} ranks can be started on one machine here; got {ranks}")
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise SettingError(f"timeout must be a number of seconds above 0; got {timeout!r}")
        self.start()
        self._wait_until_ready()
        assert self._control is not None
        report = tempfile.mkdtemp(prefix="ppedu-")  # readable by this user only
        job = {
            "program": program,
            "module": module,
            "arguments": list(arguments),
            "folder": str(Path.cwd()),
            "environment": _environment(ranks),
        }
        pipes = [os.pipe() for _ in range(ranks)]
        readings, writings = [reading for reading, _ in pipes], [writing for _, writing in pipes]
        try:
            Path(report, "job.json").write_text(json.dumps(job), encoding="utf-8")
            packet = json.dumps({"run": report}).encode()
            self._settled = False
            socket.send_fds(self._control, [packet], writings)
            _close(writings)
            self._listen(readings, program, Path(report), timeout, write)
        finally:
            if not self._settled:  # an interrupt where nothing else could catch it
                self.close()
            _close(readings)
            _close(writings)
            shutil.rmtree(report, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        assert self._control is not None and self._zygote is not None
        if not self._ready:
            packet = self._control.recv(PACKET)
            if not packet:
                self._zygote.wait()
                raise PipelineError("ranks cannot be started: importing torch failed; pip install 'ppedu[run]'")
            self._ready = True

    def _listen(self, pipes: list[int], program: str, report: Path, timeout: float | None, write: Write) -> None:
        """Pass on output until every rank has ended; end them all if one fails or time runs out."""
        assert self._control is not None
        alive = set(range(len(pipes)))
        failed: dict[int, tuple[int, float]] = {}  # rank → status, and when it was heard of; not those ended by us
        deadline = None if timeout is None else time.monotonic() + timeout
        where = ""
        stopped = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for rank, pipe in enumerate(pipes):
                os.set_blocking(pipe, False)
                selector.register(pipe, selectors.EVENT_READ, rank)
            try:
                while alive:
                    left = None if deadline is None or stopped else min(60.0, max(0.0, deadline - time.monotonic()))
                    for key, _ in selector.select(left):
                        if key.fileobj is not self._control:
                            _pass_on(key, selector, write)
                            continue
                        answer = self._receive()
                        alive.discard(answer["rank"])
                        if answer["status"] and not stopped:
                            now = time.monotonic()
                            failed[answer["rank"]] = answer["status"], now
                            soon = now + GRACE
                            deadline = soon if deadline is None else min(deadline, soon)
                    if deadline is not None and not stopped and time.monotonic() > deadline:
                        where = "" if failed else self._where(sorted(alive), report, program)
                        self._signal(signal.SIGKILL)
                        stopped = True
                for key in [*selector.get_map().values()]:
                    if key.fileobj is not self._control:
                        while _pass_on(key, selector, write):
                            pass
            except KeyboardInterrupt:
                raise KeyboardInterrupt(self._where(sorted(alive), report, program)) from None
            finally:
                self._end(alive)
        if failed:
            raise RankError(_explain(failed, report))
        if stopped:
            raise RankError(f"the ranks were stopped, because they had not ended after {timeout:g} s\n{where}")

    def _end(self, alive: set[int]) -> None:
        """Kill the ranks that are still alive (an interrupt has come) and wait until they are gone."""
        try:
            if alive:
                self._signal(signal.SIGKILL)
            # A closed socket: whoever would tell of their end has ended, and they with it.
            while alive and self._control is not None:
                alive.discard(self._receive()["rank"])
            self._settled = True
        except KeyboardInterrupt:
            self.close()  # somebody is impatient: end them all the hard way, and start afresh next time
            raise

    def _receive(self) -> dict[str, Any]:
        assert self._control is not None
        packet = self._control.recv(PACKET)
        if not packet:
            self.close()
            raise RankError("the process that ranks are forked from has ended, and they with it; run the cell again")
        answer: dict[str, Any] = json.loads(packet)
        return answer

    def _signal(self, number: int) -> None:
        if self._control is not None:
            self._control.send(json.dumps({"signal": number}).encode())

    def _where(self, alive: list[int], report: Path, program: str) -> str:
        """A line for each rank that is alive: the line of the program that it is at."""
        self._signal(signal.SIGUSR1)  # each writes its stack, even while it waits in a message
        time.sleep(0.3)
        lines = []
        for rank in alive:
            file = report / f"{rank}.stack"
            stack = file.read_text(encoding="utf-8") if file.exists() else ""
            # Innermost first. The program's own line, if it is a file; else wherever the rank is.
            own = re.search(rf'File "{re.escape(program)}", line (\d+)', stack)
            if own:
                source = Path(program).read_text(encoding="utf-8").splitlines()
                where = f"line {own[1]}: {source[int(own[1]) - 1].strip()}"
            else:
                where = "".join(stack.splitlines()[1:2]).strip()
            lines.append(f"rank {rank} is at {where or 'its start'}")
        return "\n".join(lines)


def _close(descriptors: list[int]) -> None:
    """Close them, each once, however often this is called."""
    while descriptors:
        os.close(descriptors.pop())


def _environment(ranks: int) -> dict[str, str]:
    """The environment of the ranks, with the variables that torchrun sets; RANK and LOCAL_RANK come with the fork."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size = str(ranks)
    own = {"MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    return os.environ | ONE_THREAD | LOOPBACK | own


def _pass_on(key: selectors.SelectorKey, selector: selectors.BaseSelector, write: Write) -> bool:
    """Pass on what a rank has written; False when there is nothing more, for now or for good."""
    try:
        piece = os.read(key.fd, PACKET)
    except BlockingIOError:
        return False
    write(key.data, piece)
    if not piece:
        selector.unregister(key.fd)
    return bool(piece)


def _explain(failed: dict[int, tuple[int, float]], report: Path) -> str:
    """The first cause, whole; ranks that failed after it, mostly because it was gone, are only named."""
    told = [json.loads(path.read_text(encoding="utf-8")) for path in report.glob("[0-9]*.json")]
    told.sort(key=lambda failure: failure["time"])
    causes = [failure for failure in told if not ECHO.search(failure["text"])]
    silent = [rank for rank in failed if all(failure["rank"] != rank for failure in told)]
    if silent and not (causes and causes[0]["time"] < failed[silent[0]][1]):
        rank, status = silent[0], failed[silent[0]][0]
        names = {number.value: number.name for number in signal.Signals}
        how = (
            f"ended with exit code {status}"
            if status > 0
            else f"was killed by {names.get(-status, f'signal {-status}')}"
        )
        text = f"rank {rank} {how}"
    else:
        first = (causes or told)[0]
        rank, text = first["rank"], f"rank {first['rank']} failed:\n{first['text']}"
    if others := sorted(set(failed) - {rank}):
        text += f"\n(then also rank{'s' * (len(others) > 1)} {', '.join(map(str, others))})"
    return text
