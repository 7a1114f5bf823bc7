"""Simulated ranks for the exercises: threads of this process that run one at a time and wait for each other's messages.

A deadlock is detected at once, without a timeout, together with the ranks and lines that wait for each other. The
result can be stepped through in a notebook (`stepper`).
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

from ppedu.core import Action, B, F, SettingError
from ppedu.core.numeric import plural
from ppedu.core.validate import require_count, require_instance, require_rank
from ppedu.course import stepper

# By operation of `ppedu.run.communicate` and `bidirectional_communicate`: the peer's rank minus this rank's.
ONE_WAY = {"recv_forward": -1, "send_forward": +1, "recv_backward": +1, "send_backward": -1}
BOTH_WAYS = {"send_fwd_recv_bwd": +1, "send_bwd_recv_fwd": -1}
MATCHING = {"send", "receive"}, {"swap"}  # the kinds of call at the two ends of a message
MAX_RANKS = 1000  # each is a thread
MAX_MOMENTS = 1000  # of a rehearsal, to step through
MAX_CALLS = 10_000  # of a rank's methods; a loop that makes more is assumed to be endless
TIMEOUT = 10.0  # seconds between two calls; a loop that takes longer is assumed to be endless
MAX_ATTEMPTS = 100  # to end a thread by an exception, which its program may catch; each takes 10 ms


class HeldCall(NamedTuple):
    """A call of a rank that waits for other ranks, and its line in the program.

    Args:
        kind: "send", "receive" or "swap" for a message with the only rank in `peers`; "all" for a call that every rank
            must make, where `peers` are the ranks that have not made it.
    """

    rank: int
    doing: str
    peers: tuple[int, ...]
    kind: str
    value: Any
    line: int
    source: str


class Moment(NamedTuple):
    """A rank has run to its next wait or to its end.

    Args:
        wait: The call in which it waits; None at its end.
        matched: The calls that are complete now, if this was the last of them: those of a sender and a receiver, say.
    """

    rank: int
    wait: HeldCall | None
    matched: tuple[HeldCall, ...]


class Tensor(NamedTuple):
    """A stand-in for a tensor: the result of a forward ("activation") or of a backward ("gradient")."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.kind} of microbatch {self.microbatch}"


class Stopped(SystemExit):
    """Raised in a rank's thread to end it. Derived from SystemExit, because Python prints no traceback for it."""


class Parked(Stopped):
    """An exception whose constructor never returns: raised in a thread, it blocks even a program that catches all."""

    def __init__(self) -> None:
        Semaphore(0).acquire()


class Rank:
    """A simulated rank, which the tested program gets as `me`. Rank r holds stage r.

    Its methods wait as real ranks do: a send until the peer has called the matching receive and vice versa, a swap
    until the peer has called swap, an all-reduce until every rank has called it.
    """

    def __init__(self, program: Callable[[Rank], Any], rank: int, ranks: int, losses: Sequence[float] = ()):
        self.rank, self.ranks = rank, ranks
        self.actions: list[Action] = []  # run so far
        self.mixed: list[tuple[Action, Any, Tensor]] = []  # run on a tensor other than its own: (action, given, own)
        self.steps = 0
        self.sums: list[float] = []  # that all_reduce has returned
        self.wait: HeldCall | None = None
        self.answer: Any = None
        self.error: BaseException | None = None
        self._stopped = False
        self._losses = losses
        self._calls = 0
        self._turn, self._back = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._live, args=(program,), daemon=True)

    def send(self, value: Any, rank: int) -> None:
        """Send a value to a rank."""
        self._exchange(f"send({rank})", "send", rank, value)

    def recv(self, rank: int) -> Any:
        """Receive a value from a rank."""
        return self._exchange(f"recv({rank})", "receive", rank)

    def swap(self, value: Any, rank: int) -> Any:
        """Send a value to a rank and receive one from it at the same time."""
        return self._exchange(f"swap({rank})", "swap", rank, value)

    def communicate(self, operation: str, value: Any = None) -> Any:
        """Send `value` to a neighbor or receive from it, and return what was received; None for a send.

        Args:
            operation: one of `ppedu.run.communicate`, such as "send_forward". Shapes are not needed.
        """
        return self._neighbour(ONE_WAY, operation, value)

    def bidirectional_communicate(self, operation: str, value: Any = None) -> Any:
        """Send and receive at the same time, as `ppedu.run.bidirectional_communicate` does; shapes are not needed."""
        return self._neighbour(BOTH_WAYS, operation, value)

    def all_reduce(self, value: Any) -> Any:
        """Return the sum of the values of all ranks, all of which must call this."""
        if isinstance(value, bool) or not isinstance(value, Real):
            raise SettingError(f"{_at()}: all_reduce on rank {self.rank} needs a number; got {value!r}")
        self.sums.append(self._exchange("all_reduce", "all", None, value))
        return self.sums[-1]

    def forward(self, microbatch: int, x: Any = None) -> Tensor:
        """Record the stage's forward on `x`, the output of the previous stage, and return a stand-in for its output."""
        return self._run(F(self.rank, microbatch), x, self.rank - 1, "activation")

    def backward(self, microbatch: int, dy: Any = None) -> Tensor:
        """Record the stage's backward on `dy`, the next stage's gradient, and return a stand-in for its gradient."""
        return self._run(B(self.rank, microbatch), dy, self.rank + 1, "gradient")

    def step(self) -> float:
        """Train on one batch together with all ranks; return its loss on the last rank, 0 on the others."""
        self.communicate("send_forward", self.forward(0, self.communicate("recv_forward")))
        self.communicate("send_backward", self.backward(0, self.communicate("recv_backward")))
        self.steps += 1
        if self.steps > len(self._losses):
            raise SettingError(f"{_at()}: rank {self.rank} trains for more than {plural(len(self._losses), 'step')}")
        return self._losses[self.steps - 1] if self.rank == self.ranks - 1 else 0

    def resume(self) -> None:
        """Run the rank's program until it waits or ends.

        Raises:
            SettingError: it does neither within 10 seconds.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._turn.release()
        if not self._back.acquire(timeout=TIMEOUT):
            frame = sys._current_frames().get(self._thread.ident or 0)
            at = " at line {}, {}".format(*_line(frame)) if frame else ""
            raise SettingError(f"rank {self.rank} is still running after {TIMEOUT:g} s{at}; does your loop end?")

    def stop(self) -> None:
        """End the rank's thread, whether it waits or runs."""
        self._stopped = True
        self._turn.release()
        if self.wait:
            self._thread.join(1)
        for kind in [Stopped] * MAX_ATTEMPTS + [Parked]:
            if not self._thread.is_alive():
                return
            ident = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind))
            self._thread.join(0.01)

    def _live(self, program: Callable[[Rank], Any]) -> None:
        try:
            self._turn.acquire()  # an interrupt may come while the thread starts; then `stop` is called before this
            if not self._stopped:
                program(self)
        except BaseException as error:
            self.error = error
        self._back.release()

    def _neighbour(self, operations: dict[str, int], operation: str, value: Any) -> Any:
        """Exchange a message with a neighbor and return what was received; None at the end of the pipeline."""
        if operation not in operations:
            raise SettingError(f"{_at()}: unknown operation {operation!r}; available: {', '.join(operations)}")
        peer = self.rank + operations[operation]
        if not 0 <= peer < self.ranks:
            return None
        if "send" in operation and value is None:
            forward = "send_f" in operation
            way, received, result = ("forward", "x", "y") if forward else ("backward", "dy", "dx")  # as in the lesson
            receives_none = 0 if forward else self.ranks - 1  # the rank where the way begins
            reason = f"it receives no {received}: " if self.rank == receives_none else ""
            instead = f"{reason}send the result of its {way}, {result}"
            raise SettingError(f"{_at()}, rank {self.rank} sends None; {instead}")
        kind = "send" if "send" in operation else "receive"
        if operations is BOTH_WAYS:
            kind = "swap"
        return self._exchange(operation, kind, peer, value)

    def _exchange(self, doing: str, kind: str, peer: int | None, value: Any = None) -> Any:
        """Wait until `rehearse` has matched this call with those of its peers; return its result. See `HeldCall`."""
        peers = () if peer is None else (require_rank(peer, self.ranks),)
        self._count()
        self.wait = HeldCall(self.rank, doing, peers, kind, value, *_line(sys._getframe()))
        if not self._stopped:
            self._back.release()
            self._turn.acquire()
        if self._stopped:
            raise Stopped
        return self.answer

    def _run(self, action: Action, given: Any, source: int, kind: str) -> Tensor:
        """Record an action, and whether `given` is its own input from stage `source`; return its output."""
        self._count()
        self.actions.append(action)
        own = Tensor(kind, source, action.microbatch)
        if 0 <= source < self.ranks and given != own:
            self.mixed.append((action, given, own))
        return own._replace(stage=self.rank)

    def _count(self) -> None:
        """Count a call of the program. Raise SettingError if there are too many."""
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise SettingError(f"rank {self.rank} has made more than {MAX_CALLS} calls; does your loop end?")


class Rehearsal(NamedTuple):
    """The result of `rehearse`. A notebook displays it as steps, with the program and the line of each rank.

    Attributes:
        waits: The waits of the ranks that cannot continue.
        moments: The first 1000, in order.
    """

    ranks: list[Rank]
    waits: list[HeldCall]
    moments: list[Moment]
    program: Callable[[Rank], Any]

    def __repr__(self) -> str:
        return stepper.text(self)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return stepper.bundle(self)


def rehearse(program: Callable[[Rank], Any], ranks: int, losses: Sequence[float] = ()) -> Rehearsal:
    """Run `program(me)` on simulated ranks until all have ended or no rank can make progress.

    If the program raises an exception, so does this. No thread keeps running afterwards.

    Args:
        losses: The results of successive calls of `me.step()` on the last rank.

    Raises:
        SettingError: `program` is not a function, `ranks` is not from 1 to 1000, or the loop of a rank is endless: it
            has run for 10 seconds or made 10,000 calls.
    """
    require_instance("program", program, Callable, "a function of one rank, such as `def step(me): …`")
    if require_count("the number of ranks", ranks) > MAX_RANKS:
        raise SettingError(f"at most {MAX_RANKS} ranks can be rehearsed; got {ranks}")
    every = [Rank(program, rank, ranks, losses) for rank in range(ranks)]
    awake, moments = deque(every), list[Moment]()
    try:
        while awake:
            rank = awake.popleft()
            rank.resume()
            if rank.error:
                raise rank.error
            waits_before = {each: each.wait for each in every} if len(moments) < MAX_MOMENTS else {}
            continuing = _matched(rank, every)
            awake += continuing
            if waits_before:
                matched = (waits_before[each] for each in continuing)
                moments.append(Moment(rank.rank, waits_before[rank], tuple(wait for wait in matched if wait)))
        waits = [wait._replace(peers=wait.peers or _missing(wait, every)) for rank in every if (wait := rank.wait)]
    finally:
        for rank in every:
            rank.stop()
    return Rehearsal(every, waits, moments, program)


def _matched(rank: Rank, every: Sequence[Rank]) -> list[Rank]:
    """Return the ranks that can continue, now that `rank` has made a call such as send, recv or all_reduce.

    A send matches the receive of its peer, a swap the swap of its peer, and an all_reduce that of all ranks. If the
    call of `rank` has a match, both are completed: each gets its answer.
    """
    wait = rank.wait
    if wait is None:
        return []
    if wait.kind == "all":
        if _missing(wait, every):
            return []
        total = sum(each.wait.value for each in every if each.wait)
        for each in every:
            each.wait, each.answer = None, total
        return list(every)
    peer = every[wait.peers[0]]
    other = peer.wait
    if peer is rank or other is None or other.peers != (rank.rank,) or {wait.kind, other.kind} not in MATCHING:
        return []
    rank.answer, peer.answer = other.value, wait.value
    rank.wait = peer.wait = None
    return [rank, peer]


def _missing(wait: HeldCall, every: Sequence[Rank]) -> tuple[int, ...]:
    """Return the ranks that are not waiting in the same call."""
    return tuple(each.rank for each in every if not each.wait or each.wait.doing != wait.doing)


def _line(frame: FrameType) -> tuple[int, str]:
    """Return the number and text of the line that runs in `frame`, or in its nearest caller outside this file."""
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return frame.f_lineno, line.partition("  #")[0].strip()


def _at() -> str:
    """Return the current line of the program that is rehearsed, for an error."""
    return "at line {}, {}".format(*_line(sys._getframe()))
