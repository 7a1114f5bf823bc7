"""`puzzle`: a widget to make a schedule by hand. The rules are in `ppedu.board`."""

from __future__ import annotations

from typing import Any

from ppedu.board.levels import LEVELS, Level, level
from ppedu.core.actions import Action
from ppedu.core.errors import PipelineError
from ppedu.core.numeric import pretty
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Timeline
from ppedu.view.interactive import Interactive
from ppedu.view.model import Data, Panel

READY = (
    "It is an ordinary schedule: pass it to pp.check, pp.simulate and pp.export, or run it on real ranks with "
    "pp.run.Pipeline."
)


class Puzzle(Interactive):
    """A board to fill by clicking. `schedule` holds the actions that are placed."""

    kind = "puzzle"

    def __init__(self, level: Level):
        super().__init__()
        self._open(level)

    def _open(self, level: Level) -> None:
        self.level, self.board = level, level.board()
        self._trays = [self._left(rank) for rank in range(self.board.ranks)]  # the actions on each rank's buttons
        self._report("Click an action to append it to its rank's order.")

    def _report(self, note: str, tone: str = "ok", rank: int = 0) -> None:
        self._note, self._tone, self._rank = note[0].upper() + note[1:], tone, rank

    @property
    def schedule(self) -> Schedule:
        """The actions that are placed, as an ordinary schedule."""
        return self.board.schedule

    @property
    def timeline(self) -> Timeline:
        """The timeline of the actions that are placed."""
        return self.board.timeline

    def panels(self) -> list[Panel]:
        par = self.level.par.makespan
        return [Panel(self.timeline, f"{self.level.title} (par {pretty(par)})", cap=self.board.memory, until=par)]

    def handle(self, message: dict[str, Any]) -> None:
        board, before = self.board, [self._left(rank) for rank in range(self.board.ranks)]
        try:
            match message:
                case {"level": str(name)}:
                    self._open(level(name))
                case {"place": str(action)}:
                    self._place(action)
                case {"do": "undo"}:
                    self._report(f"Undone: {_list(board.undo())}.")
                case {"do": "redo"}:
                    self._report(f"Redone: {_list(board.redo())}.")
                case {"do": "reset"}:
                    board.reset()
                    self._report("The board is empty; redo brings the actions back.")
                case {"do": "hint"}:
                    self._report(f"{board.hint()} can be placed next.")
                case {"do": "finish"}:
                    board.finish()
                    self._report(f"{board.verdict()} {READY}", "done")
        except PipelineError as error:
            self._report(f"{error}.", "no", self._rank)
        if self.board is board:
            for rank in range(board.ranks):
                self._arrange(rank, before[rank])
        self.refresh()

    def _place(self, action: str) -> None:
        placed, start, end = self.board.place(action)
        single = placed.singles[0]
        self._rank = self.board.placement.rank(single.stage, single.microbatch)
        if self.board.complete:
            self._report(f"{self.board.verdict()} {READY}", "done", self._rank)
        elif stuck := self.board.stuck:
            self._report(f"{stuck}.", "no", self._rank)
        else:
            self._report(f"{action} runs {pretty(start)}–{pretty(end)} on rank {self._rank}.", "ok", self._rank)

    def state(self) -> Data:
        board = self.board
        left = [self._left(rank) for rank in range(board.ranks)]
        trays = [[_button(each, each in left[rank]) for each in tray] for rank, tray in enumerate(self._trays)]
        can = ["undo", "redo", "reset", *([] if board.complete else ["hint", "finish"])]
        limit = "" if board.memory is None else f" No rank may hold more than {pretty(board.memory)} activations."
        return {
            **super().state(),
            "level": self.level.name,
            "levels": [[each.name, f"{number}. {each.title}"] for number, each in enumerate(LEVELS.values(), 1)],
            "goal": f"{self.level.goal}{limit} Par is {pretty(self.level.par.makespan)}.",
            "note": self._note,
            "tone": self._tone,
            "rank": self._rank,
            "trays": trays,
            "can": can,
            "code": self.code() if board.complete else "",
        }

    def _left(self, rank: int) -> list[Action]:
        """Return the actions that a rank has left to place, and the overlapped pairs that it can place now."""
        return [*self.board.left(rank), *(action for action in self.board.choices(rank) if action.parts)]

    def _arrange(self, rank: int, before: list[Action]) -> None:
        """Update the buttons of a rank after a move. `before` lists the actions that were left before it.

        An action that was placed keeps its button, disabled, so that an accidental second click cannot place another
        action. The button of a pair becomes free one move later.
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
        """Return Python code that makes the schedule on the board."""
        rows = "\n".join(f'    "{" ".join(map(str, order))}",' for order in self.schedule.orders)
        placement, microbatches = self.schedule.placement, self.schedule.microbatches
        made = f"pp.Placement.make({placement.name!r}, {placement.ranks}, {placement.chunks}, {microbatches})"
        return (
            f"orders = [\n{rows}\n]\n"
            "orders = tuple(tuple(map(pp.Action.parse, order.split())) for order in orders)\n"
            f"s = pp.Schedule('mine', {made}, {microbatches}, orders)\n"
            "pp.check(s)  # []"
        )


def _list(actions: tuple[Action, ...]) -> str:
    return ", ".join(map(str, actions)) or "nothing"


def _button(action: Action, free: bool) -> list[Any]:
    """Return the data of an action's button: message of a click, label, ops that colour it, whether it is enabled."""
    return [str(action), " + ".join(map(str, action.singles)), "+".join(single.op for single in action.singles), free]


def puzzle(name: str = "first") -> Puzzle:
    """Show a board on which to make a schedule by hand, one action at a time.

        board = puzzle("1f1b")
        board.schedule

    name: the level to start with, one of `ppedu.board.levels.LEVELS`.

    Raises:
        SettingError: there is no such level.
    """
    return Puzzle(level(name))
