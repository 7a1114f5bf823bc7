"""Fixtures for the tests of exercises."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from ppedu.notebook import check_answer

matplotlib.use("Agg")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests in `answers` for each exercise of RIGHT and WRONG in a file."""
    for name in {"right", "wrong"} & set(metafunc.fixturenames):
        metafunc.parametrize(name, getattr(metafunc.module, name.upper()))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own, where solved exercises are recorded."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def close_pictures() -> Iterator[Callable[[], None]]:
    def close() -> None:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")

    close()
    yield close
    close()


@pytest.fixture(scope="session")
def kernels_path(light: str) -> str:
    """The cells here run on no ranks."""
    return light


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], close_pictures: Callable[[], None]) -> Callable[[str, Any], str]:
    """`told(exercise, answer)` returns the feedback that the learner reads, as one line; pyplot has its picture."""

    def read(exercise: str, answer: Any) -> str:
        close_pictures()
        check_answer(exercise, answer)
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
