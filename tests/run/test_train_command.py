"""`python -m ppedu train` and `torchrun … -m ppedu.run.train`."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import uuid

import pytest

import ppedu as pp
from ppedu.__main__ import main
from ppedu.notebook.pool import RankPool
from ppedu.run import TrainConfig

SMALL = ["--steps", "3", "--microbatches", "4", "--batch", "8", "--context", "16", "--heads", "2", "--width", "16"]


def command(*arguments, launcher=("-m", "ppedu", "train"), **options):
    return subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    out = tmp_path_factory.mktemp("four") / "timeline.json"
    return command("--schedule", "1f1b", "-n", 4, *SMALL, "--out", out), out


def loss_lines(text):
    return re.findall(r"^loss \d\.\d\d\d → \d\.\d\d\d$", text, re.MULTILINE)


def test_the_command_trains_and_says_the_loss_once(four):
    ended, out = four
    assert ended.returncode == 0 and ended.stderr == ""
    assert len(loss_lines(ended.stdout)) == 1 and f"saved to {out}" in ended.stdout


def test_the_command_saves_the_timeline(four):
    timeline = pp.Timeline.load(four[1])
    assert timeline.schedule == pp.schedule("1f1b", 4, 4)
    assert timeline.source == "measured" and timeline.costs.unit == "s" and timeline.makespan > 0


def test_torchrun_gives_the_same_loss(four, tmp_path):
    out = tmp_path / "timeline.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ppedu.run.train")
    ended = command("--schedule", "gpipe", *SMALL, "--out", out, launcher=launcher)
    assert ended.returncode == 0
    assert loss_lines(ended.stdout) == loss_lines(four[0].stdout)
    assert pp.Timeline.load(out).schedule == pp.schedule("gpipe", 2, 4)


def test_the_help_lists_every_setting(capfd):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", "--help"])
    told = capfd.readouterr().out
    for setting in ["-n", "--out", *(f"--{field.name}" for field in dataclasses.fields(TrainConfig))]:
        assert f"\n  {setting} " in told


REFUSED = {
    "0 ranks": (["-n", "0"], "the number of ranks must be at least 1; got 0"),
    "too many ranks": (["-n", "5"], "4 layers cannot be cut into 5 stages"),
    "65 ranks": (["-n", "65", "--layers", "65"], "at most 64 ranks"),
    "unknown schedule": (["--schedule", "zigzag"], "no loop for the schedule 'zigzag'"),
    "unequal microbatches": (["--batch", "9"], "take a batch that is a multiple of 8"),
    "no folder": (["--out", "nowhere/timeline.json"], "cannot write 'nowhere/timeline.json'"),
    "a folder": (["--out", "."], "cannot write '.'"),
    "unknown ending": (["--out", "timeline.txt"], "end it in .json"),
    "no text": (["--text", "nowhere.txt"], "cannot read the text 'nowhere.txt'"),
    "empty text": (["--text", "empty.txt"], "the text 'empty.txt' is empty"),
    "short text": (["--text", "short.txt"], "the text has 5 characters; excerpts of 64 need at least 65"),
    "huge seed": (["--seed", "9" * 30], "seed"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("brief")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("settings", "says"), REFUSED.values(), ids=REFUSED)
def test_a_bad_setting_is_told_in_one_line_before_any_rank_is_started(settings, says, folder, monkeypatch, capfd):
    monkeypatch.setattr(RankPool, "start", lambda self: pytest.fail("ranks were about to be started"))
    assert main(["train", "-n", "2", "--steps", "1", *settings]) == 1
    output, told = capfd.readouterr()
    assert output == "" and told.count("\n") == 1
    assert told.startswith("ppedu: ") and says in told


def test_a_bad_setting_ends_the_command_with_1_and_no_traceback():
    ended = command("-n", 5)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "ppedu: 4 layers cannot be cut into 5 stages; take at most 4 stages, or more layers\n"


def test_a_rank_of_torchrun_tells_a_bad_setting_in_one_line_too():
    alone = {"env": os.environ | {"RANK": "0", "WORLD_SIZE": "5"}}
    ended = command(launcher=("-m", "ppedu.run.train"), **alone)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "ppedu: 4 layers cannot be cut into 5 stages; take at most 4 stages, or more layers\n"


@pytest.mark.parametrize("arguments", [[], ["learn"], ["train", "--steps", "many"], ["train", "--wat"]])
def test_a_command_line_that_is_not_one_gets_the_usage(arguments, capfd):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert "usage: python -m ppedu" in capfd.readouterr().err


def test_an_interrupt_ends_the_command_and_its_ranks(tmp_path, marked, gone):
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "ppedu", "train", "-n", "2", "--steps", "100000", "--out", tmp_path / "timeline.json"],
        env=os.environ | {"PPEDU_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert b"training" in process.stdout.read(20)  # they have started
    started = marked(mark)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, b"")
    assert len(started) == 4 and gone(started)  # itself, what it forks from, and two ranks
