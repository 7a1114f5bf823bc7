"""The output of a cell: the ranks' lines, each after its rank, their pictures, and a progress bar as a single line."""

from __future__ import annotations

import codecs
import re
import time
from pathlib import Path

from ppedu.cells.screen import Screen
from ppedu.launch.exchange import FIGURE, LIVE

MAX_LINES = 1000  # shown per rank
MAX_SHOWN = 1 << 20  # bytes shown per rank; further output goes to a file
MAX_FILE = 50 << 20  # bytes in that file
MAX_LINE = 1 << 16  # characters
BAR_INTERVAL = 0.1  # seconds between two states of a progress bar
PICTURE = re.compile(re.escape(FIGURE).replace(r"\{\}", r"(\d+-\d+\.png)"))


class Output:
    """Passes the output of ranks to a screen: after that of all lower ranks or, if `live`, as it arrives.

    Args:
        folder: the run's, which holds the ranks' pictures. Output beyond the limits is written to a file in it.
    """

    def __init__(self, ranks: int, screen: Screen, folder: Path, live: bool = False):
        self._screen, self._folder = screen, folder
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(ranks)]
        self._rests = [""] * ranks  # the incomplete last line of each rank
        self._waiting: list[list[str]] = [[] for _ in range(ranks)]  # complete lines that are not shown yet
        self._lines = [0] * ranks  # lines received so far
        self._bytes = [0] * ranks  # bytes in these lines
        self._cut: set[int] = set()  # ranks whose further output goes to the file
        self._turns = set(range(ranks) if live else range(1))  # ranks whose output may be shown
        self._ended: set[int] = set()
        self._bar: int | None = None  # the rank whose progress bar is on the screen
        self._drawn = 0.0  # the time at which it was last drawn

    def write(self, rank: int, piece: bytes) -> None:
        """Receive a piece of a rank's output, in order; b"" after the last piece."""
        text = self._rests[rank] + self._decoders[rank].decode(piece, final=not piece)
        if LIVE in text:  # it may be within the line of a progress bar
            text = text.replace(LIVE, "")
            self._screen.live(self._folder)
        *lines, rest = text.split("\n")
        if rest and (not piece or len(rest) > MAX_LINE):
            lines, rest = [*lines, rest], ""
        self._rests[rank] = rest
        allowed = (self._within_limits(rank, line) for line in lines)
        self._waiting[rank] += [line for line in allowed if line is not None]
        if not piece:
            self._ended.add(rank)
        while rank in self._turns:  # when it has ended, it is the next rank's turn, whose lines may be waiting
            self._show(rank)
            if rank not in self._ended or rank + 1 >= len(self._waiting):
                break
            rank += 1
            self._turns.add(rank)

    def close(self) -> None:
        """Show all output that has been withheld."""
        for rank in range(len(self._waiting)):
            if rank not in self._ended:
                self.write(rank, b"")

    def _show(self, rank: int) -> None:
        """Show the rank's complete lines that are not shown yet, its pictures, and the state of its progress bar."""
        lines, self._waiting[rank] = self._waiting[rank], []
        text = ""
        for line in lines:
            if picture := PICTURE.fullmatch(line):
                self._screen.text(text)
                self._screen.picture(self._folder / picture[1])
                text = ""
            elif self._bar == rank:
                self._screen.bar(f"[{rank}] {line}", done=True)
                self._bar = None
            else:
                text += f"[{rank}] {line}\n"
        self._screen.text(text)
        # An incomplete line that has been overwritten is a progress bar.
        state = self._rests[rank].rstrip("\r")
        if "\r" in state and self._bar in (None, rank) and time.monotonic() > self._drawn + BAR_INTERVAL:
            self._rests[rank] = "\r" + _last(state)
            self._screen.bar(f"[{rank}] {_last(state)}", done=False)
            self._bar, self._drawn = rank, time.monotonic()

    def _within_limits(self, rank: int, line: str) -> str | None:
        """Return the line to show. Beyond a rank's limits, write the line to the file and return None."""
        self._lines[rank] += 1
        self._bytes[rank] += len(line.encode())
        within = self._lines[rank] <= MAX_LINES and self._bytes[rank] <= MAX_SHOWN
        if within or PICTURE.fullmatch(line.rstrip()):
            return _last(line.rstrip())
        file = self._folder / "output.txt"
        file.touch(mode=0o600)
        with file.open("a", encoding="utf-8") as out:
            if out.tell() < MAX_FILE:
                out.write(f"[{rank}] {line}\n")
        if rank in self._cut:
            return None
        self._cut.add(rank)
        return f"… continued in {file}, which is removed when the next cell runs"


def _last(line: str) -> str:
    """Return what follows the last carriage return: the final state of a line that was overwritten."""
    return line.rpartition("\r")[2]
