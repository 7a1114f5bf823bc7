"""Orders as text: as CSV with one line per rank and one action per cell, and as other programs print them."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from operator import index
from pathlib import Path
from typing import Any

from ppedu.core.actions import SHARDING, TRAFFIC, Action, Op
from ppedu.core.errors import ParseError, PipelineError, SettingError
from ppedu.core.files import named
from ppedu.core.numeric import plural
from ppedu.core.placement import Placement
from ppedu.core.validate import require_count, require_instance, shown

Orders = tuple[tuple[Action, ...], ...]
# A rank's order in what `print(schedule.pipeline_order)` shows in PyTorch: 0: [0F0, None, 0B0]
TORCH = re.compile(r"(\d+)\s*:\s*\[([^\[\]]*)\]")
PRINTED = "{", "[", "defaultdict"  # begin what Python prints of a dict or a list
LIST = re.compile(r"\[([^\[\]]*)\]")
AROUND = re.compile(r"defaultdict\(<class 'list'>, |[{}(),\[\]\s]")  # what is printed beside the orders of the ranks
NUMBER = re.compile(r"-?[0-9]{1,9}")
SHORT = re.compile(r"([0-9]*)([FBIW])([0-9]{1,4})(?:-([0-9]{1,4}))?")  # such as F0-7
# DeepSpeed's instructions, such as ForwardPass(buffer_id=0) or SendGrad(buffer_id=5, phase=1)
INSTRUCTION = re.compile(r"\w+\([^()]*\)")
PARTS = re.compile(r"(\w+)\((?:buffer_id=)?(\d+)?(?:, phase=([01]))?\)")
DEEPSPEEDS = {
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SEND_F",
    "RecvActivation": "RECV_F",
    "SendGrad": "SEND_B",
    "RecvGrad": "RECV_B",
}
NO_ACTION = "ReduceTiedGrads", "OptimizerStep"
# The types of the scheduled nodes of zero-bubble; those of other nodes compute and send nothing of a microbatch.
LAYOUT = re.compile(r"\s*E[EtmL0-9*(),|\s]*\|[EtmL0-9*(),|\s]*")  # such as Et*3|(tt|)*2tL
NODES = {
    "F": "F",
    "B": "I",
    "W": "W",
    "BW": "B",
    "SEND_FORWARD": "SEND_F",
    "RECV_FORWARD": "RECV_F",
    "SEND_BACKWARD": "SEND_B",
    "RECV_BACKWARD": "RECV_B",
}
# The types of HyperParallel's steps; steps of other types load data or move memory.
STEPS = {
    "FWD": "F",
    "BWD": "B",
    "BWD_INPUT": "I",
    "BWD_WEIGHT": "W",
    "FWD_SEND": "SEND_F",
    "FWD_RECV": "RECV_F",
    "BWD_SEND": "SEND_B",
    "BWD_RECV": "RECV_B",
    "BATCH_SEND_RECV": "BATCH_P2P",
    "OVERLAP_F_B": "OVERLAP_F_B",
    "OVERLAP_B_F": "OVERLAP_B_F",
    "FSDP_UNSHARD": "UNSHARD",
    "FSDP_RESHARD": "RESHARD",
    "FSDP_REDUCE_GRAD": "REDUCE_GRAD",
}


def csv_text(rows: Iterable[Iterable[Action | None]]) -> str:
    """Return rows of actions as CSV text, with an empty cell for None."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def rows_of(text: str) -> list[str]:
    """Return a line of CSV for each rank.

    Args:
        text: A line for each rank, with actions between commas or spaces, with DeepSpeed's instructions, or with
            Megatron-LM's numbers: 2 is the forward of the rank's second chunk for its next microbatch, and -2 the
            backward. F0-2 is short for 0F0 0F1 0F2 on the first line, for 1F0 1F1 1F2 on the next. Or what Python
            prints of a dict or a list with the orders of all ranks.

    Raises:
        ParseError: The print is not whole, the ranks are not 0, 1, 2 …, Megatron-LM's numbers have a 0, or an
            instruction is impossible.
    """
    if "ForwardPass(" in text:
        each = [line for line in text.replace("]], [[", "]]\n[[").splitlines() if line.strip()]
        queues = "CommitP2P(" in text
        return [",".join(_deepspeed(rank, len(each), line, queues)) for rank, line in enumerate(each)]
    if text.lstrip().startswith(PRINTED):
        lines = _printed(text)
    else:
        lines = [line for line in re.sub(r"[·,\[\]]", " ", text).splitlines() if line.strip()]
    orders = [line.split() for line in lines]
    if orders and all(NUMBER.fullmatch(each) for order in orders for each in order):
        orders = [_megatron(rank, len(orders), [int(each) for each in order]) for rank, order in enumerate(orders)]
    return [
        ",".join(action for each in order for action in _actions_of(rank, each)) for rank, order in enumerate(orders)
    ]


def _actions_of(rank: int, text: str) -> Iterator[str]:
    """Yield the actions that a word in a rank's order is short for: F2-0 for 1F2 1F1 1F0 on rank 1."""
    if not (short := SHORT.fullmatch(text)):
        yield text
        return
    stage, op, first, last = short.groups()
    begin, end = int(first), int(last or first)
    step = 1 if begin <= end else -1
    for microbatch in range(begin, end + step, step):
        yield f"{stage or rank}{op}{microbatch}"


def _printed(text: str) -> list[str]:
    """Return the order of each rank in the print of a dict or a list, without None."""
    is_list = text.lstrip().startswith("[")
    pattern = LIST if is_list else TORCH
    if more := AROUND.sub("", pattern.sub("", text)):
        raise ParseError(f"the orders of the ranks are not whole: there is {shown(more)} beside them")
    found: list[str] = LIST.findall(text)
    ranks = [*range(len(found))] if is_list else [int(rank) for rank, _ in TORCH.findall(text)]
    if ranks != [*range(len(ranks))]:
        raise ParseError(f"torch's orders are for ranks 0, 1, 2 …; got {', '.join(map(str, ranks))}")
    lines = [" ".join(each for each in order.replace(",", " ").split() if each != "None") for order in found]
    for rank, line in enumerate(lines):
        if not line:
            raise ParseError(f"rank {rank} has no actions; leave it out, or give it some")
    return lines


def _megatron(rank: int, ranks: int, order: list[int]) -> list[str]:
    """Return the actions of a rank's order in Megatron-LM's numbers, which leave out the microbatches."""
    if 0 in order:
        raise ParseError("Megatron-LM's chunks are 1, 2 … forward and -1, -2 … backward; got 0")
    seen: Counter[int] = Counter()
    actions = []
    for number in order:
        actions.append(f"{(abs(number) - 1) * ranks + rank}{'F' if number > 0 else 'B'}{seen[number]}")
        seen[number] += 1
    return actions


def _deepspeed(rank: int, ranks: int, text: str, queues: bool) -> Iterator[str]:
    """Yield the actions of a rank's instructions.

    An instruction names a buffer. A forward takes the microbatch that was loaded or received there last, and a backward
    that of the last forward. So a microbatch that is overwritten too early is lost.

    Args:
        queues: Whether CommitP2P starts the messages before it together.

    Raises:
        ParseError: An instruction is unknown, or its buffer is empty.
    """
    loaded: dict[int, int] = {}  # from a buffer to the microbatch whose input it holds
    done: dict[int, int] = {}  # and to that of the last forward
    counts: Counter[int] = Counter()  # by stage, the microbatches that were loaded or received
    queued: list[str] = []
    if more := INSTRUCTION.sub("", text).translate(str.maketrans("", "", "[],: \t\r")):
        raise ParseError(f"rank {rank}: there is {shown(more)} beside DeepSpeed's instructions")
    for found in INSTRUCTION.findall(text):
        parts = PARTS.fullmatch(found)
        name, buffer, phase = parts.groups() if parts else ("", None, None)
        stage = 2 * ranks - 1 - rank if phase == "1" else rank
        if name in NO_ACTION:
            continue
        if name == "ReduceGrads":
            yield from (f"{each}REDUCE_GRAD" for each in sorted(counts))
        elif name == "CommitP2P":
            if queued:
                yield f"({';'.join(queued)}){Op.BATCH_P2P}"
            queued.clear()
        elif buffer is None or (name not in DEEPSPEEDS and name != "LoadMicroBatch"):
            raise ParseError(f"rank {rank}: {found} is not an instruction of DeepSpeed's that ppedu knows")
        else:
            # The first stage loads its inputs, and the stage after a V's turn gets them from its own rank.
            first = "LoadMicroBatch" if stage == 0 else "ForwardPass" if stage == ranks else "RecvActivation"
            if name == first:
                loaded[int(buffer)] = counts[stage]
                counts[stage] += 1
            if name == "LoadMicroBatch":  # of the last stage: it loads targets
                continue
            if name == "ForwardPass" and int(buffer) in loaded:
                done[int(buffer)] = loaded[int(buffer)]
            held = loaded if name in ("RecvActivation", "SendGrad") else done
            if int(buffer) not in held:
                raise ParseError(f"rank {rank}: {found} finds its buffer empty; nothing was loaded or received there")
            action = f"{stage}{DEEPSPEEDS[name]}{held[int(buffer)]}"
            if queues and not name.endswith("Pass"):
                queued.append(action)
            else:
                yield action
    if queued:
        raise ParseError(f"rank {rank}: no CommitP2P starts {', '.join(queued)}")


def recognized(source: Any) -> tuple[str, str]:
    """Return orders as CSV text, and what to call them. See `Schedule.read`.

    Raises:
        SettingError: `Schedule.read` does not take such a source.
        ParseError, PipelineError: As in `rows_of` and `text_of`.
    """
    orders = getattr(source, "pipeline_order_with_comms", None) or getattr(source, "pipeline_order", source)
    orders = getattr(orders, "exec_order", orders)
    if isinstance(orders, (list, tuple)):
        orders = dict(enumerate(orders))
    if isinstance(orders, Mapping):
        try:
            steps = {index(rank): order.steps() if hasattr(order, "steps") else order for rank, order in orders.items()}
            by_rank = {rank: " ".join(map(_as_text, order)) for rank, order in steps.items()}
        except TypeError:
            raise SettingError(
                f"orders are a list, or a dict from ranks, with a list of actions for each rank; got {shown(source)}"
            ) from None
        if any("ForwardPass(" in order for order in by_rank.values()):
            if empty := [rank for rank in range(len(by_rank)) if not by_rank.get(rank)]:
                raise ParseError(f"rank {empty[0]} has no instructions; give those of all ranks, from 0 on")
            return "\n".join(rows_of("\n".join(by_rank[rank] for rank in sorted(by_rank)))), "the schedule"
        text = "{" + ", ".join(f"{rank}: [{by_rank[rank]}]" for rank in sorted(by_rank)) + "}"
        return "\n".join(rows_of(text)), "the schedule"
    require_instance(
        "source", orders, str | os.PathLike, "a file, text, or a schedule of torch, with its pipeline_order"
    )
    if isinstance(orders, str) and _is_text(orders):
        return "\n".join(rows_of(orders)), "the text"
    path = named(orders)
    return "\n".join(rows_of(text_of(path))), repr(str(path))


def _as_text(action: Any) -> str:
    """Return an action, an instruction, a node of zero-bubble's or a step of HyperParallel's as text.

    It is "None" for nodes and steps that neither compute nor send.

    Raises:
        ParseError: The node is for a part of a sequence.
    """
    if hasattr(action, "micro_index"):
        op = STEPS.get(action.type.name)
        if parts := getattr(action, "sub_steps", None):
            return f"({';'.join(map(_as_text, parts))}){op}"
        return f"{action.stage_index}{op}{'' if op in SHARDING else action.micro_index}" if op else "None"
    if not hasattr(action, "layer_group_idx"):
        return str(action)
    if action.seq_split_idx:
        raise ParseError(f"{action}: parts of a sequence cannot be read; a microbatch runs through a stage as a whole")
    op = NODES.get(str(action.type))
    return f"{action.layer_group_idx}{op}{action.microbatch}" if op else "None"


def _is_text(source: str) -> bool:
    """Return whether text is orders, not the name of a file."""
    if not source.strip() or "\n" in source or "ForwardPass(" in source or source.lstrip().startswith(PRINTED):
        return True
    first = re.split(r"[\s,]", source.strip())[0]
    with suppress(ParseError):
        Action.parse(first)
        return True
    return bool(NUMBER.fullmatch(first) or SHORT.fullmatch(first))


def is_layout(source: Any) -> bool:
    """Return whether a source is a layout of Megatron-LM's, which begins with the embedding and separates stages."""
    return isinstance(source, str) and LAYOUT.fullmatch(source) is not None


def is_trace(source: Any) -> bool:
    """Return whether a source is the name of a folder or a .json file, zipped or not, as those of traces are."""
    if not isinstance(source, str | os.PathLike) or (isinstance(source, str) and _is_text(source)):
        return False
    path = named(source)
    with suppress(OSError):  # a name that is too long; reading the file reports it
        return path.name.lower().endswith((".json", ".json.gz")) or path.is_dir()
    return False


def text_of(path: Path) -> str:
    """Return the text of a file. Raise PipelineError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error}") from error


def parse(text: str, where: str, placement: str | Placement, microbatches: int | None) -> tuple[Placement, int, Orders]:
    """Return the placement, the number of microbatches and the orders of CSV text. See `Schedule.from_csv`."""
    require_instance("placement", placement, str | Placement, "a name, such as 'loop' or 'v', or a Placement")
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise PipelineError(f"cannot read {where}: {error}") from error
    while rows and not rows[-1]:
        del rows[-1]  # trailing blank lines
    action = cache(Action.parse)
    orders = tuple(tuple(_actions(row, line, where, action)) for line, row in enumerate(rows, 1))
    number = sum(map(len, orders))
    different = set().union(*orders)
    singles = {single for action in different for single in action.singles}
    if not any(single.op not in SHARDING for single in singles):
        raise ParseError(f"{where} holds no actions; expected a line per rank, with cells such as 0F0")
    stages = 1 + max(single.stage for single in singles)
    found = 1 + max(single.microbatch for single in singles)
    forwards = stages * found
    # Not a schedule, or a typo such as 1000F0, which names a thousand stages: nearly all actions are missing (too few)
    # or repeated (too many), and `check` would list them for minutes. Up to 500 missing forwards, that list is short,
    # and says more than this error.
    too_few = number < (forwards - 500) / 50
    too_many = number > 1000 * (1 + forwards)
    if too_few or too_many:
        raise ParseError(
            f"{where} names {plural(stages, 'stage')} and {plural(found, 'microbatch')}, "
            f"but has {plural(number, 'action')}; look for a typo in the largest stage or microbatch"
        )
    if microbatches is not None and require_count("microbatches", microbatches, least=0) != found:
        raise ParseError(f"{where} has microbatches 0 to {found - 1}, which is {found}, not {microbatches}")
    size = f"{where} has {len(orders)} ranks (lines) and {stages} stages"
    if isinstance(placement, str):
        if stages % len(orders):
            raise ParseError(f"{size}; every rank must hold the same number of stages")
        placement = Placement.make(placement, len(orders), stages // len(orders), found)
    elif (placement.ranks, placement.stages) != (len(orders), stages):
        raise ParseError(f"{size}; the placement has {placement.ranks} and {placement.stages}: give one that fits")
    return placement, found, orders


def _actions(row: list[str], line: int, where: str, parse: Callable[[str], Action]) -> Iterable[Action]:
    """Return the actions of a line, without its empty cells."""
    actions, empty = [], False
    for column, cell in enumerate(row, 1):
        if "WAIT_REDUCE_GRAD" in cell:  # from 2.15 on, torch writes when it waits for gradients; that changes no result
            continue
        if not cell or cell.isspace():
            empty = True
            continue
        try:
            actions.append(parse(cell))
        except ParseError as error:
            raise ParseError(f"{where}, line {line}, cell {column}: {error}") from None
    if empty and any(action.op in TRAFFIC for action in actions):
        raise ParseError(f"{where}, line {line}: a schedule with communication has no empty cells; delete them")
    return actions
