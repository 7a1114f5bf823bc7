"""Every command answers nonsense with one sentence or the usage, and an exit code, but never with a traceback."""

import contextlib
import io
import os
import shlex
from pathlib import Path

import pytest
from strategies import sample

from ppedu.cli import main as command

VALUES = [
    *["", " ", "-1", "0", "2", "1.5", "1e9", "nan", "inf", "1/0", "9" * 30, "0x10", "½", "٣", "1_000", "None", "True"],
    *["-", "--", "-o", "[1]", "{}", "1,2", "a\nb", "%s", "{0}", "~", "'", "\udcff", "x" * 300, "x" * 5000],
    *["1f1b", "interleaved", "dualpipe", "good.csv", "bad.csv", "bytes.csv", "folder.csv", "nowhere.csv", "\udcff.csv"],
    *[".", "folder.csv/x.svg", "nowhere/x.svg", "good.csv/x.json", "x.svg", "x.json", "x" * 300 + ".svg", "\udcff.svg"],
    *["v", "bidirectional", "early", "chunks=0", "chunks=1/2", "chunks=None", "group=-1", "lifo=True", "=1", "ranks=1"],
]
SCHEDULE = ["-r", "-m", "-o", "--placement", *(f"--{name}" for name in command.COSTS)]
TRAIN = "schedule microbatches replicas layers heads width context steps batch lr clip dtype seed text save every out"
OPTIONS = {
    "list": [],
    "draw 1f1b": [*SCHEDULE, "--save"],
    "simulate 1f1b": SCHEDULE,
    "export 1f1b": [*SCHEDULE, "--lower", "--save"],
    "lessons --no-open": [],
    "lessons": ["--lab"],
    "train --text short.txt": ["-n", "-o", *(f"--{name}" for name in TRAIN.split())],
}
PLACES = [("", ""), *((f"{start} ", "") for start in ("draw", "simulate", "export"))]
PLACES += [(f"{start} ", option) for start, options in OPTIONS.items() for option in ["", *options]]


class Accepted(Exception):
    """Raised instead of starting ranks or JupyterLab."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"good.csv": b"0F0,0B0\n", "bad.csv": b"0F0,0F1,0B1\n1F0,,x\n", "bytes.csv": bytes(range(256))}
    for name, contents in {**files, "short.txt": b"to be or not to be, " * 10}.items():
        Path(name).write_bytes(contents)
    Path("folder.csv").mkdir()

    def start(*_, **__):
        raise Accepted

    monkeypatch.setattr("ppedu.launch.pool.RankPool.run", start)
    monkeypatch.setattr(os, "execv", start)


@pytest.mark.parametrize(("start", "option"), PLACES)
def test_nonsense_prints_one_sentence_or_the_usage(start, option):
    for value in sample(VALUES, PLACES.index((start, option))):
        words = start.split()
        words += [f"{option}={value}"] if len(option) > 2 else [option, value] if option else [value]
        output, told = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace"), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(told):
            try:
                code = command.main(words)
            except SystemExit as end:
                code = end.code
            except Accepted:
                continue
        line, error = shlex.join(words), told.getvalue()
        if code == 2:
            assert error.startswith("usage: ppedu"), line
        elif code == 1:
            assert error.startswith("ppedu: "), line
            assert error.count("\n") == 1 or " is not legal:\n" in error, line
        else:
            assert (code, error) == (0, ""), line
