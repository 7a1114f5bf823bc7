"""`Lineup`: a widget in which a learner judges timelines, and accuses an action by clicking it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from ppedu.core import Action, Op
from ppedu.core.numeric import plural
from ppedu.sim import Timeline
from ppedu.view.interactive import Interactive
from ppedu.view.model import Data, Panel, Stack

Verdict = str | tuple[int, str]  # "legal", or a rank and its action


class Lineup(Interactive):
    """Timelines to judge. `verdicts` holds the verdicts so far, by name: "legal", or a rank and its action, as text.

    Args:
        timelines: By name; drawn ones may be impossible.
        about: A line about each, by name.
    """

    kind = "lineup"

    def __init__(self, timelines: Mapping[str, Timeline], about: Mapping[str, str]):
        super().__init__()
        self.timelines, self.about = dict(timelines), about
        self.verdicts: dict[str, Verdict] = {}

    def panels(self) -> list[Panel]:
        return [
            Panel(each, f"{name}: {self.about[name]}", marks=self._marks(name)) for name, each in self.timelines.items()
        ]

    @property
    def stack(self) -> Stack:
        return Stack(self.panels(), bare=True)

    def _marks(self, name: str) -> set[tuple[int, int]]:
        """Return the rank and the position of the accused action of a timeline, if it is drawn there."""
        verdict, orders = self.verdicts.get(name, "legal"), self.timelines[name].schedule.orders
        if isinstance(verdict, str):
            return set()
        rank, action = verdict
        return {(rank, place) for place, each in enumerate(orders[rank]) if str(each) == action}

    def handle(self, message: dict[str, Any]) -> None:
        """Change a verdict. A click on what is already the verdict takes it back."""
        match message:
            case {"case": int(number), **rest} if 0 <= number < len(self.timelines):
                name, timeline = list(self.timelines.items())[number]
            case _:
                return
        verdict: Verdict | None = None
        match rest:
            case {"legal": True}:
                verdict = "legal"
            case {"missing": str(action)} if action in self._actions(timeline):
                verdict = timeline.schedule.placement.rank(Action.parse(action).stage), action
            case {"box": int(index)} if 0 <= index < len(boxes := self.panels()[number].boxes):
                box = boxes[index]
                verdict = box.rank, str(Action(box.stage, box.op, box.microbatch))
        if verdict is None or verdict == self.verdicts.get(name):
            self.verdicts.pop(name, None)
        else:
            self.verdicts[name] = verdict
        self.refresh()

    def _actions(self, timeline: Timeline) -> list[str]:
        """Return all actions that a complete timeline of this size has, forwards first, as text."""
        own = timeline.schedule
        return [str(Action(s, op, m)) for op, s, m in product((Op.F, Op.B), range(own.stages), range(own.microbatches))]

    def state(self) -> Data:
        given, all_ = len(self.verdicts), len(self.timelines)
        left = (
            "All verdicts are given. Run the next cell." if given == all_ else f"{plural(given, 'verdict')} of {all_}."
        )
        state = super().state()
        state["legend"] = [[key, "accused" if key == "mark" else words] for key, words in state["legend"]]
        for panel in state["panels"]:
            panel["heading"] = ""  # the line above it has the name
            panel["gaps"] = []  # the reasons for waits assume a timeline that is possible
        return {
            **state,
            "cases": [self._case(name, timeline) for name, timeline in self.timelines.items()],
            "note": f"{left} Click an action that is wrong; a second click takes the verdict back.",
        }

    def _case(self, name: str, timeline: Timeline) -> Data:
        verdict = self.verdicts.get(name)
        missing = words = ""
        if isinstance(verdict, tuple):
            rank, action = verdict
            drawn = bool(self._marks(name))
            missing = "" if drawn else action
            words = f"{action} on rank {rank} is wrong" if drawn else f"{action} is missing on rank {rank}"
        elif verdict:
            words = "runs as drawn"
        return {
            "name": name,
            "about": self.about[name],
            "actions": self._actions(timeline),
            "verdict": words,
            "legal": verdict == "legal",
            "missing": missing,
        }
