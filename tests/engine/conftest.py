"""The tables of the engine's tests, printed below the report."""

from collections.abc import Callable

import pytest
from gpu_table import table


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return `tell(line)`, which puts a line into the table, whether the test passes or fails."""
    return lambda line: record_property("tell", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = ("passed", "failed", "error", "skipped")
    reports = [report for outcome in outcomes for report in terminalreporter.stats.get(outcome, [])]
    if config.option.markexpr == "gpu":
        terminalreporter.section("what this machine shows, to be pasted into an issue; details are above")
        lines = table(reports)
    else:
        lines = [value for report in reports for name, value in report.user_properties if name == "tell"]
        if lines:
            terminalreporter.section("the engine compared with one process")
    for line in lines:
        terminalreporter.write_line(line)
