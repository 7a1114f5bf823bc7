"""The table of `make gpu`, in Markdown: a row for each test function, with what its tests told, or why they failed."""

import re
from collections.abc import Iterable, Iterator

import pytest

MOST_LETTERS = 200  # of a reason


def table(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yield the lines of the table."""
    rows: dict[str, list[pytest.TestReport]] = {}
    for report in sorted(reports, key=lambda report: report.location[:2]):
        rows.setdefault(report.location[2].partition("[")[0], []).append(report)
    yield "| test | result | seconds | remarks |"
    yield "|---|---|---|---|"
    for name, tests in rows.items():
        words = name.removeprefix("test_").replace("_", " ")
        seconds = sum(report.duration for report in tests)
        yield f"| {words} | {_result(tests)} | {seconds:.0f} | {'; '.join(dict.fromkeys(_remarks(tests)))} |"


def _result(tests: list[pytest.TestReport]) -> str:
    ran = [report for report in tests if not report.skipped]
    failed = sum(report.failed for report in ran)
    if not ran:
        return "skipped"
    if failed:
        return "**failed**" if len(ran) == 1 else f"**{failed} of {len(ran)} failed**"
    return "passed" if len(ran) == 1 else f"{len(ran)} passed"


def _remarks(tests: list[pytest.TestReport]) -> Iterator[str]:
    for report in tests:
        yield from (_cell(value) for name, value in report.user_properties if name == "tell")
        parameter = report.location[2].partition("[")[2].removesuffix("]")
        if report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")
            yield f"{parameter} skipped: {reason}" if len(tests) > 1 and not all(t.skipped for t in tests) else reason
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            yield _cell(f"{parameter}: " * bool(parameter) + cause(crash.message if crash else str(report.longrepr)))


def cause(message: str) -> str:
    """Return the line that names the cause in the message of an error: that of the error in its last traceback."""
    named = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt)\b.*)", message, re.MULTILINE)
    return named[-1] if named else message.partition("\n")[0]


def _cell(text: object) -> str:
    """Return a text that fits into a cell of the table."""
    words = " ".join(str(text).split()).replace("|", "\\|")
    return words if len(words) <= MOST_LETTERS else words[: MOST_LETTERS - 1] + "…"
