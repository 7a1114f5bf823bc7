"""`puzzle`: a schedule made by hand on a board. The board itself, which knows nothing of pages, is in `ppedu.board`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppedu.board.levels import LEVELS, Level, level
from ppedu.core.actions import Action
from ppedu.core.errors import PipelineError
from ppedu.core.numeric import pretty
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Timeline
from ppedu.view.data import Data
from ppedu.view.shown import Panel, Shown

READY = (
    "This is an ordinary schedule. pp.check, pp.simulate and pp.export take it, and on real ranks "
    "pp.run.Pipeline runs it."
)


class Puzzle(Shown):
    """A board to be filled by clicking. `schedule` is what is on it: when complete, an ordinary schedule."""

    kind = "puzzle"

    def __init__(self, level: Level):
        super().__init__()
        self._open(level)

    def _open(self, level: Level) -> None:
        self.level, self.board = level, level.board()
        self._trays = [self._left(rank) for rank in range(self.board.ranks)]  # of each rank, the actions on its buttons
        self._say("Place an action: it goes to the end of its rank's order.")

    def _say(self, note: str, tone: str = "ok", rank: int = 0) -> None:
        self._note, self._tone, self._rank = note[0].upper() + note[1:], tone, rank

    @property
    def schedule(self) -> Schedule:
        """What is placed, as an ordinary schedule."""
        return self.board.schedule

    @property
    def timeline(self) -> Timeline:
        """When the ranks do what is placed."""
        return self.board.timeline

    def panels(self) -> list[Panel]:
        par = self.level.par.makespan
        title = f"{self.level.title} (par {pretty(par)})"
        return [(self.timeline, {"cap": self.board.memory, "until": par, "title": title})]

    def told(self, message: dict[str, Any]) -> Data | None:
        board, before = self.board, [self._left(rank) for rank in range(self.board.ranks)]
        try:
            match message:
                case {"level": str(name)}:
                    self._open(level(name))
                case {"place": str(action)}:
                    self._place(action)
                case {"do": str(name)} if name in self._acts:
                    self._acts[name]()
        except PipelineError as error:
            self._say(f"{error}.", "no", self._rank)
        if self.board is board:
            for rank in range(board.ranks):
                self._arrange(rank, before[rank])
        self.refresh()
        return None

    def _place(self, action: str) -> None:
        placed, start, end = self.board.place(action)
        single = placed.singles[0]
        self._rank = self.board.placement.rank(single.stage, single.microbatch)
        if self.board.complete:
            self._say(f"{self.board.verdict()} {READY}", "done", self._rank)
        elif stuck := self.board.stuck:
            self._say(f"{stuck}.", "no", self._rank)
        else:
            self._say(f"{action} runs {pretty(start)}–{pretty(end)} on rank {self._rank}.", "ok", self._rank)

    @property
    def _acts(self) -> dict[str, Callable[[], None]]:
        return {
            "undo": self._undo,
            "redo": self._redo,
            "reset": self._reset,
            "hint": self._hint,
            "finish": self._finish,
        }

    def _undo(self) -> None:
        self._say(f"Taken back: {_list(self.board.undo())}.")

    def _redo(self) -> None:
        self._say(f"Placed again: {_list(self.board.redo())}.")

    def _reset(self) -> None:
        self.board.reset()
        self._say("Everything is taken back; redo brings it back.")

    def _hint(self) -> None:
        self._say(f"{self.board.hint()} can be next.")

    def _finish(self) -> None:
        self.board.finish()
        self._say(f"{self.board.verdict()} {READY}", "done")

    def state(self) -> Data:
        board = self.board
        left = [self._left(rank) for rank in range(board.ranks)]
        trays = [[_button(each, each in left[rank]) for each in tray] for rank, tray in enumerate(self._trays)]
        can = ["undo", "redo", "reset", *([] if board.complete else ["hint", "finish"])]
        limit = "" if board.memory is None else f" No rank may hold more than {pretty(board.memory)} activations."
        par = f" Par is {pretty(self.level.par.makespan)}."
        return {
            **super().state(),
            "level": self.level.name,
            "levels": [[each.name, f"{number}. {each.title}"] for number, each in enumerate(LEVELS.values(), 1)],
            "goal": f"{self.level.goal}{limit}{par}",
            "note": self._note,
            "tone": self._tone,
            "rank": self._rank,
            "trays": trays,
            "can": can,
            "code": self.code() if board.complete else "",
        }

    def _left(self, rank: int) -> list[Action]:
        """Return what a rank has left to place, and the pairs that it could place now."""
        return [*self.board.left(rank), *(action for action in self.board.choices(rank) if action.parts)]

    def _arrange(self, rank: int, before: list[Action]) -> None:
        """Update the buttons of a rank after a move; `before` it, these actions were left.

        No button takes the place of one that was clicked, or a second click there would place something else. So what
        has been placed keeps its button, disabled; that of a pair is given up at the move after.
        """
        tray, left = self._trays[rank], self._left(rank)
        new = [action for action in left if action not in tray]
        unused = [place for place, action in enumerate(tray) if action.parts and action not in [*left, *before]]
        for place, action in zip(unused, new, strict=False):
            tray[place] = action
        for place in reversed(unused[len(new) :]):
            if place == len(tray) - 1:
                tray.pop()
        tray += new[len(unused) :]

    def code(self) -> str:
        """The Python that makes what is on the board."""
        rows = "\n".join(f'    "{" ".join(map(str, order))}",' for order in self.schedule.orders)
        placement, many = self.schedule.placement, self.schedule.microbatches
        made = f"pp.Placement.make({placement.name!r}, {placement.ranks}, {placement.chunks}, {many})"
        return (
            f"orders = [\n{rows}\n]\n"
            "orders = tuple(tuple(map(pp.Action.parse, order.split())) for order in orders)\n"
            f"s = pp.Schedule('mine', {made}, {many}, orders)\n"
            "pp.check(s)  # []"
        )


def _list(actions: tuple[Action, ...]) -> str:
    return ", ".join(map(str, actions)) or "nothing"


def _button(action: Action, free: bool) -> list[Any]:
    """Return what is sent on a click, the label, the ops that give the colours, and whether it can be clicked."""
    return [str(action), " + ".join(map(str, action.singles)), "+".join(single.op for single in action.singles), free]


def puzzle(name: str = "first") -> Puzzle:
    """Show a board on which to make a schedule by hand, an action at a time.

    board = puzzle("1f1b")
    board.schedule

    name: the level it begins with, one of `ppedu.board.levels.LEVELS`.

    Raises:
        SettingError: there is no such level.
    """
    return Puzzle(level(name))


__all__ = ["Puzzle", "puzzle"]
