"""Nodes from Slurm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

from ppedu.core import PipelineError
from ppedu.launch.hosts.host import end_with_parent

PIPE = asyncio.subprocess.PIPE


async def allocate(options: Sequence[str], note: Callable[[str], None]) -> tuple[str, list[str]]:
    """Wait until Slurm grants nodes, however long they take, and return the job's ID and the nodes' names.

    Args:
        options: of salloc, such as --nodes=2.
        note: called with each line that salloc prints while it waits.

    Raises:
        PipelineError: `salloc` is not installed on this machine, or Slurm refuses.
    """
    said = await run("salloc", "--no-shell", *options, note=note)
    granted = re.search(r"Granted job allocation (\d+)", said)
    if not granted:
        reason = said.strip().splitlines()[-1] if said.strip() else "no reason"
        raise PipelineError(f"Slurm gives no nodes: {reason}")
    job = granted[1]
    nodes = await run("squeue", "--noheader", "--jobs", job, "--format=%N")  # such as alpha[1-2]
    names = await run("scontrol", "show", "hostnames", nodes.strip())
    return job, names.split()


async def run(*command: str, note: Callable[[str], None] | None = None) -> str:
    """Return what a command of Slurm prints; call `note` with each line. The command ends with this process."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, stderr=asyncio.subprocess.STDOUT, preexec_fn=end_with_parent
        )
    except FileNotFoundError:
        raise PipelineError(f"{command[0]} is not installed here; start on a machine with Slurm's commands") from None
    assert process.stdout is not None
    said = ""
    while line := (await process.stdout.readline()).decode("utf-8", "replace"):
        said += line
        if note:
            note(line.strip())
    await process.wait()
    return said
