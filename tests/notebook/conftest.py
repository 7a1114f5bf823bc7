"""Fixtures for the tests of the rank pool, of cells and of the lessons' exercises."""

import os
import re
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppedu.notebook import check_answer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in a folder of its own, where solved exercises are recorded."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Any], str]:
    """`told(exercise, answer)` returns the feedback that the learner reads, as one line."""

    def read(exercise: str, answer: Any) -> str:
        check_answer(exercise, answer)
        if "matplotlib.pyplot" in sys.modules and len(sys.modules["matplotlib.pyplot"].get_fignums()) > 5:
            sys.modules["matplotlib.pyplot"].close("all")  # it warns of more than 20 pictures
        return " ".join(capsys.readouterr().out.split())

    return read


@pytest.fixture
def refused(told: Callable[[str, Any], str]) -> Callable[[str, Any, str], str]:
    """`refused(exercise, answer, reason)` returns the feedback on a wrong answer, which must contain the reason."""

    def read(exercise: str, answer: Any, reason: str) -> str:
        message = told(exercise, answer)
        assert message.startswith("Not yet: ") and reason in message
        assert ".." not in message and "?." not in message
        return message

    return read


@pytest.fixture(scope="module")
def spare_pool() -> Iterator[Any]:
    """A pool whose launcher a test may kill."""
    from ppedu.notebook.pool import RankPool

    pool = RankPool()
    pool.start()
    yield pool
    pool.close()


OWNER = """
import os, sys, time
from pathlib import Path
from ppedu.notebook.exchange import new_folder
from ppedu.notebook.pool import RankPool
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


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], SimpleNamespace]]:
    """`kernel(source)` runs a cell in a real kernel and returns its output.

    `.text` is the printed text; `.shown` a list of the displayed objects, each a dict by MIME type, and
    `.metadata` a list of theirs; `.error` the error, None if the cell succeeded, and `.traceback` its text.
    """
    import nbformat
    from nbclient import NotebookClient

    page = nbformat.v4.new_notebook()
    client = NotebookClient(page, kernel_name="python3", timeout=100, allow_errors=True)
    environment = os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("temporary"))}

    def run(source: str) -> SimpleNamespace:
        page.cells.append(nbformat.v4.new_code_cell(source))
        outputs = client.execute_cell(page.cells[-1], len(page.cells) - 1).outputs
        displays = [output for output in outputs if output.output_type in ("display_data", "execute_result")]
        errors = [output for output in outputs if output.output_type == "error"]
        assert len(errors) <= 1
        return SimpleNamespace(
            text="".join(output.text for output in outputs if output.output_type == "stream"),
            shown=[output.data for output in displays],
            metadata=[output.metadata for output in displays],
            error=errors[0] if errors else None,
            traceback=re.sub(r"\x1b\[[\d;]*m", "", "\n".join(errors[0].traceback)) if errors else "",
        )

    with client.setup_kernel(cwd=str(tmp_path_factory.mktemp("folder")), env=environment):
        assert not run("%load_ext ppedu").error
        yield run


@pytest.fixture
def failed(kernel: Callable[[str], SimpleNamespace]) -> Callable[[str], SimpleNamespace]:
    """`failed(source)` runs a cell that must fail, and then one that must not. Returns the first."""

    def run(source: str) -> SimpleNamespace:
        cell, after = kernel(source), kernel("%%torchrun -n 2\nprint('well')")
        assert cell.error is not None
        assert (after.error, after.text) == (None, "[0] well\n[1] well\n")
        return cell

    return run
