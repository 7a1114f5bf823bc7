"""What a cell shows of its ranks' output: whole lines, each with its rank, pictures, and progress bars as one line."""

from __future__ import annotations

import codecs
import re
import time
from pathlib import Path
from typing import Protocol

from ppedu.notebook.exchange import FIGURE, LIVE

MOST_LINES = 1000  # of a rank that are shown
MOST_SHOWN = 1 << 20  # bytes of a rank that are shown; more is kept in a file
MOST_BYTES = 50 << 20  # of that file
LONGEST = 1 << 16  # characters of a line
MOST_OFTEN = 0.1  # seconds between two states of a progress bar
PICTURE = re.compile(re.escape(FIGURE).replace(r"\{\}", r"(\d+-\d+\.png)"))


class Screen(Protocol):
    """Where it is shown."""

    def text(self, text: str) -> None:
        """Whole lines."""

    def bar(self, line: str, done: bool) -> None:
        """The state of a line that is written over and over; `done` with the last."""

    def picture(self, file: Path) -> None:
        """A picture."""

    def live(self, folder: Path) -> None:
        """A new state of the training."""


class Output:
    """Shows each rank after all those below it, or, if `live`, all as it comes.

    folder: where pictures are, and where what is too long to be shown is kept.
    """

    def __init__(self, ranks: int, screen: Screen, folder: Path, live: bool = False):
        self._screen, self._folder = screen, folder
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(ranks)]
        self._rests = [""] * ranks  # of lines that have not ended
        self._waiting: list[list[str]] = [[] for _ in range(ranks)]  # lines of ranks whose turn has not come
        self._lines = [0] * ranks  # how many there have been
        self._bytes = [0] * ranks  # in these lines
        self._cut: set[int] = set()  # the ranks whose output goes to the file
        self._turns = set(range(ranks) if live else range(1))  # the ranks that are shown now
        self._ended: set[int] = set()
        self._bar: int | None = None  # the rank whose bar is on the screen
        self._drawn = 0.0  # when

    def write(self, rank: int, piece: bytes) -> None:
        """Take what `rank` has written; b"" when it will write no more."""
        text = self._rests[rank] + self._decoders[rank].decode(piece, final=not piece)
        if LIVE in text:  # wherever it is: also within the line of a bar
            text = text.replace(LIVE, "")
            self._screen.live(self._folder)
        *lines, rest = text.split("\n")
        if rest and (not piece or len(rest) > LONGEST):
            lines, rest = [*lines, rest], ""
        self._rests[rank] = rest
        self._waiting[rank] += [each for each in (self._kept(rank, line) for line in lines) if each is not None]
        if not piece:
            self._ended.add(rank)
        while rank in self._turns:
            self._show(rank)
            if rank not in self._ended or rank + 1 >= len(self._waiting):
                break
            rank += 1
            self._turns.add(rank)

    def close(self) -> None:
        """Show all that is left."""
        for rank in range(len(self._waiting)):
            if rank not in self._ended:
                self.write(rank, b"")

    def _show(self, rank: int) -> None:
        lines, self._waiting[rank] = self._waiting[rank], []
        text = ""
        for line in lines:
            if picture := PICTURE.fullmatch(line):
                self._text(text)
                self._screen.picture(self._folder / picture[1])
                text = ""
            elif self._bar == rank:
                self._screen.bar(f"[{rank}] {line}", done=True)
                self._bar = None
            else:
                text += f"[{rank}] {line}\n"
        self._text(text)
        # A line that is written over and over, and has begun to be.
        state = self._rests[rank].rstrip("\r")
        if "\r" in state and self._bar in (None, rank) and time.monotonic() > self._drawn + MOST_OFTEN:
            self._rests[rank] = "\r" + _last(state)
            self._screen.bar(f"[{rank}] {_last(state)}", done=False)
            self._bar, self._drawn = rank, time.monotonic()

    def _text(self, text: str) -> None:
        if text:
            self._screen.text(text)

    def _kept(self, rank: int, line: str) -> str | None:
        """The line, if it is to be shown; what is too much goes to a file."""
        self._lines[rank] += 1
        self._bytes[rank] += len(line.encode())
        within = self._lines[rank] <= MOST_LINES and self._bytes[rank] <= MOST_SHOWN
        if within or PICTURE.fullmatch(line.rstrip()):
            return _last(line.rstrip())
        file = self._folder / "output.txt"
        file.touch(mode=0o600)
        with file.open("a", encoding="utf-8") as out:
            if out.tell() < MOST_BYTES:
                out.write(f"[{rank}] {line}\n")
        if rank in self._cut:
            return None
        self._cut.add(rank)
        return f"… goes on in {file}, which is there until the next cell runs"


def _last(line: str) -> str:
    """Of a line that was written over and over, the last state."""
    return line.rpartition("\r")[2]
