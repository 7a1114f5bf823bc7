"""Ranks in this process, to try a loop on: they wait for each other as real ones do, one at a time and without a clock.

When nobody can go on, that is known, and who waits for whom with it.
"""

from __future__ import annotations

import ctypes
import linecache
import sys
from collections import deque
from collections.abc import Callable, Sequence
from numbers import Real
from threading import Semaphore, Thread
from types import FrameType
from typing import Any, NamedTuple

from ppedu.core.actions import Action, B, F
from ppedu.core.errors import SettingError
from ppedu.core.numeric import plural
from ppedu.core.validate import require_count, require_rank

# Where an operation's neighbour is, as `ppedu.run.communicate` and `bidirectional_communicate` have it.
ONE_WAY = {"recv_forward": -1, "send_forward": +1, "recv_backward": +1, "send_backward": -1}
BOTH_WAYS = {"send_fwd_recv_bwd": +1, "send_bwd_recv_fwd": -1}
FIT = {"send", "receive"}, {"swap"}  # the two sides of a message
MOST_RANKS = 1000  # each of them a thread
MOST_CALLS = 10_000  # of a rank's methods; a loop that makes more does not end
MOST_SECONDS = 10.0  # between two of them; nor does one that takes longer
MOST_ATTEMPTS = 100  # to end a rank by an exception, as its program may catch one; each takes 10 ms


class Wait(NamedTuple):
    """A rank that cannot go on: what it waits in, for which ranks, and the program's line.

    kind: "send", "receive", "swap", or "all", for something that all ranks must come to.
    """

    rank: int
    doing: str
    peers: tuple[int, ...]
    kind: str
    line: int
    source: str


class Tensor(NamedTuple):
    """What stands for a tensor: the result of a forward ("activation") or of a backward ("gradient")."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.kind} of microbatch {self.microbatch}"


class Call(NamedTuple):
    """What a rank waits in: a message with `peer`, or, without one, something that all ranks must come to."""

    doing: str
    kind: str
    peer: int | None
    value: Any
    line: int
    source: str


class Stopped(SystemExit):
    """Ends a rank's thread; of all exceptions, this is the one that a thread may end with without a word."""


class Parked(Stopped):
    """Parks a thread whose program catches every exception: the thread itself makes the exception, and waits here."""

    def __init__(self) -> None:
        Semaphore(0).acquire()


class Rank:
    """One rank of a rehearsal: what a program that is tried is given as `me`. It holds the stage of its number.

    Its methods wait as those of real ranks do: a send until the other rank is at the receive, a receive until it is
    at the send, a swap until it is at the swap, an all-reduce until all ranks have come to it.
    """

    def __init__(self, program: Callable[[Rank], Any], rank: int, ranks: int, losses: Sequence[float] = ()):
        self.rank, self.ranks = rank, ranks
        self.actions: list[Action] = []  # what it has run
        self.mixed: list[tuple[Action, Any, Tensor]] = []  # what was run on something else than its own tensor
        self.steps = 0
        self.call: Call | None = None  # what it waits in
        self.answer: Any = None
        self.error: BaseException | None = None
        self._stopped = False
        self._losses = losses
        self._calls = 0
        self._turn, self._back = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._live, args=(program,), daemon=True)

    def send(self, value: Any, rank: int) -> None:
        """Send to a rank."""
        self._wait(f"send({rank})", "send", require_rank(rank, self.ranks), value)

    def recv(self, rank: int) -> Any:
        """What a rank has sent."""
        return self._wait(f"recv({rank})", "receive", require_rank(rank, self.ranks))

    def swap(self, value: Any, rank: int) -> Any:
        """Send to a rank and receive from it, both at once."""
        return self._wait(f"swap({rank})", "swap", require_rank(rank, self.ranks), value)

    def communicate(self, operation: str, value: Any = None) -> Any:
        """As `ppedu.run.communicate`, without shapes: "recv_forward", "send_forward", "recv_backward", …"""
        return self._neighbour(ONE_WAY, operation, value)

    def bidirectional_communicate(self, operation: str, value: Any = None) -> Any:
        """As `ppedu.run.bidirectional_communicate`, without shapes: "send_fwd_recv_bwd", "send_bwd_recv_fwd"."""
        return self._neighbour(BOTH_WAYS, operation, value)

    def all_reduce(self, value: Any) -> Any:
        """The sum of what all ranks give. All must call it."""
        if isinstance(value, bool) or not isinstance(value, Real):
            raise SettingError(f"{_at()}: all_reduce on rank {self.rank} needs a number; got {value!r}")
        return self._wait("all_reduce", "all", None, value)

    def forward(self, microbatch: int, x: Any = None) -> Tensor:
        """Run the stage's forward on `x`, what the stage before made."""
        self._run(F(self.rank, microbatch), x, Tensor("activation", self.rank - 1, microbatch), self.rank == 0)
        return Tensor("activation", self.rank, microbatch)

    def backward(self, microbatch: int, dy: Any = None) -> Tensor:
        """Run the stage's backward on `dy`, what the stage after made."""
        last = self.rank == self.ranks - 1
        self._run(B(self.rank, microbatch), dy, Tensor("gradient", self.rank + 1, microbatch), last)
        return Tensor("gradient", self.rank, microbatch)

    def step(self) -> float:
        """Train on one batch with all ranks; its loss on the last one, 0 on the others."""
        self.communicate("send_forward", self.forward(0, self.communicate("recv_forward")))
        self.communicate("send_backward", self.backward(0, self.communicate("recv_backward")))
        self.steps += 1
        if self.steps > len(self._losses):
            raise SettingError(f"rank {self.rank} takes more than {plural(len(self._losses), 'step')}")
        return self._losses[self.steps - 1] if self.rank == self.ranks - 1 else 0

    def go_on(self) -> None:
        """Let it run until it waits or ends.

        Raises:
            SettingError: it does neither.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        if not self._back.acquire(timeout=MOST_SECONDS):
            frame = sys._current_frames().get(self._thread.ident or 0)
            at = "at line {}, {}".format(*_place(frame)) if frame else "on"
            raise SettingError(f"rank {self.rank} goes on and on {at}; does your loop end?")

    def stop(self) -> None:
        """End it, whether it waits or runs."""
        self._stopped = True
        if self.call:
            self._turn.release()
            self._thread.join(1)
        for kind in [Stopped] * MOST_ATTEMPTS + [Parked]:
            if not self._thread.is_alive():
                return
            ident = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind))
            self._thread.join(0.01)

    def _live(self, program: Callable[[Rank], Any]) -> None:
        try:
            program(self)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self._back.release()

    def _neighbour(self, operations: dict[str, int], operation: str, value: Any) -> Any:
        if operation not in operations:
            raise SettingError(f"{_at()}: there is no operation {operation!r} here; there is: {', '.join(operations)}")
        peer = self.rank + operations[operation]
        if not 0 <= peer < self.ranks:
            return None
        if "send" in operation and value is None:
            raise SettingError(f"{_at()}, rank {self.rank} sends None: {self._instead(operation)}")
        kind = "swap" if operations is BOTH_WAYS else "send" if "send" in operation else "receive"
        return self._wait(operation, kind, peer, value)

    def _instead(self, operation: str) -> str:
        """What is to be sent, and why there is nothing of what was received, in the lesson's letters."""
        forward = "send_f" in operation
        way, got, made = ("forward", "x", "y") if forward else ("backward", "dy", "dx")
        nothing = f"it receives no {got}; " if self.rank == (0 if forward else self.ranks - 1) else ""
        return f"{nothing}what its {way} gives, {made}, goes on"

    def _wait(self, doing: str, kind: str, peer: int | None, value: Any = None) -> Any:
        if self._stopped:
            raise Stopped
        self._count()
        self.call = Call(doing, kind, peer, value, *_line())
        self._back.release()
        self._turn.acquire()
        if self._stopped:
            raise Stopped
        return self.answer

    def _run(self, action: Action, given: Any, own: Tensor, end: bool) -> None:
        self._count()
        self.actions.append(action)
        if not end and given != own:
            self.mixed.append((action, given, own))

    def _count(self) -> None:
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise SettingError(f"rank {self.rank} goes on and on: it has made {MOST_CALLS} calls; does your loop end?")


class Rehearsal(NamedTuple):
    """How it ended: the ranks, and those of them that wait for ever."""

    ranks: list[Rank]
    waits: list[Wait]


def rehearse(program: Callable[[Rank], Any], ranks: int, losses: Sequence[float] = ()) -> Rehearsal:
    """Run `program(me)` on so many ranks of this process, until all have ended or nobody can go on.

    losses: what the last rank's `me.step()` gives, one after the other.

    An error of the program is raised here. However this ends, no rank runs on.

    Raises:
        SettingError: `program` is not a function, `ranks` not a number from 1 to 1000, or the loop of a rank endless:
            it has run for 10 seconds or made 10,000 calls.
    """
    if not callable(program):
        raise SettingError(f"give a function of one rank, such as `def step(me): …`; got {program!r}")
    if require_count("the number of ranks", ranks) > MOST_RANKS:
        raise SettingError(f"at most {MOST_RANKS} ranks can be rehearsed; got {ranks}")
    every = [Rank(program, rank, ranks, losses) for rank in range(ranks)]
    awake = deque(every)
    try:
        while awake:
            rank = awake.popleft()
            rank.go_on()
            if rank.error:
                raise rank.error
            awake += _met(rank, every)
        waits = [
            Wait(rank.rank, call.doing, _awaited(call, every), call.kind, call.line, call.source)
            for rank in every
            if (call := rank.call)
        ]
    finally:
        for rank in every:
            rank.stop()
    return Rehearsal(every, waits)


def _met(rank: Rank, every: Sequence[Rank]) -> list[Rank]:
    """The ranks that can go on, now that `rank` has come to where it is; each with its answer."""
    call = rank.call
    if call is None:
        return []
    if call.peer is None:
        calls = [each.call for each in every if each.call and each.call.doing == call.doing]
        if len(calls) < len(every):
            return []
        total = sum(each.value for each in calls)
        for each in every:
            each.call, each.answer = None, total
        return list(every)
    other = every[call.peer]
    theirs = other.call
    if other is rank or theirs is None or theirs.peer != rank.rank or {call.kind, theirs.kind} not in FIT:
        return []
    rank.answer, other.answer = theirs.value, call.value
    rank.call = other.call = None
    return [rank, other]


def _awaited(call: Call, every: Sequence[Rank]) -> tuple[int, ...]:
    if call.peer is not None:
        return (call.peer,)
    return tuple(each.rank for each in every if not each.call or each.call.doing != call.doing)


def _line() -> tuple[int, str]:
    """The program's line that has called a rank's method: its number, and what it says."""
    return _place(sys._getframe(1))


def _place(frame: FrameType) -> tuple[int, str]:
    """The innermost line that is not of this file: its number, and what it says."""
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return frame.f_lineno, line.partition("  #")[0].strip()


def _at() -> str:
    line, source = _line()
    return f"at line {line}, {source}"
