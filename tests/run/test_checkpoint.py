"""Checkpoints: training that was killed resumes with the same losses, on any ranks, with any schedule."""

import functools
import json
import random
import socket

import pytest
import torch
from torch.distributed import checkpoint

import ppedu as pp
from ppedu.run import GPT, TrainConfig, next_token_loss, train_gpt
from ppedu.run.checkpoint import Checkpoints
from ppedu.run.data import Text

SMALL = {
    "steps": 6,
    "batch": 8,
    "microbatches": 4,
    "context": 8,
    "layers": 4,
    "heads": 2,
    "width": 16,
    "lr": 1e-2,
    "text": pp.core.check.__file__,  # one that is at hand, and short
    "every": 2,
}

# Trains. A rank may kill itself when it is about to compute, or to touch a checkpoint's files, for the so-many-th time.
PROGRAM = """
import json, os, signal, sys
import torch.distributed as dist
from ppedu import PipelineError
from ppedu.run import Stage
from ppedu.run.train import TrainConfig, train_gpt

settings, killed, what, turn = json.loads(sys.argv[1])
turns = {"forward": 0, "files": 0}

def take_turn(kind):
    turns[kind] += 1
    if (int(os.environ["RANK"]), kind, turns[kind]) == (killed, what, turn):
        os.kill(os.getpid(), signal.SIGKILL)

def watch(event, arguments):
    names = (settings["save"], ".distcp", ".metadata", "about.json")
    if event.startswith(("open", "os.", "shutil.")) and any(name in str(arguments[:1]) for name in names):
        take_turn("files")

def forward(*arguments, forward=Stage.forward):
    take_turn("forward")
    return forward(*arguments)

sys.addaudithook(watch)
Stage.forward = forward
dist.init_process_group("gloo")
try:
    print(json.dumps([train_gpt(TrainConfig(**settings)).losses, turns]))
except PipelineError as error:
    print(json.dumps([str(error), turns]))
dist.barrier()
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def texts(folder, monkeypatch):
    """Three texts in the working directory; the second has the characters of the first, the third has others."""
    folder.parent.joinpath("text.txt").write_text("abcdefgh x" * 20)
    folder.parent.joinpath("again.txt").write_text("x hgfedcba" * 20)
    folder.parent.joinpath("other.txt").write_text("abcdefgh é" * 20)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setitem(SMALL, "text", "text.txt")


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def train(ranks, folder):
    """`train(size, **settings)` returns each rank's losses or error. killed: a rank, before which call, which time."""

    def run(size, killed=(-1, "", 0), **settings):
        job = json.dumps([SMALL | {"save": str(folder)} | settings, *killed])
        output = [json.loads(text.splitlines()[-1]) for text in ranks(PROGRAM, size, job)]
        run.turns = [turns for _, turns in output]
        return [losses for losses, _ in output]

    return run


@pytest.fixture(scope="module")
def plain():
    """The same training and its final state, written with torch alone."""

    @functools.cache
    def run(tied=False):
        torch.set_num_threads(1)
        config = TrainConfig(**SMALL, tied=tied)
        text, losses = Text(config.text), []
        model = GPT(config.gpt(len(text.characters)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        for step in range(config.steps):
            inputs, targets = text.batch(config.batch, config.context, seed=step)
            total = torch.zeros(())
            for x, y in zip(inputs.split(2), targets.split(2), strict=True):
                loss = next_token_loss(model(x), y) / 4
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
        return losses, model, optimizer

    return run


chosen = random.Random(4)
# The first rank touches files 12 times up to the first checkpoint and 16 times for each further one, the other twice.
ANYWHERE = [(0, "files", turn) for turn in range(1, 29)] + [(1, "files", turn) for turn in range(1, 5)]
SOME = [(chosen.randrange(2), "forward", chosen.randrange(9, 25)), (0, "files", 19)]


@pytest.mark.parametrize(
    "killed", [*SOME, *(pytest.param(each, marks=pytest.mark.slow) for each in ANYWHERE if each not in SOME)], ids=str
)
def test_training_resumes_after_a_kill_with_the_same_losses(train, plain, folder, killed):
    with pytest.raises(pp.core.errors.RankError, match=f"rank {killed[0]} was killed by SIGKILL"):
        train(2, killed)
    assert train(2, every=3) == [plain()[0]] * 2
    assert contents(folder) == ["lock", "step-6"]


def test_a_checkpoint_of_four_ranks_resumes_on_other_ranks_with_another_schedule(train, plain, folder):
    losses, model, optimizer = plain()
    assert train(4, schedule="1f1b", steps=2) == [losses[:2]] * 4
    assert train(2, schedule="zb-v", steps=4) == [losses[:4]] * 2
    assert train(1, schedule="gpipe") == [losses]

    # torch itself reads the whole model and its optimizer from the folder.
    expected = model.state_dict() | {
        f"optimizer.{name}.{part}": value
        for name, weight in model.named_parameters()
        for part, value in optimizer.state[weight].items()
    }
    found = {name: torch.empty_like(value) for name, value in expected.items()}
    path = folder / "step-6"
    assert set(checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata) == set(expected)
    with pytest.warns(UserWarning, match="in a single process"):
        checkpoint.load(found, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_tied_weights_and_two_copies_are_saved_once(train, plain):
    expected = plain(tied=True)[0]
    train(2, schedule="dualpipe", tied=True, steps=2)
    train(2, schedule="dualpipev", tied=True, steps=4)
    train(2, replicas=2, tied=True, steps=5)
    assert train(1, tied=True) == [pytest.approx(expected, rel=1e-5)]


def test_a_damaged_checkpoint_is_reported_in_one_line_on_every_rank(train, folder):
    train(2, steps=2)
    for file in ("__1_0.distcp", "about.json"):
        (folder / "step-2" / file).write_bytes(b"")
        for told in train(2):
            assert told.startswith(f"cannot read the checkpoint '{folder / 'step-2'}'") and told.count("\n") == 0


def test_a_checkpoint_without_a_loss_for_each_step_is_damaged(folder):
    alone(folder)
    file = folder / "step-2" / "about.json"
    for value in "abc", [0.5], [0.5, "a"], {"a": 1, "b": 2}, None, 2:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"losses": value}))
        with pytest.raises(
            pp.PipelineError, match=r"cannot read the checkpoint .*the losses in about.json are not 2 numbers"
        ):
            alone(folder, steps=3)


# Two runs, one on each rank: the first is kept in the middle of its training until the second has tried to begin.
TWO_RUNS = """
import json, os, sys, time
from pathlib import Path
import ppedu as pp
from ppedu.run.train import TrainConfig, train_gpt

rank = os.environ.pop("RANK")
del os.environ["WORLD_SIZE"]  # each trains alone
config = TrainConfig(**json.loads(sys.argv[1]))
began, tried = (Path(config.save).with_name(name) for name in ("began", "tried"))

def wait(file):
    while not file.exists():
        time.sleep(0.01)

if rank == "0":
    result = train_gpt(config, each=lambda _: (began.touch(), wait(tried)))
    print(json.dumps([os.getpid(), result.losses]))
else:
    wait(began)
    try:
        print(json.dumps(train_gpt(config).losses))
    except pp.PipelineError as error:
        print(json.dumps(str(error)))
    tried.touch()
"""


def test_a_second_run_cannot_use_the_folder_until_the_first_has_ended(ranks, folder, plain):
    output = ranks(TWO_RUNS, 2, json.dumps(SMALL | {"save": str(folder)}))
    (process, losses), told = map(json.loads, output)
    assert losses == plain()[0]
    first = f"another run (process {process} on {socket.gethostname()}) is saving in '{folder}'"
    assert told == f"{first}; wait until it ends, or save in another folder"
    assert alone(folder, steps=6).losses == losses


def alone(folder, **settings):
    """Training in this process."""
    torch.set_num_threads(1)
    return train_gpt(TrainConfig(**SMALL | {"save": str(folder), "steps": 2} | settings))


OTHERS = [
    ({"layers": 6}, "was made with layers 4, not 6; use the same settings, or save in another folder"),
    ({"heads": 4}, "heads 2, not 4"),  # whose weights look the same
    ({"tied": True, "width": 8}, "width 16, not 8 and tied False, not True"),
    ({"context": 4}, "context 8, not 4"),
    ({"seed": 3}, "seed 0, not 3"),
    ({"text": "other.txt"}, r"characters \['x'\], not \['é'\]; use"),  # as many of them
]


def test_a_checkpoint_of_another_model_seed_or_alphabet_is_refused(folder, texts):
    alone(folder)
    for settings, says in OTHERS:
        with pytest.raises(pp.PipelineError, match=says):
            alone(folder, **settings)


FREE = {
    "lr": 1e-3,
    "text": "again.txt",
    "steps": 3,
    "batch": 9,
    "microbatches": 3,
    "clip": 0.5,
    "dtype": "bfloat16",
    "every": 1,
    "schedule": "interleaved",
    "options": {"chunks": 1},
}


def test_settings_that_are_not_part_of_the_model_may_change_between_runs(folder, texts):
    losses = alone(folder).losses
    assert alone(folder, **FREE).losses[:2] == losses


def test_a_finished_training_does_not_run_again(folder, capsys):
    first, again = alone(folder), alone(folder)
    assert again.losses == first.losses and (first.timeline is None, again.timeline is None) == (False, True)
    assert capsys.readouterr().err == f"resuming after step 2, from the checkpoint in {folder}\n"


def test_a_later_checkpoint_is_not_overwritten(folder):
    pipeline = alone(folder).pipeline
    modules = [stage.module for stage in pipeline.stages.values()]
    checkpoints = Checkpoints(folder, modules, torch.optim.AdamW(modules[0].parameters()), model={})
    with pytest.raises(pp.PipelineError, match=f"cannot save step 1 in '{folder}', which holds a checkpoint of step 2"):
        checkpoints.save([0.5])
    assert contents(folder) == ["lock", "step-2"]


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(pp.PipelineError, match=r"cannot save in '.*file/saved'"):
        alone(tmp_path / "file" / "saved")
