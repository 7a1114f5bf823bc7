"""What tests of several rooms share. It is loaded for the ground floor's tests too: no torch at the top."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Where the tests run in the background of a shell, interrupts are ignored, by the programs they start too. Here they
# are not, as at a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Any]:
    from ppedu.notebook.pool import RankPool

    pool = RankPool()
    pool.start()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """`ranks(program, n, *arguments)` runs the text of a program on n ranks and returns what each has printed.

    The ranks are real processes. One that fails, fails the test: an `assert` in the program is one of the test.
    """
    folder = tmp_path_factory.mktemp("ranks")

    def run(program: str, n: int, *arguments: str, timeout: float = 60, pool: Any = rank_pool) -> list[str]:
        file = folder / "program.py"
        file.write_text(textwrap.dedent(program), encoding="utf-8")
        output = [b""] * n

        def write(rank: int, piece: bytes) -> None:
            output[rank] += piece

        pool.run(str(file), n, arguments, timeout=timeout, write=write)
        return [text.decode() for text in output]

    return run


@pytest.fixture(scope="session")
def gone() -> Callable[[Iterable[int]], bool]:
    """`gone(processes)`: have all of them ended, within some seconds?"""

    def wait(processes: Iterable[int]) -> bool:
        left = set(processes)
        assert left, "name at least one process"
        end = time.monotonic() + 20
        while left and time.monotonic() < end:
            left = {process for process in left if _runs(process)}
            time.sleep(0.02)
        return not left

    return wait


@pytest.fixture(scope="session")
def marked() -> Callable[[str], list[int]]:
    """`marked(text)`: the processes that were started with `text` in their environment."""

    def find(text: str) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in environment and int(folder.name) != os.getpid() and _runs(int(folder.name)):
                found.append(int(folder.name))
        return found

    return find


def _runs(process: int) -> bool:
    """Is it there, and not a zombie that nobody has asked after?"""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
