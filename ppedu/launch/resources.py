"""How many ranks this machine can run, and the memory that processes take."""

from __future__ import annotations

import contextlib
import re
from numbers import Real
from pathlib import Path
from typing import Any

from ppedu.core import SettingError
from ppedu.core.validate import require_count
from ppedu.launch.launcher import MAX_RANKS

RANK_MEMORY = 35 << 20  # bytes: measured for a rank that trains a small model, without what ranks share


def require_run(ranks: Any, timeout: Any, here: bool = True) -> None:
    """Raise SettingError unless `ranks` is a number of ranks, and `timeout` a number of seconds or None.

    Args:
        here: they will run on this machine, which must have the memory for them.
    """
    require_count("the number of ranks", ranks)
    if ranks > MAX_RANKS:
        raise SettingError(f"at most {MAX_RANKS} ranks can be started from here; got {ranks}")
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise SettingError(f"timeout must be a number of seconds above 0; got {timeout!r}")
    free = free_memory() if here else None
    if free is not None and ranks * RANK_MEMORY > free:
        fit = free // RANK_MEMORY
        raise SettingError(
            f"{ranks} ranks need about {ranks * RANK_MEMORY >> 20} MB of memory; {free >> 20} MB are free, "
            + (f"enough for {fit}" if fit else "not enough for one")
        )


def memory(process: int | None) -> int | None:
    """Return the proportional set size of a process in bytes, None if it is unavailable."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(text.partition("Pss:")[2].split()[0]) << 10


def free_memory() -> int | None:
    """Return the free memory of the machine, or of the container if it is less, in bytes; None if it is unknown."""
    found = []
    with contextlib.suppress(OSError, AttributeError, ValueError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        found.append(int(re.search(r"MemAvailable:\s*(\d+)", text)[1]) << 10)  # type: ignore[index]
    with contextlib.suppress(OSError, AttributeError, ValueError):  # "max" is not a number: there is no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        text = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="utf-8")
        cached = int(re.search(r"^inactive_file (\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        found.append(limit - used + cached)
    return min(found, default=None)
