"""Fixtures and markers for all tests. Runs without torch load this file too, so fixtures import what they need."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import textwrap
import time
import types
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

# A shell starts background commands with interrupts ignored, and so are they in all processes these start. Restore the
# behavior of a terminal, which the tests of interrupts expect.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests make many tuples and few cycles: collecting garbage as often as usual takes them a seventh of their time.
gc.set_threshold(20_000)

# tests/core/strategies.py scales the examples of properties and the cases of loops by these percentages.
# `make test-all` uses "full".
hypothesis.settings.register_profile("quick", max_examples=10, deadline=None)
hypothesis.settings.register_profile("full", max_examples=100, deadline=None)
hypothesis.settings.load_profile("quick")

# A test gets a marker if it, one of its fixtures, or a helper that these call, calls something that starts processes.
MARKERS = {
    "NotebookClient": "kernel",
    "RankPool": "ranks",
    "jupyter_lab": "browser",
    "subprocess": "programs",
    "sync_playwright": "browser",
}


# Files that share a server or hosts, which take long to start: they are tested by one process, before other files.
TOGETHER = {
    "hosts": ("tests/hosts/",),
    "JupyterLab": ("tests/browser/test_lab.py", "tests/browser/test_stepper.py"),
}
FIRST = (*(each for files in TOGETHER.values() for each in files), "tests/browser/test_site.py")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_auto_num_workers() -> int:
    return len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all files of one of TOGETHER to one process, where pytest-xdist is asked for a file at a time."""
    if config.getoption("dist") != "loadfile":
        return None
    scheduling = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    by_file = scheduling._split_scope

    def by_file_or_together(test: str) -> str:
        return next((name for name, files in TOGETHER.items() if test.startswith(files)), by_file(test))

    scheduling._split_scope = by_file_or_together
    return scheduling


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))  # these take longest
    for item in (each for each in items if isinstance(each, pytest.Function)):  # a cell of a lesson is not one
        fixtures = item._fixtureinfo.name2fixturedefs
        functions = [item.function, *(each[-1].func for each in fixtures.values() if each)]
        for name in set().union(*(_names(function) for function in functions)) & set(MARKERS):
            item.add_marker(MARKERS[name])


def pytest_collection_finish() -> None:
    gc.freeze()  # torch and thousands of tests are there until the end


@functools.cache
def _names(function: Any, depth: int = 3) -> frozenset[str]:
    """Return the names that a function uses, nested functions and helpers of its module included."""
    code = getattr(function, "__code__", None)
    if code is None or depth == 0:
        return frozenset()
    names = set()
    inner = [code]
    for each in inner:
        names.update(each.co_names)
        inner += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
    helpers = [function.__globals__[name] for name in names if name in function.__globals__]
    own = [each for each in helpers if getattr(each, "__module__", "") == function.__module__]
    return frozenset(names).union(*(_names(each, depth - 1) for each in own if isinstance(each, types.FunctionType)))


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the registrations of each test."""
    from ppedu.zoo import registry

    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def unfinished() -> None:
    """Register generators as learners leave them behind."""
    import ppedu as pp

    @pp.register("raises")
    def raises(rank: int, ranks: int, microbatches: int) -> Iterator[Any]:
        yield pp.F(rank, 0)
        raise ZeroDivisionError

    pp.register("nothing")(lambda rank, ranks, microbatches: [])
    pp.register("numbers")(lambda rank, ranks, microbatches: [7])  # type: ignore[list-item]
    pp.register("stuck")(lambda rank, ranks, microbatches: [pp.B(rank, 0), pp.F(rank, 0)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def kernels_path() -> str:
    """The PYTHONPATH of the kernel."""
    return os.environ.get("PYTHONPATH", "")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, kernels_path: str) -> Iterator[Callable[[str], SimpleNamespace]]:
    """`kernel(source)` runs a cell in a real kernel and returns its output.

    `.text` is the printed text; `.shown` a list of the displayed objects, each a dict by MIME type, and
    `.metadata` a list of theirs; `.error` the error, None if the cell succeeded, and `.traceback` its text.
    """
    import nbformat
    from nbclient import NotebookClient

    page = nbformat.v4.new_notebook()
    client = NotebookClient(page, kernel_name="python3", timeout=100, allow_errors=True)
    environment = os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("temporary")), "PYTHONPATH": kernels_path}

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


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Any]:
    from ppedu.launch.pool import RankPool

    pool = RankPool()
    pool.start()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Return `ranks(program, n, *arguments)`, which runs a program's text on n ranks and returns the output of each.

    The ranks are real processes. An assertion that fails in the program fails the test. `each` also gets every piece.
    """
    from ppedu.core import PipelineError

    folder = tmp_path_factory.mktemp("ranks")

    def run(
        program: str,
        n: int,
        *arguments: str,
        timeout: float = 60,
        pool: Any = rank_pool,
        each: Callable[[int, bytes], object] = lambda *_: None,
    ) -> list[str]:
        file = folder / "program.py"
        file.write_text(textwrap.dedent(program), encoding="utf-8")
        output = [b""] * n

        def write(rank: int, piece: bytes) -> None:
            output[rank] += piece
            each(rank, piece)

        try:
            pool.run(str(file), n, arguments, timeout=timeout, write=write)
        except PipelineError:
            for rank, text in enumerate(output):
                print(f"rank {rank}:\n{text.decode(errors='replace')}")  # which pytest shows with the failure
            raise
        return [text.decode(errors="surrogateescape") for text in output]

    return run


LIGHT = {  # what the launcher uses of torch
    "__init__.py": "class default_generator:\n    seed = staticmethod(lambda: None)\n",
    "distributed/__init__.py": "class TCPStore:\n    def __init__(self, *given, **named): pass\n",
    "distributed/pipelining.py": "",
}


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with a torch that is imported at once, for launchers of ranks that do not use it."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "torch" / "distributed").mkdir(parents=True)
    for name, text in LIGHT.items():
        (folder / "torch" / name).write_text(text)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def gone() -> Callable[[Iterable[int]], bool]:
    """Return `gone(processes)`, which waits up to 20 seconds for processes to end, and returns whether they did."""

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
    """Return `marked(text)`, which finds the processes that were started with `text` in their environment."""

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
    """Return whether a process is running. A zombie, which has ended, is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
