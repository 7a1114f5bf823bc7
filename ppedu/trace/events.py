"""JSON traces, read as a stream: one event at a time, so that a file larger than the memory can be read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

from ppedu.core import ParseError
from ppedu.core.files import opened

CHUNK = 1 << 22  # characters read at a time
LARGEST = 1 << 26  # characters of one value; a file with a larger one is assumed to be damaged

# Numbers as C prints those that JSON lacks, such as an operator's argument.
BARE = re.compile(r"(?<=[:,\[\s])-?(?:inf|nan)(?=[\s,\]}])", re.IGNORECASE)

Progress = Callable[[float], Any]  # called with the part that has been read, from 0 to 1

_decode = json.JSONDecoder(strict=False).raw_decode


def entries(path: str | os.PathLike[str], progress: Progress | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a trace's JSON object with their values, and each event with the key "traceEvents".

    The Trace Event Format also allows a bare list of events. A file that ends in .gz is decompressed.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: It is not a JSON object or list, or is damaged or incomplete.
    """
    with opened(path) as file:
        stream = _Stream(path, file, progress)
        while stream.accept("\ufffd"):  # a byte order mark
            pass
        if stream.accept("["):
            yield from (("traceEvents", event) for event in stream.items("]"))
            return
        stream.expect("{")
        while not stream.accept("}"):
            key = stream.value()
            stream.expect(":")
            if key == "traceEvents":
                stream.expect("[")
                yield from (("traceEvents", event) for event in stream.items("]"))
            else:
                yield str(key), stream.value()
            stream.accept(",")


class _Stream:
    """The characters of a file, of which only the next few are in memory."""

    def __init__(self, path: str | os.PathLike[str], file: IO[bytes], progress: Progress | None):
        self.path, self.file, self.progress = path, file, progress
        self.count, self.buffer, self.at = 0, "", 0
        self.size = max(1, os.fstat(file.fileno()).st_size)

    def items(self, end: str) -> Iterator[Any]:
        """Yield the items of a list up to its end."""
        while not self.accept(end):
            yield self.value()
            self.count += 1
            self.accept(",")

    def value(self) -> Any:
        """Return the next JSON value."""
        self._skip()
        while True:
            try:
                value, end = _decode(self.buffer, self.at)
                if end < len(self.buffer):  # else, a number may go on in the next chunk
                    self.at = end
                    return value
            except (ValueError, RecursionError) as error:  # ValueError also for an integer of thousands of digits
                if isinstance(error, json.JSONDecodeError) and BARE.match(self.buffer, error.pos):
                    # Decode it again, without all such numbers that the buffer holds.
                    self.buffer, self.at = BARE.sub("null", self.buffer[self.at :]), 0
                    continue
                if len(self.buffer) - self.at > LARGEST:
                    raise self._damaged("is damaged") from None
            self._read()  # the value may end in the next chunk

    def accept(self, character: str) -> bool:
        """Return whether a character comes next, after spaces; if so, go past it."""
        self._skip()
        if self.buffer[self.at] != character:
            return False
        self.at += 1
        return True

    def expect(self, character: str) -> None:
        if not self.accept(character):
            raise self._damaged("is not a trace")

    def _skip(self) -> None:
        """Go past spaces."""
        while True:
            while self.at < len(self.buffer):
                if not self.buffer[self.at].isspace():
                    return
                self.at += 1
            self._read()

    def _read(self) -> None:
        """Read another chunk. Raise ParseError at the end of the file."""
        chunk = self.file.read(CHUNK)
        if not chunk:
            raise self._damaged("ends too early")
        # Events are ASCII but for a few names; an odd byte in one of these does no harm.
        self.buffer = self.buffer[self.at :] + chunk.decode("ascii", "replace")
        self.at = 0
        if self.progress:  # in a compressed file, of the part that is decompressed
            self.progress(os.lseek(self.file.fileno(), 0, os.SEEK_CUR) / self.size)

    def _damaged(self, what: str) -> ParseError:
        return ParseError(
            f"{str(self.path)!r} {what}: it holds {self.count} whole events; a trace is a JSON object with a list "
            '"traceEvents", as torch.profiler\'s export_chrome_trace and Timeline.save write it'
        )
