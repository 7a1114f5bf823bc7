"""Nodes from Slurm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from ppedu.core.errors import PipelineError
from ppedu.notebook.hosts.host import end_with_parent

PIPE = asyncio.subprocess.PIPE


async def allocate(options: Sequence[str]) -> tuple[str, list[str]]:
    """Wait until Slurm grants nodes, however long they take, and return the job's ID and the nodes' names.

    options: of salloc, such as --nodes=2.

    Raises:
        PipelineError: there is no salloc here, or Slurm refuses.
    """
    said = await _run("salloc", "--no-shell", *options)
    granted = re.search(r"Granted job allocation (\d+)", said)
    if not granted:
        raise PipelineError(f"Slurm gives no nodes: {said.strip().splitlines()[-1] if said.strip() else 'no reason'}")
    nodes = await _run("squeue", "--noheader", "--jobs", granted[1], "--format=%N")
    return granted[1], (await _run("scontrol", "show", "hostnames", nodes.strip())).split()


async def cancel(job: str) -> None:
    """End a job."""
    await _run("scancel", job)


async def _run(*command: str) -> str:
    """Return what a command of Slurm prints, on stdout and stderr. It ends with this process."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, stderr=asyncio.subprocess.STDOUT, preexec_fn=end_with_parent
        )
    except FileNotFoundError:
        raise PipelineError(f"there is no {command[0]} here; start from a machine with Slurm's commands") from None
    said, _ = await process.communicate()
    return said.decode("utf-8", "replace")
