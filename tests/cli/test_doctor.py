"""`pp.doctor()` reports whether a machine is ready, and never raises. Each machine here lacks something."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppedu.cli import checkup
from ppedu.cli.checkup import Checked, Checkup, doctor
from ppedu.core import RankError
from ppedu.launch import resources

ROOT = Path(__file__).parents[2]
READY = checkup._Answer(["2.13.0", json.dumps([True, []])], "")


@pytest.fixture
def found(monkeypatch):
    """Return a function that returns the check of a name, without querying torch or starting ranks."""

    def look(name, answer=READY, ranks=lambda *_, **__: None):
        monkeypatch.setattr(checkup, "_query_torch", lambda: answer)
        monkeypatch.setattr("ppedu.launch.pool.RankPool.run", ranks)
        checks = {check.name: check for check in doctor().checks}
        assert all("\n" not in check.text for check in checks.values())
        return checks[name]

    return look


COMMAND = """
import sys
from ppedu.cli.main import main
code = main(["doctor"])
print("loaded:", *{"torch", "numpy", "matplotlib"} & set(sys.modules))
sys.exit(code)
"""


def command(**environment):
    words = [sys.executable, "-c", COMMAND]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | environment, timeout=120)


def test_this_machine_is_ready_and_no_process_remains(marked):
    began = time.time()
    done = command(CHECKUP=f"of-{os.getpid()}")
    assert (done.returncode, done.stderr) == (0, "")
    ahead, *lines = done.stdout.splitlines()
    assert "starts two ranks: some seconds" in ahead
    assert [line.split()[:2] for line in lines[:8]] == [
        ["ok", name] for name in ("Python", "torch", "cores", "memory", "GPUs", "ranks", "matplotlib", "widgets")
    ]
    seconds = float(re.search(r"2 ranks started and summed their numbers in (\S+) s", done.stdout)[1])
    assert 0 < seconds < time.time() - began
    assert lines[-2:] == ["This machine is ready.", "loaded:"]
    assert not marked(f"CHECKUP=of-{os.getpid()}")


def test_missing_torch_is_reported_with_the_command_that_installs_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = command(PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    assert "!   torch       not installed; pip install 'ppedu[run]'" in done.stdout
    assert "!   ranks       not started, because torch is missing" in done.stdout
    assert len(re.findall(r"^!", done.stdout, re.MULTILINE)) == 2 and "Not ready" in done.stdout


@pytest.mark.parametrize(
    ("lines", "error", "says"),
    [
        ([], "ImportError: libc10.so is missing", "cannot be imported (ImportError: libc10.so is missing); install it"),
        (["2.4.1+cu121", "[true, []]"], "", "2.4.1+cu121 is too old; pip install 'ppedu[run]'"),
    ],
)
def test_a_broken_or_outdated_torch_is_reported(found, lines, error, says):
    check = found("torch", checkup._Answer(lines, error))
    assert not check.ok and says in check.text


@pytest.mark.parametrize(
    ("lines", "error", "says"),
    [
        (["2.13.0", "[true, []]"], "", "none found; the lessons need none"),
        (["2.13.0+cpu", "[false, []]"], "", "this is its CPU build; the lessons need none"),
        (["2.13.0", '[true, ["H200", "H200"]]'], "", "2: H200; pp.run.place() returns the one of a rank"),
        (
            ["2.13.0"],
            "RuntimeError: no driver",
            "torch failed to list them (RuntimeError: no driver); the lessons need none",
        ),
    ],
)
def test_gpus_are_optional(found, lines, error, says):
    check = found("GPUs", checkup._Answer(lines, error))
    assert check.ok and check.text.endswith(says)


def test_a_torch_that_hangs_while_listing_gpus_times_out(monkeypatch):
    monkeypatch.setattr(checkup, "TIMEOUT", 0.5)
    monkeypatch.setattr(checkup, "TORCH_QUERY", "import time; print('2.13.0', flush=True); time.sleep(60)")
    assert checkup._query_torch() == checkup._Answer(["2.13.0"], "no answer after 0.5 s")


@pytest.mark.parametrize(
    ("limit", "bound", "cores"), [("50000 100000", 8, "0.5"), ("300000 100000", 2, "2"), ("max 100000", 12, "12")]
)
def test_cores_respect_the_affinity_and_the_quota(found, monkeypatch, limit, bound, cores):
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, *a, **k: limit if p.name == "cpu.max" else read(p, *a, **k))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound)), raising=False)
    check = found("cores")
    assert check.ok and check.text.partition(";")[0] == cores


@pytest.mark.parametrize(("free", "own", "ok"), [(900, 200, True), (900, 100, False), (None, 100, True)])
def test_memory_of_this_process_counts_as_free(found, monkeypatch, free, own, ok):
    monkeypatch.setattr(resources, "free_memory", lambda: free and free << 20)
    monkeypatch.setattr(resources, "memory", lambda process: own << 20)
    check = found("memory")
    assert check.ok == ok and ("shut down other notebooks" in check.text) != ok


def test_an_unsupported_system_is_reported_with_an_alternative(found, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    check = found("ranks")
    assert not check.ok and "in WSL" in check.text


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RankError("rank 0 failed:\nline 5\nRuntimeError: no route\n(rank 1 failed afterwards)"),
            "RuntimeError: no route; proc",
        ),
        (PermissionError(13, "not allowed", "/tmp/x"), "not allowed: '/tmp/x'; allow this user to start processes"),
        (KeyError("x"), "could not be checked: 'x'"),
    ],
)
def test_errors_from_starting_ranks_are_reported_and_not_raised(found, error, says):
    def fail(*_, **__):
        raise error

    check = found("ranks", ranks=fail)
    assert not check.ok and says in check.text


def test_missing_packages_are_named(found, monkeypatch):
    there = checkup.version

    def version(name):
        if name == "anywidget":
            raise checkup.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(checkup, "version", version)
    assert found("widgets") == Checked(
        "widgets", False, "no anywidget; pip install 'ppedu[lab]', then restart the kernel"
    )
    assert found("matplotlib").ok


def test_every_release_of_torch_from_the_oldest_on_is_fine_and_the_line_says_whether_it_is_tested(found, monkeypatch):
    monkeypatch.setattr(checkup, "TORCH", ("2.6", "2.13", "2.15"))
    says = {
        "2.6.0+cpu": "2.6.0+cpu (supported and tested)",
        "2.15.0.dev20260101": "2.15.0.dev20260101 (supported and tested)",
        "2.10.1": "2.10.1 (supported; tested are 2.6, 2.13, 2.15)",
        "2.16.0": "2.16.0 (newer than 2.15, the newest release that is tested)",
    }
    checks = {release: found("torch", checkup._Answer([release, "[true, []]"], "")) for release in says}
    assert all(check.ok for check in checks.values())
    assert {release: check.text for release, check in checks.items()} == says
    assert not found("torch", checkup._Answer(["2.5.1", "[true, []]"], "")).ok


def test_one_failed_check_fails_the_report():
    well, ill = Checked("a", True, "1"), Checked("b", False, "2; do this")
    assert Checkup((well,)).ok and not Checkup((well, ill)).ok
    assert str(Checkup((well, ill))).splitlines()[1] == "!   b           2; do this"


def test_required_versions_are_those_of_pyproject():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python = ".".join(map(str, checkup.PYTHON))
    assert f'requires-python = ">={python}"' in project and f'"torch>={checkup.TORCH[0]}"' in project
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned[1] in checkup.TORCH
