"""Which rank holds which stage, and therefore who needs what from whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import index
from typing import Any

from ppedu.core.actions import SEND, Action, Op
from ppedu.core.errors import SettingError
from ppedu.core.validate import require_count, require_name, require_rank, require_size


def fields_alone(self: Any) -> dict[str, Any]:
    """Return the state of a dataclass to pickle or to copy: its fields, without what is cached beside them."""
    return {field.name: getattr(self, field.name) for field in fields(self)}


# The stage at the other end of a message: activations go to the next stage, gradients to the one before.
TOWARDS = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}


@dataclass(frozen=True)
class Placement:
    """The map from a stage and a microbatch to the rank that works on it.

    `holders[copy][stage]` is the rank that holds the stage in that copy of the model. There is one copy, or
    there are two: then microbatches from `split` on run through the second. Make one with `Placement.make`;
    for a map of your own, with `Placement.custom`.
    """

    name: str
    ranks: int
    holders: tuple[tuple[int, ...], ...]
    split: int = 0

    def __post_init__(self) -> None:
        require_name("a placement's name", self.name)
        ranks, split = require_count("ranks", self.ranks), require_count("split", self.split, least=0)
        try:
            holders = tuple(tuple(map(index, copy)) for copy in self.holders)
        except TypeError:
            holders = ()
        there = all(copy and min(copy) >= 0 and max(copy) < ranks for copy in holders)
        if len(holders) not in (1, 2) or len(holders[0]) != len(holders[-1]) or not there:
            raise SettingError(
                f"holders must give the rank, below {ranks}, of every stage, in one copy of the model or in two, "
                f"such as ((0, 1, 1, 0),); got {self.holders!r}"
            )
        vars(self).update(ranks=ranks, split=split, holders=holders)

    __getstate__ = fields_alone

    @classmethod
    def make(cls, name: str, ranks: int, chunks: int = 1, microbatches: int = 1) -> Placement:
        """Return the placement called `name` for `ranks` ranks.

        "loop": stage s on rank s mod ranks, `chunks` stages on each rank.
        "v": down the ranks and back up, a zigzag of `chunks` stages on each rank.
        "bidirectional": two copies of the model, one from the first rank to the last, one from the last to
            the first. The first half of the `microbatches` (the larger, where they are odd) takes the first.

        Raises:
            SettingError: there is no such placement, or a number is not a whole number above 0.
        """
        ranks, chunks, microbatches = require_size(ranks, chunks, microbatches)
        known = [*_SHAPES, "bidirectional"]
        if not isinstance(name, str) or name not in known:
            raise SettingError(f"there is no placement called {name!r}; there is: {', '.join(known)}")
        if name == "bidirectional":
            if chunks != 1:
                raise SettingError(
                    f"a bidirectional placement has one stage of each copy on a rank; got {chunks} chunks"
                )
            down = tuple(range(ranks))
            return cls(name, ranks, (down, down[::-1]), microbatches - microbatches // 2)
        return cls(name, ranks, (tuple(_SHAPES[name](stage, ranks) for stage in range(ranks * chunks)),))

    @classmethod
    def custom(cls, holders: Sequence[int]) -> Placement:
        """Return a placement of one copy, with stage s on rank `holders[s]`.

        Raises:
            SettingError: there are no stages, a rank below the highest holds none, or one is not a whole number.
        """
        if not isinstance(holders, Sequence):
            raise SettingError(f"a placement is a rank for each stage, such as [0, 1, 1, 0]; got {holders!r}")
        ranks = sorted({require_count("a rank", rank, least=0) for rank in holders})
        if not ranks or ranks != list(range(len(ranks))):
            raise SettingError(f"a placement gives every rank from 0 on a stage; got {list(holders)}")
        return cls("custom", len(ranks), (tuple(holders),))

    @cached_property
    def stages(self) -> int:
        return len(self.holders[0])

    @property
    def copies(self) -> int:
        """Copies of the model: 1, or 2 in a bidirectional placement."""
        return len(self.holders)

    @cached_property
    def chunks(self) -> int:
        """Stages of one copy held by one rank (the most, where ranks differ)."""
        return max(Counter(self.holders[0]).values())

    def copy(self, microbatch: int) -> int:
        """Which copy of the model `microbatch` runs through."""
        return int(len(self.holders) > 1 and microbatch >= self.split)

    def rank(self, stage: int, microbatch: int = 0) -> int:
        """Return the rank that works on `microbatch` in `stage`.

        Raises:
            SettingError: there is no such stage.
        """
        try:
            return self.holders[len(self.holders) > 1 and microbatch >= self.split][stage]
        except (IndexError, TypeError, ValueError):
            raise SettingError(
                f"there is no stage {stage!r} of a microbatch {microbatch!r}; the stages are 0 to {self.stages - 1}"
            ) from None

    def chunk(self, stage: int, microbatch: int = 0) -> int:
        """Return which of its rank's stages `stage` is, of the copy that `microbatch` runs through, from 0.

        Raises:
            SettingError: there is no such stage.
        """
        rank = self.rank(stage, microbatch)
        return self.holders[self.copy(microbatch)][:stage].count(rank)

    @cached_property
    def links(self) -> tuple[tuple[tuple[Op, ...], ...], ...]:
        """`links[copy][stage]`: the messages that a stage sends and receives for a microbatch; none within a rank."""
        return tuple(
            tuple(
                tuple(
                    op
                    for op, towards in TOWARDS.items()
                    if 0 <= stage + towards < self.stages and copy[stage + towards] != copy[stage]
                )
                for stage in range(self.stages)
            )
            for copy in self.holders
        )

    def route(self, action: Action) -> tuple[int, int]:
        """Return the ranks that the message of a SEND or RECV goes from and to.

        Raises:
            SettingError: the action is not a SEND or RECV, or there is no stage at one of its ends.
        """
        if not isinstance(action, Action) or action.op not in TOWARDS:
            raise SettingError(f"{action!r} is not a message; a SEND or RECV is one, such as 1SEND_F3")
        other = action.stage + TOWARDS[action.op]
        if not (0 <= action.stage < self.stages and 0 <= other < self.stages):
            raise SettingError(f"{action} is not a message between two of the stages 0 to {self.stages - 1}")
        here, there = self.rank(action.stage, action.microbatch), self.rank(other, action.microbatch)
        return (here, there) if action.op in SEND else (there, here)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, of all copies, first to last.

        Raises:
            SettingError: there is no such rank.
        """
        rank = require_rank(rank, self.ranks)
        return tuple(sorted({stage for copy in self.holders for stage, holder in enumerate(copy) if holder == rank}))


def _loop(stage: int, ranks: int) -> int:
    return stage % ranks


def _zigzag(stage: int, ranks: int) -> int:
    chunk, place = divmod(stage, ranks)
    return ranks - 1 - place if chunk % 2 else place


_SHAPES: dict[str, Callable[[int, int], int]] = {"loop": _loop, "v": _zigzag}
