"""The alphabet: every action of a rank as a few characters.

    2F0                   stage 2 runs the forward of microbatch 0
    2B0                   … its full backward; 2I0 and 2W0 are the two halves of that backward:
                          I for the input, W for the weights
    2R0                   … its forward again, for its backward (activation checkpointing): until then, stage 2 keeps
                          only the input of a microbatch that has an R in the order
    2O0  2L0              stage 2's activations of microbatch 0 go to the host, and come back for their backward: a copy
                          runs beside the computations behind it, after those before it and the rank's copy before it
    2U3                   stage 2's optimizer steps with the gradients of microbatch 3, and of all before it that no U
                          has used; later forwards use the new weights, and a backward those of its forward. In orders
                          without U, the optimizer steps once, after the end
    1S0  1T0              a head that all ranks share: the rank whose first stage is 1 runs its part of the head for
                          microbatch 0: S for its logits, from the last stage's forward, and T, once all ranks have run
                          S, for its gradients. If the last stage's rank runs T before its backward, that needs all T,
                          and there are two barriers. If not, it needs all S, and there is one: S then also computes
                          the gradient of the head's input
    1SEND_F3  2RECV_F3    stage 1 sends the output of its forward of microbatch 3, stage 2 receives it
    3SEND_B3  2RECV_B3    stage 3 sends the gradient of its input, stage 2 receives it
    2WAIT_RECV_F3         stage 2 waits for a message that was posted before: the rank went on after its 2RECV_F3;
                          WAIT_SEND_F, WAIT_RECV_B and WAIT_SEND_B are the others
    (1SEND_F3;1RECV_B0)BATCH_P2P          messages that are posted together, none before another
    1SEND_R3  1RECV_R3    the rank of stage 1's forward sends the input on, to the rank of its backward, where that is
                          another one: there, 1R3 runs the forward again
    0UNSHARD  0RESHARD  0REDUCE_GRAD      for sharded weights: gather them, free them, sum gradients
    (0F1;3B0)OVERLAP_F_B  a forward and a backward (B or I) at the same time

The grammar is that of torch.distributed.pipelining, parsed strictly. OVERLAP_B_F, with the backward first, exists only
here, and so do WAIT_RECV, R and its messages, O, L, U, S and T.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from operator import index
from typing import Any, NamedTuple

from ppedu.core.errors import ParseError, SettingError


class Op(str, Enum):
    """The kind of an action. An Op equals its own text: `Op.F == "F"`."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the usual letter for it)
    W = "W"
    R = "R"
    O = "O"  # noqa: E741 (for offload, as L is for load)
    L = "L"
    U = "U"
    S = "S"
    T = "T"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SEND_R = "SEND_R"
    RECV_R = "RECV_R"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_RECV_F = "WAIT_RECV_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    WAIT_RECV_B = "WAIT_RECV_B"
    WAIT_SEND_R = "WAIT_SEND_R"
    WAIT_RECV_R = "WAIT_RECV_R"
    BATCH_P2P = "BATCH_P2P"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"
    OVERLAP_B_F = "OVERLAP_B_F"

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]
    __hash__ = str.__hash__  # Enum's own is a Python function, and schedules hash many thousands of actions


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R, Op.U, Op.S, Op.T})
COPIES = frozenset({Op.O, Op.L})
SHARED = frozenset({Op.S, Op.T})  # of a head that all ranks share
SEND = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_R})
RECEIVE = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_R})
COMMUNICATION = SEND | RECEIVE
WAITS = {Op(f"WAIT_{op}"): op for op in sorted(COMMUNICATION)}  # from a wait to the message that it waits for
WAIT_OF = {op: wait for wait, op in WAITS.items()}
TRAFFIC = COMMUNICATION | WAITS.keys() | {Op.BATCH_P2P}  # all that only moves messages
SHARDING = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
OVERLAP = frozenset({Op.OVERLAP_F_B, Op.OVERLAP_B_F})

SINGLE = frozenset(Op) - SHARDING - OVERLAP - {Op.BATCH_P2P}  # of one stage and one microbatch

# From the ops of two parts, in order, to the op of their pair.
PAIRS = {
    (Op.F, Op.B): Op.OVERLAP_F_B,
    (Op.F, Op.I): Op.OVERLAP_F_B,
    (Op.B, Op.F): Op.OVERLAP_B_F,
    (Op.I, Op.F): Op.OVERLAP_B_F,
}


class Action(NamedTuple):
    """One thing a rank does.

    `stage` and `microbatch` count from 0. Sharding actions have no microbatch (-1). An overlapped pair
    has `parts`, two actions, and neither a stage nor a microbatch of its own (-1). So does a batch of messages.
    """

    stage: int
    op: Op
    microbatch: int = -1
    parts: tuple[Action, ...] = ()

    @property
    def singles(self) -> tuple[Action, ...]:
        """The parts of an overlapped pair or of a batch, or the action itself."""
        return self.parts or (self,)

    @property
    def computes(self) -> bool:
        """Whether it is a forward, a backward, half of one, R, U, S, T or a pair; no message."""
        return self.op in COMPUTE or self.op in OVERLAP

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.op}"
        # No microbatch. Before it is checked, the field may be anything, even an array, of which == is not a bool.
        if isinstance(self.microbatch, int) and self.microbatch == -1:
            return f"{self.stage}{self.op}"
        return f"{self.stage}{self.op}{self.microbatch}"

    def __repr__(self) -> str:
        return f"<{self}>"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that `text` names: `Action.parse("2F0")`.

        Raises:
            ParseError: The text is not exactly one action.
        """
        if not isinstance(text, str):
            raise _not_an_action(text)
        text = text.strip()
        if match := _SINGLE(text):
            return cls(int(match["stage"]), Op(match["op"]), int(match["microbatch"]))
        if match := _SHARDING(text):
            return cls(int(match["stage"]), Op(match["op"]))
        if match := _SEVERAL(text):
            several = cls(-1, Op(match["op"]), -1, tuple(map(cls.parse, match["parts"].split(";"))))
            if is_well_formed(several):
                return several
        raise _not_an_action(text)

    @classmethod
    def of(cls, value: Any) -> Action:
        """Return an action, or the text of an action, as a well-formed action.

        Raises:
            ParseError: The value is neither, or its fields do not make an action.
        """
        if not isinstance(value, Action):
            return cls.parse(value)
        stage, op, microbatch, parts = value
        try:
            action = cls(index(stage), Op(op), index(microbatch), tuple(map(cls.of, parts)))
        except ParseError:  # of a part; it is a ValueError, so the next clause would replace its message
            raise
        except (TypeError, ValueError):
            raise ParseError(
                f"{tuple.__repr__(value)} is not an action; its stage and its microbatch must be whole numbers, "
                "as m // 2 is and m / 2 is not, and its op an Op, such as Op.F"
            ) from None
        if not is_well_formed(action):
            raise _not_an_action(str(action))
        return action


def are_well_formed(values: Iterable[Any]) -> bool:
    """Return whether all values are well-formed actions."""
    for value in values:  # most are simple, and then a call for each would take twice as long
        if type(value) is Action:
            stage, op, microbatch, parts = value
            if type(stage) is int and type(microbatch) is int and type(op) is Op and op in SINGLE and parts == ():
                continue
        if not is_well_formed(value):
            return False
    return True


def is_well_formed(value: Any) -> bool:
    """Return whether a value is an action whose fields have the declared types and fit its op.

    `check` finds stages and microbatches that do not exist.
    """
    if type(value) is not Action:
        return False
    stage, op, microbatch, parts = value
    if type(op) is not Op or type(stage) is not int or type(microbatch) is not int or type(parts) is not tuple:
        return False
    if op is Op.BATCH_P2P:
        fits = stage == -1 and microbatch == -1 and parts
        return bool(fits) and all(is_well_formed(part) and part.op in COMMUNICATION for part in parts)
    if op in OVERLAP:
        if stage != -1 or microbatch != -1 or len(parts) != 2:
            return False
        first, second = parts
        return is_well_formed(first) and is_well_formed(second) and PAIRS.get((first.op, second.op)) == op
    if parts:
        return False
    return microbatch == -1 or op not in SHARDING


def _not_an_action(value: Any) -> ParseError:
    return ParseError(
        f"{value!r} is not an action; an action is a stage, an op and a microbatch, such as 2F0 or 1SEND_F3, "
        "a stage and UNSHARD, RESHARD or REDUCE_GRAD, a pair of a forward and a backward (B or I), such as "
        "(0F1;3B0)OVERLAP_F_B or (3B0;0F1)OVERLAP_B_F, or a batch of messages, such as (1SEND_F3;1RECV_B0)BATCH_P2P"
    )


def _either(ops: Iterable[Op]) -> str:
    return "|".join(sorted(ops))


_NUMBER = "0|[1-9][0-9]{0,8}"
_SINGLE = re.compile(
    f"(?P<stage>{_NUMBER})(?P<op>{_either(COMPUTE | COPIES | COMMUNICATION | WAITS.keys())})(?P<microbatch>{_NUMBER})"
).fullmatch
_SHARDING = re.compile(f"(?P<stage>{_NUMBER})(?P<op>{_either(SHARDING)})").fullmatch
_SEVERAL = re.compile(rf"\((?P<parts>\w+(;\w+)*)\)(?P<op>{_either(OVERLAP | {Op.BATCH_P2P})})", re.ASCII).fullmatch


_new = tuple.__new__  # `Action` itself takes twice as long, and a large schedule has a million


def F(stage: int, microbatch: int) -> Action:
    """Return a forward: `F(2, 0)` is 2F0."""
    return _new(Action, (stage, Op.F, microbatch, ()))


def B(stage: int, microbatch: int) -> Action:
    """Return a full backward, which computes the gradients of the input and the weights: `B(2, 0)` is 2B0."""
    return _new(Action, (stage, Op.B, microbatch, ()))


def I(stage: int, microbatch: int) -> Action:  # noqa: E743
    """Return the half of a backward that computes the gradient of the input, for which the previous stage waits."""
    return _new(Action, (stage, Op.I, microbatch, ()))


def W(stage: int, microbatch: int) -> Action:
    """Return the half of a backward that computes the gradients of the weights, for which only the optimizer waits."""
    return _new(Action, (stage, Op.W, microbatch, ()))


def R(stage: int, microbatch: int) -> Action:
    """Return a forward that runs again from its input, so that its backward has its activations: `R(2, 0)` is 2R0."""
    return _new(Action, (stage, Op.R, microbatch, ()))


def O(stage: int, microbatch: int) -> Action:  # noqa: E743
    """Return the copy of a microbatch's activations from a stage to the host, which frees them: `O(2, 0)` is 2O0."""
    return _new(Action, (stage, Op.O, microbatch, ()))


def L(stage: int, microbatch: int) -> Action:
    """Return the copy that loads these activations again, for their backward: `L(2, 0)` is 2L0."""
    return _new(Action, (stage, Op.L, microbatch, ()))


def U(stage: int, microbatch: int) -> Action:
    """Return the step of a stage's optimizer with all gradients up to this microbatch's: `U(2, 3)` is 2U3."""
    return _new(Action, (stage, Op.U, microbatch, ()))


def S(stage: int, microbatch: int) -> Action:
    """Return the logits of a rank's part of a shared head: `S(1, 0)` is 1S0, on the rank whose first stage is 1."""
    return _new(Action, (stage, Op.S, microbatch, ()))


def T(stage: int, microbatch: int) -> Action:
    """Return the gradients of a rank's part of a shared head: `T(1, 0)` is 1T0."""
    return _new(Action, (stage, Op.T, microbatch, ()))


def batch(messages: Iterable[Action]) -> Action:
    """Return the action that posts these SENDs and RECVs together."""
    return Action(-1, Op.BATCH_P2P, -1, tuple(messages))


def overlap(first: Action, second: Action) -> Action:
    """Return the pair that runs a forward and a backward (B or I), in either order, at the same time.

    Raises:
        SettingError: They are not a forward and a backward.
    """
    try:
        return Action(-1, PAIRS[first.op, second.op], -1, (first, second))
    except (AttributeError, KeyError):
        raise SettingError(
            f"a pair is a forward and a backward (B or I), such as 0F1 and 3B0; got {first!r} and {second!r}"
        ) from None
