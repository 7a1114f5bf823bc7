"""The table of `make gpu` has a row for each test function, whatever happens to it."""

import pytest
from gpu_table import table


def report(line, name, outcome="passed", why=None, told=()):
    place = ("test_cuda.py", line, name)
    properties = [("tell", text) for text in told]
    return pytest.TestReport("", place, {}, outcome, why, "call", duration=1.2, user_properties=properties)


def test_each_function_is_a_row_with_its_result_and_remarks():
    skipped = ("test_cuda.py", 3, "Skipped: needs a GPU")
    crash = "RankError: rank 1 was killed\n(rank 0 failed afterwards)"
    chain = "RankError: rank 0 failed:\nTraceback:\n  ValueError: a\nppedu.core.errors.SettingError: b|c\n"
    hang = "RankError: not ended after 9 s\n  rank 0 waits"
    reports = [
        report(9, "test_hangs", "failed", hang),
        report(1, "test_all_pass[a]", told=["1 ms", "2 | 3"]),
        report(1, "test_all_pass[b]", told=["1 ms"]),
        report(3, "test_some_pass[gloo]"),
        report(3, "test_some_pass[nccl]", "skipped", skipped),
        report(5, "test_none_runs[x]", "skipped", skipped),
        report(5, "test_none_runs[y]", "skipped", skipped),
        report(7, "test_two_fail[x]", "failed", crash, ["2 s"]),
        report(7, "test_two_fail[y]", "failed", chain),
        report(7, "test_two_fail[z]"),
    ]
    assert list(table(reports)) == [
        "| test | result | seconds | remarks |",
        "|---|---|---|---|",
        "| all pass | 2 passed | 2 | 1 ms; 2 \\| 3 |",
        "| some pass | passed | 2 | nccl skipped: needs a GPU |",
        "| none runs | skipped | 2 | needs a GPU |",
        "| two fail | **2 of 3 failed** | 4 | 2 s; x: RankError: rank 1 was killed; y: SettingError: b\\|c |",
        "| hangs | **failed** | 1 | RankError: not ended after 9 s |",
    ]
