"""What the tests of several lessons' exercises share."""

from collections.abc import Callable
from typing import Any

import pytest

from ppedu.notebook import check_answer


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Any], str]:
    """`told(exercise, answer)`: what the learner reads, as one line."""

    def read(exercise: str, answer: Any) -> str:
        check_answer(exercise, answer)
        return " ".join(capsys.readouterr().out.split())

    return read


@pytest.fixture
def refused(told: Callable[[str, Any], str]) -> Callable[[str, Any, str], str]:
    """`refused(exercise, answer, reason)`: what the learner reads, which is not praise, and gives the reason well."""

    def read(exercise: str, answer: Any, reason: str) -> str:
        message = told(exercise, answer)
        assert message.startswith("Not yet: ") and reason in message
        assert ".." not in message and "?." not in message
        return message

    return read
