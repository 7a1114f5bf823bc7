"""`puzzle`: a widget to make a schedule by hand. The rules are in `ppedu.course.board`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ppedu.core import Action, Op, PipelineError, Schedule
from ppedu.core.numeric import plural, pretty
from ppedu.core.validate import require_instance
from ppedu.course.board.board import Board
from ppedu.course.board.daily import TODAY, find
from ppedu.course.board.levels import LEVELS, Level
from ppedu.course.board.outlook import Outlook
from ppedu.course.board.patterns import Repeat, block_of, repeat, walk
from ppedu.course.board.recognition import recognize
from ppedu.course.board.results import KEEPER, MOST_STARS, RULES, Result
from ppedu.course.progress_file import stars
from ppedu.sim import Timeline
from ppedu.view.interactive import Interactive
from ppedu.view.link import encode
from ppedu.view.model import Data, Panel
from ppedu.view.why import PLAYGROUND, Told, Why, makespan, why

READY = "(What you have built is board.schedule, a schedule like any other.)"

PAIR_SLOTS = 6  # of a rank: for the overlapped pairs that can be placed, four at most, and for those just placed


class Attempt:
    """A level's board, and the help that the learner has had with it."""

    def __init__(self, board: Board):
        self.board = board
        slots = PAIR_SLOTS if board.pairs else 0
        self.pairs: list[list[Action | None]] = [[None for _ in range(slots)] for _ in range(board.ranks)]
        self.fresh, self.hinted, self.finished = True, False, False


class Puzzle(Interactive):
    """A board to fill by clicking. `schedule` holds the actions that are placed. Each level keeps its board."""

    kind = "puzzle"

    def __init__(self, level: Level):
        super().__init__()
        self._attempts: dict[str, Attempt] = {}
        self._open(level)

    def _open(self, level: Level) -> None:
        self.level = level
        if level.name not in self._attempts:
            self._attempts[level.name] = Attempt(level.board())
            self._arrange({})
        self._built: list[str] | None = None
        self._report("Click an action to append it to its rank's order.")

    @property
    def _attempt(self) -> Attempt:
        return self._attempts[self.level.name]

    @property
    def board(self) -> Board:
        """The board of the level that is open."""
        return self._attempt.board

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
        par, board = self.level.par.makespan, self.board
        until = par
        if not board.complete:  # room for the next action
            times = board.costs.durations(board.placement.stages, board.ranks)
            until = max(par, self.timeline.makespan + max(map(max, times.values())))
        return [Panel(self.timeline, f"{self.level.title} (par {pretty(par)})", cap=board.memory, until=until)]

    def handle(self, message: dict[str, Any]) -> None:
        board, before = self.board, {rank: self._open_pairs(rank) for rank in range(self.board.ranks)}
        self._built = None
        try:
            match message:
                case {"level": str(name)}:
                    self._open(find(name))
                case {"place": str(action)}:
                    self._place(action)
                case {"walk": str(action)}:
                    placed = walk(board, action)
                    said = f"Placed as early as possible: {_list(placed)}."
                    self._moved(placed[0], said)
                case {"repeat": list(singles)}:
                    done = repeat(board, block_of(board, map(str, singles)))
                    self._moved(done.block[0], _in_words(done))
                case {"do": "undo"}:
                    self._report(f"Undone: {_list(board.undo())}.")
                case {"do": "redo"}:
                    self._report(f"Redone: {_list(board.redo())}.")
                    self._attempt.fresh = False
                case {"do": "reset"}:
                    board.reset()
                    self._attempt.fresh = True
                    self._report("The board is empty; redo brings the actions back.")
                case {"do": "hint"}:
                    self._report(f"{board.hint()} can be placed next.")
                    self._begin()
                    self._attempt.hinted = True
                case {"do": "finish"}:
                    board.finish()
                    self._attempt.fresh, self._attempt.finished = False, True
                    self._report(f"Finished for you, without a star: {board.verdict()} Reset, and find it yourself.")
        except PipelineError as error:
            self._report(f"{error}.", "no", self._rank)
        if self.board is board:
            self._arrange(before)
        self.refresh()

    def _begin(self) -> None:
        """Begin a new attempt, without help so far, if the board is new or was reset."""
        attempt = self._attempt
        if attempt.fresh:
            attempt.fresh, attempt.hinted, attempt.finished = False, False, False

    def _place(self, action: str) -> None:
        placed, start, end = self.board.place(action)
        rank = self.board.rank(placed)
        self._moved(placed, f"{action} runs {pretty(start)}–{pretty(end)} on rank {rank}.")

    def _moved(self, placed: Action, said: str) -> None:
        """Report a move of the learner, and what it leads to."""
        self._begin()
        self._rank = self.board.rank(placed)
        if self.board.complete:
            self._complete()
        elif stuck := self.board.stuck:
            self._report(f"{stuck}.", "no", self._rank)
        else:
            self._report(said, "ok", self._rank)

    def _complete(self) -> None:
        """Report that the learner has placed the last action, and keep the result unless the board was finished."""
        if self._attempt.finished:
            said = "No star, as the rest was finished for you before; reset for a new attempt."
        else:
            makespan = self.timeline.makespan
            if makespan > self.level.par.makespan:
                number = 1
            elif self._attempt.hinted:
                number = 2
            else:
                number = 3
            KEEPER.add(self.level.name, Result(number, makespan))
            said = f"That earns {stars(number, MOST_STARS)}{', as you asked for a hint' if number == 2 else ''}."
            if built := recognize(self.schedule, self.level.published):
                said = f"You have just built {built}. {said}"
                self._built = [f"about {built.name}", f"{PLAYGROUND}schedules/{built.name}.html"]
        self._report(f"{self.board.verdict()} {said} {READY}", "done", self._rank)

    def state(self) -> Data:
        board, best = self.board, KEEPER.best(self.level.name)
        can = ["undo", "redo", "reset"]
        if not board.complete:
            can += [*(["repeat"] if board.moves else []), "hint", "finish"]
        best_in_words = stars(0, MOST_STARS)
        if best:
            best_in_words = f"{stars(best.stars, MOST_STARS)} your best: {pretty(best.makespan)}"
        limit = "" if board.memory is None else f" No rank may hold more than {pretty(board.memory)} activations."
        return {
            **super().state(),
            "level": self.level.name,
            "levels": self._levels(),
            "goal": [f"{self.level.goal}{limit} Par, the time to reach, is ", self._par(), "."],
            "best": best_in_words,
            "rules": RULES,
            "note": self._note,
            "tone": self._tone,
            "built": self._built,
            "rank": self._rank,
            "trays": self._trays(),
            "can": can,
            "code": self.code() if board.complete else "",
        }

    def _par(self) -> Why:
        """Return the time to reach, and the schedule whose makespan it is."""
        par = makespan(self.level.par)
        return par._replace(words=[f"The makespan of {self.level.par.schedule.name} at this size.", *par.words])

    def _levels(self) -> list[list[str]]:
        """Return the names and titles of the levels, with today's board, and that of another day if it is open."""
        daily = find(TODAY)
        entries = [[each.name, _entry(f"{number}.", each)] for number, each in enumerate(LEVELS.values(), 1)]
        entries.append([daily.name, _entry("Today,", daily)])
        if self.level.name not in dict(entries):
            entries.append([self.level.name, _entry("On", self.level)])
        return entries

    def _trays(self) -> list[list[list[list[Any] | None]]]:
        """Return the buttons of each rank: one block per op, each action in a slot of its own, then the pairs.

        An action that is placed keeps its slot, disabled, so that no other action takes its place under the pointer.
        An empty slot for a pair is None.
        """
        outlook, ops, trays = Outlook(self.board), self.board.ops, []
        for rank in range(self.board.ranks):
            own = sorted(self.board.actions(rank), key=lambda each: (ops.index(each.op), each.stage))
            blocks: list[list[list[Any] | None]] = []
            for _, block in groupby(own, lambda each: each.op):
                blocks.append([self._button(each, self.board.is_left(each), outlook) for each in block])
            free = self._open_pairs(rank)
            if pairs := self._attempt.pairs[rank]:
                blocks.append([each and self._button(each, each in free, outlook) for each in pairs])
            trays.append(blocks)
        return trays

    def _button(self, action: Action, left: bool, outlook: Outlook) -> list[Any]:
        """Return the data of an action's button.

        They are the message of a click, the label, the ops that color it, whether it is enabled, what the move would
        lead to, and its times, if it can be made.
        """
        named = "+".join(map(str, action.singles)), "+".join(single.op for single in action.singles)
        if not left:
            return [str(action), *named, False, [], None]
        if refusal := self.board.why_not(action):
            return [str(action), *named, True, [f"{refusal[0].upper()}{refusal[1:]}."], None]
        start, end, least, bubble, peak, (how, idle, held) = outlook.after(action)
        over = least - self.level.par.makespan
        told: Told = [
            f"{named[0]} would run {pretty(start)}–{pretty(end)} on rank {self.board.rank(action)}. "
            "With the rest after it, at least: makespan ",
            why(pretty(least), [how]),
        ]
        if over > 0:
            told += [" (", why(f"{pretty(over)} over par", [f"Par is {pretty(self.level.par.makespan)}."]), ")"]
        told += [", bubble ", why(f"{bubble:.1%}", [idle]), ", peak ", why(pretty(peak), [held]), "."]
        return [str(action), *named, True, told, [float(start), float(end), over > 0]]

    def _open_pairs(self, rank: int) -> list[Action]:
        """Return the overlapped pairs that can be placed next on a rank, of each stage's first microbatches only.

        Microbatches are alike, so the other pairs are no better.
        """
        pairs = [action for action in self.board.choices(rank) if action.parts]
        first: dict[tuple[int, Op], int] = {}  # by stage and op, the lowest microbatch
        for pair in pairs:
            for stage, op, microbatch, _ in pair.singles:
                first[stage, op] = min(microbatch, first.get((stage, op), microbatch))
        return [pair for pair in pairs if all(first[each.stage, each.op] == each.microbatch for each in pair.singles)]

    def _arrange(self, before: dict[int, list[Action]]) -> None:
        """Give slots to new pairs. `before` lists the pairs that could be placed on each rank before the last move.

        The slot of a pair becomes free one move after the pair cannot be placed any more, so that an accidental second
        click cannot place another one.
        """
        for rank, slots in enumerate(self._attempt.pairs):
            free = self._open_pairs(rank)
            new = [action for action in free if action not in slots]
            for place, action in enumerate(slots):
                if action is None or action not in [*free, *before.get(rank, [])]:
                    slots[place] = new.pop(0) if new else None

    @property
    def inputs(self) -> dict[str, str]:
        """The arguments of `puzzle` that show this board again."""
        placed = self.board.moves[len(self.board.start) :]
        return {"level": self.level.name, "placed": " ".join(map(str, placed))}

    def link(self) -> str:
        """Return the address of the playground with this board, as far as it is built."""
        return f"{PLAYGROUND}#{encode('puzzle', self.inputs)}"

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


def _entry(before: str, level: Level) -> str:
    best = KEEPER.best(level.name)
    return f"{before} {level.title}" + (f"  {stars(best.stars, MOST_STARS)}" if best else "")


def _list(actions: tuple[Action, ...]) -> str:
    return ", ".join(map(str, actions)) or "nothing"


def _in_words(done: Repeat) -> str:
    """Return what was repeated, how often, and how."""
    slots = "slot" if done.period == 1 else f"{pretty(done.period or 0)} slots"
    how = "one copy after the other" if done.period is None else f"a copy every {slots}"
    return f"Repeated {plural(len(done.block), 'action')} {plural(done.copies, 'time')}, {how}."


def puzzle(name: str = "first", placed: str = "") -> Puzzle:
    """Show a board on which to make a schedule by hand.

        board = puzzle("1f1b")
        board.schedule

    Args:
        name: The level to start with: one of `ppedu.course.board.levels.LEVELS`, "today" for the board of the day, or a
            date such as "2026-05-04" for that of another day.
        placed: Actions to begin with, separated by spaces, in an order in which they can be placed: "0F0 1F0 0F1".

    Raises:
        SettingError: The level is unknown.
        ScheduleError: An action cannot be placed.
    """
    require_instance("placed", placed, str, 'actions as text, such as "0F0 1F0"')
    made = Puzzle(find(name))
    for action in placed.split():
        made.board.place(action)
    return made
