"""Fixtures for the tests of exercises."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppedu.notebook import check_answer


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own, where solved exercises are recorded."""
    monkeypatch.chdir(tmp_path)


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
