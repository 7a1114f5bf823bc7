"""The rank pool: starts a program on several ranks, listens to them, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ppedu
from ppedu.core.errors import PipelineError, RankError, SettingError, require_count
from ppedu.notebook.exchange import new_folder, write_private
from ppedu.notebook.waits import Place, told
from ppedu.notebook.zygote import MOST_RANKS, PACKET

LAUNCHERS = {"zygote": "zygote", "torchrun": "agent"}  # and the module of each
HOME = str(Path(ppedu.__file__).parent.parent)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
GRACE = 1.0  # seconds that the other ranks get to end by themselves once one has failed

# What a rank is told when the one it talks to is gone: never the first cause.
ECHO = re.compile("[Cc]onnection (closed|reset|refused)|remote worker crashing|Broken pipe")

# Memory that a rank needs for itself, in bytes: what one that trains a small model was seen to take.
RANK_NEEDS = 35 << 20

Write = Callable[[int, bytes], None]  # takes a rank and what it has written; nothing more comes after b""


class RankPool:
    """Ranks on this machine, forked from a process that has torch imported already, or started by torchrun.

    launcher: "zygote" forks, which takes milliseconds; "torchrun" starts the real torchrun, which takes seconds and can
        be one of several machines.

    The process that starts ranks is itself started by the first `start` or `run` and ends with this object's `close`
    or with this process. One program runs at a time.

    Raises:
        SettingError: there is no such launcher, or this is not Linux.
    """

    def __init__(self, launcher: str = "zygote") -> None:
        if launcher not in LAUNCHERS:
            raise SettingError(f"there is no launcher {launcher!r}; there is: {', '.join(LAUNCHERS)}")
        if sys.platform != "linux":
            raise SettingError(
                "ranks can be started from here on Linux only (on Windows: in WSL); "
                "elsewhere, save the cell with --save and start it with torchrun"
            )
        self.launcher = launcher
        self.processes: dict[int, int] = {}  # by rank, while they run
        self.since = 0.0  # when they were started
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._settled = True  # every rank that was asked for is known to have ended
        self._runner: threading.Thread | None = None  # who asked for them

    @property
    def server(self) -> int | None:
        """The process that starts ranks, if it is there."""
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    def start(self) -> None:
        """Start the process that starts ranks, if it is not there; do not wait for its imports.

        Raises:
            PipelineError: torch is not installed.
        """
        if self.server and self._settled:
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = LAUNCHERS[self.launcher]
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", f"from ppedu.notebook.{module} import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD | {"PYTHONPATH": _paths()},
                cwd=HOME,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is for us to handle
            )
        self._control, self._ready, self._settled = ours, False, True

    def close(self) -> None:
        """End the process that starts ranks, and with it any rank."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            try:
                self._server.wait(5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        for process in self.processes.values():  # if it could not see to that
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        self.processes = {}
        self._server = self._control = None
        self._settled = True

    def run(
        self,
        program: str,
        ranks: int,
        arguments: Sequence[str] = (),
        *,
        module: bool = False,
        timeout: float | None = None,
        flags: Sequence[str] = (),
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        write: Write,
    ) -> None:
        """Run a program on `ranks` ranks, as torchrun would, and return when all have ended well.

        program: a Python file, or a module's name if `module`. timeout: seconds it may take, None for no limit.
        flags: more of torchrun's own options, for the launcher "torchrun".
        folder: where ranks may leave something for the caller, empty and for this user alone; removed if this process
            is killed. By default one is made, and removed at the end.
        environment: what to add to the ranks' environment.
        write: is called with a rank and a piece of its output, stdout and stderr together, as it comes.

        Raises:
            SettingError: `ranks` is below 1 or above 64, or more than there is memory for; `timeout` is not above 0;
                another thread's ranks run.
            RankError: a rank has failed, or they ran out of time; all have been ended.
            KeyboardInterrupt: with a line for each rank, which says where it was; all have been ended.
        """
        require_count("the number of ranks", ranks)
        if ranks > MOST_RANKS:
            raise SettingError(f"at most {MOST_RANKS} ranks can be started on one machine here; got {ranks}")
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise SettingError(f"timeout must be a number of seconds above 0; got {timeout!r}")
        require_memory(ranks)
        if not self._settled and self._runner not in (None, threading.current_thread()):
            raise SettingError("other ranks run already; wait until they have ended, or end them: %ranks stop")
        self._runner = threading.current_thread()
        self.start()
        self._wait_until_ready()
        assert self._control is not None
        several = any(flag.startswith("--nnodes") for flag in flags)
        door = socket.create_server(("127.0.0.1", 0))  # where the ranks find each other
        everything = _environment(ranks, str(door.getsockname()[1]), several) | dict(environment or {})
        job = {
            "program": program,
            "module": module,
            "arguments": list(arguments),
            "folder": str(Path.cwd()),
            "environment": everything | ({"PYTHONPATH": _paths()} if self.launcher == "torchrun" else {}),
            "flags": [*([] if several else ["--standalone"]), f"--nproc-per-node={ranks}", *flags],
        }
        pipes = [os.pipe() for _ in range(ranks)]
        readings, writings = [reading for reading, _ in pipes], [writing for _, writing in pipes]
        report = folder or new_folder()
        try:
            if folder is None:
                report.mkdir(mode=0o700)
            write_private(report / "job.json", json.dumps(job).encode())
            self._settled = False
            self.since = time.monotonic()
            packet = json.dumps({"run": str(report)}).encode()
            socket.send_fds(self._control, [packet], [door.fileno(), *writings])
            _close(writings)
            door.close()
            self._listen(readings, program, report, timeout, write)
        finally:
            if not self._settled:  # an interrupt where nothing else could catch it
                self.close()
            door.close()
            _close(readings)
            _close(writings)
            if folder is None:
                shutil.rmtree(report, ignore_errors=True)

    def stop(self) -> None:
        """End the ranks that run, from another thread than the one that waits for them, or else their server."""
        if not self.processes:
            self.close()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)

    def _wait_until_ready(self) -> None:
        assert self._control is not None and self._server is not None
        if not self._ready:
            packet = self._control.recv(PACKET)
            if not packet:
                self._server.wait()
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
                        if "status" not in answer:
                            continue
                        alive.discard(answer["rank"])
                        if answer["status"] and not stopped:
                            now = time.monotonic()
                            failed[answer["rank"]] = answer["status"], now
                            soon = now + GRACE
                            deadline = soon if deadline is None else min(deadline, soon)
                    if deadline is not None and not stopped and time.monotonic() > deadline:
                        where = "" if failed else self._where(len(pipes), alive, report, program)
                        self._signal(signal.SIGKILL)
                        stopped = True
                for key in [*selector.get_map().values()]:
                    if key.fileobj is not self._control:
                        while _pass_on(key, selector, write):
                            pass
            except KeyboardInterrupt:
                raise KeyboardInterrupt(self._where(len(pipes), alive, report, program)) from None
            finally:
                self._end(alive)
        if failed:
            raise RankError(_explain(failed, len(pipes), report))
        if stopped:
            raise RankError(f"the ranks were stopped, because they had not ended after {timeout:g} s\n{where}")

    def _end(self, alive: set[int]) -> None:
        """Kill the ranks that are still alive (an interrupt has come) and wait until they are gone."""
        try:
            if alive:
                self._signal(signal.SIGKILL)
            # A closed socket: whoever would tell of their end has ended, and they with it.
            while alive and self._control is not None:
                answer = self._receive()
                if "status" in answer:
                    alive.discard(answer["rank"])
            self._settled = True
        except KeyboardInterrupt:
            self.close()  # somebody is impatient: end them all the hard way, and start afresh next time
            raise

    def _receive(self) -> dict[str, Any]:
        assert self._control is not None
        packet = self._control.recv(PACKET)
        if not packet:
            self.close()
            raise RankError("the process that starts ranks has ended, and they with it; run the cell again")
        answer: dict[str, Any] = json.loads(packet)
        if "process" in answer:
            self.processes[answer["rank"]] = answer["process"]
        elif "status" in answer:
            self.processes.pop(answer["rank"], None)
        return answer

    def _signal(self, number: int) -> None:
        if self._control is not None:
            self._control.send(json.dumps({"signal": number}).encode())

    def _where(self, ranks: int, alive: set[int], report: Path, program: str) -> str:
        """A line for each rank that is alive: the line of the program that it is at; and what keeps them there."""
        if self._control is None:
            return ""
        self._control.send(json.dumps({"where": True}).encode())
        end = time.monotonic() + 1
        while time.monotonic() < end and not all((report / f"{rank}.place").exists() for rank in alive):
            time.sleep(0.02)
        places = [_place(rank, report, program) for rank in sorted(alive)]
        return told(places, sorted(set(range(ranks)) - alive))


def _place(rank: int, report: Path, program: str) -> Place:
    """What a rank has written down; of one that could not, what Python's own stack says."""
    file, stack = report / f"{rank}.place", report / f"{rank}.stack"
    if file.exists():
        place: Place = json.loads(file.read_text(encoding="utf-8"))
        return place
    text = stack.read_text(encoding="utf-8") if stack.exists() else ""
    own = re.search(rf'File "{re.escape(program)}", line (\d+)', text)  # innermost first
    line = int(own[1]) if own else 0
    linecache.checkcache(program)
    source = linecache.getline(program, line).strip() if own else "".join(text.splitlines()[1:2]).strip()
    return {"rank": rank, "line": line, "source": source, "doing": "", "kind": "", "peer": None}


def _close(descriptors: list[int]) -> None:
    """Close them, each once, however often this is called."""
    while descriptors:
        os.close(descriptors.pop())


def _paths() -> str:
    """Where Python looks for modules, this package's home among them."""
    return os.pathsep.join([HOME, *filter(None, [os.environ.get("PYTHONPATH")])])


def _environment(ranks: int, port: str, several: bool) -> dict[str, str]:
    """The environment of the ranks, with the variables that torchrun sets; a rank's own number comes with the fork.

    several: this is one of several machines, which talk by way of the network.
    """
    size = str(ranks)
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return os.environ | ONE_THREAD | ({} if several else LOOPBACK | own)


def require_memory(ranks: int) -> None:
    """Refuse more ranks than there is memory for, rather than have the system kill something."""
    free = free_memory()
    if free is not None and ranks * RANK_NEEDS > free:
        most = free // RANK_NEEDS
        raise SettingError(
            f"{ranks} ranks need about {ranks * RANK_NEEDS >> 20} MB of memory; {free >> 20} MB are free, "
            + (f"enough for {most}" if most else "not enough for one")
        )


def memory(process: int | None) -> int | None:
    """Bytes that a process takes, its share of what it has in common with others included; None if nobody says."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(text.partition("Pss:")[2].split()[0]) << 10


def free_memory() -> int | None:
    """Bytes that may still be used here, by the machine's count and the container's; None where nobody says."""
    found = []
    with contextlib.suppress(OSError, AttributeError, ValueError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        found.append(int(re.search(r"MemAvailable:\s*(\d+)", text)[1]) << 10)  # type: ignore[index]
    with contextlib.suppress(OSError, AttributeError, ValueError):  # "max" is no number: there is no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        text = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="utf-8")
        cached = int(re.search(r"^inactive_file (\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        found.append(limit - used + cached)
    return min(found, default=None)


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


def _explain(failed: dict[int, tuple[int, float]], ranks: int, report: Path) -> str:
    """The first cause, whole; ranks that failed after it, mostly because it was gone, are only named."""
    heard = [json.loads(path.read_text(encoding="utf-8")) for path in report.glob("[0-9]*.json")]
    heard.sort(key=lambda failure: failure["time"])
    causes = [failure for failure in heard if not ECHO.search(failure["text"])]
    silent = [rank for rank in failed if all(failure["rank"] != rank for failure in heard)]
    if silent and not (causes and causes[0]["time"] < failed[silent[0]][1]):
        rank, status = silent[0], failed[silent[0]][0]
        names = {number.value: number.name for number in signal.Signals}
        how = (
            f"ended with exit code {status}"
            if status > 0
            else f"was killed by {names.get(-status, f'signal {-status}')}"
        )
        text = f"rank {rank} {how}"
        # It could not say where; whoever was the first to miss it can.
        if heard and (line := re.search(r", (line \d+), in .*\n *(.*)", heard[0]["text"])):
            text += f"\nrank {heard[0]['rank']} missed it at {line[1]}: {line[2]}"
        if status == -signal.SIGABRT:  # what gloo itself says of it, among what the rank has printed, nobody can read
            text += "\n(gloo ends a rank so if a message is larger than the tensor it is received into; both must have "
            text += "the same shape and dtype)"
    else:
        first = (causes or heard)[0]
        rank, alone = first["rank"], ""
        if not causes and (left := sorted(set(range(ranks)) - set(failed))):
            alone = f" rank{'s' * (len(left) > 1)} {', '.join(map(str, left))} had ended, nobody was there to answer"
        text = f"rank {rank} failed:{alone}\n{first['text']}"
    if others := sorted(set(failed) - {rank}):
        text += f"\n(then also rank{'s' * (len(others) > 1)} {', '.join(map(str, others))})"
    return text
