"""Messages between this machine and a host, over the two streams of an ssh connection."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

BEAT = 0.5  # seconds between two signs of life
SILENCE = 4.0  # seconds without one, after which the other end counts as gone
SIZES = struct.Struct("!IQ")  # before each message, the bytes of its JSON and of its content
PIECE = 1 << 18  # bytes written at once


class Gone(Exception):
    """Raised where the other end of a channel has closed it, or has been silent for too long. The text says which."""


class Channel:
    """Messages in both directions: a JSON object, and bytes. An empty one is a sign of life.

    Both ends must call `beat`, so that each notices within SILENCE seconds when the other, or the way to it, is gone.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()  # a message is not interrupted by another one

    async def send(self, content: bytes = b"", **message: Any) -> None:
        """Send a message, as soon as the other end has received most of the ones before.

        Raises:
            Gone: the channel is closed.
        """
        head = json.dumps(message).encode()
        async with self._lock:
            try:
                self._writer.write(SIZES.pack(len(head), len(content)) + head)
                for start in range(0, len(content), PIECE):
                    self._writer.write(content[start : start + PIECE])
                    await self._writer.drain()
                await self._writer.drain()
            except (OSError, RuntimeError) as error:
                raise Gone("has closed the connection") from error

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """Wait for the next message; raise Gone if the channel is closed, or the other end is silent."""
        while True:
            length, rest = SIZES.unpack(await self._read(SIZES.size))
            message, content = json.loads(await self._read(length)), await self._read(rest)
            if message:
                return message, content

    async def beat(self) -> None:
        """Send signs of life until the channel is closed."""
        try:
            while True:
                await self.send()
                await asyncio.sleep(BEAT)
        except Gone:
            pass  # `receive` reports it

    async def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                piece = await asyncio.wait_for(self._reader.read(min(size - len(parts), PIECE)), SILENCE)
            except asyncio.TimeoutError:
                raise Gone(f"has been silent for {SILENCE:g} s") from None
            except OSError as error:
                raise Gone("has closed the connection") from error
            if not piece:
                raise Gone("has closed the connection")
            parts += piece
        return bytes(parts)
