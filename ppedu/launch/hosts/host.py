"""One host, as the launcher `remote` sees it: the command that reaches it, and the relay at its other end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import secrets
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ppedu.core import PipelineError
from ppedu.launch.hosts.channel import Channel, Gone
from ppedu.launch.hosts.relay import versions
from ppedu.launch.launcher import PR_SET_PDEATHSIG

CONNECT = 20.0  # seconds in which a relay must answer
FAREWELL = 4.0  # seconds in which it must end
SSH_FAILED = 255  # the exit status of ssh itself, where it cannot reach a host or log in
BANNER = 1 << 16  # bytes that a host may print before the relay's secret
PINGS = 5  # that measure how far a host's clock is from this machine's


class Host:
    """A host, and the ranks of the current run that it runs."""

    def __init__(self, name: str, command: Sequence[str]):
        self.name, self._command = name, command
        self.ranks: set[int] = set()
        self.offset = 0.0  # seconds to add to its clock to get this machine's
        self.about: dict[str, Any] = {}  # its versions, address and port
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # it has imported torch
        # Another host's error may be raised first; asyncio prints an exception that nothing has looked at.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._asked: deque[asyncio.Future[dict[str, Any]]] = deque()  # answers come in the order of the questions
        self._process: asyncio.subprocess.Process | None = None
        self._errors = b""  # the last bytes that the command has written to stderr

    async def connect(self, interface: str) -> None:
        """Start the relay, and wait for its first message.

        Args:
            interface: see `own_address`.

        Raises:
            PipelineError: the host, its Python or the relay cannot be reached.
        """
        pipe = asyncio.subprocess.PIPE
        problem = f"cannot start ranks on {self.name}"
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=pipe, limit=BANNER, preexec_fn=end_with_parent
            )
        except OSError as error:
            raise PipelineError(f"{problem}: {error}") from None
        assert process.stdin and process.stdout and process.stderr
        self._reading = asyncio.create_task(self._read_errors(process.stderr))
        secret = secrets.token_hex(16).encode()
        try:
            process.stdin.write(secret + b" " + interface.encode() + b"\n")
            await asyncio.wait_for(process.stdout.readuntil(secret + b"\n"), CONNECT)
            self.channel = Channel(process.stdout, process.stdin)
            self._beating = asyncio.create_task(self.channel.beat())
            self.about, _ = await self.channel.receive()
        except asyncio.TimeoutError:
            raise PipelineError(f"{problem}: no answer within {CONNECT:g} s") from None
        except asyncio.LimitOverrunError:
            said = "its shell prints too much before a program starts; look into its start-up files"
            raise PipelineError(f"{problem}: {said}") from None
        except (OSError, asyncio.IncompleteReadError, Gone):
            await asyncio.wait([self._reading, asyncio.create_task(process.wait())], timeout=1)
            raise PipelineError(f"{problem}: {self._reason(process.returncode)}") from None
        if "error" in self.about:
            raise PipelineError(f"{problem}: {self.about['error']}")

    async def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message and return the answer to it. Another task must read the host's messages.

        Raises:
            Gone: the host is lost, or cannot answer.
        """
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        await self.channel.send(**message)
        return await answer

    def answer(self, message: dict[str, Any]) -> None:
        """Pass an answer of the host to the first `ask` that waits for one."""
        if self._asked:
            asked = self._asked.popleft()
            if not asked.done():  # it is done if it was cancelled
                asked.set_result(message)

    def refuse(self) -> None:
        """End every `ask` that waits for an answer."""
        while self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_exception(Gone("cannot answer"))

    async def compare_clocks(self) -> None:
        """Measure `offset`; the fastest of some answers is the most accurate."""
        best = float("inf")
        for _ in range(PINGS):
            asked = time.monotonic()
            answer = await self.ask(time=True)
            trip = time.monotonic() - asked
            if trip < best:  # the host has answered halfway through the trip
                best, self.offset = trip, asked + trip / 2 - answer["time"]

    async def close(self) -> None:
        """End the relay, and with it all that it has started."""
        if self._process is None:
            return
        assert self._process.stdin
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), FAREWELL)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(1 << 16):
            self._errors = (self._errors + piece)[-BANNER:]

    def _reason(self, status: int | None) -> str:
        """Return why the relay could not be started, from what ssh or the host's shell has printed. status: of ssh."""
        text = self._errors.decode("utf-8", "replace").strip()
        lines = [line for line in text.splitlines() if not line.startswith("Warning: Permanently added")]
        if status == SSH_FAILED and lines:
            return lines[-1].strip()
        if "No module named" in text:
            return f"its Python has no ppedu; install 'ppedu[run]=={versions()['ppedu']}' there"
        if "No such file or directory" in text or "not found" in text:
            return f"it cannot run the same Python as here ({text.splitlines()[-1]}); name its own with --python"
        return lines[-1].strip() if lines else "the connection ended before the relay answered"


def end_with_parent() -> None:
    """Have the system end this process when its parent does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
