"""The lines that tests of real ranks print below the test report, whether they pass or fail."""

from collections.abc import Callable

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`tell(line)` puts a line into the table below the test report."""
    return request.config.stash.setdefault(LINES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = terminalreporter.config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("the engine beside one process")
        for line in lines:
            terminalreporter.write_line(line)
