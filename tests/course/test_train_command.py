"""`ppedu train` and `torchrun … -m ppedu.course.training.train`."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

import ppedu as pp
from ppedu.cli.main import main
from ppedu.course.training.data import Text
from ppedu.course.training.train import parser, prepare
from ppedu.run import GPT, TrainConfig, train_gpt

ROOT = Path(__file__).parents[2]
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


def test_the_command_trains_and_prints_the_loss_once(four):
    ended, out = four
    assert ended.returncode == 0 and ended.stderr == ""
    assert len(loss_lines(ended.stdout)) == 1 and f"saved to {out}" in ended.stdout


def test_a_plan_is_trained(four, tmp_path, capfd):
    (tmp_path / "model.toml").write_text(
        "[model]\nlayers = 4\nforward = [0.5, 2, 5]\nactivation = [0, 1e8, 0]\n[machine]\nmemory = 6e8\n"
        '[plan]\nranks = 2\nmicrobatches = 4\nschedules = ["interleaved"]\nhost_bandwidth = 1e9\nrecompute = false\n'
    )
    assert main(["plan", str(tmp_path / "model.toml"), "--save", str(tmp_path / "best.json")]) == 0
    out = tmp_path / "timeline.json"
    small = [*SMALL[:2], *SMALL[4:]]  # without the microbatches, which are the plan's
    assert main(["train", "-n", "2", *small, "--plan", str(tmp_path / "best.json"), "--out", str(out)]) == 0
    told = capfd.readouterr().out
    assert loss_lines(told) == loss_lines(four[0].stdout) and "best: interleaved, 2 chunks, offloading" in told
    moved = json.loads((tmp_path / "best.json").read_text())["offload"]
    assert moved and pp.Timeline.load(out).schedule == pp.offload(pp.schedule("interleaved", 2, 4), moved)


def test_the_command_reports_speed_and_memory(four):
    told = four[0].stdout
    assert re.search(r"^last step: [0-9,]+ tokens/s, without the optimizer$", told, re.MULTILINE)
    sizes = re.search(
        r"^memory: rank ([0-3]) is the fullest, with .*: weights ([0-9.]+) kB, gradients ([0-9.]+) kB, ", told, re.M
    )
    model = config(*SMALL).gpt(len(Text(None).characters))
    held = [sum(4 * each.numel() for each in GPT.stage(model, stage, 4).parameters()) for stage in range(4)]
    assert sizes[2] == sizes[3] == f"{held[int(sizes[1])] / 1000:.1f}"


def test_the_command_saves_the_timeline(four):
    timeline = pp.Timeline.load(four[1])
    assert timeline.schedule == pp.schedule("1f1b", 4, 4)
    assert timeline.source == "measured" and timeline.costs.unit == "s" and timeline.makespan > 0


@pytest.mark.slow  # cells start ranks with torchrun, too
def test_torchrun_gives_the_same_loss(four, tmp_path):
    out = tmp_path / "timeline.json"
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ppedu.course.training.train",
    )
    ended = command("--schedule", "gpipe", *SMALL, "--out", out, launcher=launcher)
    assert ended.returncode == 0
    assert loss_lines(ended.stdout) == loss_lines(four[0].stdout)
    assert pp.Timeline.load(out).schedule == pp.schedule("gpipe", 2, 4)


@pytest.mark.slow
def test_two_machines_train_one_pipeline_with_the_losses_of_one_process(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [*SMALL, "--schedule", "zb-v", "--out", tmp_path / "timeline.json"]
    agent = ["-m", "torch.distributed.run", "--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port]
    machines = [
        subprocess.Popen(
            map(
                str,
                [
                    sys.executable,
                    *agent,
                    "--node-rank",
                    node,
                    "-m",
                    "ppedu.course.training.train",
                    *settings,
                    "--save",
                    tmp_path,
                ],
            ),
            stderr=subprocess.DEVNULL,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    try:
        assert [machine.wait(120) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.terminate()  # if it still runs; it ends its ranks
    losses = json.loads((tmp_path / "step-3/about.json").read_text())["losses"]
    assert losses == train_gpt(config(*settings)).losses
    assert pp.Timeline.load(tmp_path / "timeline.json").schedule == pp.schedule("zb-v", 2, 4)


def config(*arguments):
    """Return the settings that a rank reads from its command line."""
    torch.set_num_threads(1)
    return prepare(parser().parse_args(list(map(str, arguments))), ranks=1)


@pytest.mark.slow  # test_checkpoint.py resumes without the command
def test_training_resumes_with_more_ranks_and_another_schedule(four, tmp_path):
    saved = ["--save", tmp_path / "saved", "--out", tmp_path / "timeline.json"]
    train_gpt(config(*SMALL, "--steps", 2, *saved))
    ended = command("-n", 2, *SMALL, "--schedule", "interleaved", "-o", "chunks=2", *saved)
    assert f"resuming after step 2, from the checkpoint in {tmp_path / 'saved'}" in ended.stdout
    assert loss_lines(ended.stdout) == loss_lines(four[0].stdout)
    assert pp.Timeline.load(tmp_path / "timeline.json").schedule == pp.schedule("interleaved", 2, 4, chunks=2)


def test_the_help_lists_every_setting(capfd):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", "--help"])
    told = capfd.readouterr().out
    names = [
        field.name for field in dataclasses.fields(TrainConfig) if field.name not in ("cut", "offload")
    ]  # a plan's alone
    for setting in ["-n", "--out", *(f"--{name}" for name in names)]:
        assert f"\n  {setting.replace('--options', '-o')} " in told
    assert "pickle" in told  # the warning to load only trusted checkpoints


REFUSED = {
    "0 ranks": (["-n", "0"], "the number of ranks must be at least 1; got 0"),
    "too many ranks": (["-n", "5"], "4 layers cannot be cut into the 5 stages that 1f1b has on 5 ranks"),
    "too many stages": (["--schedule", "zb-v", "--layers", "3"], "the 4 stages that zb-v has on 2 ranks"),
    "unequal replicas": (["--replicas", "4"], "2 ranks cannot be divided equally among 4 replicas"),
    "unknown option": (["-o", "chunks=2"], "'1f1b' takes"),
    "65 ranks": (["-n", "65", "--layers", "65"], "at most 64 ranks"),
    "unknown schedule": (["--schedule", "zigzag"], "unknown schedule 'zigzag'"),
    "no plan": (["--plan", "nowhere.json"], "cannot read 'nowhere.json': No such file or directory"),
    "not a plan": (
        ["--plan", "short.txt"],
        "'short.txt' is not a plan that `ppedu plan QUESTION.toml --save",
    ),
    "a plan and a schedule": (["--plan", "plan.json", "--schedule", "gpipe"], "leave out --schedule"),
    "a plan and what is usual": (["--plan", "plan.json", "--schedule", "1f1b"], "leave out --schedule"),
    "a plan and an option": (["--plan", "plan.json", "-o", "chunks=2"], "leave out -o"),
    "a plan with another key": (["--plan", "more.json"], "'more.json' is not a plan that `ppedu plan"),
    "checkpoints that are not saved": (["--every", "5"], "--every is for checkpoints; add --save and a folder"),
    "nodes without a job": (["--nodes", "2"], "--nodes is for --job; add --job train.sbatch, or name the hosts"),
    "a job on hosts": (["--job", "x.sbatch", "--on", "ssh:alpha"], "which chooses the hosts; leave out --on ssh:…"),
    "a job with a Python": (["--job", "x.sbatch", "--on", "slurm", "--python", "python3"], "leave out --on ssh:…"),
    "Slurm for another scheduler": (["--job", "x.yaml", "--on", "slurm: -p gpu"], "leave it out, or end --job in"),
    "a plan for other ranks": (["--plan", "plan.json", "--replicas", "2"], "is a plan for 4 ranks, replicas included"),
    "a plan for more layers": (["--plan", "plan.json", "--layers", "3"], "the stages hold 6 pieces, and 3 layers"),
    "few sequences": (["--batch", "7"], "7 sequences per pipeline cannot be cut into 8 microbatches"),
    "half": (["--dtype", "float8"], "dtype must be float32 or bfloat16 or float16"),
    "a file to save in": (["--save", "short.txt"], "cannot save in 'short.txt': File exists"),
    "no folder": (["--out", "nowhere/timeline.json"], "cannot write 'nowhere/timeline.json'"),
    "a folder": (["--out", "."], "cannot write '.'"),
    "unknown ending": (["--out", "timeline.txt"], "end it in .json"),
    "no text": (["--text", "nowhere.txt"], "cannot read the text 'nowhere.txt'"),
    "empty text": (["--text", "empty.txt"], "the text 'empty.txt' is empty"),
    "short text": (["--text", "short.txt"], "excerpts of 64 characters need a text of at least 65; this one has 5"),
    "huge seed": (["--seed", "9" * 30], "seed"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("brief")
    plan = pp.plan(pp.Model.measured([1] * 6), pp.Machine(1e9), 2, 8, schedules=["zb-v"])
    plan.best.save(tmp_path / "plan.json")
    more = json.loads((tmp_path / "plan.json").read_text()) | {"replicas": 2}
    (tmp_path / "more.json").write_text(json.dumps(more))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("settings", "says"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_setting_is_reported_in_one_line_before_any_rank_starts(settings, says, folder, monkeypatch, capfd):
    monkeypatch.setattr("ppedu.launch.pool.RankPool.start", lambda self: pytest.fail("ranks were about to be started"))
    assert main(["train", "-n", "2", "--steps", "1", *settings]) == 1
    output, told = capfd.readouterr()
    assert output == "" and told.count("\n") == 1
    assert told.startswith("ppedu: ") and says in told


SETTINGS = {
    "schedule": ["1f1b", "gpipe"],
    "steps": [50, 3],
    "microbatches": [8, 4],
    "batch": [32, 8],
    "context": [64, 16],
    "layers": [4, 5],
    "heads": [4, 2],
    "width": [64, 32],
    "lr": [3e-3, 0.1],
    "seed": [0, 1],
    "text": [__file__],
    "clip": [1.0],
    "dtype": ["float32", "bfloat16"],
    "weights": ["float32", "bfloat16"],
    "replicas": [1, 2],
    "save": ["saved"],
    "every": [10, 5],
}


@pytest.mark.parametrize("plan", [[], ["--plan", "plan.json"]], ids=["alone", "with a plan"])
def test_what_is_given_is_used_or_refused(plan, folder, monkeypatch):
    """Also if it is what is usual."""
    monkeypatch.setattr("ppedu.course.training.data.topics.topics", {"short": "to be or not to be, " * 50})
    assert {*SETTINGS, "cut", "offload", "options", "tied", "recompute"} == {
        each.name for each in dataclasses.fields(TrainConfig)
    }
    for name, values in SETTINGS.items():
        for value in values:
            with contextlib.suppress(pp.SettingError):
                found = prepare(parser().parse_args([*plan, f"--{name}", str(value)]), ranks=2)
                assert getattr(found, name) == value
    with contextlib.suppress(pp.SettingError):
        assert prepare(parser().parse_args([*plan, "--recompute"]), ranks=2).recompute
    with contextlib.suppress(pp.SettingError):
        assert prepare(parser().parse_args([*plan, "--tied"]), ranks=2).tied


def test_a_checkpoint_of_another_run_is_reported_before_any_rank_starts(folder, monkeypatch, capfd):
    monkeypatch.setattr("ppedu.launch.pool.RankPool.start", lambda self: pytest.fail("ranks were about to be started"))
    train_gpt(config(*SMALL, "--save", "saved"))
    capfd.readouterr()
    assert main(["train", "-n", "2", *SMALL, "--save", "saved", "--seed", "1"]) == 1
    output, told = capfd.readouterr()
    assert output == "" and told.count("\n") == 1
    assert told.startswith("ppedu: the checkpoint 'saved/step-3' was made with seed 0, not 1; use the same settings")


TOO_MANY = "ppedu: 4 layers cannot be cut into the 5 stages that 1f1b has on 5 ranks; take at least 5 layers\n"


def test_an_invalid_setting_ends_the_command_with_1_and_no_traceback(capfd):
    assert main(["train", "-n", "5"]) == 1
    assert capfd.readouterr() == ("", TOO_MANY)


def test_a_rank_of_torchrun_reports_an_invalid_setting_in_one_line():
    alone = {"env": os.environ | {"RANK": "0", "WORLD_SIZE": "5"}}
    ended = command(launcher=("-m", "ppedu.course.training.train"), **alone)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == TOO_MANY


@pytest.mark.parametrize(
    "arguments", [[], ["learn"], ["train", "--steps", "many"], ["train", "--wat"], ["train", "-o", "chunks"]]
)
def test_an_invalid_command_line_prints_the_usage(arguments, capfd):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert "usage: ppedu" in capfd.readouterr().err


LOSES_INTERRUPTS = """
import time

try:
    print("imported", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pass
"""


def test_an_interrupt_during_torchs_import_ends_the_command_at_once(tmp_path):
    (tmp_path / "torch.py").write_text(LOSES_INTERRUPTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "ppedu", "train"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"imported\n"
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=20), process.returncode) == ((b"", b""), 130)


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
    assert len(started) == 5 and gone(started)  # itself, what it forks from, the store, and two ranks


def test_a_training_run_is_saved_as_a_job(tmp_path, capfd):
    job = tmp_path / "train.sbatch"
    words = ["-n", 4, "--nodes", "1:2", "--job", job, "--save", tmp_path / "run", *SMALL]
    assert main(["train", *map(str, words)]) == 0
    assert capfd.readouterr() == (f"{job} written\n", "")
    last = job.read_text().splitlines()[-1]
    assert (
        "--nnodes=1:2 --nproc-per-node=2" in last and "-m ppedu.course.training.train" in last and "--job" not in last
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-n", 4, "--nodes", 3], "4 ranks do not fit on 3 nodes"),
        (["-n", 4, "--nodes", "1:2"], "--nodes 1:2 goes on from a checkpoint; add --save and a shared folder"),
        (["-n", 4, "--nodes", "two"], "'two' is not a number of nodes; write 4, or 2:4"),
    ],
)
def test_a_job_that_cannot_run_is_an_error(tmp_path, arguments, problem, capfd):
    with contextlib.suppress(SystemExit):  # of a word that is not an option
        assert main(["train", *map(str, [*arguments, "--job", tmp_path / "train.sbatch", *SMALL])]) == 1
    assert problem in capfd.readouterr().err and not list(tmp_path.iterdir())
