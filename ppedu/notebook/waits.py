"""Who waits for whom: each rank says where it is, and whoever asked puts it in words.

A rank's place: {rank, line, source, doing, kind, peer}. `line` and `source` are the program's own; `source` is None for
a rank that did not answer. What it waits in is `doing`, such as "recv(src=1)"; `kind` is "receive" or "send", for a
message with `peer`, or "all", for something that all ranks must come to; it is "" for a rank that waits for no other.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

Place = dict[str, Any]
NO_ANSWER = "did not answer"

# Functions of torch.distributed that all ranks must come to.
TOGETHER = re.compile(
    "barrier|monitored_barrier|all_reduce.*|all_gather.*|reduce_scatter.*|broadcast.*|gather.*|scatter.*|reduce"
    "|all_to_all.*|new_group|init_process_group|destroy_process_group"
)


def place(rank: int, program: str) -> Place:
    """Where this process's main thread is. Called in another thread, as that one may be waiting in a message."""
    main = threading.main_thread().ident
    frames = list(_outwards(sys._current_frames().get(main or 0)))
    own = next((frame for frame in frames if frame.f_code.co_filename == program), None)
    here = own or frames[0] if frames else None
    line = here.f_lineno if here else 0
    source = linecache.getline(here.f_code.co_filename, line).strip() if here else ""
    if here and not own:
        line, source = 0, f"{here.f_code.co_name} in {Path(here.f_code.co_filename).name}, line {line}"
    doing, kind, peer = next(filter(None, map(_wait, frames)), ("", "", None))
    return {"rank": rank, "line": line, "source": source, "doing": doing, "kind": kind, "peer": peer}


def told(places: Sequence[Place], ended: Sequence[int]) -> str:
    """A line for each rank that is alive, and what keeps them.

    ended: the ranks that are there no more.
    """
    lines = []
    for each in places:
        does = f"waits in {each['doing']}" if each["kind"] else "is"
        where = f" at line {each['line']}: {each['source']}" if each["line"] else f" at {each['source'] or 'its start'}"
        lines.append(f"rank {each['rank']} {NO_ANSWER if each['source'] is None else does + where}")
    return "\n".join([*lines, *_why(places, ended)])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _wait(frame: FrameType) -> tuple[str, str, int | None] | None:
    """What is waited for in a frame, if it is one of those that wait: (doing, kind, peer)."""
    name, file, values = frame.f_code.co_name, frame.f_code.co_filename, frame.f_locals
    if file.endswith("distributed_c10d.py"):
        if name in ("recv", "send"):
            end = "src" if name == "recv" else "dst"
            peer = values.get(end) if values.get(end) is not None else values.get(f"group_{end}")
            return f"{name}({end}={peer})", "receive" if name == "recv" else "send", peer
        if TOGETHER.fullmatch(name):
            return name, "all", None
    if file.endswith(str(Path("ppedu", "run", "messages.py"))) and name == "_finish":
        action, user, placement = values["action"], values.get("user"), values["self"].placement
        source, target = placement.route(action)
        waits = f"{user}, for {action}" if user else str(action)
        if action.op.startswith("RECV"):
            return f"{waits} from rank {source}", "receive", source
        return f"{waits} to rank {target}", "send", target
    if file.endswith(str(Path("ppedu", "run", "comm.py"))) and name == "_exchange":
        sends, receives, _ = values["operations"][values["operation"]]
        kind = "both" if sends and receives else "send" if sends else "receive"
        return f"{values['operation']} with rank {values['neighbour']}", kind, values["neighbour"]
    if file.endswith(str(Path("ppedu", "run", "control.py"))) and name == "exchange":
        return f"“{values['purpose']}”", "all", None
    return None


def _why(places: Sequence[Place], ended: Sequence[int]) -> Iterator[str]:
    """Sentences: a circle, somebody who has ended, or somebody whom all others wait for."""
    at = {each["rank"]: each for each in places}
    if circle := _circle(at):
        pairs = zip(circle, circle[1:] + circle[:1], strict=True)
        waits = ", and ".join(f"rank {a} waits for rank {b}" for a, b in pairs)
        kinds = {at[rank]["kind"] for rank in circle}
        if kinds == {"receive"}:
            waits += ": all receive, nobody sends"
        elif kinds == {"send"}:
            waits += ": all send, nobody receives"
        yield waits
        return
    together = {rank: each["doing"] for rank, each in at.items() if each["kind"] == "all"}
    if len(set(together.values())) > 1:
        calls = ", ".join(f"rank {rank} is in {doing}" for rank, doing in together.items())
        yield f"all ranks must call the same, but {calls}"
    elif together:
        name = next(iter(together.values()))
        for rank in at:
            if rank not in together:
                yield f"{_ranks(together)} for rank {rank} to come to {name}"
        for rank in ended:
            yield f"{_ranks(together)} for rank {rank} to come to {name}, but it has ended"
    for rank, each in at.items():
        peer = each["peer"]
        if peer in ended:
            yield f"rank {rank} waits for rank {peer}, which has ended"
        elif peer in at and not at[peer]["kind"]:
            waits = NO_ANSWER if at[peer]["source"] is None else "waits for nobody"
            yield f"rank {rank} waits for rank {peer}, which {waits}"
        elif peer in together:
            yield f"rank {rank} waits for rank {peer}, which waits in {together[peer]}"


def _circle(at: dict[int, Place]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first; empty if there are none."""
    for start in at:
        seen: list[int] = []
        rank: int | None = start
        while rank in at and rank not in seen:
            seen.append(rank)
            rank = at[rank]["peer"]
        if rank in seen:
            return seen[seen.index(rank) :]
    return []


def _ranks(ranks: Any) -> str:
    names = ", ".join(map(str, ranks))
    return f"ranks {names} wait" if len(ranks) > 1 else f"rank {names} waits"
