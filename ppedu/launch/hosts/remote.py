"""The launcher of ranks on other hosts: to the pool it looks like a zygote on this machine.

It starts a relay on each host by ssh or srun, checks that all have the same versions and reach each other, and keeps
them until it ends. The ranks' output goes into the pool's pipes, and their files into the run's folder here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

from ppedu.core import PipelineError
from ppedu.launch import launcher
from ppedu.launch.exchange import INPUTS, write_private
from ppedu.launch.hosts import slurm
from ppedu.launch.hosts.channel import Gone
from ppedu.launch.hosts.host import Host
from ppedu.launch.hosts.place import Place
from ppedu.launch.hosts.relay import versions
from ppedu.launch.launcher import LOST
from ppedu.launch.rank import read_job

FULL = 0.005  # seconds between two attempts to write into a full pipe


def serve(descriptor: int, on: str, python: str, interface: str) -> NoReturn:
    """Start ranks on other hosts whenever the pool, at the other end of the socket `descriptor`, requests it.

    The messages are described in `launcher`. Ends when the socket closes, or when a host is lost.

    Args:
        on, python, interface: see `Place.of`; "" for a default.
    """
    place = Place.of(on, python, interface)
    assert place
    launcher.become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Remote(socket.socket(fileno=descriptor), place).serve())
    os._exit(0)


class _Remote:
    """All hosts, and the run on them. control: the pool's socket."""

    def __init__(self, control: socket.socket, place: Place):
        self._control, self._place = control, place
        self._requests: asyncio.Queue[tuple[dict[str, Any], list[int]]] = asyncio.Queue()  # from the pool
        self._hosts: list[Host] = []
        self._job = ""  # of Slurm
        self._folder = Path()  # of the run, here
        self._pipes: dict[int, int] = {}  # by rank, where its output goes; only ranks that have not ended
        self._hearing: list[asyncio.Task[None]] = []  # what reads the hosts' messages
        self._lost = False  # a host is lost; this launcher ends with the current run
        self._unread = False  # the pool has asked for the ranks' places or end, and may read no more output

    async def serve(self) -> None:
        """Serve the pool and the hosts until either end: the pool by closing its socket, or a host unasked."""
        asyncio.get_running_loop().add_reader(self._control, self._receive_request)
        tasks = [asyncio.create_task(each) for each in (self._serve_pool(), self._serve_hosts())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()  # so that the pool starts another launcher for its next run
        for each in self._hearing:
            each.cancel()
        if tasks[0].done() and self._folder.name:
            shutil.rmtree(self._folder, ignore_errors=True)
        await asyncio.gather(*(host.close() for host in self._hosts))
        if self._job:
            await slurm.run("scancel", self._job)
        for task in tasks:
            if task.done():
                with contextlib.suppress(Gone, OSError):  # a host, or the pool, is gone
                    task.result()  # raises what has gone wrong here
            task.cancel()

    def _receive_request(self) -> None:
        request, descriptors = launcher.receive(self._control)
        self._requests.put_nowait((request, descriptors))
        if not request:
            asyncio.get_running_loop().remove_reader(self._control)

    async def _serve_pool(self) -> None:
        """Answer the pool's requests until it closes the socket."""
        while True:
            request, descriptors = await self._requests.get()
            if not request or ("run" in request and self._lost):
                return
            if "folder" in request:
                self._folder = Path(request["folder"])
            elif "run" in request:
                job, *pipes = descriptors
                await self._start(read_job(job), pipes)
                os.close(job)
            else:
                self._unread = True
                for host in self._hosts:
                    if host.ranks & self._pipes.keys():
                        with contextlib.suppress(Gone):
                            await host.channel.send(**request)

    async def _serve_hosts(self) -> None:
        """Connect to the hosts and pass on what they send, until one is lost and all ranks have ended."""
        try:
            await self._connect()
        except PipelineError as error:
            launcher.send(self._control, error=str(error))
            return
        launcher.send(self._control, ready=True)
        await asyncio.wait(self._hearing, return_when=asyncio.FIRST_COMPLETED)
        while self._pipes:  # the pool kills the other hosts' ranks
            await asyncio.sleep(FULL)

    async def _connect(self) -> None:
        """Start the relays, and check the hosts.

        Raises:
            PipelineError: a host cannot be reached, has other versions, or cannot reach another one.
        """
        place = self._place
        if place.options is None:
            self._hosts = [Host(name, place.by_ssh(name)) for name in place.hosts]
        else:
            self._job, nodes = await slurm.allocate(place.options, self._note)
            self._hosts = [Host(name, place.by_srun(self._job, name)) for name in nodes]
        await asyncio.gather(*(host.connect(place.interface) for host in self._hosts))
        self._require_same_versions()
        self._hearing = [asyncio.create_task(self._hear(host)) for host in self._hosts]
        await asyncio.gather(*(host.compare_clocks() for host in self._hosts), self._require_reach())
        await asyncio.gather(*(host.ready for host in self._hosts))

    def _note(self, text: str) -> None:
        launcher.send(self._control, note=text)

    def _require_same_versions(self) -> None:
        """Raise PipelineError unless all hosts have this machine's versions: of Python, the first two numbers."""
        own = versions()
        for host in self._hosts:
            for name in own:
                here, there = (_release(name, each[name]) for each in (own, host.about))
                if there is None:
                    raise PipelineError(f"{host.name} has no {name}; install {name} {here} there, as here")
                if here != there:
                    raise PipelineError(
                        f"{host.name} has {name} {there}, this machine {here}; ranks need the same everywhere: "
                        "install it there, or name another Python with --python"
                    )

    async def _require_reach(self) -> None:
        """Raise PipelineError unless every host can open a connection to every other."""
        doors = {host.name: [host.name, *map(host.about.get, ("address", "port", "word"))] for host in self._hosts}

        async def reach(host: Host) -> None:
            others = [door for name, door in doors.items() if name != host.name]
            if missed := (await host.ask(reach=others))["unreachable"]:
                raise PipelineError(
                    f"{host.name} cannot reach {', '.join(missed)}; ranks connect to each other directly, at any "
                    "port: name a network that all hosts share with --interface"
                )

        await asyncio.gather(*(reach(host) for host in self._hosts))
        await asyncio.gather(*(host.channel.send(close=True) for host in self._hosts))

    async def _hear(self, host: Host) -> None:
        """Pass on what a host sends until it is lost."""
        try:
            while True:
                message, content = await host.channel.receive()
                if "output" in message:
                    await self._write(message["output"], content)
                elif "file" in message:
                    self._save(host, message["file"], content)
                elif "process" in message:
                    launcher.send(self._control, **message)
                elif "status" in message:
                    self._end(**message)
                elif "ready" in message:
                    host.ready.set_result(True)
                elif "error" in message:
                    self._lost = self._lost or "ending" in message
                    self._fail(host, message["error"])
                else:
                    host.answer(message)
        except Gone as gone:
            self._lost = True
            self._fail(host, f"the host {gone}: is it down, or the network to it?")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            self._lost = True
            self._fail(host, f"the host has sent what is not a message: {error!r}")

    def _fail(self, host: Host, text: str) -> None:
        """Report that a host's ranks have failed, or that it cannot start any. text: why."""
        host.refuse()
        if not host.ready.done():
            host.ready.set_exception(PipelineError(f"cannot start ranks on {host.name}: {text}"))
        for rank in sorted(host.ranks & self._pipes.keys()):
            report = {"rank": rank, "time": time.monotonic(), "text": text}
            with contextlib.suppress(OSError):  # the pool has removed the folder
                write_private(self._folder / f"{rank}.json", json.dumps(report).encode())
            self._end(rank, LOST)

    async def _start(self, job: dict[str, Any], pipes: list[int]) -> None:
        """Divide the ranks among the hosts, the first of which serves their store, and start them."""
        self._pipes, self._unread = dict(enumerate(pipes)), False
        least, more = divmod(len(pipes), len(self._hosts))
        first = 0
        for index, host in enumerate(self._hosts):
            end = first + least + (1 if index < more else 0)  # the first hosts take those that are left over
            host.ranks = set(range(first, end))
            first = end
            for rank in sorted(host.ranks):
                os.set_blocking(pipes[rank], False)
                launcher.send(self._control, rank=rank, host=host.name)
        used = [host for host in self._hosts if host.ranks]
        named = [self._folder / INPUTS]
        if not job["module"]:
            named.append(Path(job["program"]))
        files = [(file.name, file.read_bytes()) for file in named if file.exists()]
        waiting = list(used)  # those that have not been asked to start ranks
        try:
            store = await used[0].ask(listen=True)
            await self._ask_all(job, files, len(pipes), waiting, store["port"])
        except Gone:
            lost = waiting[0]
            while lost.ranks & self._pipes.keys():  # until it is reported where the host is heard
                await asyncio.sleep(FULL)
            for rank in set().union(*(host.ranks for host in waiting)):
                self._end(rank, 0)  # it was never started, and is not the cause

    async def _ask_all(
        self, job: dict[str, Any], files: list[tuple[str, bytes]], total: int, waiting: list[Host], port: int
    ) -> None:
        """Ask each host to start its ranks, and remove it from `waiting`. port: of the store on the first of them."""
        common = {
            "job": job,
            "files": [(name, len(content)) for name, content in files],
            "total": total,
            "address": waiting[0].about["address"],
            "port": port,
            "groups": len(waiting),
            "run": uuid.uuid4().hex,
        }
        content = b"".join(content for _, content in files)
        for group, host in enumerate([*waiting]):
            part = {"first": min(host.ranks), "ranks": len(host.ranks), "group": group}
            await host.channel.send(content, run=common | part)
            waiting.remove(host)

    async def _write(self, rank: int, content: bytes) -> None:
        """Write a piece of a rank's output into the pool's pipe, as soon as there is room."""
        while content and rank in self._pipes:
            try:
                content = content[os.write(self._pipes[rank], content) :]
            except BlockingIOError:
                if self._unread:
                    return
                await asyncio.sleep(FULL)
            except BrokenPipeError:
                return

    def _save(self, host: Host, name: str, content: bytes) -> None:
        """Save a file that a rank has left in the run's folder; the time in a report is that of the host's clock."""
        if name.endswith(".json") and name[0].isdigit():
            # The rank's program can write to it, too.
            with contextlib.suppress(ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
                report = json.loads(content)
                report["time"] += host.offset
                content = json.dumps(report).encode()
        with contextlib.suppress(OSError):  # the pool has removed the folder
            write_private(self._folder / Path(name).name, content)

    def _end(self, rank: int, status: int) -> None:
        """Report the end of a rank, after all of its output."""
        if (pipe := self._pipes.pop(rank, None)) is not None:
            os.close(pipe)
            launcher.send(self._control, rank=rank, status=status, lost=self._lost)


def _release(name: str, version: str | None) -> str | None:
    """Return the part of a version that must be the same: of Python 3.11.2, 3.11; of torch 2.13.0+cpu, 2.13.0."""
    if version is None:
        return None
    if name == "python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]
