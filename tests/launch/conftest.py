"""Fixtures for the tests of the pool of ranks."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def spare_pool() -> Iterator[Any]:
    """A pool whose launcher a test may kill."""
    from ppedu.launch.pool import RankPool

    pool = RankPool()
    pool.start()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def light_pool(light: str) -> Iterator[Any]:
    """A pool whose launcher a test may kill, and whose ranks have no torch."""
    from ppedu.launch.pool import RankPool

    class LightPool(RankPool):
        def start(self) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", light)
                super().start()

    pool = LightPool()
    yield pool
    pool.close()


OWNER = """
import os, sys, time
from pathlib import Path
from ppedu.launch.exchange import new_folder
from ppedu.launch.pool import RankPool
pool = RankPool(os.environ.get("LAUNCHER", "zygote"))
def write(rank, piece): sys.stdout.buffer.write(piece), sys.stdout.flush()
"""


@pytest.fixture
def start_owner(tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[str], str]]:
    """`start_owner(source, program)` starts a process that runs the source, in which `pool` is a RankPool.

    Its first argument is a file with the program. Returns the process, and a mark in the environment of all that it
    starts. Keywords are further environment variables.
    """

    def start(source: str, program: str = "", **environment: str) -> tuple[subprocess.Popen[str], str]:
        mark = uuid.uuid4().hex
        (tmp_path / "program.py").write_text(program)
        (tmp_path / "temporary").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", f"{OWNER}\n{textwrap.dedent(source)}", tmp_path / "program.py"],
            env=os.environ | {"PPEDU_TEST": mark, "TMPDIR": str(tmp_path / "temporary")} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process, mark

    return start


@pytest.fixture
def leftovers(tmp_path: Path, marked: Callable[[str], list[int]]) -> Callable[[str], list[int | str]]:
    """`leftovers(mark)`: the processes and run folders of an owner that are still there some seconds later."""

    def now(mark: str) -> list[int | str]:
        folders = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("ppedu-")]
        return [*marked(mark), *folders]

    def find(mark: str) -> list[int | str]:
        end = time.monotonic() + 20
        while now(mark) and time.monotonic() < end:
            time.sleep(0.05)
        return now(mark)

    return find
