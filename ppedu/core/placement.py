"""Placement: which rank holds which stage, and therefore which ranks exchange messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import index
from typing import Any

from ppedu.core.actions import SEND, SHARED, Action, Op
from ppedu.core.errors import SettingError
from ppedu.core.validate import require_count, require_name, require_rank, require_size


def fields_alone(self: Any) -> dict[str, Any]:
    """Return the state of a dataclass for pickling and copying: its fields, without cached properties."""
    return {field.name: getattr(self, field.name) for field in fields(self)}


# From the stage of a SEND or RECV to its peer's: activations go to the next stage, gradients to the one before. The
# peer of 2SEND_F0 is stage 2 + 1, that of 2SEND_B0 is stage 2 - 1. The input for 2R0 comes from the rank of 2F0.
TOWARDS = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1, Op.SEND_R: 0, Op.RECV_R: 0}
_MATCHING = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B, Op.SEND_R: Op.RECV_R}
_MATCHING |= {receive: send for send, receive in _MATCHING.items()}
PLACEMENTS = "loop", "v", "bidirectional", "round"
# The results, and actions, of the rank of a stage's forward. All others are of the rank of its backward.
FORWARDS = {"F", "SEND_F", "RECV_F", "SEND_R", "WAIT_SEND_F", "WAIT_RECV_F", "WAIT_SEND_R", "POST_F"}


def other_end(message: Action) -> Action:
    """Return the RECV of a SEND, or the SEND of a RECV: 3RECV_F0 for 2SEND_F0, and the reverse."""
    stage, op, microbatch, _ = message
    return Action(stage + TOWARDS[op], _MATCHING[op], microbatch)


@dataclass(frozen=True)
class Placement:
    """The map from a stage and a microbatch to a rank. Create one with `Placement.make` or `Placement.custom`.

    Args:
        holders: `holders[copy][stage]` is the rank that holds the stage in that copy of the model. There are one or two
            copies.
        split: If there are two copies, the microbatches from `split` on run through the second.
        slices: The slices into which the sequence of each microbatch is cut. The numbers in actions then count slices:
            with 4, 0F6 is the forward of slice 2 of microbatch 1, and so do `split` and `Schedule.microbatches`.
        barriers: If all ranks share the head, how often they wait for each other in it, 1 or 2; otherwise 0. A schedule
            sets it by its S and T.
        backwards: `backwards[stage]` is the rank that runs the stage's backward, if that can be another rank than that
            of the forward. It then runs the forward again, with an R. There is one copy, of whole sequences.
    """

    name: str
    ranks: int
    holders: tuple[tuple[int, ...], ...]
    split: int = 0
    slices: int = 1
    barriers: int = 0
    backwards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_name("a placement's name", self.name)
        ranks, split = require_count("ranks", self.ranks), require_count("split", self.split, least=0)
        try:
            holders = tuple(tuple(map(index, copy)) for copy in self.holders)
        except TypeError:
            holders = ()
        stages = {len(copy) for copy in holders}
        same_stages = len(stages) == 1 and 0 not in stages
        ranks_exist = all(0 <= rank < ranks for copy in holders for rank in copy)
        if len(holders) not in (1, 2) or not same_stages or not ranks_exist:
            raise SettingError(
                f"holders must give the rank, below {ranks}, of every stage, in one copy of the model or in two, "
                f"such as ((0, 1, 1, 0),); got {self.holders!r}"
            )
        slices = require_count("slices", self.slices)
        if len(holders) > 1 and split % slices:
            raise SettingError(f"the second copy begins with a whole microbatch; got split={split} of {slices} slices")
        backwards = tuple(require_rank(rank, ranks) for rank in self.backwards)
        if backwards and (len(holders) > 1 or slices > 1 or len(backwards) != len(holders[0])):
            raise SettingError(
                "backwards must give the rank of every stage, and needs one copy of the model and no slices; "
                f"got {self.backwards!r}"
            )
        backwards = backwards if backwards != holders[0] else ()
        settled = {"ranks": ranks, "split": split, "slices": slices, "holders": holders, "backwards": backwards}
        vars(self).update(settled)  # frozen, so not by assignment

    __getstate__ = fields_alone

    @classmethod
    def make(cls, name: str, ranks: int, chunks: int = 1, microbatches: int = 1, slices: int = 1) -> Placement:
        """Return the placement called `name` for `ranks` ranks.

        Args:
            name: "loop": stage s on rank s mod ranks, `chunks` stages on each rank. On 3 ranks, 2 chunks make
                0 1 2 0 1 2, the ranks of stages 0 to 5.
                "v": down the ranks and back up, a zigzag of `chunks` stages on each rank. On 3 ranks, 2 chunks make
                0 1 2 2 1 0.
                "bidirectional": two copies of the model, each a zigzag of `chunks` stages on each rank, one from the
                first rank, one from the last. The first half of the `microbatches`, rounded up, runs through the first
                copy.
                "round": forwards, then backwards, go round the ranks, `chunks` stages for each rank. The last stage's
                forward and backward are on one rank. Of the others, a rank runs the backward of one, and the forwards
                of three, which take as long if its backward recomputes. On 3 ranks, 2 chunks make 0 0 1 1 1 2 for the
                forwards of stages 0 to 5, then, from the last stage back to the first, 2 0 1 2 0 1 for the backwards.
            slices: Of each of the `microbatches`.

        Raises:
            SettingError: There is no such placement, or a number is not a whole number above 0.
        """
        ranks, chunks, microbatches = require_size(ranks, chunks, microbatches, slices)
        if not isinstance(name, str) or name not in PLACEMENTS:
            raise SettingError(f"unknown placement {name!r}; available: {', '.join(PLACEMENTS)}")
        down = tuple(range(ranks))
        up = down[::-1]
        if name == "loop":
            return cls(name, ranks, (down * chunks,), slices=slices)
        if name == "round":
            last = ranks * chunks - 1
            turn = -(-last // 3)  # of the last stage's forward and backward
            forwards = tuple((turn - -(-(last - stage) // 3)) % ranks for stage in range(last + 1))
            backwards = tuple((turn + last - stage) % ranks for stage in range(last + 1))
            return cls(name, ranks, (forwards,), slices=slices, backwards=backwards)
        zigzags = [(each * chunks)[: ranks * chunks] for each in (down + up, up + down)]
        if name == "v":
            return cls(name, ranks, (zigzags[0],), slices=slices)
        first_half = microbatches - microbatches // 2
        return cls(name, ranks, (zigzags[0], zigzags[1]), first_half * require_count("slices", slices), slices)

    @classmethod
    def custom(cls, holders: Sequence[int], backwards: Sequence[int] = ()) -> Placement:
        """Return a placement of one copy, with stage s on rank `holders[s]`, and its backward on rank `backwards[s]`.

        Raises:
            SettingError: `holders` is empty, an entry is not a whole number, or a rank below the highest is missing.
        """
        if not isinstance(holders, Sequence):
            raise SettingError(f"a placement is a rank for each stage, such as [0, 1, 1, 0]; got {holders!r}")
        ranks = sorted({require_count("a rank", rank, least=0) for rank in (*holders, *backwards)})
        if not ranks or ranks != list(range(len(ranks))):
            raise SettingError(f"a placement must give each rank from 0 on at least one stage; got {list(holders)}")
        return cls("custom", len(ranks), (tuple(holders),), backwards=tuple(backwards))

    @cached_property
    def stages(self) -> int:
        return len(self.holders[0])

    @property
    def copies(self) -> int:
        """The number of copies of the model: 2 in a bidirectional placement, 1 otherwise."""
        return len(self.holders)

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the backwards of the stages, in each copy; mostly the `holders`."""
        return (self.backwards,) if self.backwards else self.holders

    @property
    def alone(self) -> bool:
        """Whether each stage is on one rank only."""
        return len(self.holders) == 1 and not self.backwards

    def apart(self, stage: int) -> bool:
        """Return whether the backward of a stage is on another rank than its forward."""
        return self.homes[0][stage] != self.holders[0][stage] if self.backwards else False

    def holders_of(self, stage: int) -> list[int]:
        """Return the ranks that hold a stage: one for each copy, or those of its forward and its backward."""
        return [copy[stage] for copy in dict.fromkeys((*self.holders, *self.homes))]

    @cached_property
    def chunks(self) -> int:
        """The number of stages of one copy that a rank holds; if ranks differ, the largest. Backwards count."""
        return max(Counter(self.homes[0]).values())

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """By rank, its first stage, after which its part of a head that all ranks share is named."""
        return tuple(self.holders[0].index(rank) for rank in sorted({*self.holders[0]}))

    def with_barriers(self, orders: Sequence[Sequence[Action]]) -> Placement:
        """Return the placement with the `barriers` of orders: 2 if the last stage's rank runs T before its backward."""
        done, last = set(), self.stages - 1
        for stage, op, microbatch, _ in (each for action in orders[self.holders[0][last]] for each in action.singles):
            if op == Op.T:
                done.add(microbatch)
            elif op in (Op.B, Op.I) and stage == last and microbatch in done:
                return replace(self, barriers=2)
        shared = any(action.op in SHARED for order in orders for action in order)
        return replace(self, barriers=int(shared))

    def copy(self, microbatch: int) -> int:
        """Return the copy of the model that `microbatch` runs through, 0 or 1."""
        return int(len(self.holders) > 1 and microbatch >= self.split)

    def rank(self, stage: int, microbatch: int = 0, op: str = "F") -> int:
        """Return the rank that holds `stage` for `microbatch`, and runs an action of this op, or has such a result.

        Raises:
            SettingError: There is no such stage.
        """
        try:
            if stage < 0:  # which Python would count from the end
                raise IndexError
            return self._row(op, self.copy(microbatch))[stage]
        except (IndexError, RuntimeError, TypeError, ValueError):  # RuntimeError: a tensor of several numbers
            raise SettingError(
                f"there is no stage {stage!r} for microbatch {microbatch!r}; the stages are 0 to {self.stages - 1}"
            ) from None

    def chunk(self, stage: int, microbatch: int = 0) -> int:
        """Return the position of `stage` among the stages of its (backward's) rank in the microbatch's copy, from 0.

        Raises:
            SettingError: There is no such stage.
        """
        rank = self.rank(stage, microbatch, "B")
        return self.homes[self.copy(microbatch)][:stage].count(rank)

    def _row(self, op: str, copy: int) -> tuple[int, ...]:
        """Return the rank of each stage for an op or a result of this kind."""
        return self.holders[copy] if op in FORWARDS else self.homes[copy]

    @cached_property
    def links(self) -> tuple[tuple[tuple[Op, ...], ...], ...]:
        """`links[copy][stage]`: the SENDs and RECVs of a stage for each microbatch. A rank sends itself nothing."""

        def messages(copy: int, stage: int) -> tuple[Op, ...]:
            ops = []
            for op, towards in TOWARDS.items():
                peer = stage + towards
                if 0 <= peer < self.stages and self._row(_MATCHING[op], copy)[peer] != self._row(op, copy)[stage]:
                    ops.append(op)
            return tuple(ops)

        return tuple(tuple(messages(copy, stage) for stage in range(self.stages)) for copy in range(self.copies))

    def route(self, action: Action) -> tuple[int, int]:
        """Return the rank that sends the message of a SEND or RECV, and the rank that receives it.

        Raises:
            SettingError: The action is not a SEND or RECV, or its other stage does not exist.
        """
        if not isinstance(action, Action) or action.op not in TOWARDS:
            raise SettingError(f"{action!r} is not a message; expected a SEND or RECV, such as 1SEND_F3")
        other = action.stage + TOWARDS[action.op]
        if not (0 <= action.stage < self.stages and 0 <= other < self.stages):
            raise SettingError(
                f"{action} goes to or comes from a stage that does not exist; the stages are 0 to {self.stages - 1}"
            )
        here = self.rank(action.stage, action.microbatch, action.op)
        there = self.rank(other, action.microbatch, _MATCHING[action.op])
        return (here, there) if action.op in SEND else (there, here)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, of all copies, first to last.

        Raises:
            SettingError: There is no such rank.
        """
        rank = require_rank(rank, self.ranks)
        return tuple(stage for stage in range(self.stages) if rank in self.holders_of(stage))
