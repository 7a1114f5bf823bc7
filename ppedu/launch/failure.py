"""Why a run failed: read the reports that ranks leave in the run's folder, and put the root cause into words."""

from __future__ import annotations

import json
import linecache
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppedu.launch.hang import NOWHERE, Location, named

# Errors caused by a dead peer; never the root cause.
DEAD_PEER = re.compile("[Cc]onnection (closed|reset|refused)|remote worker crashing|Broken pipe")


def explain(failed: dict[int, tuple[int, float]], ranks: int, folder: Path, hosts: Mapping[int, str] = NOWHERE) -> str:
    """Return the message that explains a failed run: the root cause with its traceback, and who failed afterwards.

    Args:
        failed: by rank, its exit status and the time at which it was reported.
        ranks: the number of ranks.
        folder: the run's, with the reports of the ranks.
        hosts: by rank, the host of one that does not run on this machine.
    """
    reports: list[tuple[float, int, str]] = []  # the time, the rank, and the traceback
    for rank in range(ranks):
        if report := _read(folder / f"{rank}.json", time=float, text=str):
            reports.append((report["time"], rank, report["text"]))
    reports.sort()
    causes = [(time, rank, traceback) for time, rank, traceback in reports if not DEAD_PEER.search(traceback)]
    reported = {rank for _, rank, _ in reports}
    silent = next((rank for rank in failed if rank not in reported), None)  # the first rank that left no report
    if silent is not None and not (causes and causes[0][0] < failed[silent][1]):
        root, status = silent, failed[silent][0]
        text = f"{named(root, hosts)} {describe_status(status)}"
        # The rank could not say where it was; the first peer that failed can say what it was needed for.
        if reports and (line := re.search(r", (line \d+), in .*\n *(.*)", reports[0][2])):
            text += f"\n{named(reports[0][1], hosts)} noticed at {line[1]}: {line[2]}"
        if status == -signal.SIGABRT:  # gloo's own message is lost among the rank's output
            text += "\n(gloo aborts if a message is larger than the tensor that receives it; compare shape and dtype)"
    else:
        _, root, traceback = (causes or reports)[0]
        ended = [] if causes else sorted(set(range(ranks)) - set(failed))
        because = f" because {_names(ended)} had already ended" if ended else ""
        text = f"{named(root, hosts)} failed{because}:\n{traceback}"
    if others := sorted(set(failed) - {root}):
        text += f"\n({_names(others)} failed afterwards)"
    return text


def describe_status(status: int) -> str:
    """Describe how a process ended.

    Args:
        status: its exit code, or the negative number of the signal that killed it.
    """
    names = {number.value: number.name for number in signal.Signals}
    if status >= 0:
        return f"exited with code {status}"
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def read_location(rank: int, folder: Path, program: str) -> Location:
    """Return where a rank is: as it has reported, or otherwise as the Python stack in its `.stack` file shows.

    Args:
        folder: the run's, with the reports.
        program: the file that the ranks run.
    """
    types = {"line": int, "source": str, "doing": str, "kind": str, "peer": (int, type(None))}
    if report := _read(folder / f"{rank}.location", **types):
        return Location(rank, **report)
    stack = folder / f"{rank}.stack"
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    if own := re.search(rf'File "{re.escape(program)}", line (\d+)', text):  # the innermost call comes first
        linecache.checkcache(program)
        return Location(rank, int(own[1]), linecache.getline(program, int(own[1])).strip())
    if text or not stack.exists():  # without the file, the rank has not started yet
        innermost = text.splitlines()[1:2]  # after a heading
        return Location(rank, 0, "".join(innermost).strip())
    return Location(rank, 0, None)  # an empty file: the rank is stopped


def _read(file: Path, **types: Any) -> dict[str, Any]:
    """Return the report in a JSON file, {} if the file is missing or damaged: the rank's program can write to it, too.

    Args:
        types: the name and type of each value in the report. Other values are left out.
    """
    try:
        report = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    well = isinstance(report, dict) and all(isinstance(report.get(name), kind) for name, kind in types.items())
    return {name: report.get(name) for name in types} if well else {}


def _names(ranks: list[int]) -> str:
    """Return "rank 2" or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
