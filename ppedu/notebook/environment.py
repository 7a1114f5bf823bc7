"""The environment variables of the launcher and of the ranks."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

HOME = str(Path(__file__).parents[2])
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
# For our own launcher: a rank that ends right after `init_process_group` must not close its connections before the
# others have made theirs.
BARRIER = {"TORCH_DIST_INIT_BARRIER": "1"}


def module_path() -> dict[str, str]:
    """Return the environment variable PYTHONPATH as a dict: the folder that holds ppedu, then its current value."""
    return {"PYTHONPATH": os.pathsep.join([HOME, *filter(None, [os.environ.get("PYTHONPATH")])])}


def rank_environment(ranks: int, port: int, several_nodes: bool) -> dict[str, str]:
    """Return the environment that all ranks share: this process's, and the variables that torchrun sets.

    port: MASTER_PORT. several_nodes: torchrun runs on several nodes, so it sets its variables itself, and messages are
    not limited to the loopback interface. The launcher adds the variables that differ between ranks, such as RANK.
    """
    if several_nodes:
        return os.environ | ONE_THREAD
    torchrun = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return os.environ | ONE_THREAD | LOOPBACK | torchrun
