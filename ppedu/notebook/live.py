"""A training that is watched: its loss and the timeline of its last step, in the notebook, while the cell runs."""

from __future__ import annotations

import json
from pathlib import Path

from IPython.display import DisplayHandle

from ppedu.notebook.exchange import WATCHED
from ppedu.view.data import Data
from ppedu.view.shown import Panel, Shown
from ppedu.view.trace import load


class LiveRun(Shown):
    """The loss and the last step of a training that goes on in the ranks of a cell."""

    kind = "live"

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._handle: DisplayHandle | None = None
        self.update()

    def update(self) -> None:
        """Show what rank 0 has said last."""
        self.timeline = load(self._folder / WATCHED[0])
        self._state = json.loads((self._folder / WATCHED[1]).read_text())
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(self)
        else:
            self.refresh()

    def close(self) -> None:
        """Leave a picture of the end."""
        assert self._handle is not None
        self._handle.update(self)

    def panels(self) -> list[Panel]:
        return [(self.timeline, {})]

    def state(self) -> Data:
        return {**super().state(), **self._state}

    def text(self) -> str:
        losses: list[float | None] = self._state["losses"]
        last = "not a number" if losses[-1] is None else f"{losses[-1]:.3f}"
        return f"step {len(losses)} of {self._state['steps']}, loss {last}\n{self.timeline.text()}"
