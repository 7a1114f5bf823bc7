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
from numbers import Real
from pathlib import Path
from typing import Any

import ppedu
from ppedu.core.errors import PipelineError, RankError, SettingError
from ppedu.core.validate import require_count
from ppedu.notebook.exchange import new_folder
from ppedu.notebook.waits import Place, told
from ppedu.notebook.zygote import MOST_RANKS, PACKET, kill_group, receive, send

LAUNCHERS = {"zygote": "zygote", "torchrun": "agent"}  # and the module of each
HOME = str(Path(ppedu.__file__).parent.parent)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
PATIENCE = 10.0  # seconds in which ranks that were killed must be gone, before what starts them is ended, too
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
        if not isinstance(launcher, str) or launcher not in LAUNCHERS:
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
            if self._ready:
                self._server.send_signal(signal.SIGCONT)  # if it was stopped, it could not see its socket close
            else:
                self._server.kill()  # it is importing torch, and has no rank yet
            try:
                self._server.wait(5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        for process in self.processes.values():  # if it could not see to that
            kill_group(process)
        self.processes = {}
        self._server = self._control = None
        self._settled = True

    def make(self, folder: Path) -> None:
        """Make a folder for this user alone, which the process that starts ranks removes if this process is killed.

        It is told before the folder is there, so that there is no moment to be killed in between.

        Raises:
            SettingError: another thread's ranks run.
        """
        self._require_idle()
        self.start()
        assert self._control is not None
        send(self._control, folder=str(folder))
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
    ) -> None:
        """Run a program on `ranks` ranks, as torchrun would, and return when all have ended well.

        program: a Python file, or a module's name if `module`. timeout: seconds it may take, None for no limit.
        flags: more of torchrun's own options, for the launcher "torchrun".
        folder: where ranks may leave something for the caller; see `make`. By default one is made, and removed at the
            end.
        environment: what to add to the ranks' environment.
        write: is called with a rank and a piece of its output, stdout and stderr together, as it comes.

        Raises:
            SettingError: `ranks` is below 1 or above 64, or more than there is memory for; `timeout` is not above 0;
                another argument has a wrong type; another thread's ranks run.
            RankError: a rank has failed, or they ran out of time; all have been ended.
            KeyboardInterrupt: with a line for each rank, which says where it was; all have been ended.
        """
        require_run(ranks, timeout)
        _require("program", "a file or a module's name", program, isinstance(program, str | Path))
        _require("folder", "a Path or None", folder, isinstance(folder, Path | None))
        _require("write", "a function of a rank and its output", write, callable(write))
        for name, texts in (("arguments", arguments), ("flags", flags)):
            well = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
            _require(name, "a list of strings", texts, well and all(isinstance(text, str) for text in texts))
        added = {} if environment is None else environment
        well = isinstance(added, Mapping) and all(isinstance(text, str) for pair in added.items() for text in pair)
        _require("environment", "a dict of strings", environment, well)
        self._require_idle()
        self._runner = threading.current_thread()
        self.start()
        self._wait_until_ready()
        assert self._control is not None
        several = any(flag.startswith("--nnodes") for flag in flags)
        door = socket.create_server(("127.0.0.1", 0))  # where the ranks find each other
        everything = _environment(ranks, str(door.getsockname()[1]), several) | dict(added)
        job = {
            "program": str(program),
            "module": module,
            "arguments": list(arguments),
            "folder": str(Path.cwd()),
            "environment": everything | ({"PYTHONPATH": _paths()} if self.launcher == "torchrun" else {}),
            "flags": [*([] if several else ["--standalone"]), f"--nproc-per-node={ranks}", *flags],
        }
        pipes = [os.pipe() for _ in range(ranks)]
        readings, sent = [reading for reading, _ in pipes], [writing for _, writing in pipes]
        sent.insert(0, os.memfd_create("job"))  # no file in a folder, as the environment may hold passwords
        report = folder or new_folder()
        try:
            os.write(sent[0], json.dumps(job).encode())
            if folder is None:
                self.make(report)
            self._settled = False
            self.since = time.monotonic()
            send(self._control, door.fileno(), *sent, run=str(report))
            _close(sent)
            door.close()
            self._listen(readings, str(program), report, timeout, write)
        finally:
            if not self._settled:  # an interrupt where nothing else could catch it
                self.close()
            door.close()
            _close(readings)
            _close(sent)
            if folder is None:
                shutil.rmtree(report, ignore_errors=True)
            self._runner = None

    def stop(self) -> None:
        """End the ranks that run, or without any the process that starts them. Any thread may call this.

        The `run` that waits for them in another thread raises RankError.
        """
        processes = list(self.processes.values())  # a copy: the other thread removes those that have ended
        for process in processes:
            kill_group(process)
        if not processes and self._server is not None:
            if self._runner in (None, threading.current_thread()):
                self.close()
            else:  # which waits for ranks that have not started yet
                self._server.kill()

    def _require_idle(self) -> None:
        """Raise SettingError if another thread's ranks run."""
        if not self._settled and self._runner not in (None, threading.current_thread()):
            raise SettingError("other ranks run already; wait until they have ended, or end them: %ranks stop")

    def _wait_until_ready(self) -> None:
        assert self._control is not None and self._server is not None
        if not self._ready:
            answer, _ = receive(self._control)
            if not answer:
                ended = _ended(self._server.wait())
                raise PipelineError(
                    f"ranks cannot be started: while torch was imported, the process for it {ended}; run it again"
                )
            if error := answer.get("error"):
                raise PipelineError(
                    f"ranks cannot be started: importing torch failed, {error}; pip install 'ppedu[run]'"
                )
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
                    left = None if deadline is None else min(60.0, max(0.0, deadline - time.monotonic()))
                    for key, _ in selector.select(left):
                        if key.data is not None:
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
                    if deadline is not None and time.monotonic() > deadline:
                        if stopped:
                            break
                        where = "" if failed else self._where(len(pipes), alive, report, program)
                        self._signal(signal.SIGKILL)
                        stopped, deadline = True, time.monotonic() + PATIENCE
                for key in [*selector.get_map().values()]:
                    if key.data is not None:
                        while _pass_on(key, selector, write):
                            pass
            except KeyboardInterrupt:
                raise KeyboardInterrupt(self._where(len(pipes), alive, report, program)) from None
            finally:
                self._end(alive, PATIENCE if not stopped else 0)
        if failed:
            raise RankError(_explain(failed, len(pipes), report))
        if stopped:
            raise RankError(f"the ranks were stopped, because they had not ended after {timeout:g} s\n{where}")

    def _end(self, alive: set[int], patience: float) -> None:
        """Kill the ranks that are still alive (an interrupt has come) and wait until they are gone.

        patience: seconds that the process that starts ranks has to report their end. After that, it is ended too.
        """
        end = time.monotonic() + patience
        try:
            if alive:
                self._signal(signal.SIGKILL)
            # A closed socket: whoever would tell of their end has ended, and they with it.
            with selectors.DefaultSelector() as news:
                if alive and self._control is not None:
                    news.register(self._control, selectors.EVENT_READ)
                while alive and self._control is not None:
                    if not news.select(max(0.0, end - time.monotonic())):
                        self.close()
                        break
                    answer = self._receive()
                    if "status" in answer:
                        alive.discard(answer["rank"])
            self._settled = True
        except KeyboardInterrupt:
            self.close()  # somebody is impatient: end them all the hard way, and start afresh next time
            raise

    def _receive(self) -> dict[str, Any]:
        assert self._control is not None
        answer, _ = receive(self._control)
        if not answer:
            self.close()
            raise RankError("the process that starts ranks has ended, and they with it; run the cell again")
        if "process" in answer:
            self.processes[answer["rank"]] = answer["process"]
        elif "status" in answer:
            self.processes.pop(answer["rank"], None)
        return answer

    def _signal(self, number: int) -> None:
        if self._control is not None:
            send(self._control, signal=number)

    def _where(self, ranks: int, alive: set[int], report: Path, program: str) -> str:
        """A line for each rank that is alive: the line of the program that it is at; and what keeps them there."""
        if self._control is None:
            return ""
        send(self._control, where=True)
        end = time.monotonic() + 1
        while time.monotonic() < end and not all((report / f"{rank}.place").exists() for rank in alive):
            time.sleep(0.02)
        places = [_place(rank, report, program) for rank in sorted(alive)]
        return told(places, sorted(set(range(ranks)) - alive))


def _place(rank: int, report: Path, program: str) -> Place:
    """What a rank has written down; of one that could not, what Python's own stack says."""
    place = _read(report / f"{rank}.place", line=int, source=str, doing=str, kind=str, peer=(int, type(None)))
    if place:
        return {**place, "rank": rank}
    stack, line, source = report / f"{rank}.stack", 0, None
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    if own := re.search(rf'File "{re.escape(program)}", line (\d+)', text):  # innermost first
        line = int(own[1])
        linecache.checkcache(program)
        source = linecache.getline(program, line).strip()
    elif text or not stack.exists():  # a rank that has written nothing is stopped; one without the file has not begun
        source = "".join(text.splitlines()[1:2]).strip()
    return {"rank": rank, "line": line, "source": source, "doing": "", "kind": "", "peer": None}


def _read(file: Path, **types: Any) -> dict[str, Any]:
    """Return a rank's report, or {} if it is missing or damaged, as its program can write to the file, too.

    types: of the values that it must hold.
    """
    try:
        report = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    well = isinstance(report, dict) and all(isinstance(report.get(name), kind) for name, kind in types.items())
    return report if well else {}


def _ended(status: int) -> str:
    """How a process ended: with its exit code, or minus a signal's number."""
    names = {number.value: number.name for number in signal.Signals}
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {names.get(-status, f'signal {-status}')}"


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


def require_run(ranks: Any, timeout: Any) -> None:
    """Raise SettingError unless `ranks` ranks can be started on this machine, for `timeout` seconds or None."""
    require_count("the number of ranks", ranks)
    if ranks > MOST_RANKS:
        raise SettingError(f"at most {MOST_RANKS} ranks can be started on one machine here; got {ranks}")
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise SettingError(f"timeout must be a number of seconds above 0; got {timeout!r}")
    require_memory(ranks)


def _require(name: str, wanted: str, value: Any, well: bool) -> None:
    """Raise SettingError unless `well`: the argument `name` must be what is `wanted`."""
    if not well:
        raise SettingError(f"{name} must be {wanted}; got {value!r}")


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
    every = ((rank, _read(report / f"{rank}.json", time=float, text=str)) for rank in range(ranks))
    heard = [{**failure, "rank": rank} for rank, failure in every if failure]
    heard.sort(key=lambda failure: failure["time"])
    causes = [failure for failure in heard if not ECHO.search(failure["text"])]
    silent = [rank for rank in failed if all(failure["rank"] != rank for failure in heard)]
    if silent and not (causes and causes[0]["time"] < failed[silent[0]][1]):
        rank, status = silent[0], failed[silent[0]][0]
        text = f"rank {rank} {_ended(status)}"
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
