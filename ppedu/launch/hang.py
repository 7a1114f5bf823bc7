"""Hang reports: each rank locates itself in the program, and the launcher explains which ranks wait for which."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

from ppedu.core import waiting
from ppedu.core.waiting import Wait, cycles

NO_ANSWER = "did not answer"
NOWHERE: Mapping[int, str] = {}  # no rank runs on another host

# Functions of torch.distributed that every rank must call.
COLLECTIVE = re.compile(
    "barrier|monitored_barrier|all_reduce.*|all_gather.*|reduce_scatter.*|broadcast.*|gather.*|scatter.*|reduce"
    "|all_to_all.*|new_group|init_process_group|destroy_process_group"
)


class Location(NamedTuple):
    """Where a rank is, and what it waits for.

    Args:
        line, source: the line of the program; 0 and a description if the rank runs no line of the program. `source` is
            None if the rank did not answer.
        doing, kind, peer: see `Wait`; `kind` is "" for a rank that does not wait for another rank.
    """

    rank: int
    line: int
    source: str | None
    doing: str = ""
    kind: str = ""
    peer: int | None = None


def locate(rank: int, program: str) -> Location:
    """Return where the main thread of this process is, which is rank `rank` and runs the file `program`.

    Called in another thread, as the main one may be blocked.
    """
    main = threading.main_thread().ident or 0
    frames = [frame for frame, _ in walk_stack(sys._current_frames()[main])]
    innermost, code = frames[0].f_lineno, frames[0].f_code
    line = next((frame.f_lineno for frame in frames if frame.f_code.co_filename == program), 0)
    outside = f"{code.co_name} in {Path(code.co_filename).name}, line {innermost}"
    source = linecache.getline(program, line).strip() if line else outside
    if describe := waiting.current:
        wait = describe()
    else:
        waits = (_torch_wait(frame) for frame in frames)
        wait = next((each for each in waits if each), Wait("", ""))
    return Location(rank, line, source, *wait)


def named(rank: int, hosts: Mapping[int, str]) -> str:
    """Return "rank 2", or "rank 2 on beta" if it runs on another host."""
    return f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"


def describe_hang(locations: Sequence[Location], ended: Collection[int], hosts: Mapping[int, str] = NOWHERE) -> str:
    """Return a line for each rank in `locations`, followed by the reasons why the ranks cannot continue.

    Args:
        ended: the ranks that have ended.
        hosts: by rank, the host of one that does not run on this machine.
    """
    lines = []
    for rank, line, source, doing, kind, _ in locations:
        does = f"waits in {doing}" if kind else "is"
        where = f" at line {line}: {source}" if line else f" at {source or 'its start'}"
        lines.append(f"{named(rank, hosts)} {NO_ANSWER if source is None else does + where}")
    return "\n".join([*lines, *_reasons({each.rank: each for each in locations}, ended)])


def _torch_wait(frame: FrameType) -> Wait | None:
    """Return what a blocking call of torch.distributed waits for, None if `frame` is not such a call."""
    name, values = frame.f_code.co_name, frame.f_locals
    if not frame.f_code.co_filename.endswith("distributed_c10d.py"):
        return None
    if name in ("recv", "send"):
        end = "src" if name == "recv" else "dst"
        peer = values.get(end)
        if peer is None:
            peer = values.get(f"group_{end}")
        return Wait(f"{name}({end}={peer})", "receive" if name == "recv" else "send", peer)
    return Wait(name, "all") if COLLECTIVE.fullmatch(name) else None


def _reasons(at: dict[int, Location], ended: Collection[int]) -> Iterator[str]:
    """Yield a sentence for each reason of a hang: a cycle of waiting ranks, a peer that has ended, a missed collective.

    Args:
        at: by rank, the locations of those that run.
        ended: the ranks that have ended.
    """
    peers = {rank: [each.peer] for rank, each in at.items() if each.peer is not None}
    if cycle := next(cycles(peers), []):
        pairs = zip(cycle, cycle[1:] + cycle[:1], strict=True)
        waits = ", and ".join(f"rank {a} waits for rank {b}" for a, b in pairs)
        kinds = {at[rank].kind for rank in cycle}
        if kinds == {"receive"}:
            waits += ": all receive, none sends"
        elif kinds == {"send"}:
            waits += ": all send, none receives"
        yield f"deadlock: {waits}"
        return
    calls = {rank: each.doing for rank, each in at.items() if each.kind == "all"}
    if len(set(calls.values())) > 1:
        each_call = ", ".join(f"rank {rank} is in {call}" for rank, call in calls.items())
        yield f"all ranks must make the same call, but {each_call}"
    elif calls:
        call = next(iter(calls.values()))  # the same for all
        callers = ", ".join(map(str, calls))
        wait = f"ranks {callers} wait" if len(calls) > 1 else f"rank {callers} waits"
        for rank in at:
            if rank not in calls:
                yield f"{wait} for rank {rank} to reach {call}"
        for rank in ended:
            yield f"{wait} for rank {rank} to reach {call}, but it has ended"
    for rank, each in at.items():
        peer = each.peer
        if peer in ended:
            yield f"rank {rank} waits for rank {peer}, which has ended"
        elif peer in calls:
            yield f"rank {rank} waits for rank {peer}, which waits in {calls[peer]}"
        elif peer in at and not at[peer].kind:
            state = NO_ANSWER if at[peer].source is None else "is not waiting"
            yield f"rank {rank} waits for rank {peer}, which {state}"
