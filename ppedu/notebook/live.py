"""The live view of a training: its loss and the timeline of its last step, updated while the cell runs."""

from __future__ import annotations

import json
from pathlib import Path

from IPython.display import DisplayHandle

from ppedu.core.errors import PipelineError
from ppedu.core.validate import require_count
from ppedu.notebook.exchange import LIVE_FILES
from ppedu.view.interactive import Interactive
from ppedu.view.model import Data, Panel
from ppedu.view.perfetto import load


class LiveRun(Interactive):
    """The widget that `show_live` updates: the losses and the latest step's timeline of the training in a cell."""

    kind = "live"

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._handle: DisplayHandle | None = None
        self.update()

    def update(self) -> None:
        """Show the state that rank 0 has saved last.

        Raises:
            PipelineError: the files are damaged, as the program of rank 0 can write to them, too.
        """
        try:
            timeline = load(self._folder / LIVE_FILES[0])
            state = json.loads((self._folder / LIVE_FILES[1]).read_bytes())
            losses = [None if loss is None else float(loss) for loss in state["losses"]]
            steps = require_count("the number of steps", state["steps"])
            require_count("the number of losses", len(losses))
        except (PipelineError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise PipelineError(f"cannot show rank 0's training: {' and '.join(LIVE_FILES)} are damaged") from error
        self.timeline, self._losses, self._steps = timeline, losses, steps
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(self)
        else:
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
