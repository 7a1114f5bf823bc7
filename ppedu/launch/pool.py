"""The rank pool: starts a program on several ranks, passes on their output, and leaves no process behind."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ppedu.core import PipelineError, RankError, SettingError
from ppedu.core.validate import require_instance
from ppedu.launch import launcher as launchers
from ppedu.launch.environment import BARRIER, ONE_THREAD, module_path, torchrun_environment
from ppedu.launch.exchange import new_folder
from ppedu.launch.failure import describe_status, explain, read_location
from ppedu.launch.hang import describe_hang
from ppedu.launch.hosts.place import Place
from ppedu.launch.launcher import PACKET, close_all, kill_group, receive, send
from ppedu.launch.resources import require_run

LAUNCHERS = {"zygote": "zygote", "torchrun": "agent"}  # the module of each
KILL_TIMEOUT = 10.0  # seconds in which the launcher must report the end of killed ranks, or it is killed, too
GRACE_PERIOD = 1.0  # seconds that the other ranks get to end by themselves once one has failed
# A line that PyTorch 2.8 to 2.10 print on each rank whenever its group connects.
CONNECTED = re.compile(rb"^\[Gloo\] Rank \d+ is connected to [^\n]*\n", re.MULTILINE)
CONNECTED_BEGIN = b"[Gloo] Rank "

Write = Callable[[int, bytes], None]  # receives a rank and a piece of its output; b"" after the last one
Tick = Callable[[int, float], None]  # receives the number of ranks that run, and for how many seconds


class RankPool:
    """Ranks, forked from a process that has already imported torch, or started by torchrun.

    The launcher is itself a process. The first `start` or `run` starts it; it ends with `close` or with this process.
    One program runs at a time.

    Args:
        launcher: "zygote" forks ranks in milliseconds; "torchrun" starts torchrun itself, which takes seconds, but
            whose ranks can be part of a run on several nodes.
        on: where: "local"; "ssh:alpha,beta"; or "slurm:" with options of salloc.
        python, interface: on other hosts, the path of Python, by default the same as here, and the network interface
            that ranks use, by default the one at which a host is reached.

    Raises:
        SettingError: the launcher or the place is unknown, or this is not Linux.
    """

    def __init__(
        self, launcher: str = "zygote", on: str = "local", python: str | None = None, interface: str | None = None
    ) -> None:
        if not isinstance(launcher, str) or launcher not in LAUNCHERS:
            raise SettingError(f"unknown launcher {launcher!r}; available: {', '.join(LAUNCHERS)}")
        if sys.platform != "linux":
            raise SettingError(
                "ranks can only be started from here on Linux (on Windows: in WSL); "
                "elsewhere, save the cell with --save and start the script with torchrun"
            )
        self.launcher, self.on, self.place = launcher, on, Place.of(on, python, interface)
        self._where = on, python or "", interface or ""
        if self.place and launcher != "zygote":
            raise SettingError(f"--launcher {launcher} starts ranks on this machine only; leave it out, or --on")
        self.note: Callable[[str], object] = lambda _: None  # receives what the launcher waits for before the first run
        self.processes: dict[int, int] = {}  # by rank, while it runs
        self.hosts: dict[int, str] = {}  # by rank, for ranks on other hosts
        self.started_at = 0.0
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = self._lost = False
        self._idle = True  # every rank that was started has ended
        self._runner: threading.Thread | None = None  # the thread that waits in `run`
        self._starting = threading.RLock()  # who holds it may start the launcher, or end it while nothing runs

    @property
    def server(self) -> int | None:
        """The process ID of the launcher, None while it does not run."""
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    def start(self) -> None:
        """Start the launcher, unless it runs already, and return before it has imported torch."""
        if self.server and self._idle and not self._lost:
            assert self._control is not None
            ending = self._ready and wait([self._control], 0)  # a launcher that ends closes its socket
            if not ending:
                return
        self.close()
        if self.place is None:
            self._server, self._control = launchers.start(LAUNCHERS[self.launcher])
        else:
            self._server, self._control = launchers.start("hosts.remote", *self._where)
        self._ready, self._idle, self._lost = False, True, False

    def close(self) -> None:
        """End the launcher and all ranks."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            if self._ready or self.place:
                self._server.send_signal(signal.SIGCONT)  # a stopped launcher would not notice that its socket closed
            else:
                self._server.kill()  # it is importing torch, and has not started a rank
            try:
                self._server.wait(5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._kill_ranks()  # those of a launcher that was killed
        self.processes = {}
        self._server = self._control = None
        self._idle = True

    def make_folder(self, folder: Path) -> None:
        """Make a folder that only this user can read and that the launcher removes if this process is killed.

        The launcher learns the folder's name before the folder exists, so that the folder cannot be left behind.

        Raises:
            SettingError: ranks of another thread are running.
        """
        with self._starting:
            self._require_idle()
            self.start()
            self._send(folder=str(folder))
        folder.mkdir(mode=0o700)

    def run(
        self,
        program: str | Path,
        ranks: int,
        arguments: Sequence[str] = (),
        *,
        module: bool = False,
        timeout: float | None = None,
        flags: Sequence[str] = (),
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        write: Write,
        tick: Tick = lambda *_: None,
    ) -> None:
        """Run a program on `ranks` ranks, as torchrun would, and return when all have succeeded.

        Args:
            program: a Python file, or a module's name if `module`.
            arguments: of the program.
            timeout: in seconds; None for no limit.
            flags: further options of torchrun, for the launcher "torchrun".
            folder: where ranks leave files for the caller, see `make_folder`; by default a temporary one.
            environment: variables to add to those of the ranks.
            write: called with a rank and each piece of its output, stdout and stderr together.
            tick: called about once a second while ranks run.

        Raises:
            SettingError: `ranks` is not from 1 to 64, or more than the memory allows; `timeout` is not above 0;
                another argument has a wrong type; ranks of another thread are running.
            PipelineError: the launcher cannot import torch.
            RankError: a rank has failed, or the timeout has passed. All ranks have ended.
            KeyboardInterrupt: the user has interrupted the run. The message is a hang report. All ranks have ended.
        """
        require_run(ranks, timeout, here=self.place is None)
        require_instance("program", program, (str, Path), "a file or a module's name")
        require_instance("folder", folder, (Path, type(None)), "a Path or None")
        require_instance("write", write, Callable, "a function of a rank and its output")
        require_instance("environment", environment, (Mapping, type(None)), "a dict of strings")
        added = dict(environment or {})
        for name, texts in (("arguments", arguments), ("flags", flags), ("environment", [*added, *added.values()])):
            require_instance(name, texts, Sequence, "a list of strings")
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise SettingError(f"{name} must consist of strings; got {texts!r}")
        with self._starting:
            self._require_idle()
            self._runner = threading.current_thread()
            self.start()
        self._wait_until_ready()
        several_nodes = any(flag.startswith("--nnodes") for flag in flags)
        one_node = [] if several_nodes else ["--standalone"]
        store = self.launcher == "zygote" and self.place is None
        listener = socket.create_server(("127.0.0.1", 0)) if store else None
        if self.place:
            shared = added  # each host adds its own
        elif several_nodes:  # torchrun sets its variables itself, and messages leave this machine
            shared = os.environ | ONE_THREAD | added
        else:
            shared = os.environ | torchrun_environment(ranks, listener.getsockname()[1] if listener else 0) | added
        job = {
            "program": str(program),
            "module": module,
            "arguments": list(arguments),
            "folder": str(Path.cwd()),
            "environment": shared | (module_path() if self.launcher == "torchrun" else BARRIER),
            "flags": [*one_node, f"--nproc-per-node={ranks}", *flags],
        }
        pipes = [os.pipe() for _ in range(ranks)]
        outputs = [reading for reading, _ in pipes]
        job_file = os.memfd_create("job")  # not a file on disk, as the environment may hold passwords
        sent = [job_file, *(writing for _, writing in pipes)]
        if listener:
            sent.append(listener.detach())
        run_folder = folder or new_folder()
        try:
            os.write(job_file, json.dumps(job).encode())
            if folder is None:
                self.make_folder(run_folder)
            self._idle = False
            self.started_at = time.monotonic()
            self.hosts = {}
            self._send(*sent, run=str(run_folder), first=0, store=store)
            close_all(sent)
            self._listen(outputs, str(program), run_folder, timeout, write, tick)
        finally:
            if not self._idle:  # an interrupt has come where nothing else could catch it
                self.close()
            close_all(outputs)
            close_all(sent)
            if folder is None:
                shutil.rmtree(run_folder, ignore_errors=True)
            self._runner = None

    def stop(self) -> None:
        """End the ranks that run or, if no rank runs, the launcher. Any thread may call this.

        A `run` that waits in another thread raises RankError.
        """
        processes = list(self.processes.values())  # a copy: the other thread removes ranks that have ended
        if self.place and processes:
            self._send(kill=True)
        self._kill_ranks()
        server = self._server  # the other thread may close it meanwhile
        if not processes and server is not None:
            with self._starting:
                if self._runner in (None, threading.current_thread()):
                    self.close()
                else:  # the other thread waits for ranks that have not started yet, or is about to return
                    server.kill()
                    server.wait()  # or the next run might still find it alive

    def _kill_ranks(self) -> None:
        """Kill the ranks on this machine."""
        if self.place is None:
            for process in list(self.processes.values()):
                kill_group(process)

    def _require_idle(self) -> None:
        """Raise SettingError if ranks of another thread are running."""
        if not self._idle and self._runner not in (None, threading.current_thread()):
            raise SettingError("other ranks are running; wait until they have ended, or end them with %ranks stop")

    def _send(self, *descriptors: int, **message: Any) -> None:
        """Send a message with file descriptors to the launcher, if it runs."""
        if self._control is not None:
            send(self._control, *descriptors, **message)

    def _wait_until_ready(self) -> None:
        """Wait until the launcher has imported torch. Raise PipelineError if it cannot."""
        assert self._control is not None and self._server is not None
        while not self._ready:
            try:
                answer, _ = receive(self._control)
            except KeyboardInterrupt:
                if self.place:
                    self.close()  # it may wait for a scheduler
                raise
            if not answer:
                ended = describe_status(self._server.wait())
                raise PipelineError(f"cannot start ranks: the launcher {ended} while it imported torch; run it again")
            if error := answer.get("error"):
                self.close()  # the launcher is about to end
                raise PipelineError(error)
            if "note" in answer:
                self.note(answer["note"])
            self._ready = "ready" in answer

    def _listen(
        self, outputs: list[int], program: str, folder: Path, timeout: float | None, write: Write, tick: Tick
    ) -> None:
        """Pass on output until every rank has ended; kill all ranks if one fails or the timeout passes.

        Args:
            outputs: by rank, the read end of the pipe for its output.

        The other arguments are those of `run`.

        Raises:
            RankError, KeyboardInterrupt: as `run` does.
        """
        assert self._control is not None
        alive = set(range(len(outputs)))
        ranks = {output: rank for rank, output in enumerate(outputs)}  # of the outputs that have not ended
        withheld: dict[int, bytes] = {}  # by output, the beginning of a line that may be CONNECTED
        failed: dict[int, tuple[int, float]] = {}  # by rank, its status and when it was reported; not if killed by us
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        # None until the ranks are killed. Then the hang report, or "" if a rank has failed, which explains enough.
        hang: str | None = None

        def pass_on(ready: Sequence[object]) -> None:
            """Pass on a piece of each output that is `ready`; forget those that have ended."""
            for output in ranks.keys() & ready:
                piece = os.read(output, PACKET)
                text = CONNECTED.sub(b"", withheld.pop(output, b"") + piece)
                end = text.rfind(b"\n") + 1  # of the last complete line
                rest = text[end:]
                may_be_connected = rest[: len(CONNECTED_BEGIN)] == CONNECTED_BEGIN[: len(rest)]
                if piece and may_be_connected:
                    text, withheld[output] = text[:end], rest
                if text:
                    write(ranks[output], text)
                if not piece:
                    write(ranks[output], b"")
                    del ranks[output]

        try:
            while alive:
                ready = wait([self._control, *ranks], min(1.0, deadline - time.monotonic()))
                pass_on(ready)
                tick(len(alive), time.monotonic() - self.started_at)
                if self._control in ready and (ended := self._receive_end()):
                    rank, status = ended
                    alive.discard(rank)
                    if status and hang is None:
                        now = time.monotonic()
                        failed[rank] = status, now
                        deadline = min(deadline, now + GRACE_PERIOD)
                if time.monotonic() > deadline:
                    if hang is not None:  # killed ranks have not ended
                        break
                    hang = "" if failed else self._hang_report(alive, len(outputs), folder, program)
                    self._send(kill=True)
                    deadline = time.monotonic() + KILL_TIMEOUT
            while ready := wait([*ranks], 0):
                pass_on(ready)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._hang_report(alive, len(outputs), folder, program)) from None
        finally:
            self._end(alive, KILL_TIMEOUT if hang is None else 0)
        if failed:
            raise RankError(explain(failed, len(outputs), folder, self.hosts))
        if hang is not None:
            raise RankError(f"the ranks were stopped because they had not ended after {timeout:g} s\n{hang}")

    def _end(self, alive: set[int], timeout: float) -> None:
        """Kill the ranks `alive`, and remove each from the set when it has ended.

        If that takes longer than `timeout` seconds, kill the launcher.
        """
        end = time.monotonic() + timeout
        try:
            self._send(kill=True)
            while alive and self._control is not None:  # a closed launcher has taken its ranks with it
                if not wait([self._control], end - time.monotonic()):
                    self.close()
                elif ended := self._receive_end():
                    alive.discard(ended[0])
            self._idle = True
        except KeyboardInterrupt:
            self.close()  # a second interrupt: do not wait, and start a new launcher next time
            raise

    def _receive_end(self) -> tuple[int, int] | None:
        """Read a message of the launcher; return the rank and its exit status if the message reports a rank's end."""
        assert self._control is not None
        message, _ = receive(self._control)
        if not message:
            self.close()
            raise RankError("the launcher has ended, and all ranks with it; run the cell again")
        if "host" in message:
            self.hosts[message["rank"]] = message["host"]
        if "process" in message:
            self.processes[message["rank"]] = message["process"]
        if "status" not in message:
            return None
        self._lost = self._lost or bool(message.get("lost"))
        self.processes.pop(message["rank"], None)
        return message["rank"], message["status"]

    def _hang_report(self, alive: set[int], ranks: int, folder: Path, program: str) -> str:
        """Ask the ranks `alive`, of `ranks`, for their locations, wait up to a second, and return the hang report."""
        self._send(locate=True)
        end = time.monotonic() + 1
        while time.monotonic() < end and not all((folder / f"{rank}.location").exists() for rank in alive):
            time.sleep(0.02)
        locations = [read_location(rank, folder, program) for rank in sorted(alive)]
        return describe_hang(locations, sorted(set(range(ranks)) - alive), self.hosts)


@cache
def local_pool() -> RankPool:
    """Return the pool for ranks on this machine that all cells of this process share."""
    return RankPool()
