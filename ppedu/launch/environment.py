"""The environment variables of the launcher and of the ranks."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

HOME = str(Path(__file__).parents[2])
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# For our own launcher: a rank that ends right after `init_process_group` must not close its connections before the
# others have made theirs.
BARRIER = {"TORCH_DIST_INIT_BARRIER": "1"}


def module_path() -> dict[str, str]:
    """Return the environment variable PYTHONPATH as a dict: the folder that holds ppedu, then its current value."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{HOME}{os.pathsep}{before}" if before else HOME}


def torchrun_environment(
    ranks: int,
    port: int,
    *,
    address: str = "127.0.0.1",
    interface: str = "lo",
    local: int | None = None,
    group: int = 0,
    groups: int = 1,
    run: str | None = None,
) -> dict[str, str]:
    """Return the variables that torchrun sets, and others, for the ranks of one machine.

    The launcher adds the variables that differ between ranks, such as RANK.

    Args:
        ranks: of all machines.
        port, address: MASTER_PORT and MASTER_ADDR.
        interface: the network interface for messages.
        local: the ranks on this machine, by default all.
        group: this machine's number.
        groups: the number of machines.
        run: the ID of the run, the same on all machines.
    """
    return {
        **ONE_THREAD,
        "GLOO_SOCKET_IFNAME": interface,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "LOCAL_WORLD_SIZE": str(ranks if local is None else local),
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": str(groups),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run or uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
