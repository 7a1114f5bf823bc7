"""The display of a running cell: text, progress bars, pictures, and the live view of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from IPython.display import DisplayHandle, Image, display

from ppedu.core.numeric import plural
from ppedu.launch.exchange import LIVE_FILE, read_live
from ppedu.view.interactive import Interactive, in_notebook
from ppedu.view.model import Data, Panel

QUIET = 2  # seconds after which a cell shows that its ranks are running


class Screen:
    """A notebook cell or a terminal, to which output is written."""

    def __init__(self, shell: Any):
        self._terminal = type(shell).__name__ == "TerminalInteractiveShell"
        self._bar: DisplayHandle | None = None
        self._training: LiveRun | None = None
        self._waiting: DisplayHandle | None = None
        self._seconds = 0  # on the screen

    def text(self, text: str) -> None:
        """Show complete lines."""
        print(text, end="", flush=True)

    def bar(self, line: str, done: bool) -> None:
        """Show a state of a progress bar in place of the previous state; `done` says that `line` is its last state."""
        if self._terminal:
            print(f"\r{line}", end="\n" if done else "", flush=True)
            return
        shown = _show(line, self._bar)
        self._bar = None if done else shown

    def waiting(self, ranks: int, seconds: float, timeout: float) -> None:
        """Show for how long ranks have been running, once it is longer than most cells take: they may be stuck."""
        if int(seconds) < QUIET or int(seconds) == self._seconds:
            return
        if self._bar or self._training or not in_notebook():
            return
        self._seconds = int(seconds)
        state = f"{plural(ranks, 'rank')} running, {self._seconds} s… (stopped after {timeout:g} s; ■ stops now)"
        self._waiting = _show(state, self._waiting)

    def picture(self, file: Path) -> None:
        """Show a picture, if the file exists."""
        if file.exists():
            display(Image(data=file.read_bytes()))

    def live(self, folder: Path) -> None:
        """Show the new state of a training, which `show_live` has saved in the run's folder; nothing in a terminal."""
        if self._terminal or not (folder / LIVE_FILE).exists():
            return
        if self._training is None:
            self._training = LiveRun(folder)
        else:
            self._training.update()

    def close(self) -> None:
        """Replace the live view, if there is one, by a picture of its final state."""
        if self._waiting:
            _show(f"ran for {self._seconds} s", self._waiting)
        if self._training:
            self._training.close()


def _show(text: str, handle: DisplayHandle | None) -> DisplayHandle | None:
    """Show a text in the place of `handle`, or in a new one; return the place."""
    if handle is None:
        return display({"text/plain": text}, raw=True, display_id=True)
    handle.update({"text/plain": text}, raw=True)
    return handle


class LiveRun(Interactive):
    """The widget that `show_live` updates: the losses and the latest step's timeline of the training in a cell."""

    kind = "live"

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self.update()
        self._handle = display(self, display_id=True)

    def update(self) -> None:
        """Show the state that rank 0 has saved most recently.

        Raises:
            PipelineError: the file is damaged, as the program of rank 0 can write to it, too.
        """
        if state := read_live(self._folder):
            self._losses, self.timeline, self._steps = state
            self.refresh()

    def close(self) -> None:
        """Replace the widget by a picture of the final state."""
        assert self._handle is not None
        self._handle.update(self)

    def panels(self) -> list[Panel]:
        return [Panel(self.timeline)]

    def state(self) -> Data:
        return {**super().state(), "losses": self._losses, "steps": self._steps}

    def text(self) -> str:
        last = "not a number" if self._losses[-1] is None else f"{self._losses[-1]:.3f}"
        return f"step {len(self._losses)} of {self._steps}, loss {last}\n{self.timeline.text()}"
