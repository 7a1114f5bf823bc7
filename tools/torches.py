"""Test the engine and a lesson with the releases of PyTorch that other tests do not run with: `make test-torches`.

Each release gets an environment of its own in .venv. Arguments are passed to pytest.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from ppedu.cli.checkup import TORCH

TESTS = ["tests/engine", "tests/core/test_against_torch.py", "notebooks/05_1f1b.ipynb"]
OPTIONS = ["-n", "2", "--dist", "loadfile", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=300"]
PACKAGES = ["--editable", ".[lab]", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist"]


def main() -> None:
    pins = Path("constraints.txt").read_text(encoding="utf-8")
    table = []
    for release in TORCH:
        if f"\ntorch=={release}." in pins:
            continue
        folder = Path(f".venv/torch-{release}")
        report, constraints = folder / "report.xml", folder / "constraints.txt"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        constraints.write_text(re.sub("(?m)^torch==.*", f"torch=={release}.*", pins), encoding="utf-8")
        install: list[str | Path] = [folder / "bin/pip", "install", "--quiet", "--constraint", constraints, *PACKAGES]
        subprocess.run(install, check=True)
        command: list[str | Path] = [
            folder / "bin/python",
            "-m",
            "pytest",
            *OPTIONS,
            f"--junit-xml={report}",
            *TESTS,
            *sys.argv[1:],
        ]
        report.unlink(missing_ok=True)
        subprocess.run(command, check=False, env=os.environ | {"PPEDU_STILL": "1"})
        table.append((release, Counter(map(outcome, ElementTree.parse(report).iter("testcase")))))
    for release, outcomes in table:
        print(f"\nPyTorch {release}")
        for what, count in outcomes.most_common():
            print(f"{count:6} {what}")
    sys.exit(any("failed" in outcomes for _, outcomes in table))


def outcome(test: ElementTree.Element) -> str:
    """Return what became of a test: passed, failed, or skipped and why."""
    if test.find("failure") is not None or test.find("error") is not None:
        return "failed"
    skipped = test.find("skipped")
    return "passed" if skipped is None else f"skipped: {skipped.get('message')}"


main()
