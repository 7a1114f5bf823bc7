"""Fixtures for the tests of cells."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def failed(kernel: Callable[[str], SimpleNamespace]) -> Callable[[str], SimpleNamespace]:
    """`failed(source)` runs a cell that must fail, and then one that must not. Returns the first."""

    def run(source: str) -> SimpleNamespace:
        cell, after = kernel(source), kernel("%%torchrun -n 2\nprint('well')")
        assert cell.error is not None
        assert (after.error, after.text) == (None, "[0] well\n[1] well\n")
        return cell

    return run
