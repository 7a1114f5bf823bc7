"""The program that runs on each host. It passes messages between the launcher `remote` and a zygote on this host.

It is started by ssh or srun, reads a secret from stdin, and repeats it on stdout, so that both know where the messages
begin. From then on, stdin and stdout are a `Channel`. When the channel ends, so do the ranks.

    in   {"reach": [[name, address, port, word], …]}   can these hosts be reached? see `open_door`
         {"close": true}                         all hosts have been reached
         {"listen": true}                        open MASTER_PORT, for the store in which the ranks rendezvous
         {"run": {…}}, files                     start ranks, see `_start`
         {"kill": true}, {"locate": true}        as in `launcher`
         {"time": true}                          what does this host's clock say?
    out  {"python": …, "torch": …, "ppedu": …, "address": …, "interface": …, "port": …, "word": …}   first of all
         {"unreachable": [text, …]}, {"port": n}, {"time": seconds}                        answers
         {"ready": true}, {"rank": k, "process": n}, {"rank": k, "status": n}              as in `launcher`
         {"output": k}, bytes                    output of a rank
         {"file": name}, bytes                   a file that a rank has left in the run's folder
         {"error": text}, and "ending": true     this host cannot start ranks; the relay ends
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ppedu.core import SettingError
from ppedu.launch import launcher
from ppedu.launch.environment import BARRIER, torchrun_environment
from ppedu.launch.exchange import FOLDER, new_folder, write_private
from ppedu.launch.hosts.channel import Channel, Gone
from ppedu.launch.hosts.network import open_door, own_address, unreachable
from ppedu.launch.resources import require_run

LATE_OUTPUT = 0.5  # seconds without output after a rank's end, until a process that it has left behind is ignored
LATE_BYTES = 1 << 18  # after a rank's end; what it has written itself and nothing has read yet is less
LOCATING = 1.0  # seconds in which ranks report where they are


def versions() -> dict[str, str | None]:
    """Return the versions that must be the same on all hosts; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "ppedu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


class Relay:
    """Answers the messages of a channel with the help of a zygote.

    Args:
        interface: see `own_address`.
    """

    def __init__(self, channel: Channel, interface: str):
        self.channel = channel
        self.address, self.interface = own_address(interface)
        self.process, self.control = launcher.start("zygote")
        self._news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # from the zygote
        self._door: asyncio.Server  # so that other hosts can try to reach this one, before a run
        self._listener: socket.socket | None = None  # for the store of the next run
        self._folder: Path | None = None  # of the run
        self._pumps: dict[int, tuple[asyncio.Task[None], asyncio.Event]] = {}  # by rank; the event: it has ended
        self._sent: dict[str, tuple[int, int, int]] = {}  # the files of the run that have been sent
        self._sending = asyncio.Lock()
        self._translate = (b"", b"")  # the program's path here, and its path in the notebook

    async def serve(self) -> None:
        """Answer messages until the channel ends; then end the ranks and the zygote."""
        asyncio.get_running_loop().add_reader(self.control, self._receive_news)
        self._door, port, word = await open_door(self.address)
        hello = {"address": self.address, "interface": self.interface, "port": port, "word": word}

        async def answer() -> None:
            with contextlib.suppress(Gone):
                await self.channel.send(b"", **versions(), **hello)
                while True:
                    await self._answer(*await self.channel.receive())

        beating = asyncio.create_task(self.channel.beat())
        tasks = [asyncio.create_task(each) for each in (answer(), self._pass_on_news())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (beating, *tasks):
                task.cancel()
            self._end()

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self.control)
        self.control.close()  # the zygote kills its ranks, removes the run's folder and ends
        self.process.send_signal(signal.SIGCONT)  # a rank may have stopped it
        with contextlib.suppress(Exception):
            self.process.wait(5)
        self.process.kill()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _answer(self, message: dict[str, Any], content: bytes) -> None:
        match message:
            case {"run": run}:
                await self._start(run, content)
            case {"reach": others}:
                await self.channel.send(unreachable=await unreachable(others))
            case {"close": True}:
                self._door.close()
            case {"time": True}:
                await self.channel.send(time=time.monotonic())
            case {"listen": True}:
                self._listener = socket.create_server((self.address, 0))
                await self.channel.send(port=self._listener.getsockname()[1])
            case {"kill": True}:
                launcher.send(self.control, kill=True)
            case {"locate": True}:
                launcher.send(self.control, locate=True)
                self._locating = asyncio.create_task(self._send_locations())

    async def _start(self, run: dict[str, Any], content: bytes) -> None:
        """Start the ranks of a run on this host, or report why that is impossible.

        Args:
            run: `job`, see `launcher`; `ranks`, how many are started here; `first`, the first of them; `total`;
                `files`, the names and sizes of those in `content`; and `address`, `port`, `group`, `groups` and `run`,
                see `torchrun_environment`.
        """
        descriptors: list[int] = []
        try:
            require_run(run["ranks"], None)
            folder = self._folder = new_folder()
            launcher.send(self.control, folder=str(folder))
            folder.mkdir(mode=0o700)
            for name, size in run["files"]:
                await asyncio.to_thread(write_private, folder / name, content[:size])  # signs of life go on
                content = content[size:]
            job = self._job(run, folder)
            descriptors.append(os.memfd_create("job"))
            os.write(descriptors[0], json.dumps(job).encode())
            self._sent = {name: _state(folder / name) for name, _ in run["files"]}
            for rank in range(run["first"], run["first"] + run["ranks"]):
                reading, writing = os.pipe()
                descriptors.append(writing)
                ended = asyncio.Event()
                self._pumps[rank] = asyncio.create_task(self._pass_on_output(rank, reading, ended)), ended
            if self._listener:
                descriptors.append(self._listener.detach())
            launcher.send(
                self.control, *descriptors, run=str(folder), first=run["first"], store=self._listener is not None
            )
            self._listener = None
        except (OSError, SettingError) as error:
            self._pumps.clear()  # each ends with its pipe
            if self._listener:
                self._listener.close()
                self._listener = None
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
            await self.channel.send(error=str(error))
        finally:
            launcher.close_all(descriptors)

    def _job(self, run: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the job as it is on this host: its own environment, and the run's folder."""
        job: dict[str, Any] = run["job"]
        environment = os.environ | torchrun_environment(
            run["total"],
            run["port"],
            address=run["address"],
            interface=self.interface,
            local=run["ranks"],
            group=run["group"],
            groups=run["groups"],
            run=run["run"],
        )
        environment |= {"NCCL_SOCKET_IFNAME": self.interface} | BARRIER | job["environment"]
        if FOLDER in environment:
            environment[FOLDER] = str(folder)
        program = job["program"]
        if not job["module"]:
            program = str(folder / Path(program).name)
        self._translate = program.encode(), job["program"].encode()
        folders = (each for each in (job["folder"], str(Path.home())) if os.access(each, os.R_OK | os.X_OK))
        here = next(folders, "/")
        return job | {"program": program, "folder": here, "environment": environment}

    def _receive_news(self) -> None:
        message, _ = launcher.receive(self.control)
        self._news.put_nowait(message)
        if not message:
            asyncio.get_running_loop().remove_reader(self.control)

    async def _pass_on_news(self) -> None:
        """Pass on what the zygote reports: the end of a rank only after its output and its files."""
        with contextlib.suppress(Gone):
            while message := await self._news.get():
                if "status" in message:
                    pump, ended = self._pumps.pop(message["rank"])
                    ended.set()
                    await asyncio.wait([pump])
                    await self._send_files()
                    if not self._pumps and self._folder:
                        shutil.rmtree(self._folder, ignore_errors=True)
                await self.channel.send(**message)
            await self.channel.send(error="the process that starts ranks on it has ended", ending=True)

    async def _pass_on_output(self, rank: int, descriptor: int, ended: asyncio.Event) -> None:
        """Pass on what a rank writes, after the files to which it may refer.

        After its end, processes that it has left behind may keep the pipe open. Then this waits no longer than
        LATE_OUTPUT, but a message is never cut off.
        """
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        end = asyncio.create_task(ended.wait())
        late = LATE_BYTES  # that may still come after the rank's end
        try:
            with contextlib.suppress(Gone):
                while late > 0:
                    reading = asyncio.create_task(reader.read(1 << 16))
                    await asyncio.wait([reading, end], return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.wait([reading], timeout=LATE_OUTPUT)  # returns at once if it is done
                    if not reading.done():
                        reading.cancel()
                        return
                    if not (piece := reading.result()):
                        return
                    if ended.is_set():
                        late -= len(piece)
                    await self._send_files()
                    await self.channel.send(piece, output=rank)
        finally:
            end.cancel()
            transport.close()

    async def _send_locations(self) -> None:
        end = time.monotonic() + LOCATING
        with contextlib.suppress(Gone):
            while time.monotonic() < end and self._pumps:
                await self._send_files()
                await asyncio.sleep(0.02)

    async def _send_files(self) -> None:
        """Send the files in the run's folder that are new or have changed."""
        folder = self._folder
        if folder is None:
            return
        async with self._sending:
            for file in sorted(folder.glob("*")):
                with contextlib.suppress(OSError):
                    state = _state(file)
                    if file.suffix == ".part" or not file.is_file() or self._sent.get(file.name) == state:
                        continue
                    content = file.read_bytes()
                    if file.suffix == ".stack":
                        content = content.replace(*self._translate)
                    await self.channel.send(content, file=file.name)
                    self._sent[file.name] = state


def _state(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _greeting() -> tuple[bytes, str]:
    """Read the first line of stdin, byte by byte, so that none of the messages is read; return its two words."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit(1)
        line += piece
    secret, _, interface = line.rstrip(b"\n").partition(b" ")
    return secret, interface.decode()


async def _main() -> None:
    secret, interface = _greeting()
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # so that nothing else is written between the messages
    os.write(outgoing, secret + b"\n")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(outgoing, "wb", 0))
    channel = Channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
    try:
        relay = Relay(channel, interface)
    except (OSError, SettingError) as error:
        await channel.send(error=str(error))
    else:
        await relay.serve()


if __name__ == "__main__":
    asyncio.run(_main())
